"""Interrupts connections whose deadline has passed.

A blocked ``recv`` or ``send`` has no total timeout: one byte a second keeps it going. So one thread looks at all
connections ``_LOOKS`` times in a timeout, and interrupts those that are overdue. When no connection had a deadline for
a while, it sleeps until one has. Not at once, because to wake a thread for each request would take longer than most of
what a lookup does.
"""

from __future__ import annotations

import math
import threading
import time

from kvtide.tiers.peers.transport import PeerConnection

__all__ = ["Watchdog"]

_LOOKS = 16
_QUIET = 64
"""So many times in a row no connection has a deadline before the thread sleeps."""


class Watchdog:
    """For connections with deadlines of ``timeout`` seconds or so. Thread-safe."""

    def __init__(self, timeout: float) -> None:
        self._pause = timeout / _LOOKS
        self._connections: set[PeerConnection] = set()
        self._changed = threading.Condition()
        self.sleeps = False
        """Whether no connection has had a deadline for a while, so that nothing is looked at."""
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="kvtide-peers-watch", daemon=True)
        self._thread.start()

    def add(self, connection: PeerConnection) -> None:
        """Watch a connection, until ``remove``."""
        with self._changed:
            self._connections.add(connection)
            self._changed.notify()

    def remove(self, connection: PeerConnection) -> None:
        with self._changed:
            self._connections.discard(connection)

    def limit(self, connection: PeerConnection, seconds: float) -> None:
        """Interrupt a connection that is added, unless it gets another deadline within that many seconds."""
        connection.due = time.monotonic() + seconds
        # The thread says that it sleeps before it looks at the deadlines for the last time, so one of both sees it.
        if self.sleeps:
            with self._changed:
                self._changed.notify()

    def interrupt_all(self) -> None:
        with self._changed:
            found = list(self._connections)
        for connection in found:
            connection.interrupt()

    def _watch(self) -> None:
        quiet = 0
        while not self._closed:
            with self._changed:
                self.sleeps = quiet >= _QUIET
                idle = all(connection.due == math.inf for connection in self._connections)
                quiet = quiet + 1 if idle else 0
                self.sleeps = self.sleeps and idle
                if not self._closed:
                    self._changed.wait(None if self.sleeps else self._pause)
                self.sleeps = False
                now = time.monotonic()
                overdue = [connection for connection in self._connections if connection.due <= now]
            for connection in overdue:
                connection.interrupt()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
