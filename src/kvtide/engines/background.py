"""A thread for what must not be waited for: a few jobs, done in order, and refused when too many wait."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

__all__ = ["Background"]

log = logging.getLogger("kvtide.engines")


class Background:
    """Does jobs one after the other. Safe from any thread.

    A job keeps what it works on in memory (KV on the GPU, say), so only ``limit`` of them may be there at a time.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._limit = limit
        self._pool = ThreadPoolExecutor(1, name)
        self._lock = threading.Lock()
        self._jobs: set[Future[None]] = set()
        self._closed = False

    def put(self, job: Callable[[], None]) -> Future[None] | None:
        """Do it soon. None if that is refused: too many wait, or we are closed."""
        with self._lock:
            if self._closed or len(self._jobs) >= self._limit:
                return None
            future = self._pool.submit(_quietly, job)
            self._jobs.add(future)
        future.add_done_callback(self._over)
        return future

    def _over(self, future: Future[None]) -> None:
        with self._lock:
            self._jobs.discard(future)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until what was put before is done. False if ``timeout`` seconds passed before."""
        with self._lock:
            jobs = list(self._jobs)
        return not wait(jobs, timeout).not_done

    def close(self) -> None:
        """Do what was put, and take no more."""
        with self._lock:
            self._closed = True
        self._pool.shutdown()


def _quietly(job: Callable[[], None]) -> None:
    try:
        job()
    except Exception:
        log.exception("a job in the background failed")
