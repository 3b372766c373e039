"""A server of a test in place of a node: listens over TCP, and answers each connection on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from kvtide.tiers.peers.tcp import Tcp
from kvtide.tiers.peers.transport import PeerConnection

__all__ = ["FakeServer"]


class FakeServer:
    """Subclasses say in ``_serve`` what a connection is answered. It may end with an OSError."""

    def __init__(self) -> None:
        """Listens at once: a subclass calls it when it is ready to serve."""
        self._listener = Tcp().listen("127.0.0.1:0")
        self.address = self._listener.address
        self._connections: list[PeerConnection] = []
        self._threads: list[threading.Thread] = []
        self._accepting = self._begin(self._accept)

    def _begin(self, work: Callable[..., None], *args: PeerConnection) -> threading.Thread:
        """Run something on a thread that ``close`` waits for."""

        def run() -> None:
            with suppress(OSError):
                work(*args)

        thread = threading.Thread(target=run, name="fake server")
        self._threads.append(thread)
        thread.start()
        return thread

    def _kept(self, connection: PeerConnection) -> PeerConnection:
        """A connection that ``close`` ends."""
        self._connections.append(connection)
        return connection

    def _accept(self) -> None:
        while True:
            self._begin(self._serve, self._kept(self._listener.accept()))

    def _serve(self, connection: PeerConnection) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self._listener.close()
        self._accepting.join()
        for connection in self._connections:
            connection.interrupt()
        for thread in self._threads:
            thread.join()
        for connection in self._connections:
            connection.close()
