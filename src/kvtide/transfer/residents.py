"""The blocks in DRAM: their holders, their identities, and when their slots may be freed.

Leases, reservations and moves hold a row in DRAM. A block that is dropped while it is held is *doomed*: its key is
removed from the index, so lookups miss it, and its slot is freed when the last holder releases it.

Slots of dropped blocks are zeroed before they are freed; those of evicted or expired blocks are not
(``tiers/dram/zeroing.py``).
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from kvtide.block import Span
from kvtide.index.index import ABSENT, DRAM, PENDING, SEALED, Index, Mask, Rows, at
from kvtide.index.lease import Lease, Watch
from kvtide.tiers.base import Identity
from kvtide.tiers.dram.tier import Dram
from kvtide.tiers.format.record import header_bytes
from kvtide.tiers.segments import EMPTY, Segment, ladder, place_of
from kvtide.transfer.write_results import Unwritten

__all__ = ["Moving", "Residents"]

_TENANTS = 65_535
"""Tenants that are distinguished when space is short; any beyond these share one number."""
_NO_IDENTITY = 0xFFFFFFFF
"""The number of an identity that has no block in DRAM."""
_NEWCOMERS = 64
"""Minimum number of new tenants before departed ones are searched for."""


class Moving(NamedTuple):
    """Rows being moved to other places in DRAM, so that segments become empty."""

    rows: Rows
    places: Rows
    drained: list[Segment]


class Residents:
    """Changes what is in DRAM. All calls need the index lock, except releasing a lease, which takes it."""

    def __init__(
        self,
        index: Index,
        dram: Dram,
        checksum: bool,
        tenants: Mapping[bytes, int],
        interrupted: Callable[[], None],
        notify_waiters: Callable[[], None],
    ) -> None:
        """``tenants`` have permanent numbers, from 1 on.

        ``interrupted`` is called, with the lock held, when a change here was left half done; after that
        ``notify_waiters``, without the lock, because callers may have waited for what was left half done.
        """
        self._index = index
        self._dram = dram
        self._interrupted = interrupted
        self._notify_waiters = notify_waiters
        self._identities: list[Identity] = []
        """What a colder tier must know of a row; ``Index.identity_number`` has positions in this list."""
        self._footprints: list[int] = []
        """Bytes of a block of each identity."""
        self._identity_numbers: dict[Identity, int] = {}
        self._rows: list[int] = []
        """Number of rows of each identity; the position of an identity without rows is reused."""
        self._vacant: list[int] = []
        self._tenants = dict(tenants)
        self._permanent_tenants = index.tenants = len(tenants)
        self._new_tenants_left = _NEWCOMERS
        """New tenants to arrive before the departed ones are searched for."""
        self._checks: dict[int, int] | None = {} if checksum else None
        self.tokens: dict[int, bytes] = {}
        """Token ids of rows, if a tier keeps them."""
        self._numbers = itertools.count(1)
        self.abandoned: deque[Watch] = deque()
        """Leases that no caller can release any more, because the caller was interrupted before it received them."""
        self._watches: dict[int, Watch] = {}
        """Watches over open leases, by number."""
        self.doomed: set[int] = set()
        self._to_zero: set[int] = set()
        """Rows in DRAM whose slots must be zeroed when they leave."""
        self._leaving: Rows = np.zeros(0, np.int64)
        """Slots of such rows that are being freed: after an interrupt they must not be freed without zeroing."""
        self._with_foreign_bytes: set[int] = set()
        """Rows being filled whose slots still have bytes of other tenants."""
        self.forgotten: Counter[bytes] = Counter()
        """Tenants being forgotten, by tag, with the number of concurrent requests. None of their blocks may enter."""
        self.refused: set[int] = set()
        """Rows that a colder tier refused: a failing disk must not fill DRAM with blocks that wait for it."""
        self.unwritten: dict[int, dict[int, Unwritten]] = {}
        """Why rows are not in colder tiers that should have them, by row and tier number."""
        self.displaced: set[int] = set()
        """Rows that a colder tier had and evicted."""
        self.prolonged: set[int] = set()
        """Rows whose expiry is later than their records in colder tiers say. Some rows may have been removed since."""

    # -- holds --------------------------------------------------------------------------------------------

    def lease(self, rows: Rows) -> Lease:
        """Hold distinct rows until the lease is released. Call with the index lock held."""
        if not len(rows):
            return Lease(self._release, 0, rows)
        # First the handle, then the hold, which is one step: an interrupt in between leaves no hold behind.
        number = next(self._numbers)
        lease = Lease(self._release, number, rows)
        self._watches[number] = Watch.over(lease, number, self.abandoned)
        self._index.lease(number, rows)
        return lease

    def _release(self, number: int) -> None:
        try:
            with self._index.lock:
                try:
                    self.end_lease(number)
                except BaseException:
                    self._interrupted()
                    raise
        except BaseException:
            self._notify_waiters()
            raise

    def end_lease(self, number: int) -> None:
        """End a lease unless it has ended. Call with the index lock held."""
        rows = self._index.leased(number)
        if rows is not None:
            last = self._last_holds(rows) if self.doomed else None
            self._index.end_lease(number, rows)
            if last is not None:
                self._vacate_doomed(last)
        self._watches.pop(number, None)  # last: until here, an interrupted caller may drop the lease without ending it

    def unhold(self, rows: Rows) -> None:
        """Release a hold on distinct rows."""
        last = self._last_holds(rows)
        self._index.unhold(rows)
        self._vacate_doomed(last)

    def _last_holds(self, rows: Rows) -> Rows:
        """The doomed rows with exactly one hold."""
        return rows[self.are_doomed(rows) & (self._index.holds[rows] == 1)] if self.doomed else rows[:0]

    def _vacate_doomed(self, rows: Rows) -> None:
        if len(rows):
            self.vacate_many(rows)
            self.doomed.difference_update(rows.tolist())

    def doom_many(self, rows: Rows) -> None:
        """Free the slots of distinct rows that were detached from their keys: now, or when they are no longer held."""
        held = self._index.holds[rows] > 0
        self.doomed.update(rows[held].tolist())
        self.vacate_many(rows[~held])

    def vacate_many(self, rows: Rows) -> None:
        """Free the slots of distinct detached rows, and the rows."""
        self.leave_many(rows[self._index.state[DRAM][rows] == SEALED])
        self._index.retire_many(rows)

    # -- entering and leaving -----------------------------------------------------------------------------

    def enter(self, rows: Rows, places: Sequence[int], identity: Identity) -> None:
        """Assign slots to rows, PENDING and held, for a writer or a read to fill."""
        index, these = self._index, at(rows)
        # The place first: an interrupt in between leaves absent rows, and no pending row without a place.
        index.place[DRAM][these] = places if len(places) > 1 else places[0]
        if self._dram.written_by(places, identity.tenant, identity.geometry.footprint):
            self._with_foreign_bytes.update(rows.tolist())
        index.state[DRAM][these] = PENDING
        index.identity_number[these] = number = self._identity_number(identity)
        self._rows[number] += len(rows)
        index.tenant[these] = self._tenants.get(identity.tenant, len(self._tenants))
        index.holds[these] += 1
        if (account := index.accounts.get(DRAM)) is not None:
            account.enter(rows, ladder(identity.geometry.footprint))

    def seal(self, rows: Rows) -> None:
        """Mark pending rows as complete."""
        self._index.state[DRAM][at(rows)] = SEALED
        self._dram.count_bytes(
            written=sum(map(self._footprints.__getitem__, self._index.identity_number[rows].tolist()))
        )
        if self._with_foreign_bytes:
            for row in self._with_foreign_bytes.intersection(rows.tolist()):
                self._dram.filled(int(self._index.place[DRAM][row]), self.identity(row).tenant)
                self._with_foreign_bytes.discard(row)
                self._to_zero.discard(row)
        if self._checks is not None:
            for row in rows.tolist():
                self._checks[row] = xxh3_64_intdigest(self.span(row))

    def clear_padding(self, rows: Rows) -> None:
        """Zero the padding of rows filled by a caller: earlier contents of their slots must not be written to disk with
        them."""
        for number in set(self._index.identity_number[rows].tolist()):
            geometry = self._identities[number].geometry
            if geometry.stride != geometry.section:
                for row in rows[self._index.identity_number[rows] == number].tolist():
                    sections = np.frombuffer(self.span(row), np.uint8).reshape(geometry.sections, geometry.stride)
                    sections[:, geometry.section :] = 0

    def leave(self, row: int) -> None:
        """Remove a row from DRAM. The row itself may remain in colder tiers."""
        if self._to_zero:
            self.leave_many(rows_of([row]))
            return
        self._dram.release(self._index.remove(row, DRAM))
        number = int(self._index.identity_number[row])
        self._rows[number] -= 1
        if not self._rows[number]:
            del self._identity_numbers[self._identities[number]]
            self._vacant.append(number)
        if self.tokens:
            self.tokens.pop(row, None)
        if self._checks:
            self._checks.pop(row, None)
        if self.refused:
            self.refused.discard(row)
        if self.unwritten:
            self.unwritten.pop(row, None)
        if self.displaced:
            self.displaced.discard(row)

    def give_up(self, rows: Rows) -> None:
        """Remove distinct rows from DRAM that were not filled: their slots may have bytes of any tenant."""
        if not len(rows):
            return
        for place in self._index.place[DRAM][rows].tolist():
            self._dram.unfilled(place)
        self.leave_many(rows)
        self._with_foreign_bytes.difference_update(rows.tolist())

    def zero_when_left(self, rows: Rows) -> None:
        """Zero the slots of these rows, if they are in DRAM, when they leave it."""
        self._to_zero.update(rows[self._index.state[DRAM][rows] != ABSENT].tolist())

    def zero_unfilled(self) -> None:
        """Mark the rows being filled whose slots still have other tenants' bytes: the slots are zeroed when the rows
        leave DRAM, unless the rows are sealed before."""
        self._to_zero |= self._with_foreign_bytes

    def zero_tails(self, segment: Segment, slots: Rows) -> None:
        """Zero the bytes after the blocks in these slots of a segment, for slots in use."""
        owner = segment.owner
        slots = slots[slots < len(owner)]
        slots = slots[owner[slots] > EMPTY]
        rows, places = owner[slots], slots | place_of(segment.number, 0)
        here = (self._index.place[DRAM][rows] == places) & (self._index.state[DRAM][rows] != ABSENT)
        for row, place in zip(rows[here].tolist(), places[here].tolist(), strict=True):
            self._dram.zero_tail(place, self.identity(row).geometry.footprint)

    def held_of(self, tenant: bytes) -> int:
        """Number of slots that may have bytes of a tenant whose blocks were dropped, because they are still held."""
        mine = (row for row in self.doomed if self._index.state[DRAM][row] != ABSENT)
        return len(self._with_foreign_bytes) + sum(
            self.identity(row).tenant == tenant for row in mine if row not in self._with_foreign_bytes
        )

    def note_unwritten(self, rows: Iterable[int], tier: int, reason: Unwritten) -> None:
        """Record why a colder tier that should have these rows does not take them."""
        for row in rows:
            self.unwritten.setdefault(row, {})[tier] = reason

    def note_written(self, row: int, tier: int) -> None:
        """Record that a colder tier has taken a row after all."""
        if (reasons := self.unwritten.get(row)) is not None:
            reasons.pop(tier, None)
            if not reasons:
                del self.unwritten[row]

    def repair(self, moving: Moving, hidden: set[int]) -> None:
        """Recompute everything that follows from the places of rows. Call with the lock held.

        ``hidden`` rows are correctly not found by their keys.
        """
        index, size = self._index, self._index.size
        here = np.flatnonzero(index.state[DRAM][:size] != ABSENT)
        self._dram.repair(
            np.append(index.place[DRAM][here], moving.places),
            np.append(here, moving.rows),
            moving.drained,
            self._leaving,
        )
        self._leaving = self._leaving[:0]
        rows = np.bincount(index.identity_number[here], minlength=len(self._identities)).tolist()
        self._identities = self._identities[: len(rows)]
        self._rows = rows
        self._footprints = [identity.geometry.footprint for identity in self._identities]
        self._identity_numbers = {identity: i for i, identity in enumerate(self._identities) if rows[i]}
        self._vacant = [i for i, count in enumerate(rows) if not count]
        absent = index.state[DRAM][:size] == ABSENT
        gone: dict[int, Any]
        for gone in (self.tokens, self._checks or {}, self.unwritten):
            for row in [row for row in gone if absent[row]]:
                del gone[row]
        for gone_rows in (self.refused, self.displaced, self._to_zero, self._with_foreign_bytes):
            gone_rows.difference_update([row for row in gone_rows if absent[row]])
        self.doom_many(rows_of([row for row in index.detached() if row not in hidden]))
        self.doomed.difference_update([row for row in self.doomed if not index.alive(row)])

    def leave_many(self, rows: Rows) -> None:
        """``leave`` for distinct rows."""
        if not len(rows):
            return
        zeroed = self._to_zero.intersection(rows.tolist()) if self._to_zero else None
        if zeroed:
            mine = np.isin(rows, rows_of(list(zeroed)))
            self._leaving = self._index.place[DRAM][rows[mine]]
        places = self._index.remove_many(rows, DRAM)
        if zeroed:
            self._dram.zero(places[mine])
            self._to_zero -= zeroed
            self._leaving = self._leaving[:0]
            places = places[~mine]
        self._dram.release_many(places)
        for number, count in Counter(self._index.identity_number[rows].tolist()).items():
            self._rows[number] -= count
            if not self._rows[number]:
                del self._identity_numbers[self._identities[number]]
                self._vacant.append(number)
        if self.displaced:
            self.displaced.difference_update(rows.tolist())
        if self.tokens or self._checks or self.refused or self.unwritten:
            for row in rows.tolist():
                self.tokens.pop(row, None)
                self.refused.discard(row)
                self.unwritten.pop(row, None)
                if self._checks:
                    self._checks.pop(row, None)

    # -- queries ------------------------------------------------------------------------------------------

    def identity(self, row: int) -> Identity:
        """The identity of a row in DRAM."""
        return self._identities[int(self._index.identity_number[row])]

    def record_bytes(self, rows: Rows) -> int:
        """Bytes of the records of rows in DRAM, as written without compression and token ids."""
        counts = np.bincount(self._index.identity_number[rows]).tolist() if len(rows) else []
        geometries = ((self._identities[number].geometry, count) for number, count in enumerate(counts) if count)
        return sum(count * (header_bytes(geometry.sections) + geometry.footprint) for geometry, count in geometries)

    def span(self, row: int) -> Span:
        return self._dram.span(int(self._index.place[DRAM][row]), self.identity(row).geometry.footprint)

    def of_tenant(self, tenant: bytes, start: int, stop: int) -> Rows:
        """Of the rows from ``start`` to ``stop``, those that have, or will get, a block of the tenant."""
        index = self._index
        mine = [number for who, number in self._identity_numbers.items() if who.tenant == tenant]
        here = index.state[DRAM][start:stop] != ABSENT
        rows: Rows = np.flatnonzero(here & np.isin(index.identity_number[start:stop], mine)) + start
        return rows[~self.are_doomed(rows)]

    def coming_to_others(self, rows: Rows, identity: Identity) -> Mask | None:
        """Mask of rows being read into DRAM for another identity; None if there are none, the common case.

        The identity of such a block is not known before it is read (``Index.others`` covers the rest).
        """
        other: Mask = self._index.identity_number[rows] != self._identity_numbers.get(identity, _NO_IDENTITY)
        if b"\1" not in other.tobytes():
            return None
        other &= self._index.state[DRAM][rows] == PENDING  # other states leave a stale value there
        return other if b"\1" in other.tobytes() else None

    def are_doomed(self, rows: Rows) -> Mask:
        """Mask of rows that were dropped while held."""
        if not self.doomed:
            return np.zeros(len(rows), np.bool_)
        return np.array([row in self.doomed for row in rows.tolist()], np.bool_)

    def intact(self, row: int) -> bool:
        """Whether a row still has the bytes that were sealed; always True without ``dram.checksum``."""
        if self._checks is None or row not in self._checks:
            return True
        return xxh3_64_intdigest(self.span(row)) == self._checks[row]

    def _identity_number(self, identity: Identity) -> int:
        number = self._identity_numbers.get(identity)
        if number is not None:
            return number
        if self._vacant:
            number = self._identity_numbers[identity] = self._vacant.pop()
            self._identities[number] = identity
        else:
            number = self._identity_numbers[identity] = len(self._identities)
            self._identities.append(identity)
            self._footprints.append(0)
            self._rows.append(0)
        self._footprints[number] = identity.geometry.footprint
        if identity.tenant not in self._tenants:
            self._number(identity.tenant)
        return number

    def number_of(self, tenant: bytes) -> int:
        """A tenant's number in ``Index.tenant``; that of no row if it has no blocks yet; 0 if it cannot be told apart
        from others."""
        if (number := self._tenants.get(tenant)) is not None:
            return number
        return 0 if len(self._tenants) >= _TENANTS else _TENANTS + 1

    def _number(self, tenant: bytes) -> None:
        """Assign a number to a tenant, unless there are too many."""
        if not self._new_tenants_left:
            self._forget_tenants()
            self._new_tenants_left = max(_NEWCOMERS, len(self._tenants))
        self._new_tenants_left -= 1
        if len(self._tenants) < _TENANTS:
            self._tenants[tenant] = self._index.tenants = len(self._tenants) + 1

    def _forget_tenants(self) -> None:
        """Renumber the tenants that still have a block in some tier."""
        index, size = self._index, self._index.size
        numbers = index.tenant[:size]
        numbers[np.logical_and.reduce([state[:size] == ABSENT for state in index.state])] = 0
        here = np.bincount(numbers, minlength=len(self._tenants) + 1)
        stay = [tenant for tenant, number in self._tenants.items() if here[number] or number <= self._permanent_tenants]
        anew = np.zeros(len(here), np.uint16)
        anew[[self._tenants[tenant] for tenant in stay]] = np.arange(1, len(stay) + 1)
        numbers[:] = anew[numbers]
        self._tenants = dict(zip(stay, range(1, len(stay) + 1), strict=True))
        index.tenants = len(stay)


def rows_of(numbers: Sequence[int]) -> Rows:
    return np.array(numbers, np.int64)
