"""Promotion: reads blocks from colder tiers into DRAM.

A row in a colder tier gets a slot in DRAM, PENDING there, and a read. Later requests for it join: ``_flights`` has, for
each pending row, the transfers that wait for it. When the read is verified, the row is SEALED in DRAM; if it fails, the
row is a miss.

The reason for a failure decides what happens to the copy in the colder tier:

- A copy that is damaged or missing is dropped.
- A copy that is not for this caller (another tenant, model or layout; a key that is unavailable now) stays for its
  owners.
- A copy that the medium failed to read stays too, until that has happened ``_TRIES`` times in a row.

A request for a row that is being read for another identity does not join, because neither the data nor the failure
concerns it. It waits (``_parked``) until that read has ended, and then starts its own.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.block import BlockKey
from kvtide.counts import Count, TierCount
from kvtide.events import BlockRemoved, BlockStored, Event
from kvtide.histogram import Histogram, HistogramStatistics
from kvtide.index.absence_log import Absence, AbsenceCause
from kvtide.index.index import ABSENT, DRAM, NOWHERE, PENDING, SEALED, Rows, at
from kvtide.index.lease import Lease
from kvtide.interrupts import again_if_interrupted
from kvtide.tiers.base import Identity, Miss, Read, ReadResult
from kvtide.transfer.cold_tier import ColdTier, nearest
from kvtide.transfer.context import TransferContext
from kvtide.transfer.residents import rows_of
from kvtide.transfer.second_reads import ReadUnderWay, SecondReads
from kvtide.transfer.space import SpaceMaker
from kvtide.transfer.transfer import Transfer

__all__ = ["LoadStatistics", "Promotion"]

_CHUNK = 64 << 20
"""A read is split into jobs of this many bytes, so that deadlines and cancellation take effect in between."""

_TRIES = 3
"""Consecutive failed reads of a block before its copy is dropped: one disk error, or a moment without memory, must not
cost a good record."""
_REMEMBERED = 10_000
"""Maximum number of blocks whose failed reads are counted."""

_LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Histogram bounds for the duration of loads, in seconds."""


@dataclass(frozen=True, slots=True)
class LoadStatistics:
    """Statistics of loads that had to wait for a colder tier or for a writer."""

    under_way: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    """See ``Transfer.outcome``."""
    seconds: HistogramStatistics = field(default_factory=HistogramStatistics)


class _Job(NamedTuple):
    """Reads from one tier that are submitted together."""

    cold: ColdTier
    rows: Rows
    reads: list[Read]
    tenants: npt.NDArray[np.uint16]
    """The tenants of the rows before the read."""


_NONE: Rows = np.empty(0, np.int64)
_CAUSES: dict[ReadResult, AbsenceCause] = {
    Miss.REFUSED: AbsenceCause.OTHERS_BLOCK,
    Miss.FAILED: AbsenceCause.READ_FAILED,
}


def _part(rows: Rows, states: npt.NDArray[np.uint8], state: int) -> tuple[Rows, Rows]:
    """Split rows into those in ``state`` and the others."""
    found = states[at(rows)].tobytes()
    if found.count(state) == len(rows):
        return rows, _NONE
    mask = np.frombuffer(found, np.uint8) == state
    return rows[mask], rows[~mask]


