"""What closing waits for.

Everybody goes in and out, and hardly anybody closes: so the way in takes no lock. Appending to a list and taking from
it are each one step that no other thread sees half of. Who comes in is first counted and then looks whether the door is
open; who shuts it first says so and then looks who is inside. So one of the two sees the other.
"""

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
        self._inside: list[None] = []
        """One for each that is inside."""
        self._open = True
        self._left = threading.Condition()

    def __enter__(self) -> None:
        self._inside.append(None)
        if not self._open:
            self.__exit__(None, None, None)
            raise ClosedError(self._closed)

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._inside.pop()
        if not self._open:
            with self._left:
                self._left.notify_all()

    def shut(self) -> None:
        with self._left:
            self._open = False
            self._left.wait_for(lambda: not self._inside)
