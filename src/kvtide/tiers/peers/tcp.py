"""TCP between nodes, with TLS where certificates are configured.

Without TLS a whole block is sent by one ``sendmsg`` from the memory it is in, and received by one ``recvmsg_into`` that
waits for all of it, directly into the memory it is for. With TLS every record of 16 KiB is a call.

Interrupting a socket means shutting it down: blocked calls of other threads then end. An SSLSocket's own ``shutdown``
would forget its keys under such a call, so the one of the plain socket is used.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import socket
import ssl
import struct
import sys
import termios
import time
from collections.abc import Callable, Sequence

from kvtide.block import Span
from kvtide.security.certificates import names_in
from kvtide.tiers.peers.transport import PeerConnection, PeerListener
from kvtide.tiers.tcp_connect import tcp_connect

__all__ = ["Tcp", "TlsContexts", "split"]

_BACKLOG = 64
_AT_ONCE = struct.pack("ii", 1, 0)
"""To linger for no time: the system resets the connection, and discards what it has not sent."""
_SMALL = 16 << 10
"""With TLS, parts up to this size are joined: each call makes at least one record."""
_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""A server waits for requests without a deadline, and an address may have so many connections. By default the kernel
would keep those of a host that is gone for two hours."""


def split(address: str) -> tuple[str, int]:
    """Host and port of an address. Raises ValueError."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        host.encode("idna")  # as the resolver of names will
        good = bool(host) and port.isascii() and port.isdigit() and int(port) < 1 << 16
    except UnicodeError:
        good = False
    if not good:
        raise ValueError(f"{address!r} is no address; it must be a host and a port, such as 10.0.0.7:9411")
    return host, int(port)


class TlsContexts:
    """Makes the TLS contexts of both sides, and says whose certificates are accepted. A context is made for every
    connection, so that renewed certificates are used."""

    def __init__(
        self, client: Callable[[], ssl.SSLContext], server: Callable[[], ssl.SSLContext], names: frozenset[str]
    ) -> None:
        self.client = client
        self.server = server
        self.names = names


class _Connection:
    """A connected TCP socket."""

    def __init__(self, sock: socket.socket, peer: str, tls: TlsContexts | None, *, server: bool) -> None:
        self._sock = sock
        self._tls = tls
        self._server = server
        self.peer = peer
        self.encrypted = tls is not None
        self.features = 0
        self.due = math.inf
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _ALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def __repr__(self) -> str:
        return f"<connection to {self.peer}{', encrypted' if self.encrypted else ''}>"

    @property
    def carrier(self) -> str:
        return "TLS" if self.encrypted else "TCP"

    def agreed(self, features: int) -> None:
        pass

    def begin(self) -> None:
        if self._tls is None:
            return
        context = (self._tls.server if self._server else self._tls.client)()
        # The descriptor moves to the new socket. That takes the old one's place before the handshake, because another
        # thread may have to interrupt it.
        self._sock = wrapped = context.wrap_socket(self._sock, server_side=self._server, do_handshake_on_connect=False)
        wrapped.do_handshake()
        known = names_in(wrapped.getpeercert() or {})
        if not self._tls.names.intersection(known):
            raise PermissionError(errno.EACCES, f"peers.names has no name of its certificate ({', '.join(known)})")

    def send(self, parts: Sequence[Span | bytes]) -> None:
        if isinstance(self._sock, ssl.SSLSocket):
            small: list[Span | bytes] = []
            for part in parts:
                if len(part) <= _SMALL:
                    small.append(part)
                    continue
                if small:
                    self._sock.sendall(b"".join(small))
                    small = []
                self._sock.sendall(part)
            if small:
                self._sock.sendall(b"".join(small))
            return
        left: Sequence[Span | bytes] = parts
        while left:
            left = _after(left, self._sock.sendmsg(left))

    def receive(self, parts: Sequence[Span]) -> None:
        if isinstance(self._sock, ssl.SSLSocket):
            for part in parts:
                rest = part
                while rest:
                    if not (count := self._sock.recv_into(rest)):
                        raise ConnectionResetError(errno.ECONNRESET, "the connection was closed")
                    rest = rest[count:]
            return
        left: Sequence[Span] = [part for part in parts if part]
        while left:
            count = self._sock.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
            if not count:
                raise ConnectionResetError(errno.ECONNRESET, "the connection was closed")
            left = _after(left, count)

    def ended(self) -> bool:
        try:
            socket.socket.recv(self._sock, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def unsent(self) -> int:
        count = bytearray(4)
        try:
            fcntl.ioctl(self._sock.fileno(), termios.TIOCOUTQ, count)
        except (OSError, ValueError):  # it is closed
            return 0
        return int.from_bytes(count, sys.byteorder)

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def abort(self) -> None:
        with contextlib.suppress(OSError):  # closed already
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self._sock.close()

    def forked(self) -> None:
        _drop(self._sock)


def _after(parts: Sequence[Span] | Sequence[Span | bytes], count: int) -> list[Span]:
    """What is left of ``parts`` after the first ``count`` bytes."""
    for i, part in enumerate(parts):
        if count < len(part):
            return [memoryview(part)[count:], *(memoryview(other) for other in parts[i + 1 :])]
        count -= len(part)
    return []


class _Listener:
    def __init__(self, sock: socket.socket, tls: TlsContexts | None) -> None:
        self._sock = sock
        self._tls = tls
        self.address = _text(sock.getsockname())

    def accept(self) -> PeerConnection:
        sock, where = self._sock.accept()
        return _Connection(sock, _text(where), self._tls, server=True)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # a waiting accept ends; closing the descriptor would not end it
        self._sock.close()

    def forked(self) -> None:
        _drop(self._sock)


class Tcp:
    """TCP; with ``tls``, every connection is encrypted and both sides are authenticated."""

    def __init__(self, tls: TlsContexts | None = None) -> None:
        self._tls = tls

    def connect(self, address: str, timeout: float) -> PeerConnection:
        try:
            where = split(address)
        except ValueError as e:
            raise OSError(errno.EINVAL, str(e)) from e
        return _Connection(tcp_connect(where, time.monotonic() + timeout), address, self._tls, server=False)

    def listen(self, address: str) -> PeerListener:
        try:
            host, port = split(address)
        except ValueError as e:
            raise OSError(errno.EINVAL, str(e)) from e
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return _Listener(socket.create_server(where[:2], family=family, backlog=_BACKLOG), self._tls)


def _text(where: tuple[object, ...]) -> str:
    host, port = where[:2]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def _drop(sock: socket.socket) -> None:
    """Close a forked child's copy, without a word to the other end."""
    with contextlib.suppress(OSError):
        os.close(sock.detach())
