"""The scheduler's half of an engine's connector: what it costs the engine's loop, and how long it can keep it waiting.

Timed is the engine's thread, for a request from its arrival to its end, and the longest that a single call kept it from
going on: with a node that answers, and with one that hangs.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np

import kvtide
from kvtide.benchmarks.node import running
from kvtide.benchmarks.record import Record, figure
from kvtide.benchmarks.settings import MIB, Settings
from kvtide.engines.halves.request import Cut, Prompt, Work
from kvtide.engines.halves.scheduler import Scheduler
from kvtide.engines.halves.tenancy import Tenancies
from kvtide.engines.halves.wishes import Wishes
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.node.client import Client

__all__ = ["scheduler"]

_BLOCKS = 100
"""Of a request."""
_TINY = kvtide.Layout.attention(layers=1, heads=1, head_dim=8)


def scheduler(settings: Settings) -> Iterator[Record]:
    """The scheduler's half, for a request of 100 blocks: none of them known, all known, and with a node that hangs."""
    tokens = [np.random.default_rng(i).integers(0, 1 << 17, _BLOCKS * 256).tolist() for i in range(64)]
    table = list(range(16 * _BLOCKS))
    with running(64 * MIB) as (path, pid), ExitStack() as stack:
        half = Scheduler(Tenancies(lambda: Client(path), [kvtide.Model(_TINY, "bench")], 1), Cut(["full"], [16], 256))
        stack.callback(half.close)
        longest = {"known": 0.0, "hung": 0.0}

        def one(number: int, situation: str) -> float:
            """The CPU seconds of the engine's thread."""
            prompt = Prompt(f"{situation} {number}", tokens[number % len(tokens)], list, DEFAULT_TENANT, Wishes())
            work = [Work(prompt.id, len(prompt.tokens), lambda: [table])]
            cpu = time.thread_time()

            def timed(call: Callable[[], int | None]) -> int | None:
                began = time.perf_counter()
                answer = call()
                longest[situation] = max(longest[situation], time.perf_counter() - began)
                return answer

            half.arrived(prompt)
            while (count := timed(lambda: half.matched(prompt.id, 0))) is None:
                time.sleep(0.002)  # as an idle engine does
            half.bind(prompt.id, [table], count)
            timed(lambda: len(half.step(work).loads))
            half.loaded([prompt.id], [])
            half.finished(prompt.id)
            return time.thread_time() - cpu

        for i in range(8):
            one(i, "known")
        longest["known"] = 0.0
        seconds = [one(i, "known") for i in range(settings.rounds(200, 40))]
        os.kill(pid, signal.SIGSTOP)
        try:
            for i in range(4):
                one(i, "hung")
        finally:
            os.kill(pid, signal.SIGCONT)
    yield figure(
        "scheduler-cpu",
        "ms",
        [1e3 * s for s in seconds],
        better="lower",
        bar=1,
        command=settings.command,
        note=f"CPU time of the engine's thread for a request of {_BLOCKS} blocks, from its arrival to its end; mean "
        f"{1e3 * statistics.mean(seconds):.2f}",
    )
    for situation, text in (("known", "the node answers"), ("hung", "the node is stopped")):
        yield figure(
            f"scheduler-wait-{situation}",
            "ms",
            [1e3 * longest[situation]],
            better="lower",
            bar=5,
            command=settings.command,
            note=f"the longest that any call kept the engine's thread while {text}, other processes included",
        )
