"""What the records of ``kvtide explain`` cost: match and store with them and without, in one store.

``python -m bench.explain_cost [TASK ...]`` opens one store for each task and switches the records on and off between
short rounds, so that both have the same memory, the same blocks and the same moment of the machine. The two take turns
and change who is first. Seconds are CPU seconds of the calling thread. A pair is some rounds with records and as many
without, and its cost is the difference of their medians; told are the mean over all pairs and its 95 % interval, in
microseconds and in per cent of the mean without.

The housekeeping thread, which writes the table, is measured by itself: its CPU seconds for the records of one call. So
is what the calling thread does for the records of some blocks that are evicted together, the best of 25 times.

Stores go into a DRAM tier that is full, so that each new block evicts one: the dearest case, as a record is made only
of a block that leaves the store or does not get in. ``--keep`` writes ``bench/results/compare/explain_cost.json``.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import kvtide
from kvtide import config
from kvtide.benchmarks.record import machine
from kvtide.index.absence_log import Absence, AbsenceCause
from kvtide.store.store import Store

RESULT = Path(__file__).parent / "results" / "compare" / "explain_cost.json"
MIB = 1 << 20
SMALL = kvtide.Layout.attention(layers=1, heads=1, head_dim=64, dtype="uint8", block_tokens=16)  # 2 KiB
LARGE = kvtide.Layout.attention(layers=16, heads=2, head_dim=64, dtype="bfloat16", block_tokens=128)  # 1 MiB
LLAMA = kvtide.Layout.attention(layers=32, heads=8, head_dim=128)  # 32 MiB, of 256 tokens
MATCHED = 64
"""Blocks of a prompt that is matched."""
ROUNDS = 16
"""Rounds of each kind in a pair."""
WRITTEN = 20_000
"""Records that are written to measure the thread that writes them."""
CALLS = 2000
"""The most calls for that."""

Round = Callable[[], int]
"""One round; answers how many calls it made."""


class Task(NamedTuple):
    store: Store
    round: Round


def _opened(stack: ExitStack, layout: kvtide.Layout, budget: int) -> tuple[Store, Any]:
    store = stack.enter_context(kvtide.Store(config.read(os.devnull, env={}, dram={"budget": budget})))
    return store, stack.enter_context(store.session(kvtide.Model(layout, "given:cost")))


def _stores(stack: ExitStack, layout: kvtide.Layout, blocks: int, calls: int) -> Task:
    """``blocks`` at a time into a tier that is full."""
    nbytes, tokens = layout.geometry["full"].nbytes, layout.block_tokens
    budget = max(16 * MIB, 4 * blocks * nbytes)
    store, session = _opened(stack, layout, budget)
    content = [np.zeros(nbytes, np.uint8)] * blocks
    fresh = itertools.count(1)

    def round_() -> int:
        for _ in range(calls):
            session.store(np.full(blocks * tokens, next(fresh), np.uint32), content)
        return calls

    while store.index.absence_log.statistics().records < 3 * blocks:
        round_()
    return Task(store, round_)


def _matches(stack: ExitStack, stored: int, calls: int) -> Task:
    """A prompt of which the first ``stored`` blocks are in DRAM."""
    store, session = _opened(stack, SMALL, 16 * MIB)
    tokens = np.arange(MATCHED * SMALL.block_tokens, dtype=np.uint32)
    content = np.zeros(SMALL.geometry["full"].nbytes, np.uint8)
    if stored:
        session.store(tokens[: stored * SMALL.block_tokens], [content] * stored)

    def round_() -> int:
        for _ in range(calls):
            session.match(tokens).release()
        return calls

    return Task(store, round_)


TASKS: dict[str, Callable[[ExitStack], Task]] = {
    "match, all hits": lambda stack: _matches(stack, MATCHED, 20),
    "match, half": lambda stack: _matches(stack, MATCHED // 2, 20),
    "match, no hit": lambda stack: _matches(stack, 0, 20),
    "store, 1 x 2 KiB": lambda stack: _stores(stack, SMALL, 1, 10),
    "store, 256 x 2 KiB": lambda stack: _stores(stack, SMALL, 256, 1),
    "store, 1 x 1 MiB": lambda stack: _stores(stack, LARGE, 1, 5),
    "store, 1 x 32 MiB": lambda stack: _stores(stack, LLAMA, 1, 2),
    "store, 64 x 1 MiB": lambda stack: _stores(stack, LARGE, 64, 1),
}


class _Switch:
    """Switches on and off what ``explain.memory`` does."""

    def __init__(self, store: Store) -> None:
        self._log, self._recent = store.index.absence_log, store.recent_requests
        self._limit = self._recent.limit

    def __call__(self, on: bool) -> None:
        self._log.on, self._recent.limit = on, self._limit if on else 0


def _timed(task: Round) -> float:
    """CPU seconds of this thread for one call of a round."""
    began = time.thread_time()
    count = task()
    return (time.thread_time() - began) / count


def _pair(task: Task, switch: _Switch, number: int) -> tuple[float, float]:
    """Seconds of a call with records, and without."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for i in range(number, number + ROUNDS):
        for on in (True, False) if i % 2 else (False, True):
            switch(on)
            times[on].append(_timed(task.round))
    return statistics.median(times[True]), statistics.median(times[False])


