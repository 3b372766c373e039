"""Uses of blocks, recorded while callers wait and processed later, many at a time.

A use concerns one prompt, often of few blocks: an array operation for each prompt costs more for its call than for its
blocks. So the uses of many prompts are joined. What processes them gives the same result as for one after the other,
except for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Counts", "Kinds", "Marks", "Mask", "Numbers", "Use", "Uses", "falling"]

Marks = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
Kinds = npt.NDArray[np.int16]
Counts = npt.NDArray[np.int16]
Numbers = npt.NDArray[np.int64]

_APART = 1 << 48
"""More than any time: keeps the maxima of one chain apart from those of the next. Enough for 32,767 chains."""


def falling(until: Numbers, steps: Numbers) -> Numbers:
    """The least values that fall strictly from a chain's first block to its last and, ``steps`` added, are not below
    ``until``, the times until which these blocks should stay."""
    raised: Numbers = np.maximum.accumulate(until[::-1])[::-1] - steps
    return raised


class Use(NamedTuple):
    """The use of a chain of at least one block, first block first."""

    marks: Marks
    """The first bytes of the blocks' keys."""
    kinds: Kinds
    """What is known of each block now: see ``UsageTracker``."""
    returns: Counts
    """How often each block has returned."""
    ended: Mask
    """The blocks whose previous kind ends here. The others were recorded just before, and only get a more precise kind
    now."""
    counted: Mask
    """The blocks that were requested, or are new in a store: each counts once for a request."""
    noted: Mask
    """The blocks from which ``History`` learns."""
    now: int
    """The time of the use, in blocks used since the beginning."""


class Uses:
    """Uses, joined in the order in which they happened: at least one. One entry for each block, except ``starts``."""

    __slots__ = ("_chains", "counted", "ended", "kinds", "marks", "noted", "returns", "starts", "steps", "times")

    def __init__(self, uses: Sequence[Use]) -> None:
        lengths = np.array([len(use.marks) for use in uses], np.int64)
        self.marks: Marks = np.concatenate([use.marks for use in uses])
        self.kinds: Kinds = np.concatenate([use.kinds for use in uses])
        self.returns: Counts = np.concatenate([use.returns for use in uses])
        self.ended: Mask = np.concatenate([use.ended for use in uses])
        self.counted: Mask = np.concatenate([use.counted for use in uses])
        self.noted: Mask = np.concatenate([use.noted for use in uses])
        self.times: Numbers = np.repeat(np.array([use.now for use in uses], np.int64), lengths)
        self._chains: Numbers = np.repeat(np.arange(len(uses)), lengths)
        """The number of each block's chain."""
        self.starts: Numbers = np.cumsum(lengths) - lengths
        """The position of each chain's first block."""
        self.steps: Numbers = np.arange(len(self.marks)) - np.repeat(self.starts, lengths)
        """How deep in its chain each block lies."""

    def falling(self, until: Numbers) -> Numbers:
        """The function ``falling``, for each chain by itself."""
        apart = (len(self.starts) - self._chains) * _APART
        return falling(until + apart, self.steps) - apart

    def before(self, places: Marks, chosen: Mask) -> tuple[Numbers, Mask]:
        """For each chosen block, the position of the last chosen block of an earlier chain with the same place (its
        entry in a table); and for which blocks there is one. The other positions mean nothing."""
        if len(self.starts) == 1:
            return np.zeros(len(places), np.int64), np.zeros(len(places), np.bool_)
        mine = np.flatnonzero(chosen)
        order = mine[np.argsort(places[mine], kind="stable")]
        same = places[order[1:]] == places[order[:-1]]
        first = np.ones(len(order), np.bool_)
        first[1:] = ~same | (self._chains[order[1:]] != self._chains[order[:-1]])
        previous = np.maximum.accumulate(np.where(first, np.arange(len(order)), 0)) - 1
        found, known = np.zeros(len(places), np.int64), np.zeros(len(places), np.bool_)
        found[order] = order[previous]
        known[order] = (previous >= 0) & (places[order[previous]] == places[order])
        return found, known

    def once_in_each(self, kinds: Kinds, chosen: Mask) -> Kinds:
        """The kinds of the chosen blocks, each once for each chain in which it occurs."""
        both = np.unique(self._chains[chosen] << 16 | kinds[chosen])
        found: Kinds = (both & 0xFFFF).astype(np.int16)
        return found
