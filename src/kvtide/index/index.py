"""Which block is where.

A block known to the store is a *row*: a small integer into parallel arrays, one array per fact. Columns instead of
objects keep a block near 240 bytes at a million rows and let one numpy call lease, touch or judge a whole
prompt. Row 0 is "no block": it is absent from every tier for ever, so looking up an unknown key needs no branch.

Tier 0 is DRAM. In each tier a row is ABSENT, PENDING (a writer holds the slot) or SEALED (whole). A row lives as
long as it is in some tier or somebody holds it.

Thread rule: hold ``lock`` around everything here. Nothing here blocks, does I/O or calls out, so the lock is held
for microseconds; decide under it, act outside it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtide.block import BlockKey, Found, Group, Layout
from kvtide.index.account import Account
from kvtide.index.columns import column
from kvtide.index.holds import Holds, Rows

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
_DIGEST = 32
"""A key begins with a digest of so many bytes."""


def every(mask: npt.NDArray[np.bool_] | npt.NDArray[np.uint8]) -> bool:
    """Whether none is False or 0. For the short rows of a prompt a search in bytes beats numpy's own by ten times."""
    return b"\0" not in mask.tobytes()


def at(rows: Rows) -> Rows | int:
    """The same rows as numpy finds them soonest: a lone one by its number."""
    return rows if len(rows) != 1 else rows.item()


