"""What the store costs: against memory, the disk and, where they are at hand, its peers.

Each function measures one part and yields records. ``Peers`` lets a caller put other systems into the same rounds.
"""

from __future__ import annotations

import gc
import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

import kvtide
from kvtide.benchmarks.record import Contestant, Record, Rounds, Sample, compare, figure, timed
from kvtide.block import Span
from kvtide.clock import SystemClock
from kvtide.errors import ConfigError
from kvtide.events import Feed
from kvtide.index.index import DRAM, Index
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.plan.admit import Through
from kvtide.plan.evict import Lru
from kvtide.tiers.base import Identity, Read, Write
from kvtide.tiers.codec import Scratch
from kvtide.tiers.dram import Dram
from kvtide.tiers.noop import Noop
from kvtide.tiers.nvme import Nvme
from kvtide.transfer.lane import Lane
from kvtide.transfer.pipeline import Cold, Pipeline, Pledge
from kvtide.transfer.transfer import Transfer

__all__ = ["FIGURES", "NoPeers", "Peers", "Settings", "run"]

MIB = 1 << 20
TOKENS = 131_072
BLOCK_TOKENS = 256


class Peers(Protocol):
    """Other systems, each as contestants for our tasks."""

    def match(self) -> Mapping[str, Contestant]: ...

    def dram(self, block: int, count: int) -> Mapping[str, Contestant]: ...

    def disk(self, block: int, count: int, folder: Path) -> Mapping[str, Contestant]: ...


class NoPeers:
    """Ours and the hardware alone."""

    def match(self) -> Mapping[str, Contestant]:
        return {}

    def dram(self, block: int, count: int) -> Mapping[str, Contestant]:
        return {}

    def disk(self, block: int, count: int, folder: Path) -> Mapping[str, Contestant]:
        return {}


@dataclass(frozen=True)
class Settings:
    """How much to measure, where, and whom to tell."""

    quick: bool
    folder: Path
    """On the disk that is to be measured."""
    command: str
    progress: Callable[[str], None]
    peers: Peers

    def rounds(self, full: int, quick: int) -> int:
        return quick if self.quick else full


def layout_of(nbytes: int) -> kvtide.Layout:
    """32 layers of 8 heads, as in Llama-3-8B, with heads as wide as makes a block ``nbytes`` long."""
    per_dim = 32 * 2 * 8 * BLOCK_TOKENS * 2
    return kvtide.Layout.attention(layers=32, heads=8, head_dim=nbytes // per_dim)


def _sources(nbytes: int) -> list[npt.NDArray[np.uint8]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, nbytes, np.uint8) for _ in range(4)]


def _names(nbytes: int) -> str:
    return f"{nbytes // MIB}mib"


# -- match ------------------------------------------------------------------------------------------------


