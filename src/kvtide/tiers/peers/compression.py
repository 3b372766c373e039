"""Whether to ask another node for compressed blocks: only over a link that is so slow that they arrive earlier.

A node compresses with one core about as fast as a link of 2 Gbit/s carries, and blocks become smaller by a third or
less. So what is gained depends on the link, on the blocks, and on how busy both nodes are; and all of that changes.
Nothing of it is guessed here: both kinds of reads are timed, and the quicker kind is used. A node that sends plain
blocks faster than ``_FAST`` is never asked.

Several reads share the link, so what is timed are *periods*: all that was read between two moments at which nothing was
under way, or for some time. Bytes are those of the blocks in memory, however few were sent, and the time includes
verifying and decompressing."""

from __future__ import annotations

import math
import threading
from enum import Enum

from kvtide.clock import Clock

__all__ = ["CompressionChoice", "ReadEnd"]

_FAST = 300e6
"""Bytes per second: a node that sends so many is never asked to compress. To gain there would take several cores."""
_LEAST = 4 << 20
"""Bytes of a period that is timed at least: few bytes tell more about round trips than about the link."""
_LONGEST = 2.0
"""Seconds of a period, if reads never pause."""
_GAIN = 1.1
"""How many times as fast compressed reads must be: they take processor time on both nodes."""
_WEIGHT = 0.3
"""Of a new measurement."""
_FEW = 3
"""Periods that are timed before the two kinds are compared."""
_PAUSE, _LONGEST_PAUSE = 15.0, 120.0
"""Seconds until the slower kind is tried again: twice as long each time that it is slower again."""


class ReadEnd(Enum):
    """How a read ended."""

    WHOLE = 1
    """All blocks came."""
    PART = 2
    """Some were not there: its time says nothing."""
    BROKEN = 3
    """Something was wrong with the answer, or there was none."""


class CompressionChoice:
    """The choice for one node. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._rates: dict[bool, float] = {}
        """Bytes per second, by whether they were compressed."""
        self._best = False
        self._able = True
        self._under_way = 0
        self._compressed = False
        """What reads of the period ask for."""
        self._began = 0.0
        self._nbytes = 0
        """Bytes that the period has read, or less than none if its time says nothing."""
        self._timed = 0
        """Periods of plain reads that were timed, up to ``_FEW``."""
        self._trial = 0
        """Periods of the other kind that were timed since it is being tried."""
        self._try_at = -math.inf
        """When it is to be tried."""
        self._pause = _PAUSE

    def __repr__(self) -> str:
        return f"<CompressionChoice: {'compressed' if self._best else 'plain'}>"

    @property
    def compressed(self) -> bool:
        """Whether compressed blocks were the quicker ones, as far as was measured."""
        return self._best

    def begin(self) -> bool:
        """A read begins now; ``ended`` must follow. Returns whether to ask for compressed blocks."""
        with self._lock:
            if not self._under_way:
                self._begin_period()
            self._under_way += 1
            return self._compressed

    def ended(self, nbytes: int, how: ReadEnd, *, able: bool) -> None:
        """A read of so many bytes has ended. ``able``: whether the node can compress."""
        with self._lock:
            self._under_way -= 1
            now = self._clock.monotonic()
            self._able = able
            if not able or (how is ReadEnd.BROKEN and self._compressed):
                self._decide(False, now, _LONGEST_PAUSE)
            elif how is ReadEnd.WHOLE and self._nbytes >= 0:
                self._nbytes += nbytes
            else:
                self._nbytes = -1
            if self._under_way and now - self._began < _LONGEST:
                return
            if self._nbytes >= _LEAST and now > self._began:
                self._measured(self._compressed, self._nbytes / (now - self._began), now)
            before = self._compressed
            self._begin_period()
            if self._under_way and self._compressed is not before:
                self._nbytes = -1  # reads of the other kind are under way still

    def _begin_period(self) -> None:
        self._began, self._nbytes = self._clock.monotonic(), 0
        if not self._able or self._timed < _FEW or (not self._best and self._rates[False] >= _FAST):
            self._compressed = False
        else:
            self._compressed = self._best is not (self._began >= self._try_at)

    def _measured(self, compressed: bool, rate: float, now: float) -> None:
        trial = compressed is not self._best
        before = self._rates.get(compressed)
        if before is None or (trial and not self._trial):
            self._rates[compressed] = rate
        else:
            self._rates[compressed] = (1 - _WEIGHT) * before + _WEIGHT * rate
        if not compressed:
            self._timed = min(self._timed + 1, _FEW)
        self._trial += trial
        if self._trial == _FEW:
            best = self._rates[True] > _GAIN * self._rates[False]
            self._decide(best, now, _PAUSE if best is not self._best else min(2 * self._pause, _LONGEST_PAUSE))

    def _decide(self, best: bool, now: float, pause: float) -> None:
        self._best, self._pause, self._try_at, self._trial = best, pause, now + pause, 0
        self._nbytes = -1  # reads of the period that have not ended may be of the other kind
