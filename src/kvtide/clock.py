"""Time, as a component that tests can replace (see ``kvtide.testing.clock``)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

__all__ = ["Clock", "SystemClock", "TurnedClock"]


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds that never jump: for durations and deadlines."""

    def time(self) -> float:
        """Seconds since 1970: for values that outlive the process."""


@runtime_checkable
class TurnedClock(Protocol):
    """A clock that stands still until it is set by hand. A thread that sleeps until a certain time must be notified of
    that."""

    def follow(self, turned: Callable[[], None]) -> None:
        """Call ``turned`` whenever the clock was set."""


class SystemClock:
    """The system's clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()
