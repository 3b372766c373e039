"""When a block is written to a colder tier: small classes, one per moment.

Each answers three questions about rows that are whole in DRAM: write them now that they were stored, now that they were
asked for again, or now that they are about to leave?
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtide.index.index import Rows

__all__ = ["Admission", "OnEviction", "SecondTouch", "Through", "make"]

Mask = npt.NDArray[np.bool_]


class Admission(Protocol):
    """Called under the index's lock."""

    keeps_leaving: bool
    """Whether a block that is not in the colder tier must be written before it leaves DRAM."""

    def on_store(self, rows: Rows) -> Mask: ...

    def on_touch(self, rows: Rows) -> Mask: ...


class Through:
    """As soon as it is stored."""

    keeps_leaving = False

    def on_store(self, rows: Rows) -> Mask:
        return np.ones(len(rows), np.bool_)

    def on_touch(self, rows: Rows) -> Mask:
        return np.zeros(len(rows), np.bool_)


class SecondTouch:
    """When it is asked for after it was stored: what is never used again is never written."""

    keeps_leaving = False

    def on_store(self, rows: Rows) -> Mask:
        return np.zeros(len(rows), np.bool_)

    def on_touch(self, rows: Rows) -> Mask:
        return np.ones(len(rows), np.bool_)


class OnEviction:
    """Shortly before it leaves DRAM, and when the store is closed."""

    keeps_leaving = True

    def on_store(self, rows: Rows) -> Mask:
        return np.zeros(len(rows), np.bool_)

    def on_touch(self, rows: Rows) -> Mask:
        return np.zeros(len(rows), np.bool_)


def make(name: str) -> Admission:
    """The admission of that name in the configuration."""
    match name:
        case "through":
            return Through()
        case "second-touch":
            return SecondTouch()
        case _:
            return OnEviction()
