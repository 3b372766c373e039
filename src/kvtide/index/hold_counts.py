"""Counts how often each row is held, in a column that is updated lazily.

An engine's scheduler matches waiting prompts at every step and releases them at the next: most leases end before their
counts are read. So a lease is first only recorded, under its number; if it ends before it was counted, the column is
never touched. Every reader (an eviction, a drop, statistics) sees all leases counted.

Each open lease is recorded (in ``_noted`` or ``_counted``), and begins and ends by one dictionary operation. So the
counts can be recomputed when a thread was interrupted while changing them: see ``Pipeline.repair``. Moves of rows
between tiers are counted at once; they can be recomputed from the states of the rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["HoldCounts", "Rows"]

Rows = npt.NDArray[np.int64]


class HoldCounts:
    """Requires the index lock."""

    def __init__(self, size: int) -> None:
        self._counts = np.zeros(size, np.int32)
        self._noted: dict[int, Rows] = {}
        """Leases that are not counted yet, by number."""
        self._counted: dict[int, Rows] = {}
        """Leases that are counted, by number."""

    def __len__(self) -> int:
        """Number of open leases."""
        return len(self._noted) + len(self._counted)

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        self.write_down()
        return self._counts

    @counts.setter
    def counts(self, longer: npt.NDArray[np.int32]) -> None:
        self._counts = longer

    def write_down(self) -> None:
        """Count the recorded leases."""
        while self._noted:
            number, rows = self._noted.popitem()
            self._counted[number] = rows
            self._counts[rows] += 1

    def move(self, rows: Rows) -> None:
        """Hold distinct rows that begin to move between tiers."""
        self._counts[rows] += 1

    def note(self, number: int, rows: Rows) -> None:
        """Record a lease of distinct rows under a new number."""
        if len(rows):
            self._noted[number] = rows

    def rows(self, number: int) -> Rows | None:
        """The rows leased under a number; None when the lease has ended."""
        found = self._noted.get(number)
        return self._counted.get(number) if found is None else found

    def strike(self, number: int) -> bool:
        """End an open lease. Returns False if it was counted: then its rows may have left their tiers since."""
        if self._noted.pop(number, None) is not None:
            return True
        rows = self._counted.pop(number)
        self._counts[rows] -= 1
        return False

    def recount(self, moving: npt.NDArray[np.int32]) -> None:
        """Recount all leases; ``moving`` has the number of moves of each row."""
        self._noted.update(self._counted)
        self._counted.clear()
        self._counts[:] = 0
        self._counts[: len(moving)] = moving
