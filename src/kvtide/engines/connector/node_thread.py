"""The node thread: it talks to the node, so that an engine's loop never waits for a node that hangs.

The loop queues a call and waits at most a few milliseconds per step; a node usually answers in a fraction of one. If
the answer is late, the loop goes on without it, and waits for no call that runs after it until that answer has arrived.

The thread is not bound to a core: an engine binds its own threads to cores, and threads that they start inherit that
binding. The process does not wait for this thread to end.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from kvtide import forks
from kvtide.cpu_binding import unbind_thread
from kvtide.errors import KvtideError
from kvtide.node.client.link import NodeUnavailable
from kvtide.serial_executor import SerialExecutor

__all__ = ["NodeThread", "attempt"]

log = logging.getLogger("kvtide.engines")

T = TypeVar("T")

_MOMENT = 0.003
"""Seconds per step that an engine's loop waits for answers, if the step takes no longer than 30 times that."""
_LONGEST = 0.1
"""Upper limit in seconds of that wait; longer steps may wait for up to a thirtieth of their duration."""
_CLOSING = 3.0
"""Seconds that closing waits for the thread."""


class NodeThread:
    """Runs calls one after the other. ``ask`` may be called from any thread, all else only from the engine's."""

    def __init__(self, name: str) -> None:
        self._calls = SerialExecutor(name)
        self._calls.put(unbind_thread)
        self._in_turn: deque[Callable[[], None]] = deque()
        """Calls of ``ask_in_turn``: the one that runs, or is queued to run, and those after it."""
        self._turn_lock = threading.Lock()
        forks.tell(self)
        self._late: Future[Any] | None = None
        self._late_in_turn: Future[Any] | None = None
        """The last call of ``ask``, and of ``ask_in_turn``, whose answer did not arrive in time. Until it is done, the
        loop does not wait for calls that run after it."""
        self._waited = 0.0
        self._seconds = 0.0
        """Estimated duration of this step, if known."""

    def ask(self, job: Callable[[], T], otherwise: T) -> Future[T]:
        """Queue ``job``. The result is ``otherwise`` if it fails: no error here may stop the engine."""
        answer: Future[T] = Future()
        self._calls.put(partial(_answer, job, otherwise, answer))
        return answer

    def ask_in_turn(self, job: Callable[[], T], otherwise: T) -> Future[T]:
        """As ``ask``, for calls of which there may be many: they run in their order, but after each of them the calls
        of ``ask`` go first."""
        answer: Future[T] = Future()
        with self._turn_lock:
            if not self._in_turn:
                self._calls.put(self._next_in_turn)
            self._in_turn.append(partial(_answer, job, otherwise, answer))
        return answer

    def _next_in_turn(self) -> None:
        with self._turn_lock:
            if not self._in_turn:  # the caller was interrupted
                return
        try:
            self._in_turn[0]()
        finally:
            with self._turn_lock:
                self._in_turn.popleft()
                if self._in_turn:
                    self._calls.put(self._next_in_turn)

    def forked(self) -> None:
        self._turn_lock = threading.Lock()
        self._late = self._late_in_turn = None

    def soon(self, answer: Future[T], share: float = 1.0, *, in_turn: bool = False) -> bool:
        """Return whether the answer has arrived, waiting for what is left of this step's limit, or of a ``share`` of
        it. ``in_turn``: the call is one of ``ask_in_turn``."""
        if answer.done():
            return True
        left = max(_MOMENT, min(_LONGEST, self._seconds / 30)) * share - self._waited
        before = (self._late, self._late_in_turn) if in_turn else (self._late,)
        if left <= 0 or any(late is not None and not late.done() for late in before):
            return False
        began = time.monotonic()
        with contextlib.suppress(TimeoutError):
            answer.result(left)
        self._waited += time.monotonic() - began
        done = answer.done()
        if not done and in_turn:
            self._late_in_turn = answer
        elif not done:
            self._late = answer
        return done

    def step(self) -> None:
        """Start a new step of the engine."""
        self._waited = self._seconds = 0.0

    def takes(self, seconds: float) -> None:
        """Set the duration of this step: an engine that computes for seconds does not notice a few milliseconds more,
        all the less because it plans a step while it computes the one before."""
        self._seconds = seconds

    def close(self) -> None:
        """Finish the calls that ``ask`` has queued, and drop those of ``ask_in_turn``; wait for that no longer than
        ``_CLOSING``."""
        self._calls.close(_CLOSING)


def _answer(job: Callable[[], T], otherwise: T, answer: Future[T]) -> None:
    result = otherwise
    try:
        result = attempt(job, otherwise)
    finally:  # even after a SystemExit: the engine, or a later call, may wait for the answer
        answer.set_result(result)


def attempt(job: Callable[[], T], otherwise: T) -> T:
    """Call ``job``; return ``otherwise`` if it fails."""
    try:
        return job()
    except NodeUnavailable:
        pass  # a miss; already logged where it was detected
    except KvtideError as e:
        log.warning("kvtide: a call to the node failed, and the engine continues without it: %s", e)
    except Exception:
        log.exception("kvtide: an unexpected error; the engine continues without this call")
    return otherwise
