"""Time to the first token of a long prompt that was seen before, against computing it, with the shape of Llama-3-8B.

The prompt's KV is loaded by ``generate`` of transformers, with the store attached to the model: the figure includes
everything that a caller waits for. From DRAM the lower bound is the time that the bus takes for the KV, and then one
token; from NVMe it is raw direct I/O of the stored bytes, which a codec reduces.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

import kvtide
from kvtide.benchmarks.disk import RawDisk
from kvtide.benchmarks.pages import bus
from kvtide.benchmarks.record import BenchRecord, figure
from kvtide.benchmarks.settings import MIB, Settings, own_store
from kvtide.engines.transformers.attached import Attached, attach
from kvtide.index.index import DRAM

__all__ = ["first_token", "first_token_nvme", "llama_8b"]

_LENGTHS = {"8k": 8_192, "32k": 32_768, "128k": 131_072}
_FASTER = {"128k": 25.0}
"""How many times faster than computing loading must be."""
_FORMS = {"raw": ("raw", "exact"), "zstd": ("zstd", "exact"), "r4": ("raw", "r4")}
"""The form of blocks on disk: the tier's codec, and the fidelity."""


def first_token(settings: Settings) -> Iterator[BenchRecord]:
    """Time to first token from DRAM, against computing the prompt."""
    yield from from_dram(settings, llama_8b(settings), _LENGTHS)


def first_token_nvme(settings: Settings) -> Iterator[BenchRecord]:
    """Time to first token from NVMe, by the form of the stored blocks, against computing the prompt."""
    yield from from_nvme(settings, llama_8b(settings), {name: n for name, n in _LENGTHS.items() if name != "8k"})


def llama_8b(settings: Settings) -> LlamaForCausalLM:
    """A model of that shape, with random weights."""
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072 + 256,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        dtype=torch.bfloat16,
        eos_token_id=None,
    )
    settings.progress("making a model")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):  # only here: a default device makes every torch call slower
            model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
        return model
    finally:
        torch.set_default_dtype(torch.float32)


class _Prompt:
    """A prompt of random tokens, and ``generate`` with it."""

    def __init__(self, model: Any, tokens: int) -> None:  # Any: its own types say that generate cannot be called
        self._model = model
        shape = model.config
        self.tokens = tokens
        self.nbytes = tokens * 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * 2
        self._tokens = torch.randint(0, shape.vocab_size, (1, tokens), device=model.device)
        self._mask = torch.ones_like(self._tokens)
        self.note = f"{tokens:,} tokens, {self.nbytes / 1e9:.2f} GB; {torch.cuda.get_device_name()}"

    def first(self, **more: Any) -> None:
        """Generate the first token."""
        self._model.generate(self._tokens, attention_mask=self._mask, max_new_tokens=1, do_sample=False, **more)

    def computed(self, attached: Attached) -> float:
        """The seconds that computing takes. Afterwards the store has the prompt's KV."""
        seconds = _seconds(self.first)
        assert attached.statistics().last.cached == (0,)
        attached.flush()
        return seconds

    def with_kv(self) -> Callable[[], None]:
        """``first`` with the KV of all tokens but the last already in the model's memory."""
        shape, device = self._model.config, self._model.device
        rows = (1, shape.num_key_value_heads, self.tokens - 1, shape.head_dim)
        kv = torch.zeros(rows, dtype=self._model.dtype, device=device)

        def go() -> None:
            cache = DynamicCache()
            for _ in range(shape.num_hidden_layers):
                layer = DynamicLayer()
                layer.lazy_initialization(kv, kv)
                layer.keys = layer.values = kv
                cache.layers.append(layer)
            self.first(past_key_values=cache)

        return go


