"""What closing waits for.

Everybody goes in and out, and hardly anybody closes: so each thread has a lock of its own, which nobody else takes but
whoever closes. Who comes in takes his lock and then looks whether the door is open; who shuts it first says so and then
takes all the locks. So one of the two sees the other.

A lock that is taken by ``with`` is given back whatever happens: a thread that is interrupted on its way in or out
(Ctrl-C, a signal handler that raises) leaves nothing behind for which closing would wait for ever.

A fork shuts it too, in the child: so what is inside costs nothing to be kept from a child.
"""

from __future__ import annotations

import threading
from types import TracebackType

from kvtide import forks
from kvtide.errors import ClosedError

__all__ = ["CallGuard"]


class CallGuard:
    """Lets calls in until it is shut; shutting it waits for those that are inside.

    ``with door.lock(): door.check()`` and then the call; ``with door`` is the same where nobody is interrupted.
    """

    def __init__(self, closed: str) -> None:
        self._closed = closed
        """What to say to those who come too late."""
        self._locks: dict[int, threading.RLock] = {}
        """By thread; numbers of threads that have ended are given again, so these are few."""
        self._open = True
        self._origin = forks.here
        forks.tell(self)

    def lock(self) -> threading.RLock:
        """What this thread has while it is inside."""
        me = threading.get_ident()
        return self._locks.get(me) or self._locks.setdefault(me, threading.RLock())

    def check(self) -> None:
        """Raise ClosedError if it is shut. To be called inside."""
        if not self._open:
            forks.check(self._origin)
            raise ClosedError(self._closed)

    def __enter__(self) -> None:
        lock = self.lock()
        lock.acquire()
        if not self._open:
            lock.release()
            forks.check(self._origin)
            raise ClosedError(self._closed)

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        if (lock := self._locks.get(threading.get_ident())) is not None:  # else the process was forked meanwhile
            lock.release()

    def shut(self) -> None:
        """Let nobody in any more, and wait for those that are inside. A thread does not wait for itself."""
        if self._origin is not forks.here:
            return  # whoever is inside is so in our parent
        self._open = False
        for lock in list(self._locks.values()):
            with lock:
                pass

    def forked(self) -> None:
        self._open = False
        self._locks = {}  # the old ones may be held by threads that are not here