def match(settings: Settings) -> Iterator[Record]:
    """A prompt of 131,072 tokens whose 512 blocks are all in DRAM: name, find and lease them."""
    tokens = np.random.default_rng(0).integers(0, 128_256, TOKENS, np.uint32)
    as_list = tokens.tolist()
    tiny = kvtide.Layout.attention(layers=1, heads=1, head_dim=8)
    block = np.zeros(tiny.geometry["full"].nbytes, np.uint8)
    with kvtide.open(dram={"budget": "64MiB", "segment": "8MiB"}) as store:
        session = store.session(kvtide.Model(tiny, "bench"))
        session.store(tokens, [block] * (TOKENS // BLOCK_TOKENS))

        def once(given: Any) -> Sample:
            found: list[kvtide.Match] = []
            sample = timed(_into(found, session.match), given)
            assert found[0].tokens == TOKENS
            found[0].release()
            return sample

        def ours() -> Mapping[str, Sample]:
            return {"list": once(as_list), "buffer": once(tokens)}

        gc.collect()
        gc.freeze()
        rounds = compare(
            {"kvtide": ours, **settings.peers.match()}, settings.rounds(31, 15), settings.progress, warm_up=2
        )
        gc.unfreeze()
    for task, bar in (("list", 2.2), ("buffer", 4.0)):
        peers = {n: [s.cpu_seconds * 1e3 for s in t["match"]] for n, t in rounds.items() if n != "kvtide"}
        best = "lmcache mp" if peers else ""
        yield figure(
            f"match-{task}",
            "CPU ms",
            [s.cpu_seconds * 1e3 for s in rounds["kvtide"][task]],
            better="lower",
            peers=peers,
            against=best,
            reference=peers.get(best),
            bar=bar if best else None,
            command=settings.command,
            note=f"131,072 tokens given as a {task}, 512 blocks, all present, named, found and leased",
        )


# -- DRAM -------------------------------------------------------------------------------------------------


def dram(settings: Settings) -> Iterator[Record]:
    """Store from and load into callers' buffers, and load as views."""
    for nbytes in (32 * MIB, 2 * MIB):
        count = (settings.rounds(1024, 512) * MIB) // nbytes
        rounds = _dram_rounds(settings, nbytes, count)
        yield from _dram_records(settings, nbytes, rounds)


def _dram_rounds(settings: Settings, nbytes: int, count: int) -> Rounds:
    sources = _sources(nbytes)
    target = np.zeros((count, nbytes), np.uint8)
    scratch = np.zeros((count, nbytes), np.uint8)

    def memcpy() -> Mapping[str, Sample]:
        def copy() -> None:
            for i in range(count):
                np.copyto(scratch[i], sources[i % 4])

        sample = timed(copy, nbytes=count * nbytes)
        return {"store": sample, "load": sample}

    with ExitStack() as stack:
        store = stack.enter_context(
            kvtide.open(dram={"budget": count * nbytes + 256 * MIB, "prefault": True}, nvme={"path": ""})
        )
        store.dram.wait_prefault()
        session = store.session(kvtide.Model(layout_of(nbytes), "bench"))
        chain = session.chain(np.arange(count * BLOCK_TOKENS, dtype=np.uint32))
        blocks = [sources[i % 4] for i in range(count)]

        def ours() -> Mapping[str, Sample]:
            samples = {"store": timed(session.store, chain, blocks, nbytes=count * nbytes)}
            with session.match(chain) as found:
                samples["load"] = timed(lambda: session.load(found, list(target)).wait(), nbytes=count * nbytes)
                samples["view"] = timed(lambda: session.load(found).wait(), nbytes=count * nbytes)
            assert (target[-1] == blocks[-1]).all(), "a wrong byte"
            session.drop(chain)
            return samples

        contestants = {"kvtide": ours, "memcpy": memcpy, **settings.peers.dram(nbytes, count)}
        return compare(contestants, settings.rounds(11, 5), settings.progress)


def _dram_records(settings: Settings, nbytes: int, rounds: Rounds) -> Iterator[Record]:
    size = _names(nbytes)
    peers = {n: t for n, t in rounds.items() if n not in ("kvtide", "memcpy")}
    for task in ("store", "load"):
        limit = [s.speed for s in rounds["memcpy"][task]]
        ours = [s.speed for s in rounds["kvtide"][task]]
        yield figure(
            f"dram-{task}-{size}",
            "GB/s",
            ours,
            better="higher",
            peers={n: [s.speed for s in t[task]] for n, t in peers.items()},
            limit=limit,
            against="memcpy on one core",
            reference=limit,
            bar=0.95,
            command=settings.command,
        )
        if peers:
            best = max(peers, key=lambda n: statistics.median(s.speed for s in peers[n][task]))
            yield figure(
                f"dram-{task}-{size}-against-peer",
                "GB/s",
                ours,
                better="higher",
                against=best,
                reference=[s.speed for s in peers[best][task]],
                bar=1.0,
                command=settings.command,
                note="copies of both use all cores",
            )
    count = settings.rounds(1024, 512) * MIB // nbytes
    yield figure(
        f"dram-view-{size}",
        "us/block",
        [s.seconds / count * 1e6 for s in rounds["kvtide"]["view"]],
        better="lower",
        bar=20,
        command=settings.command,
        note="load as views, no copy",
    )


# -- NVMe -------------------------------------------------------------------------------------------------

THREADS = 4


class _RawDisk:
    """The limit: whole blocks by direct I/O at our depth, into a file whose extents were written before."""

    def __init__(self, folder: Path, nbytes: int, count: int) -> None:
        self._nbytes, self._count = nbytes, count
        self._fd = os.open(folder / "raw", os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(self._fd, 0, nbytes * count)
        memory = os.memfd_create("raw")
        os.posix_fallocate(memory, 0, nbytes * count)
        self._view = memoryview(mmap.mmap(memory, nbytes * count, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
        os.close(memory)
        for i, source in zip(range(count), _sources(nbytes) * count, strict=False):
            self._view[i * nbytes : (i + 1) * nbytes] = source.data.cast("B")
        self._pool = ThreadPoolExecutor(THREADS)

    def __call__(self) -> Mapping[str, Sample]:
        total = self._nbytes * self._count
        return {
            "store": timed(self._all, os.pwritev, nbytes=total),
            "load": timed(self._all, os.preadv, nbytes=total),
        }

    def _all(self, call: Callable[[int, Sequence[Span], int], int]) -> None:
        def one(i: int) -> None:
            span = self._view[i * self._nbytes : (i + 1) * self._nbytes]
            assert call(self._fd, [span], i * self._nbytes) == self._nbytes

        list(self._pool.map(one, range(self._count)))

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._fd)


class _OurDisk:
    """Through DRAM to NVMe and, after DRAM was emptied, back, verified."""

    def __init__(self, folder: Path, nbytes: int, count: int, huge_pages: str) -> None:
        budget = (count + 2) * nbytes // (256 * MIB) * 256 * MIB + 256 * MIB
        self._store = kvtide.open(
            dram={"budget": budget, "prefault": True, "huge_pages": huge_pages},
            nvme={
                "path": str(folder),
                "budget": int(count * nbytes * 1.2) + 64 * MIB,
                "threads": THREADS,
                "queue": count * nbytes,
            },
        )
        self._store.dram.wait_prefault()
        self._total = count * nbytes
        layout = layout_of(nbytes)
        self._slot = layout.geometry["full"].footprint
        self._session = self._store.session(kvtide.Model(layout, "bench"))
        self._chain = self._session.chain(np.arange(count * BLOCK_TOKENS, dtype=np.uint32))
        sources = _sources(nbytes)
        self._blocks = [sources[i % 4] for i in range(count)]

    def __call__(self) -> Mapping[str, Sample]:
        store = timed(self._put, nbytes=self._total)
        while self._store.pipeline.make_room(DRAM, self._slot):
            pass
        with self._session.match(self._chain) as found:
            assert not found.ready
            loaded: list[kvtide.Loaded] = []
            load = timed(_into(loaded, lambda: self._session.load(found).wait()), nbytes=self._total)
            assert len(loaded[0].blocks) == len(self._blocks), f"only {len(loaded[0].blocks)} blocks came"
            assert loaded[0].blocks[-1] == self._blocks[-1].data.cast("B"), "a wrong byte"
            loaded.clear()
        self._session.drop(self._chain)
        return {"store": store, "load": load}

    def _put(self) -> None:
        assert self._session.store(self._chain, self._blocks).dropped == 0
        self._store.flush()

    def close(self) -> None:
        self._store.close()


def nvme(settings: Settings) -> Iterator[Record]:
    """Store to and load from the disk, verified, beside raw direct I/O at the same depth."""
    for nbytes in (32 * MIB, 2 * MIB):
        count = settings.rounds(1024, 256) * MIB // nbytes
        with tempfile.TemporaryDirectory(dir=settings.folder, prefix="kvtide-bench-") as name:
            folder = Path(name)
            ours: dict[str, _OurDisk | _RawDisk] = {
                "kvtide": _OurDisk(folder / "ours", nbytes, count, "no"),
                "raw": _RawDisk(folder, nbytes, count),
            }
            if _huge_pages_free() >= (count + 2) * nbytes + 512 * MIB:
                ours["kvtide, 2 MiB pages"] = _OurDisk(folder / "huge", nbytes, count, "2MiB")
            with ExitStack() as stack:
                for one in ours.values():
                    stack.callback(one.close)
                contestants = {**ours, **settings.peers.disk(nbytes, count, folder)}
                rounds = compare(contestants, settings.rounds(9, 3), settings.progress, warm_up=2)
        yield from _nvme_records(settings, nbytes, rounds)


def _huge_pages_free() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("HugePages_Free:"):
            return int(line.split()[1]) * 2 * MIB
    return 0


def _nvme_records(settings: Settings, nbytes: int, rounds: Rounds) -> Iterator[Record]:
    size = _names(nbytes)
    peers = {n: t for n, t in rounds.items() if n != "raw" and not n.startswith("kvtide")}
    # Into the page cache is not onto the disk.
    direct = {n: t for n, t in peers.items() if "buffered" not in n}
    checksum = _checksum_cost(nbytes)
    for who in (n for n in rounds if n.startswith("kvtide")):
        pages = "-2mib-pages" if "2 MiB" in who else ""
        for task in ("store", "load"):
            ours = [s.speed for s in rounds[who][task]]
            limit = [s.speed for s in rounds["raw"][task]]
            yield figure(
                f"nvme-{task}-{size}{pages}",
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
            ours_cpu = [s.cpu_per_gb for s in rounds[who][task]]
            if not direct:
                continue
            best = max(direct, key=lambda n: statistics.median(s.speed for s in direct[n][task]))
            yield figure(
                f"nvme-{task}-{size}{pages}-against-peer",
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
                f"nvme-{task}-cpu-{size}{pages}",
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


def _checksum_cost(nbytes: int) -> float:
    """CPU seconds per GB of the checksums alone."""
    data = _sources(nbytes)[0].data
    step = nbytes // 64

    def work() -> None:
        for _ in range(256 * MIB // nbytes):
            for i in range(0, nbytes, step):
                xxh3_128_digest(data[i : i + step])

    return statistics.median(timed(work, nbytes=256 * MIB).cpu_per_gb for _ in range(5))


# -- the index --------------------------------------------------------------------------------------------


TINY = kvtide.Layout.attention(layers=1, heads=1, head_dim=1, dtype="uint8", block_tokens=16)
"""Blocks of one page: the cost of a block without the cost of its bytes."""

CHAIN = 64


def scale(settings: Settings) -> Iterator[Record]:
    """What a key costs when many blocks are resident: found, stored, evicted."""
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
    """Fill a store with that many blocks and measure; answers the private memory of a block."""
    slot = TINY.geometry["full"].footprint
    given = [np.zeros(TINY.geometry["full"].nbytes, np.uint8)] * CHAIN
    base = np.arange(CHAIN * TINY.block_tokens, dtype=np.uint32)
    with kvtide.open(dram={"budget": max(blocks * slot, MIB), "segment": "64MiB"}, nvme={"path": ""}) as store:
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
            sample = timed(_into(hits, session.match), chain)
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


def _into(found: list[Any], work: Callable[..., Any]) -> Callable[..., None]:
    """``work`` with its result put into ``found``."""
    return lambda *arguments: found.append(work(*arguments))


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


# -- opening ----------------------------------------------------------------------------------------------


def opening(settings: Settings) -> Iterator[Record]:
    """A tier with a million small blocks: with its journal, and from the headers alone."""
    blocks = 50_000 if settings.quick else 1_000_000
    with tempfile.TemporaryDirectory(dir=settings.folder, prefix="kvtide-bench-") as name:
        path = Path(name) / "tier"
        budget = blocks * 9000 + 256 * MIB
        _fill(path, budget, TINY, blocks, settings.progress)
        sizes = {"dram": {"budget": "64MiB"}, "nvme": {"path": str(path), "budget": budget}}
        for way in ("journal", "headers"):
            seconds = []
            for _ in range(settings.rounds(3, 1)):
                settings.progress(f"opening {blocks:,} blocks from the {way}")
                if way == "headers":
                    (path / "journal").unlink()
                gc.collect()
                start = time.perf_counter()
                store = kvtide.open(**sizes)
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
    """Write blocks straight into a tier."""
    model = kvtide.Model(layout, "bench")
    tier = Nvme(path, budget, threads=8)
    identity = _identity(model)
    span = Scratch().get(identity.geometry.footprint)
    namer = model.namer()
    under_way = threading.Semaphore(16)
    step = 1000
    for first in range(0, blocks, step):
        progress(f"writing {first:,} of {blocks:,} blocks")
        chain = namer.chain(np.arange(step * layout.block_tokens, dtype=np.uint32) + first * 7919)
        under_way.acquire()
        tier.write(
            [
                Write(key, identity, span, chain.parent(i), i, first + i + 1)
                for i, key in enumerate(chain.keys(b"full"))
            ],
            lambda _: under_way.release(),
        )
    tier.close()


# -- the pipeline -----------------------------------------------------------------------------------------


def pipeline(settings: Settings) -> Iterator[Record]:
    """What a batch and a key cost around a tier that itself costs nothing.

    ``tier``: submit and completion through the lane, as the contract has it. ``load``: all of a load, that is also the
    index, slots in DRAM, joins and events.
    """
    model = kvtide.Model(TINY, "bench")
    identity = _identity(model)
    slot = identity.geometry.footprint
    index, clock, tier = Index(tiers=2), SystemClock(), Noop()
    lane = Lane(tier, clock, limit=1 << 40, depth=8)
    memory = Dram(64 * MIB, 16 * MIB)
    line = Pipeline(index, memory, [Cold(1, "noop", tier, lane, Through(), None)], Lru(index), Feed())
    costs: dict[str, dict[int, list[float]]] = {"tier": {1: [], 513: []}, "load": {1: [], 513: []}}
    for count in (1, 513):
        chain = model.namer().chain(np.arange(count * TINY.block_tokens, dtype=np.uint32) + count)
        keys = chain.keys(b"full")
        line.reserve([Pledge(identity, keys, [chain.parent(i) for i in range(count)], range(count))]).seal()
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


FIGURES: dict[str, Callable[[Settings], Iterator[Record]]] = {
    "match": match,
    "dram": dram,
    "nvme": nvme,
    "scale": scale,
    "opening": opening,
    "pipeline": pipeline,
}


def run(settings: Settings, only: Sequence[str] = ()) -> Iterator[Record]:
    """Measure everything, or only the parts that are named."""
    free = shutil.disk_usage(settings.folder).free
    if free < (4 if settings.quick else 16) * 1024 * MIB:
        raise ConfigError(f"{settings.folder} has only {free // MIB} MiB free; give --path on a disk with more")
    for name in only or FIGURES:
        yield from FIGURES[name](settings)
