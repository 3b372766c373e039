"""Blocks to and from the disk, verified, compared with raw direct I/O.

In a virtual machine the first direct read into memory that the host has not written for some seconds may run at half
speed. So each contestant, including other systems, uses its memory once right before the turn that counts.
"""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_128_digest

import kvtide
from kvtide.benchmarks.record import BenchRecord, Contestant, Rounds, Sample, compare, figure, timed
from kvtide.benchmarks.settings import MIB, Settings, block_sources, into, layout_of, own_store, size_name
from kvtide.block import BLOCK_TOKENS, Span
from kvtide.index.index import DRAM

__all__ = ["THREADS", "Below", "RawDisk", "filled", "nvme", "rehearsed"]

THREADS = 8
SHARED = "kvtide, shared memory"


def filled(nbytes: int, count: int) -> Span:
    """Filled memory for that many blocks, in huge pages like the store's own."""
    memory = mmap.mmap(-1, nbytes * count, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    for i, source in zip(range(count), block_sources(nbytes) * count, strict=False):
        view[i * nbytes : (i + 1) * nbytes] = source.data.cast("B")
    return view


class RawDisk:
    """The limit: whole blocks by direct I/O with the tier's number of threads, into a file whose extents were written
    before."""

    def __init__(self, folder: Path, nbytes: int, count: int) -> None:
        self._nbytes, self._count = nbytes, count
        self._fd = os.open(folder / "raw", os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(self._fd, 0, nbytes * count)
        self._view = filled(nbytes, count)
        self._writers, self._readers = ThreadPoolExecutor(THREADS), ThreadPoolExecutor(2 * THREADS)

    def __call__(self) -> Mapping[str, Sample]:
        total = self._nbytes * self._count
        return {
            "store": timed(self._all, os.pwritev, self._writers, nbytes=total),
            "load": timed(self._all, os.preadv, self._readers, nbytes=total),
        }

    def _all(self, call: Callable[[int, Sequence[Span], int], int], pool: ThreadPoolExecutor) -> None:
        def one(i: int) -> None:
            span = self._view[i * self._nbytes : (i + 1) * self._nbytes]
            assert call(self._fd, [span], i * self._nbytes) == self._nbytes

        list(pool.map(one, range(self._count)))

    def close(self) -> None:
        self._writers.shutdown()
        self._readers.shutdown()
        os.close(self._fd)


class Below:
    """Blocks through DRAM to a colder tier and, after DRAM was emptied, back, verified."""

    def __init__(
        self,
        nbytes: int,
        count: int,
        tier: str,
        settings: Mapping[str, object],
        shared: bool = False,
        security: Mapping[str, object] | None = None,
    ) -> None:
        budget = (count + 2) * nbytes // (256 * MIB) * 256 * MIB + 256 * MIB
        sizes: Any = {
            "dram": {"budget": budget, "prefault": True},
            tier: {"queue": count * nbytes, "store": "through", **settings},
            "security": security or {},
        }
        self._store = own_store(shared, **sizes)
        self._store.dram.wait_prefault()
        self._tier = tier
        self._total = count * nbytes
        layout = layout_of(nbytes)
        self._slot = layout.geometry["full"].footprint
        self._session = self._store.session(kvtide.Model(layout, "bench"))
        self._chain = self._session.chain(np.arange(count * BLOCK_TOKENS, dtype=np.uint32))
        sources = block_sources(nbytes)
        self._blocks = [sources[i % 4] for i in range(count)]

    def __call__(self) -> Mapping[str, Sample]:
        before = self._store.statistics().tiers[self._tier]
        store = timed(self._put, nbytes=self._total)
        while self._store.pipeline.make_room(DRAM, self._slot):
            pass
        with self._session.match(self._chain) as found:
            assert not found.ready
            loaded: list[kvtide.Loaded] = []
            load = timed(into(loaded, lambda: self._session.load(found).wait()), nbytes=self._total)
            assert len(loaded[0].blocks) == len(self._blocks), f"only {len(loaded[0].blocks)} blocks came"
            assert loaded[0].blocks[-1] == self._blocks[-1].data.cast("B"), "a wrong byte"
            loaded.clear()
        self._session.drop(self._chain)
        after = self._store.statistics().tiers[self._tier]
        # Blocks that did not reach the tier, or were not read from it, were not moved: see record.py.
        written, read = after.bytes_written > before.bytes_written, after.bytes_read > before.bytes_read
        return {
            "store": store if written else replace(store, nbytes=0),
            "load": load if read else replace(load, nbytes=0),
        }

    def _put(self) -> None:
        assert self._session.store(self._chain, self._blocks).dropped == 0
        self._store.flush()

    def close(self) -> None:
        self._store.close()


def nvme(settings: Settings) -> Iterator[BenchRecord]:
    """Store to and load from the disk, verified, compared with raw direct I/O with as many threads."""
    for nbytes in (32 * MIB, 2 * MIB):
        count = settings.rounds(1024, 256) * MIB // nbytes
        with tempfile.TemporaryDirectory(dir=settings.folder, prefix="kvtide-bench-") as name:
            folder = Path(name)
            room: dict[str, object] = {"budget": int(count * nbytes * 1.2) + 64 * MIB, "threads": THREADS}
            ours: dict[str, Below | RawDisk] = {
                "kvtide": Below(nbytes, count, "nvme", {"path": str(folder / "ours"), **room}),
                "raw": RawDisk(folder, nbytes, count),
            }
            if nbytes == 32 * MIB:
                ours[SHARED] = Below(nbytes, count, "nvme", {"path": str(folder / "shared"), **room}, shared=True)
            with ExitStack() as stack:
                for one in ours.values():
                    stack.callback(one.close)
                contestants = {
                    **{name: rehearsed(one) for name, one in ours.items()},
                    **settings.peers.disk(nbytes, count, folder),
                }
                rounds = compare(contestants, settings.rounds(7, 3), settings.progress)
        yield from _nvme_records(settings, nbytes, rounds)


def rehearsed(contestant: Contestant) -> Contestant:
    """Run each turn twice, and count only the second."""

    def turn() -> Mapping[str, Sample]:
        contestant()
        return contestant()

    return turn


def _nvme_records(settings: Settings, nbytes: int, rounds: Rounds) -> Iterator[BenchRecord]:
    size = size_name(nbytes)
    peers = {n: t for n, t in rounds.items() if n not in ("raw", "kvtide", SHARED)}
    # Writing into the page cache is not writing to the disk.
    direct = {n: t for n, t in peers.items() if "buffered" not in n}
    checksum = _checksum_cost(nbytes)
    for task in ("store", "load"):
        ours = [s.speed for s in rounds["kvtide"][task]]
        limit = [s.speed for s in rounds["raw"][task]]
        yield figure(
            f"nvme-{task}-{size}",
            "GB/s",
            ours,
            better="higher",
            peers={n: [s.speed for s in t[task]] for n, t in peers.items()},
            limit=limit,
            against="raw O_DIRECT at the same depth",
            reference=limit,
            bar=0.9,
            command=settings.command,
        )
        ours_cpu = [s.cpu_per_gb for s in rounds["kvtide"][task]]
        if SHARED in rounds:
            yield from _shared_records(settings, size, task, rounds)
        if not direct:
            continue
        best = max(direct, key=lambda n: statistics.median(s.speed for s in direct[n][task]))
        yield figure(
            f"nvme-{task}-{size}-against-peer",
            "GB/s",
            ours,
            better="higher",
            against=best,
            reference=[s.speed for s in direct[best][task]],
            bar=1.0,
            command=settings.command,
        )
        least = min(direct, key=lambda n: statistics.median(s.cpu_per_gb for s in direct[n][task]))
        yield figure(
            f"nvme-{task}-cpu-{size}",
            "CPU s/GB",
            ours_cpu,
            better="lower",
            peers={n: [s.cpu_per_gb for s in t[task]] for n, t in peers.items()},
            limit=[s.cpu_per_gb for s in rounds["raw"][task]],
            against=f"{least} + the checksum's own {checksum:.3f}",
            reference=[s.cpu_per_gb + checksum for s in direct[least][task]],
            bar=1.0,
            command=settings.command,
            note="store: with the copy into DRAM, as the peers' is",
        )


def _shared_records(settings: Settings, size: str, task: str, rounds: Rounds) -> Iterator[BenchRecord]:
    """The cost of a node's memory, which other processes map, compared with that of an embedded store."""
    ours, private = rounds[SHARED][task], rounds["kvtide"][task]
    note = "in the memory of a node, in ordinary pages where the system gives no huge ones to it"
    yield figure(
        f"nvme-{task}-{size}-shared",
        "GB/s",
        [s.speed for s in ours],
        better="higher",
        against="memory that is not shared",
        reference=[s.speed for s in private],
        bar=0.95,
        command=settings.command,
        note=note,
    )
    yield figure(
        f"nvme-{task}-cpu-{size}-shared",
        "CPU s/GB",
        [s.cpu_per_gb for s in ours],
        better="lower",
        against="memory that is not shared",
        reference=[s.cpu_per_gb for s in private],
        command=settings.command,
        note=note,
    )


def _checksum_cost(nbytes: int) -> float:
    """CPU seconds per GB of the checksums alone, on uncached bytes: blocks come from the disk, or are many."""
    data = np.tile(block_sources(nbytes)[0], 256 * MIB // nbytes).data
    step = nbytes // 64

    def work() -> None:
        for i in range(0, 256 * MIB, step):
            xxh3_128_digest(data[i : i + step])

    return statistics.median(timed(work, nbytes=256 * MIB).cpu_per_gb for _ in range(5))
