"""What leaves when a tier is full.

A *policy* only ranks: lower score, sooner out. It sees rows in batches and keeps its facts in the index's columns, so a
prompt of 512 blocks is touched by one array write. The ``Evictor`` does the rest: it ranks the rows of one slot size,
keeps the coldest part as a queue, and takes from it until it is used up or no longer true.

Leaf first: a chain must lose its deepest block first, because a block without its parents is of no use. For an LRU
that follows from the order of touching alone: a prompt's blocks are touched together, and the head gets the newest
tick, so no block is ever older than its descendants.

Sizes: a slot can only be reused for its own size. If the coldest segment of another size is colder, on average, than
the coldest block of this size, or this size has nothing to give, that whole segment is emptied instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtide.index.index import SEALED, Index, Rows
from kvtide.tiers.segments import EMPTY, Segment, Segments

__all__ = ["Evictor", "Lru", "Policy", "Slotted"]

Scores = npt.NDArray[np.int64]

_PRIORITY = 48
"""A priority counts for this many bits of ticks."""


class Policy(Protocol):
    """Ranks rows. Called under the index's lock; must not block."""

    def touch(self, rows: Rows) -> None:
        """These blocks of one chain, head first, were stored or asked for."""

    def score(self, rows: Rows) -> Scores:
        """How much each is worth keeping; the lowest leaves first."""

    def now(self) -> int:
        """A mark in time, for ``overtaken``."""

    def overtaken(self, since: int, score: int) -> bool:
        """Whether a block that was touched after ``since`` may have a lower score."""


