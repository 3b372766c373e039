"""Sixteen threads on one store that is far too small for them.

Every block is checked whenever it is read. Half of the prompts are everybody's, so that threads meet on the same
blocks; the others are a thread's own, so that it can tell whether a drop holds. Nobody may starve, and when all have
ended nothing may be left in anybody's hands.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvtide import config
from kvtide.block import BlockKey, Layout
from kvtide.index.keys import Model, Tenant
from kvtide.store.session import Session
from kvtide.store.store import Store
from kvtide.testing import blocks
from tests.books import agree, tier_bytes

MIB = 1 << 20
THREADS = 16
DEPTH = 5
MODELS = [
    Model(Layout.attention(layers=2, heads=2, head_dim=64, block_tokens=64), "threads"),
    Model(Layout.attention(layers=3, heads=1, head_dim=129, block_tokens=64), "threads"),
]
TENANTS = [Tenant("ann", b"a" * 32), Tenant("bob", b"b" * 32)]


class Worker(threading.Thread):
    """One thread's traffic."""

    def __init__(self, store: Store, number: int, stop: threading.Event, seed: int) -> None:
        super().__init__(name=f"worker-{number}", daemon=True)
        self.done: Counter[str] = Counter()
        self.error: BaseException | None = None
        self._number = number
        self._stop_now = stop
        self._rng = random.Random(f"{seed} {number}")
        self._sessions = [store.session(model, tenant) for model in MODELS for tenant in TENANTS]
        self._dropped: set[BlockKey] = set()
        """Of its own: nobody else can have stored them again."""

    def run(self) -> None:
        try:
            while not self._stop_now.is_set():
                self._step()
        except BaseException as e:  # noqa: BLE001 - the test raises it
            self.error = e

    def _step(self) -> None:
        session = self._rng.choice(self._sessions)
        own = self._rng.random() < 0.5
        head = 1000 + self._number if own else self._rng.randrange(8)
        marks = [head, *(self._rng.randrange(2) for _ in range(self._rng.randrange(DEPTH)))]
        tokens = np.repeat(np.array(marks, np.uint32), session.layout.block_tokens)
        names = session.chain(tokens).keys(b"full")
        what = self._rng.choices(["store", "load", "copy", "cancel", "prefetch", "pin", "drop", "abort"], WEIGHTS)[0]
        size = session.layout.geometry["full"].nbytes
        match what:
            case "store":
                self._dropped.difference_update(names)
                session.store(tokens, [blocks.content(k, size) for k in names], ttl=self._rng.choice([None, None, 0.5]))
            case "load" | "copy":
                self._load(session, tokens, names, copy=what == "copy")
            case "cancel":
                with session.match(tokens) as match:
                    load = session.load(match)
                    load.cancel()
                    load.wait()
            case "prefetch":
                session.prefetch(tokens)
            case "pin":
                session.pin(tokens)
                self._load(session, tokens, names, copy=False)
                session.unpin(tokens)
            case "drop":
                session.drop(tokens)
                if own:
                    self._dropped.update(names)
            case "abort":
                session.reserve(tokens).abort()
        self.done[what] += 1

    def _load(self, session: Session, tokens: npt.NDArray[np.uint32], names: list[BlockKey], copy: bool) -> None:
        geometry = session.layout.geometry["full"]
        with session.match(tokens) as match:
            into = [np.empty(geometry.nbytes, np.uint8) for _ in range(match.blocks)] if copy else None
            loaded = session.load(match, into).wait()
            for i, (key, view) in enumerate(zip(names, loaded.blocks, strict=False)):
                wanted = blocks.content(key, geometry.nbytes)
                assert key not in self._dropped, "a dropped block came back"
                assert blocks.holds(view, geometry, wanted), f"wrong bytes in {key.hex()}"
                assert into is None or np.array_equal(into[i], wanted), f"wrong copy of {key.hex()}"


WEIGHTS = [30, 25, 10, 5, 8, 7, 8, 7]


def run_threads(folder: Path, seconds: float, when: str) -> None:
    settings = config.read(
        env={},
        dram={"budget": 4 * MIB, "segment": MIB},
        nvme={"path": str(folder), "budget": 16 * MIB, "segment": MIB, "threads": 4, "store": when},
    )
    stop = threading.Event()
    with Store(settings) as store:
        workers = [Worker(store, number, stop, seed=1) for number in range(THREADS)]
        for worker in workers:
            worker.start()
        happened = {"blocks read from nvme", "blocks evicted from dram", "blocks dropped", "blocks expired"}
        if when != "second-touch":  # which writes too little to fill the disk
            happened.add("blocks evicted from nvme")
        end = time.monotonic() + seconds
        last = end + 10 * seconds  # a busy machine takes longer to come to all of it
        while not any(w.error for w in workers):
            now = time.monotonic()
            if now > last or (now > end and happened <= store.statistics().counts.keys()):
                break
            # The budgets hold at every instant, not only at the end.
            dram = store.dram.statistics()
            assert dram.bytes_taken <= dram.budget
            assert tier_bytes(folder) <= settings.nvme.budget
            stop.wait(0.01)
        stop.set()
        for worker in workers:
            worker.join(60)
            assert not worker.is_alive(), f"{worker.name} hangs; it had done {worker.done}"
        for worker in workers:
            if worker.error is not None:
                raise worker.error
        agree(store)
        counts = store.statistics().counts
    done = [w.done.total() for w in workers]
    assert min(done) >= sum(done) / len(done) / 20, f"somebody starves: {done}"
    assert happened <= counts.keys(), f"the run never came to {happened - counts.keys()}: {counts}"


@pytest.mark.parametrize("when", ["through", "eviction", "second-touch"])
def test_sixteen_threads(tmp_path: Path, when: str) -> None:
    run_threads(tmp_path / "tier", 5, when)


@pytest.mark.long
@pytest.mark.parametrize("when", ["through", "eviction", "second-touch"])
def test_sixteen_threads_for_long(tmp_path: Path, when: str) -> None:
    run_threads(tmp_path / "tier", 60, when)
