"""How long ago something was last used when it was evicted, in seconds.

Rows carry ticks, which count uses. Once in a while it is noted what time it was at a tick; between two notes nobody
needs to know better. Old notes are thinned out, so that a week costs little more than an hour.

A block that is kept for an expected return has a tick that is still to come: if it is evicted before, it counts as used
just now.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

from kvtide.clock import Clock
from kvtide.histogram import Histogram, HistogramStatistics

__all__ = ["Ages", "TickClock"]

_STEPS = (1.0, 10.0, 60.0, 600.0, 3600.0, 21600.0, 86400.0, 604800.0)
"""Ages that are told apart."""
_EVERY = 1.0
_LATELY = 60.0
"""Seconds over which the rate of uses is taken."""
_MOST = 2048
_DOZEN = 128


class TickClock:
    """Knows when a tick was. All calls under the index's lock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._notes = [(-1, clock.monotonic())]

    def note(self, tick: int) -> None:
        """All ticks after ``tick`` are later than now."""
        now = self._clock.monotonic()
        if now - self._notes[-1][1] >= _EVERY:
            self._notes.append((tick, now))
            if len(self._notes) > _MOST:
                del self._notes[1 : _MOST // 2 : 2]

    def now(self) -> float:
        return self._clock.monotonic()

    def rate(self, tick: int) -> float:
        """Ticks a second lately, if it is ``tick`` now; 0 as long as nobody can tell."""
        now = self._clock.monotonic()
        since = max(0, bisect_right(self._notes, now - _LATELY, key=lambda note: note[1]) - 1)
        then, noted = self._notes[since]
        return max(0, tick - then) / (now - noted) if now - noted >= _EVERY else 0.0

    def times(self, ticks: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """When each was: at most a second too early while it is young."""
        noted, times = zip(*self._notes, strict=True)
        found: npt.NDArray[np.float64] = np.array(times)[np.searchsorted(noted, ticks) - 1]
        return found


class Ages:
    """Of what was evicted. All calls under the index's lock; they are counted by the dozen, which is cheaper."""

    def __init__(self, clockwork: TickClock) -> None:
        self._clockwork = clockwork
        self._left: list[tuple[npt.NDArray[np.int64], float]] = []
        """Ticks of blocks that have left, and when."""
        self._histogram = Histogram(_STEPS)

    def add(self, ticks: npt.NDArray[np.int64]) -> None:
        """Blocks that were last used then leave now."""
        self._left.append((ticks, self._clockwork.now()))
        if len(self._left) >= _DOZEN:
            self._count()

    def _count(self) -> None:
        left, self._left = self._left, []
        if left:
            ended = np.repeat([now for _, now in left], [len(ticks) for ticks, _ in left])
            self._histogram.add(ended - self._clockwork.times(np.concatenate([ticks for ticks, _ in left])))

    def statistics(self) -> HistogramStatistics:
        self._count()
        return self._histogram.statistics()
