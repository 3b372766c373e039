"""Blocks on their way up: from colder tiers to DRAM.

A row in a colder tier gets a slot in DRAM, PENDING there, and a read. Whoever asks for it meanwhile joins: ``_flights``
has, for each pending row, the transfers that wait for it. When the read is verified the row is SEALED in DRAM; if it
fails, the bad copy is dropped and the row is a miss.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat

import numpy as np
import numpy.typing as npt

from kvtide.block import BlockKey
from kvtide.events import BlockRemoved, BlockStored, Event, Feed
from kvtide.histogram import Histogram, HistogramStatistics
from kvtide.index.index import ABSENT, DRAM, SEALED, Index, Rows, at
from kvtide.tiers.base import Identity, Read
from kvtide.tiers.dram import Dram
from kvtide.transfer.cold import Cold
from kvtide.transfer.eraser import Eraser
from kvtide.transfer.residents import Residents
from kvtide.transfer.room import Room
from kvtide.transfer.transfer import Transfer

__all__ = ["Ascent", "LoadStatistics"]

_CHUNK = 64 << 20
"""A read is cut into jobs of this many bytes, so that deadlines and cancellation bite."""

_LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Seconds of a load that are told apart."""


@dataclass(frozen=True, slots=True)
class LoadStatistics:
    """Loads that had to wait for a colder tier, or for somebody who was just writing."""

    under_way: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    """See ``Transfer.outcome``."""
    seconds: HistogramStatistics = field(default_factory=HistogramStatistics)


_NONE: Rows = np.empty(0, np.int64)


def _part(rows: Rows, states: npt.NDArray[np.uint8], state: int) -> tuple[Rows, Rows]:
    """Rows that are in ``state``, and the others."""
    found = states[at(rows)].tobytes()
    if found.count(state) == len(rows):
        return rows, _NONE
    mask = np.frombuffer(found, np.uint8) == state
    return rows[mask], rows[~mask]


