"""Remembers why blocks are not in the store: they left it, or did not get in. For ``Session.explain``.

A fixed table: each block has one place in it, given by its key, and a later record of any block with the same place
overwrites the earlier one. So memory is bounded, and a record costs the same however many there are. A record is two
numbers. The first identifies the block: the mark of its key combined with the fingerprint of its identity, so that only
a caller of the same identity (model, tenant, layout, group, trust domain) finds it. They are combined and mixed with
secret numbers, so that no caller can invent a key that finds another's record, and so that the places of a caller's own
blocks tell nothing of the places of others' blocks. The second packs what happened.

Records are collected first and written to the table together: a numpy call for one record costs nearly as much as for a
thousand, and no store should pay that each time. Whoever searches the table writes the collected ones first.

What the table does not say is as important as what it says: a place remembers that a record of another block in it was
overwritten. So a block without a record was certainly never recorded, or it is known that its record may have been
overwritten, and since when that cannot be: the later record always stays, so nothing has happened to the block since
the time of the record in its place.

Call with the index lock held. A caller that may be interrupted records first, and removes the block after that: a
record of a block that is still there does no harm. An interrupted writing of collected records is repeated by the next.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvtide.clock import Clock, SystemClock
from kvtide.index.hold_counts import Rows

__all__ = ["Absence", "AbsenceCause", "AbsenceLog", "AbsenceStatistics", "Absences", "EvictedFor"]

Numbers = npt.NDArray[np.uint64]
Codes = npt.NDArray[np.uint8]

_RECORD = 16
"""Bytes of a record."""
_WORD = (1 << 64) - 1
_TOGETHER = 4096
"""Records are collected until there are this many of them, or a quarter as many calls that made them."""


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

Mask = npt.NDArray[np.bool_]


class _Note(NamedTuple):
    """Records made by one call."""

    marks: Numbers
    identities: npt.NDArray[np.int64]
    owners: npt.NDArray[np.uint16]
    """Numbers of the blocks' tenants."""
    word: int
    """What happened to all of them, and when."""
    tenant: int
    unwritten: Codes | None
    times: npt.NDArray[np.float64] | None


class _Columns(Protocol):
    """What is needed of the index: columns with an entry for each row."""

    mark: npt.NDArray[np.uint64]
    """A part of each row's key."""
    identity: npt.NDArray[np.int64]
    tenant: npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class AbsenceStatistics:
    """The records of why blocks are absent."""

    bytes: int = 0
    """Memory that the records take, however many there are."""
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
        size = 1 << (nbytes // _RECORD).bit_length() - 1 if nbytes >= _RECORD else 0
        self.on = size > 0
        self._mask = np.uint64(max(0, size - 1))
        self._table = np.zeros((size, 2), np.uint64)
        self._names = self._table[:, 0]
        self._items = self._table.view(np.complex128).reshape(size)
        """The same memory, with a record as one number of 16 bytes: numpy copies these ten times faster than rows."""
        self._factor, *self._secrets = (np.uint64(secrets.randbits(64) | 1) for _ in range(5))
        self._collected: list[_Note] = []
        """Not yet in the table."""
        self._count = 0
        """Records in it."""
        self._records = 0
        self.since = self._clock.time()
        """When it began, in seconds since 1970."""

    def __repr__(self) -> str:
        return f"<AbsenceLog {self._records} records, {len(self._table)} places>"

    def statistics(self) -> AbsenceStatistics:
        return AbsenceStatistics(self._table.nbytes, self._records, self.since if self.on else 0.0)

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
            word = self._word(absence, tier, cause)
            codes = None if isinstance(unwritten, int) or count == 1 else unwritten
            if codes is None:
                word |= (unwritten if isinstance(unwritten, int) else int(unwritten[0])) << _UNWRITTEN
            # copies: the rows may have other blocks when the records are written
            columns = index.mark[rows], index.identity[rows], index.tenant[rows]
            self._collect(count, _Note(*columns, word, tenant, codes, times))

    def note_blocks(
        self,
        marks: Numbers,
        identity: int,
        absence: Absence,
        tier: int = 0,
        cause: AbsenceCause = AbsenceCause.NONE,
    ) -> None:
        """The same for blocks of one identity that may have no rows, given the marks of their keys."""
        if self.on and (count := len(marks)):
            nobody = np.zeros(count, np.uint16)
            word = self._word(absence, tier, cause)
            self._collect(count, _Note(marks, np.full(count, identity, np.int64), nobody, word, 0, None, None))

    def _word(self, absence: Absence, tier: int, cause: AbsenceCause) -> int:
        ticks = max(0, int((self._clock.time() - self.since) * _TICKS))
        return absence.code | min(tier, _LAST_TIER) << _TIER | cause.code << _CAUSE | ticks << _TIME

    def _collect(self, count: int, note: _Note) -> None:
        self._records += count
        self._count += count
        self._collected.append(note)
        if self._count >= _TOGETHER or len(self._collected) * 4 >= _TOGETHER:
            self.write()

    def write(self) -> None:
        """Write the collected records to the table."""
        if notes := self._collected:
            marks, identities, owners, words, tenants, _, _ = zip(*notes, strict=True)
            counts = [len(each) for each in marks]
            names = self._mixed(np.concatenate(marks), np.concatenate(identities).view(np.uint64))
            whose, tenant = np.concatenate(owners), np.repeat(np.array(tenants, np.int64), counts)
            whom = np.where(whose == tenant, np.uint64(_SAME), np.uint64(_OTHER)) * ((whose > 0) & (tenant > 0))
            records = np.repeat(np.array(words, np.uint64), counts) | whom << np.uint64(_FOR)
            late: Mask | None = None
            first = 0
            for note, count in zip(notes, counts, strict=True):
                mine = slice(first, first + count)
                first += count
                if note.unwritten is not None:
                    records[mine] |= note.unwritten.astype(np.uint64) << np.uint64(_UNWRITTEN)
                if note.times is not None:
                    late = np.zeros(len(records), np.bool_) if late is None else late
                    late[mine] = True
                    ticks = np.maximum(0, (note.times - self.since) * _TICKS).astype(np.uint64)
                    records[mine] &= np.uint64((1 << _TIME) - 1)
                    records[mine] |= np.minimum(ticks, np.uint64(note.word >> _TIME)) << np.uint64(_TIME)
            self._write(names, records, late)
            # Last: if this is interrupted, the next call repeats it, and that gives the same table.
            self._collected = []
            self._count = 0

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

    def _write(self, names: Numbers, words: Numbers, late: Mask | None) -> None:
        """``late``: the mask of records that do not overwrite later ones of other blocks."""
        at = (names & self._mask).view(np.int64)
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
        self.write()
        names = self._mixed(marks, np.full(len(marks), identity, np.int64).view(np.uint64))
        found = self._table[names & self._mask]
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
