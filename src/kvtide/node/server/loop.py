"""The node's event loop: asyncio's, with clients served in the order in which their requests arrived.

asyncio asks the kernel which sockets are ready, and then serves all of them. The kernel keeps the reported sockets in
their places in its ready list: of eight busy clients, those served first send another request before the last ones are
served, and are then served again before a client whose request arrived in the meantime. One request in ten took twice
as long as the others.

So clients are not callbacks of the loop. The loop's selector serves them itself and asks the kernel for a single event
after each; that also spares every request the loop's own bookkeeping. After a few clients the loop has its turn:
timers, notices, connections. If serving the clients has given the loop nothing to do, the selector itself waits for the
next one, until the loop's next timer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import select
import selectors
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

__all__ = ["Loop", "run_in_loop"]

log = logging.getLogger("kvtide.node")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_TURN = 8
"""Number of clients that are served before the loop does its other work."""

_Call = Callable[[], None]


class _Selector(selectors.EpollSelector):
    """Reports ready descriptors to the loop, except those of clients, which it serves itself."""

    def __init__(self) -> None:
        super().__init__()
        self._epoll = select.epoll.fromfd(os.dup(self.fileno()))
        """The same epoll instance, for asking for a single event."""
        self._clients: dict[int, tuple[_Call | None, _Call | None]] = {}
        self._served = 0
        self._waiting: deque[tuple[int, _Call]] = deque()
        """Calls to make, each once ``_served`` has reached its number."""
        self.loop_waits = False
        """Whether the loop has been given something to do since it last called ``select``."""

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
        self.loop_waits = False
        end = math.inf if timeout is None else time.monotonic() + timeout
        poll, clients, waiting = self._epoll.poll, self._clients, self._waiting
        for _ in range(_TURN):
            due = waiting and waiting[0][0] <= self._served
            found = [] if due else poll(0.0 if waiting or self.loop_waits else _until(end), 1)
            if not found:
                if waiting:
                    _guarded(waiting.popleft()[1])
                break
            fd, events = found[0]
            if fd not in clients:
                return self._others(fd, events)
            self._serve(fd, events)
        return []

    def _serve(self, fd: int, events: int) -> None:
        self._served += 1
        readable, _ = self._clients[fd]
        if readable is not None and events & ~select.EPOLLOUT:
            # Read first: a client that hung up cannot be written to, but what it sent before must be processed.
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


def _until(end: float) -> float:
    """Seconds to wait in the kernel; -1: without limit."""
    if end == math.inf:
        return -1.0
    # The kernel counts in milliseconds: without rounding up, the loop would poll repeatedly until a timer is due.
    return max(0.0, math.ceil((end - time.monotonic()) * 1e3) * 1e-3)


def _guarded(call: _Call) -> None:
    """Call, and log exceptions, as the loop does with its own callbacks."""
    try:
        call()
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException:
        log.exception("a client could not be served")


class Loop(asyncio.SelectorEventLoop):
    """An event loop that serves clients in the order of their requests."""

    def __init__(self) -> None:
        self._clients = _Selector()
        super().__init__(self._clients)

    # All ways to give the loop something to do. Other threads and signals wake it through a socket of its own.

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        self._clients.loop_waits = True
        return super().call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        self._clients.loop_waits = True
        return super().call_at(when, callback, *args, context=context)

    def stop(self) -> None:
        self._clients.loop_waits = True
        super().stop()

    def attend(self, fd: int, readable: _Call | None = None, writable: _Call | None = None) -> None:
        """From now on call these when a client's socket is readable or writable; with neither, the socket is
        removed."""
        self._clients.attend(fd, readable, writable)

    def after_others(self, call: _Call) -> None:
        """Call ``call`` when all clients that wait now were served."""
        self._clients.after_others(call)


def run_in_loop(main: Coroutine[Any, Any, T]) -> T:
    """Like ``asyncio.run``, in a loop of the kind that a node needs."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(main)
