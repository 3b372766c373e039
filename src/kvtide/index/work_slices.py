"""Splits work on many blocks into slices, so that no thread waits for the index lock longer than one slice takes.

The bound is a number of blocks, not of seconds, so that it can be proved: see ``SLICE``. Background work (expiry, a
drop, a forget) takes the lock once for each slice and checks again what it found before, because anything may have
happened in between.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["SLICE", "parts", "rest", "slices"]

SLICE = 256
"""Blocks removed in one hold of the index lock; that takes about a millisecond."""
_REST = 0.0002
"""Seconds between two slices. Without this pause, the thread that releases the lock would take it again before any
waiting thread wakes up."""

T = TypeVar("T", Sequence[Any], npt.NDArray[np.int64])


def rest() -> None:
    """Let waiting threads take the lock."""
    time.sleep(_REST)


def parts(items: T) -> Iterator[T]:
    """Parts of ``items`` of at most ``SLICE``. Hold no lock from one to the next."""
    size = SLICE
    for start in range(0, len(items), size):
        yield items[start : start + size]


def slices(items: T) -> Iterator[T]:
    """``parts``, with a pause between them: not for a thread that others wait for."""
    for i, part in enumerate(parts(items)):
        if i:
            rest()
        yield part
