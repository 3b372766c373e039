"""Statistics of a store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtide.counts import CountKind, count_names
from kvtide.events import FeedStatistics
from kvtide.index.absence_log import AbsenceStatistics
from kvtide.index.tenant_usage import TenantUsage
from kvtide.plan.planner import PlannerStatistics
from kvtide.store.known_models import KnownModelsStatistics
from kvtide.store.recent_requests import RecentStatistics
from kvtide.store.recorder import RecorderStatistics
from kvtide.tiers.base import TierStatistics
from kvtide.tiers.shared.credits import BudgetStatistics
from kvtide.transfer.lane import LaneStatistics
from kvtide.transfer.node_search import ClusterStatistics
from kvtide.transfer.pipeline import PipelineStatistics

__all__ = ["ScratchStatistics", "Statistics", "TenantStatistics"]


@dataclass(frozen=True, slots=True)
class TenantStatistics:
    """A tenant's usage of each tier, and what it was refused."""

    blocks: dict[str, int]
    bytes_used: dict[str, int]
    limits: dict[str, int]
    """The most bytes that it may use."""
    refused: dict[str, int]
    """Blocks, by reason."""
    recorded_as: str = ""
    """Its name in the recording, if requests are recorded; the default tenant has none there."""

    @classmethod
    def limited(cls, number: int, accounts: Mapping[str, TenantUsage]) -> TenantStatistics:
        """For a tenant with quotas, by its number. Call with the index lock held."""
        mine = {name: account for name, account in accounts.items() if number in account.quotas}
        return cls(
            {name: account.blocks[number] for name, account in mine.items()},
            {name: account.nbytes[number] for name, account in mine.items()},
            {name: account.quotas[number] for name, account in mine.items()},
            {why: count for account in mine.values() for why, count in account.refused[number].items()},
        )

    @classmethod
    def reserved(cls, share: Statistics) -> TenantStatistics:
        """For a tenant with a reserved share."""
        tiers, dropped = share.tiers.items(), count_names(share.tiers, CountKind.DROP)
        return cls(
            {name: tier.blocks for name, tier in tiers},
            {name: tier.bytes_used for name, tier in tiers},
            {name: tier.budget for name, tier in tiers},
            {why: count for why, count in share.counts.items() if why in dropped},
        )


@dataclass(frozen=True, slots=True)
class ScratchStatistics:
    """Memory, apart from that of blocks, in which I/O threads compress, encrypt and decrypt them. Bytes."""

    taken: int = 0
    most: int = 0
    """Maximum since the store was opened, summed over the tiers."""
    limit: int = 0
    """Summed over all tiers. A single block that needs more gets it when its tier works on no other."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """What the store contains, and what it has done since it was opened."""

    blocks: int
    """Blocks in any tier."""
    held: int
    """Blocks that a match, a reservation or a move protects from eviction."""
    pinned: int
    tiers: dict[str, TierStatistics]
    lanes: dict[str, LaneStatistics]
    counts: dict[str, int]
    """Event counts by name."""
    pipeline: PipelineStatistics = field(default_factory=PipelineStatistics)
    planner: PlannerStatistics = field(default_factory=PlannerStatistics)
    feed: FeedStatistics = field(default_factory=FeedStatistics)
    sessions: int = 0
    """Open sessions of this process."""
    tenants: dict[str, TenantStatistics] = field(default_factory=dict)
    """By tag, for tenants with quotas, or with reserved shares, which are counted nowhere else. For administrators."""
    budgets: dict[str, BudgetStatistics] = field(default_factory=dict)
    """By name of the shared storage, for those with a budget."""
    scratch: ScratchStatistics = field(default_factory=ScratchStatistics)
    """Without that of reserved shares."""
    recorder: RecorderStatistics | None = None
    """None if requests are not recorded."""
    absences: AbsenceStatistics = field(default_factory=AbsenceStatistics)
    """Records of why blocks are absent, for ``explain``. Without those of reserved shares."""
    recent: RecentStatistics = field(default_factory=RecentStatistics)
    """Recent requests, and why their blocks were missing."""
    known_models: KnownModelsStatistics = field(default_factory=KnownModelsStatistics)
    """Descriptions of the models that sessions were opened for."""
    cluster: ClusterStatistics | None = None
    """The other nodes that a directory lists; None if there is no directory."""
