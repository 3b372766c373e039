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

**When all nodes publish everything at once**, because they have all joined again, Valkey is too busy to answer. Each
pauses for as long as its last publish took, publishes fewer blocks at a time after a timeout, and tries again later and
later.

**What is published** is what ``kvtide.peers.blocks`` would give to a peer: complete in DRAM or on NVMe, not expired, of
a known owner. Reserved shares are partitions of their own, and only the main one is announced.
"""

from __future__ import annotations

import errno
import logging
import math
import random
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
_LEAST = 64
"""The smallest batch, after calls that were not answered in time."""
_GATHER = 0.05
"""Seconds that events are gathered before they are published."""
_RETRY = 1.0
"""Seconds after which a call that failed is made again, the first time."""
_LONGEST_RETRY = 15.0
"""The longest such time: it doubles with every failure."""
_SLICES = 64
"""Slices of rows that one step visits at most."""
_REFRESH = 3600.0
"""Seconds between two visits of all rows, at most: they begin at different times on different nodes."""
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
    """Steps that failed: Valkey did not answer, refused, or answered nonsense."""


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
        self._to_store: list[BlockKey] = []
        self._to_remove: list[BlockKey] = []
        """The batch that is being published, as the index had it: news of its blocks are published after it."""
        self._row_after = 0
        """The next row, when the batch has been published."""
        self._published = False
        """Whether the last step published something."""
        self._size = _BATCH
        self._in_a_row = 0
        """Failures since something was stored."""
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

    @property
    def _to_publish(self) -> bool:
        """Whether there is more to publish, or may be."""
        return self._published or bool(self._to_store or self._to_remove) or self._next_row < self._stop_row

    # -- the thread ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        thread = threading.Thread(target=self._run, name="kvtide-announcer", daemon=True)
        thread.start()
        self._thread = thread

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wake.clear()
            left = self.step()
            if self._closed.is_set():
                return
            if self._failed or self._to_publish:
                # A pause as long as the last publish took: a server that all nodes publish to has half of its time
                # for other things, leases among them.
                self._closed.wait(min(left, _LONGEST_RETRY))
                rest()
            elif left > 0:
                self._wake.wait(min(left, _LONGEST))
                self._closed.wait(_GATHER)
            else:
                rest()

    def step(self) -> float:
        """What the thread does: publish one batch. Returns the seconds until the next is due, unless an event comes
        before; infinity if it is closed."""
        with self._stepping:
            try:
                return self._step()
            except Exception as e:  # noqa: BLE001 - whatever it is: without this thread nothing is announced any more
                return self._fail(e)

    def _fail(self, error: Exception) -> float:
        """Returns the seconds until the next attempt: longer each time, and not the same for all nodes, which fail at
        the same time if the server is too busy."""
        self._failures += 1
        if not self._in_a_row:
            log.warning(
                "blocks of this node cannot be announced in the directory: %s: %s; it is tried again",
                self._directory.where,
                getattr(error, "strerror", None) or repr(error),
                exc_info=not isinstance(error, OSError),
            )
        self._failed = True
        delay = min(_RETRY * (1 << self._in_a_row), _LONGEST_RETRY) * random.uniform(0.5, 1.0)
        self._in_a_row = min(self._in_a_row + 1, 16)
        if isinstance(error, TimeoutError):
            self._size = max(_LEAST, self._size // 2)
        elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
            # A server that is full still removes. So go on to the next removals; the next visit of all rows publishes
            # what there was no room for.
            self._to_store = []
        return delay

    def _step(self) -> float:
        own = self._membership.own
        if self._closed.is_set() or self._origin is not forks.here:
            return math.inf
        if own is None or own.epoch == self._given_up:
            # The backlog keeps its events, so no further one wakes the thread; and nobody tells when a lease that was
            # believed to have ended is renewed after all.
            return _RETRY
        if own.epoch != self._epoch:
            self._begin(own.epoch)
        now = self._clock.monotonic()
        if not self._to_store and not self._to_remove:
            if now >= self._refresh_due:
                self._visit_all(now)
            if not self._gather():
                self._give_up()
                return _RETRY
            self._to_store, self._to_remove, self._row_after = self._batch()
            self._dirty.clear()
        if self._closed.is_set():
            return math.inf
        removed = self._to_remove[: self._size]
        stored = self._to_store[: self._size - len(removed)]
        took = 0.0
        self._published = bool(stored or removed)
        if self._published:
            if not self._directory.publish(own, stored, removed):
                self._give_up()
                return _RETRY
            took = self._clock.monotonic() - now
            self._size = min(_BATCH, self._size + _BATCH // 16)
            self._in_a_row = 0 if stored else self._in_a_row  # a full server removes, and that is no success yet
            self._stored += len(stored)
            self._removed += len(removed)
            del self._to_store[: len(stored)], self._to_remove[: len(removed)]
        self._failed = False
        if self._to_store or self._to_remove:
            return took
        self._next_row = self._row_after
        if self._published or self._next_row < self._stop_row:
            return took
        return max(0.0, self._refresh_due - now)

    def _begin(self, epoch: int) -> None:
        """Publish everything under a new epoch: events of before do not matter any more."""
        self._epoch = epoch
        self._rebuilds += 1
        self._dirty.clear()
        self._to_store, self._to_remove = [], []
        while self._backlog.take() is not None:
            pass
        self._visit_all(self._clock.monotonic())

    def _visit_all(self, now: float) -> None:
        self._next_row, self._stop_row = 1, self._index.size
        self._refresh_due = now + _REFRESH * random.uniform(0.75, 1.0)

    def _give_up(self) -> None:
        """Nothing that was published under this epoch can be relied on."""
        self._given_up = self._epoch
        self._membership.rejoin(self._epoch)

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
        most = row + _SLICES * SLICE
        while row < min(self._stop_row, most) and len(stored) < _BATCH and not self._closed.is_set():
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
