"""The overhead per block besides its bytes: the index at scale, recovery of a tier, and the pipeline around one."""

from __future__ import annotations

import gc
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import kvtide
from bench.noop import Noop
from kvtide.benchmarks.record import BenchRecord, figure, timed
from kvtide.benchmarks.settings import MIB, TINY, Settings, into, own_store
from kvtide.clock import SystemClock
from kvtide.events import Feed
from kvtide.index.index import DRAM, Index
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.plan.admit import Through
from kvtide.plan.policy import Lru
from kvtide.plan.usage_tracker import UsageTracker
from kvtide.tiers.base import Identity, Read, Write
from kvtide.tiers.dram.tier import Dram
from kvtide.tiers.format.scratch import Scratch
from kvtide.tiers.nvme.tier import Nvme
from kvtide.transfer.cold_tier import ColdTier
from kvtide.transfer.lane import Lane
from kvtide.transfer.pipeline import Pipeline, WriteRequest
from kvtide.transfer.transfer import Transfer

__all__ = ["opening", "pipeline", "scale"]

CHAIN = 64


def scale(settings: Settings) -> Iterator[BenchRecord]:
    """The cost of a key when many blocks are resident: to find, store and evict it."""
    sizes = (10_000, 100_000) if settings.quick else (10_000, 100_000, 1_000_000)
    costs: dict[str, list[list[float]]] = {"find": [], "store": [], "evict": []}
    memory = 0.0
    for blocks in sizes:
        settings.progress(f"{blocks:,} resident blocks")
        memory = _costs_at(blocks, costs)
    for task, bar in (("find", 3.0), ("store", None), ("evict", None)):
        medians = [statistics.median(v) for v in costs[task]]
        told = ", ".join(f"{m:.2f} at {n:,}" for m, n in zip(medians, sizes, strict=True))
        yield figure(
            f"index-{task}",
            "CPU us/key",
            costs[task][-1],
            better="lower",
            bar=bar,
            command=settings.command,
            note=f"{told} resident blocks",
        )
        yield figure(
            f"index-{task}-growth",
            "x",
            [medians[-1] / medians[0]],
            better="lower",
            bar=4.0,
            command=settings.command,
            note=f"cost at {sizes[-1]:,} blocks against {sizes[0]:,}",
        )
    yield figure(
        "index-memory",
        "bytes/block",
        [memory],
        better="lower",
        bar=300,
        command=settings.command,
        note=f"private memory per resident block, at {sizes[-1]:,}",
    )


def _costs_at(blocks: int, costs: dict[str, list[list[float]]]) -> float:
    """Fill a store with that many blocks and measure; returns the private memory per block."""
    slot = TINY.geometry["full"].footprint
    given = [np.zeros(TINY.geometry["full"].nbytes, np.uint8)] * CHAIN
    base = np.arange(CHAIN * TINY.block_tokens, dtype=np.uint32)
    sizes: Any = {"dram": {"budget": max(blocks * slot, MIB), "segment": "64MiB"}}
    # Shared memory, so that the blocks themselves do not count as private memory.
    with own_store(mapped=True, **sizes) as store:
        session = store.session(kvtide.Model(TINY, "bench"))
        chains = blocks // CHAIN
        every = chains // 200 + 1
        before = _anonymous()
        for i in range(chains):
            session.store(base + i * 7919, given)
        gc.collect()
        memory = (_anonymous() - before) / len(store.index)
        found, stored, evicted = [], [], []
        for i in range(0, chains, every):
            chain = session.chain(base + i * 7919)
            chain.keys(b"full")
            hits: list[kvtide.Match] = []
            sample = timed(into(hits, session.match), chain)
            assert hits[0].blocks == CHAIN
            hits[0].release()
            found.append(sample.cpu_seconds / CHAIN * 1e6)
        for i in range(200):
            chain = session.chain(base + 2_000_000_000 + i * 7919)
            chain.keys(b"full")
            # The tier is full: each block stored evicts one.
            stored.append(timed(session.store, chain, given).cpu_seconds / CHAIN * 1e6)
        for _ in range(20):
            start = time.process_time()
            for _ in range(256):
                store.pipeline.make_room(DRAM, slot)
            evicted.append((time.process_time() - start) / 256 * 1e6)
    for task, values in (("find", found), ("store", stored), ("evict", evicted)):
        costs[task].append(values)
    return memory


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def _identity(model: kvtide.Model) -> Identity:
    layout = model.layout
    tag = DEFAULT_TENANT.tag
    geometry = layout.geometry["full"]
    return Identity(model.namespace(), tag, layout.digest, b"full", layout.block_tokens, geometry, 1)


