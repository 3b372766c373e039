"""Room: who must leave so that others can come.

A tier makes room when it is full, by its policy. A tenant that has a quota makes room among its own blocks when that is
used up, however empty the tier is; only then may it take what the tier has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kvtide.events import BlockRemoved, Event, Feed
from kvtide.index.index import Index, Rows
from kvtide.plan.evict import Evictor
from kvtide.plan.quota import Quota
from kvtide.tiers.base import Identity
from kvtide.tiers.dram import Dram
from kvtide.tiers.segments import ladder
from kvtide.transfer.cold import Cold
from kvtide.transfer.descent import Descent
from kvtide.transfer.residents import Residents, rows_of

__all__ = ["Room"]


class Room:
    """All calls under the index's lock. ``tenants`` has the numbers of those with quotas, by tag."""

    def __init__(
        self,
        index: Index,
        residents: Residents,
        dram: Dram,
        colds: Sequence[Cold],
        descent: Descent,
        evictor: Evictor,
        quota: Quota | None,
        tenants: Mapping[bytes, int],
        feed: Feed,
        counts: Counter[str],
    ) -> None:
        self._index = index
        self._residents = residents
        self._dram = dram
        self._colds = colds
        self._descent = descent
        self._evictor = evictor
        self._quota = quota
        self._tenants = tenants
        self._feed = feed
        self._counts = counts
        self._keep_leaving = any(c.admission.keeps_leaving for c in colds)
        self._ahead = 0

    def take(self, what: Identity, count: int, events: list[Event], owners: Rows | None = None) -> list[int]:
        """Slots in DRAM for as many as can be had, by evicting too, but not by growing."""
        size, domain = what.geometry.footprint, what.domain
        places = self._dram.take_many(size, count, owners, domain)
        if len(places) < count and ladder(size) > self._dram.segments.budget:
            return []  # nothing that could leave would make room for it
        while (left := count - len(places)) and not self._dram.growable(size, domain):
            if not self.make(ladder(size) | domain, left, events):
                break
            places += self._dram.take_many(size, left, None if owners is None else owners[-left:], domain)
        return places

    def grow(self, what: Identity) -> bool:
        """Take memory for such a block or, where the system has none though the budget does, evict. Not under the
        lock."""
        size, domain = what.geometry.footprint, what.domain
        if self._dram.grow(size, domain):
            return True
        events: list[Event] = []
        with self._index.lock:
            made = self.make(ladder(size) | domain, 1, events)
        self._feed.publish(events)
        return made

    def allow(self, what: Identity, count: int, events: list[Event]) -> int:
        """How many of ``count`` blocks their tenant may have in DRAM, after its own have made room where they may."""
        quota, tenant = self._quota, self._tenants.get(what.tenant, 0)
        if quota is None or tenant not in quota.account.quotas:
            return count
        size = ladder(what.geometry.footprint)
        while rows := quota.victims(tenant, count * size):
            self._evict(rows, events)
        allowed = min(count, max(0, quota.account.left(tenant) // size))
        if allowed < count and self._keep_leaving:
            self._save(quota.own(tenant))
        return allowed

    def refuse(self, what: Identity, verb: str, count: int) -> None:
        """So many blocks are more than their tenant may have."""
        if count and self._quota is not None:
            self._quota.refuse(self._tenants[what.tenant], verb, count, self._counts)

    def make(self, kind: int, count: int, events: list[Event]) -> bool:
        """Evict from DRAM so that up to ``count`` slots of a kind come free."""
        rows = self._evictor.victims(kind, count)
        if not rows and self._keep_leaving:
            self._ahead = 0
            self.save_ahead()
        self._evict(rows, events)
        return bool(rows)

    def _evict(self, rows: list[int], events: list[Event]) -> None:
        if rows and self._feed.followed:
            events.append(BlockRemoved("dram", self._index.keys(rows_of(rows)), "evicted"))
        for row in rows:
            self._residents.leave(row)
            self._index.retire(row)
        self._counts["blocks evicted from dram"] += len(rows)

    def make_cold(self, cold: Cold, size: int, events: list[Event]) -> bool:
        """Evict from a colder tier so that a slot of ``size`` comes free."""
        assert cold.evictor is not None
        return self._descent.evict(cold, cold.evictor.victims(size), events)

    def save_ahead(self) -> None:
        """Write the coldest blocks down before they must leave, so that room can be made at once."""
        segments = self._dram.segments
        if not self._keep_leaving or self._ahead > 0 or segments.used * 2 < segments.budget:
            self._ahead -= 1
            return
        with self._dram.book_lock:
            count = max(8, self._dram.blocks // 8)
        self._save(self._evictor.coldest(count))
        self._ahead = count // 4

    def _save(self, rows: Rows) -> None:
        for cold in self._colds:
            if cold.admission.keeps_leaving:
                self._descent.write(cold, rows[~self._descent.saved(rows)])
