"""A decode loop while blocks are stored in the background, compared with the same loop alone.

The loop has the shape of Llama-3-8B, with 8 sequences of 4,096 tokens; it reads all weights and all KV in every step,
as decoding does. As a CUDA graph it needs only the GPU; with kernels launched one by one it needs the interpreter all
the time, and competes for it with the lane's thread. Stores run as fast as such an engine can compute KV when it does
nothing else, or as fast as the bus can, ten times more than that.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import torch
from torch.nn import functional as f

from kvtide.benchmarks.pages import PagedEngine, PagesShape
from kvtide.benchmarks.record import BenchRecord, figure
from kvtide.benchmarks.settings import Settings

__all__ = ["decode"]

_LAYERS, _WIDTH, _HEADS, _KV_HEADS, _DIM, _INNER = 32, 4096, 32, 8, 128, 14336
_BATCH, _CONTEXT = 8, 4096
_STEPS = 20
"""Tokens between two readings of the clock."""
_PREFILL = 4.4
"""GB/s of KV that a prefill of this model computes on an H200: 8,192 tokens in 0.25 s."""


class _Decoder:
    """One step of a decoder: real sizes, random weights."""

    def __init__(self) -> None:
        def weights(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.bfloat16, device="cuda") * 0.01

        kv = _KV_HEADS * _DIM
        self._layers = [
            (
                weights(_WIDTH + 2 * kv, _WIDTH),
                weights(_WIDTH, _WIDTH),
                weights(2 * _INNER, _WIDTH),
                weights(_WIDTH, _INNER),
                weights(2, _BATCH, _KV_HEADS, _CONTEXT, _DIM),
            )
            for _ in range(_LAYERS)
        ]
        self._x = weights(_BATCH, _WIDTH)

    def step(self) -> torch.Tensor:
        x = self._x
        for qkv, out, up, down, (k, v) in self._layers:
            h = f.rms_norm(x, (_WIDTH,))
            q, new_k, new_v = f.linear(h, qkv).split([_WIDTH, _KV_HEADS * _DIM, _KV_HEADS * _DIM], -1)
            k[:, :, -1] = new_k.view(_BATCH, _KV_HEADS, _DIM)
            v[:, :, -1] = new_v.view(_BATCH, _KV_HEADS, _DIM)
            heads = q.view(_BATCH, _HEADS, 1, _DIM)
            attended = f.scaled_dot_product_attention(heads, k, v, enable_gqa=True)
            x = x + f.linear(attended.reshape(_BATCH, _WIDTH), out)
            gate, value = f.linear(f.rms_norm(x, (_WIDTH,)), up).chunk(2, -1)
            x = x + f.linear(f.silu(gate) * value, down)
        return x

    def graph(self) -> Callable[[], None]:
        """The same step as a CUDA graph."""
        self.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay


class _Feeder:
    """Stores at ``pace`` GB/s, or without a pause, while it is switched on."""

    def __init__(self, engine: PagedEngine, pace: float | None) -> None:
        self._engine = engine
        self._each = engine.nbytes / pace / 1e9 if pace else 0.0
        self._on, self._ended = threading.Event(), threading.Event()
        self.stored = 0
        """Bytes so far."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._on.wait()
            next_one = time.monotonic() + self._each
            self._engine.out()
            self.stored += self._engine.nbytes
            self._ended.wait(max(0, next_one - time.monotonic()))

    def switch(self, on: bool) -> None:
        (self._on.set if on else self._on.clear)()

    def close(self) -> None:
        self._ended.set()
        self._on.set()
        self._thread.join()


def decode(settings: Settings) -> Iterator[BenchRecord]:
    """How much slower a decode loop is while blocks are stored."""
    pairs = settings.rounds(80, 30)
    with ExitStack() as stack, torch.inference_mode():
        engine = PagedEngine(PagesShape("llama-3-8b", 32, 8, 8, 16, 0, ""), stack)
        decoder = _Decoder()
        loops: list[tuple[str, Callable[[], object], float | None]] = [
            ("graph", decoder.graph(), None),
            ("eager", decoder.step, _PREFILL),
            ("eager-full-speed", decoder.step, None),
        ]
        for name, step, pace in loops:
            settings.progress(f"decoding, {name}")
            feeder = _Feeder(engine, pace)
            try:
                ratios, alone = _ratios(step, feeder, pairs)
            finally:
                feeder.close()
            mean, error = statistics.mean(ratios), statistics.stdev(ratios) / math.sqrt(len(ratios))
            low, high = mean - 1.96 * error, mean + 1.96 * error
            speed = f"at {pace} GB/s" if pace else "at the speed of the bus"
            yield figure(
                f"gpu-decode-{name}",
                "x",
                [high],
                better="lower",
                bar=1.03 if pace or name == "graph" else None,
                command=settings.command,
                note=f"a step while blocks are stored {speed}, against {statistics.median(alone) * 1e3:.2f} ms alone: "
                f"{mean:.4f}, 95 % interval {low:.4f} to {high:.4f} over {pairs} pairs; the figure is its upper end; "
                f"{torch.cuda.get_device_name()}",
                moved=[feeder.stored],
                # A store may last longer than the steps of a pair, so that not each pair has a whole one.
                least=pairs * engine.nbytes // 4,
            )


def _ratios(step: Callable[[], object], feeder: _Feeder, pairs: int) -> tuple[list[float], list[float]]:
    """Ratios of the time with stores to that without, measured in turns; and the seconds of a step without."""

    def steps(on: bool) -> float:
        feeder.switch(on)
        torch.cuda.current_stream().synchronize()
        start = time.perf_counter()
        for _ in range(_STEPS):
            step()
        torch.cuda.current_stream().synchronize()
        return (time.perf_counter() - start) / _STEPS

    for on in (True, False):
        steps(on)
    ratios, alone = [], []
    for i in range(pairs):
        order = (True, False) if i % 2 else (False, True)
        times = {on: steps(on) for on in order}
        ratios.append(times[True] / times[False])
        alone.append(times[False])
    feeder.switch(False)
    return ratios, alone
