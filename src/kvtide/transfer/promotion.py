"""Blocks on their way up: from colder tiers to DRAM.

A row in a colder tier gets a slot in DRAM, PENDING there, and a read. Whoever asks for it meanwhile joins: ``_flights``
has, for each pending row, the transfers that wait for it. When the read is verified the row is SEALED in DRAM; if it
fails, the row is a miss.

Why it failed decides what becomes of the copy in the colder tier. A copy that is damaged, or not there, is dropped. One
that is not for this asker (another tenant, model or layout; a key that cannot be had now) stays for those whose it is.
One that the medium did not read this time stays too, until that has happened ``_TRIES`` times in a row.

Who asks for a row that is on its way for another identity does not join: what comes, or fails, is not his. He waits
(``_parked``) until it has landed, and then begins anew.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.block import BlockKey
from kvtide.events import BlockRemoved, BlockStored, Event, Feed
from kvtide.histogram import Histogram, HistogramStatistics
from kvtide.index.index import ABSENT, DRAM, NOWHERE, PENDING, SEALED, Index, Rows, at
from kvtide.index.lease import Lease
from kvtide.interrupts import to_the_end
from kvtide.tiers.base import Identity, Miss, Read, ReadResult
from kvtide.tiers.dram.tier import Dram
from kvtide.transfer.cold_tier import ColdTier
from kvtide.transfer.eraser import Eraser
from kvtide.transfer.residents import Residents, rows_of
from kvtide.transfer.space import SpaceMaker
from kvtide.transfer.transfer import Transfer

__all__ = ["LoadStatistics", "Promotion"]

_CHUNK = 64 << 20
"""A read is cut into jobs of this many bytes, so that deadlines and cancellation bite."""

_TRIES = 3
"""Reads of a block that may fail one after another before its copy is given up: one error of a disk, or a moment
without memory, must not cost a good record."""
_REMEMBERED = 10_000
"""Blocks whose failed reads are counted."""

_LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Seconds of a load that are told apart."""


@dataclass(frozen=True, slots=True)
class LoadStatistics:
    """Loads that had to wait for a colder tier, or for somebody who was just writing."""

    under_way: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    """See ``Transfer.outcome``."""
    seconds: HistogramStatistics = field(default_factory=HistogramStatistics)


class _Job(NamedTuple):
    """Reads of one tier that are made together."""

    cold: ColdTier
    rows: Rows
    reads: list[Read]
    tenants: npt.NDArray[np.uint16]
    """Whose the rows were before."""


_NONE: Rows = np.empty(0, np.int64)


def _part(rows: Rows, states: npt.NDArray[np.uint8], state: int) -> tuple[Rows, Rows]:
    """Rows that are in ``state``, and the others."""
    found = states[at(rows)].tobytes()
    if found.count(state) == len(rows):
        return rows, _NONE
    mask = np.frombuffer(found, np.uint8) == state
    return rows[mask], rows[~mask]


