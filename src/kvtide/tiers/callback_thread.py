"""A thread that makes calls, one after the other, for those who must not make them on their own.

A client's thread that hears the node must not call the client's users: a callback that waits for the node (a drop, a
flush) would wait for itself. And a caller that may be interrupted must not give jobs to a tier: see lane.py.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

__all__ = ["CallbackThread"]

log = logging.getLogger("kvtide.calls")


class CallbackThread:
    """Makes calls on a thread of its own, one after the other."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Call it soon, unless we are closed before."""
        self._queue.put(call)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except Exception:
                log.exception("a callback failed")

    def close(self, timeout: float) -> None:
        """Make the calls that were given, and no more. Waits for that, unless one of them closes us."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
