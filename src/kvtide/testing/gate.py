"""A gate that delays calls of a disk."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

__all__ = ["Gate"]


class Gate:
    """Blocks calls until it is opened. Leaving its ``with`` opens it."""

    def __init__(self, call: str, files: str) -> None:
        self.call = call
        self.files = files
        self._open = False
        self._waiting = 0
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"<Gate for {self.call}: {'open' if self._open else f'{self._waiting} waiting'}>"

    def open(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def wait_for(self, calls: int, timeout: float = 30.0) -> bool:
        """Wait until that many calls are blocked."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting >= calls, timeout)

    def pass_through(self) -> None:
        """Wait until it is open."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._open)
            self._waiting -= 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.open()
