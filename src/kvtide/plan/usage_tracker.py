"""Tracks the use of blocks: the facts on which every policy ranks, in the index's columns.

A use costs the caller a few array operations for a whole prompt: a tick for the order, a count of returns, a *kind*.
Kinds distinguish blocks by what is known at that moment: how often the block returned, how often its prompt's deepest
known block did (which turn of a conversation it is), how long the prompt is compared to others, how many of its blocks
are new, and what the caller said about its end (``expect``). ``learn`` derives the long-term statistics from that
later, off the caller's path.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvtide.clock import Clock, SystemClock
from kvtide.index.index import DRAM, Index, Rows, every
from kvtide.plan.eviction_ages import TickClock
from kvtide.plan.expected_use import LONGEST, ExpectedUse
from kvtide.plan.history import MANY, Curves, History
from kvtide.plan.policy import PRIORITY, Policy
from kvtide.plan.recorded_uses import Counts, Kinds, Mask, Use, Uses

__all__ = ["TURNS", "Turn", "UsageTracker"]

Turn = Literal["tool", "end"]
"""How a turn ended: in a tool call, whose result comes back soon, or with an answer to a user."""
TURNS: Mapping[str, Turn] = {"tool": "tool", "end": "end"}
"""Turns by name; any other name says nothing."""

_RETURNS = 7
"""Number of classes for the returns of a block."""
_COARSE = np.array([0, 1, 1, 1, 2, 2, 2])
"""A coarser classification, for blocks whose callers said how the turn ended: there are fewer of these, and each kind
costs time in every learning step."""
_HINTS: Mapping[Turn, int] = {"tool": 0, "end": 1}
_ENDS = 3
"""Classes of returns for each end of a turn."""
_TRAITS = (_RETURNS + _ENDS * len(_HINTS), 5, 4, 4)
"""Number of values of each trait of a kind: returns of the block (again for each end of a turn), turn, length of the
prompt, its new blocks."""
_OTHERS = 80
"""Number of combinations of the other traits."""
_WITHOUT_HINT = _RETURNS * _OTHERS
"""Kinds from this number on are those whose callers said how the turn ended."""
_BUCKET = (_OTHERS * np.searchsorted([1, 2, 3, 4, 8, 64], np.arange(MANY + 1), side="right")).astype(np.int16)
"""By number of returns: the first trait's contribution to the number of a kind."""
_NEXT = np.append(np.minimum(np.arange(1, MANY + 2), MANY), 1).astype(np.int16)
"""By number of returns: the next number; the last entry, for an unknown number, is 1."""
_RANK = (1 << PRIORITY) - 1
"""The part of a score that is not the priority."""
_HABIT, _NEARLY = 0.5, 0.95
"""The share of a kind's blocks that must get hints for these to be waited for, and the share of those hints to wait
for."""
_BACKLOG = 4096
"""Prompts that may wait to be learned from; older ones are discarded."""
_WAITING = 1 << 18
"""Blocks of prompts that may wait to be learned from, 4 MiB. If more wait, the learning thread gets no processor time,
and all of them are discarded."""
_BATCH = 8192
"""Blocks after which new conclusions are drawn."""
_LOOK = 1024
"""Blocks after which policies see the recent uses: soon, so that a policy that begins to lose is replaced. Also the
number of blocks at which the uses that are processed together end."""
_TOGETHER = 64
"""Uses that are processed together, at most."""
_LASTING = 200_000
"""Blocks after which learned counts are halved; more for a large tier."""

_ALL = np.ones(1 << 16, np.bool_)
"""For ``_all``: creating such an array costs as much as several other steps of a use."""

Numbers = npt.NDArray[np.float64]


