"""Sends what a client has put off, when no request came that could take it along.

A release need not be told at once, and a message of its own costs as much as a match. So it waits for the next
request, but not for long. While an engine is at work it puts something off at every step: then somebody looks again and
again, instead of being woken each time.
"""

from __future__ import annotations

import queue
import threading

from kvtide.node.client.link import NodeLink, NodeUnavailable

__all__ = ["DeferredSender"]

_SOON = 0.02
"""Seconds that what was put off waits for a request to go with, and as long again."""
_QUIET = 5
"""After so many times that nothing was put off nobody looks any more, until something is."""


class DeferredSender:
    """Nudges lines, on a thread of its own."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[NodeLink | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvtide-client-nudger", daemon=True)
        self._thread.start()

    def watch(self, link: NodeLink) -> None:
        """Something was put off on that line."""
        self._lines.put(link)

    def _run(self) -> None:
        watched: dict[NodeLink, int] = {}
        """How often nothing was put off on each line."""
        while True:
            try:
                link = self._lines.get(timeout=_SOON if watched else None)
            except queue.Empty:
                for link, quiet in list(watched.items()):
                    watched[link] = quiet = 0 if self._nudge(link) else quiet + 1
                    if quiet == _QUIET:
                        del watched[link]
                        self._leave(link)
            else:
                if link is None:
                    return
                watched[link] = 0

    @staticmethod
    def _nudge(link: NodeLink) -> bool:
        try:
            return link.nudge()
        except NodeUnavailable:
            return False

    def _leave(self, link: NodeLink) -> None:
        link.watched = False
        if link.busy and link.alive:  # put off while we did not look
            link.watched = True
            self.watch(link)

    def close(self) -> None:
        self._lines.put(None)
        self._thread.join()
