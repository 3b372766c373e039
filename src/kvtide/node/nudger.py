"""Sends what a client has put off, when no request came that could take it along.

A release need not be told at once, and a message of its own costs as much as a match. So it waits for the next
request, but not for long. While an engine is at work it puts something off at every step: then somebody looks again and
again, instead of being woken each time.
"""

from __future__ import annotations

import contextlib
import queue
import threading

from kvtide.node.line import Line, Lost

__all__ = ["Nudger"]

_SOON = 0.002
"""Seconds that what was put off waits for a request to go with, and as long again."""
_QUIET = 50
"""After so many times that nothing was put off nobody looks any more, until something is."""


class Nudger:
    """Nudges lines, on a thread of its own."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtide-client-nudger", daemon=True)
        self._thread.start()

    def watch(self, line: Line) -> None:
        """Something was put off on that line."""
        self._lines.put(line)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            with contextlib.suppress(Lost):
                self._nudge(line)

    def _nudge(self, line: Line) -> None:
        quiet = 0
        while quiet < _QUIET and not self._closing.wait(_SOON):
            quiet = 0 if line.nudge() else quiet + 1
        line.watched = False
        if line.busy:  # put off while we did not look
            line.watched = True
            self.watch(line)

    def close(self) -> None:
        self._closing.set()
        self._lines.put(None)
        self._thread.join()
