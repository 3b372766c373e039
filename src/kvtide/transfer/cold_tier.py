"""A tier below DRAM, with what belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvtide.block import BlockKey
from kvtide.plan.admit import Admission
from kvtide.plan.budget import WriteBudget
from kvtide.plan.evict import Evictor
from kvtide.plan.quota import Quota
from kvtide.tiers.base import DropDone, Sync, Tier
from kvtide.transfer.lane import Lane

__all__ = ["ColdTier"]


@dataclass(frozen=True, slots=True)
class ColdTier:
    """A tier below DRAM, with what belongs to it."""

    number: int
    name: str
    tier: Tier
    lane: Lane
    admission: Admission
    evictor: Evictor | None
    """None for a tier that makes its own room."""
    keep_tokens: bool = False
    budget: WriteBudget | None = None
    quota: Quota | None = None
    """None where no tenant has one."""
    shared: bool = False
    """Whether others use its storage too."""
    patience: float | None = None
    """Seconds that the end of the store waits for it; None: until it is done."""
    sync: Sync | None = None
    """Makes blocks durable; None for a tier that does not survive a restart or a power loss."""
    withdraw: Callable[[Sequence[tuple[BlockKey, int]], DropDone, Mapping[bytes, int] | None], None] | None = None
    """Drops blocks that somebody wants dropped, so that others who use the storage do not write them again; None where
    there are no others, and ``tier.drop`` does it. Last, whose they must be: see ``Shared.withdraw``."""
    heard: Callable[[], int] = lambda: 0
    """What ``Write.since`` is for blocks that are submitted now."""
