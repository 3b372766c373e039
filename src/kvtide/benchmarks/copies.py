"""Copies of blocks into and out of a store, compared with memcpy: shared by the benchmarks of DRAM and of the node."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

import kvtide
from kvtide.benchmarks.record import BenchRecord, Contestant, Rounds, Sample, figure, timed
from kvtide.benchmarks.settings import Settings, block_sources, layout_of
from kvtide.block import BLOCK_TOKENS

__all__ = ["Copies", "Moment", "memcpy", "records", "through"]

Moment = tuple[float, float]
"""Start and end time, on a clock that all processes share."""


class Copies:
    """A session that stores and loads the same ``count`` blocks, all at once."""

    def __init__(self, store: kvtide.Store | kvtide.Client, nbytes: int, count: int, number: int = 0) -> None:
        """``number`` distinguishes several of these on one store."""
        sources = block_sources(nbytes)
        self._session = store.session(kvtide.Model(layout_of(nbytes), "bench"))
        self._blocks = [sources[i % 4] for i in range(count)]
        self._target = np.zeros((count, nbytes), np.uint8)
        first = np.uint32(number << 24)
        self._chain = self._session.chain(np.arange(count * BLOCK_TOKENS, dtype=np.uint32) + first)

    def store(self) -> None:
        stored = self._session.store(self._chain, self._blocks)
        assert stored.stored == len(self._blocks), stored

    def load(self, into: bool = True) -> Callable[[], None]:
        """A function that loads the blocks; the match is made beforehand."""
        found = self._session.match(self._chain)
        targets = list(self._target) if into else None

        def load() -> None:
            self._session.load(found, targets).wait()
            found.release()

        return load

    def check(self) -> None:
        assert (self._target[-1] == self._blocks[-1]).all(), "a wrong byte"
        self._target[-1] = 0

    def drop(self) -> None:
        self._session.drop(self._chain)


def through(copies: Copies, nbytes: int) -> Contestant:
    """A store's round of ``nbytes`` in all: store, load, and load as views."""

    def round_() -> Mapping[str, Sample]:
        samples = {
            "store": timed(copies.store, nbytes=nbytes),
            "load": timed(copies.load(), nbytes=nbytes),
            "view": timed(copies.load(into=False), nbytes=nbytes),
        }
        copies.check()
        copies.drop()
        return samples

    return round_


class Memcpy:
    """Copies ``count`` blocks with one core."""

    def __init__(self, nbytes: int, count: int) -> None:
        self._sources = block_sources(nbytes)
        self._scratch = np.zeros((count, nbytes), np.uint8)

    def copy(self) -> None:
        for i, target in enumerate(self._scratch):
            np.copyto(target, self._sources[i % 4])


def memcpy(nbytes: int, count: int) -> Contestant:
    """The limit: the copy speed of one core."""
    work = Memcpy(nbytes, count)

    def round_() -> Mapping[str, Sample]:
        sample = timed(work.copy, nbytes=count * nbytes)
        return {"store": sample, "load": sample}

    return round_


def moment(work: Callable[[], None]) -> Moment:
    start = time.perf_counter()
    work()
    return start, time.perf_counter()


def together(moments: list[Moment], nbytes: int) -> Sample:
    """The work of several processes as one sample: from the first start to the last end."""
    return Sample(max(stop for _, stop in moments) - min(start for start, _ in moments), 0.0, nbytes)


def records(
    settings: Settings, name: str, rounds: Rounds, limit: str, bar: float, peer_bar: float, note: str = ""
) -> Iterator[BenchRecord]:
    """The figures of "store" and "load": against memcpy and, if there are other systems, against the best of them."""
    peers = {n: t for n, t in rounds.items() if n not in ("kvtide", "memcpy")}
    for task in ("store", "load"):
        copied = [s.speed for s in rounds["memcpy"][task]]
        ours = [s.speed for s in rounds["kvtide"][task]]
        full = name.format(task=task)
        yield figure(
            full,
            "GB/s",
            ours,
            better="higher",
            peers={n: [s.speed for s in t[task]] for n, t in peers.items()},
            limit=copied,
            against=limit,
            reference=copied,
            bar=bar,
            command=settings.command,
        )
        if peers:
            best = max(peers, key=lambda n: statistics.median(s.speed for s in peers[n][task]))
            yield figure(
                f"{full}-against-peer",
                "GB/s",
                ours,
                better="higher",
                against=best,
                reference=[s.speed for s in peers[best][task]],
                bar=peer_bar,
                command=settings.command,
                note=note,
            )
