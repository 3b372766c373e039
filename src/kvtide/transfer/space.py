"""Makes space in tiers: chooses the blocks to evict or move.

A full tier makes space by its policy. A tenant that has used up its quota makes space among its own blocks, however
empty the tier is; only then may it take the tier's free space. In both cases it is decided first whether the evictable
blocks would make the space that is needed; if not, nothing is evicted.

A block in DRAM that must not be evicted, and occupies a segment needed for another slot size, is moved. Under the lock
it gets its new slot and is held; without the lock its bytes are copied; under the lock again the row changes its place.
Until then, readers use the old place; if one is reading it at that moment, the block stays there.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from kvtide.counts import Count, TierCount
from kvtide.events import BlockRemoved, Event
from kvtide.index.absence_log import BY_POLICY, Absence, AbsenceCause
from kvtide.index.index import DRAM, Rows
from kvtide.plan.evict import Eviction, Evictor
from kvtide.plan.quota import Quota
from kvtide.tiers.base import Identity
from kvtide.tiers.dram.tier import copy
from kvtide.tiers.segments import Segment, domain_of, ladder, segment_of, size_of
from kvtide.transfer.cold_tier import ColdTier
from kvtide.transfer.context import TransferContext
from kvtide.transfer.demotion import Demotion
from kvtide.transfer.residents import Moving, rows_of

__all__ = ["SpaceMaker"]


_FEW = 12
"""Up to this many rows, removing them one by one is faster than in one batch."""
_TRIES = 4
"""How often other blocks are chosen after the ones to be moved were requested meanwhile."""


class _Move(NamedTuple):
    """Blocks being moved to other slots of their kind, so that segments become empty."""

    rows: Rows
    """Rows held by this move."""
    slots: list[tuple[int, int, int, int]]
    """The row, old place, new place and size in bytes of each block."""
    drained: list[Segment]


class SpaceMaker:
    """All calls need the index lock unless stated otherwise. ``tenants`` maps the tags of tenants with quotas to their
    numbers."""

    def __init__(
        self,
        context: TransferContext,
        demotion: Demotion,
        evictor: Evictor,
        quota: Quota | None,
        tenants: Mapping[bytes, int],
    ) -> None:
        """``evictor`` and ``quota`` are those of DRAM."""
        self._index, self._dram, self._colds = context.index, context.dram, context.colds
        self._residents, self._feed, self._counts = context.residents, context.feed, context.counts
        self._interrupted = context.interrupted
        self._demotion = demotion
        self._evictor = evictor
        self._quota = quota
        self._tenants = tenants
        self._keep_leaving = any(c.admission.keeps_leaving for c in self._colds)
        self._ahead = 0
        """Blocks that may be stored before more must be written to colder tiers in advance."""
        self._moves: list[_Move] = []
        """Moves that are decided but not done."""
        self._moving = threading.Lock()

    def take(self, what: Identity, count: int, events: list[Event], owners: Rows | None = None) -> list[int]:
        """Take up to ``count`` slots in DRAM, evicting if necessary, but without growing."""
        size, domain = what.geometry.footprint, what.domain
        places = self._dram.take_many(size, count, owners, domain)
        while (left := count - len(places)) and not self.growable(what):
            if not self.make(ladder(size) | domain, left, events, tenant=self._residents.number_of(what.tenant)):
                break
            places += self._dram.take_many(size, left, None if owners is None else owners[-left:], domain)
        return places

    def growable(self, what: Identity) -> bool:
        """Whether ``grow`` could make space for such a block, or is already needed to finish a move."""
        return bool(self._moves) or self._dram.growable(what.geometry.footprint, what.domain)

    def grow(self, what: Identity, *, wait: bool = True) -> bool | None:
        """Move blocks that occupy needed segments, and take memory for such a block. Call without the lock. With
        ``wait`` False it returns None while memory is being taken: see ``Dram.grow``.

        If the system has no memory though the budget does, it evicts, but only blocks whose slots can be used as they
        are. If blocks were requested while they were moved, so that they stay, others are chosen, a few times at most.
        """
        size, domain = what.geometry.footprint, what.domain
        for left in range(_TRIES, -1, -1):
            emptied = self._move()
            grown = self._dram.grow(size, domain, wait=wait)
            if grown or emptied:
                return True
            if grown is None:
                return None
            if not left:
                break
            events: list[Event] = []
            with self._index.lock:
                try:
                    tenant = self._residents.number_of(what.tenant)
                    made = self.make(ladder(size) | domain, 1, events, in_place=emptied is None, tenant=tenant)
                except BaseException:
                    self._interrupted()
                    raise
            self._feed.publish(events)
            if not made or not self._moves:
                return made
        return False

    def allow(self, what: Identity, count: int, events: list[Event]) -> int:
        """How many of ``count`` blocks their tenant may have in DRAM, after evicting its own blocks where possible."""
        if what.tenant in self._residents.forgotten:
            return 0
        quota, tenant = self._quota, self._tenants.get(what.tenant, 0)
        if quota is None or tenant not in quota.account.quotas or not count:
            return count
        kind, size = ladder(what.geometry.footprint) | what.domain, ladder(what.geometry.footprint)
        allowed, rows = quota.allow(tenant, count, size)
        if rows and not self._all_of(rows, kind):
            # Evicting slots of other kinds frees quota, but no usable slot: check whether slots are available.
            reach = self._evictor.reach(kind, allowed)
            if reach < allowed:
                allowed, rows = quota.allow(tenant, reach, size)
        self._evict(rows, events, AbsenceCause.QUOTA, tenant)
        if allowed < count and self._keep_leaving:
            self._save(quota.own(tenant))
        return allowed

    def _all_of(self, rows: list[int], kind: int) -> bool:
        segments = self._dram.segments
        return all(segments[segment_of(place)].kind == kind for place in self._index.place[DRAM][rows].tolist())

    def refuse(self, what: Identity, count: int, *, load: bool = False) -> None:
        """Count blocks refused because of their tenant's quota, or because the tenant is being forgotten."""
        if count and what.tenant in self._residents.forgotten:
            self._counts[Count.LOAD_FORGOTTEN if load else Count.STORE_FORGOTTEN] += count
        elif count and self._quota is not None:
            self._quota.refuse(self._tenants[what.tenant], count, self._counts, load=load)

    def make(self, kind: int, count: int, events: list[Event], *, in_place: bool = False, tenant: int = 0) -> bool:
        """Evict from DRAM so that up to ``count`` slots of a kind become free, at once or when ``grow`` is called.
        ``tenant``: the number of the tenant that needs them; 0: unknown.

        If no evictable block would lead to a free slot, nothing is evicted and the result is False.
        """
        eviction = self._evictor.victims(kind, count, in_place=in_place)
        if not eviction and self._keep_leaving:
            before = self._index.changes
            self._save_coldest(kind)
            if self._index.changes != before:  # a tier that completes immediately has them now
                eviction = self._evictor.victims(kind, count, in_place=in_place)
        self._evict(eviction.leave, events, self._by_policy(), tenant)
        if eviction.move:
            self._begin(eviction)
        return bool(eviction)

    def _by_policy(self) -> AbsenceCause:
        return BY_POLICY.get(self._evictor.policy.in_charge, AbsenceCause.NONE)

    def _evict(self, rows: list[int], events: list[Event], cause: AbsenceCause, tenant: int = 0) -> None:
        if not rows:
            return
        gone = rows_of(rows)
        if self._index.absence_log.on:
            self._note_evicted(gone, cause, tenant)
        if self._feed.followed:
            events.append(BlockRemoved("dram", self._index.keys(gone), "evicted", self._index.identities(gone)))
        if self._residents.unwritten:
            self._demotion.count_lost(rows)
        if len(rows) > _FEW:
            self._residents.leave_many(gone)
            self._index.retire_many(gone)
        else:
            for row in rows:
                self._residents.leave(row)
                self._index.retire(row)
        self._counts[TierCount.BLOCKS_EVICTED.of("dram")] += len(rows)

    def _note_evicted(self, rows: Rows, cause: AbsenceCause, tenant: int) -> None:
        """Record the eviction of those rows that no colder tier has."""
        log = self._index.absence_log
        if not self._colds:
            log.note(rows, Absence.EVICTED, DRAM, cause, tenant)
        elif len(gone := rows[~self._demotion.saved(rows)]):
            log.note(gone, Absence.EVICTED, DRAM, cause, tenant, self._demotion.why_unwritten(gone))

    def make_cold(self, cold: ColdTier, size: int, count: int, events: list[Event], tenant: int = 0) -> bool:
        """Evict from a colder tier so that up to ``count`` slots of ``size`` become free. ``tenant``: see ``make``."""
        assert cold.evictor is not None
        cause = BY_POLICY.get(cold.evictor.policy.in_charge, AbsenceCause.NONE)
        eviction = cold.evictor.victims(size, count)
        moving = [row for rows in eviction.move.values() for row in rows]
        made = self._demotion.evict(cold, eviction.leave, events, cause, tenant)
        if moving:
            # They must stay in the tier, but are in DRAM too: they are written again from there.
            made |= self._demotion.evict(cold, moving, events, cause, tenant)
            self._demotion.write(cold, rows_of(moving))
        return made

    def save_ahead(self, stored: int) -> None:
        """Account for ``stored`` new blocks: write the coldest blocks to colder tiers in advance, so that they can be
        evicted at once."""
        self._ahead -= stored
        segments = self._dram.segments
        if self._keep_leaving and self._ahead <= 0 and segments.used * 2 >= segments.budget:
            self._save_coldest()

    def _save_coldest(self, kind: int | None = None) -> None:
        """Write the blocks that would be evicted next to colder tiers.

        If a slot of ``kind`` is needed and none is available, this includes blocks in such slots, and enough blocks
        overall that a segment can be emptied for it.
        """
        with self._dram.book_lock:
            count = max(8, self._dram.blocks // 8)
            if kind is not None:
                count = max(count, max((s.slots for s in self._dram.segments), default=0))
        rows = self._evictor.coldest(count)
        if kind is not None:
            rows = np.union1d(rows, self._evictor.coldest(count, kind))
        self._save(rows)
        self._ahead = count // 2

    # -- moving -------------------------------------------------------------------------------------------

    def _begin(self, eviction: Eviction) -> None:
        """Assign new slots to rows that must leave their segments. Call with the lock held; ``_move`` does the rest."""
        moves: list[tuple[int, int, int, int]] = []
        index, identity = self._index, self._residents.identity
        for kind, rows in eviction.move.items():
            places = self._dram.take_many(size_of(kind), len(rows), rows_of(rows), domain_of(kind))
            moves += [
                (row, int(index.place[DRAM][row]), new, identity(row).geometry.footprint)
                for row, new in zip(rows, places, strict=False)
            ]
        for _, _, new, _ in moves:
            self._dram.unfilled(new)
        held = rows_of([row for row, *_ in moves])
        index.hold(held)
        self._moves.append(_Move(held, moves, eviction.drained))

    def moving(self) -> Moving:
        """The moves under way. Call with the lock held."""
        slots = [slot for move in self._moves for slot in move.slots]
        rows, places = rows_of([row for row, *_ in slots]), rows_of([new for _, _, new, _ in slots])
        return Moving(rows, places, [segment for move in self._moves for segment in move.drained])

    def _move(self) -> bool | None:
        """Copy blocks to their new slots and free the old ones. Returns whether a segment became empty; None if there
        was nothing to move.

        Sealed blocks do not change, so they may be read meanwhile. A block that is held by others when it is copied
        stays where it is, and so does its segment; the caller then chooses again. Call without the lock.
        """
        if not self._moves:
            return None
        emptied: bool | None = None
        events: list[Event] = []
        with self._moving:  # a second caller needs the space that the first one makes
            while self._moves:
                move = self._moves[0]
                copied = 0
                try:
                    for _, old, new, size in move.slots:
                        copy(self._dram.span(new, size), self._dram.span(old, size))
                        if self._dram.is_mixed(new):
                            self._dram.zero_tail(new, size)  # it may have bytes of a tenant that is being forgotten
                        copied += 1
                finally:
                    with self._index.lock:
                        try:
                            self._moves.remove(move)
                            emptied = self._moved(move, copied, events) or bool(emptied)
                        except BaseException:
                            self._interrupted()
                            raise
        self._feed.publish(events)
        return emptied

    def _moved(self, move: _Move, copied: int, events: list[Event]) -> bool:
        """Finish a move of which ``copied`` blocks were copied: if none of the held blocks stays in their segments, the
        rest is evicted. Call with the lock held."""
        index, doomed = self._index, self._residents.doomed
        for i, (row, old, new, _) in enumerate(move.slots):
            alone = index.holds[row] == 1 and row not in doomed and index.place[DRAM][row] == old
            if i < copied and alone:
                index.relocate(row, DRAM, new)
                self._dram.filled(new, self._residents.identity(row).tenant)
                self._dram.release(old)
                self._counts[Count.BLOCKS_MOVED] += 1
            elif row in doomed:
                self._dram.zero(rows_of([new]))  # it was dropped meanwhile, and this is a copy of it
            else:
                self._dram.release(new)
        self._residents.unhold(move.rows)
        self._evict(self._evictor.rest(move.drained), events, self._by_policy())
        return self._dram.settle(move.drained)

    def _save(self, rows: Rows) -> None:
        for cold in self._colds:
            if cold.admission.keeps_leaving:
                self._demotion.write(cold, rows[~self._demotion.saved(rows)])
