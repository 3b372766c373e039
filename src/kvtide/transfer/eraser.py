"""Erases blocks from colder tiers, and tracks when they are erased.

A drop completes when no tier can return the block any more. A copy that is being written cannot be erased yet; it is
*dying*: it is erased as soon as it is written, and every drop of its key waits for that too.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtide.block import BlockKey
from kvtide.index.index import Index
from kvtide.transfer.cold_tier import ColdTier

__all__ = ["DropBarrier", "Eraser"]


class DropBarrier:
    """Counts the parts of a drop; the last to end calls ``done``, without a lock, with the number of failures."""

    __slots__ = ("_done", "_failed", "_left", "_lock")

    def __init__(self, parts: int, done: Callable[[int], None]) -> None:
        self._left = parts
        self._failed = 0
        self._done = done
        self._lock = threading.Lock()

    def more(self) -> None:
        """Add a part. Another part must still be open."""
        with self._lock:
            self._left += 1

    def end(self, results: Sequence[bool]) -> None:
        with self._lock:
            self._left -= 1
            self._failed += len(results) - sum(results)
            if self._left:
                return
        self._done(self._failed)


@dataclass(slots=True)
class _Dying:
    """A key's copies in one tier that will be erased without a further request."""

    copies: int = 0
    erased: bool = True
    waiting: list[DropBarrier] = field(default_factory=list)


class Eraser:
    """Thread-safe; methods that say so need the index lock."""

    def __init__(self, index: Index, colds: Sequence[ColdTier]) -> None:
        self._index = index
        self._colds = colds
        self._dying: dict[tuple[int, BlockKey], _Dying] = {}

    def dies(self, cold: ColdTier, key: BlockKey) -> None:
        """Record that a copy of ``key`` will be passed to ``erase``. Call with the lock held."""
        self._dying.setdefault((cold.number, key), _Dying()).copies += 1

    def await_dying(self, keys: Sequence[BlockKey], barrier: DropBarrier) -> None:
        """Let ``barrier`` end only when the dying copies of these keys have been erased. Call with the lock held."""
        if not self._dying:
            return
        for cold in self._colds:
            for key in keys:
                if (dying := self._dying.get((cold.number, key))) is not None:
                    barrier.more()
                    dying.waiting.append(barrier)

    def erase(self, cold: ColdTier, items: list[tuple[BlockKey, int]]) -> None:
        """Erase copies that were passed to ``dies``."""
        cold.tier.drop(items, functools.partial(self._erased, cold, items))

    def _erased(self, cold: ColdTier, items: list[tuple[BlockKey, int]], results: Sequence[bool]) -> None:
        ended: list[_Dying] = []
        with self._index.lock:
            for (key, _), erased in zip(items, results, strict=True):
                dying = self._dying.get((cold.number, key))
                if dying is None:
                    continue  # the drop was interrupted before it called ``dies``
                dying.copies -= 1
                dying.erased &= erased
                if not dying.copies:
                    ended.append(self._dying.pop((cold.number, key)))
        for dying in ended:
            for barrier in dying.waiting:
                barrier.end((dying.erased,))
