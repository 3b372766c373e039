"""Remembers why blocks are not in the store: they left it, or did not get in. For ``Session.explain``.

A fixed table: each block has one place in it, given by its key, and a later record of any block with the same place
overwrites the earlier one. So memory is bounded, a record costs the same however many there are, and a batch is written
by one numpy call. A record is two numbers. The first identifies the block: the mark of its key combined with the
fingerprint of its identity, so that only a caller of the same identity (model, tenant, layout, group, trust domain)
finds it. They are combined with a secret number, so that no caller can invent a key that finds another's record. The
second packs what happened.

What the table does not say is as important as what it says: a place remembers that a record in it was overwritten. So
a block without a record was certainly never recorded, or it is known that its record may have been overwritten.

Call with the index lock held. A caller that may be interrupted records first, and removes the block after that: a
record of a block that is still there does no harm.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

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


_ABSENCES, _CAUSES, _FOR_WHOM = list(Absence), list(AbsenceCause), list(EvictedFor)
for _number, _absence in enumerate(_ABSENCES):
    _absence.code = _number
for _number, _cause in enumerate(_CAUSES):
    _cause.code = _number

_TIER, _CAUSE, _FOR, _UNWRITTEN, _OVER, _TIME = 4, 8, 13, 15, 20, 21
"""Where the parts of a record's second number begin, after the absence: tier, cause, whom, unwritten, overwritten,
time."""
_OVERWRITTEN = 1 << _OVER
_SAME, _OTHER = 1, 2
"""Positions in ``EvictedFor``."""
_TICKS = 10_000
"""Of a record's time, per second."""


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
    """Seconds since 1970."""
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
        self._marks = self._table[:, 0]
        self._items = self._table.view(np.complex128).reshape(size)
        """The same memory, with a record as one number of 16 bytes: numpy copies these ten times faster than rows."""
        self._secret = secrets.randbits(64) | 1
        self._factor = np.uint64(self._secret)
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
        if not self.on or not len(rows):
            return
        index = self._index
        word = self._word(absence, tier, cause)
        words: Numbers | None = None
        if tenant:
            owners = index.tenant[rows]
            if owners.tobytes() == owners[:1].tobytes() * len(owners):  # the common case, made cheap
                word |= _whom(int(owners[0]), tenant) << _FOR
            else:
                whom = np.where(owners == tenant, _SAME, np.where(owners > 0, _OTHER, 0))
                words = np.uint64(word) | whom.astype(np.uint64) << np.uint64(_FOR)
        if times is not None:
            ticks = np.maximum(0, (np.minimum(times, self._clock.time()) - self.since) * _TICKS).astype(np.uint64)
            words = np.uint64(word & (1 << _TIME) - 1) | ticks << np.uint64(_TIME)
        elif not isinstance(unwritten, int) or unwritten:
            known = np.uint64(word) if words is None else words
            words = known | np.asarray(unwritten, np.uint64) << np.uint64(_UNWRITTEN)
        names = index.identity[rows].view(np.uint64)
        names *= self._factor
        names += index.mark[rows]
        self._write(names, np.uint64(word) if words is None else words)

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
            self._write(marks + self._mixed(identity), np.uint64(self._word(absence, tier, cause)))

    def _mixed(self, identity: int) -> np.uint64:
        return np.uint64((identity * self._secret) & _WORD)

    def _word(self, absence: Absence, tier: int, cause: AbsenceCause) -> int:
        ticks = max(0, int((self._clock.time() - self.since) * _TICKS))
        return (absence.code | tier << _TIER | cause.code << _CAUSE | ticks << _TIME) & _WORD

    def _write(self, names: Numbers, words: Numbers | np.uint64) -> None:
        """``words``: one for each name, or one for all. A place that had a record is marked as overwritten, even if it
        was of the same block: that is quicker to find out."""
        at = (names & self._mask).view(np.int64)
        used = self._marks[at] != 0
        count = used.tobytes().count(1)
        if count == len(names):
            words = words | np.uint64(_OVERWRITTEN)
        elif count:
            words = words | used * np.uint64(_OVERWRITTEN)
        records = np.empty((len(names), 2), np.uint64)
        records[:, 0] = names
        records[:, 1] = words
        self._items[at] = records.view(np.complex128)[:, 0]  # in one step: an interrupted caller leaves whole records
        self._records += len(names)
        if len(names) > 1:
            lost = self._marks[at] != names  # two blocks of this batch have one place
            if b"\1" in lost.tobytes():
                self._table[at[lost], 1] |= np.uint64(_OVERWRITTEN)

    def find(self, marks: Numbers, identity: int) -> Absences:
        """What is recorded of blocks of one identity, given the marks of their keys."""
        if not self.on:
            none = np.zeros(len(marks), np.uint8)
            return Absences(none, none, none, none, none, np.zeros(len(marks)), np.ones(len(marks), np.bool_))
        names = marks + self._mixed(identity)
        found = self._table[names & self._mask]
        known, words = found[:, 0] == names, found[:, 1]
        doubtful = ~known & (words & np.uint64(_OVERWRITTEN) != 0)
        words = np.where(known, words, np.uint64(0))

        def part(start: int, stop: int) -> Codes:
            return (words >> np.uint64(start) & np.uint64((1 << stop - start) - 1)).astype(np.uint8)

        return Absences(
            part(0, _TIER),
            part(_TIER, _CAUSE),
            part(_CAUSE, _FOR),
            part(_FOR, _UNWRITTEN),
            part(_UNWRITTEN, _OVER),
            self.since + (words >> np.uint64(_TIME)).astype(np.float64) / _TICKS,
            doubtful,
        )


def _whom(owner: int, tenant: int) -> int:
    """Whether space is needed for the owner of a block, for another tenant, or that is unknown (0)."""
    return _SAME if owner == tenant else _OTHER if owner else 0
