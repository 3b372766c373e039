"""Pages of any engine become the same blocks, and blocks the same pages, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtide
from kvtide.block import DTYPES, Slice
from kvtide.engines.paged import packing
from kvtide.engines.paged.choose_mover import mover
from kvtide.engines.paged.mover import HostMover
from kvtide.engines.paged.pages import WORDS, Copy, Pages, runs
from kvtide.errors import LayoutError

MOVERS = [
    torch.device("cpu"),
    pytest.param(
        torch.device("cuda"),
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU that torch can use"),
    ),
]


def layout_of(
    dtype: str = "bfloat16", layers: int = 2, heads: int = 2, dim: int = 8, block: int = 32, page: int = 4, **more: str
) -> kvtide.Layout:
    group = kvtide.Group("full", kvtide.Kind.FULL, layers, heads, dim, dtype, page=page, **more)  # type: ignore[arg-type]
    return kvtide.Layout((group,), block)


def random_words(*shape: int, dtype: str, seed: int = 0) -> torch.Tensor:
    """Random bits as ``dtype``: NaNs of all kinds among them."""
    rng = np.random.default_rng(seed)
    nbytes = int(np.prod(shape)) * DTYPES[dtype]
    return torch.from_numpy(rng.integers(0, 256, nbytes, np.uint8)).view(getattr(torch, dtype)).reshape(shape)


def bits(tensor: torch.Tensor) -> npt.NDArray[np.int64]:
    """The bits of a tensor, as numbers."""
    found = tensor.contiguous().view(WORDS[tensor.element_size()]).cpu().numpy()
    return found.astype(np.int64)


def expected(layout: kvtide.Layout, sections: Sequence[torch.Tensor], pages: Sequence[int]) -> npt.NDArray[np.int64]:
    """A block in canonical order, ``[section, head, token, dim]``, built token by token."""
    found = []
    for section in sections:
        tokens = [section[page, :, token] for page in pages for token in range(section.shape[2])]
        found.append(torch.stack(tokens, 1))
    return bits(torch.stack(found))


def slot(layout: kvtide.Layout, fill: int = 0) -> memoryview:
    return memoryview(bytearray([fill]) * layout.geometry["full"].footprint)


def contents(layout: kvtide.Layout, block: memoryview) -> npt.NDArray[np.int64]:
    geometry, group = layout.geometry["full"], layout.groups[0]
    rows = np.frombuffer(block, np.uint8).reshape(geometry.sections, geometry.stride)[:, : geometry.section]
    words = torch.from_numpy(rows.copy()).view(WORDS[DTYPES[group.dtype]])
    return words.numpy().astype(np.int64).reshape(geometry.sections, group.heads, layout.block_tokens, group.head_dim)


ORDERS = [" ".join(order) for order in itertools.permutations("lkptd") if order[-1] == "d"]
SIZES = {"l": 2, "k": 2, "p": 40, "t": 4, "h": 2, "d": 8}


@st.composite
def engines(draw: st.DrawFn, dtype: str) -> tuple[list[torch.Tensor], str]:
    """Tensors of an engine: any order of axes, layers in one tensor or apart, K and V too, dims innermost or not."""
    together = draw(st.sampled_from(["lk", "k", ""]))
    axes = draw(st.permutations([*together, *"phtd"]))
    count = {"lk": 1, "k": SIZES["l"], "": SIZES["l"] * SIZES["k"]}[together]
    shape = [SIZES[a] for a in axes]
    seed = draw(st.integers(0, 100))
    return [random_words(*shape, dtype=dtype, seed=seed + i) for i in range(count)], " ".join(axes)


@pytest.mark.parametrize("device", MOVERS)
@settings(deadline=None)  # the first on a GPU compiles its kernel
@given(st.data())
def test_pages_and_blocks_are_the_same_bits(device: torch.device, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(sorted(DTYPES)))
    layout = layout_of(dtype)
    tensors, axes = data.draw(engines(dtype))
    ours = Pages.of(layout, "full", [t.to(device) for t in tensors], axes)
    order = data.draw(st.permutations(range(40)))
    numbers = [order[:8], order[8:16], list(range(16, 24))]
    blocks = [slot(layout) for _ in numbers]
    with_mover = mover(device)
    with_mover.store(ours, [Copy(b, n) for b, n in zip(blocks, numbers, strict=True)]).wait()
    for block, pages in zip(blocks, numbers, strict=True):
        assert (contents(layout, block) == expected(layout, _sections(ours, dtype), pages)).all()
    others, axes = data.draw(engines(dtype))
    theirs = Pages.of(layout, "full", [t.to(device) for t in others], axes)
    back = data.draw(st.permutations(range(40)))
    with_mover.load(theirs, [Copy(b.toreadonly(), back[8 * i : 8 * i + 8]) for i, b in enumerate(blocks)]).wait()
    for i, pages in enumerate(numbers):
        one = expected(layout, _sections(theirs, dtype), back[8 * i : 8 * i + 8])
        assert (one == expected(layout, _sections(ours, dtype), pages)).all()
    with_mover.close()


def _sections(pages: Pages, dtype: str) -> list[torch.Tensor]:
    return [s.view(getattr(torch, dtype)) for s in pages.sections]


@pytest.mark.parametrize("device", MOVERS)
@pytest.mark.parametrize(("heads", "ranks"), [(4, 1), (4, 2), (4, 4), (2, 4)])
def test_ranks_write_one_block_together(device: torch.device, heads: int, ranks: int) -> None:
    """Also with padding between sections, and with more ranks than heads."""
    layout = layout_of(heads=heads, dim=24)
    group = layout.groups[0]
    model = random_words(4, 8, heads, 4, 24, dtype="bfloat16")
    block, with_mover = slot(layout), mover(device)
    for rank in range(ranks):
        share = group.share(rank, ranks)
        mine = Pages(layout, "full", [s[:, share.start : share.stop].to(device) for s in model], share)
        if share.rank == rank:
            with_mover.store(mine, [Copy(block, range(8))]).wait()
    assert (contents(layout, block) == expected(layout, list(model), range(8))).all()
    for rank in range(ranks):
        share = group.share(rank, ranks)
        empty = [torch.zeros(8, share.stop - share.start, 4, 24, dtype=torch.bfloat16, device=device) for _ in range(4)]
        with_mover.load(Pages(layout, "full", empty, share), [Copy(block, range(8))]).wait()
        assert all((bits(a) == bits(b[:, share.start : share.stop])).all() for a, b in zip(empty, model, strict=True))
    with_mover.close()


@pytest.mark.parametrize("device", MOVERS)
@settings(deadline=None)
@given(at=st.integers(0, 7), count=st.integers(0, 8))
def test_a_part_of_a_block_leaves_the_rest_alone(device: torch.device, at: int, count: int) -> None:
    count = min(count, 8 - at)
    layout = layout_of(dim=24)
    pages = Pages(layout, "full", list(random_words(4, 8, 2, 4, 24, dtype="bfloat16").to(device)))
    block, with_mover = slot(layout, fill=7), mover(device)
    with_mover.store(pages, [Copy(block, range(count), at)]).wait()
    found, first, stop = contents(layout, block), at * 4, (at + count) * 4
    assert (
        found[:, :, first:stop] == expected(layout, _sections(pages, "bfloat16"), range(8))[:, :, : count * 4]
    ).all()
    assert (found[:, :, :first] == 0x0707).all()
    assert (found[:, :, stop:] == 0x0707).all()
    into = Pages(layout, "full", list(torch.zeros(4, 8, 2, 4, 24, dtype=torch.bfloat16, device=device)))
    with_mover.load(into, [Copy(block, range(count), at)]).wait()
    for a, b in zip(into.sections, pages.sections, strict=True):
        assert (a[:count] == b[:count]).all()
        assert not a[count:].any()
    with_mover.close()


def test_a_page_may_be_larger_than_the_layouts() -> None:
    """Plain blocks do not show which page size wrote them."""
    layout, words = layout_of(page=4), random_words(4, 2, 2, 16, 8, dtype="bfloat16")
    block = slot(layout)
    HostMover().store(Pages(layout, "full", list(words)), [Copy(block, [1, 0])])
    small = Pages(layout, "full", [torch.zeros(8, 2, 4, 8, dtype=torch.bfloat16) for _ in range(4)])
    HostMover().load(small, [Copy(block, range(8))])
    one = expected(layout, list(words), [1, 0])
    assert (expected(layout, _sections(small, "bfloat16"), range(8)) == one).all()


@pytest.mark.parametrize("kind", [kvtide.Kind.MLA, kvtide.Kind.STATE])
def test_latents_and_states_have_one_section_per_layer(kind: kvtide.Kind) -> None:
    layout = kvtide.Layout((kvtide.Group("full", kind, 3, 1, 16, "float32", page=4),), 8)
    tokens, axes = (4, "p t d") if kind is kvtide.Kind.MLA else (1, "p t d")
    caches = [random_words(6, tokens, 16, dtype="float32", seed=i) for i in range(3)]
    pages = Pages.of(layout, "full", caches, axes)
    block, numbers = slot(layout), [5, 2][: pages.each]
    HostMover().store(pages, [Copy(block, numbers)])
    into = [torch.zeros(6, tokens, 16) for _ in range(3)]
    HostMover().load(Pages.of(layout, "full", into, axes), [Copy(block, numbers)])
    for before, after in zip(caches, into, strict=True):
        assert (bits(before[numbers]) == bits(after[numbers])).all()


# -- packings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [False, True])
def test_packings_are_what_the_engine_makes(value: bool) -> None:
    """By element, from the descriptions of vLLM's attention for CPUs."""
    tokens, dim = 32, 32
    plain = torch.arange(tokens * dim).reshape(tokens, dim)
    vec, amx, bfmmla = (packing.pack(plain, name, value).flatten() for name in ("vec", "amx", "bfmmla"))
    for n, d in [(0, 0), (1, 0), (0, 1), (17, 3), (31, 31), (5, 20)]:
        at = {
            ("vec", False): d * tokens + n,
            ("vec", True): n * dim + d,
            ("amx", False): ((n // 16 * (dim // 2) + d // 2) * 16 + n % 16) * 2 + d % 2,
            ("amx", True): ((d // 16 * (tokens // 2) + n // 2) * 16 + d % 16) * 2 + n % 2,
            ("bfmmla", False): ((n // 8 * (dim // 4) + d // 4) * 8 + n % 8) * 4 + d % 4,
            ("bfmmla", True): ((d // 8 * (tokens // 4) + n // 4) * 8 + d % 8) * 4 + n % 4,
        }
        assert vec[at["vec", value]] == plain[n, d]
        assert amx[at["amx", value]] == plain[n, d]
        assert bfmmla[at["bfmmla", value]] == plain[n, d]


@pytest.mark.parametrize("device", MOVERS)
@pytest.mark.parametrize("writer", ["plain", "vec", "amx", "bfmmla"])
@pytest.mark.parametrize("reader", ["plain", "vec", "amx", "bfmmla"])
def test_a_reader_with_another_packing_converts(device: torch.device, writer: str, reader: str) -> None:
    """A block of two packed pages, read whole and from its second page on."""
    layout = layout_of(dim=32, block=64, page=32, packing=writer)
    plain = random_words(4, 2, 2, 32, 32, dtype="bfloat16")
    kinds = [False, True] * 2
    with_mover, block = mover(device), slot(layout)
    packed = [packing.pack(s, writer, v).to(device) for s, v in zip(plain, kinds, strict=True)]
    with_mover.store(Pages(layout, "full", packed), [Copy(block, [0, 1])]).wait()
    into = [torch.zeros(4, 2, 32, 32, dtype=torch.bfloat16, device=device) for _ in kinds]
    pages = Pages(layout, "full", into, packing=reader)
    with_mover.load(pages, [Copy(block, [3, 1]), Copy(block, [0], at=1)]).wait()
    for found, true, value in zip(into, plain, kinds, strict=True):
        shown = packing.unpack(found.cpu(), reader, value)
        assert (bits(shown[[3, 1, 0]]) == bits(true[[0, 1, 1]])).all()
    with_mover.close()


def test_an_unknown_packing_is_read_by_its_own_kind_alone() -> None:
    layout = layout_of(packing="vllm-9-rvv")
    words = list(random_words(4, 8, 2, 4, 8, dtype="bfloat16"))
    block = slot(layout)
    HostMover().store(Pages(layout, "full", words), [Copy(block, range(8))])
    HostMover().load(Pages(layout, "full", [w.clone() for w in words]), [Copy(block, range(8))])
    with pytest.raises(LayoutError, match="as a miss"):
        HostMover().load(Pages(layout, "full", words, packing="plain"), [Copy(block, range(8))])


def test_packed_pages_are_of_the_layouts_size() -> None:
    """Atoms of 8 tokens are not two of 4, and would be read as such."""
    words = list(random_words(4, 4, 2, 8, 8, dtype="bfloat16"))
    Pages(layout_of(page=4), "full", words)
    with pytest.raises(LayoutError, match="give the layout the engine's page"):
        Pages(layout_of(page=4, packing="vec"), "full", words)


def test_a_store_never_converts() -> None:
    pages = Pages(layout_of(), "full", list(random_words(4, 8, 2, 4, 8, dtype="bfloat16")), packing="vec")
    with pytest.raises(LayoutError, match="its own packing 'vec'"):
        HostMover().store(pages, [])


# -- what is wrong --------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_said() -> None:
    layout = layout_of()
    good = list(random_words(4, 8, 2, 4, 8, dtype="bfloat16"))
    with pytest.raises(LayoutError, match=r"has 4 sections .* not 3"):
        Pages(layout, "full", good[:3])
    with pytest.raises(LayoutError, match=r"of bfloat16, its tensors of torch\.float32"):
        Pages(layout, "full", [g.float() for g in good])
    with pytest.raises(LayoutError, match="equal strides"):
        Pages(layout, "full", [good[0].transpose(1, 2).contiguous().transpose(1, 2), *good[1:]])
    with pytest.raises(LayoutError, match=r"\[2 heads, 4 tokens, 8\]; this process holds 1 heads"):
        Pages(layout, "full", good, Slice(0, 0, 1))
    with pytest.raises(LayoutError, match="made of whole pages"):
        Pages(layout, "full", [g[:, :, :3] for g in good])
    with pytest.raises(LayoutError, match="each once"):
        Pages.of(layout, "full", good, "p h t x")
    with pytest.raises(LayoutError, match="do not fit a tensor of shape"):
        Pages.of(layout, "full", good, "k p h t d")
    with pytest.raises(LayoutError, match="copies for cpu and cuda"):
        mover(torch.device("meta"))


def test_pages_that_are_not_there_are_refused() -> None:
    layout = layout_of()
    pages, block = Pages(layout, "full", list(random_words(4, 8, 2, 4, 8, dtype="bfloat16"))), slot(layout)
    for wrong, match in [
        (Copy(block, [8]), "not all among the 8"),
        (Copy(block, [-1]), "not all among the 8"),
        (Copy(block, range(8), 1), "do not fit a block of 8"),
        (Copy(block[:100], [0]), "not 100"),
    ]:
        for verb in (HostMover().store, HostMover().load):
            with pytest.raises(LayoutError, match=match):
                verb(pages, [wrong])


@given(st.lists(st.integers(0, 20), max_size=12), st.integers(0, 5))
def test_runs_are_the_pages_in_order(pages: list[int], at: int) -> None:
    found = [
        (p, at + i)
        for start, stop, at in runs(Copy(memoryview(b""), pages, at))
        for i, p in enumerate(range(start, stop))
    ]
    assert found == [(p, at + i) for i, p in enumerate(pages)]
