"""A prefix that is computed from its front while it is loaded from its back, compared with each of the two alone.

All three are times to the first token of ``generate`` with a store attached to the model, on one prompt whose KV is on
disk. In addition two curves are measured in each round: tokens computed over time, chunk after chunk with nothing
loaded, and tokens loaded over time, piece after piece with nothing computed. The time at which the two, one from the
front and one from the back, have all tokens together is the lower bound for both at once: there neither slows the other
down, and neither waits.

On a GPU the model has the shape of Llama-3-8B and random weights, elsewhere it is the small one of the examples. With a
disk that is much faster than the model, as with a CPU, the curves meet at the very front; so its speed can be limited.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

import kvtide
from kvtide.benchmarks.first_token import llama_8b
from kvtide.benchmarks.record import BenchRecord, figure
from kvtide.benchmarks.settings import MIB, Settings, own_store
from kvtide.block import Span
from kvtide.engines.paged.choose_mover import mover
from kvtide.engines.transformers.attached import Attached, attach
from kvtide.engines.transformers.dynamic_cache import KvMemory
from kvtide.engines.transformers.loading import SMALL, load
from kvtide.engines.transformers.overlap import ChunkSizes, Overlap, sizes
from kvtide.errors import ConfigError
from kvtide.index.index import DRAM
from kvtide.plan.prefill import PrefillCost
from kvtide.store.session import Session
from kvtide.tiers.syscalls import Disk

__all__ = ["crossing", "measure", "overlap"]

Curve = Sequence[tuple[float, int]]
"""Seconds, and the number of tokens by then."""


class _LimitedDisk(Disk):
    """A disk with a limited read speed in bytes per second."""

    def __init__(self, speed: float) -> None:
        super().__init__()
        self._speed = speed
        self._free = 0.0
        self._lock = threading.Lock()

    def read(self, fd: int, into: Sequence[Span], offset: int) -> int:
        count = super().read(fd, into, offset)
        with self._lock:
            self._free = max(self._free, time.monotonic()) + count / self._speed
            wait = self._free - time.monotonic()
        time.sleep(wait)
        return count


def overlap(settings: Settings, tokens: int | None = None, speed: float | None = None) -> Iterator[BenchRecord]:
    """Measure a prompt of that many tokens, with a disk limited to ``speed`` bytes per second."""
    if torch.cuda.is_available():
        yield from measure(settings, llama_8b(settings), tokens or 131_072, 256, speed)
    else:
        yield from measure(settings, load(SMALL, "float32").model, tokens or 1024, 64, speed)


def crossing(computed: Curve, loaded: Curve, tokens: int) -> tuple[float, int]:
    """When the two curves, one from the front and one from the back, have that many tokens together, and how many of
    them are computed by then."""
    fronts, tails = ([(0.0, 0), *curve] for curve in (computed, loaded))
    times = np.unique([seconds for seconds, _ in fronts + tails])
    front, tail = (np.interp(times, [s for s, _ in curve], [float(n) for _, n in curve]) for curve in (fronts, tails))
    if front[-1] + tail[-1] < tokens:
        raise ConfigError(
            f"of {tokens} tokens {front[-1]:.0f} were computed and {tail[-1]:.0f} loaded: they do not meet"
        )
    met = float(np.interp(tokens, front + tail, times))
    return met, round(float(np.interp(met, times, front)))


def measure(
    settings: Settings, model: Any, tokens: int, block_tokens: int, speed: float | None
) -> Iterator[BenchRecord]:
    """The figures of one model (Any: its own types say that generate cannot be called).

    Raises ConfigError if a run did not do what it is to measure.
    """
    device = model.device
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(dir=settings.folder, prefix="kvtide-bench-")))
        prompt = torch.randint(2, model.config.vocab_size, (1, tokens), device=device)
        store = _store(model, tokens, block_tokens, folder, speed)
        stack.callback(store.close)
        attached = stack.enter_context(attach(model, store, block_tokens=block_tokens))
        generate = partial(
            model.generate, prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=1, do_sample=False
        )
        settings.progress("computing what is to be loaded")
        generate()
        attached.flush()
        store.flush()
        run = _Run(attached, store, prompt)
        settings.progress("the second request, with what the store knows by itself")
        default = [run.first_token(generate)]
        compute, load_alone, both, floor, border, loaded_tokens = [], [], [], [], [], []
        for i in range(-1, settings.rounds(5, 2)):  # the first round warms up
            settings.progress(f"computing alone, round {i + 1}")
            computed = run.computed()
            alone = _seconds(device, lambda: type(model).generate(model, *generate.args, **generate.keywords))
            settings.progress(f"loading alone, round {i + 1}")
            loaded = run.loaded()
            seconds, cached = run.forced_first_token(generate, None)
            if cached != min(run.tokens, tokens - 1):
                raise ConfigError(f"of {run.tokens} stored tokens {cached} were loaded where all were to be")
            settings.progress(f"both at once, round {i + 1}")
            at_once, cached = run.forced_first_token(generate, PrefillCost(run.load_seconds / run.tokens))
            if not 0 < cached < run.tokens - 1:
                raise ConfigError(
                    f"{cached} of {run.tokens} stored tokens were loaded: they were not loaded and computed at once. "
                    "Give more --tokens, or a --disk that is about as fast as the model"
                )
            settings.progress(f"with what the store knows by itself, round {i + 1}")
            default.append(run.first_token(generate))
            if i >= 0:
                met, front = crossing(computed, loaded, run.tokens)
                compute.append(alone)
                load_alone.append(seconds)
                both.append(at_once)
                floor.append(met)
                border.append(front)
                loaded_tokens.append(cached)
        where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        disk = f", a disk of {speed / 1e6:g} MB/s" if speed else ""
        note = f"{tokens:,} tokens, {run.nbytes / 1e9:.3g} GB; {where}{disk}"
        for name, values in (("compute", compute), ("load", load_alone)):
            yield figure(f"overlap-{name}", "s", values, better="lower", command=settings.command, note=note)
        quicker = [min(pair) for pair in zip(compute, load_alone, strict=True)]
        yield figure(
            "overlap-both",
            "s",
            both,
            better="lower",
            limit=floor,
            against="the quicker of the two alone",
            reference=quicker,
            command=settings.command,
            note=f"{int(np.median(loaded_tokens)):,} tokens were loaded; limit: the curves meet; {note}",
        )
        loaded_by_default = ", ".join(f"{cached:,}" for _, cached in default)
        yield figure(
            "overlap-default",
            "s",
            [seconds for seconds, _ in default[2:]],
            better="lower",
            against="the quicker of the two alone",
            reference=quicker,
            command=settings.command,
            note=f"nothing is chosen for it; tokens loaded {loaded_by_default}; {note}",
            moved=[cached for _, cached in default[2:]],
            verb="loaded",
        )
        yield figure(
            "overlap-first",
            "s",
            [default[0][0]],
            better="lower",
            against="the quicker of the two alone",
            reference=[float(np.median(quicker))],
            command=settings.command,
            note=f"the first request on the new store, with nothing chosen for it; {note}",
            moved=[default[0][1]],
            verb="loaded",
        )
        yield figure(
            "overlap-crossing",
            "s",
            floor,
            better="lower",
            command=settings.command,
            note=f"the curves of computing and loading alone meet at token {int(np.median(border)):,}; {note}",
        )


def _store(model: PreTrainedModel, tokens: int, block_tokens: int, folder: Path, speed: float | None) -> kvtide.Store:
    """A store with space for the prompt in DRAM, because loading alone needs that."""
    most = tokens * _token_bytes(model) + 64 * MIB
    budget = (most // (256 * MIB) + 4) * 256 * MIB
    nvme = {"path": str(folder / "nvme"), "budget": 2 * budget, "store": "through", "queue": most}
    return own_store(disk=_LimitedDisk(speed) if speed else None, dram={"budget": budget}, nvme=nvme)


def _token_bytes(model: PreTrainedModel) -> int:
    shape: Any = model.config
    dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    return int(2 * shape.num_hidden_layers * shape.num_key_value_heads * dim * model.dtype.itemsize)


class _Run:
    """A prompt on disk, and the ways to compute or load its KV."""

    def __init__(self, attached: Attached, store: kvtide.Store, prompt: torch.Tensor) -> None:
        self._attached, self._store, self._prompt = attached, store, prompt
        self._model, self._device = attached.model, attached.model.device
        self._session: Session = store.session(attached.identity())
        self._chain = self._session.chain(prompt[0].cpu().numpy().astype(np.uint32))
        self._block = self._session.layout.block_tokens
        self.load_seconds = 0.0
        self._forget()
        with self._session.match(self._chain, prefill=0) as match:
            self.blocks, self.tokens = match.blocks, match.tokens
        if self.blocks != self._chain.blocks:
            raise ConfigError(f"of {self._chain.blocks} blocks only {self.blocks} were stored on the disk")
        self.nbytes = self.blocks * self._session.layout.geometry[self._session.layout.groups[0].name].footprint

    def _forget(self) -> None:
        """Leave the prompt on disk only, and record how long the store expects loading to take."""
        while self._store.pipeline.make_room(DRAM, MIB):
            pass
        with self._session.match(self._chain, prefill=0, again=True) as match:
            if match.held_tokens:
                raise ConfigError(f"{match.held_tokens} tokens are still in memory: a load would not read them")
            self.load_seconds = match.plan.load_seconds

    def _steps(self) -> ChunkSizes:
        """The step sizes for both at once."""
        nbytes = self.nbytes // self.blocks
        return sizes(self.blocks, self._block, nbytes, self.load_seconds, self.load_seconds)

    def computed(self) -> Curve:
        """The curve of computing alone, in the front's chunks."""
        memory = KvMemory(self._session.layout, self._device, self.blocks)
        cache, curve, step = memory.growing(), list[tuple[float, int]](), self._steps().chunk * self._block
        began = time.monotonic()
        with torch.no_grad():
            for start in range(0, self.tokens, step):
                stop = min(start + step, self.tokens)
                self._model(self._prompt[:, start:stop], past_key_values=cache, use_cache=True, logits_to_keep=1)
                _finish(self._device)
                curve.append((time.monotonic() - began, stop))
        return curve

    def loaded(self) -> Curve:
        """The curve of loading alone, from the back."""
        self._forget()
        before = self._bytes_read()
        copies = mover(self._device)
        with Overlap(
            self._session, self._chain, copies, self._device, self.blocks, 0, self._steps(), lambda start, stop: 0.0
        ) as tail:
            tail.wait()
        copies.close()
        if self._bytes_read() == before or tail.arrived < self.blocks:
            raise ConfigError(f"{tail.arrived} of {self.blocks} blocks were read from the disk")
        return tail.loaded

    def first_token(self, generate: Callable[[], object]) -> tuple[float, int]:
        """Seconds to the first token, and how many tokens were loaded, by the prefill cost measured so far."""
        self._forget()
        seconds = _seconds(self._device, generate)
        self._attached.flush()
        return seconds, sum(self._attached.statistics().last.cached)

    def forced_first_token(self, generate: Callable[[], object], prefill: PrefillCost | None) -> tuple[float, int]:
        """The same with another prefill cost; None: unknown, so that all is loaded."""
        before, known = self._bytes_read(), self._attached.prefill.cost
        self._attached.prefill.cost = prefill
        found = self.first_token(generate)
        if self._attached.prefill.cost is prefill:  # nothing was learned from it
            self._attached.prefill.cost = known
        if self._bytes_read() == before:
            raise ConfigError("nothing was read from the disk where a prefix was to be loaded")
        return found

    def _bytes_read(self) -> int:
        return self._store.statistics().tiers["nvme"].bytes_read


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    _finish(device)
    start = time.perf_counter()
    work()
    _finish(device)
    return time.perf_counter() - start
