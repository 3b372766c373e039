"""What leaves when a tier is full.

A ``Policy`` ranks, lower score sooner out, and leaf first; ``Coldest`` keeps what it ranked. The ``Evictor`` decides
what is ranked: the rows of one slot kind.

Shares: tenants that use a tier have equal shares of it. When it is full, one that has more than its share loses blocks
first, its coldest, until it has no more than that; what nobody else wants it keeps.

Sizes: a slot can only be reused for its own kind. If the coldest segment of another kind is colder, on average, than
the coldest block of this kind, or this kind has nothing to give, that whole segment is emptied instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvtide.histogram import HistogramStatistics
from kvtide.index.index import SEALED, Index, Mask, Rows
from kvtide.plan.ages import Ages
from kvtide.plan.coldest import Coldest, Queue
from kvtide.plan.policy import Policy, Scores
from kvtide.plan.uses import Uses
from kvtide.tiers.segments import EMPTY, Segment, Segments, size_of

__all__ = ["Evictor", "EvictorStatistics", "Slotted", "room"]


class Slotted(Protocol):
    """A tier whose room is kept in a book of segments."""

    @property
    def segments(self) -> Segments: ...

    @property
    def book_lock(self) -> threading.Lock: ...


def room(tier: Slotted) -> int:
    """About how many blocks a tier holds when it is full; 0 while it has none to judge by."""
    with tier.book_lock:
        segments = tier.segments
        blocks = sum(s.slots - len(s.free) for s in segments)
        return blocks * segments.budget // segments.used if segments.used else 0


@dataclass(frozen=True, slots=True)
class EvictorStatistics:
    policy: str
    """The idea that ranks now."""
    ages: HistogramStatistics
    """For how many seconds nobody had used what was evicted."""


class Evictor:
    """Finds what may leave one tier. All calls under the index's lock."""

    def __init__(
        self,
        index: Index,
        number: int,
        tier: Slotted,
        policy: Policy,
        uses: Uses,
        may_leave: Callable[[Rows], Mask] | None = None,
    ) -> None:
        self._index = index
        self._number = number
        self._tier = tier
        self._policy = policy
        self.ranked = Coldest(index, number, policy, uses, may_leave)
        self._ages = Ages(uses.clockwork)

    def victims(self, kind: int, count: int = 1) -> list[int]:
        """Rows to evict so that slots of ``kind`` come free, at once or when a segment is cut anew.

        At most ``count`` rows, or all of one segment; at least one, unless nothing may leave.
        """
        rows = self._victims(kind, count)
        if rows:
            self._ages.add(self._index.used[rows])
        return rows

    def statistics(self) -> EvictorStatistics:
        return EvictorStatistics(self._policy.in_charge, self._ages.statistics())

    def _victims(self, kind: int, count: int) -> list[int]:
        rows, score = self.ranked.next(kind, count, self._rank)
        segment = self._colder_segment(kind, score if rows else None)
        if segment is not None and (emptied := self._empty(segment)):
            return emptied
        if rows:
            self.ranked.take(kind, count)
        return rows

    def _empty(self, segment: Segment) -> list[int]:
        """Let nothing new into a segment; answers what is in it. None, if it has something by now that must stay."""
        with self._tier.book_lock:
            slots = np.flatnonzero(segment.owner != EMPTY)
            rows = segment.owner[slots]
            # A slot whose block was dropped, but is not erased yet, may have the number of a row that lies elsewhere.
            here = self._index.place[self._number][rows] == (segment.number << 32) + slots
            if not (self.ranked.leaving(rows) & here).all():
                return []
            self._tier.segments.drain(segment)
        owners: list[int] = rows.tolist()
        return owners

    def size(self, place: int) -> int:
        """The bytes of a slot in use."""
        return self._tier.segments.size(place)

    def coldest(self, count: int) -> Rows:
        """The rows that would leave next, of any kind, whether they may already or not."""
        with self._tier.book_lock:
            owners = [s.owner for s in self._tier.segments]
        rows: Rows = np.concatenate(owners) if owners else np.zeros(0, np.int64)
        rows = rows[rows > EMPTY]
        rows = rows[(self._index.state[self._number][rows] == SEALED) & (self._index.pins[rows] == 0)]
        scores = self._policy.score(rows)
        if len(rows) > count:
            near = np.argpartition(scores, count)[:count]
            rows, scores = rows[near], scores[near]
        return rows[np.argsort(scores)]

    def _rank(self, kind: int) -> Queue:
        with self._tier.book_lock:
            rows = self._tier.segments.owners(kind)
        rows = rows[rows > EMPTY]
        rows = rows[self.ranked.leaving(rows)]
        scores = self._policy.score(rows)
        count = max(64, len(rows) // 64)
        owed = self._owed(rows, scores, kind)
        if owed is not None:
            # What is owed changes with every block that leaves, so this queue must not last long.
            rows, count = (rows[owed], count) if owed.any() else (rows, 1 + len(rows) // 256)
        return self.ranked.queue(rows, count, owed is not None and bool(owed.any()))

    def _owed(self, rows: Rows, scores: Scores, kind: int) -> Mask | None:
        """Which rows of slots of ``kind`` their tenants have beyond their shares: the coldest of each such tenant.

        None where there is but one tenant.
        """
        if self._index.tenants < 2:
            return None
        owed = np.zeros(len(rows), np.bool_)
        with self._tier.book_lock:
            held = np.zeros(self._index.tenants + 1)
            for segment in self._tier.segments:
                owners = segment.owner[segment.owner > EMPTY]
                held += np.bincount(self._index.tenant[owners], minlength=len(held)) * segment.size
            share = self._tier.segments.budget / max(1, int(np.count_nonzero(held[1:])))
        tenants = self._index.tenant[rows]
        for tenant in np.flatnonzero(held[1:] > share) + 1:
            mine = np.flatnonzero(tenants == tenant)
            count = min(len(mine), int(-((share - held[tenant]) // size_of(kind))))
            owed[mine[np.argsort(scores[mine])[:count]]] = True
        return owed

    def _colder_segment(self, kind: int, than: int | None) -> Segment | None:
        """The coldest segment of another kind whose blocks may all leave, if it is colder than ``than``."""
        best, best_score = None, float("inf") if than is None else float(than)
        with self._tier.book_lock:
            others = self._tier.segments.others(kind)
        for segment in others:
            owner = segment.owner  # once: another thread may cut an empty segment anew
            rows = owner[owner != EMPTY]
            if not len(rows) or (rows < 0).any():
                continue
            score = float(self._policy.score(rows).mean())
            if score < best_score and self.ranked.leaving(rows).all():
                best, best_score = segment, score
        return best
