"""A thread that talks to the node, so that an engine's loop never waits for one that hangs.

The loop asks, and waits a few milliseconds in a step at most: a node answers in a fraction of one. If it does not, the
loop goes on without the answer, and from then on does not wait at all until the thread is back. The thread belongs to
no core: an engine binds its own threads to cores, and what they start inherits that. Nor does a process wait for it to
end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from kvtide.errors import KvtideError
from kvtide.node.line import Lost
from kvtide.tiers.calls import Calls

__all__ = ["Errands", "attempt"]

log = logging.getLogger("kvtide.engines")

T = TypeVar("T")

_MOMENT = 0.003
"""Seconds that an engine's loop waits for answers, in a step."""
_CLOSING = 3.0
"""Seconds that an engine's end waits for the thread."""


class Errands:
    """Does one thing after the other. ``ask`` from any thread; ``soon`` from the engine's alone."""

    def __init__(self, name: str) -> None:
        self._calls = Calls(name)
        self._calls.put(_anywhere)
        self._late: Future[Any] | None = None
        """What was waited for in vain. Until it is done, the thread has not come back."""
        self._waited = 0.0

    def ask(self, job: Callable[[], T], otherwise: T) -> Future[T]:
        """The answer is ``otherwise`` if anything goes wrong: nothing that happens here may end the engine."""
        answer: Future[T] = Future()
        self._calls.put(lambda: answer.set_result(attempt(job, otherwise)))
        return answer

    def soon(self, answer: Future[T]) -> bool:
        """Whether the answer is here, now or in what is left of this step's moment."""
        if answer.done():
            return True
        left = _MOMENT - self._waited
        if left <= 0 or (self._late is not None and not self._late.done()):
            return False
        began = time.monotonic()
        with contextlib.suppress(TimeoutError):
            answer.result(left)
        self._waited += time.monotonic() - began
        if not answer.done():
            self._late = answer
        return answer.done()

    def step(self) -> None:
        """The engine begins another step."""
        self._waited = 0.0

    def close(self) -> None:
        """Do what was asked, and no more; if that takes long, nobody waits for it."""
        self._calls.close(_CLOSING)


def attempt(job: Callable[[], T], otherwise: T) -> T:
    """Do something that may go wrong; then the answer is ``otherwise``."""
    try:
        return job()
    except Lost:
        pass  # a miss, and said where it was found
    except KvtideError as e:
        log.warning("kvtide goes on without it: %s", e)
    except Exception:
        log.exception("kvtide met something unexpected, and goes on without it")
    return otherwise


def _anywhere() -> None:
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
