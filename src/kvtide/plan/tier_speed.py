"""Measured speeds of tiers, on which "load or recompute" is decided.

An estimate that is too high corrects itself: the reads that it causes are measured. One that is too low causes no
reads, so nothing would ever correct it. Therefore an estimate can be *due* for a trial: if it has fewer than ``_FEW``
measurements, or the last one is ``_OLD`` seconds ago. The planner then lets one prompt load a part of what it would
have computed (see planner.py), and the next trial is due ``_PAUSE`` seconds later (``_OLD`` seconds, once there are a
few measurements). The first measurement after such a time counts half: the estimate before it may be outdated.

A speed measured by an earlier process may be *remembered*. It is used until there is a measurement, and is due like a
guess.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import NamedTuple

from kvtide.clock import Clock, SystemClock

__all__ = ["Speed", "SpeedState", "SpeedStatistics"]

_FIRST_GUESS = 1e9
_WEIGHT = 0.2
_WEIGHT_OLD = 0.5
"""The weight of a measurement after an estimate that is old or remembered."""
_FEW = 3
_OLD = 10.0
_PAUSE = 1.0


@dataclass(frozen=True, slots=True)
class SpeedStatistics:
    bytes_per_second: float
    measured: int
    """Number of measurements; 0: a guess, or remembered."""
    remembered: bool = False
    """Whether an earlier process measured it, and this one has not yet."""


class SpeedState(NamedTuple):
    """What was measured, to be used again later: see ``Speed.replace``."""

    rate: float = _FIRST_GUESS
    measured: int = 0
    remembered: bool = False
    measured_at: float = -math.inf
    tried_at: float = -math.inf


class Speed:
    """The bandwidth in one direction, averaged over recent work. Thread-safe."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._rate = _FIRST_GUESS
        self._count = 0
        self._remembered = False
        self._measured_at = self._tried_at = -math.inf
        self._lock = threading.Lock()

    def measured(self, nbytes: int, seconds: float) -> None:
        """Record that ``nbytes`` took ``seconds`` of transfer time."""
        if nbytes <= 0 or seconds <= 0:
            return
        rate = nbytes / seconds
        now = self._clock.monotonic()
        with self._lock:
            if not (self._count or self._remembered):
                weight = 1.0
            else:
                weight = _WEIGHT_OLD if now - self._measured_at >= _OLD else _WEIGHT
            self._rate += weight * (rate - self._rate)
            self._count += 1
            self._measured_at = now

    def remember(self, rate: float) -> None:
        """Use the ``rate`` in bytes per second that an earlier process measured. Ignored once this process has a
        measurement."""
        with self._lock:
            if not self._count:
                self._rate, self._remembered = rate, True

    @property
    def due(self) -> bool:
        """Whether the estimate may be outdated, and no trial was begun recently."""
        now = self._clock.monotonic()
        pause = _PAUSE if self._count < _FEW else _OLD
        return now - self._tried_at >= pause and (self._count < _FEW or now - self._measured_at >= _OLD)

    def tried(self) -> None:
        """Record that a trial has begun."""
        self._tried_at = self._clock.monotonic()

    def replace(self, state: SpeedState) -> SpeedState:
        """Go on with another ``state``, because the medium is another one now; returns the one until now."""
        with self._lock:
            before = SpeedState(self._rate, self._count, self._remembered, self._measured_at, self._tried_at)
            self._rate, self._count, self._remembered, self._measured_at, self._tried_at = state
        return before

    def seconds(self, nbytes: float) -> float:
        """Expected seconds for ``nbytes``."""
        return nbytes / self._rate

    def statistics(self) -> SpeedStatistics:
        return SpeedStatistics(self._rate, self._count, self._remembered and not self._count)
