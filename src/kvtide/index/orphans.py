"""Blocks whose head has expired: nobody can reach them any more, so they expire with it.

A store says how long all of its prompt lives at least, so a block usually outlives those that follow it. It need not,
where ``Session.expire`` shortened a beginning that other prompts share, or where a block came back with the expiry of
an older record. Then what follows is removed soon after it, unless its head was stored again in the meantime.

The index knows a block's parent but not its children, so all rows are looked at, by depth, each after its parent: in
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
"""Rows that are looked at in one hold of the lock: less than a millisecond."""
_PAUSE = 1.0
"""Seconds between two searches at least,"""
_SHARE = 20
"""and so many times as long as the last one took."""
_NONE: Rows = np.empty(0, np.int64)


class Orphans:
    """Finds them, for the housekeeping thread."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._gone: set[bytes] = set()
        """Blocks that have expired, whose children the search under way looks for: their keys and digests."""
        self._next: list[BlockKey] = []
        """Blocks that have expired since it began."""
        self._order: Rows = _NONE
        """Rows that it has yet to look at, by depth."""
        self._began = self._earliest = 0.0

    def note(self, keys: Iterable[BlockKey]) -> None:
        """These blocks have expired. Under the index's lock."""
        self._next += keys

    def due(self) -> float:
        """In how many seconds ``find`` is to be called; infinity if there is nothing to look for."""
        if len(self._order):
            return 0.0
        return max(0.0, self._earliest - time.monotonic()) if self._next else np.inf

    def by_depth(self) -> Rows:
        """What ``find`` is to look at. Hold no lock: rows that come meanwhile need not be looked at."""
        if len(self._order):
            return self._order
        self._began = time.monotonic()
        with self._index.lock:
            keys, self._next = self._next, []
        # There may be many: a set of them is made, and the last one given up, while nobody waits.
        self._gone = {*keys, *[key[:DIGEST] for key in keys]}
        depths = self._index.depth[: self._index.size]
        deep = np.flatnonzero(depths > 0)
        order: Rows = deep[np.argsort(depths[deep], kind="stable")]
        return order

    def find(self, order: Rows, most: int) -> Rows:
        """Some rows that have lost their head, ``most`` at most. Under the index's lock.

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
        """Give the memory of a search back that has ended. Hold no lock."""
        if self._gone and not len(self._order):
            self._gone = set()
