"""Admission: when a block is written to a colder tier. One small class per strategy.

Each decides about rows that are complete in DRAM: whether to write them when they are stored, when they are requested
again, or when they are about to be evicted. ``WriteBudget`` may still refuse a write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtide.index.index import Index, Rows
from kvtide.plan.history import Curves

__all__ = ["Admission", "Ghost", "Never", "OnEviction", "SecondTouch", "Through", "make"]

Mask = npt.NDArray[np.bool_]

_LEAST = 0.15
"""Minimum number of expected hits per write."""


class Admission(Protocol):
    """All calls need the index lock."""

    keeps_leaving: bool
    """Whether a block that is not in the colder tier must be written before it leaves DRAM."""

    learns: bool
    """Whether it needs ``learn``, and another ``on_store`` when a whole prompt is stored and more is known of it."""

    def on_store(self, rows: Rows) -> Mask:
        """Which blocks, just completed, to write."""

    def on_touch(self, rows: Rows) -> Mask:
        """Which blocks, just requested, to write."""

    def learn(self, curves: Curves) -> None:
        """Update from the statistics of kinds of blocks."""


class _Simple:
    """An admission that does not learn."""

    learns = False

    def learn(self, curves: Curves) -> None: ...


class Through(_Simple):
    """Write a block as soon as it is stored."""

    keeps_leaving = False

    def on_store(self, rows: Rows) -> Mask:
        return np.ones(len(rows), np.bool_)

    def on_touch(self, rows: Rows) -> Mask:
        return np.zeros(len(rows), np.bool_)


class Never(_Simple):
    """Write nothing: the tier is only read from."""

    keeps_leaving = False

    def on_store(self, rows: Rows) -> Mask:
        return np.zeros(len(rows), np.bool_)

    def on_touch(self, rows: Rows) -> Mask:
        return np.zeros(len(rows), np.bool_)


class SecondTouch(_Simple):
    """Write a block when it is requested after it was stored: a block that is never used again is never written."""

    keeps_leaving = False

    def on_store(self, rows: Rows) -> Mask:
        return np.zeros(len(rows), np.bool_)

    def on_touch(self, rows: Rows) -> Mask:
        return np.ones(len(rows), np.bool_)


class OnEviction(_Simple):
    """Write a block shortly before it leaves DRAM, and when the store is closed."""

    keeps_leaving = True

    def on_store(self, rows: Rows) -> Mask:
        return np.zeros(len(rows), np.bool_)

    def on_touch(self, rows: Rows) -> Mask:
        return np.zeros(len(rows), np.bool_)


class Ghost:
    """Write a block if its kind is known to return, from the history of blocks that were present before.

    A kind is worth writing if enough of its blocks are requested again within the time that they would be worth keeping
    in a tier of that size (see ``Reuse``). Until something is known, every block is written.
    """

    keeps_leaving = False
    learns = True

    def __init__(self, index: Index, room: Callable[[], int]) -> None:
        self._index = index
        self._room = room
        self._worth: Mask | None = None
        """By kind; the last entry is for kind -1, not known yet: do not write."""

    def on_store(self, rows: Rows) -> Mask:
        kinds = self._index.kind[rows]
        worth = kinds >= 0 if self._worth is None else self._worth[kinds]
        # A block without its parents is useless: a block worth writing includes its parents.
        return np.logical_or.accumulate(worth[::-1])[::-1]

    def on_touch(self, rows: Rows) -> Mask:
        return self.on_store(rows)

    def learn(self, curves: Curves) -> None:
        if room := self._room():
            _, hits = curves.stays(room)
            self._worth = np.append(hits >= _LEAST, False)


def make(name: str, index: Index, room: Callable[[], int]) -> Admission:
    """The admission with that name in the configuration, to a tier that holds about ``room()`` blocks."""
    match name:
        case "through":
            return Through()
        case "second-touch":
            return SecondTouch()
        case "ghost":
            return Ghost(index, room)
        case _:
            return OnEviction()
