"""A thread that talks to the node, so that an engine's loop never waits for one that hangs.

The loop asks, and waits a few milliseconds at most: a node answers in a fraction of one. If it does not, the loop goes
on without the answer, and from then on does not wait at all until the thread is back. The thread belongs to no core: an
engine binds its own threads to cores, and what they start inherits that.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from kvtide.errors import KvtideError

__all__ = ["Errands"]

log = logging.getLogger("kvtide.engines")

T = TypeVar("T")

_MOMENT = 0.003
"""Seconds that an engine's loop waits for an answer."""


class Errands:
    """Does one thing after the other. ``ask`` from any thread; ``soon`` from the engine's alone."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, name, initializer=_anywhere)
        self._late: Future[Any] | None = None

    @property
    def late(self) -> bool:
        """Whether the thread has not come back from something that was waited for."""
        return self._late is not None and not self._late.done()

    def ask(self, job: Callable[[], T], otherwise: T) -> Future[T]:
        """The answer is ``otherwise`` if anything goes wrong: nothing that happens here may end the engine."""
        return self._pool.submit(_do, job, otherwise)

    def soon(self, answer: Future[T]) -> bool:
        """Whether the answer is here, now or in a moment."""
        if answer.done():
            return True
        if self.late:
            return False
        if wait([answer], _MOMENT).done:
            return True
        self._late = answer
        return False

    def close(self) -> None:
        """Do what was asked, and no more."""
        self._pool.shutdown()


def _do(job: Callable[[], T], otherwise: T) -> T:
    try:
        return job()
    except KvtideError as e:
        log.warning("kvtide goes on without it: %s", e)
    except Exception:
        log.exception("kvtide met something unexpected, and goes on without it")
    return otherwise


def _anywhere() -> None:
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
