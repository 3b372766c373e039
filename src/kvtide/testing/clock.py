"""A clock that stands still until a test moves it."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["FakeClock"]


class FakeClock:
    """A ``kvtide.clock.Clock``: both of its times move by ``advance``, together, and never by themselves.

    Deadlines, lifetimes and measured speeds follow it. A caller that waits for a result still waits in real time, so a
    deadline that only this clock would reach does not wake a waiter.
    """

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._start = now
        self._passed = 0.0
        self._lock = threading.Lock()
        self._followers: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"<FakeClock {self._passed:g} s after its start>"

    def advance(self, seconds: float) -> None:
        """Advance the time; it never runs backwards."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards: {seconds}")
        with self._lock:
            self._passed += seconds
            followers = list(self._followers)
        for turned in followers:
            turned()

    def follow(self, turned: Callable[[], None]) -> None:
        """Call ``turned`` whenever time has passed: for threads that sleep until a certain time."""
        with self._lock:
            self._followers.append(turned)

    def monotonic(self) -> float:
        return self._passed

    def time(self) -> float:
        return self._start + self._passed