class Promotion:
    """Loads rows into DRAM."""

    def __init__(self, context: TransferContext, space: SpaceMaker) -> None:
        self._index, self._dram, self._colds = context.index, context.dram, context.colds
        self._residents, self._eraser = context.residents, context.eraser
        self._feed, self._counts = context.feed, context.counts
        self._interrupted = context.interrupted
        self._space = space
        self._second: SecondReads | None = None
        self._flights: dict[int, tuple[Transfer, ...]] = {}
        self._jobs: dict[int, _Job] = {}
        """Unfinished reads, by the ``id`` of the batch that the lane was given."""
        self._ready: dict[Callable[[], None], None] = {}
        """Callbacks for waiters on rows, to be called without the lock."""
        self._landing: list[Callable[[], None]] = []
        """Such callbacks while they are being prepared under the lock: if that is interrupted, ``repair`` finds them
        here."""
        self._parked: dict[int, list[tuple[Lease, Identity, Transfer]]] = {}
        """By row: requests that wait until its read for another identity has ended, each with a lease on the row."""
        self._failures: dict[tuple[int, BlockKey], int] = {}
        """Failed reads since the last good one, by tier and block."""
        self._outcomes = dict.fromkeys(("whole", "partial", "deadline", "cancelled"), 0)
        self._seconds = Histogram(_LATENCIES)

    def use_second_reads(self, second: SecondReads) -> None:
        """Read from a second node what the first does not send in time."""
        second.wanted = self._is_wanted
        self._second = second

    def __len__(self) -> int:
        """Number of rows that a caller waits for."""
        return len(self._flights)

    def statistics(self) -> LoadStatistics:
        """Call with the index lock held."""
        under_way = {t for waiting in self._flights.values() for t in waiting if not t.ended}
        return LoadStatistics(len(under_way), dict(self._outcomes), self._seconds.statistics())

    def join(self, row: int, transfer: Transfer) -> None:
        """Tell ``transfer`` when a row that is PENDING in DRAM is complete, or that it failed. Call with the lock
        held."""
        self._flights[row] = (*self._flights.get(row, ()), transfer)

    def _ended(self, transfer: Transfer) -> None:
        self._seconds.add_one(transfer.age)
        with self._index.lock:
            self._outcomes[transfer.outcome] += 1

    def load(self, wanted: Sequence[tuple[Rows, Identity]], transfer: Transfer) -> None:
        """Load rows into DRAM for ``transfer``. They are distinct, and the caller holds them."""
        for _ in self.load_in_slices(wanted, transfer, sys.maxsize, wait=True):
            pass

    def load_in_slices(
        self, wanted: Sequence[tuple[Rows, Identity]], transfer: Transfer, blocks: int, *, wait: bool
    ) -> Iterator[int]:
        """As ``load``, but begun by the iterating caller in slices of ``blocks`` blocks; yields the size of each. With
        ``wait`` False it yields 0 while memory is being taken from the system; the caller then continues a little
        later."""
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
        """Returns the rows for which memory is still being taken."""
        left = rows
        while len(left):
            left = self._start(left, identity, transfer)
            if not len(left):
                break
            grown = self._grow(identity, wait)
            if grown is None:
                return left
            if not grown:
                self._counts[Count.LOAD_NO_ROOM] += len(left)
                with self._index.lock:
                    away = left
                    for cold in self._colds:
                        there, away = _part(away, self._index.state[cold.number], SEALED)
                        self._note_failed(there, identity, cold.number, AbsenceCause.NO_ROOM)
                transfer.finish(left.tolist(), [False] * len(left))
                break
        return _NONE

    def _grow(self, identity: Identity, wait: bool) -> bool | None:
        try:
            return self._space.grow(identity, wait=wait)
        except BaseException:
            self.call_ready()  # the change was repaired, and callers may have waited for its rows
            raise

    def _start(self, rows: Rows, identity: Identity, transfer: Transfer) -> Rows:
        """Start or join a read for each row. Returns the rows for which DRAM must grow first."""
        events: list[Event] = []
        try:
            with self._index.lock:
                try:
                    here, refused, away, left = self._begin(rows, identity, transfer, events)
                except BaseException:
                    self._interrupted()
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
        """Start or join reads. Returns the rows that are present, those of other identities, those that will not be
        loaded, and those for which DRAM must grow first."""
        index = self._index
        left = refused = _NONE
        away, here = _part(rows, index.state[DRAM], ABSENT)
        if len(here):
            here, refused = self._of_others(here, identity, transfer)
            here, coming = _part(here, index.state[DRAM], SEALED)
            if self._residents.doomed:  # they will not arrive, or only at an unknown time
                lost = self._residents.are_doomed(coming)
                away, coming = np.concatenate([away, coming[lost]]), coming[~lost]
            for row in coming.tolist():
                self._flights[row] = (*self._flights.get(row, ()), transfer)
        for cold in nearest(self._colds) if len(away) else ():
            mine, away = _part(away, index.state[cold.number], SEALED)
            allowed = self._space.allow(identity, len(mine), events)
            if allowed < len(mine):
                self._space.refuse(identity, len(mine) - allowed, load=True)
                forgetting = identity.tenant in self._residents.forgotten
                cause = AbsenceCause.FORGETTING if forgetting else AbsenceCause.QUOTA
                self._note_failed(mine[allowed:], identity, cold.number, cause)
                mine, away = mine[:allowed], np.concatenate([away, mine[allowed:]])
            places = self._space.take(identity, len(mine), events, mine)
            if len(places) < len(mine):
                mine, rest = mine[: len(places)], mine[len(places) :]
                if self._space.growable(identity):
                    left = np.concatenate([left, rest])
                else:
                    self._counts[Count.LOAD_NO_ROOM] += len(rest)
                    self._note_failed(rest, identity, cold.number, AbsenceCause.NO_ROOM)
                    away = np.concatenate([away, rest])
            if len(mine):
                self._fly(cold, mine, places, identity, transfer)
        return here, refused, away, left

    def _of_others(self, rows: Rows, identity: Identity, transfer: Transfer) -> tuple[Rows, Rows]:
        """Of rows in DRAM, those of this identity, and those of other identities. Call with the lock held.

        Rows that are being read for other identities are in neither: ``transfer`` waits for these.
        """
        others = self._index.others(rows, identity.fingerprint)
        refused = _NONE
        if others is not None:
            self._counts[TierCount.LOAD_OTHERS_BLOCK.of("dram")] += int(np.count_nonzero(others))
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
        """Assign slots to rows, and queue the reads that fill them.

        Under the lock, because a repair after an interrupted caller must know each row that is being read.
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
            if self._second is not None:
                self._second.began(cold, job.rows, job.reads)
            self._begin_read(job)

    def _begin_read(self, job: _Job) -> None:
        self._jobs[id(job.reads)] = job
        job.cold.lane.read(job.reads, functools.partial(self._read_done, job), functools.partial(self._unwanted, job))

    def _is_wanted(self, rows: Rows) -> bool:
        """Whether a transfer waits for any of these rows. Call with the lock held."""
        return any(t.wanted for row in rows.tolist() for t in self._flights.get(row, ()))

    def _unwanted(self, job: _Job) -> bool:
        """Whether no transfer wants a read that is about to start; if so, the read is ended."""
        with self._index.lock:
            if self._is_wanted(job.rows):
                return False
            if self._second is not None:
                self._second.ended(job.reads)
            # Under the same lock, so that no transfer joins a read that will not be made.
            ready = self._land(job, None)
        self._call(ready)
        return True

    def _read_done(self, job: _Job, results: Sequence[ReadResult]) -> None:
        with self._index.lock:
            first = self._second.ended(job.reads) if self._second is not None else None
            ready = self._land(job, results) if first is None else self._land_or_move(job, results, first)
        self._call(ready)

    def _land_or_move(self, job: _Job, results: Sequence[ReadResult], first: ReadUnderWay) -> Callable[[], None]:
        """Handle the end of a read of another node: what it did not supply is read from a second one, if there is one.
        The receiver of the first has ended, so the second may fill the same slots. Call with the lock held."""
        second, residents = self._second, self._residents
        assert second is not None

        def usable(i: int) -> bool:
            here = int(job.rows[i]) not in residents.doomed
            return here and job.reads[i].identity.tenant not in residents.forgotten

        moves = second.moves(first, results, usable)
        ready = self._land(
            job, results, {i for some in moves.values() for i in some}, cut=first.cut and not first.second
        )
        for cold, some in moves.items():
            rows = job.rows[some]
            places = self._index.place[cold.number].take(rows).tolist()
            reads = [
                Read(item.key, item.identity, place, item.span, item.sections)
                for item, place in zip([job.reads[i] for i in some], places, strict=True)
            ]
            again = _Job(cold, rows, reads, job.tenants[some])
            second.began(cold, rows, reads, first)
            self._begin_read(again)
        return ready

    def _call(self, ready: Callable[[], None]) -> None:
        """Notify waiters on rows; later, if this thread has the lock because the tier completed immediately."""
        if self._index.lock_is_mine():
            self.later(ready)
        else:
            ready()

    def later(self, ready: Callable[[], None]) -> None:
        """Let the next ``call_ready`` call ``ready``, perhaps twice."""
        self._ready[ready] = None

    @property
    def ready(self) -> Collection[Callable[[], None]]:
        """The callbacks that ``call_ready`` would call. Always the same object, so that hot paths can check it
        cheaply."""
        return self._ready

    def call_ready(self) -> None:
        """Call the postponed callbacks, unless this thread has the lock."""
        if self._ready and not self._index.lock_is_mine():
            again_if_interrupted(self._call_all)  # other threads wait for it

    def _call_all(self) -> None:
        for ready in list(self._ready):
            ready()
            self._ready.pop(ready, None)

    def repair(self, written: set[int]) -> None:
        """Fail rows that are PENDING in DRAM though no read or writer will fill them; ``written`` rows have a writer.
        Their slots remain allocated until the slot bookkeeping is rebuilt. Call with the lock held."""
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
            self.notify_later(over, [bool(state[row] == SEALED) for row in over])

    def _land(
        self,
        job: _Job,
        results: Sequence[ReadResult] | None,
        moved: Collection[int] = (),
        *,
        cut: bool = False,
    ) -> Callable[[], None]:
        """Handle the end of reads: good, bad, or (``results`` None) cancelled before they began. Call the returned
        function without the lock. Those whose numbers are in ``moved`` are read again, into the same slots. ``cut``:
        the reads were ended before their time, so those that failed say nothing about the tier."""
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
        index.identity[at(arrived)] = reads[0].identity.fingerprint  # the read verified it
        self._residents.seal(arrived)
        if len(arrived) < len(rows):
            for i, row in enumerate(numbers):
                if good[i]:
                    continue
                if i not in moved:
                    self._residents.give_up(rows[i : i + 1])
                    index.tenant[row] = job.tenants[i]  # the failed request's tenant need not be the owner
                same = index.place[cold.number][row] == reads[i].place
                if results is None or results[i] or not same or row in doomed:
                    continue
                if cut and results[i] is Miss.FAILED:
                    continue
                if i not in moved:
                    cause = _CAUSES.get(results[i], AbsenceCause.DAMAGED)
                    self._note_failed(rows[i : i + 1], reads[i].identity, cold.number, cause)
                if self._lost(cold, reads[i].key, results[i]):
                    bad.append((reads[i].key, index.remove(row, cold.number)))
                    whose.append(int(index.identity[row]))
        if self._failures:
            for row in arrived.tolist():
                self._failures.pop((cold.number, index.key(row)), None)
        if moved:
            over = [i for i in range(len(numbers)) if i not in moved]
            rows, numbers, good = rows[over], [numbers[i] for i in over], [good[i] for i in over]
        tell = self.landed(numbers, good)
        self._landing.pop()
        events: list[Event] = []
        if self._feed.followed and len(arrived):
            events.append(BlockStored("dram", index.keys(arrived), index.identities(arrived)))
        self._counts[TierCount.BLOCKS_READ.of(cold.name)] += len(arrived)
        self._residents.unhold(rows)
        if bad:
            self._counts[TierCount.BLOCKS_UNREADABLE.of(cold.name)] += len(bad)
            events.append(BlockRemoved(cold.name, tuple(k for k, _ in bad), "unreadable", tuple(whose)))
            if cold.shared:
                bad = []  # others may be able to read it; the tier removes what none can
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

    def _note_failed(self, rows: Rows, identity: Identity, tier: int, cause: AbsenceCause) -> None:
        """Record that rows were not loaded for a caller of this identity, who need not own them. Call with the lock
        held."""
        self._index.absence_log.note_blocks(
            self._index.mark[rows], identity.fingerprint, Absence.LOAD_FAILED, tier, cause
        )

    def _lost(self, cold: ColdTier, key: BlockKey, result: ReadResult) -> bool:
        """Whether a block that could not be read from a tier must be dropped there. Call with the lock held."""
        if result is Miss.REFUSED:
            self._counts[TierCount.LOAD_OTHERS_BLOCK.of(cold.name)] += 1
            return False
        if result is Miss.FAILED:
            if len(self._failures) >= _REMEMBERED:
                self._failures.clear()
            tries = self._failures[cold.number, key] = self._failures.get((cold.number, key), 0) + 1
            if tries < _TRIES:
                self._counts[TierCount.LOAD_FAILED.of(cold.name)] += 1
                return False
        self._failures.pop((cold.number, key), None)
        return True

    def notify_later(self, rows: Sequence[int], good: Sequence[bool]) -> None:
        """Let the next ``call_ready`` notify those who wait for rows. Call with the lock held.

        If this is interrupted, ``repair`` makes sure that they are notified all the same.
        """
        self.landed(rows, good)
        self._leave_landing()

    def _leave_landing(self) -> None:
        for tell in self._landing:
            self._ready[tell] = None
        self._landing.clear()

    def landed(self, rows: Sequence[int], good: Sequence[bool]) -> Callable[[], None]:
        """Returns the function that notifies those who wait for rows, to be called without the lock. It stays in
        ``_landing``."""
        waiting: set[Transfer] = set()
        parked: deque[tuple[Lease, Identity, Transfer]] = deque()

        def tell() -> None:
            for transfer in waiting:
                transfer.finish(rows, good)
            while parked:
                try:
                    waits = lease, identity, transfer = parked.pop()
                except IndexError:  # another thread took it
                    return
                try:
                    if transfer.wanted:
                        self._bring(lease.rows, identity, transfer, wait=True)
                except BaseException:
                    parked.append(waits)  # the next call of this function retries it
                    raise
                lease.release()

        # Recorded before the entries are removed, and in atomic steps: an interrupt in between loses none.
        self._landing.append(tell)
        # Each transfer is told of all the rows; it knows which of them it waits for.
        waiting.update(chain.from_iterable(set(map(self._flights.get, rows, repeat(())))))
        deque(map(self._flights.pop, rows, repeat(())), maxlen=0)
        if self._parked:
            parked.extend(chain.from_iterable(map(self._parked.pop, rows, repeat(()))))
        return tell
