"""A thread that talks to the node, so that an engine's loop never waits for one that hangs.

The loop asks, and waits a few milliseconds in a step at most: a node answers in a fraction of one. If it does not, the
loop goes on without the answer, and from then on does not wait at all until the thread is back. The thread belongs to
no core: an engine binds its own threads to cores, and what they start inherits that. Nor does a process wait for it to
end.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from kvtide.binding import unbind_thread
from kvtide.errors import KvtideError
from kvtide.node.client.link import NodeUnavailable
from kvtide.tiers.callback_thread import CallbackThread

__all__ = ["NodeThread", "attempt"]

log = logging.getLogger("kvtide.engines")

T = TypeVar("T")

_MOMENT = 0.003
"""Seconds that an engine's loop waits for answers, in a step that takes no longer than 30 times that."""
_LONGEST = 0.1
"""And if it takes longer, up to so many."""
_CLOSING = 3.0
"""Seconds that an engine's end waits for the thread."""


class NodeThread:
    """Does one thing after the other. ``ask`` from any thread; ``soon`` from the engine's alone."""

    def __init__(self, name: str) -> None:
        self._calls = CallbackThread(name)
        self._calls.put(unbind_thread)
        self._late: Future[Any] | None = None
        """What was waited for in vain. Until it is done, the thread has not come back."""
        self._waited = 0.0
        self._seconds = 0.0
        """What this step takes, as far as that is known."""

    def ask(self, job: Callable[[], T], otherwise: T) -> Future[T]:
        """The answer is ``otherwise`` if anything goes wrong: nothing that happens here may end the engine."""
        answer: Future[T] = Future()
        self._calls.put(lambda: answer.set_result(attempt(job, otherwise)))
        return answer

    def soon(self, answer: Future[T], share: float = 1.0) -> bool:
        """Whether the answer is here, now or in what is left of this step's moment, or of a share of it."""
        if answer.done():
            return True
        left = max(_MOMENT, min(_LONGEST, self._seconds / 30)) * share - self._waited
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
        self._waited = self._seconds = 0.0

    def takes(self, seconds: float) -> None:
        """This step takes so long: an engine that computes for seconds does not notice a few milliseconds more, the
        less as it plans a step while it computes the one before."""
        self._seconds = seconds

    def close(self) -> None:
        """Do what was asked, and no more; if that takes long, nobody waits for it."""
        self._calls.close(_CLOSING)


def attempt(job: Callable[[], T], otherwise: T) -> T:
    """Do something that may go wrong; then the answer is ``otherwise``."""
    try:
        return job()
    except NodeUnavailable:
        pass  # a miss, and said where it was found
    except KvtideError as e:
        log.warning("kvtide goes on without it: %s", e)
    except Exception:
        log.exception("kvtide met something unexpected, and goes on without it")
    return otherwise
