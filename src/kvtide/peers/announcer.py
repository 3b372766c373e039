"""Tells the directory which blocks this node has in its own memory and on its own disk.

It follows the store's feed, but an event only says *that* something happened to a block. What is published is what the
index says at that moment: the block is there, or it is not. So it does not matter in which order events arrive, whether
some were merged, or whether a block left one tier and is still in the other. An event comes after the index has
changed, so the last event about a block leads to its last state.

**From the beginning.** Under a new epoch nothing of this node is in the directory, so all rows of the index are
visited, in slices, and what is there is published. Events are handled between the slices. That is also what happens
when the backlog of events was full: since nobody knows then which blocks were removed, the node gives up its epoch,
which withdraws everything at once, and joins under a new one. The same visit is made every hour under the old epoch,
for entries that Valkey has evicted or replaced.

**What is published** is what ``kvtide.peers.blocks`` would give to a peer: complete in DRAM or on NVMe, not expired, of
a known owner. Reserved shares are partitions of their own, and only the main one is announced.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtide import forks
from kvtide.block import BlockKey
from kvtide.clock import Clock, SystemClock, TurnedClock
from kvtide.events import Backlog, BlockRemoved, Event, EventsLost, Feed
from kvtide.index.index import DRAM, SEALED, Index, Mask, Rows
from kvtide.index.work_slices import SLICE, rest
from kvtide.peers.membership import Membership
from kvtide.store.partition import NVME
from kvtide.store.store import Store
from kvtide.tiers.peers.directory import BlockDirectory

__all__ = ["Announcer", "AnnouncerStatistics"]

log = logging.getLogger("kvtide.peers")

_BATCH = 4096
"""Blocks that are published with one call: each partition of the directory gets about 256."""
_GATHER = 0.05
"""Seconds that events are gathered before they are published."""
_RETRY = 1.0
"""Seconds after which a call that failed is made again."""
_REFRESH = 3600.0
"""Seconds between two visits of all rows."""
_LONGEST = 3600.0
"""Maximum sleep in seconds."""


@dataclass(frozen=True, slots=True)
class AnnouncerStatistics:
    """What an announcer did."""

    stored: int
    """Blocks published, each time counted."""
    removed: int
    """Blocks withdrawn."""
    rebuilds: int
    """How often everything was published anew, under a new epoch."""
    rows_left: int
    """Rows of the index that are still to be visited."""
    lost: int
    """How often the backlog of events was full."""
    failures: int
    """Calls that failed because Valkey did not answer, or refused."""


class Announcer:
    """Publishes the blocks of one index. Its follower of the feed never blocks; a thread publishes."""

    def __init__(
        self,
        index: Index,
        feed: Feed,
        directory: BlockDirectory,
        membership: Membership,
        *,
        tiers: Sequence[tuple[str, int]] = (("dram", DRAM), ("nvme", NVME)),
        clock: Clock | None = None,
        backlog: int = 100_000,
    ) -> None:
        """``tiers``: names and numbers of the node's own tiers. ``backlog``: blocks whose events may wait."""
        self._index = index
        self._directory = directory
        self._membership = membership
        self._names = {name for name, _ in tiers}
        self._tiers = [number for _, number in tiers]
        self._clock = clock or SystemClock()
        self._most = backlog
        self._backlog = Backlog(backlog)
        self._dirty: dict[BlockKey, bool] = {}
        """Blocks with news, taken from the backlog, and whether one was removed from a tier."""
        self._epoch = 0
        """Under which blocks are published; 0: none yet."""
        self._given_up = 0
        """An epoch under which nothing is published any more."""
        self._next_row = self._stop_row = 0
        """Rows that are to be visited."""
        self._refresh_due = math.inf
        self._stored = self._removed = self._rebuilds = self._lost = self._failures = 0
        self._failed = False
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._origin = forks.here
        self._stepping = threading.Lock()
        self._thread: threading.Thread | None = None
        if isinstance(self._clock, TurnedClock):
            self._clock.follow(self._wake.set)
        self._leave = [membership.on_change(self._wake.set), feed.follow(self._heard)]

    @classmethod
    def of(cls, store: Store, directory: BlockDirectory, membership: Membership) -> Announcer:
        """One for the blocks of a store that are not in reserved shares."""
        tiers = [("dram", DRAM)] if store.main.nvme is None else [("dram", DRAM), ("nvme", NVME)]
        return cls(store.main.index, store.feed, directory, membership, tiers=tiers, clock=store.clock)

    def __repr__(self) -> str:
        return f"<Announcer, epoch {self._epoch}>"

    def statistics(self) -> AnnouncerStatistics:
        return AnnouncerStatistics(
            self._stored,
            self._removed,
            self._rebuilds,
            max(0, self._stop_row - self._next_row),
            self._lost,
            self._failures,
        )

    def _heard(self, event: Event) -> None:
        ours = isinstance(event, EventsLost) or event.tier in self._names
        if ours and self._backlog.put(event):
            self._wake.set()

    # -- the thread ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="kvtide-announcer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wake.clear()
            left = self.step()
            if self._closed.is_set():
                return
            if self._failed:
                self._closed.wait(min(left, _RETRY))
            elif left > 0:
                self._wake.wait(min(left, _LONGEST))
                self._closed.wait(_GATHER)
            else:
                rest()

    def step(self) -> float:
        """What the thread does: publish one batch. Returns the seconds until the next is due; infinity if there is none
        until an event."""
        with self._stepping:
            own = self._membership.own
            if self._closed.is_set() or self._origin is not forks.here or own is None or own.epoch == self._given_up:
                return math.inf
            if own.epoch != self._epoch:
                self._begin(own.epoch)
            now = self._clock.monotonic()
            if now >= self._refresh_due:
                self._visit_all(now)
            if not self._gather():
                self._give_up()
                return math.inf
            stored, removed, next_row = self._batch()
            if not stored and not removed and next_row >= self._stop_row:
                self._dirty.clear()
                self._next_row = next_row
                return max(0.0, self._refresh_due - now)
            try:
                good = self._directory.publish(own, stored, removed) if stored or removed else True
            except OSError as e:
                self._failures += 1
                if not self._failed:
                    log.warning("blocks of this node cannot be published: %s; it is tried again", e)
                self._failed = True
                return _RETRY
            self._failed = False
            if not good:
                self._give_up()
                return math.inf
            self._dirty.clear()
            self._next_row = next_row
            self._stored += len(stored)
            self._removed += len(removed)
            return 0.0

    def _begin(self, epoch: int) -> None:
        """Publish everything under a new epoch: events of before do not matter any more."""
        self._epoch = epoch
        self._rebuilds += 1
        self._dirty.clear()
        while self._backlog.take() is not None:
            pass
        self._visit_all(self._clock.monotonic())

    def _visit_all(self, now: float) -> None:
        self._next_row, self._stop_row = 1, self._index.size
        self._refresh_due = now + _REFRESH

    def _give_up(self) -> None:
        """Nothing that was published under this epoch can be relied on."""
        self._given_up = self._epoch
        self._membership.rejoin()

    # -- what is to be published --------------------------------------------------------------------------

    def _gather(self) -> bool:
        """Take events from the backlog. False if some were lost."""
        while len(self._dirty) < _BATCH and (event := self._backlog.take()) is not None:
            if isinstance(event, EventsLost):
                self._lost += 1
                return False
            removed = isinstance(event, BlockRemoved)
            for key in event.keys:
                self._dirty[key] = removed or self._dirty.get(key, False)
        return True

    def _batch(self) -> tuple[list[BlockKey], list[BlockKey], int]:
        """Blocks that are there, blocks that are not there any more, and the row that is visited next."""
        keys = list(self._dirty)
        stored: list[BlockKey] = []
        removed: list[BlockKey] = []
        for start in range(0, len(keys), SLICE):
            part = keys[start : start + SLICE]
            if start:
                rest()
            with self._index.lock:
                there = self._there(self._index.rows(part)).tolist()
            stored += [key for key, here in zip(part, there, strict=True) if here]
            removed += [key for key, here in zip(part, there, strict=True) if not here and self._dirty[key]]
        row = self._next_row
        news = set(removed)
        while row < self._stop_row and len(stored) < _BATCH:
            rows = np.arange(row, min(row + SLICE, self._stop_row))
            if row > self._next_row:
                rest()
            with self._index.lock:
                found = self._visible(rows[self._there(rows)])
            # What has come back since it was looked at above has an event, and is published with that.
            stored += [key for key in found if key not in news]
            row += len(rows)
        return stored, removed, row

    def _visible(self, rows: Rows) -> Sequence[BlockKey]:
        """The keys of rows that are found by them: one that was dropped may still be held. Call with the lock held."""
        keys = self._index.keys(rows)
        same = (self._index.rows(keys) == rows).tolist()
        return [key for key, mine in zip(keys, same, strict=True) if mine]

    def _there(self, rows: Rows) -> Mask:
        """Mask of rows that may be published. Call with the index lock held."""
        index = self._index
        there: Mask = np.zeros(len(rows), np.bool_)
        for tier in self._tiers:
            there |= index.state[tier][rows] == SEALED
        there &= index.identity[rows] != 0
        if index.mortal:
            there &= index.expiry[rows] > self._clock.time()
        there[rows == 0] = False
        return there

    def close(self) -> None:
        """End the thread, and stop following. What was published stays until the member leaves: close the membership
        after this. A second call, or one in a forked child, does nothing."""
        if self._origin is not forks.here:
            return
        self._closed.set()
        for leave in self._leave:
            leave()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
