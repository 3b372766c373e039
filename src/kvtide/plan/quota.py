"""What a tenant may have of one tier at most.

A block that would be too much makes room among its tenant's own, the coldest first; what finds none is not stored. So
the quota holds at every moment, and what one tenant stores costs the others nothing.
"""

from __future__ import annotations

from collections import Counter

from kvtide.index.index import Index, Rows
from kvtide.index.tenant_usage import TenantUsage
from kvtide.plan.coldest import Coldest, Queue

__all__ = ["Quota"]


class Quota:
    """Of one tier, for all tenants that have one. All calls under the index's lock."""

    def __init__(self, index: Index, number: int, name: str, account: TenantUsage, coldest: Coldest) -> None:
        self._index = index
        self._number = number
        self._name = name
        self.account = account
        self._coldest = coldest
        index.accounts[number] = account

    def allow(self, tenant: int, count: int, size: int) -> tuple[int, list[int]]:
        """How many of ``count`` blocks of ``size`` bytes the tenant may have, and which of its own must leave for them.

        Nothing leaves that would not make room for one of them.
        """
        account, holds = self.account, self._index.holds
        left = account.left(tenant)
        wanted = min(count, account.quotas[tenant] // size) * size
        if wanted <= left:
            return wanted // size, []
        chosen: list[int] = []
        while left < wanted and (rows := self._some(tenant, wanted - left)):
            # What is chosen must not be chosen again before it leaves. So it is held, but for this moment only.
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
        """Some rows of the tenant's own to evict, so that it may have ``nbytes`` more: then ask again.

        None if it may already, or if nothing of its own may leave.
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
        """What a tenant is charged for and may leave the tier, or could if it were nowhere else."""
        rows = self.account.rows(tenant)
        return rows[self._index.evictable(rows, self._number)]

    def _rank(self, selection: int) -> Queue:
        rows = self.own(-selection)
        rows = rows[self._coldest.leaving(rows)]
        return self._coldest.queue(rows, max(64, len(rows) // 64))

    def refuse(self, tenant: int, what: str, blocks: int, everybody: Counter[str]) -> None:
        """So many blocks of a tenant are not stored, or not loaded: counted for it, and for ``everybody``."""
        for counts in (everybody, self.account.refused[tenant]):
            if what == "load":
                counts["loads dropped: a tenant's quota of dram is used up"] += blocks
            else:
                counts[f"stores dropped: a tenant's quota of {self._name} is used up"] += blocks
