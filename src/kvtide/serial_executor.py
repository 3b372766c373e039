"""One thread that runs queued calls in order, for threads that must not run them themselves.

The client's thread that reads from the node must not call the client's users: a callback that waits for the node (a
drop, a flush) would wait for itself. A caller that may be interrupted must not submit jobs to a tier: see lane.py. An
engine's loop must not wait for a node: see node_thread.py.

``put`` is reentrant, so finalizers and signal handlers may call it. The process does not wait for the
thread when it exits. After a fork the child has no such thread: there, calls are queued and never run, and ``close``
returns at once.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

__all__ = ["SerialExecutor"]

log = logging.getLogger("kvtide.calls")


class SerialExecutor:
    """Runs calls one after the other, on its own thread."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Run a call soon, unless this is closed before."""
        self._queue.put(call)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except BaseException:  # SystemExit too: it would end this thread, and no later call would run
                log.exception("%s: a queued call failed; later calls are run", self._thread.name)
            del call  # else its arguments would be referenced until the next call

    def close(self, timeout: float) -> None:
        """Run the calls that were queued, and no more. Waits for that, unless called from one of them."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