class UsageTracker:
    """Records every use of a block, under the index lock, and informs the policies. ``learn`` is for one thread."""

    def __init__(self, index: Index, clock: Clock | None = None) -> None:
        self._index = index
        self.tick_clock = TickClock(clock or SystemClock())
        self._policies: list[Policy] = []
        self._students: list[Callable[[Curves], None]] = []
        self._tick = 0
        self._time = 0
        """Blocks requested or stored. Ticks advance faster: a long prompt is touched several times while it is
        stored."""
        self._latest: dict[int, int] = {}
        """By priority: the last tick at which it was the lowest priority touched."""
        self._ahead = ExpectedUse()
        """For the ticks of last uses."""
        self._terms_ahead: dict[int, ExpectedUse] = {}
        """By tier, for the terms of its blocks."""
        self.history = History(_TRAITS, _LASTING)
        self._recorded: deque[Use] = deque(maxlen=_BACKLOG)
        self._hinted = False
        """Whether any caller has said how a turn ended."""
        self._length = 0.0
        """The usual length of a prompt, as a power of two."""
        self._fresh = 0
        """Blocks recorded since the records were last processed."""
        self._unlearned = 0
        """Blocks processed since conclusions were last drawn."""
        self._batch = _BATCH
        self.due = threading.Event()
        """Set when there is enough to learn from."""
        self.stopped = False
        """Whether nothing more is to be learned, because the store is being closed."""

    def serve(self, policy: Policy) -> None:
        """Inform a policy of all uses from now on."""
        if policy.learns:
            self._policies.append(policy)

    def teach(self, student: Callable[[Curves], None]) -> None:
        """Call ``student`` with the statistics of kinds of blocks, whenever these change."""
        self._students.append(student)

    @property
    def learns(self) -> bool:
        """Whether ``learn`` is needed."""
        return bool(self._policies or self._students)

    # -- with the index lock held ---------------------------------------------------------------------------

    def touch(self, rows: Rows) -> None:
        """Record that these blocks of one chain, first block first, are about to get children."""
        self._order(rows)
        # Known blocks have their rank; new ones must not be evicted first while their prompt is being stored.
        if self.learns and not every(self._index.kind[rows] >= 0):
            self._since(rows, self._time)
            if self._students:
                returns = self._index.returns[rows]
                fresh = returns < 0
                returns[fresh] = self.history.returns(self._index.mark[rows[fresh]])
                self._index.kind[rows] = self._kinds(returns, len(rows))
            for policy in self._policies:
                policy.used(rows, None, self._time)

    def asked(self, rows: Rows, length: int) -> None:
        """Record that the first blocks of a prompt of ``length`` blocks were requested."""
        self._order(rows)
        if self.learns and len(rows):
            returns = _NEXT[self._index.returns[rows]]
            self._index.returns[rows] = returns
            self._note(rows, returns, length, _all(len(rows)))

    def stored(self, rows: Rows) -> None:
        """Record a store; ``rows`` are all blocks of the prompt that are present."""
        self._order(rows)
        if self.learns and len(rows):
            returns = self._index.returns[rows]
            fresh = returns < 0
            if np.count_nonzero(fresh):
                returns[fresh] = self.history.returns(self._index.mark[rows[fresh]])
                self._index.returns[rows] = returns
            # Other writers may write the last blocks of a prompt, and finish only after the caller's hint.
            last = int(self._index.kind[rows[-1]])
            if last < _WITHOUT_HINT:
                self._note(rows, returns, len(rows), fresh)
            else:
                end = (last // _OTHERS - _RETURNS) // _ENDS
                self._note(rows, returns, len(rows), ~_all(len(rows)), end)

    def _order(self, rows: Rows) -> None:
        if len(rows):
            self.tick_clock.note(self._tick)
            tick = self._tick = self._tick + len(rows)
            ticks = np.arange(tick, tick - len(rows), -1)
            if self._ahead.latest > tick - len(rows):  # otherwise no block ranks above the ones used now
                ticks = np.maximum(ticks, self._index.used[rows])
            self._index.used[rows] = ticks
            priorities = self._index.priority[rows]
            self._latest[int(priorities.min()) if np.count_nonzero(priorities) else 0] = tick

    def _note(self, rows: Rows, returns: Counts, length: int, counted: Mask, end: int = -1) -> None:
        self._time += len(rows)
        self._length += (math.log2(length) - self._length) * (0.01 if self._length else 1.0)
        kinds = self._kinds(returns, length)
        if end >= 0:
            kinds = _with_hint(kinds, end)
        self._index.kind[rows] = kinds
        self._since(rows, self._time)
        # Terms never decrease: for a prompt that is about to be stored, they are set when all of it is known.
        whole = kinds if len(rows) == length else None
        for policy in self._policies:
            policy.used(rows, whole, self._time)
        noted = _all(len(rows))
        self._record(Use(self._index.mark[rows], kinds, returns, counted, counted, noted, self._time))
        self._fresh += len(rows)
        if self._fresh >= _LOOK:
            self.due.set()

    def _record(self, use: Use) -> None:
        if self._fresh > _WAITING:
            self._recorded.clear()
            self._fresh = 0
        self._recorded.append(use)

    def _since(self, rows: Rows, time: int) -> None:
        """Set the time of use, now or expected, of blocks of one chain, first block first: deeper blocks get an earlier
        time."""
        self._index.since[rows] = np.maximum(self._index.since[rows], np.arange(time, time - len(rows), -1))

    def _kinds(self, returns: Counts, length: int) -> Kinds:
        """The kinds of blocks of a prompt of ``length`` blocks, given their numbers of returns."""
        known = int(np.count_nonzero(returns))
        turn = min(int(returns[known - 1]), 4) if known > 1 else 0
        size = min(max(int((math.log2(length) - self._length) / 1.5 + 2), 0), 3)
        new = min(((length - known + 1).bit_length() - 1) // 2, 3)
        return _BUCKET[returns] + np.int16(turn * 16 + size * 4 + new)

    def expect(self, rows: Rows, turn: Turn | None, returns_in: float | None, rooms: Mapping[int, int]) -> bool:
        """Record how the turn of a chain (first block first) ended, and in how many seconds it returns. ``rooms``: the
        number of blocks that each tier holds, for tiers that keep expected blocks. Returns whether DRAM keeps some
        until then."""
        if turn is not None and self.learns and len(rows):
            self._tell_apart(rows, turn)
        return returns_in is not None and bool(len(rows)) and self._keep(rows, returns_in, rooms)

    def _tell_apart(self, rows: Rows, turn: Turn) -> None:
        """Assign blocks that were just used to the kinds for this end of a turn. Once for each use.

        Terms never decrease, and when a prompt is stored, it is unknown how its turn will end. So for the kind that it
        has until then, the hint counts as a return: that kind is worth keeping until the hint comes (``_until_hint``),
        and what follows counts for the next kind.
        """
        kinds, returns = self._index.kind[rows], np.maximum(self._index.returns[rows], 0)
        unknown = kinds < 0
        if np.count_nonzero(unknown):
            kinds[unknown] = self._kinds(returns, len(rows))[unknown]
        new = kinds < _WITHOUT_HINT
        if not np.count_nonzero(new):
            return
        kinds[new] = _with_hint(kinds[new], _HINTS[turn])
        self._index.kind[rows] = kinds
        for policy in self._policies:
            policy.used(rows, kinds, self._time)
        self._hinted = True
        # The whole chain, as the policies saw it; what has a hint already was learned from before.
        every_one = _all(len(rows))
        self._record(Use(self._index.mark[rows], kinds, returns, every_one, ~every_one, new, self._time))

    def _keep(self, rows: Rows, returns_in: float, rooms: Mapping[int, int]) -> bool:
        """Rank blocks as if they were used when they are expected back, if a tier may keep them for so long. Returns
        whether DRAM keeps some."""
        ticks = max(1, int(returns_in * self.tick_clock.rate(self._tick)))
        room, kept = rooms.get(DRAM, 0), rows[:0]
        if ticks <= LONGEST * room:
            kept = self._ahead.keep(self._index.used, rows, self._tick, self._tick + min(ticks, room), room)
        time = max(1, ticks * self._time // max(self._tick, 1))
        for tier, until in self._index.until.items():
            room = rooms.get(tier, 0)
            if time <= LONGEST * room:
                ahead = self._terms_ahead.setdefault(tier, ExpectedUse())
                longer = ahead.keep(until, rows, self._time, self._time + time, room)
                if tier == DRAM:  # the other tiers' horizons would be too long for it
                    self._since(longer, self._time + time)
        return bool(len(kept))

    def now(self) -> int:
        """A point in time, for ``overtaken``."""
        return self._tick

    def overtaken(self, since: int, score: int) -> bool:
        """Whether a block that may rank below ``score`` was touched after ``since``: one of lower priority, or any if
        the score was of a future time then."""
        if self._ahead.latest > since and self._tick > since and score & _RANK > since:
            return True
        return any(tick > since and priority < score >> PRIORITY for priority, tick in self._latest.items())

    def restore(self, rows: Rows, parents: Rows, sequences: Rows) -> None:
        """After a restart: rank by order of writing, with no block older or of lower priority than its descendants.

        ``parents`` has, for each row, the position of its parent in ``rows``, or -1.
        """
        used = np.argsort(np.argsort(sequences)).astype(np.int64)
        depth, priority = self._index.depth[rows], self._index.priority[rows]
        order = np.argsort(depth)[::-1]
        borders = np.flatnonzero(np.diff(depth[order])) + 1
        for level in np.split(order, borders):
            child = level[parents[level] >= 0]
            np.maximum.at(used, parents[child], used[child])
            np.maximum.at(priority, parents[child], priority[child])
        # For equal ticks, the deeper block ranks first.
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
        """Show recent uses to the policies, and learn from them if there are enough."""
        self._look()
        if self._unlearned >= self._batch:
            self._conclude()

    def learn(self) -> None:
        """Learn from the recorded uses."""
        self._look()
        self._conclude()

    def _look(self) -> None:
        self.due.clear()
        fresh, self._fresh = self._fresh, 0
        self._unlearned += fresh
        while not self.stopped and (uses := self._oldest()):
            joined = Uses(uses)
            self.history.see(joined)
            for policy in self._policies:
                policy.watch(joined)
            time.sleep(0)  # let more urgent threads run

    def _oldest(self) -> list[Use]:
        """The oldest recorded uses: few enough that no thread waits long for the interpreter. No use is divided."""
        uses, blocks = list[Use](), 0
        with contextlib.suppress(IndexError):  # all may be discarded at any moment
            while len(uses) < _TOGETHER and blocks < _LOOK:
                uses.append(self._recorded.popleft())
                blocks += len(uses[-1].marks)
        return uses

    def _conclude(self) -> None:
        room = max((policy.room() for policy in self._policies), default=0)
        self.history.fit(room)
        self.history.lasting = max(_LASTING, 16 * room)
        self._batch = max(_BATCH, min(room // 4, 2 * _BATCH))
        curves = self.history.curves()
        before, after = (_until_hint(curves), _after_hint(curves)) if self._hinted else (curves, curves)
        for policy in self._policies:
            policy.learn(before)
        for student in self._students:
            student(after)
        self.history.fade(self._unlearned)
        self._unlearned = 0


def _with_hint(kinds: Kinds, end: int) -> Kinds:
    """The kinds of such blocks once the caller has said how the turn ended."""
    first, others = np.divmod(kinds, _OTHERS)
    return ((_RETURNS + _ENDS * end + _COARSE[first]) * _OTHERS + others).astype(np.int16)


def _shares(curves: Curves) -> tuple[Numbers, Numbers]:
    """For each kind without a hint yet, by returns and other traits: the share that gets each hint later, and the share
    that gets none."""
    rates = curves.rates.reshape(-1, _OTHERS)
    used = np.zeros((_ENDS, _OTHERS))
    np.add.at(used, _COARSE, rates[:_RETURNS])
    ends = rates[_RETURNS:].reshape(len(_HINTS), _ENDS, _OTHERS)
    shares = ends / np.maximum(np.maximum(used, ends.sum(axis=0)), 1e-12)
    found = shares[:, _COARSE]
    return found, 1 - found.sum(axis=0)


def _until_hint(curves: Curves) -> Curves:
    """Curves for policies: where most blocks of a kind get a hint later, the kind is kept until then and no longer."""
    _, rest = _shares(curves)
    hinted = (1 - rest).reshape(-1, 1)
    hits = curves.hits.copy()
    hits[:_WITHOUT_HINT] = np.minimum(hits[:_WITHOUT_HINT], np.where(hinted > _HABIT, _NEARLY * hinted, 1.0))
    return Curves(hits, curves.time, curves.rates)


def _after_hint(curves: Curves) -> Curves:
    """Curves for decisions made once, when a prompt is stored: blocks without a hint are counted as the kinds that they
    become, in proportion, and only the rest as their own kind."""
    shares, rest = _shares(curves)

    def mixed(table: Numbers) -> Numbers:
        by_returns = table.reshape(-1, _OTHERS, table.shape[1])
        ends = by_returns[_RETURNS:].reshape(len(_HINTS), _ENDS, *by_returns.shape[1:])[:, _COARSE]
        found = by_returns.copy()
        found[:_RETURNS] *= rest[..., np.newaxis]
        found[:_RETURNS] += (shares[..., np.newaxis] * ends).sum(axis=0)
        return found.reshape(table.shape)

    return Curves(mixed(curves.hits), mixed(curves.time), curves.rates)


def _all(count: int) -> Mask:
    return _ALL[:count] if count <= len(_ALL) else np.ones(count, np.bool_)