class Ascent:
    """Brings rows to DRAM. ``counts`` is told what happened."""

    def __init__(
        self,
        index: Index,
        residents: Residents,
        dram: Dram,
        colds: Sequence[Cold],
        room: Room,
        eraser: Eraser,
        feed: Feed,
        counts: Counter[str],
    ) -> None:
        self._index = index
        self._residents = residents
        self._dram = dram
        self._colds = colds
        self._room = room
        self._eraser = eraser
        self._feed = feed
        self._counts = counts
        self._flights: dict[int, tuple[Transfer, ...]] = {}
        self._outcomes = dict.fromkeys(("whole", "partial", "deadline", "cancelled"), 0)
        self._seconds = Histogram(_LATENCIES)

    def __len__(self) -> int:
        """Rows that somebody waits for."""
        return len(self._flights)

    def statistics(self) -> LoadStatistics:
        """Under the index's lock."""
        under_way = {t for waiting in self._flights.values() for t in waiting if not t.ended}
        return LoadStatistics(len(under_way), dict(self._outcomes), self._seconds.statistics())

    def _ended(self, transfer: Transfer) -> None:
        self._seconds.add_one(transfer.age)
        with self._index.lock:
            self._outcomes[transfer.outcome] += 1

    def load(self, wanted: Sequence[tuple[Rows, Identity]], transfer: Transfer) -> None:
        """Bring rows to DRAM for ``transfer``. They are distinct, and the caller holds them."""
        transfer.on_end(lambda: self._ended(transfer))
        for rows, _ in wanted:
            transfer.expect(rows.tolist())
        for rows, identity in wanted:
            left = rows
            while len(left):
                left = self._start(left, identity, transfer)
                if len(left) and not self._room.grow(identity):
                    self._counts["loads dropped: no room in DRAM"] += len(left)
                    transfer.finish(left.tolist(), [False] * len(left))
                    break
        transfer.started()

    def _start(self, rows: Rows, identity: Identity, transfer: Transfer) -> Rows:
        """Start or join a read for each row. Answers those for which DRAM must grow first."""
        index = self._index
        events: list[Event] = []
        jobs: list[tuple[Cold, Rows, list[Read]]] = []
        with index.lock:
            left = _NONE
            away, here = _part(rows, index.state[DRAM], ABSENT)
            if len(here):
                here, coming = _part(here, index.state[DRAM], SEALED)
                if self._residents.doomed:  # they will not come, or nobody knows when
                    lost = self._residents.are_doomed(coming)
                    away, coming = np.concatenate([away, coming[lost]]), coming[~lost]
                for row in coming.tolist():
                    self._flights[row] = (*self._flights.get(row, ()), transfer)
            for cold in self._colds:
                mine, away = _part(away, index.state[cold.number], SEALED)
                allowed = self._room.allow(identity, len(mine), events)
                if allowed < len(mine):
                    self._room.refuse(identity, "load", len(mine) - allowed)
                    mine, away = mine[:allowed], np.concatenate([away, mine[allowed:]])
                places = self._room.take(identity, len(mine), events, mine)
                if len(places) < len(mine):
                    mine, rest = mine[: len(places)], mine[len(places) :]
                    if self._dram.growable(identity.geometry.footprint, identity.domain):
                        left = np.concatenate([left, rest])
                    else:
                        self._counts["loads dropped: no room in DRAM"] += len(rest)
                        away = np.concatenate([away, rest])
                if len(mine):
                    jobs += self._fly(cold, mine, places, identity, transfer)
        if events:
            self._feed.publish(events)
        if len(here):
            transfer.finish(here.tolist(), [True] * len(here))
        if len(away):
            transfer.finish(away.tolist(), [False] * len(away))
        for cold, flying, reads in jobs:
            cold.lane.read(
                reads,
                functools.partial(self._read_done, cold, flying, reads),
                functools.partial(self._unwanted, cold, flying, reads),
            )
        return left

    def _fly(
        self, cold: Cold, rows: Rows, places: list[int], identity: Identity, transfer: Transfer
    ) -> list[tuple[Cold, Rows, list[Read]]]:
        """Give rows their slots and make the reads that fill them."""
        index, size = self._index, identity.geometry.footprint
        self._residents.enter(rows, places, identity)
        self._flights.update(dict.fromkeys(rows.tolist(), (transfer,)))
        sources = index.place[cold.number].take(rows).tolist()
        reads = list(map(Read, index.keys(rows), repeat(identity), sources, self._dram.spans(places, size)))
        step = max(1, _CHUNK // size)
        if len(reads) <= step:
            return [(cold, rows, reads)]
        return [(cold, rows[i : i + step], reads[i : i + step]) for i in range(0, len(rows), step)]

    def _unwanted(self, cold: Cold, rows: Rows, reads: list[Read]) -> bool:
        """Whether a read that is about to start is wanted by nobody any more; then it has ended."""
        with self._index.lock:
            if any(t.wanted for row in rows.tolist() for t in self._flights.get(row, ())):
                return False
            # Under the same lock: nobody may join a read that will not be made.
            ready = self._land(cold, rows, reads, None)
        ready()
        return True

    def _read_done(self, cold: Cold, rows: Rows, reads: list[Read], results: Sequence[bool]) -> None:
        with self._index.lock:
            ready = self._land(cold, rows, reads, results)
        ready()

    def _land(self, cold: Cold, rows: Rows, reads: list[Read], results: Sequence[bool] | None) -> Callable[[], None]:
        """Reads ended: well, badly, or (``results`` None) before they began. Call the answer outside the lock."""
        index, doomed = self._index, self._residents.doomed
        bad: list[tuple[BlockKey, int]] = []
        numbers = rows.tolist()
        good = list(results) if results is not None else [False] * len(numbers)
        if doomed:
            good = [fine and row not in doomed for row, fine in zip(numbers, good, strict=True)]
        arrived = rows if False not in good else rows[good]
        self._residents.seal(arrived)
        if len(arrived) < len(rows):
            for i, row in enumerate(numbers):
                if good[i]:
                    continue
                self._residents.leave(row)
                same = index.place[cold.number][row] == reads[i].place
                if results is not None and not results[i] and same and row not in doomed:
                    bad.append((reads[i].key, index.remove(row, cold.number)))
        tell = self.landed(numbers, good)
        events: list[Event] = []
        if self._feed.followed and len(arrived):
            events.append(BlockStored("dram", index.keys(arrived)))
        self._counts[f"blocks read from {cold.name}"] += len(arrived)
        self._residents.unhold(rows)
        if bad:
            self._counts[f"blocks unreadable in {cold.name}"] += len(bad)
            events.append(BlockRemoved(cold.name, tuple(k for k, _ in bad), "unreadable"))
            if cold.shared:
                bad = []  # others may be able to read it; the tier removes what nobody can
            for key, _ in bad:
                self._eraser.dies(cold, key)
        if not events:
            return tell

        def ready() -> None:
            if bad:
                self._eraser.erase(cold, bad)
            self._feed.publish(events)
            tell()

        return ready

    def landed(self, rows: Sequence[int], good: Sequence[bool]) -> Callable[[], None]:
        """What to call, outside the lock, for those who wait for rows."""
        # Each transfer is told of all the rows; it knows which of them it waits for.
        waiting = set(chain.from_iterable(set(map(self._flights.pop, rows, repeat(())))))

        def tell() -> None:
            for transfer in waiting:
                transfer.finish(rows, good)

        return tell
