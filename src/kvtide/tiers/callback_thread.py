"""A thread that makes calls, one after the other, for threads that must not make them themselves.

The client's thread that reads from the node must not call the client's users: a callback that waits for the node (a
drop, a flush) would wait for itself. And a caller that may be interrupted must not submit jobs to a tier: see lane.py.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

__all__ = ["CallbackThread"]

log = logging.getLogger("kvtide.calls")


class CallbackThread:
    """Makes calls on its own thread, one after the other."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Make a call soon, unless this is closed before."""
        self._queue.put(call)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except Exception:
                log.exception("a callback failed")

    def close(self, timeout: float) -> None:
        """Make the calls that were given, and no more. Waits for that, unless called from one of them."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
