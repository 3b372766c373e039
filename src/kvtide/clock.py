"""Time, as a part that tests can replace (see ``kvtide.testing.clock``)."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds that never jump: for durations and deadlines."""

    def time(self) -> float:
        """Seconds since 1970: for what outlives the process."""


class SystemClock:
    """The real one."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()
