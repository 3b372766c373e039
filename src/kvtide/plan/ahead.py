"""Blocks that rank as if they were used at a time still to come, because their caller expects them back then.

A column of ranks (ticks of the last use, or the end of a term) is raised for a whole chain, head first, and only ever
raised, so a block stays above its descendants. When the time has come and nobody has used them, they age like others.

It is a hint, and must not let one caller push the others out. So nobody is kept longer than a tier takes to turn over
twice: what comes back later than that is cheaper to bring back. And at most a quarter of a tier's blocks are kept in
this way at a time, further ones rank as before.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from kvtide.index.index import Rows

__all__ = ["LONGEST", "Ahead"]

LONGEST = 2
"""What is expected after so many times a tier's room of further uses, or later, is not kept for that."""
_PART = 4
"""One in so many of a tier's blocks may be kept."""


class Ahead:
    """Of one column. All calls under the index's lock."""

    def __init__(self) -> None:
        self._until: dict[int, int] = {}
        """By row: until when it is kept. One that was used meanwhile, or left, is counted until then."""
        self._ends: list[tuple[int, list[int]]] = []
        """A heap: when some may end, and their rows."""
        self.latest = 0
        """No block ranks later than this because of a hint."""

    def keep(self, column: npt.NDArray[np.int64], rows: Rows, now: int, until: int, room: int) -> Rows:
        """Rank blocks of one chain, head first, as if they were used at ``until``, in a tier of ``room`` blocks: as
        many of them as may be kept, which are the answer."""
        while self._ends and self._ends[0][0] <= now:
            end, over = heapq.heappop(self._ends)
            for row in over:
                if self._until.get(row) == end:  # else it was expected again, later
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
