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

    def attend(self, fd: int, readable: _Call | None, writable: _Call | None) -> None:
        events = (select.EPOLLIN if readable else 0) | (select.EPOLLOUT if writable else 0)
        known = fd in self._clients
        if not events:
            if known:
                del self._clients[fd]
                self._epoll.unregister(fd)
            return
        self._clients[fd] = readable, writable
        (self._epoll.modify if known else self._epoll.register)(fd, events)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # The system counts in milliseconds: without rounding up a timer would be asked for again and again.
        wait = -1.0 if timeout is None else math.ceil(timeout * 1e3) * 1e-3 if timeout > 0 else 0.0
        poll, clients = self._epoll.poll, self._clients
        for _ in range(_TURN):
            found = poll(wait, 1)
            if not found:
                break
            (fd, events), wait = found[0], 0.0
            if fd not in clients:
                return self._others(fd, events)
            readable, writable = clients[fd]
            try:
                if writable is not None and (events & select.EPOLLOUT or readable is None):
                    writable()
                elif readable is not None:
                    readable()
            except Exception:  # as the loop does with its callbacks
                log.exception("a client could not be served")
        return []

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


class Loop(asyncio.SelectorEventLoop):
    """An event loop that serves clients in their order."""

    def __init__(self) -> None:
        self._clients = _Selector()
        super().__init__(self._clients)

    def attend(self, fd: int, readable: _Call | None = None, writable: _Call | None = None) -> None:
        """From now on call these when a client's socket is so; without both it is let go."""
        self._clients.attend(fd, readable, writable)


def run_in_loop(main: Coroutine[Any, Any, T]) -> T:
    """As ``asyncio.run``, in a loop that a node can serve in."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(main)
