"""Remembers why blocks are not in the store: they left it, or did not get in. For ``Session.explain``.

A fixed table: each block has one place in it, given by its key, and a later record of any block with the same place
overwrites the earlier one. So memory is bounded, and a record costs the same however many there are. A record is two
numbers. The first identifies the block: the mark of its key combined with the fingerprint of its identity, so that only
a caller of the same identity (model, tenant, layout, group, trust domain) finds it. They are combined and mixed with
secret numbers, so that no caller can invent a key that finds another's record, and so that the places of a caller's own
blocks tell nothing of the places of others' blocks. The second packs what happened.

Records are collected first and written to the table together: a numpy call for one record costs nearly as much as for
a thousand, and no store should pay that each time. The caller's thread copies what it needs of the rows to a batch;
when that is full, it is handed to a thread (``on_full``), and another is filled. Whoever searches the table first
writes what is collected, so a record is found as soon as it was made. The batches are a part of the memory that the
table may take.

What the table does not say is as important as what it says: a place remembers that a record of another block in it was
overwritten. So a block without a record was certainly never recorded, or it is known that its record may have been
overwritten, and since when that cannot be: the later record always stays, so nothing has happened to the block since
the time of the record in its place.

Call with the index lock held, but for ``write_full``. A caller that may be interrupted records first, and removes the
block after that: a record of a block that is still there does no harm. An interrupted writing of collected records is
repeated by the next, and that gives the same table.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvtide.clock import Clock, SystemClock
from kvtide.index.hold_counts import Rows

__all__ = ["BY_POLICY", "Absence", "AbsenceCause", "AbsenceLog", "AbsenceStatistics", "Absences", "EvictedFor"]

Numbers = npt.NDArray[np.uint64]
Codes = npt.NDArray[np.uint8]

_RECORD = 16
"""Bytes of a record."""
_WORD = (1 << 64) - 1
_PART, _LEAST = 16, 8 << 10
"""Each of two batches of records that are not in the table yet may take this part of the memory; if that is less than
``_LEAST`` bytes, records are written at once."""
_ROW = 39
"""Bytes of a record in a batch."""


class Absence(Enum):
    """What happened to a block. The order is that of the numbers in records."""

    NOTHING = ""
    EVICTED = "evicted"
    EXPIRED = "expired"
    DROPPED = "dropped"
    FORGOTTEN = "forgotten"
    """Dropped because its tenant was forgotten."""
    LOAD_FAILED = "load failed"
    STORE_DROPPED = "store dropped"

    code: int
    """Its number in records."""


class AbsenceCause(Enum):
    """Why that happened. The values are part of the protocol; the order is that of the numbers in records."""

    NONE = ""
    LRU = "lru"
    BOUNDED = "bounded"
    REUSE = "reuse"
    QUOTA = "quota"
    """Its tenant's quota of the tier was used up."""
    BUDGET = "budget"
    """The byte budget that all users of a shared storage have together."""
    NO_ROOM = "no room in DRAM"
    NO_MEMORY_YET = "memory was not taken in time"
    CLIENT_SHARE = "the client's share of memory was used up"
    FORGETTING = "its tenant was being forgotten"
    GIVEN_UP = "its writer gave up"
    DAMAGED = "damaged or gone"
    READ_FAILED = "the read failed"
    OTHERS_BLOCK = "the block is not the asker's"
    LATE = "the storage did not answer in time"

    code: int
    """Its number in records."""

    @classmethod
    def _missing_(cls, value: object) -> AbsenceCause:
        return cls.NONE  # of a newer node, or the name of a policy that is not one of kvtide's


class EvictedFor(Enum):
    """Whose block needed the space of an evicted one. The order is that of the numbers in records."""

    UNKNOWN = ""
    SAME = "this tenant"
    OTHER = "another tenant"

    @classmethod
    def _missing_(cls, value: object) -> EvictedFor:
        return cls.UNKNOWN  # of a newer node


_ABSENCES, _CAUSES, _FOR_WHOM = list(Absence), list(AbsenceCause), list(EvictedFor)
for _number, _absence in enumerate(_ABSENCES):
    _absence.code = _number
for _number, _cause in enumerate(_CAUSES):
    _cause.code = _number

BY_POLICY = {cause.value: cause for cause in _CAUSES if cause.value in ("lru", "bounded", "reuse")}
"""The causes of evictions, by the name of the policy that chose. A policy that is not one of kvtide's has none."""

