"""Limits the bytes of one tier that a tenant may use.

A block beyond the quota makes space among its tenant's own blocks, the coldest first; if that is impossible, it is not
stored. So the quota is never exceeded, and what one tenant stores costs the others nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtide.counts import TierCount
from kvtide.index.index import Index, Rows
from kvtide.index.tenant_usage import TenantUsage
from kvtide.plan.ranking_cache import Queue, RankingCache

__all__ = ["Quota", "TenantQuotas"]


@dataclass(frozen=True, slots=True)
class TenantQuotas:
    """The tenants with quotas, and the quotas of all tiers."""

    tenants: Mapping[bytes, int] = field(default_factory=dict)
    """The tenants' numbers, from 1 on, by tag."""
    limits: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """Bytes, by tier and tenant number."""

    def of(self, tier: str) -> Mapping[int, int]:
        """The quotas of one tier, by tenant number."""
        return self.limits.get(tier, {})


class Quota:
    """The quotas of one tier, for all tenants with a quota there. All calls need the index lock."""

    def __init__(self, index: Index, number: int, name: str, account: TenantUsage, coldest: RankingCache) -> None:
        self._index = index
        self._number = number
        self._name = name
        self.account = account
        self._coldest = coldest
        index.accounts[number] = account

    def allow(self, tenant: int, count: int, size: int) -> tuple[int, list[int]]:
        """Number of ``count`` blocks of ``size`` bytes that the tenant may store, and which of its own rows must be
        evicted for them.

        No row is evicted unless that makes space for one of the blocks.
        """
        account, holds = self.account, self._index.holds
        left = account.left(tenant)
        wanted = min(count, account.quotas[tenant] // size) * size
        if wanted <= left:
            return wanted // size, []
        chosen: list[int] = []
        while left < wanted and (rows := self._some(tenant, wanted - left)):
            # A chosen row must not be chosen again before it is evicted. So it is held, only for this moment.
            holds[rows] += 1
            chosen += rows
            left += sum(map(account.charged, rows))
        holds[chosen] -= 1
        allowed = max(0, min(wanted, left)) // size
        spared = len(chosen)
        while chosen and left - account.charged(chosen[-1]) >= allowed * size:
            left -= account.charged(chosen.pop())
        if len(chosen) < spared:
            self._coldest.forget(-tenant)
        return allowed, chosen

    def victims(self, tenant: int, nbytes: int) -> list[int]:
        """Some of the tenant's rows to evict so that it may use ``nbytes`` more; call again afterwards.

        Empty if it may already, or if none of its rows may be evicted.
        """
        over = nbytes - self.account.left(tenant)
        return self._some(tenant, over) if over > 0 else []

    def _some(self, tenant: int, over: int) -> list[int]:
        account = self.account
        if not account.blocks[tenant]:
            return []
        count = max(1, over * account.blocks[tenant] // account.nbytes[tenant])
        rows, _ = self._coldest.next(-tenant, count, self._rank)
        if rows:
            self._coldest.take(-tenant, count)
        return rows

    def own(self, tenant: int) -> Rows:
        """Rows that a tenant is charged for and that may leave the tier, or could if they were written to a colder
        one."""
        rows = self.account.rows(tenant)
        return rows[self._index.evictable(rows, self._number)]

    def _rank(self, selection: int) -> Queue:
        rows = self.own(-selection)
        rows = rows[self._coldest.leaving(rows)]
        return self._coldest.queue(rows, max(64, len(rows) // 64))

    def refuse(self, tenant: int, blocks: int, everybody: Counter[str], *, load: bool = False) -> None:
        """Count blocks of a tenant that were not stored, or not loaded: for the tenant, and in the totals
        ``everybody``."""
        name = (TierCount.LOAD_QUOTA if load else TierCount.STORE_QUOTA).of(self._name)
        everybody[name] += blocks
        self.account.refused[tenant][name] += blocks
