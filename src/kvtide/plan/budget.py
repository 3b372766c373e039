"""How much may be written to a tier over time: drives wear out by writing."""

from __future__ import annotations

from dataclasses import dataclass

from kvtide.clock import Clock

__all__ = ["WriteBudget", "WriteBudgetStatistics"]

_BURST = 60.0
"""What was not used for so many seconds is still there."""
_DAY = 86400.0


@dataclass(frozen=True, slots=True)
class WriteBudgetStatistics:
    bytes_per_second: float
    bytes_left: float
    """That may be written at once; below 0: owed."""


class WriteBudget:
    """Bytes a second on average, with bursts. Called under the index's lock."""

    def __init__(self, rate: float, clock: Clock) -> None:
        self.rate = rate
        self._clock = clock
        self._left = rate * _BURST
        self._last = clock.monotonic()

    @classmethod
    def of(cls, limit: int, drive_writes: float, size: int, clock: Clock) -> WriteBudget | None:
        """The tighter of so many bytes a second and so many writes of the whole drive a day; 0: no limit."""
        rates = [rate for rate in (float(limit), drive_writes * size / _DAY) if rate > 0]
        return cls(min(rates), clock) if rates else None

    def take(self, nbytes: int, last: bool = False) -> bool:
        """Whether ``nbytes`` may be written now; then they count, and what is more than is left is owed.

        At the ``last`` chance they may in any case.
        """
        self._refill()
        if self._left <= 0 and not last:
            return False
        self._left -= nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """So many bytes that may be written will not be."""
        self._left += nbytes

    def _refill(self) -> None:
        now = self._clock.monotonic()
        self._left = min(self._left + (now - self._last) * self.rate, self.rate * _BURST)
        self._last = now

    def statistics(self) -> WriteBudgetStatistics:
        self._refill()
        return WriteBudgetStatistics(self.rate, self._left)
