"""Sends deferred operations of a client when no request came that could take them along.

A release need not be sent at once, and a message of its own costs as much as a match. So it waits for the next request,
but not for long. A working engine defers something at every step: then this thread polls, instead of being woken each
time.
"""

from __future__ import annotations

import queue
import threading

from kvtide.node.client.link import NodeLink, NodeUnavailable

__all__ = ["DeferredSender"]

_SOON = 0.02
"""Seconds between two nudges. A deferred operation waits for a request for one to two of these intervals."""
_QUIET = 5
"""After this many nudges of a link on which nothing was deferred, it is not polled until something is deferred
again."""


class DeferredSender:
    """Nudges links, on a thread of its own."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[NodeLink | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvtide-client-deferred", daemon=True)
        self._thread.start()

    def watch(self, link: NodeLink) -> None:
        """Something was deferred on that link."""
        self._lines.put(link)

    def _run(self) -> None:
        watched: dict[NodeLink, int] = {}
        """By link, the number of consecutive nudges at which nothing was deferred."""
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
        if link.busy and link.alive:  # deferred after the last nudge
            link.watched = True
            self.watch(link)

    def close(self) -> None:
        self._lines.put(None)
        self._thread.join()
