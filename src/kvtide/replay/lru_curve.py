"""The hit rates of a leaf-first LRU cache of every size, from one pass over a trace.

LRU is a stack algorithm: a block is found in a cache of n blocks if fewer than n other blocks were used since it was
last used. A request uses its blocks from the last to the first, so a block is always newer than its descendants, and
what is found is a prefix. One number for each block asked for therefore has the hits of all sizes; no size is replayed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvtide.replay.trace import Trace

__all__ = ["LruCurve", "lru_curve"]


class LruCurve:
    """How many of the counted blocks are found, by the size of the cache."""

    def __init__(self, distances: npt.NDArray[np.int64]) -> None:
        """``distances``: for each block that a large enough cache finds, the blocks used since its last use."""
        self._sorted = np.sort(distances)

    def hits(self, blocks: int) -> int:
        """Blocks found by a cache of that many blocks."""
        return int(np.searchsorted(self._sorted, blocks))

    @property
    def most(self) -> int:
        """Blocks found by a cache that evicts nothing."""
        return len(self._sorted)

    def size(self, hits: int) -> int:
        """The smallest cache that finds so many blocks, or as many as any."""
        return int(self._sorted[min(hits, self.most) - 1]) + 1 if hits > 0 and self.most else 0

    def bend(self, blocks: int, share: float) -> int:
        """The smallest cache that finds ``share`` of what a cache of ``blocks`` blocks misses and a larger one can
        find."""
        have = self.hits(blocks)
        return max(blocks, self.size(have + int(np.ceil(share * (self.most - have)))))


def lru_curve(trace: Trace, start: int = 0, progress: Callable[[int], None] = lambda _: None) -> LruCurve:
    """The curve over the requests from number ``start`` on; those before it fill the cache."""
    uses = sum(map(len, trace.blocks))
    tree = np.zeros(uses + 1, np.int64)
    """A Fenwick tree over all uses in order: 1 for the last use of each block."""
    last = np.zeros(trace.numbers, np.int64)
    """Each block's last use, from 1 on; 0: none."""
    found: list[npt.NDArray[np.int64]] = []
    done = present = 0
    for number, blocks in enumerate(trace.blocks):
        before = last[blocks]
        known = before[before > 0]
        if number >= start and len(known):
            found.append(present - _sums(tree, known))
        now = np.arange(done + len(blocks), done, -1)
        _add(tree, known, -1)
        _add(tree, now, 1)
        last[blocks] = now
        done += len(blocks)
        present += len(blocks) - len(known)
        progress(number)
    return LruCurve(np.concatenate(found) if found else np.zeros(0, np.int64))


def _sums(tree: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """For each place the sum of all up to it."""
    total, at = np.zeros(len(places), np.int64), places.copy()
    while at.any():
        total += tree[at]
        at &= at - 1
    return total


def _add(tree: npt.NDArray[np.int64], places: npt.NDArray[np.int64], step: int) -> None:
    at = places[places > 0].copy()
    while len(at):
        np.add.at(tree, at, step)
        at += at & -at
        at = at[at < len(tree)]
