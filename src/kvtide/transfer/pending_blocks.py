"""Finds blocks of a prompt that may soon be available: being written here, or written to shared storage by others.

The index knows what this process has written or found, not what others wrote. When a prompt continues beyond the known
blocks, the rest is searched for in the shared tiers, in the background, and the caller is told to ask again. Blocks
that are found are entered into the index, and are then like any block in a colder tier.

A prompt that is stored nowhere must cost almost nothing. So only a few blocks are searched for at a time, because
without the first ones the others are useless; equal searches are merged; and a tier remembers for a moment which blocks
it lacks (``Shared.absent``).

Entries for shared storage may be dropped from the index at any time, because they can be found again. That keeps the
index small, however large the storage is. Entries for blobs that were removed are dropped as soon as this process is
notified: no caller then tries to read them, and followers of events learn of it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvtide.block import BlockKey, Kind, Layout
from kvtide.clock import Clock
from kvtide.counts import TierCount
from kvtide.events import BlockRemoved, BlockStored, Feed
from kvtide.index.absence_log import Absence, AbsenceCause
from kvtide.index.index import ABSENT, DRAM, PENDING, SEALED, Index, Mask, Rows, marks
from kvtide.index.work_slices import slices
from kvtide.tiers.base import Identity
from kvtide.tiers.shared.tier import BlobEntry, Shared, Wish, place_of
from kvtide.transfer.cold_tier import ColdTier

__all__ = ["PendingBlocks"]

_STEP = 32
"""Blocks of a prompt that are searched for at a time."""
_KNOWN = 1 << 18
"""Number of blocks in the index above which those that can be found again are dropped from it."""

Keys = Callable[[bytes], list[BlockKey]]
"""Returns the keys of a prompt's blocks in a group, given the group's key suffix."""


class PendingBlocks:
    """Used by backends. Methods that say so need the index lock."""

    def __init__(
        self,
        index: Index,
        colds: Sequence[ColdTier],
        clock: Clock,
        feed: Feed,
        counts: Counter[str],
    ) -> None:
        self._index = index
        self._tiers = [(cold, cold.tier) for cold in colds if isinstance(cold.tier, Shared)]
        self._clock = clock
        self._feed = feed
        self._counts = counts
        self._under_way: set[BlockKey] = set()
        """Searches under way, by the keys at which they begin."""
        self._known = _KNOWN

    def pending(
        self,
        layout: Layout,
        identities: Mapping[str, Identity],
        keys: Keys,
        rows: Mapping[str, Rows],
        whole: Mapping[str, Mask],
        usable: Mask,
        blocks: int,
    ) -> bool:
        """Whether more of a prompt than its first ``blocks`` blocks may soon be available. Call with the lock held.

        ``whole`` has the mask of present blocks of each group, and ``usable`` the mask of usable prefix lengths.
        """
        lacking = [g.name for g in layout.groups if g.required and not whole[g.name][blocks]]
        if not lacking:
            return False
        if all(self._index.state[DRAM][rows[name][blocks]] == PENDING for name in lacking):
            return True
        if not self._tiers or usable[blocks + 1 :].any():
            return False
        first, who = keys(layout.group(lacking[0]).suffix)[blocks], identities[lacking[0]]
        if first not in self._under_way and not all(tier.absent(first, who) for _, tier in self._tiers):
            options = {g.name: (g.kind, identities[g.name], keys(g.suffix), whole[g.name]) for g in layout.groups}
            try:
                self._under_way.add(first)
                self._seek({first}, options, blocks)
            except BaseException:
                # The search may not be running: later callers must not believe that it is.
                self._under_way.discard(first)
                raise
        return first in self._under_way

    def _seek(
        self, begun: set[BlockKey], prompt: dict[str, tuple[Kind, Identity, list[BlockKey], Mask]], start: int
    ) -> None:
        """Search for the blocks from ``start`` on, in one tier after another, and for more if they are found.

        ``begun`` are the keys at which no other search need begin.
        """
        options: list[Wish] = []
        needed: set[BlockKey] = set()
        """Blocks without which it is useless to search further."""
        shortest = min(len(keys) for _, _, keys, _ in prompt.values())
        while start < shortest and all(whole[start : start + _STEP].all() for _, _, _, whole in prompt.values()):
            start += _STEP  # all of it is present already
        for kind, who, keys, whole in prompt.values():
            mine = [key for key, here in zip(keys[start:][:_STEP], whole[start:].tolist(), strict=False) if not here]
            options += [(key, who) for key in mine]
            if kind in (Kind.FULL, Kind.MLA):
                needed.update(mine)
        ends = start + _STEP >= shortest

        def ask(number: int, left: list[Wish]) -> None:
            cold, tier = self._tiers[number]

            def found(entries: Sequence[BlobEntry | None]) -> None:
                here = {w: e for w, e in zip(left, entries, strict=True) if e is not None}
                with self._index.lock:  # a caller that asks after these are entered begins behind them
                    begun.update(keys[start + _STEP] for _, _, keys, _ in prompt.values() if start + _STEP < len(keys))
                    self._under_way |= begun
                self._enter(cold, here)
                needed.difference_update(key for key, _ in here)
                rest = [wish for wish in left if wish not in here]
                if rest and number + 1 < len(self._tiers):
                    ask(number + 1, rest)
                elif needed or ends:
                    with self._index.lock:
                        self._under_way -= begun
                else:
                    self._seek(begun, prompt, start + _STEP)

            tier.find(left, found)

        ask(0, options)

    def _enter(self, cold: ColdTier, found: Mapping[Wish, BlobEntry]) -> None:
        """Enter blocks found in a tier into the index."""
        index, now = self._index, self._clock.time()
        new, whose = list[BlockKey](), list[int]()
        with index.lock:
            for (key, who), entry in found.items():
                row, mine = index.row(key), who.fingerprint
                if entry.expiry <= now or (row and index.state[cold.number][row] != ABSENT):
                    continue
                if row and index.identity[row] not in (0, mine):
                    continue  # here the key belongs to another identity
                if not row:
                    row = index.add(key, entry.parent, entry.depth)
                    index.mark[row] = marks([key])[0]
                    index.tenant[row] = 0
                    index.priority[row] = entry.priority
                    index.expire_at([row], entry.expiry)
                index.identity[row] = mine  # the tier has verified it
                index.put(row, cold.number, SEALED, entry.place)
                new.append(key)
                whose.append(mine)
            self._counts[TierCount.BLOCKS_FOUND.of(cold.name)] += len(new)
            many = len(index) > self._known
            if many:
                self._known = sys.maxsize  # one thread is enough for dropping entries
        if new:
            self._feed.publish([BlockStored(cold.name, tuple(new), tuple(whose))])
        if many:
            try:
                self._forget()
            finally:
                self._known = max(_KNOWN, 2 * len(index))

    def _only_shared(self, rows: Rows) -> Mask:
        """Mask of rows that are only in shared storage."""
        numbers = [cold.number for cold, _ in self._tiers]
        here = np.zeros(len(rows), np.bool_)
        for number, state in enumerate(self._index.state):
            if number in numbers:
                here |= state[rows] == SEALED
        for number, state in enumerate(self._index.state):
            if number not in numbers:
                here &= state[rows] == ABSENT
        return here

    def _forget(self) -> None:
        """Drop index entries of blocks that are only in shared storage and were not requested lately. Works in slices:
        call without the lock."""
        index = self._index
        rows = np.arange(index.size)
        rows = rows[self._only_shared(rows)]  # without the lock: each row is checked again
        rows = rows[np.argsort(index.used[rows])][: -(-len(rows) // 2)]
        for some in slices(rows):
            with index.lock:
                free = some[(index.holds[some] == 0) & (index.pins[some] == 0) & self._only_shared(some)]
                events = [event for cold, _ in self._tiers for event in self._strike(cold, free, "forgotten")]
            self._feed.publish([*events])

    def removed(self, tier: str, names: Sequence[str] | None) -> None:
        """Handle the removal of blobs of these names from a tier's storage; None: the names are unknown."""
        index = self._index
        cold = next(cold for cold, _ in self._tiers if cold.name == tier)
        gone = None if names is None else np.array([place_of(name) for name in names], np.int64)
        # A long search, so without the lock: rows that are found are checked again.
        rows = np.flatnonzero(_among(index.place[cold.number][: index.size], gone))
        for some in slices(rows):
            with index.lock:
                left = some[_among(index.place[cold.number][some], gone)]
                events = self._strike(cold, left, "forgotten" if names is None else "evicted")
                if names is not None:
                    self._counts[TierCount.BLOCKS_EVICTED.of(tier)] += sum(len(event.keys) for event in events)
            self._feed.publish([*events])

    def _strike(self, cold: ColdTier, rows: Rows, reason: str) -> list[BlockRemoved]:
        """Record that a tier no longer has these rows; rows in no other tier are removed. Call with the lock held."""
        index = self._index
        rows = rows[index.state[cold.number][rows] == SEALED]
        events = [BlockRemoved(cold.name, index.keys(rows), reason, index.identities(rows))] if len(rows) else []
        if len(rows):
            index.remove_many(rows, cold.number)
            if reason == "evicted":
                gone = np.logical_and.reduce([state[rows] == ABSENT for state in index.state])
                index.absence_log.note(rows[gone], Absence.EVICTED, cold.number, AbsenceCause.BUDGET)
            index.retire_many(rows)
        return events


def _among(places: Rows, gone: Rows | None) -> Mask:
    """Mask of places that were removed; all, if it is unknown which."""
    return np.ones(len(places), np.bool_) if gone is None else np.isin(places, gone)
