"""Tiers that manage slots like real ones but hold no bytes, for fast replays of a trace.

All blocks share one span of memory, which is never read. Everything else is as in the real tiers: budgets, segments,
generations, and which blocks are evicted to make space.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvtide.block import BlockKey, Span
from kvtide.tiers.base import NOWHERE, DropDone, Held, Read, ReadDone, TierStatistics, Write, WriteDone
from kvtide.tiers.dram.memory import Memory
from kvtide.tiers.dram.tier import Dram
from kvtide.tiers.segments import Segments, ladder

__all__ = ["SimulatedDram", "SimulatedTier"]


class _Nothing(Memory):
    """An empty stand-in for a memory segment."""

    def __init__(self) -> None: ...

    def close(self) -> None: ...


class SimulatedDram(Dram):
    """A DRAM tier whose slots have no memory."""

    def __init__(self, budget: int, segment: int, block: int) -> None:
        super().__init__(budget, segment, huge_pages="no")
        self._span = memoryview(bytearray(block))

    def _allocate(self, nbytes: int) -> Memory:
        return _Nothing()

    def span(self, place: int, nbytes: int) -> Span:
        return self._span[:nbytes]

    def spans(self, places: Sequence[int], nbytes: int) -> list[Span]:
        return [self._span[:nbytes]] * len(places)


class SimulatedTier:
    """A colder tier that only manages slots. ``evict`` is called with a size and a number of slots to make space, as by
    an NVMe tier. Calls ``done`` at once."""

    def __init__(self, budget: int, segment: int, evict: Callable[[int, int], bool]) -> None:
        self.segments = Segments(budget, segment)
        self.book_lock = threading.Lock()
        self._evict = evict
        self._read = self._written = self._blocks = self._failed = 0

    def __repr__(self) -> str:
        return f"<SimulatedTier {self._blocks} blocks>"

    def read(self, batch: Sequence[Read], done: ReadDone) -> None:
        self._read += sum(item.identity.geometry.footprint for item in batch)
        done([True] * len(batch))

    def write(self, batch: Sequence[Write], done: WriteDone) -> None:
        places: list[int] = []
        for nbytes, items in itertools.groupby(batch, lambda item: item.identity.geometry.footprint):
            places += self._write(nbytes, np.array([item.owner for item in items], np.int64))
        done(places)

    def _write(self, nbytes: int, owners: npt.NDArray[np.int64]) -> list[int]:
        """Places for blocks of that size; space is made for all of them at once, as by an NVMe tier."""
        size, places = ladder(nbytes), list[int]()
        while len(places) < len(owners):
            left = owners[len(places) :]
            with self.book_lock:
                found = self.segments.take_many(size, len(left), left)
                if not found and self._grow(size):
                    continue
            places += found
            if len(found) < len(left) and not found and not self._evict(size, len(left)):
                break
        self._written += nbytes * len(places)
        self._blocks += len(places)
        self._failed += len(owners) - len(places)
        return places + [NOWHERE] * (len(owners) - len(places))

    def _grow(self, size: int) -> bool:
        spare = self.segments.spare(size)
        if spare is not None:
            self.segments.remove(spare)
        if slots := self.segments.fit(size):
            self.segments.add(size, slots)
        return bool(slots)

    def drop(self, items: Sequence[tuple[BlockKey, int]], done: DropDone) -> None:
        for key, place in items:
            if place != NOWHERE:
                self.evict(key, place)
        done([True] * len(items))

    def evict(self, key: BlockKey, place: int) -> None:
        with self.book_lock:
            self.segments.release(place)
        self._blocks -= 1

    def scan(self) -> Iterator[Held]:
        return iter(())

    def own(self, places: npt.NDArray[np.int64], owners: npt.NDArray[np.int64]) -> None:
        """Nothing to do: the tier is empty at the start."""

    def statistics(self) -> TierStatistics:
        with self.book_lock:
            segments = self.segments
            return TierStatistics(
                blocks=self._blocks,
                bytes_used=segments.used,
                bytes_taken=segments.taken,
                budget=segments.budget,
                bytes_read=self._read,
                bytes_written=self._written,
                failed_writes=self._failed,
            )

    def close(self) -> None:
        """Nothing to release."""
