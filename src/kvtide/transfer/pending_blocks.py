"""Finds blocks of a prompt that may soon be available: being written here, or written by others.

The index knows what this process has written or found, not what others wrote. When a prompt continues beyond the known
blocks, the rest is searched for in the background, and the caller is told to ask again: first at all other nodes, in
one round trip to each in parallel, and then, for what none of them has, in one shared storage after another. Blocks
that are found are entered into the index, and are then like any block in a colder tier.

A prompt that is stored nowhere must cost almost nothing. So only a few blocks are searched for at a time, because
without the first ones the others are useless (nodes answer from memory, and are asked for more); equal searches are
merged; and a tier remembers for a moment which blocks it lacks (``Searched.absent``). And a caller does not wait for a
search longer than it would take to compute what is searched for: one slow node or storage, of which the others have
long said that they have nothing, must not cost a prompt more than it could save. The search goes on, for those who ask
later.

Entries for the tiers of others may be dropped from the index at any time, because they can be found again. That keeps
the index small, however large the storage is. Entries for blobs that were removed are dropped as soon as this process
is notified: no caller then tries to read them, and followers of events learn of it."""

from __future__ import annotations

import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat

import numpy as np

from kvtide.block import BlockKey, Kind, Layout
from kvtide.clock import Clock
from kvtide.counts import TierCount
from kvtide.events import BlockRemoved, BlockStored, Feed
from kvtide.index.absence_log import Absence, AbsenceCause
from kvtide.index.index import ABSENT, DRAM, PENDING, SEALED, Index, Mask, Rows, marks
from kvtide.index.work_slices import slices
from kvtide.plan.prefill import PrefillCost
from kvtide.tiers.base import FoundBlock, Identity, Searched, Wish
from kvtide.tiers.shared.tier import place_of
from kvtide.transfer.cold_tier import ColdTier
from kvtide.transfer.search import BlockSearch, EveryTier

__all__ = ["PendingBlocks"]