class Lru:
    """Least recently used, leaf first; a block of higher priority outlasts all of lower."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._tick = 0
        self._latest: dict[int, int] = {}
        """By priority: the last tick at which it was the lowest that was touched."""

    def touch(self, rows: Rows) -> None:
        if len(rows):
            self._tick += len(rows)
            self._index.used[rows] = self._tick - np.arange(len(rows))
            self._latest[int(self._index.priority[rows].min())] = self._tick

    def score(self, rows: Rows) -> Scores:
        return (self._index.priority[rows].astype(np.int64) << _PRIORITY) + self._index.used[rows]

    def now(self) -> int:
        return self._tick

    def overtaken(self, since: int, score: int) -> bool:
        # Ticks only grow, so a newer block has a lower score only by a lower priority.
        return any(tick > since and priority < score >> _PRIORITY for priority, tick in self._latest.items())

    def restore(self, rows: Rows, parents: Rows, sequences: Rows) -> None:
        """After a restart: rank by order of writing, no block older or of lower priority than its descendants.

        ``parents`` holds, for each row, the position of its parent in ``rows``, or -1.
        """
        used = np.argsort(np.argsort(sequences)).astype(np.int64)
        depth, priority = self._index.depth[rows], self._index.priority[rows]
        order = np.argsort(depth)[::-1]
        borders = np.flatnonzero(np.diff(depth[order])) + 1
        for level in np.split(order, borders):
            child = level[parents[level] >= 0]
            np.maximum.at(used, parents[child], used[child])
            np.maximum.at(priority, parents[child], priority[child])
        # Equal ticks, then: the deeper one first.
        ranked = np.lexsort((-depth.astype(np.int64), used))
        ticks = np.empty(len(rows), np.int64)
        ticks[ranked] = np.arange(1, len(rows) + 1)
        self._index.used[rows] = self._tick + ticks
        self._index.priority[rows] = priority
        self._tick += len(rows)


class Slotted(Protocol):
    """A tier whose room is kept in a book of segments."""

    @property
    def segments(self) -> Segments: ...

    @property
    def book_lock(self) -> threading.Lock: ...


@dataclass(slots=True)
class _Queue:
    """Rows, coldest first, and their scores; those before ``at`` are used up."""

    rows: Rows
    scores: Scores
    since: int
    """When they were ranked."""
    at: int = 0


class Evictor:
    """Finds what may leave one tier. All calls under the index's lock."""

    def __init__(
        self,
        index: Index,
        number: int,
        tier: Slotted,
        policy: Policy,
        may_leave: Callable[[Rows], npt.NDArray[np.bool_]] | None = None,
    ) -> None:
        self._index = index
        self._number = number
        self._tier = tier
        self._policy = policy
        self._may_leave = may_leave
        self._queues: dict[int, _Queue] = {}
        """By slot size: the coldest part, as it was ranked last."""
        self._barren: dict[int, int] = {}
        """By slot size: the index's count of changes when nothing could be found."""

    def victims(self, size: int, count: int = 1) -> list[int]:
        """Rows to evict so that slots of ``size`` come free, at once or when a segment is cut anew.

        At most ``count`` rows, or all of one segment; at least one, unless nothing may leave.
        """
        rows, score = self._coldest(size, count)
        segment = self._colder_segment(size, score if rows else None)
        if segment is not None and (emptied := self._empty(segment)):
            return emptied
        if rows:
            self._queues[size].at += count
        return rows

    def _empty(self, segment: Segment) -> list[int]:
        """Let nothing new into a segment; answers what is in it. None, if it has something by now that must stay."""
        with self._tier.book_lock:
            slots = np.flatnonzero(segment.owner != EMPTY)
            rows = segment.owner[slots]
            # A slot whose block was dropped, but is not erased yet, may have the number of a row that lies elsewhere.
            here = self._index.place[self._number][rows] == (segment.number << 32) + slots
            if not (self._leaving(rows) & here).all():
                return []
            self._tier.segments.drain(segment)
        owners: list[int] = rows.tolist()
        return owners

    def coldest(self, count: int) -> Rows:
        """The rows that would leave next, of any size, whether they may already or not."""
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

    def _leaving(self, rows: Rows) -> npt.NDArray[np.bool_]:
        good = self._index.evictable(rows, self._number)
        if self._may_leave is not None:
            good &= self._may_leave(rows)
        return good

    def _coldest(self, size: int, count: int) -> tuple[list[int], int]:
        """The next rows of that size, coldest first, and the first one's score; they stay in the queue."""
        while True:
            queue = self._queues.get(size)
            while queue is not None and queue.at < len(queue.rows):
                rows, scores = queue.rows[queue.at : queue.at + count], queue.scores[queue.at : queue.at + count]
                # Still here, free to go, and as cold as when they were ranked?
                good = self._leaving(rows) & (self._policy.score(rows) == scores)
                if self._policy.overtaken(queue.since, int(scores[-1])):
                    break
                if good.any():
                    return rows[good].tolist(), int(scores[good][0])
                queue.at += count
            if self._barren.get(size) == self._index.changes:
                return [], 0
            self._queues[size] = queue = self._rank(size)
            if not len(queue.rows):
                self._barren[size] = self._index.changes
                return [], 0

    def _rank(self, size: int) -> _Queue:
        with self._tier.book_lock:
            rows = self._tier.segments.owners(size)
        rows = rows[rows > EMPTY]
        rows = rows[self._leaving(rows)]
        scores = self._policy.score(rows)
        count = max(64, len(rows) // 64)
        if len(rows) > count:
            rows = rows[np.argpartition(scores, count)[:count]]
        rows = np.unique(rows)
        scores = self._policy.score(rows)
        order = np.argsort(scores)
        return _Queue(rows[order], scores[order], self._policy.now())

    def _colder_segment(self, size: int, than: int | None) -> Segment | None:
        """The coldest segment of another size whose blocks may all leave, if it is colder than ``than``."""
        best, best_score = None, float("inf") if than is None else float(than)
        with self._tier.book_lock:
            others = self._tier.segments.others(size)
        for segment in others:
            owner = segment.owner  # once: another thread may cut an empty segment anew
            rows = owner[owner != EMPTY]
            if not len(rows) or (rows < 0).any():
                continue
            score = float(self._policy.score(rows).mean())
            if score < best_score and self._leaving(rows).all():
                best, best_score = segment, score
        return best
