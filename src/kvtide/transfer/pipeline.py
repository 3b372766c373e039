"""Moves blocks between tiers and keeps the index correct while they move.

Each operation decides under the index lock and acts outside it: it first changes rows and collects the work to do
(reads, writes, events), then does that work. A row that is being moved is held, so it cannot be evicted or forgotten
meanwhile.

- Promotion (promotion.py): a row gets a slot in DRAM and a read; requests for the same read share it.
- Demotion (demotion.py): a sealed row is written to a colder tier while it stays readable in DRAM.
- Drop (eraser.py): a drop completes when no tier can return the block any more.

*Interruptions.* Ctrl-C, or a signal handler that raises, may interrupt a caller anywhere and leave its changes under
the lock half done. Before the lock is released, ``repair`` recomputes all derived state: holds from the open leases,
slots from the places of rows, counters from both. Work that no thread can finish any more is abandoned, and its waiters
are notified. Leases and reservations that the caller never received (it was interrupted while they were returned) end
when the next call takes the lock (``reclaim``). The threads of tiers are never interrupted.

*Two writers.* A writer may be slow, or may stop and never finish, and no other writer may have to wait for it. So while
a block is PENDING because a writer fills it, one more writer gets its own row and slot for the same key; lookups do not
find that row (``_hidden``). The first writer to seal gets the key. If the second writer seals first, the first writer's
row is doomed: its seal changes nothing, and its slot is freed when it ends. If the first writer seals first, the second
copy is discarded when it ends. If the first writer aborts, the second takes its place. A third writer is told that the
block is pending.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from kvtide.block import DIGEST, BlockKey, Span
from kvtide.counts import Count, TierCount
from kvtide.events import BlockRemoved, BlockStored, Event, Feed
from kvtide.index import work_slices
from kvtide.index.absence_log import Absence, AbsenceCause
from kvtide.index.index import ABSENT, DRAM, NOWHERE, PENDING, SEALED, Index, Mask, Rows, marks
from kvtide.index.lease import Lease, Reservation, Watch
from kvtide.index.tenant_usage import TenantUsage
from kvtide.index.work_slices import rest
from kvtide.plan.evict import Evictor, EvictorStatistics, room
from kvtide.plan.policy import Policy
from kvtide.plan.quota import Quota, TenantQuotas
from kvtide.plan.usage_tracker import Turn, UsageTracker
from kvtide.plan.write_budget import WriteBudgetStatistics
from kvtide.tiers.base import Held, Identity, Refetching, Renewal, Renewing
from kvtide.tiers.dram.tier import Dram
from kvtide.tiers.peers.position import PeerPosition
from kvtide.transfer.cold_tier import ColdTier
from kvtide.transfer.context import TransferContext
from kvtide.transfer.demotion import Demotion
from kvtide.transfer.eraser import DropBarrier, Eraser
from kvtide.transfer.persister import Persister
from kvtide.transfer.promotion import LoadStatistics, Promotion
from kvtide.transfer.residents import Residents, rows_of
from kvtide.transfer.space import SpaceMaker
from kvtide.transfer.write_results import Unwritten

__all__ = ["Asker", "DropRequest", "Expiring", "Pipeline", "PipelineStatistics", "WriteRequest"]


_TAILS = 8 << 20
"""Bytes of slots whose unused ends are zeroed in one hold of the lock. An end is at most 1/32 of its slot."""
_WINDOW = 1 << 12
"""Rows examined in one hold of the lock when searching for a tenant's rows."""
_GRANTED = 1024
"""Blocks of a prompt that get their slots in one hold of the lock."""

Erased = list[tuple[BlockKey, int]]
"""Blocks that a tier must erase, each with its place in that tier."""

Asker = Mapping[bytes, int] | None
"""The identity of a caller that names blocks by key: its fingerprints by key suffix. None is the store itself, which
may access every block."""

_NONE: Rows = np.empty(0, np.int64)
_REPAIRS = 100
"""Maximum number of times that a repair restarts after it was interrupted itself."""


@dataclass(frozen=True, slots=True)
class PipelineStatistics:
    leases: int = 0
    """Open leases (rights to read); a reservation has one on the blocks before its own in the prompt."""
    reservations: int = 0
    """Open reservations (rights to write)."""
    pending: int = 0
    """Blocks that a caller waits for."""
    doomed: int = 0
    """Dropped blocks that a caller still holds."""
    loads: LoadStatistics = field(default_factory=LoadStatistics)
    evictors: dict[str, EvictorStatistics] = field(default_factory=dict)
    """By tier."""
    write_budgets: dict[str, WriteBudgetStatistics] = field(default_factory=dict)
    """By tier, for tiers with a write budget."""
    largest_slice: int = 0
    """The largest number of blocks dropped or expired in one hold of the index lock."""


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """Blocks of one group to store, in order; one column per field."""

    identity: Identity
    keys: Sequence[BlockKey]
    parents: Sequence[bytes]
    depths: Sequence[int]
    expiry: float = float("inf")
    priority: int = 0
    tokens: Sequence[bytes] = ()

    def parts(self) -> Iterator[WriteRequest]:
        """Split the request into parts, each small enough for one hold of the lock."""
        if len(self.keys) <= _GRANTED:
            yield self
            return
        for start in range(0, len(self.keys), _GRANTED):
            part = slice(start, start + _GRANTED)
            columns = self.keys[part], self.parents[part], self.depths[part]
            yield WriteRequest(self.identity, *columns, self.expiry, self.priority, self.tokens[part])


