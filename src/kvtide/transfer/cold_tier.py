"""A tier below DRAM, with its lane, admission, evictor and limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvtide.block import BlockKey
from kvtide.plan.admit import Admission
from kvtide.plan.evict import Evictor
from kvtide.plan.quota import Quota
from kvtide.plan.write_budget import WriteBudget
from kvtide.tiers.base import DropDone, Sync, Tier
from kvtide.transfer.lane import Lane

__all__ = ["ColdTier", "nearest"]


_PROBE = 1 << 20
"""Bytes by which nodes with nothing queued are compared."""


@dataclass(frozen=True, slots=True)
class ColdTier:
    """A tier below DRAM, with its lane, admission, evictor and limits."""

    number: int
    name: str
    tier: Tier
    lane: Lane
    admission: Admission
    evictor: Evictor | None
    """None for a tier that evicts by itself."""
    keep_tokens: bool = False
    budget: WriteBudget | None = None
    quota: Quota | None = None
    """None if no tenant has a quota there."""
    shared: bool = False
    """Whether others use its storage too."""
    read_only: bool = False
    """Whether blocks are never written to it. Then a block that it has is not saved: its owner may lose it any time."""
    patience: float | None = None
    """Seconds that closing the store waits for it; None: until it is done."""
    sync: Sync | None = None
    """Makes blocks durable; None for a tier that does not survive a restart or a power loss."""
    withdraw: Callable[[Sequence[tuple[BlockKey, int]], DropDone, Mapping[bytes, int] | None], None] | None = None
    """Drops blocks at a caller's request, so that other users of the storage do not write them again; None if there are
    no other users, and ``tier.drop`` does it. The last argument is the identity that must own them: see
    ``Shared.withdraw``."""
    heard: Callable[[], int] = lambda: 0
    """Returns the value of ``Write.since`` for blocks that are submitted now."""


def nearest(colds: Sequence[ColdTier]) -> Sequence[ColdTier]:
    """The tiers in the order in which a block that several of them have is read: as given, but other nodes by the
    seconds that they would take, with what is queued there."""
    nodes = [cold for cold in colds if cold.read_only]
    if len(nodes) < 2:
        return colds
    nodes.sort(key=lambda cold: cold.lane.read_speed.seconds(cold.lane.read_bytes + _PROBE))
    left = iter(nodes)
    return [next(left) if cold.read_only else cold for cold in colds]
