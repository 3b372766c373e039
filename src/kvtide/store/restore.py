"""Restores the blocks on a disk: enters them into the index, and charges them to tenants with quotas."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kvtide.config import Security
from kvtide.index.index import SEALED, Index
from kvtide.index.tenant_usage import TenantUsage
from kvtide.plan.usage_tracker import UsageTracker
from kvtide.security.key_file import KeyFile
from kvtide.tiers.nvme.tier import Nvme

__all__ = ["adopt", "charge"]


def adopt(tier: Nvme, number: int, index: Index, uses: UsageTracker) -> None:
    """Enter the blocks of a tier into the index."""
    for held in tier.scan():
        rows, parents = index.add_many(held.keys, held.parents, held.depths)
        index.state[number][rows] = SEALED
        index.place[number][rows] = held.places
        index.expire_at(rows, held.expiries)
        index.priority[rows] = held.priorities
        index.identity[rows] = held.identities
        first = int(rows[0]) if len(rows) else 0
        uses.restore(rows, np.where(parents > 0, parents - first, -1), held.sequences)
        tier.own(held.places, rows)


def charge(tier: Nvme, index: Index, account: TenantUsage, tenants: Mapping[bytes, int], security: Security) -> None:
    """Charge the blocks of tenants with quotas. The journal does not name tenants, so a page of every record is
    read."""
    marks = dict(tenants)
    if security.key_file:
        keys = KeyFile(Path(security.key_file).expanduser()).read().keys
        marks |= {bytes.fromhex(key.id): tenants.get(bytes.fromhex(key.tenant), 0) for key in keys}
    for place, mark in tier.marks():
        if number := marks.get(mark):
            row = np.array([tier.segments.owner(place)])
            index.tenant[row] = number
            account.enter(row, tier.segments.size(place))