def marks(keys: Sequence[BlockKey]) -> npt.NDArray[np.uint64]:
    """A number for each key, never 0: what is remembered of blocks that are here no more."""
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
    """The table of blocks. See the module's text for the thread rule."""

    def __init__(self, tiers: int) -> None:
        self.lock = threading.RLock()
        self.changes = 0
        """Grows whenever a block may have become evictable; lets a fruitless search be skipped."""
        self.departures = 0
        """Grows whenever a block leaves DRAM or its key: what was all there before, still is while it does not grow."""
        self._rows: dict[BlockKey, int] = {}
        self._keys: list[BlockKey | None] = [None]
        self._parents: list[bytes | None] = [None]
        """The key of each row's parent, the same object that the parent has while it is here; else its digest."""
        self._free: list[int] = []
        size = 1024
        self.state = [np.zeros(size, np.uint8) for _ in range(tiers)]
        self.place = [np.full(size, NOWHERE, np.int64) for _ in range(tiers)]
        self._held = Holds(size)
        self.hold = self._held.note
        """Keep distinct rows from eviction until ``unhold``."""
        self.pins = np.zeros(size, np.uint16)
        """How often a row is pinned, or more; whose pins they are is in ``_pinned``."""
        self._pinned: dict[int, Counter[object]] = {}
        self.priority = np.zeros(size, np.int8)
        self.expiry: npt.NDArray[np.float64] = np.broadcast_to(np.inf, size)
        """When a row expires; to be changed by ``expire_at`` only, because it takes no memory until something does."""
        self._mortal = False
        """Whether anything ever had an expiry."""
        self.depth = np.zeros(size, np.uint32)
        self.used = np.zeros(size, np.int64)
        """When a row was last used, in ticks."""
        self.returns = np.full(size, UNKNOWN, np.int16)
        """How often a row came back after it was first stored; ``UNKNOWN`` until its first use is over."""
        self.kind = np.full(size, UNKNOWN, np.int16)
        """What is known of a row's use, as ``Uses`` has it."""
        self.until: dict[int, Rows] = {}
        """By tier, where a policy wants it: until when it would keep a row."""
        self.mark = np.zeros(size, np.uint64)
        """A part of the key, for what remembers blocks longer than the index does."""
        self.tenant = np.zeros(size, np.uint16)
        """Whose it is, from 1 on; 0 while nobody of this process has used it."""
        self.tenants = 0
        """How many tenants there are."""
        self.accounts: dict[int, Account] = {}
        """By tier, where tenants have quotas: what they have there."""
        self.space = np.zeros(size, np.uint32)
        """Which namespace and group: the pipeline's number for an Identity."""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def size(self) -> int:
        """Rows that were ever in use, row 0 included."""
        return len(self._keys)

    def __repr__(self) -> str:
        return f"<Index {len(self)} blocks>"

    def statistics(self) -> IndexStatistics:
        count = self.size
        held, pinned = (int(np.count_nonzero(column[:count])) for column in (self.holds, self.pins))
        return IndexStatistics(len(self), held, pinned)

    @property
    def holds(self) -> npt.NDArray[np.int32]:
        """Leases and moves under way: a held row is evicted from no tier."""
        return self._held.counts

    # -- rows ---------------------------------------------------------------------------------------------

    def rows(self, keys: Collection[BlockKey]) -> Rows:
        """The row of each key; ``NO_ROW`` for a key that is not known."""
        return np.fromiter(map(self._rows.get, keys, repeat(NO_ROW)), np.int64, len(keys))

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

    def parent(self, row: int) -> bytes:
        """The digest that the block of a live row was chained to."""
        parent = self._parents[row]
        assert parent is not None, f"row {row} is free"
        return parent[:_DIGEST]

    def add(self, key: BlockKey, parent: bytes, depth: int) -> int:
        """A row for a key that has none yet, absent from every tier. ``parent`` is a digest."""
        above = self._keys[self._rows.get(BlockKey(parent + key[_DIGEST:]), NO_ROW)] or parent
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
        self._rows[key] = row
        self.depth[row] = depth
        return row

    def add_many(self, keys: Sequence[BlockKey], parents: npt.NDArray[np.void], depths: Rows) -> tuple[Rows, Rows]:
        """Rows for keys that have none yet, and those of their parents, ``NO_ROW`` where they are not here.

        For opening a tier: nothing may have been freed before.
        """
        assert not self._free
        first = len(self._keys)
        stop = first + len(keys)
        if stop > len(self.depth):
            self._grow(stop + stop // 8)
        self._keys.extend(keys)
        self._rows.update(zip(keys, range(first, stop), strict=True))
        digests = parents.tolist()
        above = self.rows([BlockKey(p + k[_DIGEST:]) for p, k in zip(digests, keys, strict=True)])
        known = self._keys
        self._parents.extend([known[row] or p for row, p in zip(above.tolist(), digests, strict=True)])
        self.depth[first:stop] = depths
        self.mark[first:stop] = marks(keys)
        return np.arange(first, stop), above

    @property
    def next_row(self) -> int:
        """The row that the next ``add`` will give."""
        return self._free[-1] if self._free else len(self._keys)

    def detach(self, row: int) -> None:
        """Let nobody find ``row`` by its key any more, though it may still be held."""
        del self._rows[self.key(row)]
        self.departures += 1
        if self._mortal:
            self.expiry[row] = np.inf

    def retire(self, row: int) -> bool:
        """Forget a row that is in no tier and held by nobody."""
        if self.holds[row] or any(s[row] for s in self.state):
            return False
        key = self._keys[row]
        if key is None:
            return False
        if self._rows.get(key) == row:
            del self._rows[key]
        self._keys[row] = self._parents[row] = None
        self.pins[row] = self.priority[row] = 0
        self._pinned.pop(row, None)
        self.returns[row] = self.kind[row] = UNKNOWN
        for until in self.until.values():
            until[row] = 0
        if self._mortal:
            self.expiry[row] = np.inf
        self._free.append(row)
        return True

    def _grow(self, size: int) -> None:
        def bigger(old: npt.NDArray[Any], fill: float = 0) -> npt.NDArray[Any]:
            new = column(size, old.dtype)
            new[: len(old)] = old
            if fill:
                new[len(old) :] = fill
            return new

        self.state = [bigger(a) for a in self.state]
        self.place = [bigger(a, NOWHERE) for a in self.place]
        self.expiry = bigger(self.expiry, np.inf) if self._mortal else np.broadcast_to(np.inf, size)
        self.returns, self.kind = bigger(self.returns, UNKNOWN), bigger(self.kind, UNKNOWN)
        self.until = {tier: bigger(a) for tier, a in self.until.items()}
        self._held.counts = bigger(self.holds)
        for name in ("pins", "priority", "depth", "used", "space", "mark", "tenant"):
            setattr(self, name, bigger(getattr(self, name)))

    def expire_at(self, rows: Rows | list[int], when: npt.ArrayLike) -> None:
        """Let rows expire; at infinity: never."""
        if not self._mortal and not np.all(np.isinf(when)):
            self._mortal = True
            self.expiry = np.full(len(self.depth), np.inf)
        if self._mortal:
            self.expiry[rows] = when

    # -- places -------------------------------------------------------------------------------------------

    def put(self, row: int, tier: int, state: int, place: int) -> None:
        """Record that ``row`` is in ``tier``."""
        self.state[tier][row] = state
        self.place[tier][row] = place

    def remove(self, row: int, tier: int) -> int:
        """Record that ``row`` is no longer in ``tier``; answers where it was. Retire the row yourself."""
        self._held.write_down()  # the end of a hold must see that the row may be nowhere
        place = int(self.place[tier][row])
        self.departures += tier == DRAM
        if self.accounts and (account := self.accounts.get(tier)) is not None:
            account.leave(row)
        self.state[tier][row], self.place[tier][row] = ABSENT, NOWHERE
        return place

    def unhold(self, rows: Rows) -> None:
        """End a ``hold``. Rows that are nowhere by now are forgotten."""
        self.changes += 1
        if self._held.strike(rows):
            return  # nothing was taken out of a tier since it began: none is nowhere
        these = at(rows)
        self.holds[these] -= 1
        if every(self.state[DRAM][these]):
            return  # the usual end: none is nowhere
        gone = self.holds[rows] == 0
        for state in self.state:
            gone &= state[rows] == ABSENT
        for row in rows[gone].tolist():
            self.retire(row)

    # -- pins ---------------------------------------------------------------------------------------------

    def pin(self, rows: Rows, owner: object) -> int:
        """Keep distinct rows from eviction until ``owner`` unpins them as often; answers how many it had not pinned."""
        new = 0
        for row in rows.tolist():
            counts = self._pinned.setdefault(row, Counter())
            new += owner not in counts
            counts[owner] += 1
            self._count_pins(row)
        return new

    def unpin(self, rows: Rows, owner: object) -> tuple[int, int]:
        """End one pin of distinct rows that ``owner`` has pinned; answers of how many, and of how many the last."""
        mine, last = [row for row in rows.tolist() if owner in self._pinned.get(row, ())], 0
        for row in mine:
            counts = self._pinned[row]
            counts[owner] -= 1
            if not counts[owner]:
                del counts[owner]
                last += 1
            self._count_pins(row)
        return len(mine), last

    def unpin_all(self, owner: object) -> None:
        """``owner`` is gone, and so are its pins."""
        for row in [row for row, counts in self._pinned.items() if owner in counts]:
            del self._pinned[row][owner]
            self._count_pins(row)

    def _count_pins(self, row: int) -> None:
        self.pins[row] = min(self._pinned[row].total(), np.iinfo(np.uint16).max)
        if not self.pins[row]:
            del self._pinned[row]
            self.changes += 1

    # -- questions ----------------------------------------------------------------------------------------

    def all_sealed(self, rows: Rows) -> bool:
        """Whether all rows are whole in DRAM."""
        return self.state[DRAM][rows].tobytes().count(SEALED) == len(rows)

    def usable(self, rows: Rows, now: float) -> Mask:
        """Which rows are whole in some tier and not expired."""
        whole: Mask = self.state[0][rows] == SEALED
        for state in self.state[1:]:
            whole |= state[rows] == SEALED
        if self._mortal:
            whole &= self.expiry[rows] > now
        return whole

    def find(self, keys: Sequence[BlockKey], now: float) -> list[Found]:
        """HIT, PENDING or MISS for each key."""
        rows = self.rows(keys)
        hits = self.usable(rows, now)
        pending = np.zeros(len(rows), np.bool_)
        for state in self.state:
            pending |= state[rows] == PENDING
        return [
            Found.HIT if hit else Found.PENDING if wait else Found.MISS
            for hit, wait in zip(hits.tolist(), pending.tolist(), strict=True)
        ]

    def lengths(self, layout: Layout, rows: dict[str, Rows], whole: dict[str, Mask]) -> Mask:
        """For each length in blocks, 0 to all, whether a prefix of it is usable: all required groups by their rules.

        ``whole`` says which blocks of each group count as present.
        """
        good = np.ones(min(len(r) for r in rows.values()) + 1, np.bool_)
        for group in layout.groups:
            if group.required:
                good &= _reach(group, whole[group.name], layout.block_tokens)
        return good

    def evictable(self, rows: Rows, tier: int) -> Mask:
        """Which rows may leave ``tier`` now."""
        free: Mask = (self.state[tier][rows] == SEALED) & (self.holds[rows] == 0) & (self.pins[rows] == 0)
        return free


def _reach(group: Group, present: Mask, tokens: int) -> Mask:
    """For each length in blocks, 0 to all, whether ``group`` has what a prefix of it needs."""
    if every(present):
        return np.ones(len(present) + 1, np.bool_)
    lengths = np.arange(len(present) + 1)
    absent = np.flatnonzero(~present)
    # The last absent block before each length; what a prefix needs must lie after it.
    last = np.full(len(lengths), -1)
    before = np.searchsorted(absent, lengths)
    some = before > 0
    last[some] = absent[before[some] - 1]
    needed = len(present) - group.needs(len(present), tokens).start
    good: Mask = last < np.maximum(0, lengths - needed)
    return good
