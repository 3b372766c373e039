"""The pages of a real engine, seen through kvtide, hold the KV that transformers computes for the same tokens."""

from __future__ import annotations

import platform
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvtide.block import Group, Kind, Layout
from kvtide.engines.paged import packing
from tests.engines.vllm.checkpoints import checkpoint, random_llama
from tests.engines.vllm.engines import engine
from tests.node.serving import eventually

TOKENS = 256
NEEDS_BFLOAT16 = pytest.mark.skipif(
    platform.machine() == "aarch64" and " bf16" not in Path("/proc/cpuinfo").read_text(),
    reason="vLLM's build for ARM uses bfloat16 instructions that this processor does not have",
)


def computed(model: Path, prompt: list[int], dtype: torch.dtype) -> torch.Tensor:
    """The KV of a block by transformers: ``[layer, K or V, head, token, dim]``."""
    module: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    with torch.inference_mode():
        cache = module(torch.tensor([prompt]), use_cache=True).past_key_values
    return torch.stack([torch.cat((layer.keys, layer.values)) for layer in cache.layers])[..., :TOKENS, :]


def plain(block: bytes, layout: Layout, dtype: torch.dtype) -> torch.Tensor:
    """A block as an engine packs it, as plain numbers in the same order."""
    group = layout.groups[0]
    atoms = torch.frombuffer(bytearray(block), dtype=dtype)
    atoms = atoms.view(group.layers, 2, group.heads, TOKENS // group.page, group.page, group.head_dim)
    parts = [packing.unpack(atoms[:, value], group.packing, bool(value)) for value in (0, 1)]
    return torch.stack(parts, 1).flatten(3, 4)


def apart(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.float() - true.float()).norm() / true.float().norm())


@pytest.mark.parametrize(
    ("model", "dtype", "ranks"),
    [
        ("smollm2", "float32", 1),
        pytest.param("llama", "float16", 1, marks=pytest.mark.long),  # slow where a processor has no such products
        pytest.param("smollm2", "bfloat16", 1, marks=[NEEDS_BFLOAT16, pytest.mark.long]),
        pytest.param("llama", "float32", 2, marks=pytest.mark.long),
        pytest.param("llama", "float32", 4, marks=pytest.mark.long),  # more ranks than heads
    ],
)
def test_pages_hold_what_transformers_computes(tmp_path: Path, model: str, dtype: str, ranks: int) -> None:
    place, shape = (checkpoint(), (30, 3)) if model == "smollm2" else (random_llama(), (4, 2))
    prompt = random.Random(2).choices(range(3, 1000), k=TOKENS + 150)
    connector = {
        "kv_connector": "Spy",
        "kv_connector_module_path": "tests.engines.vllm.spy",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"folder": str(tmp_path)},
    }
    options = ["--tensor-parallel-size", str(ranks)]
    root = {"PYTHONPATH": str(Path(__file__).parents[3])}
    with engine(place, tmp_path / "log", connector, dtype=dtype, options=options, environment=root) as running:
        running.complete(prompt, 2)
        group = Group("full", Kind.FULL, *shape, 64, dtype, page=128, packing="vec")
        writers = {s.rank for s in group.slices(ranks)}
        eventually(lambda: {int(f.stem) for f in tmp_path.glob("*.block")} == writers)
    said = (tmp_path / "scheduler").read_text()
    assert (tmp_path / "worker").read_text() == said
    possible = [Layout((replace(group, packing=name),), TOKENS) for name in packing.names(dtype)]
    (layout,) = (each for each in possible if repr(each) == said)
    whole = torch.zeros(layout.geometry["full"].footprint, dtype=torch.uint8)
    for file in tmp_path.glob("*.block"):
        whole |= torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
    found = plain(whole.numpy().tobytes(), layout, getattr(torch, dtype))
    true = computed(place, prompt, getattr(torch, dtype))
    near = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-2}[dtype]
    assert apart(found[0], true[0]) < near  # before attention adds up anything
    assert apart(found, true) < 10 * near
    for value in (0, 1):
        assert apart(found[0, value, :, 1:], true[0, value, :, :-1]) > 0.3, "a shift by one token looks the same"
