"""The thread that learns from uses of blocks, so that no caller waits for it."""

from __future__ import annotations

import logging
import threading

from kvtide.plan.usage_tracker import UsageTracker

__all__ = ["LearningThread"]

log = logging.getLogger("kvtide.plan")


class LearningThread:
    """Learns whenever there is enough to learn from, until it is closed."""

    def __init__(self, uses: UsageTracker) -> None:
        self._uses = uses
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtide-learner", daemon=True)
        if uses.learns:
            self._thread.start()

    def _run(self) -> None:
        # learning clears ``due``, which ``close`` sets, so ``_closed`` is checked before each wait too
        while not self._closed.is_set():
            self._uses.due.wait()
            if not self._closed.is_set():
                try:
                    self._uses.catch_up()
                except Exception:
                    log.exception("nothing was learned from the last uses of blocks; eviction goes on as before")
                    self._uses.due.clear()

    def close(self) -> None:
        self._closed.set()
        self._uses.stopped = True
        self._uses.due.set()
        if self._thread.ident is not None:
            self._thread.join()
