"""The connector scheduler: its cost for the engine's loop, and how long it can block it.

Measured are the CPU time of the engine's thread for a request from its arrival to its end, and the longest time that a
single call blocked it: with a node that answers, and with one that hangs.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import kvtide
from kvtide.benchmarks.node import running
from kvtide.benchmarks.record import BenchRecord, figure
from kvtide.benchmarks.settings import MIB, SMALL, Settings
from kvtide.engines.connector.orders import Orders
from kvtide.engines.connector.request import PageGeometry, Prompt, Work
from kvtide.engines.connector.request_options import RequestOptions
from kvtide.engines.connector.scheduler import Scheduler
from kvtide.engines.connector.sessions import SessionPool
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.node.client.client import Client
from kvtide.node.client.workers import Worker

__all__ = ["scheduler"]

_BLOCKS = 100
"""Blocks of a request."""


class _Worker:
    """Fills the tickets of its orders, without copying a byte."""

    def __init__(self, path: Path) -> None:
        self._client = Client(path)
        self._groups: dict[str, Worker] = {}

    def fill(self, orders: Orders) -> None:
        for store in orders.stores:
            if store.group_token not in self._groups:
                self._groups[store.group_token] = self._client.join(store.group_token, 0)
            with self._groups[store.group_token].step(stores=[store.ticket]):
                pass

    def close(self) -> None:
        self._client.close()


def scheduler(settings: Settings) -> Iterator[BenchRecord]:
    """The connector scheduler, for a request of 100 blocks: none of them stored, just being written, all stored, and
    with a node that hangs."""
    numbers = np.random.default_rng(1)
    table = list(range(16 * _BLOCKS))
    with running(64 * MIB) as (path, pid), ExitStack() as stack:
        half = Scheduler(
            SessionPool(lambda: Client(path), [kvtide.Model(SMALL, "bench")], 1), PageGeometry(["full"], [16], 256, [0])
        )
        stack.callback(half.close)
        worker = _Worker(path)
        stack.callback(worker.close)
        seconds: list[float] = []
        longest = {"node": 0.0, "hung": 0.0}

        def one(name: str, tokens: list[int], situation: str, fill: Callable[[Orders], None]) -> None:
            """A request from its arrival to its end. ``fill`` is the worker's part, and not counted."""
            prompt = Prompt(name, tokens, list, DEFAULT_TENANT, RequestOptions())
            work = [Work(name, len(tokens), lambda: [table])]
            cpu = 0.0

            def timed(call: Callable[..., Any], *given: Any) -> Any:
                nonlocal cpu
                began, spent = time.perf_counter(), time.thread_time()
                answer = call(*given)
                cpu += time.thread_time() - spent
                longest[situation] = max(longest[situation], time.perf_counter() - began)
                return answer

            timed(half.arrived, prompt)
            while (count := timed(half.matched, name, 0)) is None:
                time.sleep(0.002)  # like an idle engine
            timed(half.bind, name, [table], count)
            for _ in range(2):  # the first computes the prompt, the second a token
                fill(timed(half.step, work))
                time.sleep(0.005)
            timed(half.loaded, [name], [])
            timed(half.finished, name)
            seconds.append(cpu)

        for i in range(settings.rounds(60, 15)):
            tokens = numbers.integers(0, 1 << 17, _BLOCKS * 256).tolist()
            held: list[Orders] = []
            one(f"new {i}", tokens, "node", held.append)
            one(f"pending {i}", tokens, "node", lambda orders: None)
            for orders in held:
                worker.fill(orders)
            one(f"known {i}", tokens, "node", lambda orders: None)
            if not i:
                seconds.clear()  # the first of each opens sessions
                longest["node"] = 0.0
        os.kill(pid, signal.SIGSTOP)
        try:
            for i in range(4):
                one(f"hung {i}", tokens, "hung", lambda orders: None)
                seconds.pop()
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
    for situation, text in (("node", "the node answers"), ("hung", "the node is stopped")):
        yield figure(
            f"scheduler-wait-{situation}",
            "ms",
            [1e3 * longest[situation]],
            better="lower",
            bar=5,
            command=settings.command,
            note=f"the longest that any call kept the engine's thread while {text}, other processes included",
        )
