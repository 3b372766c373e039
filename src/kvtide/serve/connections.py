"""How many connections the server keeps, and how long a client may let it wait.

A connection that waits for its client (to send a request, the rest of a body, or to read a response) costs the client
nothing, so the server bounds both its number and its duration:

- Each wait has a deadline. Bytes that trickle in do not extend it.
- When an address, or the server, has as many connections as it may have, a new connection takes the place of the one
  that has waited for its client for the longest time. If the server is full, that is one of the address that has the
  most connections. So connections that say nothing can never keep out one that has a request, from another address or
  from the same one (behind a proxy all clients have one address). A connection whose request is being answered keeps
  its place; there are few of those, because the queue before the model is bounded.

The code is a subclass of uvicorn's protocol for h11, which has none of this. It runs in the server's event loop only.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from enum import Enum
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple

import h11
import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvtide.serve.openai_api import ApiError

__all__ = ["Connections", "Limits", "configuration"]

_SLICE = 16 << 10
"""Bytes that are parsed between two checks."""
_FRAMING = 128 << 10
"""Maximum bytes of a chunked body spent on framing: a chunk costs 14 us, even if it is one byte."""
_DISCARDED = 64 << 20
"""Maximum bytes of a body that are discarded after its request was refused, so that the client reads the reason."""

_BACKLOG = 128
"""Connections that the event loop accepts at once, each a file descriptor before it is counted."""


class Limits(NamedTuple):
    """Resource limits for clients. Seconds are for the whole wait, however many bytes arrive meanwhile."""

    connections: int = 272
    """Maximum concurrent connections in all."""
    per_address: int = 144
    """Maximum concurrent connections from one IPv4 address or one IPv6 network of 64 bits."""
    head_seconds: float = 10
    """From the start of a connection, or the end of a response, to the last byte of the next request's head."""
    body_seconds: float = 60
    """From the end of a request's head to the end of its body."""
    read_seconds: float = 30
    """For a client to read what was sent, when it has stopped reading."""
    discard_seconds: float = 5
    """For a client to stop sending, after its request was refused before its body was read."""

    @staticmethod
    def for_queue(waiting: int) -> Limits:
        """The limits of a server whose queue has ``waiting`` places."""
        return Limits(256 + waiting, 128 + waiting)


class _Stage(Enum):
    """The current stage of a connection."""

    HEAD = "waits for a request"
    BODY = "waits for the rest of a body"
    ANSWER = "is being answered"
    READ = "waits for its client to read"
    DISCARD = "waits for the end of a body that is discarded"
    CLOSE = "is closed as soon as its client has read what was sent"


