"""When a block is written to a colder tier: small classes, one per moment.

Each answers three questions about rows that are whole in DRAM: write them now that they were stored, now that they were
asked for again, or now that they are about to leave? ``WriteBudget`` may refuse what they want.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtide.index.index import Index, Rows
from kvtide.plan.history import Curves

__all__ = ["Admission", "Ghost", "OnEviction", "SecondTouch", "Through", "make"]

Mask = npt.NDArray[np.bool_]

_LEAST = 0.15
"""A write should be followed by so many hits."""


class Admission(Protocol):
    """Called under the index's lock."""

    keeps_leaving: bool
    """Whether a block that is not in the colder tier must be written before it leaves DRAM."""

    learns: bool
    """Whether it wants ``learn``, and ``on_store`` again when a whole prompt is stored and more is known of it."""

    def on_store(self, rows: Rows) -> Mask:
        """Of blocks that are whole now."""

    def on_touch(self, rows: Rows) -> Mask:
        """Of blocks that were asked for."""

    def learn(self, curves: Curves) -> None:
        """What is known by now of kinds of blocks."""


class _Simple:
    """Needs to know nothing."""

    learns = False

    def learn(self, curves: Curves) -> None: ...


class Through(_Simple):
    """As soon as it is stored."""

    keeps_leaving = False

    def on_store(self, rows: Rows) -> Mask:
        return np.ones(len(rows), np.bool_)

    def on_touch(self, rows: Rows) -> Mask:
        return np.zeros(len(rows), np.bool_)


class SecondTouch(_Simple):
    """When it is asked for after it was stored: what is never used again is never written."""

    keeps_leaving = False

    def on_store(self, rows: Rows) -> Mask:
        return np.zeros(len(rows), np.bool_)

    def on_touch(self, rows: Rows) -> Mask:
        return np.ones(len(rows), np.bool_)


class OnEviction(_Simple):
    """Shortly before it leaves DRAM, and when the store is closed."""

    keeps_leaving = True

    def on_store(self, rows: Rows) -> Mask:
        return np.zeros(len(rows), np.bool_)

    def on_touch(self, rows: Rows) -> Mask:
        return np.zeros(len(rows), np.bool_)


class Ghost:
    """When it is of a kind that is known to come back: known from the list of what was here before.

    A kind is worth writing if enough of its blocks are asked for again in the time that they would be worth room in a
    tier of that size (see ``Reuse``). Until something is known, everything is.
    """

    keeps_leaving = False
    learns = True

    def __init__(self, index: Index, room: Callable[[], int]) -> None:
        self._index = index
        self._room = room
        self._worth: Mask | None = None
        """By kind; kind -1, not known yet, is the last: no."""

    def on_store(self, rows: Rows) -> Mask:
        kinds = self._index.kind[rows]
        worth = kinds >= 0 if self._worth is None else self._worth[kinds]
        # A block without its parents is of no use: what is worth it takes them along.
        return np.logical_or.accumulate(worth[::-1])[::-1]

    def on_touch(self, rows: Rows) -> Mask:
        return self.on_store(rows)

    def learn(self, curves: Curves) -> None:
        if room := self._room():
            _, hits = curves.stays(room)
            self._worth = np.append(hits >= _LEAST, False)


def make(name: str, index: Index, room: Callable[[], int]) -> Admission:
    """The admission of that name in the configuration, to a tier that holds about ``room()`` blocks."""
    match name:
        case "through":
            return Through()
        case "second-touch":
            return SecondTouch()
        case "ghost":
            return Ghost(index, room)
        case _:
            return OnEviction()
