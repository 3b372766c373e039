"""The protocol by hand, for tests of what no client of ours would say."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvtide.node import protocol as p

__all__ = ["answer", "dialled", "greet", "packed"]


@contextlib.contextmanager
def dialled(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(30)
        sock.connect(str(path))
        yield sock


def greet(sock: socket.socket, hello: bytes = p.frame(p.Hello(1, 1, "test"))) -> None:
    pidfd = os.pidfd_open(os.getpid())
    socket.send_fds(sock, [hello], [pidfd])
    os.close(pidfd)


def answer(sock: socket.socket) -> Any:
    """The next frame, or None if the node has hung up."""
    try:
        size = _read(sock, 4)
        body = _read(sock, p.LENGTH.unpack(size)[0]) if len(size) == 4 else b""
    except ConnectionResetError:
        return None
    return msgspec.msgpack.decode(body) if body else None


def _read(sock: socket.socket, size: int) -> bytes:
    """So many bytes, or fewer if the node hangs up before."""
    found = b""
    while len(found) < size and (more := sock.recv(size - len(found))):
        found += more
    return found


def packed(value: Any) -> bytes:
    body = msgspec.msgpack.encode(value)
    return p.LENGTH.pack(len(body)) + body