def _written(task: Task, switch: _Switch) -> float:
    """CPU seconds of writing the records of one call to the table."""
    log = task.store.index.absence_log
    switch(True)
    log.on_full = None  # not by the thread: by this one, with all records that are collected
    spent, calls = 0.0, 0
    enter = log._enter

    def timed(batch: Any) -> None:
        nonlocal spent
        began = time.thread_time()
        enter(batch)
        spent += time.thread_time() - began

    log._enter = timed  # type: ignore[method-assign]
    before = log.statistics().records
    while log.statistics().records < before + WRITTEN and calls < CALLS:
        calls += task.round()
        if log.statistics().records == before:
            return 0.0  # nothing leaves
    with task.store.index.lock:
        log.write()
    return spent / calls


def measured(name: str, pairs: int) -> dict[str, float]:
    with ExitStack() as stack:
        task = TASKS[name](stack)
        switch = _Switch(task.store)
        gc.collect()
        gc.disable()
        try:
            found = [_pair(task, switch, number) for number in range(-2, pairs)][2:]
            written = _written(task, switch)
        finally:
            gc.enable()
    without = statistics.fmean(off for _, off in found)
    differences = [on - off for on, off in found]
    mean, error = statistics.fmean(differences), 1.96 * statistics.stdev(differences) / math.sqrt(pairs)
    return {
        "pairs": pairs,
        "us": round(without * 1e6, 2),
        "more_us": round(mean * 1e6, 2),
        "more_us_error": round(error * 1e6, 2),
        "more_percent": round(100 * mean / without, 2),
        "more_percent_error": round(100 * error / without, 2),
        "thread_us": round(written * 1e6, 2),
        "thread_percent": round(100 * written / without, 2),
    }


def alone(rows: int, samples: int = 25) -> float:
    """CPU seconds of the calling thread for the records of ``rows`` blocks that are evicted together; the writing of
    the table is included where this thread does it."""
    with ExitStack() as stack:
        store = TASKS["store, 256 x 2 KiB"](stack).store
        log, some = store.index.absence_log, np.arange(1, rows + 1)
        found = []
        calls = 6000 // rows  # fewer records than a batch holds
        for _ in range(samples):
            time.sleep(0.02)  # the thread writes those before
            with store.index.lock:
                began = time.thread_time()
                for _ in range(calls):
                    log.note(some, Absence.EVICTED, 0, AbsenceCause.LRU, 1)
                found.append((time.thread_time() - began) / calls)
        return min(found)


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.explain_cost", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("task", nargs="*", default=list(TASKS), help=f"of {'; '.join(TASKS)}; all if none is named")
    parser.add_argument("--pairs", type=int, default=40, help="of rounds with and without records")
    parser.add_argument("--keep", action="store_true", help="write the result")
    given = parser.parse_args()
    if unknown := [name for name in given.task if name not in TASKS]:
        parser.error(f"there is no task {unknown[0]!r}")
    print(f"{'CPU time of a call':20} {'without':>10}   {'with records':34} the thread that writes them")
    results = {}
    for name in given.task:
        r = results[name] = measured(name, given.pairs)
        more = f"{r['more_us']:+7.2f} us {r['more_percent']:+6.2f} % (+- {r['more_percent_error']:.2f})"
        print(
            f"{name:20} {r['us']:7.1f} us   {more:34} {r['thread_us']:6.2f} us {r['thread_percent']:+.2f} %", flush=True
        )
    records = {str(rows): round(alone(rows) * 1e6, 2) for rows in (1, 8, 64, 256)}
    print("the records of", ", ".join(f"{rows} blocks: {us} us" for rows, us in records.items()))
    if given.keep:
        kept = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        tasks = {**(kept["tasks"] if kept.get("machine") == machine() else {}), **results}
        RESULT.write_text(json.dumps({"machine": machine(), "tasks": tasks, "records_us": records}, indent=2) + "\n")


if __name__ == "__main__":
    main()
