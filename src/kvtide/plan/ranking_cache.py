"""Caches the ranking of a tier's coldest rows.

Ranking scans every row; taking one must not. So the coldest part of a ranking is kept as a queue for each selection of
rows: those of a slot kind, or those of a tenant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvtide.index.index import Index, Mask, Rows
from kvtide.plan.policy import Policy, Scores
from kvtide.plan.usage_tracker import UsageTracker

__all__ = ["LOWEST", "Queue", "RankingCache"]

LOWEST = -(1 << 60)
"""Below every score."""


@dataclass(slots=True)
class Queue:
    """Rows, coldest first, and their scores; those before ``at`` are used up."""

    rows: Rows
    scores: Scores
    owed: bool
    """Whether they belong to tenants beyond their share."""
    used: Rows
    """When each row was last used at ranking time. A row used since then may have a colder child."""
    version: int
    """The version of the policy that ranked them."""
    since: int
    """When they were ranked."""
    at: int = 0


class RankingCache:
    """For one tier. All calls need the index lock."""

    def __init__(
        self,
        index: Index,
        number: int,
        policy: Policy,
        uses: UsageTracker,
        may_leave: Callable[[Rows], Mask] | None = None,
    ) -> None:
        self._index = index
        self._number = number
        self._policy = policy
        self._uses = uses
        self._may_leave = may_leave
        self._queues: dict[int, Queue] = {}
        """By selection: the coldest part of the last ranking."""
        self._barren: dict[int, int] = {}
        """By selection: the index's change count when no row was found."""

    def leaving(self, rows: Rows) -> Mask:
        """Mask of rows that may be evicted now."""
        good = self._index.evictable(rows, self._number)
        if self._may_leave is not None:
            good &= self._may_leave(rows)
        return good

    def may_leave(self, rows: Rows) -> Mask:
        """Mask of rows that may be evicted once they are neither held nor pinned."""
        return np.ones(len(rows), np.bool_) if self._may_leave is None else self._may_leave(rows)

    def next(self, selection: int, count: int, rank: Callable[[int], Queue]) -> tuple[list[int], int]:
        """The next rows of a selection, coldest first, and the first one's score; they stay in the queue.

        ``rank`` makes a new queue for the selection.
        """
        while True:
            queue = self._queues.get(selection)
            while queue is not None and queue.at < len(queue.rows):
                rows, scores = queue.rows[queue.at : queue.at + count], queue.scores[queue.at : queue.at + count]
                # Still present, evictable, and as cold as when they were ranked?
                good = self.leaving(rows) & (self._policy.score(rows) == scores)
                good &= self._index.used[rows] == queue.used[queue.at : queue.at + count]
                if queue.version != self._policy.version or self._uses.overtaken(queue.since, int(scores[-1])):
                    break
                if good.any():
                    return rows[good].tolist(), LOWEST if queue.owed else int(scores[good][0])
                queue.at += count
            if self._barren.get(selection) == self._index.changes:
                return [], 0
            self._queues[selection] = queue = rank(selection)
            if not len(queue.rows):
                self._barren[selection] = self._index.changes
                return [], 0

    def take(self, selection: int, count: int) -> None:
        """Remove the rows that ``next`` returned from the queue, because they are evicted."""
        self._queues[selection].at += count

    def forget(self, selection: int) -> None:
        """Discard the queue, because rows that ``next`` returned stay after all."""
        self._queues.pop(selection, None)

    def queue(self, rows: Rows, count: int, owed: bool = False) -> Queue:
        """A queue of the coldest ``count`` rows."""
        version = self._policy.version  # before the scores: these may change meanwhile
        if len(rows) > count:
            rows = rows[np.argpartition(self._policy.score(rows), count)[:count]]
        rows = np.unique(rows)
        scores = self._policy.score(rows)
        order = np.argsort(scores)
        rows = rows[order]
        return Queue(rows, scores[order], owed, self._index.used[rows], version, self._uses.now())
