"""A transfer of blocks in progress: wait for it, await it, or cancel it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from kvtide import arguments, forks
from kvtide.clock import Clock

__all__ = ["Transfer"]

log = logging.getLogger("kvtide.transfer")


class Transfer:
    """Counts blocks as they arrive. The same object serves threads (``wait``) and asyncio (``await``).

    It ends when every block has arrived or failed, when its deadline passes, or when it is cancelled, whichever is
    first. Blocks that arrive later are kept in the store, but this transfer ignores them.
    """

    def __init__(
        self, clock: Clock, deadline: float | None = None, run: Callable[[Callable[[], None]], None] | None = None
    ) -> None:
        """``run`` calls callbacks; without it, the thread that ends the transfer calls them."""
        self._clock = clock
        self._run = run
        self._origin = forks.here
        self._began = clock.monotonic()
        self.deadline = deadline
        """On the monotonic clock; None: no deadline."""
        self.arrived: set[int] = set()
        """Rows that are in DRAM, complete and verified."""
        self.failed: set[int] = set()
        self.report: object = None
        """The report of the node at the end, if a node moves the blocks."""
        self._waiting: set[int] = set()
        self._left = False
        """Whether it ended while blocks were under way."""
        self._ended = False
        self._lock = threading.Lock()
        self._waiters: list[threading.Lock] = []
        """One lock for each waiting thread, released at the end. Not an Event, which an interruption may leave
        unusable."""
        self._callbacks: list[Callable[[], None]] = []

    @classmethod
    def within(
        cls,
        clock: Clock,
        seconds: float | None,
        usual: float,
        run: Callable[[Callable[[], None]], None] | None = None,
    ) -> Transfer:
        """With a deadline ``seconds`` from now; None: the ``usual`` number of seconds, of which 0 means no deadline."""
        if seconds is None:
            seconds = usual or None
        return cls(clock, None if seconds is None else clock.monotonic() + seconds, run)

    def __repr__(self) -> str:
        state = "ended" if self._ended else f"{len(self._waiting)} under way"
        return f"<Transfer {len(self.arrived)} arrived, {len(self.failed)} failed, {state}>"

    @property
    def wanted(self) -> bool:
        """Whether it is still waited for: neither ended nor past its deadline."""
        if self._ended:
            return False
        return self.deadline is None or self._clock.monotonic() < self.deadline

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def clock(self) -> Clock:
        return self._clock

    @property
    def age(self) -> float:
        """Seconds since it began."""
        return self._clock.monotonic() - self._began

    @property
    def outcome(self) -> str:
        """How it ended: ``whole``, ``partial`` (some blocks were unavailable), ``deadline`` or ``cancelled``."""
        if self._left and self.deadline is not None and self._clock.monotonic() >= self.deadline:
            return "deadline"
        return "cancelled" if self._left else "partial" if self.failed else "whole"

    # -- for the pipeline ---------------------------------------------------------------------------------

    def expect(self, rows: Iterable[int]) -> None:
        self._waiting.update(rows)

    def finish(self, rows: Sequence[int], arrived: Sequence[bool]) -> None:
        """Report rows that have arrived or failed."""
        with self._lock:
            if self._ended or not (self._waiting or self.arrived or self.failed):
                return
            expected = self._waiting.intersection(rows)
            bad: set[int] = set()
            if False in arrived:
                bad = expected.intersection([r for r, good in zip(rows, arrived, strict=True) if not good])
            # ``_waiting`` is reduced last, so that an interrupted call can be repeated.
            self.failed.update(bad)
            self.arrived.update(expected - bad)
            self._waiting.difference_update(expected)
            if self._waiting:
                return
        self._end()

    def started(self) -> None:
        """Called when everything expected is known."""
        if not self._waiting and not self._ended:
            self._end()

    def _end(self) -> None:
        """End it, once; the next call completes what an interrupted one left to do."""
        with self._lock:
            if not self._ended:
                lost = self.failed | self._waiting
                self._left, self.failed, self._waiting, self._ended = bool(self._waiting), lost, set(), True
        for waiter in list(self._waiters):
            with contextlib.suppress(RuntimeError):  # it was released before
                waiter.release()
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:  # another thread took it
                return
            _call(callback)

    # -- for callers --------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Stop waiting. Reads that have not started are not made, unless another transfer wants them."""
        if self._origin is forks.here:  # otherwise it belongs to the parent process, and continues there
            self._end()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it ends; False if ``timeout`` seconds passed before. A passed deadline ends it."""
        forks.check(self._origin, "transfer")
        timeout = arguments.seconds(timeout, "timeout")
        left = None if self.deadline is None else max(0.0, self.deadline - self._clock.monotonic())
        limit = min((t for t in (left, timeout) if t is not None), default=None)
        waiter = threading.Lock()
        waiter.acquire()
        with self._lock:
            if self._ended:
                return True
            self._waiters.append(waiter)
        try:
            came = waiter.acquire(timeout=-1 if limit is None else min(limit, threading.TIMEOUT_MAX))
        finally:
            with self._lock:  # otherwise a caller that polls would leave one each time
                self._waiters.remove(waiter)
        if not came and left is not None and (timeout is None or left <= timeout):
            self._end()
        return self._ended

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when it ends; at once if it has ended.

        It runs on the thread that ends the transfer, which may be one of the store's own: it must be quick and must not
        block. A node's client has a thread for such callbacks, where blocking is allowed.
        """
        forks.check(self._origin, "transfer")
        arguments.callback(callback, "callback")
        self._at_end(callback if self._run is None else functools.partial(self._run, callback))

    def _at_end(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self._ended:
                self._callbacks.append(callback)
                return
        _call(callback)

    def __await__(self) -> Generator[Any, None, bool]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> bool:
        forks.check(self._origin, "transfer")
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def wake() -> None:
            # The loop may be closed when a disk answers; then no task waits any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(ended.set)

        self._at_end(wake)
        left = None if self.deadline is None else max(0.0, self.deadline - self._clock.monotonic())
        try:
            async with asyncio.timeout(left):
                await ended.wait()
        except TimeoutError:
            self._end()
        return self._ended


def _call(callback: Callable[[], None]) -> None:
    """Call a callback; its error must not stop the tier's thread on which the last block arrived."""
    try:
        callback()
    except Exception:
        log.exception("a callback at the end of a transfer failed")
