"""A background thread that runs a few jobs in order, and refuses more when too many wait.

It has the standard library's pool of one thread, not a ``SerialExecutor``, because its callers wait for single jobs and
cancel them, and because a process that exits first finishes the queued jobs: they store what was computed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

__all__ = ["BoundedExecutor"]

log = logging.getLogger("kvtide.engines")


class BoundedExecutor:
    """Runs jobs one after the other. Thread-safe.

    A job keeps the memory that it works on (KV on the GPU, say), so at most ``limit`` jobs may be queued or running.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._limit = limit
        self._pool = ThreadPoolExecutor(1, name)
        self._lock = threading.Lock()
        self._jobs: set[Future[None]] = set()
        self._closed = False

    def put(self, job: Callable[[], None]) -> Future[None] | None:
        """Queue a job. Returns None if it is refused: too many wait, or this object is closed."""
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
        """Wait until all jobs queued so far are done. False if ``timeout`` seconds passed before."""
        with self._lock:
            jobs = list(self._jobs)
        return not wait(jobs, timeout).not_done

    def close(self) -> None:
        """Finish the queued jobs, and accept no more."""
        with self._lock:
            self._closed = True
        self._pool.shutdown()


def _quietly(job: Callable[[], None]) -> None:
    try:
        job()
    except Exception:
        log.exception("a job in the background failed")
