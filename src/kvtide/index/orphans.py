"""Finds orphans: blocks whose ancestor has expired, which cannot be reached any more and therefore expire too.

A store sets the minimum lifetime of all blocks of its prompt, so a block usually outlives its descendants. It may not
if ``Session.expire`` shortened a beginning that other prompts share, or if a block was restored with the expiry of an
older record. Then its descendants are removed soon after it, unless it was stored again in the meantime.

The index knows a block's parent but not its children, so all rows are scanned, by depth, each after its parent: in
parts, off the callers' path, and not all the time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from kvtide.block import DIGEST, BlockKey
from kvtide.index.index import Index, Rows

__all__ = ["Orphans"]

_LOOKED = 4096
"""Rows examined in one hold of the lock: less than a millisecond."""
_PAUSE = 1.0
"""Minimum seconds between two searches."""
_SHARE = 20
"""The pause after a search is at least this many times as long as the search took."""
_NONE: Rows = np.empty(0, np.int64)


class Orphans:
    """Finds orphans for the housekeeping thread."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._gone: set[bytes] = set()
        """Expired blocks whose children the current search looks for: their keys and digests."""
        self._next: list[BlockKey] = []
        """Blocks that have expired since the search began."""
        self._order: Rows = _NONE
        """Rows that the search has yet to examine, by depth."""
        self._began = self._earliest = 0.0

    def note(self, keys: Iterable[BlockKey]) -> None:
        """Record that these blocks have expired. Call with the index lock held."""
        self._next += keys

    def due(self) -> float:
        """Seconds until ``find`` should be called; infinity if there is nothing to search for."""
        if len(self._order):
            return 0.0
        return max(0.0, self._earliest - time.monotonic()) if self._next else np.inf

    def by_depth(self) -> Rows:
        """The rows for ``find`` to examine. Call without the lock: rows that are added meanwhile need not be
        examined."""
        if len(self._order):
            return self._order
        self._began = time.monotonic()
        with self._index.lock:
            keys, self._next = self._next, []
        # There may be many: the set is built, and the last one freed, without the lock.
        self._gone = {*keys, *[key[:DIGEST] for key in keys]}
        depths = self._index.depth[: self._index.size]
        deep = np.flatnonzero(depths > 0)
        order: Rows = deep[np.argsort(depths[deep], kind="stable")]
        return order

    def find(self, order: Rows, most: int) -> Rows:
        """Some rows that have lost an ancestor, ``most`` at most. Call with the index lock held.

        ``order`` comes from ``by_depth``.
        """
        index, gone = self._index, self._gone
        found: list[int] = []
        leaving: set[int] = set()
        passed = 0
        for row in order[:_LOOKED].tolist():
            if len(found) == most:
                break
            passed += 1
            above = index.parents[row]
            if above is None or above not in gone:
                continue
            key = index.key(row)
            head = BlockKey(above[:DIGEST] + key[DIGEST:])
            if index.row(key) == row and head in gone and (not (up := index.row(head)) or up in leaving):
                found.append(row)
                leaving.add(row)
                gone.update((key, key[:DIGEST]))
        self._order = order[passed:]
        if not len(self._order):
            now = time.monotonic()
            self._earliest = now + max(_PAUSE, _SHARE * (now - self._began))
        return np.array(found, np.int64)

    def let_go(self) -> None:
        """Free the memory of a finished search. Call without the lock."""
        if self._gone and not len(self._order):
            self._gone = set()
