"""How blocks are used: the facts on which every policy ranks, in the index's columns.

A use costs the caller a few array operations for a whole prompt: a tick for the order, a count of returns, a *kind*.
Kinds tell blocks apart by what is known at that moment: how often the block came back, how often its prompt's deepest
known block did (which turn of a conversation it is), how long the prompt is beside others, and how much of it is new.
What follows from that in the long run is worked out later, off the caller's path, by ``learn``.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from kvtide.clock import Clock, SystemClock
from kvtide.index.index import Index, Rows, every
from kvtide.plan.ages import Clockwork
from kvtide.plan.history import MANY, Counts, Curves, History, Kinds, Marks, Mask
from kvtide.plan.policy import PRIORITY, Policy

__all__ = ["Uses"]

_TRAITS = (7, 5, 4, 4)
"""How many values each trait of a kind has: returns of the block, turn, length of the prompt, its new blocks."""
_BUCKET = (80 * np.searchsorted([1, 2, 3, 4, 8, 64], np.arange(MANY + 1), side="right")).astype(np.int16)
"""By count of returns: the first trait, as it counts in the number of a kind."""
_NEXT = np.append(np.minimum(np.arange(1, MANY + 2), MANY), 1).astype(np.int16)
"""By count of returns: the next one; after none that is known, the last entry, the first."""
_BACKLOG = 4096
"""Prompts that may wait to be learned from; older ones are forgotten unlearned."""
_BATCH = 8192
"""Blocks after which something new may be concluded."""
_LOOK = 1024
"""Blocks after which policies see what was used: soon, so that one that has begun to lose is left."""
_LASTING = 200_000
"""Blocks after which half of what was learned is forgotten, or more for a large tier."""

_ALL = np.ones(1 << 16, np.bool_)
"""For ``_all``: making one costs as much as several other steps of a use."""

_Note = tuple[Marks, Kinds, Counts, Mask, int]


class Uses:
    """Told of every use of a block, under the index's lock, and tells the policies. ``learn`` is for one thread."""

    def __init__(self, index: Index, clock: Clock | None = None) -> None:
        self._index = index
        self.clockwork = Clockwork(clock or SystemClock())
        self._policies: list[Policy] = []
        self._students: list[Callable[[Curves], None]] = []
        self._tick = 0
        self._time = 0
        """Blocks asked for or stored. Ticks go faster: a long prompt is touched several times while it is stored."""
        self._latest: dict[int, int] = {}
        """By priority: the last tick at which it was the lowest that was touched."""
        self.history = History(_TRAITS, _LASTING)
        self._notes: deque[_Note] = deque(maxlen=_BACKLOG)
        self._length = 0.0
        """The usual length of a prompt, as a power of two."""
        self._fresh = 0
        """Blocks noted since somebody last looked at them."""
        self._unlearned = 0
        """Blocks looked at since something was concluded."""
        self._batch = _BATCH
        self.due = threading.Event()
        """Set when there is enough to learn from."""

    def serve(self, policy: Policy) -> None:
        """Tell a policy of all uses from now on."""
        if policy.learns:
            self._policies.append(policy)

    def teach(self, student: Callable[[Curves], None]) -> None:
        """Call ``student`` with what is known of kinds of blocks, whenever that has changed."""
        self._students.append(student)

    @property
    def learns(self) -> bool:
        """Whether anybody wants ``learn`` to be called."""
        return bool(self._policies or self._students)

    # -- under the index's lock -----------------------------------------------------------------------------

    def touch(self, rows: Rows) -> None:
        """These blocks of one chain, head first, are about to get children."""
        self._order(rows)
        # What is known already has its place; what is new must not be the first to go while its prompt is stored.
        if self.learns and not every(self._index.kind[rows] >= 0):
            self._since(rows)
            if self._students:
                returns = self._index.returns[rows]
                fresh = returns < 0
                returns[fresh] = self.history.returns(self._index.mark[rows[fresh]])
                self._index.kind[rows] = self._kinds(returns, len(rows))
            for policy in self._policies:
                policy.used(rows, None, self._time)

    def asked(self, rows: Rows, length: int) -> None:
        """The first blocks of a prompt of ``length`` blocks were asked for."""
        self._order(rows)
        if self.learns and len(rows):
            returns = _NEXT[self._index.returns[rows]]
            self._index.returns[rows] = returns
            self._note(rows, returns, length, _all(len(rows)))

    def stored(self, rows: Rows) -> None:
        """All blocks of a prompt, as far as they are here, after some were stored."""
        self._order(rows)
        if self.learns and len(rows):
            returns = self._index.returns[rows]
            fresh = returns < 0
            if np.count_nonzero(fresh):
                returns[fresh] = self.history.returns(self._index.mark[rows[fresh]])
                self._index.returns[rows] = returns
            self._note(rows, returns, len(rows), fresh)

    def _order(self, rows: Rows) -> None:
        if len(rows):
            self.clockwork.note(self._tick)
            tick = self._tick = self._tick + len(rows)
            self._index.used[rows] = np.arange(tick, tick - len(rows), -1)
            priorities = self._index.priority[rows]
            self._latest[int(priorities.min()) if np.count_nonzero(priorities) else 0] = tick

    def _note(self, rows: Rows, returns: Counts, length: int, counted: Mask) -> None:
        self._time += len(rows)
        self._length += (math.log2(length) - self._length) * (0.01 if self._length else 1.0)
        kinds = self._kinds(returns, length)
        self._index.kind[rows] = kinds
        self._since(rows)
        # Terms never fall: of a prompt that is stored soon they wait until all of it is known.
        whole = kinds if len(rows) == length else None
        for policy in self._policies:
            policy.used(rows, whole, self._time)
        self._notes.append((self._index.mark[rows], kinds, returns, counted, self._time))
        self._fresh += len(rows)
        if self._fresh >= _LOOK:
            self.due.set()

    def _since(self, rows: Rows) -> None:
        """These blocks of one chain, head first, are used now: the deeper, the earlier."""
        self._index.since[rows] = np.arange(self._time, self._time - len(rows), -1)

    def _kinds(self, returns: Counts, length: int) -> Kinds:
        """What blocks of a prompt of ``length`` blocks are, that came back so often."""
        known = int(np.count_nonzero(returns))
        turn = min(int(returns[known - 1]), 4) if known > 1 else 0
        size = min(max(int((math.log2(length) - self._length) / 1.5 + 2), 0), 3)
        new = min(((length - known + 1).bit_length() - 1) // 2, 3)
        return _BUCKET[returns] + np.int16(turn * 16 + size * 4 + new)

    def now(self) -> int:
        """A mark in time, for ``overtaken``."""
        return self._tick

    def overtaken(self, since: int, score: int) -> bool:
        """Whether a block of lower priority than ``score`` has was touched after ``since``."""
        return any(tick > since and priority < score >> PRIORITY for priority, tick in self._latest.items())

    def restore(self, rows: Rows, parents: Rows, sequences: Rows) -> None:
        """After a restart: rank by order of writing, no block older or of lower priority than its descendants.

        ``parents`` holds, for each row, the position of its parent in ``rows``, or -1.
        """
        used = np.argsort(np.argsort(sequences)).astype(np.int64)
        depth, priority = self._index.depth[rows], self._index.priority[rows]
        order = np.argsort(depth)[::-1]
        borders = np.flatnonzero(np.diff(depth[order])) + 1
        for level in np.split(order, borders):
            child = level[parents[level] >= 0]
            np.maximum.at(used, parents[child], used[child])
            np.maximum.at(priority, parents[child], priority[child])
        # Equal ticks, then: the deeper one first.
        ranked = np.lexsort((-depth.astype(np.int64), used))
        ticks = np.empty(len(rows), np.int64)
        ticks[ranked] = np.arange(1, len(rows) + 1)
        self._index.used[rows] = self._tick + ticks
        self._index.since[rows] = self._time + ticks
        for until in self._index.until.values():
            until[rows] = self._time + ticks
        self._index.priority[rows] = priority
        self._tick += len(rows)
        self._time += len(rows)

    # -- off the callers' path, without the lock --------------------------------------------------------------

    def catch_up(self) -> None:
        """Let the policies see what was noted; and learn from it, if it is enough."""
        self._look()
        if self._unlearned >= self._batch:
            self._conclude()

    def learn(self) -> None:
        """Learn from what was noted."""
        self._look()
        self._conclude()

    def _look(self) -> None:
        self.due.clear()
        fresh, self._fresh = self._fresh, 0
        self._unlearned += fresh
        while self._notes:
            if not len(self._notes) % 16:
                time.sleep(0)  # let those pass who have more urgent things to do
            marks, kinds, returns, counted, now = self._notes.popleft()
            self.history.see(marks, kinds, returns, counted, now)
            for policy in self._policies:
                policy.watch(marks, kinds, counted, now)

    def _conclude(self) -> None:
        room = max((policy.room() for policy in self._policies), default=0)
        self.history.fit(room)
        self.history.lasting = max(_LASTING, 16 * room)
        self._batch = max(_BATCH, min(room // 4, 2 * _BATCH))
        curves = self.history.curves()
        for policy in self._policies:
            policy.learn(curves)
        for student in self._students:
            student(curves)
        self.history.fade(self._unlearned)
        self._unlearned = 0


def _all(count: int) -> Mask:
    return _ALL[:count] if count <= len(_ALL) else np.ones(count, np.bool_)
