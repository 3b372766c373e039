"""The blocks in DRAM: who holds them, what they are, and when their slots may go.

A row in DRAM is held by leases, by reservations and by moves. A block that is dropped while somebody holds it is
*doomed*: its key is gone from the index, so nobody finds it any more; its slot follows when the last holder lets go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from kvtide.block import Span
from kvtide.index.index import ABSENT, DRAM, PENDING, SEALED, Index, Mask, Rows, at
from kvtide.index.lease import Lease
from kvtide.tiers.base import Identity
from kvtide.tiers.dram import Dram
from kvtide.tiers.segments import ladder

__all__ = ["Residents"]

_TENANTS = 65_535
"""That are told apart when room is short; any more have one share together."""
_NEWCOMERS = 64
"""Tenants after which it is worth a look who has gone, at least."""


class Residents:
    """Changes what is in DRAM. All calls under the index's lock, but for the release of a lease, which takes it."""

    def __init__(self, index: Index, dram: Dram, checksum: bool, tenants: Mapping[bytes, int]) -> None:
        """``tenants`` have numbers already, from 1 on, and keep them."""
        self._index = index
        self._dram = dram
        self._identities: list[Identity] = []
        """What a colder tier must know of a row; ``Index.space`` points here."""
        self._footprints: list[int] = []
        """Of each identity."""
        self._spaces: dict[Identity, int] = {}
        self._rows: list[int] = []
        """How many rows each identity has; one that has none any more gives its place to another."""
        self._vacant: list[int] = []
        self._tenants = dict(tenants)
        self._settled = index.tenants = len(tenants)
        self._patience = _NEWCOMERS
        """New tenants to come before it is looked which of the old ones are still here."""
        self._checks: dict[int, int] | None = {} if checksum else None
        self.tokens: dict[int, bytes] = {}
        """Token ids of rows, where a tier keeps them."""
        self.leases = 0
        """That are open and hold something."""
        self.doomed: set[int] = set()
        self.refused: set[int] = set()
        """Rows that a colder tier would not take: a disk that fails must not fill DRAM with what waits for it."""

    # -- holding ------------------------------------------------------------------------------------------

    def lease(self, rows: Rows) -> Lease:
        """Hold distinct rows until the lease is released. Under the index's lock."""
        self._index.hold(rows)
        self.leases += bool(len(rows))
        return Lease(self._release, rows)

    def _release(self, rows: Rows) -> None:
        with self._index.lock:
            self.leases -= 1
            self.unhold(rows)

    def unhold(self, rows: Rows) -> None:
        """End a hold on distinct rows."""
        last = [r for r in rows.tolist() if r in self.doomed and self._index.holds[r] == 1] if self.doomed else ()
        self._index.unhold(rows)
        for row in last:
            self.doomed.discard(row)
            self.vacate(row)

    def doom(self, row: int) -> None:
        """``row`` was detached from its key: its slot goes now, or when nobody holds it."""
        if self._index.holds[row]:
            self.doomed.add(row)
        else:
            self.vacate(row)

    def vacate(self, row: int) -> None:
        """Give back the slot of a detached row, and the row."""
        if self._index.state[DRAM][row] == SEALED:
            self.leave(row)
        self._index.retire(row)

    # -- coming and going ---------------------------------------------------------------------------------

    def enter(self, rows: Rows, places: Sequence[int], identity: Identity) -> None:
        """Rows get slots, PENDING and held, for somebody to fill."""
        index, these = self._index, at(rows)
        index.state[DRAM][these] = PENDING
        index.place[DRAM][these] = places if len(places) > 1 else places[0]
        index.space[these] = space = self._space(identity)
        self._rows[space] += len(rows)
        index.tenant[these] = self._tenants.get(identity.tenant, len(self._tenants))
        index.holds[these] += 1
        if (account := index.accounts.get(DRAM)) is not None:
            account.enter(rows, ladder(identity.geometry.footprint))

    def seal(self, rows: Rows) -> None:
        """Pending rows are whole."""
        self._index.state[DRAM][at(rows)] = SEALED
        self._dram.moved(written=sum(map(self._footprints.__getitem__, self._index.space[rows].tolist())))
        if self._checks is not None:
            for row in rows.tolist():
                self._checks[row] = xxh3_64_intdigest(self.span(row))

    def clear_padding(self, rows: Rows) -> None:
        """Rows were filled by a caller: what their slots held before must not go to disk with them."""
        for space in set(self._index.space[rows].tolist()):
            geometry = self._identities[space].geometry
            if geometry.stride != geometry.section:
                for row in rows[self._index.space[rows] == space].tolist():
                    sections = np.frombuffer(self.span(row), np.uint8).reshape(geometry.sections, geometry.stride)
                    sections[:, geometry.section :] = 0

    def leave(self, row: int) -> None:
        """Take a row out of DRAM. The row itself may live on in colder tiers."""
        self._dram.release(self._index.remove(row, DRAM))
        space = int(self._index.space[row])
        self._rows[space] -= 1
        if not self._rows[space]:
            del self._spaces[self._identities[space]]
            self._vacant.append(space)
        if self.tokens:
            self.tokens.pop(row, None)
        if self._checks:
            self._checks.pop(row, None)
        if self.refused:
            self.refused.discard(row)

    # -- questions ----------------------------------------------------------------------------------------

    def identity(self, row: int) -> Identity:
        """What a row in DRAM is."""
        return self._identities[int(self._index.space[row])]

    def span(self, row: int) -> Span:
        """The bytes of a row in DRAM."""
        return self._dram.span(int(self._index.place[DRAM][row]), self.identity(row).geometry.footprint)

    def of_tenant(self, tenant: bytes) -> Rows:
        """The rows that have, or are about to get, a block of a tenant's."""
        index, size = self._index, self._index.size
        mine = [space for who, space in self._spaces.items() if who.tenant == tenant]
        rows: Rows = np.flatnonzero((index.state[DRAM][:size] != ABSENT) & np.isin(index.space[:size], mine))
        return rows

    def are_doomed(self, rows: Rows) -> Mask:
        """Which rows were dropped while somebody held them."""
        return np.array([row in self.doomed for row in rows.tolist()], np.bool_)

    def intact(self, row: int) -> bool:
        """Whether a row still has the bytes that were sealed; always True without ``dram.checksum``."""
        if self._checks is None or row not in self._checks:
            return True
        return xxh3_64_intdigest(self.span(row)) == self._checks[row]

    def _space(self, identity: Identity) -> int:
        space = self._spaces.get(identity)
        if space is not None:
            return space
        if self._vacant:
            space = self._spaces[identity] = self._vacant.pop()
            self._identities[space] = identity
        else:
            space = self._spaces[identity] = len(self._identities)
            self._identities.append(identity)
            self._footprints.append(0)
            self._rows.append(0)
        self._footprints[space] = identity.geometry.footprint
        if identity.tenant not in self._tenants:
            self._number(identity.tenant)
        return space

    def _number(self, tenant: bytes) -> None:
        """Tell a tenant apart from the others, if there are not too many."""
        if not self._patience:
            self._forget_tenants()
            self._patience = max(_NEWCOMERS, len(self._tenants))
        self._patience -= 1
        if len(self._tenants) < _TENANTS:
            self._tenants[tenant] = self._index.tenants = len(self._tenants) + 1

    def _forget_tenants(self) -> None:
        """Number those anew that still have a block in some tier."""
        index, size = self._index, self._index.size
        numbers = index.tenant[:size]
        numbers[np.logical_and.reduce([state[:size] == ABSENT for state in index.state])] = 0
        here = np.bincount(numbers, minlength=len(self._tenants) + 1)
        stay = [tenant for tenant, number in self._tenants.items() if here[number] or number <= self._settled]
        anew = np.zeros(len(here), np.uint16)
        anew[[self._tenants[tenant] for tenant in stay]] = np.arange(1, len(stay) + 1)
        numbers[:] = anew[numbers]
        self._tenants = dict(zip(stay, range(1, len(stay) + 1), strict=True))
        index.tenants = len(stay)


def rows_of(numbers: Sequence[int]) -> Rows:
    return np.array(numbers, np.int64)
