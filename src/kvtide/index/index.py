"""The index: which block is in which tier, and where.

A block known to the store is a *row*: a small integer into parallel arrays, one array per fact. Columns instead of
objects keep a block near 250 bytes at a million rows, and let one numpy call lease, touch or check a whole prompt. Row
0 is "no block": it is always absent from every tier, so looking up an unknown key needs no branch.

Tier 0 is DRAM. In each tier a row is ABSENT, PENDING (being written into its slot) or SEALED (complete). A row exists
as long as it is in some tier or held.

Threads: hold ``lock`` around every call. Nothing here blocks, does I/O or calls out, so the lock is held for
microseconds; decide under the lock, act outside it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtide.block import DIGEST, BlockKey, Group, Layout
from kvtide.index.absence_log import AbsenceLog
from kvtide.index.columns import column
from kvtide.index.hold_counts import HoldCounts, Rows
from kvtide.index.pins import Pins
from kvtide.index.tenant_usage import TenantUsage

__all__ = [
    "ABSENT",
    "DRAM",
    "NOWHERE",
    "PENDING",
    "SEALED",
    "UNKNOWN",
    "Index",
    "IndexStatistics",
    "Mask",
    "Rows",
    "at",
    "every",
    "marks",
]

Mask = npt.NDArray[np.bool_]

DRAM = 0
ABSENT, PENDING, SEALED = 0, 1, 2
NOWHERE = -1
"""The place of a row in a tier that does not have it."""

NO_ROW = 0
UNKNOWN = -1
_SEARCHED = 1 << 16
"""Rows that one step of the search for expired rows examines: some 50 us."""


def every(mask: npt.NDArray[np.bool_] | npt.NDArray[np.uint8]) -> bool:
    """Whether no element is False or 0. For the short rows of a prompt, searching the bytes is ten times faster than
    numpy."""
    return b"\0" not in mask.tobytes()


def at(rows: Rows) -> Rows | int:
    """The same rows in the form that numpy indexes fastest: a single row as an integer."""
    return rows if len(rows) != 1 else rows.item()


def marks(keys: Sequence[BlockKey]) -> npt.NDArray[np.uint64]:
    """A number for each key, never 0, under which blocks are remembered after they were removed."""
    if not keys:
        return np.zeros(0, np.uint64)
    whole = np.frombuffer(b"".join([key[:8] for key in keys]), np.uint64)
    return whole | np.uint64(1 << 63)


@dataclass(frozen=True, slots=True)
class IndexStatistics:
    blocks: int
    held: int
    pinned: int


class Index:
    """The table of blocks. See the module docstring for the use of the lock."""

    def __init__(self, tiers: int) -> None:
        self.lock = threading.RLock()
        self.changes = 0
        """Incremented whenever a block may have become evictable; lets a fruitless search be skipped."""
        self.departures = 0
        """Incremented whenever a block leaves DRAM or its key: a prompt that was completely in DRAM still is while this
        is unchanged."""
        self._rows: dict[BlockKey, int] = {}
        self._keys: list[BlockKey | None] = [None]
        self._parents: list[bytes | None] = [None]
        """The key of each row's parent (the parent's own key object while that is present), otherwise the parent's
        digest."""
        self._free: list[int] = []
        size = 1024
        self.state = [np.zeros(size, np.uint8) for _ in range(tiers)]
        self.place = [np.full(size, NOWHERE, np.int64) for _ in range(tiers)]
        self._held = HoldCounts(size)
        self.hold = self._held.move
        """Protect distinct rows, which begin to move between tiers, from eviction until ``unhold``."""
        self.lease = self._held.note
        """Protect distinct rows from eviction until ``end_lease``, under a new number."""
        self.pins = np.zeros(size, np.uint16)
        """Number of pins of a row, saturating; the owners of the pins are in ``_pinned``."""
        self._pinned: dict[int, set[Pins]] = {}
        """The owners of pins, by pinned row."""
        self.priority = np.zeros(size, np.int8)
        self.expiry: npt.NDArray[np.float64] = np.broadcast_to(np.inf, size)
        """The expiry of each row. Change it only by ``expire_at``, because it takes no memory until a row has an
        expiry."""
        self.mortal = False
        """Whether any row ever had an expiry."""
        self.next_expiry = float("inf")
        """No row expires before this time. It may be too early, but never too late."""
        self.on_earlier_expiry: Callable[[], None] = lambda: None
        """Called, with the lock held, when ``next_expiry`` has become earlier. It must not wait."""
        self._later = float("inf")
        """The earliest expiry of rows that the current search has passed, or that got an expiry since it began."""
        self._searched = 0
        """Rows that the search for expired ones has passed."""
        self._expired: Rows = np.empty(0, np.int64)
        """Rows that were found expired and are not removed yet."""
        self.depth = np.zeros(size, np.uint32)
        self.used = np.zeros(size, np.int64)
        """When a row was last used, in ticks."""
        self.returns = np.full(size, UNKNOWN, np.int16)
        """How often a row returned after it was first stored; ``UNKNOWN`` until its first use is over."""
        self.kind = np.full(size, UNKNOWN, np.int16)
        """The kind of use of a row, as defined by ``UsageTracker``."""
        self.since = np.zeros(size, np.int64)
        """When a row was last used, in blocks used, as ``UsageTracker`` counts them for policies that learn."""
        self.until: dict[int, Rows] = {}
        """By tier, if its policy needs it: the time until which it would keep a row."""
        self.mark = np.zeros(size, np.uint64)
        """A part of the key, under which blocks are remembered longer than the index keeps them."""
        self.tenant = np.zeros(size, np.uint16)
        """The tenant's number, from 1 on; 0 while no caller of this process has used the row."""
        self.tenants = 0
        """Number of tenants."""
        self.accounts: dict[int, TenantUsage] = {}
        """By tier, if tenants have quotas there: their usage."""
        self.identity = np.zeros(size, np.int64)
        """The permanent owner: the fingerprint of namespace, tenant, layout and group; 0 if unknown. An older journal
        does not have it; then it is known once the block was read."""
        self.identity_number = np.zeros(size, np.uint32)
        """Namespace and group, as the pipeline's number of an Identity."""
        self.absence_log = AbsenceLog(self)
        """Why blocks are absent. Off unless the store replaces it."""

    def __len__(self) -> int:
        return len(self._rows)

    def lock_is_mine(self) -> bool:
        """Whether this thread has the lock."""
        mine: bool = self.lock._is_owned()  # type: ignore[attr-defined]
        return mine

    @property
    def size(self) -> int:
        """Number of rows ever used, including row 0."""
        return len(self._keys)

    def __repr__(self) -> str:
        return f"<Index {len(self)} blocks>"

    def statistics(self) -> IndexStatistics:
        count = self.size
        held, pinned = (int(np.count_nonzero(column[:count])) for column in (self.holds, self.pins))
        return IndexStatistics(len(self), held, pinned)

    @property
    def holds(self) -> npt.NDArray[np.int32]:
        """Number of leases and moves of each row: a held row is not evicted from any tier."""
        return self._held.counts

    # -- rows ---------------------------------------------------------------------------------------------

    def rows(self, keys: Collection[BlockKey]) -> Rows:
        """The row of each key; ``NO_ROW`` for an unknown key."""
        return np.fromiter(map(self._rows.get, keys, repeat(NO_ROW)), np.int64, len(keys))

    def own_rows(self, keys: Collection[BlockKey], identity: int) -> Rows:
        """The row of each key for this identity: another identity's block counts as unknown."""
        rows = self.rows(keys)
        other = self.others(rows, identity)
        if other is not None:
            rows[other] = NO_ROW
        return rows

    def others(self, rows: Rows, identity: npt.ArrayLike) -> Mask | None:
        """Mask of rows that have a block of another identity; None if there are none, the common case. Rows of unknown
        identity are not in the mask.

        Keys are derived from an identity, so only a caller that invents keys, or sends another's, finds such a row.
        ``identity``: of all rows, or of each.
        """
        found = self.identity[rows]
        other: Mask = found != identity
        if b"\1" not in other.tobytes():
            return None
        other &= found != 0
        return other if b"\1" in other.tobytes() else None

    def row(self, key: BlockKey) -> int:
        """The row of one key, or ``NO_ROW``."""
        return self._rows.get(key, NO_ROW)

    def key(self, row: int) -> BlockKey:
        """The key of a live row."""
        key = self._keys[row]
        assert key is not None, f"row {row} is free"
        return key

    def keys(self, rows: Rows) -> tuple[BlockKey, ...]:
        """The keys of live rows."""
        known = self._keys
        return tuple([known[row] for row in rows.tolist()])

    def identities(self, rows: Rows) -> tuple[int, ...]:
        """The fingerprints of the identities of rows' blocks; 0 if unknown."""
        return tuple(self.identity[rows].tolist())

    @property
    def parents(self) -> Sequence[bytes | None]:
        """The parent of each row, as its key or its digest; None for a free row."""
        return self._parents

    def parent(self, row: int) -> bytes:
        """The digest of the parent of a live row's block."""
        parent = self._parents[row]
        assert parent is not None, f"row {row} is free"
        return parent[:DIGEST]

    def add(self, key: BlockKey, parent: bytes, depth: int, *, found: bool = True) -> int:
        """Add a row for a key, absent from every tier. ``parent`` is a digest.

        The key has no row yet; or ``found`` is False, and lookups do not find the new row until ``take_key``.
        """
        above = self._keys[self._rows.get(BlockKey(parent + key[DIGEST:]), NO_ROW)] or parent
        if self._free:
            row = self._free.pop()
            self._keys[row] = key
            self._parents[row] = above
        else:
            row = len(self._keys)
            if row == len(self.depth):
                self._grow(row + max(row // 4, 1024))
            self._keys.append(key)
            self._parents.append(above)
        if found:
            self._rows[key] = row
        self.depth[row] = depth
        return row

    def take_key(self, row: int) -> None:
        """Let lookups of its key find ``row`` instead of the row that had the key, if any. Pins follow the key."""
        key = self.key(row)
        old = self._rows.get(key, NO_ROW)
        self._rows[key] = row
        if not old:
            return
        self.departures += 1
        self.priority[row] = max(self.priority[row], self.priority[old])
        if (pinned := self._pinned.get(old)) is not None:
            self._pinned[row] = pinned
            for owner in pinned:
                owner.move(old, row)
            self.pins[row], self.pins[old] = self.pins[old], 0
            del self._pinned[old]  # last, because ``repair`` takes owners from here
        if self.mortal:
            self.expiry[old] = np.inf

    def add_many(self, keys: Sequence[BlockKey], parents: npt.NDArray[np.void], depths: Rows) -> tuple[Rows, Rows]:
        """Add rows for keys that have none yet; returns these and the rows of their parents, ``NO_ROW`` for absent
        ones.

        For opening a tier: no row may have been freed before.
        """
        assert not self._free
        first = len(self._keys)
        stop = first + len(keys)
        if stop > len(self.depth):
            self._grow(stop + stop // 8)
        self._keys.extend(keys)
        self._rows.update(zip(keys, range(first, stop), strict=True))
        digests = parents.tolist()
        above = self.rows([BlockKey(p + k[DIGEST:]) for p, k in zip(digests, keys, strict=True)])
        known = self._keys
        self._parents.extend([known[row] or p for row, p in zip(above.tolist(), digests, strict=True)])
        self.depth[first:stop] = depths
        self.mark[first:stop] = marks(keys)
        return np.arange(first, stop), above

    def detach_many(self, rows: Rows) -> None:
        """Remove the keys of distinct rows, so that lookups miss them though they may still be held. Their pins end."""
        for row in rows.tolist():
            if self._rows.get(key := self.key(row)) == row:
                del self._rows[key]
        self.departures += 1
        if self._pinned:
            self._end_pins(rows)
        if self.mortal:
            self.expiry[rows] = np.inf

    def retire_many(self, rows: Rows) -> None:
        """``retire`` those of distinct rows that are in no tier and not held."""
        gone = self.holds[rows] == 0
        for state in self.state:
            gone &= state[rows] == ABSENT
        rows = rows[gone]
        keys, parents, known = self._keys, self._parents, self._rows
        free = []
        for row in rows.tolist():
            key = keys[row]
            if key is None:
                continue
            if known.get(key) == row:
                del known[key]
            keys[row] = parents[row] = None
            free.append(row)
        if self._pinned:
            self._end_pins(rows)
        self.priority[rows] = 0
        self.identity[rows] = 0
        self.returns[rows] = UNKNOWN
        self.kind[rows] = UNKNOWN
        self.used[rows] = self.since[rows] = 0  # an expected return may have been ahead of all uses
        for until in self.until.values():
            until[rows] = 0
        if self.mortal:
            self.expiry[rows] = np.inf
        self._free += free

    def retire(self, row: int) -> bool:
        """Free a row that is in no tier and not held; returns whether it was freed."""
        if self.holds[row] or any(s[row] for s in self.state):
            return False
        key = self._keys[row]
        if key is None:
            return False
        if self._rows.get(key) == row:
            del self._rows[key]
        self._keys[row] = self._parents[row] = None
        if row in self._pinned:
            self._end_pins(np.array([row]))
        self.priority[row] = self.identity[row] = 0
        self.returns[row] = self.kind[row] = UNKNOWN
        self.used[row] = self.since[row] = 0
        for until in self.until.values():
            until[row] = 0
        if self.mortal:
            self.expiry[row] = np.inf
        self._free.append(row)
        return True

    def alive(self, row: int) -> bool:
        """Whether a row has a block, found by its key or not."""
        return self._keys[row] is not None

    def detached(self) -> list[int]:
        """Rows that have a block and are not found by its key. Scans all rows."""
        known = self._rows
        return [row for row, key in enumerate(self._keys) if key is not None and known.get(key) != row]

    def repair(self) -> None:
        """Free rows that are in no tier and not held, and end pins of rows without a key. Scans all rows."""
        size = self.size
        if len(self._parents) < size:
            self._parents.append(b"")
        nowhere = self.holds[:size] == 0
        for state, place in zip(self.state, self.place, strict=True):
            nowhere &= state[:size] == ABSENT
            place[:size][state[:size] == ABSENT] = NOWHERE
        nowhere[NO_ROW] = False
        if self._pinned:
            self._recount_pins()
        self._free = []
        for row in np.flatnonzero(nowhere)[::-1].tolist():
            if not self.retire(row):
                self._free.append(row)
        self.changes += 1
        self.departures += 1

    def _grow(self, size: int) -> None:
        def bigger(old: npt.NDArray[Any], fill: float = 0) -> npt.NDArray[Any]:
            new = column(size, old.dtype)
            new[: len(old)] = old
            if fill:
                new[len(old) :] = fill
            return new

        self.state = [bigger(a) for a in self.state]
        self.place = [bigger(a, NOWHERE) for a in self.place]
        self.expiry = bigger(self.expiry, np.inf) if self.mortal else np.broadcast_to(np.inf, size)
        self.returns, self.kind = bigger(self.returns, UNKNOWN), bigger(self.kind, UNKNOWN)
        self.since = bigger(self.since)
        self.until = {tier: bigger(a) for tier, a in self.until.items()}
        self._held.counts = bigger(self.holds)
        for name in ("pins", "priority", "depth", "used", "identity_number", "mark", "tenant", "identity"):
            setattr(self, name, bigger(getattr(self, name)))

    # -- expiry -------------------------------------------------------------------------------------------

    def expire_at(self, rows: Rows | list[int], when: npt.ArrayLike) -> None:
        """Set the expiry of rows; infinity means never."""
        first = float(np.min(when)) if np.size(when) else np.inf
        if not self.mortal and first < np.inf:
            self.mortal = True
            self.expiry = np.full(len(self.depth), np.inf)
        if self.mortal and len(rows):
            self.expiry[rows] = when
            self._later = min(self._later, first)
            if first < self.next_expiry:
                self.next_expiry = first
                self.on_earlier_expiry()

    def extend(self, rows: Rows, when: float) -> Rows:
        """Let rows live until ``when`` at least; returns those whose expiry was earlier."""
        short = rows[self.expiry[rows] < when] if self.mortal else rows[:0]
        if len(short):
            self.expire_at(short, when)
        return short

    def shorten(self, rows: Rows, when: float) -> Rows:
        """Let rows live until ``when`` at most; returns those whose expiry was later."""
        long = rows[self.expiry[rows] > when]
        if len(long):
            self.departures += 1  # cached prompts contain the earliest expiry of their blocks
            self.expire_at(long, when)
        return long

    def first_expiry(self, rows: Rows) -> float:
        """The earliest expiry of some rows."""
        return float(self.expiry[rows].min(initial=np.inf)) if self.mortal else np.inf

    def expired(self, now: float, most: int) -> Rows:
        """Some expired rows, ``most`` at most. May return none though there are more.

        Scans a part of all rows. There can be more as long as ``next_expiry`` is not later than ``now``.
        """
        if not len(self._expired) and self.next_expiry <= now:
            if not self._searched:
                self._later = np.inf
            start, stop = self._searched, min(self._searched + _SEARCHED, self.size)
            window = self.expiry[start:stop]
            over = window <= now
            self._expired = np.flatnonzero(over) + start
            self._later = min(self._later, float(window[~over].min(initial=np.inf)))
            self._searched = stop
        rows, self._expired = self._expired[:most], self._expired[most:]
        if self._searched >= self.size and not len(self._expired):
            self._searched, self.next_expiry = 0, self._later
        return rows[self.expiry[rows] <= now]  # a row may have been removed, or stored again, since it was found

    def look_again(self) -> None:
        """Restart the search for expired rows, because a caller was interrupted before it removed those that were
        found."""
        self._expired, self._searched, self.next_expiry = self._expired[:0], 0, -np.inf
        self.on_earlier_expiry()

    # -- places -------------------------------------------------------------------------------------------

    def put(self, row: int, tier: int, state: int, place: int) -> None:
        """Record that ``row`` is in ``tier``."""
        self.state[tier][row] = state
        self.place[tier][row] = place

    def remove(self, row: int, tier: int) -> int:
        """Record that ``row`` is no longer in ``tier``; returns its former place. The caller must retire the row."""
        self._held.write_down()  # the end of a hold must see that the row may be in no tier
        place = int(self.place[tier][row])
        self.departures += tier == DRAM
        if self.accounts and (account := self.accounts.get(tier)) is not None:
            account.leave(row)
        self.state[tier][row], self.place[tier][row] = ABSENT, NOWHERE
        return place

    @property
    def leases(self) -> int:
        """Number of open leases."""
        return len(self._held)

    def leased(self, number: int) -> Rows | None:
        """The rows leased under a number; None when that lease has ended."""
        return self._held.rows(number)

    def end_lease(self, number: int, rows: Rows) -> None:
        """End the open lease of these rows. Rows that are in no tier by now are freed."""
        self.changes += 1
        if not self._held.strike(number):  # otherwise no row left a tier since the lease began
            self._forget_nowhere(rows)

    def relocate(self, row: int, tier: int, place: int) -> None:
        """Record a new place of ``row`` in ``tier``. Anything derived from its old place is invalid."""
        self.place[tier][row] = place
        self.departures += tier == DRAM

    def remove_many(self, rows: Rows, tier: int) -> Rows:
        """``remove`` distinct rows; returns their former places."""
        self._held.write_down()
        places: Rows = self.place[tier][rows]
        self.departures += tier == DRAM
        if self.accounts and (account := self.accounts.get(tier)) is not None:
            account.leave_many(rows)
        self.state[tier][rows], self.place[tier][rows] = ABSENT, NOWHERE
        return places

    def unhold(self, rows: Rows) -> None:
        """End a ``hold``. Rows that are in no tier by now are freed."""
        self.changes += 1
        self.holds[at(rows)] -= 1
        self._forget_nowhere(rows)

    def recount_holds(self, moved: Rows) -> None:
        """Recompute the counts of holds: from the open leases, from the rows on their way to a tier, and from distinct
        rows that are ``moved`` within one."""
        size = self.size
        moving = np.zeros(size, np.int32)
        moving[moved] = 1
        for state in self.state:
            moving += state[:size] == PENDING
        self._held.recount(moving)

    def _forget_nowhere(self, rows: Rows) -> None:
        if every(self.state[DRAM][at(rows)]):
            return  # the common case: all rows are in DRAM
        self.retire_many(rows)

    # -- pins ---------------------------------------------------------------------------------------------

    def pin(self, rows: Rows, owner: Pins, nbytes: int = 0) -> None:
        """Protect distinct rows from eviction until ``owner`` unpins them as often, or they are removed.

        ``nbytes`` of each are charged to the owner while it has pinned the row.
        """
        for row in rows.tolist():
            if owner.add(row, nbytes):
                self._pinned.setdefault(row, set()).add(owner)
            self._count_pins(row)

    def unpin(self, rows: Rows, owner: Pins) -> int:
        """End one pin of those distinct rows that ``owner`` has pinned; returns their number."""
        mine = [row for row in rows.tolist() if row in owner]
        for row in mine:
            if owner.take(row):
                self._pinned[row].discard(owner)
            self._count_pins(row)
        return len(mine)

    def unpin_some(self, owner: Pins, most: int) -> bool:
        """End all pins of ``most`` rows of an ``owner`` that has ended. Returns False if it has no more."""
        for row in owner.some(most):
            owner.end(row)
            self._pinned[row].discard(owner)
            self._count_pins(row)
        return bool(owner)

    def repair_pins(self, owner: Pins) -> None:
        """Repair an owner's pins after a change was left half done: the owner's own record is authoritative."""
        mine = owner.repair()
        for row in {*mine, *(row for row, owners in self._pinned.items() if owner in owners)}:
            owners = self._pinned.setdefault(row, set())
            if row in owner:
                owners.add(owner)
            else:
                owners.discard(owner)
            self._count_pins(row)

    def _recount_pins(self) -> None:
        """End pins of rows without a key, and recount the others, after pins were left half ended."""
        pinned: dict[int, set[Pins]] = {}
        for owner in set[Pins]().union(*self._pinned.values()):
            for row in owner.repair():
                key = self._keys[row]
                if key is not None and self._rows.get(key) == row:
                    pinned.setdefault(row, set()).add(owner)
                else:
                    owner.end(row)
        self.pins[: self.size] = 0
        self._pinned = pinned
        for row in pinned:
            self._count_pins(row)

    def _end_pins(self, rows: Rows) -> None:
        """End all pins of rows that are removed."""
        for row in rows[self.pins[rows] > 0].tolist():
            for owner in self._pinned.get(row, ()):
                owner.end(row)
            self.pins[row] = 0
            self._pinned.pop(row, None)  # last, because ``repair`` takes owners from here

    def _count_pins(self, row: int) -> None:
        owners = self._pinned[row]
        self.pins[row] = min(sum(owner.count(row) for owner in owners), np.iinfo(np.uint16).max)
        if not owners:
            del self._pinned[row]
            self.changes += 1

    # -- queries ------------------------------------------------------------------------------------------

    def all_sealed(self, rows: Rows) -> bool:
        """Whether all rows are complete in DRAM."""
        return self.state[DRAM][rows].tobytes().count(SEALED) == len(rows)

    def usable(self, rows: Rows, now: float) -> Mask:
        """Mask of rows that are complete in some tier and not expired."""
        whole: Mask = self.state[0][rows] == SEALED
        for state in self.state[1:]:
            whole |= state[rows] == SEALED
        if self.mortal:
            whole &= self.expiry[rows] > now
        return whole

    def lengths(self, layout: Layout, rows: dict[str, Rows], whole: dict[str, Mask]) -> Mask:
        """For each length in blocks, 0 to all, whether a prefix of it is usable by the rules of all required groups.

        ``whole`` has the mask of present blocks of each group.
        """
        good = np.ones(min(len(r) for r in rows.values()) + 1, np.bool_)
        for group in layout.groups:
            if group.required:
                good &= _connector(group, whole[group.name], layout.block_tokens)
        return good

    def evictable(self, rows: Rows, tier: int) -> Mask:
        """Mask of rows that may leave ``tier`` now."""
        free: Mask = (self.state[tier][rows] == SEALED) & (self.holds[rows] == 0) & (self.pins[rows] == 0)
        return free


def _connector(group: Group, present: Mask, tokens: int) -> Mask:
    """For each length in blocks, 0 to all, whether ``group`` has the blocks that a prefix of it needs."""
    if every(present):
        return np.ones(len(present) + 1, np.bool_)
    lengths = np.arange(len(present) + 1)
    absent = np.flatnonzero(~present)
    # The last absent block before each length; the needed blocks must lie after it.
    last = np.full(len(lengths), -1)
    before = np.searchsorted(absent, lengths)
    some = before > 0
    last[some] = absent[before[some] - 1]
    needed = len(present) - group.needs(len(present), tokens).start
    good: Mask = last < np.maximum(0, lengths - needed)
    return good
