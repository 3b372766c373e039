"""Blocks in a lossy form: through movers and a store, in fewer bytes, and never taken for exact ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import kvtide
from kvtide.engines.paged import Copy, HostMover, Pages, mover
from kvtide.engines.paged.lossy import FORMS
from kvtide.errors import LayoutError

DEVICES = pytest.mark.parametrize(
    "device",
    [
        torch.device("cpu"),
        pytest.param(
            torch.device("cuda"),
            marks=pytest.mark.skipif(
                not torch.cuda.is_available(), reason="this machine has no GPU that torch can use"
            ),
        ),
    ],
)
NAMES = pytest.mark.parametrize("name", FORMS)
PAGES = [5, 6, 2, 9, 0, 1, 3, 11]
LAYERS, HEADS, TOKENS, DIM = 3, 4, 4, 32


def layout_of(packing: str, dtype: str = "bfloat16") -> kvtide.Layout:
    full = kvtide.Group("full", kvtide.Kind.FULL, LAYERS, HEADS, DIM, dtype, page=TOKENS, packing=packing)
    return kvtide.Layout((full,), TOKENS * len(PAGES))


def engine(device: torch.device, seed: int | None = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """KV as an engine has it, ``[layer, K|V, page, token, head, dim]``; without a seed, empty."""
    shape = LAYERS, 2, 12, TOKENS, HEADS, DIM
    if seed is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def pages_of(kv: Tensor, layout: kvtide.Layout, share: kvtide.block.Slice | None = None) -> Pages:
    heads = kv if share is None else kv[..., share.start : share.stop, :]
    return Pages.of(layout, "full", [heads], "l k p t h d", share)


def through(name: str, kv: Tensor) -> Tensor:
    """What the form makes of those pages, by itself."""
    keys, values = kv[:, :, PAGES].cpu().permute(1, 0, 4, 2, 3, 5).flatten(3, 4)  # [K|V, layer, head, token, dim]
    stored = torch.empty(LAYERS, HEADS, layout_of(name).groups[0].head_bytes(keys.shape[2]), dtype=torch.uint8)
    FORMS[name].encode(keys, values, stored)
    back = torch.empty_like(keys), torch.empty_like(values)
    FORMS[name].decode(stored, *back)
    found = torch.zeros_like(kv, device="cpu")
    found[:, :, PAGES] = torch.stack(back).unflatten(3, (len(PAGES), TOKENS)).permute(1, 0, 3, 4, 2, 5)
    return found


def near(found: Tensor, wanted: Tensor, device: torch.device) -> bool:
    """Equal; on a GPU a number between two steps may have become the other one."""
    if device.type == "cpu":
        return torch.equal(found, wanted)
    return bool((found.cpu() != wanted).float().mean() < 0.02)


def slot(layout: kvtide.Layout) -> memoryview:
    return memoryview(bytearray(layout.geometry["full"].footprint))


@NAMES
@DEVICES
def test_through_a_store_and_its_disk_comes_what_the_form_makes_of_it(
    name: str, device: torch.device, tmp_path: Path
) -> None:
    layout, kv = layout_of(name), engine(device)
    model, prompt = kvtide.Model(layout, "given:test", fidelity=name), np.arange(layout.block_tokens, dtype=np.uint32)
    settings = {"path": tmp_path, "budget": "64MiB", "segment": "16MiB", "store": "through", "codec": "zstd"}
    moves = mover(device)
    with kvtide.open(dram={"budget": "16MiB", "segment": "4MiB"}, nvme=settings) as store:
        with store.session(model).reserve(prompt) as slots:
            moves.store(pages_of(kv, layout), [Copy(slots.views[0], PAGES)]).wait()
            slots.seal()
        store.flush()
    with kvtide.open(dram={"budget": "16MiB", "segment": "4MiB"}, nvme=settings) as store:
        session, empty = store.session(model), engine(device, None)
        with session.match(prompt) as match:
            assert match.tokens == layout.block_tokens
            loaded = session.load(match).wait()
            moves.load(pages_of(empty, layout), [Copy(loaded.blocks[0], PAGES)]).wait()
        exact = kvtide.Model(layout_of("plain"), "given:test")
        assert store.session(exact).match(prompt).tokens == 0, "it never answers an exact request"
    moves.close()
    assert near(empty.cpu(), through(name, kv), device)


@NAMES
@DEVICES
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_write_and_read_their_own_heads(name: str, device: torch.device, ranks: int) -> None:
    layout, kv, empty = layout_of(name), engine(device), engine(device, None)
    block, moves = slot(layout), mover(device)
    for rank in range(ranks):
        share = layout.groups[0].share(rank, ranks)
        if share.rank == rank:
            moves.store(pages_of(kv, layout, share), [Copy(block, PAGES)]).wait()
    for rank in range(ranks):
        moves.load(pages_of(empty, layout, layout.groups[0].share(rank, ranks)), [Copy(block, PAGES)]).wait()
    moves.close()
    assert near(empty.cpu(), through(name, kv), device)


@NAMES
@DEVICES
@pytest.mark.parametrize(("at", "count"), [(0, 3), (5, 3), (2, 1), (4, 0)])
def test_a_load_may_begin_and_end_inside_a_block(name: str, device: torch.device, at: int, count: int) -> None:
    layout, kv, empty = layout_of(name), engine(device), engine(device, None)
    block, moves = slot(layout), mover(device)
    moves.store(pages_of(kv, layout), [Copy(block, PAGES)]).wait()
    moves.load(pages_of(empty, layout), [Copy(block, PAGES[at : at + count], at)]).wait()
    moves.close()
    wanted, others = through(name, kv), [p for p in range(12) if p not in PAGES[at : at + count]]
    wanted[:, :, others] = 0
    assert near(empty.cpu(), wanted, device)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_pages_of_another_size_read_the_same_block(dtype: str) -> None:
    """An engine with other pages, and of any dtype that forms take."""
    layout, host = layout_of("k8v4", dtype), HostMover()
    kv, block = engine(torch.device("cpu"), dtype=getattr(torch, dtype)), slot(layout)
    host.store(pages_of(kv, layout), [Copy(block, PAGES)])
    small, large = torch.zeros_like(kv), torch.zeros(LAYERS, 2, 2, 16, HEADS, DIM, dtype=kv.dtype)
    host.load(pages_of(small, layout), [Copy(block, range(8))])
    host.load(pages_of(large, layout), [Copy(block, range(2))])
    assert torch.equal(small[:, :, :8].flatten(2, 3), large.flatten(2, 3))
    assert (small[:, :, :8] - kv[:, :, PAGES]).abs().max() < 0.5


def test_what_cannot_be_coded_is_said() -> None:
    layout, kv, host = layout_of("r4"), engine(torch.device("cpu")), HostMover()
    with pytest.raises(LayoutError, match="a block in form 'r4' is stored whole: give all its 8 pages"):
        host.store(pages_of(kv, layout), [Copy(slot(layout), PAGES[:7])])
    packed = Pages.of(layout, "full", [kv], "l k p t h d", packing="amx")
    for move in (host.store, host.load):
        with pytest.raises(LayoutError, match="'r4' cannot be read into pages of 'amx'"):
            move(packed, [])
    with pytest.raises(LayoutError, match="has 6 sections"):
        Pages.of(layout, "full", [kv[:, :1]], "l k p t h d")


def test_a_lossy_block_is_another_block_than_an_exact_one() -> None:
    models = [kvtide.Model(layout_of("plain"), "given:test")]
    models += [kvtide.Model(layout_of(name), "given:test", fidelity=name) for name in FORMS]
    models += [replace(models[0], fidelity="r4")]
    assert len({model.namespace() for model in models}) == len(models)
