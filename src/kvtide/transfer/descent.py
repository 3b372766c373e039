"""Blocks on their way down: from DRAM to colder tiers, while they stay readable where they are.

If a lane has no room, or a tier's budget of writes or its tenant's quota is used up, the write is not made: stores are
dropped, callers never wait.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

import numpy as np

from kvtide.block import BlockKey
from kvtide.events import BlockRemoved, BlockStored, Event, Feed
from kvtide.index.index import ABSENT, DRAM, NOWHERE, PENDING, SEALED, Index, Mask, Rows
from kvtide.plan.policy import Policy
from kvtide.plan.quota import Quota
from kvtide.tiers.base import Write
from kvtide.tiers.record import header_bytes
from kvtide.transfer.cold import Cold
from kvtide.transfer.eraser import Eraser
from kvtide.transfer.residents import Residents, rows_of

__all__ = ["Descent"]

_WRITES = 8
_CHUNK = 64 << 20
"""A write is cut into jobs of so many blocks and bytes, so that a read that comes meanwhile need not wait for all."""
_ENOUGH = 8 << 20
"""Small blocks are more to a job, so that it has these bytes."""


class Descent:
    """Writes rows of DRAM down. ``counts`` is told what happened."""

    def __init__(
        self,
        index: Index,
        residents: Residents,
        colds: Sequence[Cold],
        policy: Policy,
        eraser: Eraser,
        feed: Feed,
        counts: Counter[str],
    ) -> None:
        self._index = index
        self._residents = residents
        self._colds = colds
        self._policy = policy
        self._eraser = eraser
        self._feed = feed
        self._counts = counts
        self._unsaid: list[Event] = []
        """What left a tier so that other blocks of its tenant could be written; told when one of those is."""

    def write(self, cold: Cold, rows: Rows) -> None:
        """Start writing rows of DRAM to ``cold``, as far as its lane has room; the rest is dropped. Under the lock."""
        if len(rows) and (refused := len(self._submit(cold, rows))):
            self._counts[f"stores dropped: the queue of {cold.name} is full"] += refused

    def _submit(self, cold: Cold, rows: Rows, *, last: bool = False) -> Rows:
        """Start writing rows of DRAM to ``cold``; answers those for which its lane has no room. Under the lock.

        What its budget of writes does not allow is dropped, unless this is the ``last`` chance.
        """
        index = self._index
        rows = rows[(index.state[cold.number][rows] == ABSENT) & (index.state[DRAM][rows] == SEALED)]
        if self._residents.doomed:  # dropped, and held by somebody: not to be written any more
            rows = rows[[row not in self._residents.doomed for row in rows.tolist()]]
        if cold.quota is not None:
            rows = self._within(cold, cold.quota, rows)
        charged = rows
        items: list[Write] = []
        for row in rows.tolist():
            span = self._residents.span(row)
            if cold.budget is not None and not cold.budget.take(len(span), last):
                over = rows[len(items) :]
                self._counts[f"stores dropped: the write budget of {cold.name} is used up"] += len(over)
                self._residents.refused.update(over.tolist())
                rows = rows[: len(items)]
                break
            if not cold.lane.room(len(span)):
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
            )
            items.append(write)
        rows, refused = rows[: len(items)], rows[len(items) :]
        if cold.quota is not None:
            for row in charged[len(items) :].tolist():
                cold.quota.account.leave(row)
        index.state[cold.number][rows] = PENDING
        index.hold(rows)
        size = max((len(item.span) for item in items), default=1)
        step = max(1, min(max(_WRITES, _ENOUGH // size), _CHUNK // size))
        for i in range(0, len(items), step):
            part = items[i : i + step]
            # Submitting takes no I/O; a tier that answers at once takes the index's lock again, which is reentrant.
            cold.lane.write(part, functools.partial(self._written, cold, part))
        return refused

    def _within(self, cold: Cold, quota: Quota, rows: Rows) -> Rows:
        """The rows that their tenants may have in a tier, and are charged for from now on. Under the lock."""
        good = np.ones(len(rows), np.bool_)
        full: set[int] = set()
        for i, (row, tenant) in enumerate(zip(rows.tolist(), self._index.tenant[rows].tolist(), strict=True)):
            if tenant not in quota.account.quotas:
                continue
            identity = self._residents.identity(row)
            tokens = 4 * identity.block_tokens if cold.keep_tokens else 0
            nbytes = header_bytes(identity.geometry.sections, tokens) + identity.geometry.footprint
            while tenant not in full and (own := quota.victims(tenant, nbytes)):
                self.evict(cold, own, self._unsaid)
            if quota.account.left(tenant) < nbytes:
                full.add(tenant)
                good[i] = False
                quota.refuse(tenant, "store", 1, self._counts)
                self._residents.refused.add(row)
            else:
                quota.account.enter(rows[i : i + 1], nbytes)
        return rows[good]

    def evict(self, cold: Cold, rows: list[int], events: list[Event]) -> bool:
        """Let rows leave a colder tier; answers whether there were any. Under the lock."""
        keys = self._index.keys(rows_of(rows))
        for row, key in zip(rows, keys, strict=True):
            cold.tier.evict(key, self._index.remove(row, cold.number))
            self._index.retire(row)
        if rows:
            events.append(BlockRemoved(cold.name, keys, "evicted"))
            self._counts[f"blocks evicted from {cold.name}"] += len(rows)
        return bool(rows)

    def _written(self, cold: Cold, items: Sequence[Write], places: Sequence[int]) -> None:
        index = self._index
        kept: list[BlockKey] = []
        dropped: list[tuple[BlockKey, int]] = []
        with index.lock:
            for item, place in zip(items, places, strict=True):
                charged = cold.quota.account.charged(item.owner) if cold.quota is not None else 0
                index.remove(item.owner, cold.number)
                if item.owner in self._residents.doomed:
                    # A failed write too may have left its name.
                    dropped.append((item.key, place))
                elif place == NOWHERE:
                    self._residents.refused.add(item.owner)
                else:
                    index.put(item.owner, cold.number, SEALED, place)
                    if cold.quota is not None and charged:
                        # A compressed block takes less than it was charged for.
                        taken = charged if cold.evictor is None else cold.evictor.size(place)
                        cold.quota.account.enter(rows_of([item.owner]), taken)
                    self._residents.refused.discard(item.owner)
                    kept.append(item.key)
            self._counts[f"blocks written to {cold.name}"] += len(kept)
            self._residents.unhold(rows_of([item.owner for item in items]))
            events, self._unsaid = self._unsaid, []
        if dropped:
            self._eraser.erase(cold, dropped)
        if kept:
            events.append(BlockStored(cold.name, tuple(kept)))
        self._feed.publish(events)

    def saved(self, rows: Rows) -> Mask:
        """Which rows are whole in a colder tier too."""
        saved = np.zeros(len(rows), np.bool_)
        for cold in self._colds:
            saved |= self._index.state[cold.number][rows] == SEALED
        return saved

    def may_leave(self, rows: Rows) -> Mask:
        """Which rows need not wait in DRAM for a colder tier: it has them, or would not take them."""
        free = self.saved(rows)
        if self._residents.refused:
            free |= np.array([row in self._residents.refused for row in rows.tolist()], np.bool_)
        return free

    def flush(self) -> None:
        """Write down what only DRAM has, hottest first, where the admission says that it should outlive DRAM."""
        for cold in self._colds:
            if not cold.admission.keeps_leaving:
                continue
            with self._index.lock:
                # Pinned ones too: what must not leave DRAM must not be lost with it either.
                rows = np.flatnonzero(self._index.state[DRAM][: self._index.size] == SEALED)
                rows = rows[~self.saved(rows)]
                rows = self._submit(cold, rows[np.argsort(self._policy.score(rows))[::-1]], last=True)
            while len(rows) and cold.lane.wait_idle(cold.patience):
                with self._index.lock:
                    rows = self._submit(cold, rows, last=True)