def _attached(stack: ExitStack, model: LlamaForCausalLM, most: int, nvme: dict[str, Any], fidelity: str) -> Attached:
    """A store with space for ``most`` bytes at once, attached to the model."""
    budget = (most // (256 * MIB) + 6) * 256 * MIB
    sizes: Any = {"dram": {"budget": budget, "prefault": True}, "nvme": {"budget": 2 * budget, **nvme}}
    store = own_store(**sizes)
    stack.callback(store.close)
    store.dram.wait_prefault()
    attached = stack.enter_context(attach(model, store, fidelity=fidelity))
    for _ in range(2):  # warm-up: libraries initialise, and kernels are compiled
        _Prompt(model, 512).first()
        attached.flush()
    return attached


def from_dram(settings: Settings, model: LlamaForCausalLM, lengths: dict[str, int]) -> Iterator[BenchRecord]:
    """The figures of one model, from DRAM."""
    with ExitStack() as stack:
        most = _Prompt(model, max(lengths.values())).nbytes
        attached = _attached(stack, model, most, {"path": ""}, "exact")
        for name, tokens in lengths.items():
            prompt = _Prompt(model, tokens)
            settings.progress(f"{name}, computing")
            cold = prompt.computed(attached)
            prompt.first()
            assert attached.statistics().last.cached[0] >= tokens - 256, "it was not found"
            warm, floor, token, moved = [], [], [], []
            each = prompt.nbytes // tokens
            least = (tokens - 256) * each
            one, crossing = prompt.with_kv(), bus(prompt.nbytes)
            for i in range(settings.rounds(7, 3)):
                settings.progress(f"{name}, loading, round {i + 1}")
                warm.append(_seconds(prompt.first))
                moved.append(attached.statistics().last.cached[0] * each)
                token.append(_seconds(one))
                floor.append(crossing()["in"].seconds)
            del one, crossing
            note = f"from DRAM; {prompt.note}"
            yield figure(
                f"gpu-first-token-{name}",
                "s",
                warm,
                better="lower",
                limit=[f + t for f, t in zip(floor, token, strict=True)],
                against="1.3 times the bus, and one token",
                reference=[1.3 * f + t for f, t in zip(floor, token, strict=True)],
                bar=1.0,
                command=settings.command,
                note=note,
                moved=moved,
                least=least,
                verb="loaded",
            )
            yield _against_computing(settings, name, warm, cold, _FASTER.get(name), note, moved, least)


def from_nvme(settings: Settings, model: LlamaForCausalLM, lengths: dict[str, int]) -> Iterator[BenchRecord]:
    """The figures of one model, from NVMe, by the form of the stored blocks."""
    most = _Prompt(model, max(lengths.values())).nbytes
    for form, (codec, fidelity) in _FORMS.items():
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory(dir=settings.folder, prefix="kvtide-bench-")))
            nvme = {"path": str(folder / "nvme"), "codec": codec, "store": "through", "queue": most, "threads": 8}
            attached = _attached(stack, model, most, nvme, fidelity)
            store = attached.store
            assert isinstance(store, kvtide.Store)
            raw = RawDisk(folder, 32 * MIB, 64)
            stack.callback(raw.close)
            for name, tokens in lengths.items():
                prompt = _Prompt(model, tokens)
                settings.progress(f"{form}, {name}, computing")
                before = store.statistics().tiers["nvme"].bytes_written
                cold = prompt.computed(attached)
                store.flush()
                tier = store.statistics().tiers["nvme"]
                read, stored = tier.bytes_read, tier.bytes_written - before
                warm, limit, moved = [], [], []
                for i in range(settings.rounds(3, 2)):
                    settings.progress(f"{form}, {name}, loading, round {i + 1}")
                    while store.pipeline.make_room(DRAM, 1 * MIB):
                        pass
                    warm.append(_seconds(prompt.first))
                    before, read = read, store.statistics().tiers["nvme"].bytes_read
                    moved.append(read - before)
                    limit.append(moved[-1] / raw()["load"].speed / 1e9)
                note = f"at least {min(moved) / 1e9:.2f} GB were read in each round; limit: raw reads of as many"
                note += f"; {prompt.note}"
                yield figure(
                    f"gpu-first-token-nvme-{form}-{name}",
                    "s",
                    warm,
                    better="lower",
                    limit=limit,
                    command=settings.command,
                    note=note,
                    moved=moved,
                    least=max(1, stored // 2),
                    verb="loaded",
                )
                what = f"nvme-{form}-{name}"
                yield _against_computing(settings, what, warm, cold, 1.0, note, moved, max(1, stored // 2))


def _against_computing(
    settings: Settings,
    name: str,
    warm: list[float],
    cold: float,
    bar: float | None,
    note: str,
    moved: list[int],
    least: int,
) -> BenchRecord:
    return figure(
        f"gpu-first-token-{name}-against-computing",
        "s",
        warm,
        better="lower",
        against="computing the prompt",
        reference=[cold] * len(warm),
        bar=bar,
        command=settings.command,
        note=note,
        moved=moved,
        least=least,
        verb="loaded",
    )


def _seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start