class Promotion:
    """Brings rows to DRAM. ``counts`` is told what happened."""

    def __init__(
        self,
        index: Index,
        residents: Residents,
        dram: Dram,
        colds: Sequence[ColdTier],
        room: SpaceMaker,
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
        self._jobs: dict[int, _Job] = {}
        """Reads that have not ended, by the identity of the batch that the lane was given."""
        self._ready: dict[Callable[[], None], None] = {}
        """What is to be called outside the lock, for those who wait for rows."""
        self._landing: list[Callable[[], None]] = []
        """The same while it is made, under the lock: if that is interrupted, ``repair`` finds it here."""
        self.interrupted: Callable[[], None] = lambda: None
        """Called, under the lock, when a change here was left half done: see ``Pipeline.repair``."""
        self._parked: dict[int, list[tuple[Lease, Identity, Transfer]]] = {}
        """By row: who waits until it has landed for another identity, with a lease of that row."""
        self._failures: dict[tuple[int, BlockKey], int] = {}
        """By tier and block: reads that failed since the last good one."""
        self._outcomes = dict.fromkeys(("whole", "partial", "deadline", "cancelled"), 0)
        self._seconds = Histogram(_LATENCIES)

    def __len__(self) -> int:
        """Rows that somebody waits for."""
        return len(self._flights)

    def statistics(self) -> LoadStatistics:
        """Under the index's lock."""
        under_way = {t for waiting in self._flights.values() for t in waiting if not t.ended}
        return LoadStatistics(len(under_way), dict(self._outcomes), self._seconds.statistics())

    def join(self, row: int, transfer: Transfer) -> None:
        """Tell ``transfer`` when a row that is PENDING in DRAM is there, or will not come. Under the lock."""
        self._flights[row] = (*self._flights.get(row, ()), transfer)

    def _ended(self, transfer: Transfer) -> None:
        self._seconds.add_one(transfer.age)
        with self._index.lock:
            self._outcomes[transfer.outcome] += 1

    def load(self, wanted: Sequence[tuple[Rows, Identity]], transfer: Transfer) -> None:
        """Bring rows to DRAM for ``transfer``. They are distinct, and the caller holds them."""
        for _ in self.load_in_slices(wanted, transfer, sys.maxsize, wait=True):
            pass

    def load_in_slices(
        self, wanted: Sequence[tuple[Rows, Identity]], transfer: Transfer, blocks: int, *, wait: bool
    ) -> Iterator[int]:
        """The same, begun by whoever iterates over it: in slices of so many blocks, which say how many they were. Who
        does not ``wait`` for memory is told 0 while it is taken from the system: go on a little later."""
        transfer.on_end(lambda: self._ended(transfer))
        for rows, _ in wanted:
            transfer.expect(rows.tolist())
        for rows, identity in wanted:
            for first in range(0, len(rows), blocks):
                part = rows[first : first + blocks]
                left = self._bring(part, identity, transfer, wait)
                while len(left) and transfer.wanted:
                    yield 0
                    left = self._bring(left, identity, transfer, wait)
                if len(left):
                    transfer.finish(left.tolist(), [False] * len(left))
                yield len(part)
        transfer.started()

    def _bring(self, rows: Rows, identity: Identity, transfer: Transfer, wait: bool) -> Rows:
        """Answers those for which memory is just being taken."""
        left = rows
        while len(left):
            left = self._start(left, identity, transfer)
            if not len(left):
                break
            grown = self._grow(identity, wait)
            if grown is None:
                return left
            if not grown:
                self._counts["loads dropped: no room in DRAM"] += len(left)
                transfer.finish(left.tolist(), [False] * len(left))
                break
        return _NONE

    def _grow(self, identity: Identity, wait: bool) -> bool | None:
        try:
            return self._room.grow(identity, wait=wait)
        except BaseException:
            self.call_ready()  # what was left half done is repaired: some may have waited for it
            raise

    def _start(self, rows: Rows, identity: Identity, transfer: Transfer) -> Rows:
        """Start or join a read for each row. Answers those for which DRAM must grow first."""
        events: list[Event] = []
        try:
            with self._index.lock:
                try:
                    here, refused, away, left = self._begin(rows, identity, transfer, events)
                except BaseException:
                    self.interrupted()
                    raise
        finally:
            self.call_ready()
        if events:
            self._feed.publish(events)
        if len(here):
            transfer.finish(here.tolist(), [True] * len(here))
        if len(refused):
            transfer.finish(refused.tolist(), [False] * len(refused))
        if len(away):
            transfer.finish(away.tolist(), [False] * len(away))
        return left

    def _begin(
        self, rows: Rows, identity: Identity, transfer: Transfer, events: list[Event]
    ) -> tuple[Rows, Rows, Rows, Rows]:
        """Start or join reads. Answers which rows are here, which are others', which will not come, and for which DRAM
        must grow first."""
        index = self._index
        left = refused = _NONE
        away, here = _part(rows, index.state[DRAM], ABSENT)
        if len(here):
            here, refused = self._of_others(here, identity, transfer)
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
                if self._room.growable(identity):
                    left = np.concatenate([left, rest])
                else:
                    self._counts["loads dropped: no room in DRAM"] += len(rest)
                    away = np.concatenate([away, rest])
            if len(mine):
                self._fly(cold, mine, places, identity, transfer)
        return here, refused, away, left

    def _of_others(self, rows: Rows, identity: Identity, transfer: Transfer) -> tuple[Rows, Rows]:
        """Of rows in DRAM, those of this identity, and those that others have. Under the lock.

        What is on its way for others is neither: ``transfer`` waits for that.
        """
        others = self._index.others(rows, identity.fingerprint)
        refused = _NONE
        if others is not None:
            self._counts["loads dropped: the block in dram is not the asker's"] += int(np.count_nonzero(others))
            rows, refused = rows[~others], rows[others]
        coming = self._residents.coming_to_others(rows, identity)
        if coming is not None:
            if self._residents.doomed:
                coming &= ~self._residents.are_doomed(rows)
            for row in rows[coming].tolist():
                waits = self._residents.lease(rows_of([row])), identity, transfer
                self._parked.setdefault(row, []).append(waits)
            rows = rows[~coming]
        return rows, refused

    def _fly(self, cold: ColdTier, rows: Rows, places: list[int], identity: Identity, transfer: Transfer) -> None:
        """Give rows their slots, and the lane the reads that fill them.

        Under the lock: whoever repairs what an interrupted caller left must know each row that is being read.
        """
        index, size = self._index, identity.geometry.footprint
        tenants = index.tenant[rows]
        self._residents.enter(rows, places, identity)
        self._flights.update(dict.fromkeys(rows.tolist(), (transfer,)))
        sources = index.place[cold.number].take(rows).tolist()
        reads = list(map(Read, index.keys(rows), repeat(identity), sources, self._dram.spans(places, size)))
        step = max(1, _CHUNK // size)
        for i in range(0, len(rows), step):
            cut = slice(i, i + step)
            job = _Job(cold, rows[cut], reads[cut], tenants[cut])
            self._jobs[id(job.reads)] = job
            cold.lane.read(job.reads, functools.partial(self._read_done, job), functools.partial(self._unwanted, job))

    def _unwanted(self, job: _Job) -> bool:
        """Whether a read that is about to start is wanted by nobody any more; then it has ended."""
        with self._index.lock:
            if any(t.wanted for row in job.rows.tolist() for t in self._flights.get(row, ())):
                return False
            # Under the same lock: nobody may join a read that will not be made.
            ready = self._land(job, None)
        self._call(ready)
        return True

    def _read_done(self, job: _Job, results: Sequence[ReadResult]) -> None:
        with self._index.lock:
            ready = self._land(job, results)
        self._call(ready)

    def _call(self, ready: Callable[[], None]) -> None:
        """Tell those who wait for rows; a tier that answers at once does so under the lock: then later."""
        if self._index.lock_is_mine():
            self.later(ready)
        else:
            ready()

    def later(self, ready: Callable[[], None]) -> None:
        """Let ``ready`` be called by the next ``call_ready``, perhaps twice."""
        self._ready[ready] = None

    @property
    def ready(self) -> Collection[Callable[[], None]]:
        """What ``call_ready`` has to call. One object for good, so that whoever is in a hurry looks here first."""
        return self._ready

    def call_ready(self) -> None:
        """Call what was left for when nobody on this thread has the lock."""
        if self._ready and not self._index.lock_is_mine():
            to_the_end(self._call_all)  # others wait for it

    def _call_all(self) -> None:
        for ready in list(self._ready):
            ready()
            self._ready.pop(ready, None)

    def repair(self, written: set[int]) -> None:
        """Rows that are on their way to DRAM though nobody brings them will not come; ``written`` are somebody's to
        fill. Their slots are in the book until it is made anew. Under the lock."""
        index, brought = self._index, set(written)
        self._leave_landing()
        for number, job in list(self._jobs.items()):
            if job.cold.lane.reading(job.reads):
                brought.update(job.rows.tolist())
            else:
                del self._jobs[number]
        state = index.state[DRAM]
        lost = [row for row in np.flatnonzero(state[: index.size] == PENDING).tolist() if row not in brought]
        state[lost] = ABSENT
        index.place[DRAM][lost] = NOWHERE
        over = [row for row in self._flights if state[row] != PENDING]
        if over:
            self.land_later(over, [bool(state[row] == SEALED) for row in over])

    def _land(self, job: _Job, results: Sequence[ReadResult] | None) -> Callable[[], None]:
        """Reads ended: well, badly, or (``results`` None) before they began. Call the answer outside the lock."""
        index, doomed = self._index, self._residents.doomed
        cold, rows, reads = job.cold, job.rows, job.reads
        self._jobs.pop(id(reads), None)
        bad: list[tuple[BlockKey, int]] = []
        whose: list[int] = []
        numbers = rows.tolist()
        good = list(map(bool, results)) if results is not None else [False] * len(numbers)
        if doomed:
            good = [fine and row not in doomed for row, fine in zip(numbers, good, strict=True)]
        arrived = rows if False not in good else rows[good]
        index.identity[at(arrived)] = reads[0].identity.fingerprint  # it was verified
        self._residents.seal(arrived)
        if len(arrived) < len(rows):
            for i, row in enumerate(numbers):
                if good[i]:
                    continue
                self._residents.give_up(rows[i : i + 1])
                index.tenant[row] = job.tenants[i]  # who asked in vain need not be whose it is
                same = index.place[cold.number][row] == reads[i].place
                if results is None or results[i] or not same or row in doomed:
                    continue
                if self._lost(cold, reads[i].key, results[i]):
                    bad.append((reads[i].key, index.remove(row, cold.number)))
                    whose.append(int(index.identity[row]))
        if self._failures:
            for row in arrived.tolist():
                self._failures.pop((cold.number, index.key(row)), None)
        tell = self.landed(numbers, good)
        self._landing.pop()
        events: list[Event] = []
        if self._feed.followed and len(arrived):
            events.append(BlockStored("dram", index.keys(arrived), index.identities(arrived)))
        self._counts[f"blocks read from {cold.name}"] += len(arrived)
        self._residents.unhold(rows)
        if bad:
            self._counts[f"blocks unreadable in {cold.name}"] += len(bad)
            events.append(BlockRemoved(cold.name, tuple(k for k, _ in bad), "unreadable", tuple(whose)))
            if cold.shared:
                bad = []  # others may be able to read it; the tier removes what nobody can
            for key, _ in bad:
                self._eraser.dies(cold, key)
        if not events:
            return tell

        def ready() -> None:
            if events:
                self._feed.publish(events)
                events.clear()
                if bad:
                    self._eraser.erase(cold, bad)
            tell()

        return ready

    def _lost(self, cold: ColdTier, key: BlockKey, result: ReadResult) -> bool:
        """Whether a block that could not be read from a tier is to be dropped there. Under the lock."""
        if result is Miss.REFUSED:
            self._counts[f"loads dropped: the block in {cold.name} is not the asker's"] += 1
            return False
        if result is Miss.FAILED:
            if len(self._failures) >= _REMEMBERED:
                self._failures.clear()
            tries = self._failures[cold.number, key] = self._failures.get((cold.number, key), 0) + 1
            if tries < _TRIES:
                self._counts[f"loads dropped: a read from {cold.name} failed"] += 1
                return False
        self._failures.pop((cold.number, key), None)
        return True

    def land_later(self, rows: Sequence[int], good: Sequence[bool]) -> None:
        """Let those who wait for rows be told by the next ``call_ready``. Under the lock.

        If this is interrupted, and ``repair`` is called, they are told all the same.
        """
        self.landed(rows, good)
        self._leave_landing()

    def _leave_landing(self) -> None:
        for tell in self._landing:
            self._ready[tell] = None
        self._landing.clear()

    def landed(self, rows: Sequence[int], good: Sequence[bool]) -> Callable[[], None]:
        """What to call, outside the lock, for those who wait for rows. It stays in ``_landing``."""
        waiting: set[Transfer] = set()
        parked: deque[tuple[Lease, Identity, Transfer]] = deque()

        def tell() -> None:
            for transfer in waiting:
                transfer.finish(rows, good)
            while parked:
                try:
                    waits = lease, identity, transfer = parked.pop()
                except IndexError:  # another thread was sooner
                    return
                try:
                    if transfer.wanted:
                        self._bring(lease.rows, identity, transfer, wait=True)
                except BaseException:
                    parked.append(waits)  # whoever calls this again brings it
                    raise
                lease.release()

        # Known before they are taken out, and in single steps: whoever is interrupted in between forgets none.
        self._landing.append(tell)
        # Each transfer is told of all the rows; it knows which of them it waits for.
        waiting.update(chain.from_iterable(set(map(self._flights.get, rows, repeat(())))))
        deque(map(self._flights.pop, rows, repeat(())), maxlen=0)
        if self._parked:
            parked.extend(chain.from_iterable(map(self._parked.pop, rows, repeat(()))))
        return tell