def opening(settings: Settings) -> Iterator[BenchRecord]:
    """Open a tier with a million small blocks: with its journal, and from the headers alone."""
    blocks = 50_000 if settings.quick else 1_000_000
    with tempfile.TemporaryDirectory(dir=settings.folder, prefix="kvtide-bench-") as name:
        path = Path(name) / "tier"
        budget = blocks * 13_000 + 256 * MIB
        _fill(path, budget, TINY, blocks, settings.progress)
        sizes: Any = {"dram": {"budget": "64MiB"}, "nvme": {"path": str(path), "budget": budget}}
        for way in ("journal", "headers"):
            seconds = []
            for _ in range(settings.rounds(3, 1)):
                settings.progress(f"opening {blocks:,} blocks from the {way}")
                if way == "headers":
                    (path / "journal").unlink()
                gc.collect()
                start = time.perf_counter()
                store = own_store(**sizes)
                seconds.append(time.perf_counter() - start)
                assert len(store.index) == blocks, f"{len(store.index)} of {blocks} blocks"
                store.close()
            yield figure(
                f"open-{way}",
                "s",
                seconds,
                better="lower",
                bar=3.0 if way == "journal" else None,
                command=settings.command,
                note=f"{blocks:,} blocks of 8 KiB",
            )


def _fill(path: Path, budget: int, layout: kvtide.Layout, blocks: int, progress: Callable[[str], None]) -> None:
    """Write blocks directly into a tier."""
    model = kvtide.Model(layout, "bench")
    tier = Nvme(path, budget, threads=8)
    identity = _identity(model)
    span = Scratch().get(identity.geometry.footprint)
    namer = model.namer()
    under_way = threading.Semaphore(16)
    step = 1000
    for first in range(0, blocks, step):
        progress(f"writing {first:,} of {blocks:,} blocks")
        chain = namer.chain(np.arange(step * layout.block_tokens, dtype=np.uint32) + first)
        under_way.acquire()
        tier.write(
            [
                Write(key, identity, span, chain.parent(i), i, first + i + 1)
                for i, key in enumerate(chain.keys(b"full"))
            ],
            lambda _: under_way.release(),
        )
    tier.close()


def pipeline(settings: Settings) -> Iterator[BenchRecord]:
    """The cost of a batch and of a key, with a tier that itself costs nothing.

    ``tier``: submission and completion through the lane, as the contract requires. ``load``: a whole load, which also
    includes the index, slots in DRAM, joins and events.
    """
    model = kvtide.Model(TINY, "bench")
    identity = _identity(model)
    slot = identity.geometry.footprint
    index, clock, tier = Index(tiers=2), SystemClock(), Noop()
    lane = Lane(tier, clock, limit=1 << 40, max_under_way=8)
    memory = Dram(64 * MIB, 16 * MIB)
    cold = ColdTier(1, "noop", tier, lane, Through(), None)
    line = Pipeline(index, memory, [cold], Lru(index), UsageTracker(index), Feed())
    costs: dict[str, dict[int, list[float]]] = {"tier": {1: [], 513: []}, "load": {1: [], 513: []}}
    for count in (1, 513):
        chain = model.namer().chain(np.arange(count * TINY.block_tokens, dtype=np.uint32) + count)
        keys = chain.keys(b"full")
        line.reserve([WriteRequest(identity, keys, [chain.parent(i) for i in range(count)], range(count))]).seal()
        rows = index.rows(keys)
        span = Scratch().get(slot)
        for _ in range(settings.rounds(201, 51)):
            while line.make_room(DRAM, slot):
                pass
            with line.lease(rows):
                transfer = Transfer(clock)
                sample = timed(line.load, [(rows, identity)], transfer)
                costs["load"][count].append(sample.cpu_seconds * 1e6)
                assert len(transfer.arrived) == count
            reads = [Read(k, identity, p, span) for k, p in zip(keys, index.place[1][rows].tolist(), strict=True)]
            sample = timed(lane.read, reads, lambda _: None, lambda: False)
            costs["tier"][count].append(sample.cpu_seconds * 1e6)
    memory.close()
    for what, by_count in costs.items():
        one, many = (statistics.median(by_count[n]) for n in (1, 513))
        yield figure(
            f"pipeline-{what}-batch",
            "CPU us/batch",
            by_count[1],
            better="lower",
            bar=50,
            command=settings.command,
            note="one block" if what == "tier" else "load of one block, index and slots included",
        )
        yield figure(
            f"pipeline-{what}-key",
            "CPU us/key",
            [(many - one) / 512],
            better="lower",
            bar=2.0,
            command=settings.command,
            note="each further block in the batch",
        )