@dataclass(slots=True)
class _Granted:
    """The blocks granted to a reservation so far."""

    keys: list[BlockKey]
    rows: list[int]
    places: list[int]
    depths: list[int]
    spans: list[Span]
    later: int = 0
    """Blocks without a slot yet because their memory is still being taken from the system."""
    contended: bool = False
    """Whether another writer was found to be writing one of the blocks."""


def _anywhere(rows: Rows) -> Mask:
    """Mask of the blocks that may be moved within DRAM if they are not held: all of them."""
    return np.ones(len(rows), np.bool_)


class Pipeline:
    """The only class that changes the places of rows. Thread-safe."""

    def __init__(
        self,
        index: Index,
        dram: Dram,
        colds: Sequence[ColdTier],
        policy: Policy,
        uses: UsageTracker,
        feed: Feed,
        checksum: bool = False,
        quotas: TenantQuotas | None = None,
    ) -> None:
        quotas = quotas or TenantQuotas()
        self._index = index
        self._dram = dram
        self.colds = self._colds = colds
        self._nodes = [cold.number for cold in colds if isinstance(cold.tier, PeerPosition)]
        """The tiers of a cluster's members. Nodes of a fixed list are not among them: their users' disks keep what was
        read from there, as they always did."""
        self._refetching = [cold.tier for cold in colds if isinstance(cold.tier, Refetching)]
        self._uses = uses
        self._feed = feed
        self.counts: Counter[str] = Counter()
        """Event counts by name; see ``docs/glossary.md``."""
        self._residents = residents = Residents(index, dram, checksum, quotas.tenants, self.repair, self.call_ready)
        self._eraser = eraser = Eraser(index, colds)
        context = TransferContext(index, dram, colds, residents, eraser, feed, self.counts, self.repair)
        self._demotion = demotion = Demotion(context, policy)
        may_leave = demotion.may_leave if any(c.admission.keeps_leaving for c in colds) else None
        self._evictor = evictor = Evictor(index, DRAM, dram, policy, uses, may_leave, _anywhere)
        limits = quotas.of("dram")
        quota = Quota(index, DRAM, "dram", TenantUsage(index, limits), evictor.ranked) if limits else None
        self._space = SpaceMaker(context, demotion, evictor, quota, quotas.tenants)
        self._promotion = Promotion(context, self._space)
        self.persister = Persister(context, demotion, self._promotion)
        self.use_second_reads = self._promotion.use_second_reads
        self.lease, self.load, self.flush = residents.lease, self._promotion.load, demotion.flush
        self._serials = itertools.count(1)
        self._open: dict[int, list[int]] = {}
        """Rows that open reservations will fill, by the reservation's serial number."""
        self._watches: dict[int, Watch] = {}
        """Watches over these reservations, by serial number."""
        self._abandoned: deque[Watch] = deque()
        """Reservations that no caller can end any more, because the caller was interrupted before it received them."""
        self.ready = self._promotion.ready
        self.load_in_slices = self._promotion.load_in_slices
        self.report = demotion.report
        self.largest_slice = 0
        """The largest number of blocks dropped or expired in one hold of the index lock."""
        self._writing: set[int] = set()
        """Rows being filled by reservations."""
        self._hidden: dict[BlockKey, int] = {}
        """Second writers' rows among ``_writing``, which lookups by key do not find."""

    def statistics(self) -> PipelineStatistics:
        with self._index.lock:
            self.reclaim()
        self.call_ready()
        with self._index.lock:
            evictors = {"dram": self._evictor, **{c.name: c.evictor for c in self._colds}}
            return PipelineStatistics(
                self._index.leases,
                len(self._open),
                self.blocks_pending,
                self.blocks_doomed,
                self._promotion.statistics(),
                {name: e.statistics() for name, e in evictors.items() if e is not None},
                {c.name: c.budget.statistics() for c in self._colds if c.budget is not None},
                self.largest_slice,
            )

    def call_ready(self) -> None:
        """Notify those who waited for loads that ended while a thread had the lock. Call without the lock."""
        self._promotion.call_ready()

    @property
    def lost(self) -> Counter[Unwritten]:
        """Counts, since the store was opened, blocks that left DRAM and reached no colder tier though one should have
        had them."""
        with self._index.lock:
            return Counter(self._demotion.lost)

    @property
    def blocks_doomed(self) -> int:
        """Number of dropped blocks that a caller still holds."""
        return len(self._residents.doomed)

    @property
    def blocks_pending(self) -> int:
        """Number of rows that a caller waits for."""
        return len(self._promotion)

    def intact(self, row: int) -> bool:
        """Whether a row in DRAM still has the bytes that were sealed (see ``dram.checksum``). Call with the lock
        held."""
        if self._residents.intact(row):
            return True
        self.counts[Count.BLOCKS_CHANGED] += 1
        return False

    def sealed_span(self, row: int, identity: Identity) -> Span | None:
        """The memory of a row that is complete in DRAM; None if its block is not of that identity. Call with the lock
        held, and hold the row as long as the memory is used."""
        own = self._residents.identity(row)
        same = own.fingerprint == identity.fingerprint and own.geometry == identity.geometry
        return self._residents.span(row) if same else None

    def stored(self, rows: Rows) -> None:
        """Record a store: ``rows`` are all blocks of the prompt that are present, first block first. Call with the
        index lock held."""
        self._uses.stored(rows)
        for cold in self._colds:
            if cold.admission.learns:
                # What was read from a member of a cluster is written when it was asked for twice here: see
                # ``record_request``.
                worth = cold.admission.on_store(rows)
                if self._nodes:
                    worth &= ~self._elsewhere(rows)
                self._demotion.write(cold, rows[worth])
                absent = np.count_nonzero(self._index.state[cold.number][rows[~worth]] == ABSENT)
                self.counts[TierCount.STORE_NOT_ADMITTED.of(cold.name)] += int(absent)

    def hold_parents(self, rows: Rows, most: int = sys.maxsize) -> Lease:
        """Hold the blocks of one chain, first block first, that only DRAM has, because they are about to get children.
        Holds ``most`` rows at most. Call with the lock held."""
        self._uses.touch(rows)
        return self.lease(rows[~self._demotion.saved(rows)][:most])

    def record_request(self, rows: Rows, length: int) -> None:
        """Record that the first blocks of a prompt of ``length`` blocks were requested; first block first. Call with
        the index lock held."""
        self._uses.asked(rows, length)
        for cold in self._colds:
            worth = cold.admission.on_touch(rows)
            if self._nodes:  # what is asked for again, after it was read from another node
                worth = worth | (cold.admission.on_store(rows) & self._elsewhere(rows))
            wanted = rows[worth]
            if len(wanted):
                self._demotion.write(cold, wanted)

    def _elsewhere(self, rows: Rows) -> Mask:
        """Mask of rows that were found at a member of the cluster to which a tier is bound still. Call with the lock
        held."""
        there = np.zeros(len(rows), np.bool_)
        for number in self._nodes:
            there |= self._index.state[number][rows] == SEALED
        return there

    def count_unshared(self) -> int:
        """Number of blocks in DRAM that are in no shared storage."""
        with self._index.lock:
            return len(self._demotion.unshared())

    def write_to_shared(self, tried: set[BlockKey]) -> Iterator[int]:
        """See ``Demotion.write_to_shared``."""
        return self._demotion.write_to_shared(tried)

    def expect(self, rows: Sequence[Rows], turn: Turn | None, returns_in: float | None) -> None:
        """Record that a prompt's blocks (each group's first block first) were used, with a hint about their next use.
        Call with the index lock held."""
        for some in rows:
            self._uses.expect(some, turn, None, {})
        if returns_in is not None:
            self.keep_expected(rows, returns_in)
        if turn == "tool":
            self.counts[Count.HINT_TOOL] += 1
        elif turn == "end":
            self.counts[Count.HINT_END] += 1
        if returns_in is not None:
            self.counts[Count.HINT_EXPECTED_BACK] += 1

    def keep_expected(self, rows: Sequence[Rows], seconds: float) -> bool:
        """Record that a prompt's blocks (each group's first block first) are expected back in ``seconds``. Returns
        whether DRAM keeps some of them until then. Call with the index lock held."""
        rooms = {c.number: room(c.evictor.tier) for c in self._colds if c.evictor is not None}
        rooms[DRAM] = room(self._dram)
        kept = [self._uses.expect(some, None, seconds, rooms) for some in rows]
        return any(kept)

    def has_space_for_expected(self, rows: Rows, nbytes: int) -> bool:
        """Whether DRAM has space for those of the expected blocks, ``nbytes`` in all, that it lacks, without evicting a
        block of higher priority or one that is expected itself. Call with the index lock held."""
        away = rows[self._index.state[DRAM][rows] == ABSENT]
        if not len(away):
            return False
        with self._dram.book_lock:
            free = self._dram.segments.budget - self._dram.segments.used
        if free >= nbytes:
            return True
        leaving = self._evictor.coldest(len(away))
        index = self._index
        return (
            len(leaving) == len(away)
            and index.priority[leaving].max() <= index.priority[away].min()
            and index.used[leaving].max() <= self._uses.now()
        )

    # -- after an interruption ----------------------------------------------------------------------------

    def repair(self) -> None:
        """Recompute all derived state after a change was left half done. Scans all rows. Call with the lock held,
        before it is released."""
        for left in range(_REPAIRS, -1, -1):
            try:
                self._repair()
            except BaseException:
                if not left:
                    raise
            else:
                return

    def _repair(self) -> None:
        index = self._index
        for rows in self._open.values():
            # In place: the reservation shares this list.
            rows[:] = [row for row in rows if index.state[DRAM][row] == PENDING]
        self._writing = {row for rows in self._open.values() for row in rows}
        self._hidden = {key: row for key, row in self._hidden.items() if row in self._writing and index.row(key) != row}
        self._promotion.repair(self._writing)
        for cold in self._colds:
            written, state = cold.lane.writing(), index.state[cold.number]
            lost = [row for row in np.flatnonzero(state[: index.size] == PENDING).tolist() if row not in written]
            state[lost] = ABSENT
            cold.lane.repair()
        if self._demotion.repair():
            self._promotion.later(self._demotion.tell)
        moving = self._space.moving()
        index.recount_holds(moving.rows)
        self._residents.repair(moving, set(self._hidden.values()))
        index.repair()
        for number, account in index.accounts.items():
            account.repair(number)
        self.counts[Count.INTERRUPTED_CALLS] += 1

    def reclaim(self) -> None:
        """End the leases and reservations that no caller can release. Call with the lock held, then ``call_ready``
        without it."""
        try:
            while self._residents.abandoned:
                self._residents.end_lease(self._residents.abandoned[0].number)
                self._residents.abandoned.popleft()
            while self._abandoned:
                self._give_up(self._abandoned[0].number)
                self._abandoned.popleft()
        except BaseException:
            self.repair()
            raise

    @property
    def abandoned(self) -> bool:
        """Whether there are leases or reservations that no caller can release."""
        return bool(self._residents.abandoned or self._abandoned)

    def _give_up(self, serial: int) -> None:
        """Abort a reservation unless it has ended. Call with the lock held."""
        if serial in self._open:
            try:
                self._end(serial, None, [])
            except BaseException:
                self._open.pop(serial, None)  # no writer will fill its rows now
                self.repair()
                raise
        self._watches.pop(serial, None)

    # -- stores from callers ------------------------------------------------------------------------------

    def reserve(self, write_requests: Sequence[WriteRequest], *, wait: bool = True) -> Reservation:
        """Reserve slots in DRAM for blocks that the store lacks. Blocks that are present, or for which there is no
        space, are not in the result.

        With ``wait`` False, memory that must first be taken from the system is not waited for: the result has the slots
        available now, and ``later`` counts the rest.
        """
        granted = _Granted([], [], [], [], [])
        serial = next(self._serials)
        reservation = Reservation(granted.keys, _NONE, granted.spans, granted.depths, (), self._finish, serial)
        try:
            with self._index.lock:
                if self.abandoned:
                    self.reclaim()
                self._watches[serial] = Watch.over(reservation, serial, self._abandoned)
                self._open[serial] = granted.rows
            if self.ready:
                self.call_ready()
            for write_request in write_requests:
                for part in write_request.parts():
                    if not self._reserve(part, granted, wait):
                        break
            reservation.later = granted.later
            reservation.rows = rows_of(granted.rows)
            reservation.generations = [self._dram.generation(place) for place in granted.places]
            with self._index.lock:
                for write_request in write_requests:
                    rows = self._index.rows(write_request.keys)
                    reservation.refused += int(np.count_nonzero(self._absent(rows)))
                    if granted.contended:
                        mine = set(granted.keys)
                        written = zip(write_request.keys, self._being_written(rows).tolist(), strict=True)
                        reservation.pending += sum(busy and key not in mine for key, busy in written)
        except BaseException:
            reservation.abort()
            raise
        return reservation

    def _absent(self, rows: Rows) -> Mask:
        """Mask of rows that are in no tier of this store nor on their way to one. Call with the lock held."""
        absent: Mask = self._index.state[DRAM][rows] == ABSENT
        for cold in self._colds:
            if not cold.read_only:
                absent &= self._index.state[cold.number][rows] == ABSENT
        return absent

    def _being_written(self, rows: Rows) -> Mask:
        """Mask of rows that a writer has reserved but not sealed and that no colder tier has. Call with the lock
        held."""
        pending: Mask = self._index.state[DRAM][rows] == PENDING
        for cold in self._colds:
            if not cold.read_only:
                pending &= self._index.state[cold.number][rows] != SEALED
        for i in np.flatnonzero(pending).tolist():
            pending[i] = int(rows[i]) in self._writing
        return pending

    def _reserve(self, write_request: WriteRequest, granted: _Granted, wait: bool) -> bool:
        """Returns False if the remaining blocks get no slots now; the caller then skips the later parts of the same
        request."""
        done = 0
        while done < len(write_request.keys):
            events: list[Event] = []
            with self._index.lock:
                try:
                    done = self._grant(write_request, done, granted, events)
                except BaseException:
                    self.repair()
                    raise
            self._feed.publish(events)
            if done < len(write_request.keys):
                grown = self._space.grow(write_request.identity, wait=wait)
                if grown is None:
                    granted.later += len(write_request.keys) - done
                    self._note_dropped(write_request, range(done, len(write_request.keys)), AbsenceCause.NO_MEMORY_YET)
                    return False
                if not grown:
                    self.counts[Count.STORE_NO_ROOM] += len(write_request.keys) - done
                    self._note_dropped(write_request, range(done, len(write_request.keys)), AbsenceCause.NO_ROOM)
                    return False
        return True

    def _note_dropped(self, write_request: WriteRequest, blocks: Sequence[int], cause: AbsenceCause) -> None:
        """Record that these of the requested blocks were not stored."""
        self.note_dropped([write_request.keys[i] for i in blocks], write_request.identity, cause)

    def note_dropped(self, keys: Sequence[BlockKey], identity: Identity, cause: AbsenceCause) -> None:
        """Record that blocks of one identity were to be stored and were not."""
        with self._index.lock:
            self._index.absence_log.note_blocks(marks(keys), identity.fingerprint, Absence.STORE_DROPPED, DRAM, cause)

    def _grant(self, write_request: WriteRequest, start: int, granted: _Granted, events: list[Event]) -> int:
        """Give slots to blocks from ``start`` on. Returns the index at which it stopped because a slot was missing that
        growing the memory may provide."""
        index, size = self._index, write_request.identity.geometry.footprint
        found = index.rows(write_request.keys[start:])
        new = self._absent(found)
        second: set[int] = set()
        if self._writing and (busy := np.flatnonzero(self._being_written(found))).size:
            granted.contended = True
            second = {start + i for i in busy.tolist() if write_request.keys[start + i] not in self._hidden}
        if (others := index.others(found, write_request.identity.fingerprint)) is not None:
            # To another identity, a block that is present must look absent: that writer writes a copy that lookups do
            # not find.
            named = (np.flatnonzero(others & ~new) + start).tolist()
            second.update(i for i in named if write_request.keys[i] not in self._hidden)
        if second:
            new[[i - start for i in second]] = True
        wanted = (np.flatnonzero(new) + start).tolist()
        allowed = self._space.allow(write_request.identity, len(wanted), events)
        over, wanted = wanted[allowed:], wanted[:allowed]
        places = self._space.take(write_request.identity, len(wanted), events)
        keys = [write_request.keys[i] for i in wanted[: len(places)]]
        rows = []
        for i in wanted[: len(places)]:
            if i in second:
                row = index.add(write_request.keys[i], write_request.parents[i], write_request.depths[i], found=False)
                self._hidden[write_request.keys[i]] = row
            else:
                # A key may be in the index without being in any tier, because a caller holds its row.
                row = index.row(write_request.keys[i]) or index.add(
                    write_request.keys[i], write_request.parents[i], write_request.depths[i]
                )
            rows.append(row)
            if write_request.tokens:
                self._residents.tokens[row] = write_request.tokens[i]
        if rows:
            granted.rows += rows
            self._dram.own(rows_of(places), rows_of(rows))
            index.identity[rows] = write_request.identity.fingerprint
            self._residents.enter(rows_of(rows), places, write_request.identity)
            index.mark[rows] = marks(keys)
            index.expire_at(rows, write_request.expiry)
            index.priority[rows] = write_request.priority
            self._writing.update(rows)
        granted.keys += keys
        granted.places += places
        granted.depths += [write_request.depths[i] for i in wanted[: len(places)]]
        granted.spans += self._dram.spans(places, size)
        if len(places) < len(wanted):
            return wanted[len(places)]
        if over:
            self._space.refuse(write_request.identity, len(over))
            forgetting = write_request.identity.tenant in self._residents.forgotten
            cause = AbsenceCause.FORGETTING if forgetting else AbsenceCause.QUOTA
            self._note_dropped(write_request, over, cause)
        return len(write_request.keys)

    def _finish(self, reservation: Reservation, sealed: bool) -> None:
        """End a reservation, once: a caller that was interrupted here may call again, and then nothing happens."""
        events: list[Event] = []
        try:
            with self._index.lock:
                if reservation.serial in self._open:
                    try:
                        self._end(reservation.serial, reservation.generations if sealed else None, events)
                    except BaseException:
                        self._open.pop(reservation.serial, None)
                        self.repair()
                        raise
        finally:
            self.call_ready()
        self._feed.publish(events)

    def _end(self, serial: int, generations: Sequence[int] | None, events: list[Event]) -> None:
        """``generations``: those of the slots to be sealed; None to seal nothing. Call with the lock held."""
        index, rows = self._index, rows_of(self._open[serial])
        if generations is not None:
            found = [self._dram.generation(p) for p in index.place[DRAM][rows].tolist()]
            assert found == generations, "a slot changed hands under a writer"
        good = np.full(len(rows), generations is not None)
        if self._residents.doomed:
            good &= ~self._residents.are_doomed(rows)
        self._writing.difference_update(rows.tolist())
        overtaken = self._settle(rows, good) if self._hidden else []
        kept = rows[good]
        self._residents.clear_padding(kept)
        self._residents.seal(kept)
        if self._refetching:
            stored = index.keys(kept)
            for tier in self._refetching:
                tier.stored(stored)
        if len(kept) < len(rows):
            if generations is None:
                index.absence_log.note(rows, Absence.STORE_DROPPED, DRAM, AbsenceCause.GIVEN_UP)
            self._residents.give_up(rows[~good])
        self._promotion.notify_later(rows.tolist() + overtaken, good.tolist() + [False] * len(overtaken))
        for cold in self._colds:
            self._demotion.write(cold, kept[cold.admission.on_store(kept)])
        self.counts[Count.BLOCKS_STORED] += len(kept)
        if self._feed.followed and len(kept):
            events.append(BlockStored("dram", index.keys(kept), index.identities(kept)))
        self._residents.unhold(rows)
        del self._open[serial]
        self._watches.pop(serial, None)
        self._space.save_ahead(len(kept))

    def _settle(self, rows: Rows, good: Mask) -> list[int]:
        """Decide, when a reservation ends, which of two writers gets each contended key. Call with the lock held.

        Clears the entries of ``good`` (the mask of sealed rows) that are no longer useful. Returns the rows of first
        writers that lost their keys.
        """
        index, overtaken = self._index, []
        for i, row in enumerate(rows.tolist()):
            key = index.key(row)
            if self._hidden.get(key) == row:
                del self._hidden[key]
                first = index.row(key)
                if not good[i]:
                    continue
                if first in self._writing and self._being_written(rows_of([first]))[0]:
                    index.take_key(row)
                    self._residents.doom_many(rows_of([first]))
                    overtaken.append(first)
                elif first and any(state[first] for state in index.state):
                    good[i] = False  # the other copy was sealed first
                    self.counts[Count.BLOCKS_WRITTEN_TWICE] += 1
                else:
                    index.take_key(row)
            elif not good[i] and index.row(key) == row and key in self._hidden:
                index.take_key(self._hidden.pop(key))
        return overtaken

    # -- removal ------------------------------------------------------------------------------------------

    def enforce_quotas(self) -> None:
        """Evict tenants' blocks beyond their quotas, which may have been lowered since the blocks were written."""
        events: list[Event] = []
        with self._index.lock:
            for cold in self._colds:
                if (quota := cold.quota) is not None:
                    for tenant in quota.account.quotas:
                        while rows := quota.victims(tenant, 0):
                            self._demotion.evict(cold, rows, events, AbsenceCause.QUOTA, tenant)
        self._feed.publish(events)

    def catch_up(self, name: str) -> None:
        """Write the refused blocks that are still in DRAM to a tier that accepts blocks again."""
        cold = next(c for c in self._colds if c.name == name)
        with self._index.lock:
            refused = rows_of(sorted(self._residents.refused))
            self._demotion.write(cold, refused[cold.admission.on_store(refused)])

    def waiting(self, name: str) -> int:
        """Bytes of the blocks that a tier refused and that are still in DRAM, plus those queued for writing to it."""
        cold = next(c for c in self._colds if c.name == name)
        with self._index.lock:
            rows = rows_of(sorted(self._residents.refused))
            good = (self._index.state[cold.number][rows] == ABSENT) & (self._index.state[DRAM][rows] == SEALED)
            return self._residents.record_bytes(rows[good]) + cold.lane.write_bytes

    def fail_hung_reads(self, cold: str, keys: Sequence[BlockKey]) -> None:
        """Fail the waiting loads of these blocks, because their reads from a tier hang. Their slots remain set
        aside."""
        events: list[Event] = []
        with self._index.lock:
            rows = self._index.rows(keys)
            rows = rows[self._index.state[DRAM][rows] == PENDING]
            self._promotion.notify_later(rows.tolist(), [False] * len(rows))
            number = next(c.number for c in self._colds if c.name == cold)
            self._index.absence_log.note(rows, Absence.LOAD_FAILED, number, AbsenceCause.LATE)
            self._detach_many(rows, "unreadable", events)
            self.counts[TierCount.BLOCKS_LATE.of(cold)] += len(rows)
        self._feed.publish(events)
        self.call_ready()

    def make_room(self, number: int, size: int, count: int = 1, row: int = 0) -> bool:
        """Evict from a tier so that up to ``count`` slots of ``size`` become free. Returns False if nothing can be
        evicted. ``row``: one that needs such a slot; 0: unknown."""
        events: list[Event] = []
        with self._index.lock:
            if number == DRAM:
                made = self._space.make(size, count, events)
            else:
                cold = next(c for c in self._colds if c.number == number)
                made = self._space.make_cold(cold, size, count, events, int(self._index.tenant[row]) if row else 0)
        self._feed.publish(events)
        return made

    def drop(
        self,
        keys: Sequence[BlockKey],
        done: Callable[[int], None],
        *,
        shared: bool = True,
        who: Asker = None,
        notify_others: bool = True,
        absence: Absence = Absence.DROPPED,
    ) -> int:
        """Remove blocks from every tier, or from all but shared storage; returns how many were found.

        If ``notify_others``, other users of the shared storage are notified. ``absence`` is recorded as what happened.
        ``done`` gets the number of blocks not erased. Works in slices and pauses between them: call without the lock.
        """
        drop = DropRequest(self, keys, done, shared, who, notify_others, absence)
        while drop.step():
            rest()
        return drop.found

    def drop_some(
        self,
        keys: Sequence[BlockKey],
        who: Asker,
        colds: Sequence[ColdTier],
        barrier: DropBarrier,
        erase: Sequence[Erased],
        absence: Absence,
    ) -> int:
        """Remove one slice of blocks from the index; returns how many were found. What ``colds`` must erase is added to
        ``erase`` before anything is removed, because a caller that is interrupted here must still erase it."""
        index = self._index
        events: list[Event] = []
        try:
            with index.lock:
                keys, rows = self._own(keys, who)
                found = np.unique(rows[rows > 0])
                try:
                    for cold, items in zip(colds, erase, strict=True):
                        # Row 0 has no place, but a tier may have traces of blocks that the index no longer knows.
                        items += zip(keys, index.place[cold.number][rows].tolist(), strict=True)
                    index.absence_log.note(found, absence)
                    self._detach_many(self._with_hidden(keys, found), "dropped", events)
                    self._eraser.await_dying(keys, barrier)
                except BaseException:
                    self.repair()
                    self._detach_all(keys, absence)
                    raise
                self.counts[Count.BLOCKS_DROPPED] += len(found)
        finally:
            if self.ready:
                self.call_ready()
        self._feed.publish(events)
        return len(found)

    def _own(self, keys: Sequence[BlockKey], who: Asker) -> tuple[Sequence[BlockKey], Rows]:
        """The keys that do not name other identities' blocks, and their rows. Call with the lock held."""
        index = self._index
        rows = index.rows(keys)
        if who is None:
            return keys, rows
        others = index.others(rows, np.fromiter((who[key[DIGEST:]] for key in keys), np.int64, len(keys)))
        if others is None:
            return keys, rows
        return [key for key, other in zip(keys, others.tolist(), strict=True) if not other], rows[~others]

    def _with_hidden(self, keys: Sequence[BlockKey], rows: Rows) -> Rows:
        """``rows`` plus the rows of second writers of the same keys. Call with the lock held."""
        if not self._hidden:
            return rows
        return np.append(rows, rows_of([self._hidden[key] for key in keys if key in self._hidden]))

    def _detach_all(self, keys: Sequence[BlockKey], absence: Absence) -> None:
        """Remove from the index those blocks that are still there, however often this is interrupted. Call with the
        lock held."""
        for _ in range(_REPAIRS):
            try:
                rows = self._index.rows(keys)
                found = np.unique(rows[rows > 0])
                self._index.absence_log.note(found, absence)
                self._detach_many(self._with_hidden(keys, found), "dropped", [])
            except BaseException:  # noqa: BLE001 - the caller raises the one that began it
                self.repair()
            else:
                return

    def when_zeroed(self, call: Callable[[], None]) -> None:
        """Call ``call`` when the slots of dropped blocks are zeroed, except slots that a caller holds."""
        self._dram.when_zeroed(call)

    def zero_traces(self, tenant: bytes) -> int:
        """Zero what memory still contains of a tenant's dropped blocks. Returns the number of slots that are zeroed
        later, because a caller holds them or zeroing failed.

        Takes the lock for a few slots at a time, and lasts as long as the zeroing: call without the lock.
        """
        with self._index.lock:
            self._residents.zero_unfilled()
        try:
            self._dram.zero_free(tenant)
        except BaseException:
            with self._index.lock:
                self.repair()  # otherwise slots chosen but not being zeroed would be lost forever
            raise
        for segment in self._dram.mixed:
            slots = np.arange(segment.slots)
            for some in np.array_split(slots, 1 + segment.nbytes // _TAILS):
                with self._index.lock:
                    self._residents.zero_tails(segment, some)
                rest()
            self._dram.zero_rest(segment)
        self._dram.wait_zeroed()
        with self._index.lock:
            return self._residents.held_of(tenant) + self._dram.unzeroed

    def keys_of(self, tenant: bytes) -> list[BlockKey]:
        """Keys of a tenant's blocks in DRAM that are not dropped yet. Takes the lock for a range of rows at a time:
        call without it."""
        index, keys, start = self._index, list[BlockKey](), 0
        while start < index.size:
            with index.lock:
                stop = min(start + _WINDOW, index.size)
                keys += index.keys(self._residents.of_tenant(tenant, start, stop))
            start = stop
            rest()
        return keys

    @contextmanager
    def forgetting(self, tenant: bytes) -> Iterator[None]:
        """Meanwhile, let no block of the tenant into DRAM, neither from a caller nor from a colder tier. Enter without
        the lock."""
        forgotten = self._residents.forgotten
        with self._index.lock:
            forgotten[tenant] += 1
        try:
            yield
        finally:
            with self._index.lock:
                forgotten[tenant] -= 1
                if not forgotten[tenant]:
                    del forgotten[tenant]

    def _detach_many(self, rows: Rows, reason: str, events: list[Event]) -> None:
        """Remove distinct rows from the index, so that lookups miss them. Their slots are freed when no caller holds
        them."""
        index = self._index
        if not len(rows):
            return
        self.largest_slice = max(self.largest_slice, len(rows))
        if reason == "dropped":
            self._residents.zero_when_left(rows)
        if self._hidden:
            for row in rows.tolist():
                if self._hidden.get(key := index.key(row)) == row:
                    del self._hidden[key]
        dying: list[tuple[ColdTier, tuple[BlockKey, ...]]] = []
        for cold in self._colds:
            states = index.state[cold.number][rows]
            dying.append((cold, index.keys(rows[states == PENDING])))
            if len(sealed := rows[states == SEALED]):
                index.remove_many(sealed, cold.number)
                self._tell(cold.name, sealed, reason, events)
        if len(sealed := rows[index.state[DRAM][rows] == SEALED]):
            self._tell("dram", sealed, reason, events)
        index.detach_many(rows)
        self._residents.doom_many(rows)
        for cold, keys in dying:
            for key in keys:
                self._eraser.dies(cold, key)

    def _tell(self, tier: str, rows: Rows, reason: str, events: list[Event]) -> None:
        if self._feed.followed:
            events.append(BlockRemoved(tier, self._index.keys(rows), reason, self._index.identities(rows)))

    def expire(self, rows: Rows) -> list[Event]:
        """Remove expired blocks; returns the events to publish. Call with the lock held."""
        events: list[Event] = []
        try:
            self._index.absence_log.note(rows, Absence.EXPIRED, times=self._index.expiry[rows])
            for cold in self._colds:
                sealed = rows[self._index.state[cold.number][rows] == SEALED]
                if len(sealed):
                    self._tell(cold.name, sealed, "expired", events)
                    # In this order: a place released twice could free a slot that was given to another block.
                    places = self._index.remove_many(sealed, cold.number).tolist()
                    for key, place in zip(self._index.keys(sealed), places, strict=True):
                        cold.tier.evict(key, place)
            self._detach_many(rows, "expired", events)
        except BaseException:
            self.repair()
            raise
        self.counts[Count.BLOCKS_EXPIRED] += len(rows)
        return events

    # -- expiry -------------------------------------------------------------------------------------------

    def extend(self, rows: Rows, when: float) -> None:
        """Let distinct rows expire at ``when`` at the earliest. Call with the lock held."""
        longer = self._index.extend(rows, when)
        if len(longer):
            for cold in self._colds:
                if not cold.shared:
                    self._residents.prolonged.update(longer[self._index.state[cold.number][longer] != ABSENT].tolist())

    def expire_some(
        self, keys: Sequence[BlockKey], who: Asker, when: float, now: float, shorten: bool
    ) -> tuple[int, list[tuple[ColdTier, list[Renewal]]]]:
        """Extend the expiry of one slice of blocks to ``when``; with ``shorten``, also lower later expiries to it.

        Returns how many blocks were found, and the records in colder tiers whose expiry is later.
        """
        index = self._index
        with index.lock:
            keys, rows = self._own(keys, who)
            found = np.unique(rows[(rows > 0) & (index.expiry[rows] > now)])
            self.extend(found, when)
            if not shorten:
                return len(found), []
            shorter = np.isin(rows, index.shorten(found, when))
            renew = []
            for cold in self._colds:
                there = index.state[cold.number][rows] == SEALED
                # A tier without a record of a block may have traces of one, which must not reappear.
                some = shorter & there if cold.shared and not cold.read_only else shorter | ~there
                places = np.where(there, index.place[cold.number][rows], NOWHERE)
                renew.append((cold, [(keys[i], int(places[i]), when) for i in np.flatnonzero(some).tolist()]))
        return len(found), renew

    def renew(self, cold: ColdTier, items: Sequence[Renewal], done: Callable[[Sequence[bool]], None]) -> None:
        """Rewrite the expiry in records. A record that cannot be rewritten is erased, because it must not outlive the
        new expiry.

        ``done`` gets False for each record that could not be erased either.
        """
        self._demotion.renew(cold, items, done)

    def note_expiries(self) -> None:
        """Persist the expiries that were extended beyond what records in colder tiers say. No operation may be under
        way."""
        index = self._index
        for cold in self._colds:
            if not isinstance(cold.tier, Renewing):
                continue
            with index.lock:
                rows = rows_of(sorted(self._residents.prolonged))
                rows = rows[index.state[cold.number][rows] == SEALED]
                held = Held(
                    list(index.keys(rows)),
                    np.array([index.parent(row) for row in rows.tolist()], "V32"),
                    index.place[cold.number][rows],
                    index.depth[rows].astype(np.int64),
                    index.expiry[rows],
                    index.priority[rows],
                    np.zeros(len(rows), np.int64),
                    index.identity[rows],
                )
            cold.tier.note(held)
        self._residents.prolonged.clear()


class Expiring:
    """A change of blocks' expiry in progress. Call ``step`` until it returns False; the tiers finish the rest."""

    def __init__(
        self,
        pipeline: Pipeline,
        keys: Sequence[BlockKey],
        heads: Sequence[BlockKey],
        when: float,
        now: float,
        done: Callable[[int], None],
        who: Asker = None,
    ) -> None:
        """``heads`` must live at least as long. ``done`` gets the number of blocks whose records may still have a later
        expiry."""
        self._pipeline = pipeline
        self._keys = [*heads, *keys]
        self._heads = len(heads)
        self._when = when
        self._now = now
        self._who = who
        self._barrier = DropBarrier(1, done)
        self._at = 0
        self.found = 0
        """Blocks found so far."""

    def step(self) -> bool:
        """Change the next slice; returns whether another remains."""
        shorten = self._at >= self._heads
        stop = min(self._at + work_slices.SLICE, len(self._keys) if shorten else self._heads)
        found, renew = self._pipeline.expire_some(
            self._keys[self._at : stop], self._who, self._when, self._now, shorten
        )
        self._at = stop
        self.found += found if shorten else 0
        for cold, items in renew:
            if items:
                self._barrier.more()
                self._pipeline.renew(cold, items, self._barrier.end)
        if self._at < len(self._keys):
            return True
        self._barrier.end(())
        return False


class DropRequest:
    """A drop in progress. Call ``step`` until it returns False; the tiers finish the rest."""

    def __init__(
        self,
        pipeline: Pipeline,
        keys: Sequence[BlockKey],
        done: Callable[[int], None],
        shared: bool = True,
        who: Asker = None,
        notify_others: bool = True,
        absence: Absence = Absence.DROPPED,
    ) -> None:
        """``shared``: also drop from shared storage; ``notify_others``: and notify its other users.

        ``done`` gets the number of blocks that were not erased. ``absence`` is recorded as what happened.
        """
        self._pipeline = pipeline
        self._keys = keys
        self._who = who
        self._notify_others = notify_others
        self._absence = absence
        self._colds = [cold for cold in pipeline.colds if shared or not cold.shared]
        self._barrier = DropBarrier(2 + len(self._colds), done)
        self._erase: list[Erased] = [[] for _ in self._colds]
        self._at = 0
        self.found = 0
        """Blocks found so far."""

    def step(self) -> bool:
        """Drop the next slice; returns whether another remains."""
        keys = self._keys[self._at : self._at + work_slices.SLICE]
        self._at += len(keys)
        if keys:
            try:
                self.found += self._pipeline.drop_some(
                    keys, self._who, self._colds, self._barrier, self._erase, self._absence
                )
            except BaseException:
                self._erase_all()
                raise
        if self._at < len(self._keys):
            return True
        self._erase_all()
        return False

    def _erase_all(self) -> None:
        for cold, items in zip(self._colds, self._erase, strict=True):
            if self._notify_others and cold.withdraw is not None:
                cold.withdraw(items, self._barrier.end, self._who)
            else:
                cold.tier.drop(items, self._barrier.end)
        self._pipeline.when_zeroed(lambda: self._barrier.end(()))
        self._barrier.end(())
