"""What the tiers of other nodes have in common: they are only read from.

Nothing is written to another node or removed from it. A drop, or an earlier expiry, is remembered here, so that the
block is not fetched again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvtide.block import BlockKey
from kvtide.tiers.base import NOWHERE, DropDone, Held, Renewal, Write, WriteDone
from kvtide.tiers.peers.endings import Endings

__all__ = ["ReadOnlyTier"]


class ReadOnlyTier:
    """The part of a tier's contract that does not read. See the module's docstring."""

    endings: Endings
    """Set by whoever derives from it."""

    def write(self, batch: Sequence[Write], done: WriteDone) -> None:
        """Nothing is ever written."""
        done([NOWHERE] * len(batch))

    def drop(self, items: Sequence[tuple[BlockKey, int]], done: DropDone) -> None:
        """Do not fetch these blocks again. Other nodes keep them."""
        self.endings.set((key, -math.inf) for key, _ in items)
        done([True] * len(items))

    def renew(self, items: Sequence[Renewal], done: DropDone) -> None:
        """Do not fetch these blocks later than their new expiry. Other nodes keep their own."""
        self.endings.set((key, when) for key, _, when in items)
        done([True] * len(items))

    def note(self, held: Held) -> None:
        """Does nothing: the expiry of blocks is the other node's."""

    def stored(self, keys: Sequence[BlockKey]) -> None:
        """See ``tiers.base.Refetching``."""
        self.endings.stored(keys)

    def evict(self, key: BlockKey, place: int) -> None:
        """Does nothing: the place is the other node's."""

    def scan(self) -> Iterator[Held]:
        """Nothing: blocks are found by looking them up."""
        return iter(())

    def own(self, places: npt.NDArray[np.int64], owners: npt.NDArray[np.int64]) -> None:
        """Does nothing: the other node's blocks have no owner here."""