class Connections:
    """The connections of a server, by the address of their clients."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._by_address: dict[str, set[_Connection]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_address.values()))

    def admit(self, new: _Connection) -> ApiError | None:
        """Admit a connection, closing another if necessary. Returns an error if that is impossible."""
        same = self._by_address.get(new.address, set())
        if len(same) >= self.limits.per_address:
            if not self._drop_one(same):
                text = f"all {len(same)} connections of your address are being answered; wait for one of them"
                return ApiError(429, text, code="too_many_connections")
        elif len(self) >= self.limits.connections:
            crowds = sorted(self._by_address.values(), key=len, reverse=True)
            if not any(self._drop_one(crowd) for crowd in crowds):
                text = f"all {len(self)} connections of this server are being answered; ask again later"
                return ApiError(503, text, code="overloaded")
        self._by_address.setdefault(new.address, set()).add(new)
        return None

    def remove(self, connection: _Connection) -> None:
        same = self._by_address.get(connection.address, set())
        same.discard(connection)
        if not same:
            self._by_address.pop(connection.address, None)

    def _drop_one(self, crowd: set[_Connection]) -> bool:
        """Close the connection that has waited longest for its client. Returns False if all are being answered."""
        waiting = [connection for connection in crowd if connection.waits_since is not None]
        if not waiting:
            return False
        longest = min(waiting, key=lambda connection: connection.waits_since or 0)
        longest.drop()
        return True


class _Connection(H11Protocol):
    """One connection, with deadlines."""

    def __init__(self, connections: Connections, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connections = connections
        self.address = ""
        self.waits_since: float | None = None
        """When the wait for the client began. None: the client waits for the server."""
        self._stage: _Stage | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._begun = False
        """Whether a part of a request head has arrived."""
        self._framing = self._discarded = 0
        limits = connections.limits
        self._seconds = {
            _Stage.HEAD: limits.head_seconds,
            _Stage.READ: limits.read_seconds,
            _Stage.DISCARD: limits.discard_seconds,
            _Stage.CLOSE: limits.discard_seconds,
        }  # The application enforces the time limit of a body, because it can send an error response.

    # -- called by asyncio and uvicorn ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = _network(self.client[0] if self.client else "")
        if error := self._connections.admit(self):
            self._refuse(error)
        else:
            self._step()

    def data_received(self, data: bytes) -> None:
        if self._stage is _Stage.DISCARD:
            self._discarded += len(data)
            if self._discarded > _DISCARDED:
                self.drop()
                return
            if self._chunked():
                return  # parsing each chunk would cost more than it cost to send it
        for start in range(0, len(data), _SLICE):
            if self.transport.is_closing():
                return
            self._parse(data[start : start + _SLICE])
        self._step()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._begun = False
        self._step()
        if self._stage is _Stage.DISCARD and self._chunked():
            self.transport.write_eof()  # the next request would be discarded too

    def pause_writing(self) -> None:
        super().pause_writing()
        self._step()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._step()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Called for input that is not HTTP; uvicorn's own response is not JSON, and fails if another one has begun."""
        self._refuse(ApiError(400, f"{msg} A head may have 16 KiB, and chunks must be of a reasonable size."))

    # -- waits ----------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Close at once."""
        self._forget()
        self.transport.abort()

    def _parse(self, part: bytes) -> None:
        cycle, known = self.cycle, len(self.cycle.body) if self.cycle else 0
        super().data_received(part)
        self._begun = True
        if cycle is not self.cycle or not self._answering():
            self._framing = 0
        elif self._chunked():
            self._framing += len(part) - (len(cycle.body) - known)
            if self._framing > _FRAMING:
                self.send_400_response("The chunks of the body are too small.")

    def _step(self) -> None:
        """Update the stage of the connection and its deadline."""
        if self._stage is (stage := self._current()):
            return
        self._stage = stage
        self.waits_since = None if stage is _Stage.ANSWER else self.loop.time()
        self._cancel()
        if (seconds := self._seconds.get(stage)) is not None:
            self._deadline = self.loop.call_later(seconds, self._expire)

    def _current(self) -> _Stage:
        if self.transport.is_closing():
            return _Stage.CLOSE
        if not self._answering():
            return _Stage.DISCARD if self.conn.their_state is h11.SEND_BODY else _Stage.HEAD
        if self.flow.write_paused:
            return _Stage.READ
        return _Stage.BODY if self.cycle.more_body else _Stage.ANSWER

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expire(self) -> None:
        if self._stage is _Stage.HEAD and self._begun and not self.transport.is_closing():
            seconds = self._connections.limits.head_seconds
            self._refuse(ApiError(408, f"the head of the request did not come within {seconds:g} seconds"))
        else:
            self.drop()

    def _refuse(self, error: ApiError) -> None:
        """Respond without the application, and close."""
        begun = self._answering() and self.cycle.response_started
        if self._answering():
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if begun:
            self.drop()
            return
        body = msgspec.json.encode(error.body)
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
        self._step()

    def _chunked(self) -> bool:
        return any(name == b"transfer-encoding" for name, _ in self.headers or [])

    def _forget(self) -> None:
        self._cancel()
        self._connections.remove(self)

    def _cancel(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def configuration(app: Any, limits: Limits, stop_seconds: int) -> uvicorn.Config:
    """The uvicorn configuration for an application with these limits."""
    protocol: Any = partial(_Connection, Connections(limits))
    logging.getLogger("uvicorn.error").addFilter(_not_a_clients_fault)
    return uvicorn.Config(
        app,
        http=protocol,
        lifespan="off",
        ws="none",
        log_config=None,
        timeout_graceful_shutdown=stop_seconds,
        backlog=_BACKLOG,
    )


def _not_a_clients_fault(record: logging.LogRecord) -> bool:
    """Log filter: any client can send invalid HTTP a thousand times a second, and this must not fill the log."""
    return record.module != "h11_impl" or record.levelno > logging.WARNING


def _network(host: str) -> str:
    """The address that is counted: for IPv6 its /64 network, because a client usually controls all of that."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
