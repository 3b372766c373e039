"""Sends what a client has put off, when no request came that could take it along.

A release need not be told at once, and a message of its own costs as much as a match. So it waits for the next
request, but not for long. While an engine is at work it puts something off at every step: then somebody looks again and
again, instead of being woken each time.
"""

from __future__ import annotations

import queue
import threading

from kvtide.node.line import Line, Lost

__all__ = ["Nudger"]

_SOON = 0.02
"""Seconds that what was put off waits for a request to go with, and as long again."""
_QUIET = 5
"""After so many times that nothing was put off nobody looks any more, until something is."""


class Nudger:
    """Nudges lines, on a thread of its own."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvtide-client-nudger", daemon=True)
        self._thread.start()

    def watch(self, line: Line) -> None:
        """Something was put off on that line."""
        self._lines.put(line)

    def _run(self) -> None:
        watched: dict[Line, int] = {}
        """How often nothing was put off on each line."""
        while True:
            try:
                line = self._lines.get(timeout=_SOON if watched else None)
            except queue.Empty:
                for line, quiet in list(watched.items()):
                    watched[line] = quiet = 0 if self._nudge(line) else quiet + 1
                    if quiet == _QUIET:
                        del watched[line]
                        self._leave(line)
            else:
                if line is None:
                    return
                watched[line] = 0

    @staticmethod
    def _nudge(line: Line) -> bool:
        try:
            return line.nudge()
        except Lost:
            return False

    def _leave(self, line: Line) -> None:
        line.watched = False
        if line.busy and line.alive:  # put off while we did not look
            line.watched = True
            self.watch(line)

    def close(self) -> None:
        self._lines.put(None)
        self._thread.join()
