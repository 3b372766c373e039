"""Chooses the blocks to evict when a tier is full.

A ``Policy`` ranks blocks: those with lower scores leave sooner, descendants before their ancestors. A ``RankingCache``
keeps rankings. The ``Evictor`` decides which rows are ranked: those of one slot kind.

*Shares.* The tenants that use a tier have equal shares of it. When the tier is full, a tenant beyond its share loses
blocks first, its coldest, until it is within its share. Space that no other tenant needs it keeps.

*Sizes.* A slot can be reused only for its own kind. If the coldest segment of another kind is colder, on average, than
the coldest block of this kind, or this kind has no evictable block, that whole segment is emptied instead; several, if
a slot is larger than one of them. Blocks in it that must not be evicted (pinned, or not yet written to a colder tier)
are moved to slots of their own kind in other segments: free ones, or those of the coldest blocks there, which are
evicted in their place. A segment with a held block cannot be emptied.

Nothing is chosen unless it leads to a free slot: if all evictable blocks together were not enough, nothing is evicted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvtide.histogram import HistogramStatistics
from kvtide.index.index import PENDING, SEALED, Index, Mask, Rows
from kvtide.plan.eviction_ages import Ages
from kvtide.plan.policy import Policy, Scores
from kvtide.plan.ranking_cache import LOWEST, Queue, RankingCache
from kvtide.plan.usage_tracker import UsageTracker
from kvtide.tiers.segments import EMPTY, Segment, Segments, size_of

__all__ = ["Eviction", "Evictor", "EvictorStatistics", "Slotted", "room"]


class Slotted(Protocol):
    """A tier that allocates slots in segments."""

    @property
    def segments(self) -> Segments: ...

    @property
    def book_lock(self) -> threading.Lock: ...


def room(tier: Slotted) -> int:
    """Approximate number of blocks that a tier holds when it is full; 0 while it has no blocks to estimate from."""
    with tier.book_lock:
        segments = tier.segments
        blocks = sum(s.slots - len(s.free) for s in segments)
        return blocks * segments.budget // segments.used if segments.used else 0


@dataclass(frozen=True, slots=True)
class EvictorStatistics:
    policy: str
    """The name of the ranking in use now."""
    ages: HistogramStatistics
    """Seconds since the last use of evicted blocks."""


_LAST = 1 << 60
"""Above every score."""


@dataclass(slots=True)
class Eviction:
    """The rows to evict or move so that slots of a kind become free."""

    leave: list[int] = field(default_factory=list)
    """Rows to evict."""
    move: dict[int, list[int]] = field(default_factory=dict)
    """By kind: rows that must move to slots of that kind elsewhere. The evicted rows have made space for them."""
    drained: list[Segment] = field(default_factory=list)
    """Segments that are empty afterwards. No new block is placed in them. If rows must be moved out of them, their
    other rows are not in ``leave``: these are evicted after the moves, see ``rest``."""

    def __bool__(self) -> bool:
        return bool(self.leave or self.move)


@dataclass(slots=True)
class _Candidate:
    """A segment of another kind, with its rows."""

    segment: Segment
    rows: Rows
    leaving: Mask
    ready: bool
    """Whether it can be emptied at all."""
    score: float = 0.0
    """The mean score of the rows that would be evicted."""

    @property
    def stay(self) -> Rows:
        return self.rows[~self.leaving]


class Evictor:
    """Finds evictable rows of one tier. All calls need the index lock."""

    def __init__(
        self,
        index: Index,
        number: int,
        tier: Slotted,
        policy: Policy,
        uses: UsageTracker,
        may_leave: Callable[[Rows], Mask] | None = None,
        may_move: Callable[[Rows], Mask] | None = None,
        takes_slots: bool = True,
    ) -> None:
        """``may_move`` returns the mask of rows that must stay in the tier but can be moved within it; without it, none
        can.

        ``takes_slots``: moved rows need slots of their kind at once, so that other rows may have to be evicted for
        them.
        """
        self._index = index
        self._number = number
        self._tier = tier
        self._policy = policy
        self._may_move = may_move
        self._takes_slots = takes_slots
        self._hopeless: dict[tuple[int, bool], tuple[int, int, int]] = {}
        """By kind: the index's change count, and how full the tier was, when no segment could be emptied."""
        self.ranked = RankingCache(index, number, policy, uses, may_leave)
        self._ages = Ages(uses.tick_clock)

    @property
    def tier(self) -> Slotted:
        return self._tier

    @property
    def policy(self) -> Policy:
        return self._policy

    def victims(self, kind: int, count: int = 1, *, in_place: bool = False) -> Eviction:
        """Choose what to evict so that slots of ``kind`` become free, at once or when a segment is split into slots
        again.

        At most ``count`` rows, or the rows of one segment, or of as many segments as a slot needs; at least one row,
        unless nothing evictable would make space. ``in_place``: empty a segment only if it can be reused without
        growing.
        """
        eviction = self._victims(kind, count, in_place)
        if eviction.leave:
            self._ages.add(self._index.used[eviction.leave])
        return eviction

    def reach(self, kind: int, most: int) -> int:
        """Number of slots of ``kind`` available now, including by eviction; at most ``most``."""
        with self._tier.book_lock:
            book = self._tier.segments
            if book.spare(kind) is not None:
                return most
            slots = book.fit(kind) + sum(len(s.free) for s in book if s.kind == kind and not s.draining)
            rows = book.owners(kind)
        rows = np.unique(rows[rows > EMPTY])
        slots += int(np.count_nonzero(self.ranked.leaving(rows)))
        if slots < most:
            chosen = self._choose(kind, float("inf"), in_place=False)
            slots += sum(max(1, c.segment.nbytes // size_of(kind)) for c in chosen)
        return min(slots, most)

    def statistics(self) -> EvictorStatistics:
        return EvictorStatistics(self._policy.in_charge, self._ages.statistics())

    def _victims(self, kind: int, count: int, in_place: bool) -> Eviction:
        rows, score = self.ranked.next(kind, count, self._rank)
        emptied = self._empty(self._choose(kind, score if rows else float("inf"), in_place))
        if emptied:
            return emptied
        if rows:
            self.ranked.take(kind, count)
        return Eviction(rows)

    def _choose(self, kind: int, than: float, in_place: bool) -> list[_Candidate]:
        """Segments of other kinds to empty, colder than ``than``, so that one slot of ``kind`` fits; or none."""
        with self._tier.book_lock:
            book = self._tier.segments
            # At least one, even if there seems to be space: the caller has found that there is none.
            lacking, others = max(1, book.lacking(kind)), book.others(kind)
        state = self._index.changes, lacking, book.used
        if not others or self._hopeless.get((kind, in_place)) == state:
            return []
        colder = self._colder(others, than)
        found: list[_Candidate] = []
        if colder is None:
            found = [c for c in map(self._candidate, others) if c is not None]
        ranked = map(self._candidate, colder) if colder is not None else sorted(found, key=lambda c: c.score)

        def enough(chosen: Sequence[_Candidate]) -> bool:
            if in_place:
                return any(book.suits(c.segment, kind) for c in chosen)
            free = sum(book.cost(c.segment) for c in chosen)
            if not self._takes_slots:  # rows that must stay are written again, and need as much space as before
                free -= sum(len(c.stay) * c.segment.size for c in chosen)
            return free >= lacking

        chosen: list[_Candidate] = []
        for candidate in ranked:
            if candidate is None or not candidate.ready:
                continue
            if candidate.score >= than or enough(chosen):
                break
            if (not in_place or book.suits(candidate.segment, kind)) and self._fits([*chosen, candidate], found):
                chosen.append(candidate)
        if not chosen or not enough(chosen):
            if than == float("inf"):
                self._hopeless[kind, in_place] = state
            return []
        for candidate in chosen[-2::-1]:
            rest = [c for c in chosen if c is not candidate]
            if enough(rest) and self._fits(rest, found):
                chosen = rest
        return chosen

    def _colder(self, others: Sequence[Segment], than: float) -> list[Segment] | None:
        """Segments that are colder than ``than``, the coldest first; None if a block in one might have to be moved.

        There may be hundreds of segments, and this runs for nearly every block written to a full tier, so all of them
        are scored by a few array operations.
        """
        owners = [s.owner for s in others]  # read once: another thread may split an empty segment again
        rows = np.concatenate(owners)
        which = np.repeat(np.arange(len(owners)), [len(owner) for owner in owners])[rows != EMPTY]
        rows = rows[rows != EMPTY]
        # Segments with slots whose owners are not known yet, or with blocks that must stay, cannot be emptied.
        leaving = rows > EMPTY
        leaving[leaving] = self.ranked.leaving(rows[leaving])
        if not leaving.all():
            stay = rows[~leaving & (rows > EMPTY)]
            if ((self._index.state[self._number][stay] == SEALED) & (self._index.holds[stay] == 0)).any():
                return None
            good = np.bincount(which[~leaving], minlength=len(owners))[which] == 0
            rows, which = rows[good], which[good]
        counts = np.bincount(which, minlength=len(owners))
        sums = np.bincount(which, self._policy.score(rows), minlength=len(owners))
        means = np.where(counts > 0, sums / np.maximum(counts, 1), np.inf)
        return [others[i] for i in np.argsort(means, kind="stable").tolist() if means[i] < than]

    def _candidate(self, segment: Segment) -> _Candidate | None:
        """The current contents of a segment; None if it has slots whose owners are not known yet."""
        owner = segment.owner  # read once: another thread may split an empty segment again
        slots = np.flatnonzero(owner != EMPTY)
        rows = owner[slots]
        if not len(rows) or (rows < 0).any():
            return None
        leaving = self.ranked.leaving(rows)
        # The slot of a dropped block that is not erased yet may have the number of a row that is elsewhere.
        ready = bool((self._index.place[self._number][rows] == (segment.number << 32) + slots).all())
        found = _Candidate(segment, rows, leaving, ready)
        if ready and not leaving.all():
            stay = found.stay
            movable = self._may_move is not None and (self._index.holds[stay] == 0).all()
            found.ready = movable and bool((self._index.state[self._number][stay] == SEALED).all())
            if found.ready and self._may_move is not None:
                found.ready = bool(self._may_move(stay).all())
        if not found.ready:
            return found
        if leaving.any():
            found.score = float(self._policy.score(rows[leaving]).mean())
        else:  # nothing would be lost, if the other segments of its kind have space for all of it
            found.score = LOWEST if self._takes_slots and self._fits([found], [found]) else _LAST
        return found

    def _fits(self, chosen: Sequence[_Candidate], found: Sequence[_Candidate]) -> bool:
        """Whether the rows that must stay in these segments fit into the other segments of their kind."""
        if not self._takes_slots:
            return True
        for kind in {c.segment.kind for c in chosen}:
            wanted = sum(len(c.stay) for c in chosen if c.segment.kind == kind)
            if wanted:
                emptied = {c.segment.number for c in chosen}
                with self._tier.book_lock:
                    slots = sum(len(s.free) for s in self._others(kind, emptied))
                slots += sum(
                    int(np.count_nonzero(c.leaving))
                    for c in found
                    if c.segment.kind == kind and c.segment.number not in emptied
                )
                if slots < wanted:
                    return False
        return True

    def _others(self, kind: int, numbers: set[int]) -> list[Segment]:
        """Segments of a kind that blocks can be moved to. Not empty ones, which may be split again at any moment."""
        book = self._tier.segments
        return [s for s in book if s.kind == kind and not s.draining and not s.empty and s.number not in numbers]

    def _empty(self, chosen: Sequence[_Candidate]) -> Eviction:
        """Stop placing blocks in segments; returns their rows. Returns nothing if one of the segments has changed
        meanwhile."""
        eviction = Eviction()
        if not chosen:
            return eviction
        with self._tier.book_lock:
            for c in chosen:
                if not np.array_equal(c.segment.owner[c.segment.owner != EMPTY], c.rows):
                    return Eviction()
            for c in chosen:
                self._tier.segments.drain(c.segment)
                eviction.drained.append(c.segment)
                eviction.leave += c.rows[c.leaving].tolist()
                if len(c.stay):
                    eviction.move.setdefault(c.segment.kind, []).extend(c.stay.tolist())
        if self._takes_slots and eviction.move:
            eviction.leave = []  # evicted only once the moves are done: a row that must stay may be requested meanwhile
            for kind, rows in eviction.move.items():
                eviction.leave += self._displaced(kind, len(rows))
        return eviction

    def rest(self, drained: Sequence[Segment]) -> list[int]:
        """The rows to evict so that drained segments are empty; none if a row in one of them must stay."""
        rows: list[int] = []
        for segment in drained:
            if not segment.empty:
                found = self._candidate(segment)
                if found is None or not found.ready or not found.leaving.all():
                    return []
                rows += found.rows.tolist()
        if rows:
            self._ages.add(self._index.used[rows])
        return rows

    def _displaced(self, kind: int, count: int) -> list[int]:
        """The coldest rows of a kind to evict so that there are ``count`` free slots of it."""
        with self._tier.book_lock:
            others = self._others(kind, set())
            count -= sum(len(s.free) for s in others)
            rows = np.concatenate([s.owner for s in others]) if others else np.zeros(0, np.int64)
        if count <= 0:
            return []
        rows = np.unique(rows[rows > EMPTY])
        rows = rows[self.ranked.leaving(rows)]
        found: list[int] = self._first(rows, count).tolist()
        return found

    def size(self, place: int) -> int:
        """Bytes of a slot in use."""
        return self._tier.segments.size(place)

    def coldest(self, count: int, kind: int | None = None) -> Rows:
        """The rows that would be evicted next, of any kind or of one, whether they are evictable already or not.

        Excludes pinned rows. Rows that are not held come first: a large match must not hide the rows that are evicted
        instead. Of the held rows, only those that could not be evicted even when released.
        """
        with self._tier.book_lock:
            owners = [s.owner for s in self._tier.segments if kind is None or s.kind == kind]
        rows: Rows = np.concatenate(owners) if owners else np.zeros(0, np.int64)
        rows = np.unique(rows[rows > EMPTY])
        state, holds = self._index.state, self._index.holds[rows]
        # A block that is being written to another tier is held only for that, and is evictable when it is written.
        written = np.zeros(len(rows), np.int32)
        for number, other in enumerate(state):
            if number != self._number:
                written += other[rows] == PENDING
        wanted = (state[self._number][rows] == SEALED) & (self._index.pins[rows] == 0)
        free = self._first(rows[wanted & (holds <= written)], count)
        if len(free) == count:
            return free
        held = rows[wanted & (holds > written)]
        return np.concatenate([free, self._first(held[~self.ranked.may_leave(held)], count - len(free))])

    def _first(self, rows: Rows, count: int) -> Rows:
        """The coldest ``count`` rows, in order."""
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
            # The excess changes with every evicted block, so this queue must be short.
            rows, count = (rows[owed], count) if owed.any() else (rows, 1 + len(rows) // 256)
        return self.ranked.queue(rows, count, owed is not None and bool(owed.any()))

    def _owed(self, rows: Rows, scores: Scores, kind: int) -> Mask | None:
        """Mask of rows in slots of ``kind`` that exceed their tenants' shares: the coldest of each such tenant.

        None if there is only one tenant.
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
