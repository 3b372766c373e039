"""What closing waits for."""

from __future__ import annotations

import threading
from types import TracebackType

from kvtide.errors import ClosedError

__all__ = ["Door"]


class Door:
    """Lets calls in until it is shut; shutting it waits for those that are inside."""

    def __init__(self, closed: str) -> None:
        self._closed = closed
        """What to say to those who come too late."""
        self._inside = 0
        self._open = True
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)

    def __enter__(self) -> None:
        with self._lock:
            if not self._open:
                raise ClosedError(self._closed)
            self._inside += 1

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and not self._open:
                self._left.notify_all()

    def shut(self) -> None:
        with self._left:
            self._open = False
            self._left.wait_for(lambda: not self._inside)
