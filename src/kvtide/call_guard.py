"""Lets closing wait for calls that are under way.

Calls enter and leave often, and closing is rare. So each thread has its own lock, which only a closing thread also
takes. A call takes its thread's lock and then checks that the guard is open; closing first marks the guard as closed
and then takes all the locks. So one of the two sees the other.

A lock taken by ``with`` is released whatever happens: a thread that is interrupted while entering or leaving (Ctrl-C, a
signal handler that raises) leaves nothing behind for which closing would wait forever.

A fork also closes the guard in the child: protecting guarded objects from use in a child costs nothing extra.
"""

from __future__ import annotations

import threading
from types import TracebackType

from kvtide import forks
from kvtide.errors import ClosedError

__all__ = ["CallGuard"]


class CallGuard:
    """Admits calls until it is shut; shutting it waits for the calls that are under way.

    Use ``with guard.lock(): guard.check()`` and then the call; ``with guard`` is equivalent where no interrupt can
    occur.
    """

    def __init__(self, closed: str) -> None:
        self._closed = closed
        """The error message for calls after it was shut."""
        self._locks: dict[int, threading.RLock] = {}
        """By thread identifier; those of ended threads are reused, so there are few."""
        self._open = True
        self._origin = forks.here
        forks.tell(self)

    def lock(self) -> threading.RLock:
        """The lock that this thread holds during a call."""
        me = threading.get_ident()
        return self._locks.get(me) or self._locks.setdefault(me, threading.RLock())

    def check(self) -> None:
        """Raise ClosedError if it is shut. Call it with the lock held."""
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
        if (lock := self._locks.get(threading.get_ident())) is not None:  # otherwise the process was forked meanwhile
            lock.release()

    def shut(self) -> None:
        """Admit no more calls, and wait for those under way. A thread does not wait for itself."""
        if self._origin is not forks.here:
            return  # calls under way are the parent's
        self._open = False
        for lock in list(self._locks.values()):
            with lock:
                pass

    def forked(self) -> None:
        self._open = False
        self._locks = {}  # the old ones may be held by threads that do not exist here