_STEP, _WIDE = 32, 512
"""Blocks of a prompt that are searched for at a time, in shared storage and at other nodes."""
_SHORTEST = 0.05
"""Seconds that a caller waits for a search, where computing takes less: a busy host delays every search by some."""
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
        nodes: BlockSearch | None = None,
    ) -> None:
        """``nodes`` searches in other nodes; None: all of them are asked."""
        self._index = index
        self._tiers = [cold for cold in colds if isinstance(cold.tier, Searched)]
        others = [cold for cold in self._tiers if cold.read_only]
        self._wide = [nodes or EveryTier(others)] if others else []
        self._stages = self._wide + [EveryTier([cold]) for cold in self._tiers if not cold.read_only]
        """The searches to make, one after another."""
        self._step = _WIDE if others else _STEP
        self._clock = clock
        self._feed = feed
        self._counts = counts
        self._under_way: dict[BlockKey, float] = {}
        """Searches under way, by the keys at which they begin, with the time when they began."""
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
        prefill: PrefillCost | None = None,
    ) -> bool:
        """Whether more of a prompt than its first ``blocks`` blocks may soon be available. Call with the lock held.

        ``whole`` has the mask of present blocks of each group, and ``usable`` the mask of usable prefix lengths.
        ``prefill``: what it costs the caller to compute the rest, if that is known.
        """
        lacking = [g.name for g in layout.groups if g.required and not whole[g.name][blocks]]
        if not lacking:
            return False
        if all(self._index.state[DRAM][rows[name][blocks]] == PENDING for name in lacking):
            return True
        if not self._tiers or usable[blocks + 1 :].any():
            return False
        first, who = keys(layout.group(lacking[0]).suffix)[blocks], identities[lacking[0]]
        row = self._index.row(first)
        if row and self._index.identity[row] not in (0, who.fingerprint):
            return False  # here the key belongs to another identity: what is found elsewhere could not be entered
        if first not in self._under_way and not all(stage.absent(first, who) for stage in self._stages):
            options = {g.name: (g.kind, identities[g.name], keys(g.suffix), whole[g.name]) for g in layout.groups}
            begun = {first}
            try:
                self._under_way[first] = self._clock.monotonic()
                self._seek(begun, options, blocks)
            except BaseException:
                # The search may not be running: later callers must not believe that it is.
                self._end(begun)
                raise
        if (began := self._under_way.get(first)) is None or prefill is None:
            return began is not None
        tokens, count = layout.block_tokens, len(keys(layout.group(lacking[0]).suffix))
        return self._clock.monotonic() - began < max(_SHORTEST, prefill.seconds(blocks * tokens, count * tokens))

    def _end(self, begun: Iterable[BlockKey]) -> None:
        """Searches that began at these keys have ended. Call with the lock held. In one call of C code: an interrupt
        must not leave some of them, for which callers would wait."""
        deque(map(self._under_way.pop, begun, repeat(None)), maxlen=0)

    def _seek(
        self, begun: set[BlockKey], prompt: dict[str, tuple[Kind, Identity, list[BlockKey], Mask]], start: int
    ) -> None:
        """Search for the blocks from ``start`` on, in one stage after another, and for more if they are found.

        ``begun`` are the keys at which no other search need begin.
        """
        shortest = min(len(keys) for _, _, keys, _ in prompt.values())
        while start < shortest and all(whole[start : start + _STEP].all() for _, _, _, whole in prompt.values()):
            start += _STEP  # all of it is present already
        stop = min(start + self._step, shortest)
        options: dict[Wish, int] = {}
        """What to search for, with the number of the block in the prompt."""
        needed: dict[BlockKey, int] = {}
        """Blocks without which it is useless to search further."""
        for kind, who, keys, whole in prompt.values():
            here = whole[start:stop].tolist()
            mine = {keys[n]: n for n, present in enumerate(here, start) if not present}
            options |= {(key, who): n for key, n in mine.items()}
            if kind in (Kind.FULL, Kind.MLA):
                needed |= mine
        with self._index.lock:  # a caller that asks when some are entered begins behind them
            begun.update(key for _, _, keys, _ in prompt.values() for key in keys[start : stop + 1])
            self._under_way |= dict.fromkeys(begun - self._under_way.keys(), self._clock.monotonic())

        def first_of(missing: Mapping[Wish, int]) -> int:
            return min((needed[key] for key, _ in missing if key in needed), default=stop)

        def ask(stage: int, left: dict[Wish, int], reach: int) -> None:
            """``reach``: all stages before were asked for the blocks up to it, as far as these were not found."""
            if stage == len(self._stages) or not left:
                go_on(first_of(left), reach)
                return
            search = self._stages[stage]
            if search not in self._wide:
                reach = min(reach, first_of(left) + _STEP)
            wanted = [wish for wish, n in left.items() if n < reach]
            lock = threading.Lock()

            def found(cold: ColdTier, here: Mapping[Wish, FoundBlock]) -> None:
                self.enter(cold, here)
                with lock:
                    for wish in here:
                        left.pop(wish, None)

            search.find(wanted, found, lambda: ask(stage + 1, left, reach))

        def go_on(gap: int, reach: int) -> None:
            """Search from the first block that was not found, unless it was asked for everywhere."""
            if reach <= gap < shortest:
                self._seek(begun, prompt, gap)
            else:
                with self._index.lock:
                    self._end(begun)

        ask(0, options, stop)

    def enter(self, cold: ColdTier, found: Mapping[Wish, FoundBlock]) -> None:
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
        numbers = [cold.number for cold in self._tiers]
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
                events = [event for cold in self._tiers for event in self._strike(cold, free, "forgotten")]
            self._feed.publish([*events])

    def removed(self, tier: str, names: Sequence[str] | None) -> None:
        """Handle the removal of blobs of these names from a tier's storage; None: the names are unknown, or the tier is
        away."""
        index = self._index
        cold = next(cold for cold in self._tiers if cold.name == tier)
        gone = None if names is None else np.array([place_of(name) for name in names], np.int64)
        # A long search, so without the lock: rows that are found are checked again.
        there = index.state[cold.number][: index.size] == SEALED
        rows = np.flatnonzero(there & _among(index.place[cold.number][: len(there)], gone))
        for some in slices(rows):
            with index.lock:
                left = some[_among(index.place[cold.number][some], gone)]
                events = self._strike(cold, left, "forgotten" if names is None else "evicted")
                if names is not None:
                    self._counts[TierCount.BLOCKS_EVICTED.of(tier)] += sum(len(event.keys) for event in events)
            self._feed.publish([*events])

    def release(self, tier: str, *, promised: bool) -> bool:
        """Forget what was found in a tier, unless a caller was promised some of it: holds a match of it, and memory
        lacks it. ``promised``: whether all of it counts so, because it was found just now. Returns whether all is
        forgotten. Nothing may be found there meanwhile."""
        index = self._index
        cold = next(cold for cold in self._tiers if cold.name == tier)
        rows = np.flatnonzero(
            index.state[cold.number][: index.size] == SEALED
        )  # without the lock: rows that are found are checked again
        for strike in (False, True):
            for some in slices(rows):
                events: list[BlockRemoved] = []
                with index.lock:
                    state, memory = index.state[cold.number], index.state[DRAM]
                    unread = some[(state[some] == SEALED) & (memory[some] != SEALED)]
                    if len(unread) and (promised or index.holds[unread].any()):
                        return False
                    if strike:
                        events = self._strike(cold, some, "forgotten")
                self._feed.publish([*events])
        return True

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
