"""Demotion: writes blocks from DRAM to colder tiers while they stay readable in DRAM.

If a lane has no space, or a tier's write budget or the tenant's quota is used up, the write is not made: stores are
dropped, and callers never wait.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtide.block import BlockKey
from kvtide.counts import TierCount
from kvtide.events import BlockRemoved, BlockStored, Event
from kvtide.index.absence_log import Absence, AbsenceCause
from kvtide.index.index import ABSENT, DRAM, NOWHERE, PENDING, SEALED, Mask, Rows
from kvtide.interrupts import again_if_interrupted
from kvtide.plan.policy import Policy
from kvtide.plan.quota import Quota
from kvtide.tiers.base import Renewal, Renewing, Write
from kvtide.tiers.format.record import header_bytes
from kvtide.transfer.cold_tier import ColdTier
from kvtide.transfer.context import TransferContext
from kvtide.transfer.residents import rows_of
from kvtide.transfer.write_results import Flushed, Unwritten

__all__ = ["Demotion"]

_WRITES = 8
_CHUNK = 64 << 20
"""A write is split into jobs of at most so many blocks and bytes, so that a read that arrives meanwhile need not wait
for all of it."""
_ENOUGH = 8 << 20
"""A job of small blocks has more of them, so that it reaches this many bytes."""
_LOOK = 1 << 14
"""Rows examined in one hold of the index lock when counting unwritten blocks."""
_PAUSE = 0.5
"""Seconds that a wait for a storage may last before whoever drains the store is asked whether to go on."""


_Watcher = tuple[Callable[[list[Any]], None], object]
"""A callback, and the object to pass to it."""


class Demotion:
    """Writes rows of DRAM to colder tiers."""

    def __init__(self, context: TransferContext, policy: Policy) -> None:
        """``policy`` ranks the blocks in DRAM."""
        self._index, self._colds = context.index, [cold for cold in context.colds if not cold.read_only]
        self._residents, self._eraser = context.residents, context.eraser
        self._feed, self._counts = context.feed, context.counts
        self._interrupted = context.interrupted
        self._policy = policy
        self._unsaid: list[Event] = []
        """Evictions from a tier that made space for other blocks of the same tenant; published when one of those is
        written."""
        self.lost: Counter[Unwritten] = Counter()
        """Counts blocks that left DRAM and are in no tier though one should have had them, by the reason."""
        self._watchers: dict[tuple[int, int], list[_Watcher]] = {}
        """Callbacks for the end of a write, by tier and row."""
        self._requested: dict[int, deque[int]] = {cold.number: deque() for cold in self._colds}
        """Rows to be written on request, by tier."""
        self._under_way: dict[int, dict[int, int]] = {cold.number: {} for cold in self._colds}
        """The bytes of requested rows that are being written, by tier and row."""
        self._to_notify: list[_Watcher] = []
        """Watchers that ``tell`` must call. Kept here, so that an interrupted caller does not lose them."""

    def write(self, cold: ColdTier, rows: Rows) -> None:
        """Start writing rows of DRAM to ``cold``, as far as its lane has space; the rest is dropped. Call with the lock
        held."""
        if len(rows) and len(refused := self._submit(cold, rows)):
            self._counts[TierCount.STORE_QUEUE_FULL.of(cold.name)] += len(refused)
            if not cold.admission.keeps_leaving:  # otherwise the write is retried before they leave
                self._residents.note_unwritten(refused.tolist(), cold.number, Unwritten.QUEUE_FULL)

    def _submit(self, cold: ColdTier, rows: Rows, *, last: bool = False, requested: bool = False) -> Rows:
        """Start writing rows of DRAM to ``cold``; returns those for which its lane has no space. Call with the lock
        held.

        Rows beyond the tier's write budget are dropped, unless this is the ``last`` chance. The lane always accepts
        ``requested`` rows, because the requester submits few at a time.
        """
        index = self._index
        rows = rows[(index.state[cold.number][rows] == ABSENT) & (index.state[DRAM][rows] == SEALED)]
        if self._residents.doomed:  # dropped while a caller holds them: must not be written
            rows = rows[[row not in self._residents.doomed for row in rows.tolist()]]
        beyond = rows[:0]
        if cold.quota is not None:
            if cold.budget is not None and not last and cold.budget.statistics().bytes_left <= 0:
                rows = self._over_budget(cold, rows)
            rows, beyond = self._within(cold, cold.quota, rows, requested)
        charged = rows
        since = cold.heard()
        items: list[Write] = []
        for row in rows.tolist():
            span = self._residents.span(row)
            if cold.budget is not None and not cold.budget.take(len(span), last):
                self._over_budget(cold, rows[len(items) :])
                rows = rows[: len(items)]
                break
            if not cold.lane.reserve_write(len(span), requested):
                if cold.budget is not None:
                    cold.budget.give_back(len(span))
                break
            write = Write(
                index.key(row),
                self._residents.identity(row),
                span,
                index.parent(row),
                int(index.depth[row]),
                row,
                float(index.expiry[row]),
                int(index.priority[row]),
                self._residents.tokens.get(row, b"") if cold.keep_tokens else b"",
                since,
            )
            items.append(write)
        rows, refused = rows[: len(items)], np.concatenate([rows[len(items) :], beyond])
        if cold.quota is not None:
            for row in charged[len(items) :].tolist():
                cold.quota.account.leave(row)
        index.state[cold.number][rows] = PENDING
        index.hold(rows)
        size = max((len(item.span) for item in items), default=1)
        step = max(1, min(max(_WRITES, _ENOUGH // size), _CHUNK // size))
        for i in range(0, len(items), step):
            part = items[i : i + step]
            # Submitting does no I/O. A tier that completes immediately takes the index lock again, which is reentrant.
            cold.lane.write(part, functools.partial(self._written, cold, part))
        return refused

    def _over_budget(self, cold: ColdTier, rows: Rows) -> Rows:
        """Record that a tier's write budget does not allow these rows; returns no rows. Call with the lock held."""
        self._counts[TierCount.STORE_WRITE_BUDGET.of(cold.name)] += len(rows)
        self._residents.refused.update(rows.tolist())
        self._residents.note_unwritten(rows.tolist(), cold.number, Unwritten.WRITE_BUDGET)
        self._index.changes += 1  # they may leave DRAM now
        return rows[:0]

    def _within(self, cold: ColdTier, quota: Quota, rows: Rows, requested: bool) -> tuple[Rows, Rows]:
        """Charge rows to their tenants' quotas in a tier. Returns the rows allowed, and those at the end that the lane
        would not accept, for which no block need be evicted. The lane accepts ``requested`` rows. Call with the lock
        held."""
        good = np.ones(len(rows), np.bool_)
        full: set[int] = set()
        room, stop = cold.lane.write_room, len(rows)
        for i, (row, tenant) in enumerate(zip(rows.tolist(), self._index.tenant[rows].tolist(), strict=True)):
            identity = self._residents.identity(row)
            room -= identity.geometry.footprint
            if room < 0 and not requested and (i or cold.lane.write_bytes):  # an empty lane accepts a block of any size
                stop = i
                break
            if tenant not in quota.account.quotas:
                continue
            tokens = 4 * identity.block_tokens if cold.keep_tokens else 0
            nbytes = header_bytes(identity.geometry.sections, tokens) + identity.geometry.footprint
            allowed, own = (0, []) if tenant in full else quota.allow(tenant, 1, nbytes)
            if own:
                self.evict(cold, own, self._unsaid, AbsenceCause.QUOTA, tenant)
            if not allowed:
                full.add(tenant)
                good[i] = False
                quota.refuse(tenant, 1, self._counts)
                self._residents.refused.add(row)
                self._residents.note_unwritten([row], cold.number, Unwritten.QUOTA)
            else:
                quota.account.enter(rows[i : i + 1], nbytes)
        return rows[:stop][good[:stop]], rows[stop:]

    def evict(self, cold: ColdTier, rows: list[int], events: list[Event], cause: AbsenceCause, tenant: int = 0) -> bool:
        """Evict rows from a colder tier; returns whether there were any. Call with the lock held.

        ``tenant``: the number of the tenant that needs the space; 0: unknown.
        """
        gone = rows_of(rows)
        keys = self._index.keys(gone)
        if rows and self._index.absence_log.on:
            self._index.absence_log.note(
                gone[self._nowhere_but(cold.number, gone)], Absence.EVICTED, cold.number, cause, tenant
            )
            self._residents.displaced.update(gone[self._index.state[DRAM][gone] != ABSENT].tolist())
        if rows and self._feed.followed:
            events.append(BlockRemoved(cold.name, keys, "evicted", self._index.identities(gone)))
        for row, key in zip(rows, keys, strict=True):
            cold.tier.evict(key, self._index.remove(row, cold.number))
            self._index.retire(row)
        if rows:
            self._counts[TierCount.BLOCKS_EVICTED.of(cold.name)] += len(rows)
        return bool(rows)

    def _written(self, cold: ColdTier, items: Sequence[Write], places: Sequence[int]) -> None:
        index, residents, quota, number = self._index, self._residents, cold.quota, cold.number
        kept: list[Write] = []
        dropped: list[tuple[BlockKey, int]] = []
        small = cold.tier.statistics().budget if NOWHERE in places else 0
        shorter: list[Renewal] = []
        owners = [item.owner for item in items]
        rows = rows_of(owners)
        with index.lock:
            doomed, refused, unwritten = residents.doomed, residents.refused, residents.unwritten
            for item, row, place, expiry in zip(items, owners, places, index.expiry[rows].tolist(), strict=True):
                charged = quota.account.charged(row) if quota is not None else 0
                index.remove(row, number)
                if row in doomed:
                    # A failed write may also have left its name in the tier.
                    dropped.append((item.key, place))
                elif place == NOWHERE:
                    refused.add(row)
                    reason = Unwritten.TIER_TOO_SMALL if 0 < small < len(item.span) else Unwritten.WRITE_FAILED
                    residents.note_unwritten([row], number, reason)
                else:
                    index.put(row, number, SEALED, place)
                    if quota is not None and charged:
                        # A compressed block takes fewer bytes than it was charged for.
                        taken = charged if cold.evictor is None else cold.evictor.size(place)
                        quota.account.enter(rows_of([row]), taken)
                    refused.discard(row)
                    if unwritten:
                        residents.note_written(row, number)
                    kept.append(item)
                    if item.expiry > expiry:
                        shorter.append((item.key, place, expiry))
            self._counts[TierCount.BLOCKS_WRITTEN.of(cold.name)] += len(kept)
            residents.unhold(rows)
            events, self._unsaid = self._unsaid, []
            if self._watchers or self._under_way[number]:
                self._over(cold, owners)
        if dropped:
            self._eraser.erase(cold, dropped)
        if kept and self._feed.followed:
            whose = tuple(item.identity.fingerprint for item in kept)
            events.append(BlockStored(cold.name, tuple(item.key for item in kept), whose))
        self._feed.publish(events)
        if shorter:  # the expiry was changed while the block was written
            self.renew(cold, shorter, lambda erased: None)
        self.tell()

    def renew(self, cold: ColdTier, items: Sequence[Renewal], done: Callable[[Sequence[bool]], None]) -> None:
        """See ``Pipeline.renew``."""
        if isinstance(cold.tier, Renewing):
            cold.tier.renew(items, functools.partial(self._renewed, cold, items, done))
        else:
            self._renewed(cold, items, done, [False] * len(items))

    def _renewed(
        self, cold: ColdTier, items: Sequence[Renewal], done: Callable[[Sequence[bool]], None], results: Sequence[bool]
    ) -> None:
        index = self._index
        bad = [(key, place) for (key, place, _), good in zip(items, results, strict=True) if not good]
        events: list[Event] = []
        with index.lock:
            rows = index.rows([key for key, _ in bad])
            there = index.place[cold.number][rows] == np.array([place for _, place in bad], np.int64)
            there &= index.state[cold.number][rows] == SEALED
            # A block that was evicted meanwhile has released its place, perhaps to another block.
            bad = [(key, place if here else NOWHERE) for (key, place), here in zip(bad, there.tolist(), strict=True)]
            if len(rows := rows[there]):
                events.append(BlockRemoved(cold.name, index.keys(rows), "expired", index.identities(rows)))
                index.absence_log.note(rows, Absence.EXPIRED, cold.number)
                index.remove_many(rows, cold.number)
                index.retire_many(rows)
        self._feed.publish(events)
        if bad:
            cold.tier.drop(bad, done)
        else:
            done(())

    # -- writes on request --------------------------------------------------------------------------------

    def watch(self, cold: ColdTier, row: int, done: Callable[[list[Any]], None], what: object) -> None:
        """Call ``done`` once, when the next write of a row to a tier ends or is refused. Call with the lock held.

        ``done`` is called outside the lock, on any thread, with the ``what`` of all rows that end together. The caller
        must hold the row, because otherwise the row could have another block by then.
        """
        self._watchers.setdefault((cold.number, row), []).append((done, what))

    def unwatch(self, row: int, done: Callable[[list[Any]], None]) -> None:
        """Undo ``watch`` in all tiers. A write that has no watcher left is not made, unless it has begun. Call with the
        lock held."""
        for cold in self._colds:
            if watchers := self._watchers.get((cold.number, row)):
                if others := [watcher for watcher in watchers if watcher[0] is not done]:
                    self._watchers[cold.number, row] = others
                else:
                    del self._watchers[cold.number, row]

    def watched(self, cold: ColdTier, row: int, what: object) -> bool:
        """Whether a watcher will be told ``what`` when a write of the row to the tier ends. Call with the lock held."""
        return any(known is what for _, known in self._watchers.get((cold.number, row), ()))

    def request(self, cold: ColdTier, row: int, done: Callable[[list[Any]], None], what: object) -> None:
        """Queue a row for ``write_on_request``, and ``watch`` it. Call with the lock held."""
        self._requested[cold.number].append(row)
        self.watch(cold, row, done, what)

    def withdraw(self, done: Callable[[list[Any]], None]) -> None:
        """Remove all watchers with the callback ``done``; rows that only they requested are not written. Call with the
        lock held."""
        for place, watchers in list(self._watchers.items()):
            left = [watcher for watcher in watchers if watcher[0] is not done]
            if left:
                self._watchers[place] = left
            else:
                del self._watchers[place]
        for number, waiting in self._requested.items():
            self._requested[number] = deque(row for row in waiting if (number, row) in self._watchers)

    def write_on_request(self, cold: ColdTier) -> None:
        """Write requested rows regardless of the admission and of the queue's limit, a few at a time; the others wait.
        Watchers are told of each row. Call without the lock."""
        try:
            with self._index.lock:
                try:
                    self._write_requested(cold)
                except BaseException:
                    self._interrupted()
                    raise
        finally:
            self.tell()

    def repair(self) -> bool:
        """Tell the watchers of writes that are neither under way nor waiting to begin, because these were abandoned.
        Returns whether ``tell`` has watchers to call. Call with the lock held, when the states of the rows are
        correct."""
        for cold in self._colds:
            state, under_way = self._index.state[cold.number], self._under_way[cold.number]
            for row in [row for row in under_way if state[row] != PENDING]:
                del under_way[row]
            waiting = set(self._requested[cold.number])
            for number, row in list(self._watchers):
                if number == cold.number and state[row] != PENDING and row not in waiting:
                    self._ended(number, row)
        return bool(self._to_notify)

    def _ended(self, number: int, row: int) -> None:
        """Schedule the watchers of a write that ended or will not be made. Call with the lock held."""
        # In this order: an interrupt in between makes watchers be called twice rather than never.
        self._to_notify += self._watchers.get((number, row), ())
        self._watchers.pop((number, row), None)

    def tell(self) -> None:
        """Call the watchers of ended writes. Call without the lock."""
        if self._to_notify:
            again_if_interrupted(self._tell_all)  # other threads wait for it

    def _tell_all(self) -> None:
        some: list[_Watcher] = []
        try:
            with self._index.lock:
                some, self._to_notify = self._to_notify, some
            _tell(some)
        except BaseException:
            with self._index.lock:
                self._to_notify = some + self._to_notify
            raise

    def _write_requested(self, cold: ColdTier) -> None:
        """Write more of the requested rows, if few are under way. Call with the lock held, then ``tell`` without it."""
        waiting, under_way = self._requested[cold.number], self._under_way[cold.number]
        while waiting and sum(under_way.values()) < _CHUNK:
            some: dict[int, int] = {}
            while waiting and sum(some.values()) < _ENOUGH:
                row = waiting.popleft()
                # the requester cancelled, and the row may have another block
                if (cold.number, row) not in self._watchers:
                    continue
                if self._index.state[DRAM][row] == SEALED:
                    some[row] = len(self._residents.span(row))
                else:
                    self._ended(cold.number, row)
            under_way.update(some)  # before they are submitted: a tier may complete immediately
            self._submit(cold, rows_of(list(some)), requested=True)
            for row in some:
                if self._index.state[cold.number][row] != PENDING:
                    under_way.pop(row, None)
                    self._ended(cold.number, row)

    def _over(self, cold: ColdTier, rows: Sequence[int]) -> None:
        """Handle the end of writes. Call with the lock held, then ``tell`` without it."""
        under_way = self._under_way[cold.number]
        for row in rows:
            under_way.pop(row, None)
            self._ended(cold.number, row)
        self._write_requested(cold)

    # -- reporting ----------------------------------------------------------------------------------------

    def report(self, timed_out: bool) -> Flushed:
        """Count the blocks in DRAM that are written, and by reason those that are not. ``timed_out``: writes may still
        be under way."""
        index, residents, found = self._index, self._residents, dict[Unwritten, int]()
        written = 0

        def note(reason: Unwritten, count: int) -> None:
            if count:
                found[reason] = found.get(reason, 0) + count

        size = index.size
        for first in range(0, size, _LOOK):
            some = slice(first, min(first + _LOOK, size))
            with index.lock:
                here = index.state[DRAM][some] == SEALED
                if not (timed_out or residents.unwritten or residents.doomed):
                    missing = here.copy()
                    for cold in self._colds:
                        missing &= index.state[cold.number][some] != SEALED
                    if not missing.any():  # the common case
                        written += int(np.count_nonzero(here))
                        continue
                rows = first + np.flatnonzero(here)
                if residents.doomed:
                    rows = rows[~residents.are_doomed(rows)]
                saved = self.saved(rows)
                written += int(np.count_nonzero(saved))
                coming = np.zeros(len(rows), np.bool_)
                for cold in self._colds:
                    coming |= index.state[cold.number][rows] == PENDING
                if timed_out:
                    note(Unwritten.TIMEOUT, int(np.count_nonzero(coming)))
                rest = ~saved & ~coming
                if residents.unwritten:
                    for i, row in enumerate(rows.tolist()):
                        if (reasons := residents.unwritten.get(row)) is not None:
                            for reason in reasons.values():
                                note(reason, 1)
                            rest[i] = False
                note(Unwritten.NOT_ADMITTED if self._colds else Unwritten.NO_TIER, int(np.count_nonzero(rest)))
        return Flushed(written, found, complete=Unwritten.TIMEOUT not in found)

    def count_lost(self, rows: Sequence[int]) -> None:
        """Count those rows leaving DRAM that no tier has though one should. Call with the lock held."""
        for row in rows:
            if (reasons := self._residents.unwritten.get(row)) and not self.saved(rows_of([row]))[0]:
                self.lost[next(iter(reasons.values()))] += 1

    def _nowhere_but(self, tier: int, rows: Rows) -> Mask:
        """Mask of rows that no other tier has, completely or on its way."""
        alone = np.ones(len(rows), np.bool_)
        for number, state in enumerate(self._index.state):
            if number != tier:
                alone &= state[rows] == ABSENT
        return alone

    def why_unwritten(self, rows: Rows) -> npt.NDArray[np.uint8]:
        """Of rows in no colder tier: ``Unwritten.code`` of the reason; 0: one had it and evicted it. Call with the
        lock held."""
        codes = np.full(len(rows), Unwritten.NOT_ADMITTED.code, np.uint8)
        if displaced := self._residents.displaced:
            codes[[row in displaced for row in rows.tolist()]] = 0
        if unwritten := self._residents.unwritten:
            for i, row in enumerate(rows.tolist()):
                if (reasons := unwritten.get(row)) is not None:
                    codes[i] = next(iter(reasons.values())).code
        return codes

    def saved(self, rows: Rows) -> Mask:
        """Mask of rows that are also complete in a colder tier."""
        saved = np.zeros(len(rows), np.bool_)
        for cold in self._colds:
            saved |= self._index.state[cold.number][rows] == SEALED
        return saved

    def may_leave(self, rows: Rows) -> Mask:
        """Mask of rows that need not wait in DRAM for a colder tier: it has them, or refused them."""
        free = self.saved(rows)
        if refused := self._residents.refused:
            free |= np.isin(rows, np.fromiter(refused, np.int64, len(refused)))
        return free

    def unshared(self) -> Rows:
        """The rows in DRAM that are in no storage that others read too, hottest first. Blocks that another node has
        count as in none: it may lose them any time. Call with the lock held."""
        rows = np.flatnonzero(self._index.state[DRAM][: self._index.size] == SEALED)
        if self._residents.doomed:  # dropped while a caller holds them
            rows = rows[~self._residents.are_doomed(rows)]
        for cold in self._storages():
            rows = rows[self._index.state[cold.number][rows] != SEALED]
        return rows[np.argsort(self._policy.score(rows))[::-1]]

    def _storages(self) -> list[ColdTier]:
        """The storages that others read too, and that are written to."""
        return [cold for cold in self._colds if cold.shared and not cold.read_only]

    def write_to_shared(self, tried: set[BlockKey]) -> Iterator[int]:
        """Write the blocks that are in no shared storage to each, hottest first, but those ``tried`` before, to which
        they are added. Yields how many of them are there, and while it waits for a storage twice a second: whoever
        iterates may want to end. Ends when all are, or a storage takes no more."""
        with self._index.lock:
            keys = [key for key in self._index.keys(self.unshared()) if key not in tried]
        tried.update(keys)
        shared = 0
        for cold in self._storages():
            at = 0
            while at < len(keys):
                some = keys[at : at + _WRITES * _WRITES]
                with self._index.lock:
                    mine = self._index.rows(some)
                    left = len(self._flush(cold, mine[mine > 0]))
                at += len(some) - left
                if left and not (yield from _wait_idle(cold, shared)):
                    return
                shared = self._shared_of(keys)
                yield shared
            yield from _wait_idle(cold, shared)
        yield self._shared_of(keys)

    def _shared_of(self, keys: Sequence[BlockKey]) -> int:
        """Number of these blocks that some shared storage has."""
        with self._index.lock:
            rows = self._index.rows(keys)
            there = np.zeros(len(rows), np.bool_)
            for cold in self._storages():
                there |= self._index.state[cold.number][rows] == SEALED
            return int(np.count_nonzero(there))

    def flush(self) -> None:
        """Write the blocks that only DRAM has, hottest first, to the tiers whose admission says that they should
        outlive DRAM."""
        for cold in self._colds:
            if not cold.admission.keeps_leaving:
                continue
            with self._index.lock:
                # Pinned blocks too: a block that must not leave DRAM must not be lost with it either.
                rows = np.flatnonzero(self._index.state[DRAM][: self._index.size] == SEALED)
                rows = rows[~self.saved(rows)]
                rows = self._flush(cold, rows[np.argsort(self._policy.score(rows))[::-1]])
            while len(rows) and cold.lane.wait_idle(cold.patience):
                with self._index.lock:
                    rows = self._flush(cold, rows)

    def _flush(self, cold: ColdTier, rows: Rows) -> Rows:
        try:
            return self._submit(cold, rows, last=True)
        except BaseException:
            self._interrupted()
            raise


def _wait_idle(cold: ColdTier, shared: int) -> Generator[int, None, bool]:
    """Wait for a storage as long as it may take. Yields ``shared`` meanwhile; returns whether nothing is written to it
    any more."""
    left = math.inf if cold.patience is None else cold.patience
    while left > 0:
        if cold.lane.wait_idle(min(_PAUSE, left)):
            return True
        left -= _PAUSE
        yield shared
    return False


def _tell(watchers: list[_Watcher]) -> None:
    """Call each callback once, with everything it waits for."""
    notices: dict[int, tuple[Callable[[list[Any]], None], list[Any]]] = {}
    for call, what in watchers:
        notices.setdefault(id(call), (call, []))[1].append(what)
    for call, some in notices.values():
        call(some)
