"""Tells whether the process at the other end of a socket is alive: one that does not answer may be stopped or busy."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from io import FileIO

__all__ = ["PeerProcess"]

_SO_PEERPIDFD = 77
"""Constant of Linux, since 6.5; Python has no name for it."""


class PeerProcess:
    """The process that listens at the other end, by a pidfd: its process id may have been reused."""

    def __init__(self, sock: socket.socket) -> None:
        self._file: FileIO | None = None
        """A file object closes the descriptor only once, even if several threads close it at the same time."""
        with contextlib.suppress(OSError):
            self._file = FileIO(_pidfd(sock), "rb")

    @property
    def alive(self) -> bool:
        """Whether the process is certainly alive; False also if that is unknown: it may be in another pid namespace."""
        if self._file is None:
            return False
        try:
            poll = select.poll()
            poll.register(self._file, select.POLLIN)
            return not poll.poll(0)
        except (OSError, ValueError):  # closed by another thread
            return False

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _pidfd(sock: socket.socket) -> int:
    """Raises OSError."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:  # an older kernel
        pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        if pid <= 0:
            raise
        return os.pidfd_open(pid)
