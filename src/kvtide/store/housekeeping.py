"""The thread of a partition that removes expired blocks (``Partition.tidy``), prefetches expected prompts, and writes
the table of why blocks are absent.

It sleeps until work is due, and then works in slices (``index/work_slices.py``): no caller waits long for it. It
starts when the first block gets an expiry or is expected back, or when some hundred blocks have left, ends when the
partition is closed, and does not keep an otherwise unreferenced one alive. A call that arrives when blocks have expired
does one slice itself: if no thread can be started, the work is still done, a little with every call.

Time is that of the partition's clock. A clock that is set by hand (``kvtide.testing.clock``) wakes the thread when it
changes; if the system's clock jumps, the next call wakes it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from queue import Empty, SimpleQueue
from typing import Protocol

from kvtide.clock import Clock, TurnedClock
from kvtide.index.work_slices import rest

__all__ = ["Housekeeper", "Housekept"]

log = logging.getLogger("kvtide.store")

_LONGEST = 3600.0
"""Maximum sleep in seconds."""
_AFTER_ERROR = 1.0
"""Pause in seconds after an error, so that a persistent one does not keep a core busy."""


class _WakeUp:
    """Wakes a thread. Not a ``threading.Event``: a caller that is interrupted while it sets one may leave it locked,
    for all later callers too; this queue, written in C, it cannot."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        if self._queue.empty():
            self._queue.put(None)

    def clear(self) -> None:
        """Forget the calls of ``set`` so far."""
        with contextlib.suppress(Empty):
            while True:
                self._queue.get_nowait()

    def wait(self, seconds: float) -> None:
        """Wait for a call of ``set`` since the last ``clear`` or ``wait``."""
        with contextlib.suppress(Empty):
            self._queue.get(timeout=seconds)


class Housekept(Protocol):
    """An object that has work to be done in slices."""

    def tidy(self) -> float:
        """Do one slice; returns the seconds until the next is due, or infinity if there is none until ``wake``."""


class Housekeeper:
    """A thread that calls ``tidy`` of its owner whenever that is due, from the first ``wake`` until it is closed."""

    def __init__(self, owner: Housekept, clock: Clock) -> None:
        self._wake = wake = _WakeUp()
        self._owner = weakref.ref(owner, lambda _: wake.set())
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        if isinstance(clock, TurnedClock):
            clock.follow(wake.set)

    def __repr__(self) -> str:
        return f"<Housekeeper{', at work' if self._thread is not None else ''}>"

    def wake(self) -> None:
        """Signal that there may be work, now or later. Does not wait; may be called with any lock held."""
        self._wake.set()
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._thread is not None or self._closed.is_set():
                return
            thread = threading.Thread(target=self._run, name="kvtide-housekeeping", daemon=True)
            try:
                thread.start()
            except RuntimeError as e:  # callers do its work, and the next one tries again
                log.debug("the housekeeping thread cannot be started: %s", e)
            else:
                self._thread = thread

    def _run(self) -> None:
        # A caller that was interrupted while starting the thread cannot know whether it runs. So the thread registers
        # itself, and does nothing if another one is at work or the housekeeper is closed.
        me = threading.current_thread()
        with self._lock:
            if self._closed.is_set() or self._thread not in (None, me):
                return
            self._thread = me
        _work(self._owner, self._wake, self._closed)

    def close(self) -> None:
        """End the thread, and wait until it has ended."""
        with self._lock:
            self._closed.set()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


def _work(owner: weakref.ref[Housekept], wake: _WakeUp, closed: threading.Event) -> None:
    while not closed.is_set():
        kept = owner()
        if kept is None:
            return
        wake.clear()
        try:
            left = kept.tidy()
        except Exception:
            log.exception("housekeeping failed; it goes on in %g s", _AFTER_ERROR)
            left = 0.0
            closed.wait(_AFTER_ERROR)
        del kept  # otherwise the thread would keep it alive while it sleeps
        if left > 0:
            wake.wait(min(left, _LONGEST))
        else:
            rest()
