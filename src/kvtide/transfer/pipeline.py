"""Moves blocks between tiers and keeps the index true while they move.

Decide under the index's lock, act outside it: each verb first changes rows and collects what is to be done (reads,
writes, events), then does it. A row on the move is held, so it cannot be evicted or forgotten meanwhile.

Up (ascent.py): a row gets a slot in DRAM and a read; equal reads are joined. Down (descent.py): a sealed row is written
to a colder tier while it stays readable in DRAM. Out: a drop is answered when no tier can bring the block back
(eraser.py).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from kvtide.block import BlockKey, Span
from kvtide.events import BlockRemoved, BlockStored, Event, Feed
from kvtide.index.account import Account
from kvtide.index.index import ABSENT, DRAM, PENDING, SEALED, Index, Mask, Rows, marks
from kvtide.index.lease import Lease, Reservation
from kvtide.plan.budget import WriteBudgetStatistics
from kvtide.plan.evict import Evictor, EvictorStatistics
from kvtide.plan.policy import Policy
from kvtide.plan.quota import Quota
from kvtide.plan.uses import Uses
from kvtide.tiers.base import Identity
from kvtide.tiers.dram import Dram
from kvtide.transfer.ascent import Ascent, LoadStatistics
from kvtide.transfer.cold import Cold
from kvtide.transfer.descent import Descent
from kvtide.transfer.eraser import Eraser, Tally
from kvtide.transfer.residents import Residents, rows_of
from kvtide.transfer.room import Room

__all__ = ["Pipeline", "PipelineStatistics", "Pledge"]


@dataclass(frozen=True, slots=True)
class PipelineStatistics:
    leases: int = 0
    """Rights to read that are open; a reservation has one on the prompt before it."""
    reservations: int = 0
    """Rights to write that are open."""
    pending: int = 0
    """Blocks that somebody waits for."""
    doomed: int = 0
    """Dropped blocks that somebody still holds."""
    loads: LoadStatistics = field(default_factory=LoadStatistics)
    evictors: dict[str, EvictorStatistics] = field(default_factory=dict)
    """By tier."""
    write_budgets: dict[str, WriteBudgetStatistics] = field(default_factory=dict)
    """By tier, of those that have one."""


@dataclass(frozen=True, slots=True)
class Pledge:
    """Blocks of one group, in order, that somebody wants to store; in columns."""

    identity: Identity
    keys: Sequence[BlockKey]
    parents: Sequence[bytes]
    depths: Sequence[int]
    expiry: float = float("inf")
    priority: int = 0
    tokens: Sequence[bytes] = ()


@dataclass(slots=True)
class _Granted:
    """What a reservation has got so far."""

    keys: list[BlockKey]
    rows: list[int]
    places: list[int]
    depths: list[int]
    spans: list[Span]


class Pipeline:
    """The only place that changes where rows are. Safe from any thread."""

    def __init__(
        self,
        index: Index,
        dram: Dram,
        colds: Sequence[Cold],
        policy: Policy,
        uses: Uses,
        feed: Feed,
        checksum: bool = False,
        tenants: Mapping[bytes, int] = MappingProxyType({}),
        quotas: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """``tenants`` have numbers for good, by tag, and by these numbers some have ``quotas`` of DRAM in bytes."""
        self._index = index
        self._dram = dram
        self._colds = colds
        self._uses = uses
        self._feed = feed
        self.counts: Counter[str] = Counter()
        """What happened, by name; see ``docs/glossary.md``."""
        self._residents = residents = Residents(index, dram, checksum, tenants)
        self._eraser = eraser = Eraser(index, colds)
        self._descent = descent = Descent(index, residents, colds, policy, eraser, feed, self.counts)
        may_leave = descent.may_leave if any(c.admission.keeps_leaving for c in colds) else None
        self._evictor = evictor = Evictor(index, DRAM, dram, policy, uses, may_leave)
        quota = Quota(index, DRAM, "dram", Account(index, quotas), evictor.ranked) if quotas else None
        self._room = Room(index, residents, dram, colds, descent, evictor, quota, tenants, feed, self.counts)
        self._ascent = Ascent(index, residents, dram, colds, self._room, eraser, feed, self.counts)
        self.lease, self.load, self.flush = residents.lease, self._ascent.load, descent.flush
        self._reservations = 0

    def statistics(self) -> PipelineStatistics:
        with self._index.lock:
            evictors = {"dram": self._evictor, **{c.name: c.evictor for c in self._colds}}
            return PipelineStatistics(
                self._residents.leases,
                self._reservations,
                self.blocks_pending,
                self.blocks_doomed,
                self._ascent.statistics(),
                {name: e.statistics() for name, e in evictors.items() if e is not None},
                {c.name: c.budget.statistics() for c in self._colds if c.budget is not None},
            )

    @property
    def blocks_doomed(self) -> int:
        """Dropped blocks that somebody still holds."""
        return len(self._residents.doomed)

    @property
    def blocks_pending(self) -> int:
        """Rows that somebody waits for."""
        return len(self._ascent)

    def intact(self, row: int) -> bool:
        """Whether a row in DRAM still has the bytes that were sealed (see ``dram.checksum``). Under the lock."""
        if self._residents.intact(row):
            return True
        self.counts["blocks changed in DRAM after they were sealed"] += 1
        return False

    def stored(self, rows: Rows) -> None:
        """All blocks of a prompt that are here, head first, after some were stored. Under the index's lock."""
        self._uses.stored(rows)
        for cold in self._colds:
            if cold.admission.learns:
                worth = cold.admission.on_store(rows)
                self._descent.write(cold, rows[worth])
                absent = np.count_nonzero(self._index.state[cold.number][rows[~worth]] == ABSENT)
                self.counts[f"stores dropped: the admission to {cold.name} refused"] += int(absent)

    def keep(self, rows: Rows, most: int = sys.maxsize) -> Lease:
        """Blocks of one chain, head first, are about to get children: hold those that only DRAM has, so many at most.
        Under the lock."""
        self._uses.touch(rows)
        return self.lease(rows[~self._descent.saved(rows)][:most])

    def asked(self, rows: Rows, length: int) -> None:
        """The first blocks of a prompt of ``length`` blocks, head first, were asked for. Under the index's lock."""
        self._uses.asked(rows, length)
        for cold in self._colds:
            wanted = rows[cold.admission.on_touch(rows)]
            if len(wanted):
                self._descent.write(cold, wanted)

    # -- in from callers ----------------------------------------------------------------------------------

    def reserve(self, pledges: Sequence[Pledge]) -> Reservation:
        """Slots in DRAM for blocks that are not here. What is here, or finds no room, is not in the answer."""
        granted = _Granted([], [], [], [], [])
        for pledge in pledges:
            self._reserve(pledge, granted)
        reservation = Reservation(
            granted.keys,
            rows_of(granted.rows),
            granted.spans,
            granted.depths,
            [self._dram.generation(place) for place in granted.places],
            self._finish,
        )
        with self._index.lock:
            self._reservations += 1
            for pledge in pledges:
                reservation.refused += int(np.count_nonzero(self._absent(self._index.rows(pledge.keys))))
        return reservation

    def _absent(self, rows: Rows) -> Mask:
        """Which rows are in no tier, nor on their way to one. Under the lock."""
        absent: Mask = self._index.state[DRAM][rows] == ABSENT
        for cold in self._colds:
            absent &= self._index.state[cold.number][rows] == ABSENT
        return absent

    def _reserve(self, pledge: Pledge, granted: _Granted) -> None:
        done = 0
        while done < len(pledge.keys):
            events: list[Event] = []
            with self._index.lock:
                done = self._grant(pledge, done, granted, events)
            self._feed.publish(events)
            if done < len(pledge.keys) and not self._room.grow(pledge.identity):
                self.counts["stores dropped: no room in DRAM"] += len(pledge.keys) - done
                return

    def _grant(self, pledge: Pledge, start: int, granted: _Granted, events: list[Event]) -> int:
        """Give slots to blocks from ``start`` on; answers where it ended, for want of a slot that growing may give."""
        index, size = self._index, pledge.identity.geometry.footprint
        wanted = (np.flatnonzero(self._absent(index.rows(pledge.keys[start:]))) + start).tolist()
        allowed = self._room.allow(pledge.identity, len(wanted), events)
        over, wanted = len(wanted) - allowed, wanted[:allowed]
        places = self._room.take(pledge.identity, len(wanted), events)
        keys = [pledge.keys[i] for i in wanted[: len(places)]]
        rows = []
        for i in wanted[: len(places)]:
            # A key may be known and yet nowhere: somebody holds it.
            row = index.row(pledge.keys[i]) or index.add(pledge.keys[i], pledge.parents[i], pledge.depths[i])
            rows.append(row)
            if pledge.tokens:
                self._residents.tokens[row] = pledge.tokens[i]
        if rows:
            self._dram.own(rows_of(places), rows_of(rows))
            self._residents.enter(rows_of(rows), places, pledge.identity)
            index.mark[rows] = marks(keys)
            index.expire_at(rows, pledge.expiry)
            index.priority[rows] = pledge.priority
        granted.keys += keys
        granted.rows += rows
        granted.places += places
        granted.depths += [pledge.depths[i] for i in wanted[: len(places)]]
        granted.spans += self._dram.spans(places, size)
        if len(places) < len(wanted):
            return wanted[len(places)]
        self._room.refuse(pledge.identity, "store", over)
        return len(pledge.keys)

    def _finish(self, reservation: Reservation, sealed: bool) -> None:
        """The end of a reservation."""
        index, rows = self._index, reservation.rows
        events: list[Event] = []
        with index.lock:
            self._reservations -= 1
            generations = [self._dram.generation(p) for p in index.place[DRAM][rows].tolist()]
            assert generations == reservation.generations, "a slot changed hands under a writer"
            good = np.full(len(rows), sealed)
            if self._residents.doomed:
                good &= ~self._residents.are_doomed(rows)
            kept = rows[good]
            self._residents.clear_padding(kept)
            self._residents.seal(kept)
            for row in rows[~good].tolist():
                self._residents.leave(row)
            ready = self._ascent.landed(rows.tolist(), good.tolist())
            for cold in self._colds:
                self._descent.write(cold, kept[cold.admission.on_store(kept)])
            self.counts["blocks stored"] += len(kept)
            if self._feed.followed and len(kept):
                events.append(BlockStored("dram", index.keys(kept)))
            self._residents.unhold(rows)
            self._room.save_ahead()
        self._feed.publish(events)
        ready()

    # -- out ----------------------------------------------------------------------------------------------

    def bring_down(self) -> None:
        """Evict what tenants have beyond their quotas: these may have been lowered since it was written."""
        events: list[Event] = []
        with self._index.lock:
            for cold in self._colds:
                if (quota := cold.quota) is not None:
                    for tenant in quota.account.quotas:
                        while rows := quota.victims(tenant, 0):
                            self._descent.evict(cold, rows, events)
        self._feed.publish(events)

    def catch_up(self, name: str) -> None:
        """A tier that would not take blocks takes them again: write those that are still here and were refused."""
        cold = next(c for c in self._colds if c.name == name)
        with self._index.lock:
            refused = rows_of(sorted(self._residents.refused))
            self._descent.write(cold, refused[cold.admission.on_store(refused)])

    def late(self, cold: str, keys: Sequence[BlockKey]) -> None:
        """Reads of these blocks from a tier hang: nobody waits for them any more, and their slots stay aside."""
        events: list[Event] = []
        with self._index.lock:
            rows = self._index.rows(keys)
            rows = rows[self._index.state[DRAM][rows] == PENDING]
            ready = self._ascent.landed(rows.tolist(), [False] * len(rows))
            for row in rows.tolist():
                self._detach(row, "unreadable", events)
            self.counts[f"blocks late from {cold}"] += len(rows)
        self._feed.publish(events)
        ready()

    def make_room(self, number: int, size: int) -> bool:
        """Evict from a tier so that a slot of ``size`` comes free; False if nothing may leave."""
        events: list[Event] = []
        with self._index.lock:
            if number == DRAM:
                made = self._room.make(size, 1, events)
            else:
                made = self._room.make_cold(next(c for c in self._colds if c.number == number), size, events)
        self._feed.publish(events)
        return made

    def drop(self, keys: Sequence[BlockKey], done: Callable[[int], None], *, shared: bool = True) -> int:
        """Remove blocks from every tier, or all but the ``shared`` ones; answers how many there were.

        ``done`` gets the number not erased.
        """
        index = self._index
        events: list[Event] = []
        erase: list[tuple[Cold, list[tuple[BlockKey, int]]]] = []
        colds = [cold for cold in self._colds if shared or not cold.shared]
        tally = Tally(1 + len(colds), done)
        with index.lock:
            rows = index.rows(keys)
            for cold in colds:
                # Row 0 is nowhere; but a tier may have traces of blocks that the index knows nothing of any more.
                erase.append((cold, list(zip(keys, index.place[cold.number][rows].tolist(), strict=True))))
            found = rows[rows > 0].tolist()
            for row in found:
                self._detach(row, "dropped", events)
            self.counts["blocks dropped"] += len(found)
            self._eraser.await_dying(keys, tally)
        self._feed.publish(events)
        for cold, items in erase:
            cold.tier.drop(items, tally.end)
        tally.end(())
        return len(found)

    def residents_of(self, tenant: bytes) -> Rows:
        """A tenant's rows in DRAM that are not dropped yet. Under the lock."""
        rows = self._residents.of_tenant(tenant)
        return rows[~self._residents.are_doomed(rows)]

    def _detach(self, row: int, reason: str, events: list[Event]) -> None:
        """Take a row from the index, so that nobody finds it; its slots follow when nobody holds it."""
        index = self._index
        key = index.key(row)
        for cold in self._colds:
            if index.state[cold.number][row] == SEALED:
                index.remove(row, cold.number)
                events.append(BlockRemoved(cold.name, (key,), reason))
            elif index.state[cold.number][row] == PENDING:
                self._eraser.dies(cold, key)
        if index.state[DRAM][row] == SEALED:
            events.append(BlockRemoved("dram", (key,), reason))
        index.detach(row)
        self._residents.doom(row)

    def expire(self, rows: Rows) -> list[Event]:
        """Remove blocks whose time is over. Under the lock; answers what is to be published."""
        events: list[Event] = []
        for row in rows.tolist():
            key = self._index.key(row)
            for cold in self._colds:
                if self._index.state[cold.number][row] == SEALED:
                    cold.tier.evict(key, int(self._index.place[cold.number][row]))
            self._detach(row, "expired", events)
        self.counts["blocks expired"] += len(rows)
        return events
