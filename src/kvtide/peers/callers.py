"""Which connections a server has, and which of them must go so that others get in.

A *stranger* is a connection that is not authenticated yet. Anybody can make any number of them, so a new one is let in
always, and the limits, for each address and for all together, end an older one: first those that have not said
anything, because an honest node says its greeting at once. So idle strangers, however many and however often they come
back, keep nobody out. Connections that are authenticated are not ended for others; an address may have a part of them
only."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from kvtide.block import Span
from kvtide.peers.blocks import host_of
from kvtide.tiers.peers.protocol import PeerViolation, Violation
from kvtide.tiers.peers.transport import PeerConnection

__all__ = ["GreetedPeer", "PeerCaller", "PeerCallers"]

_CONNECTIONS = 512
_EACH = 96
"""Authenticated connections of one address: a node has five at most, unless its settings say otherwise."""
_STRANGERS = 64
_STRANGERS_EACH = 16
_LEAVING = 128
"""Threads of strangers that were ended, and have not noticed yet."""


class PeerCaller:
    """A connection that another node has made."""

    def __init__(self, connection: PeerConnection, thread: threading.Thread | None = None) -> None:
        self.connection = connection
        self.thread = thread
        self.host = host_of(connection.peer)
        self.stranger = True
        self.heard = False
        """Whether it has said a greeting: then it was answered."""
        self.ended: Violation | None = None
        """Why this side ended it."""

    def __repr__(self) -> str:
        return f"<PeerCaller at {self.connection.peer}{', a stranger' if self.stranger else ''}>"

    def end(self, violation: Violation) -> None:
        self.ended = violation
        self.connection.interrupt()


class GreetedPeer:
    """A caller's connection while it is greeted: notes when the first answer is sent."""

    def __init__(self, caller: PeerCaller) -> None:
        self._caller = caller
        self._connection = caller.connection
        self.peer = caller.connection.peer
        self.encrypted = caller.connection.encrypted
        self.features = caller.connection.features
        self.agreed = caller.connection.agreed
        self.due = caller.connection.due
        self.begin = caller.connection.begin
        self.receive = caller.connection.receive
        self.ended = caller.connection.ended
        self.unsent = caller.connection.unsent
        self.interrupt = caller.connection.interrupt
        self.close = caller.connection.close
        self.abort = caller.connection.abort
        self.forked = caller.connection.forked

    @property
    def carrier(self) -> str:
        return self._connection.carrier

    def send(self, parts: Sequence[Span | bytes]) -> None:
        self._caller.heard = True
        self._connection.send(parts)


class PeerCallers:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callers: dict[PeerConnection, PeerCaller] = {}
        """The oldest first."""

    def __len__(self) -> int:
        return len(self._callers)

    def __iter__(self) -> Iterator[PeerCaller]:
        return iter(list(self._callers.values()))

    def add(self, caller: PeerCaller) -> bool:
        """Let a stranger in, and end others for it. False: there are too many connections."""
        with self._lock:
            strangers = [one for one in self._callers.values() if one.stranger and one.ended is None]
            leaving = sum(one.ended is not None for one in self._callers.values())
            if leaving >= _LEAVING or len(self._callers) - len(strangers) - leaving >= _CONNECTIONS:
                return False
            near = [one for one in strangers if one.host == caller.host]
            if len(near) >= _STRANGERS_EACH:
                self._end_one(near)
            elif len(strangers) >= _STRANGERS:
                self._end_one(strangers)
            self._callers[caller.connection] = caller
            return True

    def _end_one(self, strangers: Sequence[PeerCaller]) -> None:
        next((one for one in strangers if not one.heard), strangers[0]).end(Violation.TOO_MANY)

    def known(self, caller: PeerCaller) -> None:
        """It is authenticated. Raises PeerViolation if there are too many such connections, or of its address."""
        with self._lock:
            hosts = [one.host for one in self._callers.values() if not one.stranger]
            if len(hosts) >= _CONNECTIONS or hosts.count(caller.host) >= _EACH:
                raise PeerViolation(Violation.TOO_MANY)
            caller.stranger = False

    def close(self, caller: PeerCaller) -> None:
        """Close its connection, and let go of it. Nobody interrupts it while its descriptor is closed."""
        with self._lock:
            caller.connection.close()
            self._callers.pop(caller.connection, None)