_TIER, _CAUSE, _FOR, _UNWRITTEN, _OVER, _TIME = 4, 10, 15, 17, 22, 23
"""Where the parts of a record's second number begin, after the absence: tier, cause, whom, unwritten, overwritten,
time."""
_OVERWRITTEN = 1 << _OVER
_LAST_TIER = (1 << _CAUSE - _TIER) - 1
"""The number of the last tier that a record can name: a node may read from many others, each of which is a tier."""
_SAME, _OTHER = 1, 2
"""Positions in ``EvictedFor``."""
_TICKS = 10_000
"""Of a record's time, per second."""
_SPLITMIX = np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)

Mask = npt.NDArray[np.bool_]


class _Batch:
    """Records that are not in the table yet, one column per field. ``count`` is changed last, so that an interrupted
    caller leaves whole records."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.count = 0
        self.marks = np.zeros(capacity, np.uint64)
        self.identities = np.zeros(capacity, np.int64)
        self.owners = np.zeros(capacity, np.uint16)
        """Numbers of the blocks' tenants."""
        self.words = np.zeros(capacity, np.uint64)
        """What happened, as a record's second number without the time."""
        self.times = np.zeros(capacity, np.float64)
        self.tenants = np.zeros(capacity, np.uint32)
        """Numbers of the tenants that needed the space; that of one without blocks has more than 16 bits."""
        self.late = np.zeros(capacity, np.bool_)
        """Whether others that happened later may have been recorded already."""

    def single(self) -> tuple[memoryview[Any], ...]:
        """The same memory, for single records: Python writes one number to it three times faster than to an array."""
        columns = self.marks, self.identities, self.owners, self.words, self.times, self.tenants
        return tuple(column.data for column in columns)

    def clear(self) -> None:
        self.late[: self.count] = False
        self.count = 0


class _Columns(Protocol):
    """What is needed of the index: columns with an entry for each row."""

    mark: npt.NDArray[np.uint64]
    """A part of each row's key."""
    identity: npt.NDArray[np.int64]
    tenant: npt.NDArray[np.uint16]


def _word(absence: Absence, tier: int, cause: AbsenceCause) -> int:
    """A record's second number, without what is added later."""
    return absence.code | (tier if tier < _LAST_TIER else _LAST_TIER) << _TIER | cause.code << _CAUSE


@dataclass(frozen=True, slots=True)
class AbsenceStatistics:
    """The records of why blocks are absent."""

    bytes: int = 0
    """Memory that the records may take at most, those included that are not in the table yet."""
    records: int = 0
    """Records made, including overwritten ones."""
    since: float = 0.0
    """When the records began, in seconds since 1970; 0: there are none."""


@dataclass(frozen=True, slots=True)
class Absences:
    """What is recorded of some blocks, in columns."""

    codes: Codes
    """Positions in ``Absence``; 0: there is no record."""
    tiers: Codes
    causes: Codes
    for_whom: Codes
    unwritten: Codes
    """As given to ``AbsenceLog.note``."""
    times: npt.NDArray[np.float64]
    """Seconds since 1970. Without a record: when the last thing happened to a block with the same place, so that
    nothing has happened to this one since."""
    doubtful: npt.NDArray[np.bool_]
    """Whether there is no record, but one may have been overwritten."""

    def of(self, i: int) -> tuple[Absence, AbsenceCause, EvictedFor]:
        """What happened to one block, why, and for whom."""
        return _ABSENCES[self.codes[i]], _CAUSES[self.causes[i]], _FOR_WHOM[self.for_whom[i]]


