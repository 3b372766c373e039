"""When blocks must be absent here, whatever other nodes say: at once if they were dropped here, or at an expiry that
was set here. One object for all nodes that a store reads from: a block that was dropped is not fetched from any."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress

from kvtide.block import BlockKey

__all__ = ["REMEMBERED", "Endings"]

REMEMBERED = 100_000
"""The most blocks that are remembered: the last ones."""


class Endings:
    """See the module's docstring. Thread-safe."""

    def __init__(self) -> None:
        self._ends: dict[BlockKey, float] = {}

    def __repr__(self) -> str:
        return f"<Endings of {len(self._ends)} blocks>"

    def __bool__(self) -> bool:
        return bool(self._ends)

    def of(self, key: BlockKey) -> float:
        """When a block must be absent here; infinity: never."""
        return self._ends.get(key, math.inf)

    def set(self, ends: Iterable[tuple[BlockKey, float]]) -> None:
        for key, when in ends:
            self._ends.pop(key, None)  # the oldest come first
            self._ends[key] = when
        while len(self._ends) > REMEMBERED:
            with suppress(KeyError, StopIteration, RuntimeError):  # another thread does the same
                del self._ends[next(iter(self._ends))]

    def stored(self, keys: Sequence[BlockKey]) -> None:
        """See ``tiers.base.Refetching``."""
        if self._ends:
            for key in keys:
                self._ends.pop(key, None)
