"""What a store says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtide.events import FeedStatistics
from kvtide.index.tenant_usage import TenantUsage
from kvtide.plan.planner import PlannerStatistics
from kvtide.store.recorder import RecorderStatistics
from kvtide.tiers.base import TierStatistics
from kvtide.tiers.shared.credits import BudgetStatistics
from kvtide.transfer.lane import LaneStatistics
from kvtide.transfer.pipeline import PipelineStatistics

__all__ = ["ScratchStatistics", "Statistics", "TenantStatistics"]


@dataclass(frozen=True, slots=True)
class TenantStatistics:
    """What a tenant has in each tier, and what it was refused."""

    blocks: dict[str, int]
    bytes_used: dict[str, int]
    limits: dict[str, int]
    """The bytes that it may have."""
    refused: dict[str, int]
    """Blocks, by reason."""

    @classmethod
    def limited(cls, number: int, accounts: Mapping[str, TenantUsage]) -> TenantStatistics:
        """Of whoever has quotas, by the tenant's number. Under the index's lock."""
        mine = {name: account for name, account in accounts.items() if number in account.quotas}
        return cls(
            {name: account.blocks[number] for name, account in mine.items()},
            {name: account.nbytes[number] for name, account in mine.items()},
            {name: account.quotas[number] for name, account in mine.items()},
            {why: count for account in mine.values() for why, count in account.refused[number].items()},
        )

    @classmethod
    def reserved(cls, share: Statistics) -> TenantStatistics:
        """Of whoever lives in a share of its own."""
        tiers = share.tiers.items()
        return cls(
            {name: tier.blocks for name, tier in tiers},
            {name: tier.bytes_used for name, tier in tiers},
            {name: tier.budget for name, tier in tiers},
            {why: count for why, count in share.counts.items() if " dropped: " in why},
        )


@dataclass(frozen=True, slots=True)
class ScratchStatistics:
    """Memory beside that of blocks, in which I/O threads compress, seal and open them. Bytes."""

    taken: int = 0
    most: int = 0
    """Since the store was opened; of each tier, added up."""
    limit: int = 0
    """Of all tiers. If a single block needs more, it gets that, when its tier works on no other."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """What the store holds and has done since it was opened."""

    blocks: int
    """Known, in whatever tier."""
    held: int
    """Blocks that a match, a reservation or a move keeps from eviction."""
    pinned: int
    tiers: dict[str, TierStatistics]
    lanes: dict[str, LaneStatistics]
    counts: dict[str, int]
    """What happened to blocks, by name."""
    pipeline: PipelineStatistics = field(default_factory=PipelineStatistics)
    planner: PlannerStatistics = field(default_factory=PlannerStatistics)
    feed: FeedStatistics = field(default_factory=FeedStatistics)
    sessions: int = 0
    """Of this process."""
    tenants: dict[str, TenantStatistics] = field(default_factory=dict)
    """By tag, of those with quotas, or with reserved shares, which are counted nowhere else. For administrators."""
    budgets: dict[str, BudgetStatistics] = field(default_factory=dict)
    """Of shared storage that has one."""
    scratch: ScratchStatistics = field(default_factory=ScratchStatistics)
    """But for that of reserved shares."""
    recorder: RecorderStatistics | None = None
    """Where requests are recorded."""
