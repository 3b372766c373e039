"""How long things take, from measurement: the ground on which "load or recompute" is decided."""

from __future__ import annotations

import threading
from dataclasses import dataclass

__all__ = ["Speed", "SpeedStatistics"]

_FIRST_GUESS = 1e9
_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class SpeedStatistics:
    bytes_per_second: float
    measured: int
    """How many measurements it stands on; 0: a guess."""


class Speed:
    """The bandwidth of one way, averaged over recent work. Safe from any thread."""

    def __init__(self) -> None:
        self._rate = _FIRST_GUESS
        self._count = 0
        self._lock = threading.Lock()

    def measured(self, nbytes: int, seconds: float) -> None:
        """``nbytes`` took ``seconds`` of the way's time."""
        if nbytes <= 0 or seconds <= 0:
            return
        rate = nbytes / seconds
        with self._lock:
            self._rate = rate if not self._count else self._rate + _WEIGHT * (rate - self._rate)
            self._count += 1

    def seconds(self, nbytes: float) -> float:
        """How long ``nbytes`` are expected to take."""
        return nbytes / self._rate

    def statistics(self) -> SpeedStatistics:
        return SpeedStatistics(self._rate, self._count)
