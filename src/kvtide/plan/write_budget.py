"""Limits the bytes written to a tier over time, because writing wears out drives."""

from __future__ import annotations

from dataclasses import dataclass

from kvtide.clock import Clock

__all__ = ["WriteBudget", "WriteBudgetStatistics"]

_BURST = 60.0
"""Seconds over which an unused allowance accumulates."""
_DAY = 86400.0


@dataclass(frozen=True, slots=True)
class WriteBudgetStatistics:
    bytes_per_second: float
    bytes_left: float
    """Bytes that may be written at once; negative: overdrawn."""


class WriteBudget:
    """A limit in bytes per second on average, with bursts. All calls need the index lock."""

    def __init__(self, rate: float, clock: Clock) -> None:
        self.rate = rate
        self._clock = clock
        self._left = rate * _BURST
        self._last = clock.monotonic()

    @classmethod
    def of(cls, limit: int, drive_writes: float, size: int, clock: Clock) -> WriteBudget | None:
        """The stricter of ``limit`` in bytes per second and ``drive_writes`` of the whole drive per day; 0: no
        limit."""
        rates = [rate for rate in (float(limit), drive_writes * size / _DAY) if rate > 0]
        return cls(min(rates), clock) if rates else None

    def take(self, nbytes: int, last: bool = False) -> bool:
        """Whether ``nbytes`` may be written now; if so, they are deducted, and the balance may become negative.

        With ``last`` they may be written in any case.
        """
        self._refill()
        if self._left <= 0 and not last:
            return False
        self._left -= nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """Return the allowance for bytes that will not be written."""
        self._left += nbytes

    def _refill(self) -> None:
        now = self._clock.monotonic()
        self._left = min(self._left + (now - self._last) * self.rate, self.rate * _BURST)
        self._last = now

    def statistics(self) -> WriteBudgetStatistics:
        self._refill()
        return WriteBudgetStatistics(self.rate, self._left)
