"""What leaves when a tier is full.

A ``Policy`` ranks, lower score sooner out, and leaf first; ``Coldest`` keeps what it ranked. The ``Evictor`` decides
what is ranked: the rows of one slot kind.

Shares: tenants that use a tier have equal shares of it. When it is full, one that has more than its share loses blocks
first, its coldest, until it has no more than that; what nobody else wants it keeps.

Sizes: a slot can only be reused for its own kind. If the coldest segment of another kind is colder, on average, than
the coldest block of this kind, or this kind has nothing to give, that whole segment is emptied instead; several, if a
slot is larger than one of them. Blocks in it that must not leave (pinned, or not yet written down) are moved to slots
of their own kind in other segments: free ones, or those of the coldest blocks there, which leave in their place. A
segment with a block that somebody holds cannot be emptied.

Nothing is chosen unless it leads to a slot: if all that may leave were not enough, nothing leaves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvtide.histogram import HistogramStatistics
from kvtide.index.index import PENDING, SEALED, Index, Mask, Rows
from kvtide.plan.ages import Ages
from kvtide.plan.coldest import LOWEST, Coldest, Queue
from kvtide.plan.policy import Policy, Scores
from kvtide.plan.usage import UsageTracker
from kvtide.tiers.segments import EMPTY, Segment, Segments, size_of

__all__ = ["Eviction", "Evictor", "EvictorStatistics", "Slotted", "room"]


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


_LAST = 1 << 60
"""Above every score."""


@dataclass(slots=True)
class Eviction:
    """What makes slots of a kind come free."""

    leave: list[int] = field(default_factory=list)
    """Rows to evict."""
    move: dict[int, list[int]] = field(default_factory=dict)
    """By kind: rows that must come to slots of that kind elsewhere. What leaves has made room for them."""
    drained: list[Segment] = field(default_factory=list)
    """Segments that are empty then. Nothing new goes into them. Where rows must come out of them to slots elsewhere,
    what else is in them is not in ``leave``: it leaves when these have come out, see ``rest``."""

    def __bool__(self) -> bool:
        return bool(self.leave or self.move)


@dataclass(slots=True)
class _Candidate:
    """A segment of another kind, with what is in it."""

    segment: Segment
    rows: Rows
    leaving: Mask
    ready: bool
    """Whether it can be emptied at all."""
    score: float = 0.0
    """The mean of what would leave."""

    @property
    def stay(self) -> Rows:
        return self.rows[~self.leaving]


class Evictor:
    """Finds what may leave one tier. All calls under the index's lock."""

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
        """``may_move`` says which rows that must not leave the tier can be moved within it; without it, none.

        ``takes_slots``: those need slots of their kind at once, so that others may have to leave for them.
        """
        self._index = index
        self._number = number
        self._tier = tier
        self._policy = policy
        self._may_move = may_move
        self._takes_slots = takes_slots
        self._hopeless: dict[tuple[int, bool], tuple[int, int, int]] = {}
        """By kind: the index's count of changes, and how full the tier was, when no segment could be emptied."""
        self.ranked = Coldest(index, number, policy, uses, may_leave)
        self._ages = Ages(uses.clockwork)

    @property
    def tier(self) -> Slotted:
        return self._tier

    def victims(self, kind: int, count: int = 1, *, in_place: bool = False) -> Eviction:
        """What is to leave so that slots of ``kind`` come free, at once or when a segment is cut anew.

        At most ``count`` rows, or what is in one segment, or in as many as a slot needs; at least one, unless nothing
        that may leave would make room. ``in_place``: segments are only worth emptying if they need not grow.
        """
        eviction = self._victims(kind, count, in_place)
        if eviction.leave:
            self._ages.add(self._index.used[eviction.leave])
        return eviction

    def reach(self, kind: int, most: int) -> int:
        """How many slots of ``kind`` could be had by now, by evicting too; at most ``most``."""
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
        """Segments of other kinds to be emptied, colder than ``than``, so that one slot of ``kind`` fits; or none."""
        with self._tier.book_lock:
            book = self._tier.segments
            # At least one, even if there seems to be room: whoever asks has found that there is none.
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
            if not self._takes_slots:  # what must stay is written again, and needs as much room as before
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
        """Segments that are colder than ``than``, the coldest first; None if something in one might have to be moved.

        There may be hundreds, and this is done for nearly every block that is written to a full tier: all of them are
        judged by a few array operations.
        """
        owners = [s.owner for s in others]  # once: another thread may cut an empty segment anew
        rows = np.concatenate(owners)
        which = np.repeat(np.arange(len(owners)), [len(owner) for owner in owners])[rows != EMPTY]
        rows = rows[rows != EMPTY]
        # Slots whose owners are not known yet, and blocks that stay: segments that have some cannot be emptied.
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
        """A segment as it is now; None where it has slots whose owners are not known yet."""
        owner = segment.owner  # once: another thread may cut an empty segment anew
        slots = np.flatnonzero(owner != EMPTY)
        rows = owner[slots]
        if not len(rows) or (rows < 0).any():
            return None
        leaving = self.ranked.leaving(rows)
        # A slot whose block was dropped, but is not erased yet, may have the number of a row that lies elsewhere.
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
        else:  # nothing would be lost, if the others of its kind have room for all of it
            found.score = LOWEST if self._takes_slots and self._fits([found], [found]) else _LAST
        return found

    def _fits(self, chosen: Sequence[_Candidate], found: Sequence[_Candidate]) -> bool:
        """Whether what must stay in these segments finds slots in the others of its kind."""
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
        """Segments of a kind that blocks can be moved to. One that is all empty may be cut anew at any moment."""
        book = self._tier.segments
        return [s for s in book if s.kind == kind and not s.draining and not s.empty and s.number not in numbers]

    def _empty(self, chosen: Sequence[_Candidate]) -> Eviction:
        """Let nothing new into segments; answers what is in them. Nothing, if one of them has changed meanwhile."""
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
            eviction.leave = []  # not before it is certain that what must stay comes out: it may be asked for meanwhile
            for kind, rows in eviction.move.items():
                eviction.leave += self._displaced(kind, len(rows))
        return eviction

    def rest(self, drained: Sequence[Segment]) -> list[int]:
        """What is to leave so that drained segments are empty; nothing, if something in one of them has to stay."""
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
        """The coldest rows of a kind to leave, so that there are ``count`` free slots of it."""
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
        """The bytes of a slot in use."""
        return self._tier.segments.size(place)

    def coldest(self, count: int, kind: int | None = None) -> Rows:
        """The rows that would leave next, of any kind or of one, whether they may already or not.

        Without pinned ones, and first those that nobody holds: a large match must not hide what leaves instead. Of what
        is held, those that could not even leave when it is let go.
        """
        with self._tier.book_lock:
            owners = [s.owner for s in self._tier.segments if kind is None or s.kind == kind]
        rows: Rows = np.concatenate(owners) if owners else np.zeros(0, np.int64)
        rows = np.unique(rows[rows > EMPTY])
        state, holds = self._index.state, self._index.holds[rows]
        # A block that is being written to another tier is held for that alone, and leaves when it is there.
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
        """The coldest rows, in order."""
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
