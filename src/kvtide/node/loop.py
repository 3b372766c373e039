"""The node's event loop: asyncio's, with clients served in the order in which they called.

asyncio asks the system who is ready, and then serves all of them. The system keeps whom it has named in their places:
of eight busy clients those that were served first call again before the last are done, and so come once more before one
that called in the meantime. One request in ten took twice as long as the others. So clients are not callbacks of the
loop. Its selector serves them itself, and asks for the next one alone after each; that also spares every request the
loop's own bookkeeping. After a few of them the loop has its turn: timers, notices, connections.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import select
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["Loop", "run_in_loop"]

log = logging.getLogger("kvtide.node")

T = TypeVar("T")

_TURN = 8
"""Clients that are served before the loop does what else there is."""

_Call = Callable[[], None]


class _Selector(selectors.EpollSelector):
    """Tells the loop what is ready, except for clients, which it calls."""

    def __init__(self) -> None:
        super().__init__()
        self._epoll = select.epoll.fromfd(os.dup(self.fileno()))
        """The same one, to ask for a single event."""
        self._clients: dict[int, tuple[_Call | None, _Call | None]] = {}
        self._served = 0
        self._waiting: deque[tuple[int, _Call]] = deque()
        """What is due when so many were served."""

    def attend(self, fd: int, readable: _Call | None, writable: _Call | None) -> None:
        events = (select.EPOLLIN if readable else 0) | (select.EPOLLOUT if writable else 0)
        known = fd in self._clients
        if not events:
            if known:
                del self._clients[fd]
                self._epoll.unregister(fd)
            return
        (self._epoll.modify if known else self._epoll.register)(fd, events)
        self._clients[fd] = readable, writable

    def after_others(self, call: _Call) -> None:
        self._waiting.append((self._served + len(self._clients), call))

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # The system counts in milliseconds: without rounding up a timer would be asked for again and again.
        wait = -1.0 if timeout is None else math.ceil(timeout * 1e3) * 1e-3 if timeout > 0 else 0.0
        poll, clients, waiting = self._epoll.poll, self._clients, self._waiting
        for _ in range(_TURN):
            due = waiting and waiting[0][0] <= self._served
            found = [] if due else poll(0.0 if waiting else wait, 1)
            if not found:
                if waiting:
                    _guarded(waiting.popleft()[1])
                break
            fd, events = found[0]
            if fd not in clients:
                return self._others(fd, events)
            self._serve(fd, events)
            wait = 0.0
        return []

    def _serve(self, fd: int, events: int) -> None:
        self._served += 1
        readable, _ = self._clients[fd]
        if readable is not None and events & ~select.EPOLLOUT:
            # First: who has hung up cannot be written to, and what it said before counts.
            _guarded(readable)
        if events & ~select.EPOLLIN:
            _, writable = self._clients.get(fd, (None, None))
            if writable is not None:
                _guarded(writable)

    def _others(self, fd: int, events: int) -> list[tuple[selectors.SelectorKey, int]]:
        key = self.get_map().get(fd)
        if key is None:
            return []
        ready = (selectors.EVENT_READ if events & ~select.EPOLLOUT else 0) | (
            selectors.EVENT_WRITE if events & ~select.EPOLLIN else 0
        )
        return [(key, ready & key.events)]

    def close(self) -> None:
        self._epoll.close()
        super().close()


def _guarded(call: _Call) -> None:
    """As the loop does with its own callbacks."""
    try:
        call()
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException:
        log.exception("a client could not be served")


class Loop(asyncio.SelectorEventLoop):
    """An event loop that serves clients in their order."""

    def __init__(self) -> None:
        self._clients = _Selector()
        super().__init__(self._clients)

    def attend(self, fd: int, readable: _Call | None = None, writable: _Call | None = None) -> None:
        """From now on call these when a client's socket is so; without both it is let go."""
        self._clients.attend(fd, readable, writable)

    def after_others(self, call: _Call) -> None:
        """Call when all clients that wait now were served."""
        self._clients.after_others(call)


def run_in_loop(main: Coroutine[Any, Any, T]) -> T:
    """As ``asyncio.run``, in a loop that a node can serve in."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(main)
