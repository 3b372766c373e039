"""The usage of one tier by tenants with a quota, in bytes.

A row is charged when it gets its place, or is on its way there. The index itself refunds it when it leaves, so that
code that removes a row cannot forget to. Rows of tenants without a quota cost a dictionary lookup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtide.block import ALIGN
from kvtide.index.hold_counts import Rows

__all__ = ["TenantUsage"]


class Columns(Protocol):
    """What is needed of the index: columns with an entry for each row."""

    tenant: npt.NDArray[np.uint16]
    """The tenant of each row."""
    state: list[np.ndarray[tuple[int], np.dtype[np.uint8]]]
    """By tier, the state of each row; 0: absent."""

    @property
    def size(self) -> int:
        """Number of rows in use."""


class TenantUsage:
    """For one tier. All calls need the index lock."""

    def __init__(self, index: Columns, quotas: Mapping[int, int]) -> None:
        """``quotas`` has bytes by tenant number, as in ``Index.tenant``."""
        self._index = index
        self.quotas = quotas
        self.nbytes: Counter[int] = Counter()
        self.blocks: Counter[int] = Counter()
        self.refused: dict[int, Counter[str]] = {tenant: Counter() for tenant in quotas}
        """Blocks, by tenant and reason."""
        self._pages = np.zeros(0, np.uint32)
        """The charge of each row, in pages of 4 KiB."""
        self._charged = np.zeros(0, np.uint16)
        """The tenant charged for each row. It may differ from ``Index.tenant``: another tenant may have requested the
        block since."""

    def left(self, tenant: int) -> int:
        """Bytes that a tenant may still use; below 0: it is over its quota."""
        return self.quotas[tenant] - self.nbytes[tenant]

    def charged(self, row: int) -> int:
        """Bytes charged for a row."""
        return int(self._pages[row]) * ALIGN if row < len(self._pages) else 0

    def rows(self, tenant: int) -> Rows:
        """All rows that a tenant is charged for."""
        found: Rows = np.flatnonzero((self._pages > 0) & (self._charged == tenant))
        return found

    def enter(self, rows: Rows, nbytes: int) -> None:
        """Charge ``nbytes`` for each of distinct rows of one tenant."""
        tenant = int(self._index.tenant[rows[0]])
        if tenant not in self.quotas:
            return
        if (more := len(self._index.tenant) - len(self._pages)) > 0:
            self._pages = np.append(self._pages, np.zeros(more, np.uint32))
            self._charged = np.append(self._charged, np.zeros(more, np.uint16))
        self._pages[rows] = nbytes // ALIGN
        self._charged[rows] = tenant
        self.nbytes[tenant] += nbytes * len(rows)
        self.blocks[tenant] += len(rows)

    def leave(self, row: int) -> None:
        """Refund a row."""
        if nbytes := self.charged(row):
            tenant = int(self._charged[row])
            self._pages[row] = 0
            self.nbytes[tenant] -= nbytes
            self.blocks[tenant] -= 1

    def repair(self, tier: int) -> None:
        """Recompute the sums after a change was left half done; rows that are not in the tier are not charged."""
        count = min(len(self._pages), self._index.size)
        self._pages[:count][self._index.state[tier][:count] == 0] = 0
        rows = np.flatnonzero(self._pages)
        tenants = self._charged[rows].tolist()
        self.nbytes, self.blocks = Counter(), Counter(tenants)
        for tenant, pages in zip(tenants, self._pages[rows].tolist(), strict=True):
            self.nbytes[tenant] += pages * ALIGN

    def leave_many(self, rows: Rows) -> None:
        """Refund distinct rows."""
        charged = rows[rows < len(self._pages)]
        for row in charged[self._pages[charged] > 0].tolist():
            self.leave(row)
