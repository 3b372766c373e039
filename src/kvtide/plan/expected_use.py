"""Ranks blocks as if they were used at a future time, because their caller expects them back then.

A column of ranks (ticks of the last use, or the end of a term) is raised for a whole chain, first block first, and only
ever raised, so that a block stays above its descendants. If they are not used at the expected time, they age like
others.

This is a hint, and must not let one caller displace the others. So no block is kept longer than a tier takes to turn
over twice: a block that returns later is cheaper to load again. And at most a quarter of a tier's blocks are kept in
this way at a time; further ones rank as before.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from kvtide.index.index import Rows

__all__ = ["LONGEST", "ExpectedUse"]

LONGEST = 2
"""Blocks expected after more uses than this many times the tier's capacity are not kept."""
_PART = 4
"""At most 1/``_PART`` of a tier's blocks may be kept."""


class ExpectedUse:
    """For one column. All calls need the index lock."""

    def __init__(self) -> None:
        self._until: dict[int, int] = {}
        """By row: the time until which it is kept. A row that was used meanwhile, or evicted, is counted until then."""
        self._ends: list[tuple[int, list[int]]] = []
        """A heap of end times with their rows."""
        self.latest = 0
        """No block ranks later than this because of a hint."""

    def keep(self, column: npt.NDArray[np.int64], rows: Rows, now: int, until: int, room: int) -> Rows:
        """Rank blocks of one chain, first block first, as if they were used at ``until``, in a tier of ``room`` blocks.
        Returns those that are kept."""
        while self._ends and self._ends[0][0] <= now:
            end, over = heapq.heappop(self._ends)
            for row in over:
                if self._until.get(row) == end:  # otherwise it was expected again, later
                    del self._until[row]
        kept, left = list[int](), room // _PART - len(self._until)
        for row in rows.tolist():
            left -= row not in self._until
            if left < 0:
                break
            kept.append(row)
        rows = rows[: len(kept)]
        wanted = until - np.arange(len(rows))
        if not np.count_nonzero(wanted > column[rows]):
            return rows[:0]
        column[rows] = np.maximum(column[rows], wanted)
        later = [row for row in kept if self._until.get(row, now) < until]
        self._until.update(dict.fromkeys(later, until))
        heapq.heappush(self._ends, (until, later))
        self.latest = max(self.latest, until)
        return rows
