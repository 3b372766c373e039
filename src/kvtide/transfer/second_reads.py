"""Second reads: what one node does not send in time, or fails to send, is read from another node that has it.

A read is *overdue* when it takes ``_MULTIPLE`` times as long as was expected from the measured speed and the queue of
its node, and ``_SHORTEST`` seconds at least. Then another node that is known to have all of its blocks is asked whether
it has them now. Only if it says so is the read *hedged*: the first node's connection is closed, and what has not
arrived is read from the second node, into the same memory. That is safe because the second read begins when the first
one's receiver has ended (``tiers.base.Cuttable``), so two never write to one slot; and it takes no further memory. Both
reads at a time, into different memory, would need slots when memory is short, and the first node would go on sending
what nobody wants.

A read that fails, because its connection ended or its node has lost a block, is *moved*: what failed is read from
another node that has it.

There is one second read for each first one, at most, and none after the deadline that the first one had. The second has
that deadline too. So a node that hangs costs no more than without second reads. When a whole cluster is too slow, every
read is overdue, and second reads would double its work. So only a part of the reads is hedged, a few more at first; and
a second node must be expected to take less time than has passed already.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from kvtide.clock import Clock
from kvtide.counts import Count
from kvtide.index.index import SEALED, Index, Rows, every
from kvtide.tiers.base import Cuttable, FoundBlock, Miss, Read, ReadResult, Searched, Wish
from kvtide.tiers.peers.position import PeerPosition
from kvtide.tiers.peers.protocol import SLOWEST
from kvtide.tiers.peers.tier import PeerTier
from kvtide.transfer.cold_tier import ColdTier, nearest
from kvtide.transfer.node_search import NodeSearch
from kvtide.transfer.search import FoundIn

__all__ = ["ReadUnderWay", "SecondReads"]

_MULTIPLE = 4.0
"""A read is overdue after so many times the expected seconds,"""
_SHORTEST = 0.25
"""and not before. That is longer than a busy host delays a thread, and long enough that a read which was cut counts for
the measured speed."""
_UNKNOWN = 100e6
"""Bytes per second that are expected of a node that was not measured yet."""
_BURST = 4.0
"""So many reads may be hedged before the part counts."""
_LOOK = 0.02
"""Seconds between two looks at the reads under way."""
_QUIET = 16
"""So many times in a row there is no read before the thread sleeps."""


class ReadUnderWay:
    """A read of one node that is under way."""

    __slots__ = ("began", "cold", "cut", "due", "ends", "hedged", "other", "reads", "rows", "second")

    def __init__(
        self, cold: ColdTier, rows: Rows, reads: Sequence[Read], began: float, due: float, ends: float
    ) -> None:
        self.cold = cold
        self.rows = rows
        self.reads = reads
        self.began = began
        self.due = due
        """When something is to be done."""
        self.ends = ends
        """When both reads must have ended."""
        self.second = False
        """Whether it is the second one."""
        self.hedged = False
        """Whether this read, or the first one before it, was hedged."""
        self.other: ColdTier | None = None
        """The node that has just said that it has all blocks."""
        self.cut = False
        """Whether it is to end now."""

    @property
    def nbytes(self) -> int:
        return sum(len(item.span) for item in self.reads)

    @property
    def wishes(self) -> list[Wish]:
        return [(item.key, item.identity) for item in self.reads]


class SecondReads:
    """See the module's docstring. Methods that say so need the index lock."""

    def __init__(
        self,
        index: Index,
        colds: Sequence[ColdTier],
        part: float,
        timeout: float,
        clock: Clock,
        counts: Counter[str],
        nodes: NodeSearch | None = None,
    ) -> None:
        """``colds`` are the tiers of other nodes, ``part`` of the reads may be hedged, ``timeout`` is that of a node.
        ``nodes`` knows of further nodes."""
        self.enter: FoundIn = lambda cold, here: None
        """Enters blocks that were found in a tier into the index."""
        self.wanted: Callable[[Rows], bool] = lambda _: True
        """Whether somebody waits for any of these rows. Called with the index lock held."""
        self._index = index
        self._colds = colds
        self._part = part
        self._timeout = timeout
        self._clock = clock
        self._counts = counts
        self._nodes = nodes
        self._credit = _BURST
        self._reads: dict[int, ReadUnderWay] = {}
        """Reads under way, by the ``id`` of the batch."""
        self._changed = threading.Condition()
        self._idle = self._closed = False
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<SecondReads {len(self._reads)} reads under way>"

    # -- for promotion ------------------------------------------------------------------------------------

    def began(self, cold: ColdTier, rows: Rows, reads: Sequence[Read], first: ReadUnderWay | None = None) -> None:
        """A read of a node is about to begin; or the second one after ``first``. Call with the index lock held."""
        if not cold.read_only:
            return
        now = self._clock.monotonic()
        if first is not None:
            read = ReadUnderWay(cold, rows, reads, now, first.ends, first.ends)
            read.second, read.hedged = True, first.hedged
        else:
            waiting = cold.lane.read_bytes + sum(len(item.span) for item in reads)
            known = cold.lane.read_speed.statistics()
            rate = known.bytes_per_second if known.measured else _UNKNOWN
            due = now + max(_SHORTEST, _MULTIPLE * waiting / rate)
            read = ReadUnderWay(cold, rows, reads, now, due, now + self._timeout + waiting / SLOWEST)
        with self._changed:
            if first is None:
                self._credit = min(_BURST, self._credit + self._part)
            self._reads[id(reads)] = read
            if (self._thread is None or self._thread.ident is None) and not self._closed:
                self._thread = threading.Thread(target=self._watch, name="kvtide-second-reads", daemon=True)
                with contextlib.suppress(RuntimeError):  # no more threads: until there are, there is no second read
                    self._thread.start()
            elif self._idle:
                self._changed.notify_all()

    def ended(self, reads: Sequence[Read]) -> ReadUnderWay | None:
        """A read has ended. Returns what was known of it. Call with the index lock held."""
        with self._changed:
            read = self._reads.get(id(reads))
            if read is None or read.reads is not reads:
                return None
            return self._reads.pop(id(reads))

    def moves(
        self, read: ReadUnderWay, results: Sequence[ReadResult], usable: Callable[[int], bool]
    ) -> Mapping[ColdTier, list[int]]:
        """Which of the blocks of a read that has ended, by their numbers, are to be read from which other node. Those
        that are not ``usable`` are not. Call with the index lock held."""
        failed = [i for i, result in enumerate(results) if not result and result is not Miss.REFUSED]
        if read.second:
            if len(failed) < len(results) and not failed:
                self._counts[Count.HEDGES_WON if read.hedged else Count.READS_MOVED_WON] += 1
            return {}
        if not failed or self._closed or self._clock.monotonic() >= read.ends or not self.wanted(read.rows):
            return {}
        moves: dict[ColdTier, list[int]] = {}
        left = [i for i in failed if usable(i)]
        for cold in sorted(self._others(read.cold), key=lambda cold: cold is not read.other) if left else ():
            states = self._index.state[cold.number][read.rows[left]] == SEALED
            if states.any():
                moves[cold] = [i for i, there in zip(left, states.tolist(), strict=True) if there]
                left = [i for i, there in zip(left, states.tolist(), strict=True) if not there]
            if not left:
                break
        if moves and not read.hedged:
            self._counts[Count.READS_MOVED] += 1
        return moves

    def _others(self, first: ColdTier) -> list[ColdTier]:
        """Other nodes than that one, the fastest first, without those that are away."""
        return [cold for cold in nearest(self._colds) if cold is not first and not _away(cold)]

    # -- the thread ---------------------------------------------------------------------------------------

    def _watch(self) -> None:
        quiet = 0
        while True:
            with self._changed:
                self._idle = quiet >= _QUIET
                if self._idle:
                    self._changed.wait_for(lambda: self._reads or self._closed)
                    self._idle = False
                elif not self._closed:
                    self._changed.wait(_LOOK)
                if self._closed:
                    return
                quiet = 0 if self._reads else quiet + 1
                now = self._clock.monotonic()
                due = [read for read in self._reads.values() if read.cut or read.due <= now]
            for read in due:
                if read.cut or read.second:
                    self._cut(read)
                else:
                    read.due = math.inf
                    self._overdue(read, now)

    @staticmethod
    def _cut(read: ReadUnderWay) -> None:
        """End a read soon. Repeated until it has ended, because it may be on its way from the lane to the tier."""
        if not read.cold.lane.withdraw(read.reads) and isinstance(read.cold.tier, Cuttable):
            read.cold.tier.cut(read.reads)

    def _overdue(self, read: ReadUnderWay, now: float) -> None:
        """Look for a second node."""
        with self._index.lock:
            if not read.cold.lane.reading(read.reads):
                self.ended(read.reads)  # its caller was interrupted before it began
                return
            if not self.wanted(read.rows):
                read.due = now + _SHORTEST  # somebody may join until then
                return
            others = [cold for cold in self._others(read.cold) if self._has(cold, read)]
        if not self._part or (not others and self._nodes is None):
            return
        with self._changed:
            if self._credit < 1.0:
                read.due = now + _SHORTEST
                return
            self._credit -= 1.0  # given back if nothing comes of it
        if others:
            cold, tier = others[0], others[0].tier
            if isinstance(tier, Searched):
                tier.find(read.wishes, functools.partial(self._asked, read, cold))
                return
        elif self._nodes is not None and self._nodes.find_other(
            read.wishes, read.cold, self.enter, functools.partial(self._found_elsewhere, read)
        ):
            return
        self._no_second(read)

    def _has(self, cold: ColdTier, read: ReadUnderWay) -> bool:
        """Whether a node is known to have all blocks of a read. Call with the index lock held."""
        return every(self._index.state[cold.number][read.rows] == SEALED)

    def _found_elsewhere(self, read: ReadUnderWay) -> None:
        with self._index.lock:
            second = next((cold for cold in self._others(read.cold) if self._has(cold, read)), None)
        if second is None:
            self._no_second(read)
        else:
            self._hedge(read, second)

    def _asked(self, read: ReadUnderWay, second: ColdTier, entries: Sequence[FoundBlock | None]) -> None:
        if None in entries:
            self._no_second(read)
        else:
            self._hedge(read, second)

    def _no_second(self, read: ReadUnderWay) -> None:
        with self._changed:
            self._credit += 1.0

    def _hedge(self, read: ReadUnderWay, second: ColdTier) -> None:
        """The second node has just said that it has all blocks: end the first read, if that saves time."""
        expected = second.lane.read_speed.seconds(second.lane.read_bytes + read.nbytes)
        if self._clock.monotonic() < read.began + expected:
            self._no_second(read)
            read.due = read.began + expected
            return
        with self._index.lock:
            if id(read.reads) not in self._reads or not self.wanted(read.rows):
                self._no_second(read)
                return
            read.hedged, read.other = True, second
            self._counts[Count.READS_HEDGED] += 1
        with self._changed:
            read.cut = True
            self._changed.notify_all()

    def close(self) -> None:
        """End its thread. Reads under way go on without it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread.ident is not None:  # else its start was interrupted
            self._thread.join()


def _away(cold: ColdTier) -> bool:
    """Whether a node is not asked now."""
    return isinstance(cold.tier, PeerTier | PeerPosition) and cold.tier.away
