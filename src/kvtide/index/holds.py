"""How often each row is held: a column of counts that is written when somebody looks.

An engine asks at every step for prompts that wait, and releases them at the next: most leases end before anybody wants
to know of them. So a lease is first only noted, under its number, and when it ends before it was counted it is as if it
had never been. Whoever looks (an eviction, a drop, statistics) sees all of them counted.

Leases in force are known one by one (``_noted`` and ``_counted``), and each begins and ends by one step on a
dictionary. So the counts can be made anew when a thread was interrupted in the middle of changing them: see
``Pipeline.repair``. Moves of rows between tiers are counted at once; they are known by the states of the rows.
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
        self._noted: dict[int, Rows] = {}
        """Leases that are not counted yet, by number."""
        self._counted: dict[int, Rows] = {}
        """Leases that are."""

    def __len__(self) -> int:
        """Leases in force."""
        return len(self._noted) + len(self._counted)

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
            number, rows = self._noted.popitem()
            self._counted[number] = rows
            self._counts[rows] += 1

    def move(self, rows: Rows) -> None:
        """Distinct rows begin to move: hold them."""
        self._counts[rows] += 1

    def note(self, number: int, rows: Rows) -> None:
        """Distinct rows are leased under a number that was never used before."""
        if len(rows):
            self._noted[number] = rows

    def rows(self, number: int) -> Rows | None:
        """What is leased under a number; None when that has ended."""
        found = self._noted.get(number)
        return self._counted.get(number) if found is None else found

    def strike(self, number: int) -> bool:
        """A lease in force ends. False if it was counted: then its rows may have left their tiers since."""
        if self._noted.pop(number, None) is not None:
            return True
        rows = self._counted.pop(number)
        self._counts[rows] -= 1
        return False

    def recount(self, moving: npt.NDArray[np.int32]) -> None:
        """Count all leases anew, and the moves that each row is in."""
        self._noted.update(self._counted)
        self._counted.clear()
        self._counts[:] = 0
        self._counts[: len(moving)] = moving
