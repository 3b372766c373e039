"""A tier that manages places but keeps no bytes, and answers at once.

It measures the cost of everything around a tier: index, planner, lane and callbacks, without a disk or a copy. Its
results are as correct as any tier's (another key, model or place is a miss; a full tier refuses), but a read leaves the
span unchanged.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvtide.block import BlockKey
from kvtide.tiers.base import (
    NOWHERE,
    DropDone,
    Held,
    Identity,
    Miss,
    Read,
    ReadDone,
    ReadResult,
    TierStatistics,
    Write,
    WriteDone,
)

__all__ = ["Noop"]


class Noop:
    """Places for at most ``budget`` bytes of blocks. ``done`` is called before a call returns."""

    def __init__(self, budget: int = 1 << 62) -> None:
        self._budget = budget
        self._used = 0
        self._next = 0
        self._held: dict[int, tuple[BlockKey, Identity]] = {}
        self._read = self._written = self._failed_reads = self._failed_writes = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Noop {len(self._held)} blocks>"

    def read(self, batch: Sequence[Read], done: ReadDone) -> None:
        results: list[ReadResult] = []
        with self._lock:
            get = self._held.get
            for item in batch:
                key, identity = get(item.place, (None, None))
                if key != item.key or identity is None:
                    results.append(False)
                elif identity is not item.identity and identity != item.identity:
                    results.append(Miss.REFUSED)
                elif item.sections is None:
                    self._read += identity.geometry.footprint
                    results.append(True)
                else:
                    sections = len(item.wanted)
                    self._read += sections * identity.geometry.stride
                    results.append(sections > 0)
            self._failed_reads += results.count(False)
        done(results)

    def write(self, batch: Sequence[Write], done: WriteDone) -> None:
        places = []
        with self._lock:
            for item in batch:
                size = item.identity.geometry.footprint
                if self._used + size > self._budget:
                    places.append(NOWHERE)
                    continue
                # Never reused, so that a place that was freed is recognised.
                place = self._next = self._next + 1
                self._held[place] = item.key, item.identity
                self._used += size
                self._written += size
                places.append(place)
            self._failed_writes += places.count(NOWHERE)
        done(places)

    def drop(self, items: Sequence[tuple[BlockKey, int]], done: DropDone) -> None:
        for key, place in items:
            self.evict(key, place)
        done([True] * len(items))

    def evict(self, key: BlockKey, place: int) -> None:
        with self._lock:
            held = self._held.pop(place, None)
            if held is not None:
                self._used -= held[1].geometry.footprint

    def scan(self) -> Iterator[Held]:
        return iter(())

    def own(self, places: npt.NDArray[np.int64], owners: npt.NDArray[np.int64]) -> None:
        """Nothing to do: the tier is empty at the start."""

    def statistics(self) -> TierStatistics:
        with self._lock:
            return TierStatistics(
                blocks=len(self._held),
                bytes_used=self._used,
                bytes_taken=self._used,
                budget=self._budget,
                bytes_read=self._read,
                bytes_written=self._written,
                failed_reads=self._failed_reads,
                failed_writes=self._failed_writes,
            )

    def close(self) -> None:
        with self._lock:
            self._held.clear()
            self._used = 0
