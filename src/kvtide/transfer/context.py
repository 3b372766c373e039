"""The objects that all parts of a pipeline use (promotion, demotion, eviction, persisting)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtide.events import Feed
from kvtide.index.index import Index
from kvtide.tiers.dram.tier import Dram
from kvtide.transfer.cold_tier import ColdTier
from kvtide.transfer.eraser import Eraser
from kvtide.transfer.residents import Residents

__all__ = ["TransferContext"]


@dataclass(frozen=True, slots=True)
class TransferContext:
    """The index and the tiers whose blocks a pipeline moves, and where it reports that."""

    index: Index
    dram: Dram
    colds: Sequence[ColdTier]
    """The tiers below DRAM."""
    residents: Residents
    eraser: Eraser
    feed: Feed
    counts: Counter[str]
    """Event counts by name; see ``docs/glossary.md``."""
    interrupted: Callable[[], None]
    """Called, with the index lock held, when a change was left half done: see ``Pipeline.repair``."""
