"""The time in seconds since evicted blocks were last used.

Rows have ticks, which count uses. Now and then the time of a tick is recorded; times in between are approximated. Old
records are thinned out, so that a week costs little more than an hour.

A block that is kept for an expected return has a tick in the future: if it is evicted before that, it counts as just
used.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

from kvtide.clock import Clock
from kvtide.histogram import Histogram, HistogramStatistics

__all__ = ["Ages", "TickClock"]

_STEPS = (1.0, 10.0, 60.0, 600.0, 3600.0, 21600.0, 86400.0, 604800.0)
"""Histogram bounds, in seconds."""
_EVERY = 1.0
_LATELY = 60.0
"""Seconds over which the rate of uses is computed."""
_MOST = 2048
_DOZEN = 128


class TickClock:
    """Converts ticks to times. All calls need the index lock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._notes = [(-1, clock.monotonic())]

    def note(self, tick: int) -> None:
        """Record that all ticks after ``tick`` are later than now."""
        now = self._clock.monotonic()
        if now - self._notes[-1][1] >= _EVERY:
            self._notes.append((tick, now))
            if len(self._notes) > _MOST:
                del self._notes[1 : _MOST // 2 : 2]

    def now(self) -> float:
        return self._clock.monotonic()

    def rate(self, tick: int) -> float:
        """Recent ticks per second, if it is ``tick`` now; 0 while that is unknown."""
        now = self._clock.monotonic()
        since = max(0, bisect_right(self._notes, now - _LATELY, key=lambda note: note[1]) - 1)
        then, noted = self._notes[since]
        return max(0, tick - then) / (now - noted) if now - noted >= _EVERY else 0.0

    def times(self, ticks: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The time of each tick: at most a second too early for recent ones."""
        noted, times = zip(*self._notes, strict=True)
        found: npt.NDArray[np.float64] = np.array(times)[np.searchsorted(noted, ticks) - 1]
        return found


class Ages:
    """Histogram of the ages of evicted blocks. All calls need the index lock; blocks are counted in batches, which is
    cheaper."""

    def __init__(self, tick_clock: TickClock) -> None:
        self._tick_clock = tick_clock
        self._left: list[tuple[npt.NDArray[np.int64], float]] = []
        """Ticks of evicted blocks, and the time of their eviction."""
        self._histogram = Histogram(_STEPS)

    def add(self, ticks: npt.NDArray[np.int64]) -> None:
        """Record the eviction of blocks with these ticks of last use."""
        self._left.append((ticks, self._tick_clock.now()))
        if len(self._left) >= _DOZEN:
            self._count()

    def _count(self) -> None:
        left, self._left = self._left, []
        if left:
            ended = np.repeat([now for _, now in left], [len(ticks) for ticks, _ in left])
            self._histogram.add(ended - self._tick_clock.times(np.concatenate([ticks for ticks, _ in left])))

    def statistics(self) -> HistogramStatistics:
        self._count()
        return self._histogram.statistics()
