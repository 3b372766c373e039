"""Ways to search for blocks that others have written: in all of some tiers at once, or where a directory says."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvtide.block import BlockKey
from kvtide.tiers.base import FoundBlock, Identity, Searched, Wish
from kvtide.transfer.cold_tier import ColdTier

__all__ = ["BlockSearch", "EveryTier", "FoundIn"]

FoundIn = Callable[[ColdTier, Mapping[Wish, FoundBlock]], None]


class BlockSearch(Protocol):
    """Looks for blocks in one or more tiers. Thread-safe; never blocks."""

    def find(self, wanted: Sequence[Wish], found: FoundIn, ended: Callable[[], None]) -> None:
        """Look for blocks: ``found`` is called, with those of one tier, any number of times, and then ``ended`` once.
        Both are called on any thread, perhaps before the call returns."""

    def absent(self, key: BlockKey, who: Identity) -> bool:
        """Whether it would not find that block. See ``tiers.base.Searched``."""


class EveryTier:
    """Looks in all of these tiers, in parallel."""

    def __init__(self, colds: Sequence[ColdTier]) -> None:
        self._tiers = [(cold, cold.tier) for cold in colds if isinstance(cold.tier, Searched)]

    def find(self, wanted: Sequence[Wish], found: FoundIn, ended: Callable[[], None]) -> None:
        """See ``BlockSearch``."""
        lock, unanswered = threading.Lock(), len(self._tiers)

        def answered(cold: ColdTier, entries: Sequence[FoundBlock | None]) -> None:
            nonlocal unanswered
            here = {w: e for w, e in zip(wanted, entries, strict=True) if e is not None}
            if here:
                found(cold, here)
            with lock:
                unanswered -= 1
                if unanswered:
                    return
            ended()

        if not self._tiers:
            ended()
        for cold, tier in self._tiers:
            tier.find(wanted, functools.partial(answered, cold))

    def absent(self, key: BlockKey, who: Identity) -> bool:
        """See ``BlockSearch``."""
        return all(tier.absent(key, who) for _, tier in self._tiers)