class AbsenceLog:
    """The table of one partition."""

    def __init__(self, index: _Columns, nbytes: int = 0, clock: Clock | None = None) -> None:
        """``nbytes``: the most memory; less than a record's switches it off."""
        self._index = index
        self._clock = clock or SystemClock()
        capacity = nbytes // _PART // _ROW if nbytes // _PART >= _LEAST else 0
        size = (nbytes - 2 * _ROW * capacity) // _RECORD
        self.on = size > 0
        self._size = np.uint64(size)
        self._table = np.zeros((size, 2), np.uint64)
        self._names = self._table[:, 0]
        self._items = self._table.view(np.complex128).reshape(size)
        """The same memory, with a record as one number of 16 bytes: numpy copies these ten times faster than rows."""
        self._factor, *self._secrets = (np.uint64(secrets.randbits(64) | 1) for _ in range(5))
        self.on_full: Callable[[], None] | None = None
        """Called, with the index lock held, when there is something for ``write_full``; it must not wait. None: nobody
        calls that."""
        self._batch, self._other = _Batch(capacity), _Batch(capacity)
        """The batch that is being filled; and an older one."""
        self._single, self._other_single = self._batch.single(), self._other.single()
        self._handed = False
        """Whether the older one has records that are not, or not all, in the table."""
        self._lock = threading.RLock()
        """Of the table and of the older batch. Whoever has it takes no other lock. Reentrant, like that of the index: a
        signal handler may call the store while its thread is at work here."""
        self._records = 0
        self.since = self._clock.time()
        """When it began, in seconds since 1970."""

    def __repr__(self) -> str:
        return f"<AbsenceLog {self._records} records, {len(self._table)} places>"

    def statistics(self) -> AbsenceStatistics:
        nbytes = self._table.nbytes + 2 * _ROW * self._batch.capacity
        return AbsenceStatistics(nbytes, self._records, self.since if self.on else 0.0)

    def note(
        self,
        rows: Rows,
        absence: Absence,
        tier: int = 0,
        cause: AbsenceCause = AbsenceCause.NONE,
        tenant: int = 0,
        unwritten: Codes | int = 0,
        times: npt.NDArray[np.float64] | None = None,
    ) -> None:
        """Record what happens to rows, now or at the given ``times`` before.

        ``tenant``: the number of the tenant whose block needs their space; 0: unknown. ``unwritten``: a number below 32
        that says why no colder tier has them.
        """
        if self.on and (count := len(rows)):
            index = self._index
            word = _word(absence, tier, cause)
            if count == 1 and times is None:
                word |= (unwritten if isinstance(unwritten, int) else int(unwritten[0])) << _UNWRITTEN
                self._note_one(rows.item(), word, tenant)
                return
            if isinstance(unwritten, int):
                words: Numbers | int = word | unwritten << _UNWRITTEN
            else:
                words = np.uint64(word) | unwritten.astype(np.uint64) << np.uint64(_UNWRITTEN)
            # copies: the rows may have other blocks when the records are written
            self._put(index.mark[rows], index.identity[rows], index.tenant[rows], words, tenant, times)

    def _note_one(self, row: int, word: int, tenant: int) -> None:
        """``note`` of a single row, the common case of stores of single blocks."""
        index, batch = self._index, self._batch
        if batch.count == batch.capacity:
            if not batch.capacity:
                some = np.array([row])
                self._put(index.mark[some], index.identity[some], index.tenant[some], word, tenant, None)
                return
            batch = self._hand_over()
        at = batch.count
        marks, identities, owners, words, times, tenants = self._single
        marks[at] = index.mark.item(row)
        identities[at] = index.identity.item(row)
        owners[at] = index.tenant.item(row)
        words[at], times[at], tenants[at] = word, self._clock.time(), tenant
        batch.count = at + 1
        self._records += 1

    def note_blocks(
        self,
        marks: Numbers,
        identity: int,
        absence: Absence,
        tier: int = 0,
        cause: AbsenceCause = AbsenceCause.NONE,
    ) -> None:
        """The same for blocks of one identity that may have no rows, given the marks of their keys."""
        if self.on and len(marks):
            self._put(marks, identity, 0, _word(absence, tier, cause), 0, None)

    def _put(
        self,
        marks: Numbers,
        identities: npt.NDArray[np.int64] | int,
        owners: npt.NDArray[np.uint16] | int,
        words: Numbers | int,
        tenant: int,
        times: npt.NDArray[np.float64] | None,
    ) -> None:
        count, batch, now = len(marks), self._batch, self._clock.time()
        if batch.count + count > batch.capacity:
            batch = self._hand_over() if count <= batch.capacity else _Batch(count)
        first, stop = batch.count, batch.count + count
        batch.marks[first:stop] = marks
        batch.identities[first:stop] = identities
        batch.owners[first:stop] = owners
        batch.words[first:stop] = words
        batch.tenants[first:stop] = tenant
        batch.times[first:stop] = now if times is None else np.minimum(times, now)
        if times is not None:
            batch.late[first:stop] = True
        batch.count = stop
        self._records += count
        if batch is not self._batch:  # larger than one that is kept
            with self._lock:
                self._write_all()
                self._enter(batch)

    def _hand_over(self) -> _Batch:
        """Begin another batch."""
        with self._lock:
            if self.on_full is None:
                self._write_all()
                return self._batch
            self._enter_handed()  # if the thread did not come to it
            self._single, self._other_single = self._other_single, self._single
            self._batch, self._other, self._handed = self._other, self._batch, True
        self.on_full()
        return self._batch

    def write_full(self) -> None:
        """Write the records that were handed over to the table. Needs no lock."""
        if self._handed:
            with self._lock:
                self._enter_handed()

    def write(self) -> None:
        """Write all records to the table."""
        if self._handed or self._batch.count:
            with self._lock:
                self._write_all()

    def _write_all(self) -> None:
        self._enter_handed()
        if count := self._batch.count:
            self._enter(self._batch)
            # Last: if this is interrupted, the next call repeats it, and that gives the same table.
            if self._batch.count == count:
                self._batch.clear()

    def _enter_handed(self) -> None:
        if self._handed:
            self._enter(self._other)
            self._other.clear()
            self._handed = False

    def _enter(self, batch: _Batch) -> None:
        """Write the records of a batch to the table. Call with its lock held."""
        count = batch.count
        names = self._mixed(batch.marks[:count], batch.identities[:count].copy().view(np.uint64))
        records = self._ticks(batch.times[:count])
        records <<= np.uint64(_TIME)
        records |= batch.words[:count]
        tenants = batch.tenants[:count]
        if tenants.any():
            owners = batch.owners[:count]
            whom = np.where(owners == tenants, np.uint64(_SAME << _FOR), np.uint64(_OTHER << _FOR))
            whom *= (owners > 0) & (tenants > 0)
            records |= whom
        late = batch.late[:count]
        self._write(names, records, late if late.any() else None)

    def _ticks(self, times: npt.NDArray[np.float64]) -> Numbers:
        ticks: Numbers = np.maximum(0, (times - self.since) * _TICKS).astype(np.uint64)
        return ticks

    def _mixed(self, marks: Numbers, identities: Numbers) -> Numbers:
        """The names of blocks: two rounds of the finaliser of SplitMix64, each with secret numbers. Overwrites
        ``identities``."""
        names = identities
        names *= self._factor
        names += marks
        first, second, third, fourth = self._secrets
        for added, factor in ((first, second), (third, fourth)):
            names += added
            names ^= names >> np.uint64(30)
            names *= factor
            names ^= names >> np.uint64(27)
            names *= _SPLITMIX
            names ^= names >> np.uint64(31)
        return names

    def _places(self, names: Numbers) -> npt.NDArray[np.int64]:
        """The place of each name: its upper half, scaled to the size of the table, which need not be a power of two."""
        return ((names >> _HALF) * self._size >> _HALF).view(np.int64)

    def _write(self, names: Numbers, words: Numbers, late: Mask | None) -> None:
        """``late``: the mask of records that do not overwrite later ones of other blocks."""
        at = self._places(names)
        before = self._items[at].view(np.uint64).reshape(len(at), 2)
        old, known = before[:, 0], before[:, 1]
        others = (old != 0) & (old != names)
        words |= known & np.uint64(_OVERWRITTEN) | others * np.uint64(_OVERWRITTEN)
        if late is not None:
            stay = late & others & (known >> np.uint64(_TIME) > words >> np.uint64(_TIME))
            self._table[at[stay], 1] |= np.uint64(_OVERWRITTEN)
            at, names, words = at[~stay], names[~stay], words[~stay]
        records = np.empty((len(names), 2), np.uint64)
        records[:, 0] = names
        records[:, 1] = words
        self._items[at] = records.view(np.complex128)[:, 0]  # in one step: an interrupted caller leaves whole records
        lost = self._names[at] != names  # two blocks of this batch have one place
        if lost.any():
            self._table[at[lost], 1] |= np.uint64(_OVERWRITTEN)

    def find(self, marks: Numbers, identity: int) -> Absences:
        """What is recorded of blocks of one identity, given the marks of their keys."""
        if not self.on:
            none = np.zeros(len(marks), np.uint8)
            return Absences(none, none, none, none, none, np.zeros(len(marks)), np.ones(len(marks), np.bool_))
        names = self._mixed(marks, np.full(len(marks), identity, np.int64).view(np.uint64))
        with self._lock:
            self._write_all()
            found = self._table[self._places(names)]
        known, words = found[:, 0] == names, found[:, 1]
        doubtful = ~known & (words & np.uint64(_OVERWRITTEN) != 0)
        times = self.since + (words >> np.uint64(_TIME)).astype(np.float64) / _TICKS
        words = np.where(known, words, np.uint64(0))

        def part(start: int, stop: int) -> Codes:
            return (words >> np.uint64(start) & np.uint64((1 << stop - start) - 1)).astype(np.uint8)

        return Absences(
            part(0, _TIER),
            part(_TIER, _CAUSE),
            part(_CAUSE, _FOR),
            part(_FOR, _UNWRITTEN),
            part(_UNWRITTEN, _OVER),
            times,
            doubtful,
        )
