"""How long ago a use was, in seconds.

Rows carry ticks, which count uses. Once in a while it is noted what time it was at a tick; between two notes nobody
needs to know better. Old notes are thinned out, so that a week costs little more than an hour.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtide.clock import Clock

__all__ = ["STEPS", "Ages"]

STEPS = (1.0, 10.0, 60.0, 600.0, 3600.0, 21600.0, 86400.0, 604800.0)
"""Ages that are told apart."""
_EVERY = 1.0
_MOST = 2048


class Ages:
    """All calls under the index's lock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._notes = [(-1, clock.monotonic())]
        self._ticks, self._times = np.array([-1]), np.array([self._notes[0][1]])
        """The notes in columns, as of the last question."""

    def note(self, tick: int) -> None:
        """All ticks after ``tick`` are later than now."""
        now = self._clock.monotonic()
        if now - self._notes[-1][1] >= _EVERY:
            self._notes.append((tick, now))
            if len(self._notes) > _MOST:
                del self._notes[1 : _MOST // 2 : 2]

    def of(self, ticks: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The age of each use, at most a second too high while it is young."""
        if self._notes[-1][1] != self._times[-1]:
            self._ticks = np.array([tick for tick, _ in self._notes])
            self._times = np.array([time for _, time in self._notes])
        ages: npt.NDArray[np.float64] = self._clock.monotonic() - self._times[self._ticks.searchsorted(ticks) - 1]
        return ages
