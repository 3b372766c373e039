"""How often each row is held: a column of counts that is written when somebody looks.

An engine asks at every step for prompts that wait, and lets go of them at the next: most holds end before anybody wants
to know of them. So a hold is first only noted, with its array of rows, and when it ends with the same array it is as if
it had never been. Whoever looks (an eviction, a drop, statistics) sees all of them counted.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["Holds", "Rows"]

Rows = npt.NDArray[np.int64]


class Holds:
    """Under the index's lock."""

    def __init__(self, size: int) -> None:
        self._counts = np.zeros(size, np.int32)
        self._noted: dict[int, list[Rows]] = {}
        """Not counted yet, by the identity of the array."""

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        self.write_down()
        return self._counts

    @counts.setter
    def counts(self, longer: npt.NDArray[np.int32]) -> None:
        self._counts = longer

    def write_down(self) -> None:
        """Count what is noted."""
        while self._noted:
            for rows in self._noted.popitem()[1]:
                self._counts[rows] += 1

    def note(self, rows: Rows) -> None:
        """Distinct rows are held."""
        if len(rows):
            self._noted.setdefault(id(rows), []).append(rows)

    def strike(self, rows: Rows) -> bool:
        """No longer. False if nothing of it is noted any more: then take it from the counts."""
        noted = self._noted.get(id(rows))
        if noted is None:
            return False
        noted.pop()
        if not noted:
            del self._noted[id(rows)]
        return True
