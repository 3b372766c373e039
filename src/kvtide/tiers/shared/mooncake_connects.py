"""Ends attempts of Mooncake's library to connect to a host that does not answer any more.

The library waits for a connection as long as the kernel asks for it, two minutes, and tries several, one after the
other, for each part of an object that it reads. So a call for a few blocks that a host without power had would take an
hour, and it cannot be interrupted. But it ends when its sockets do. So while a call takes long, the sockets of this
process that try to connect to a host of the pool, and have got no answer for a second, are shut down. To the library
that is a connection that was refused.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

__all__ = ["ConnectWatch", "end_connects"]

_SLOW = 3.0
"""Seconds after which a call takes long."""
_LOOK = 0.5
"""Seconds between two looks."""
_QUIET = 16
"""So many times in a row no call is under way before the watch sleeps."""
_SYN_SENT = 2
_REPEATED = 1
"""How often the kernel has asked again: that is after a second."""


class ConnectWatch:
    """Ends such attempts while a call is under way for long. Thread-safe."""

    def __init__(self, hosts: Callable[[], Collection[str]]) -> None:
        """``hosts`` are the hosts of the pool; it is called when a call takes long, and may take a while."""
        self._hosts = hosts
        self._changed = threading.Condition()
        self._began: dict[int, float] = {}
        """When the calls under way began, by a number."""
        self._number = 0
        self._sleeps = self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvtide-mooncake-watch", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """A call is under way."""
        with self._changed:
            self._number += 1
            number = self._number
            self._began[number] = time.monotonic()
            if self._sleeps:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                del self._began[number]

    def _run(self) -> None:
        quiet = 0
        while True:
            with self._changed:
                self._sleeps = quiet >= _QUIET
                if self._sleeps:
                    self._changed.wait_for(lambda: self._began or self._closed)
                    self._sleeps = False
                if not self._closed:
                    self._changed.wait(_LOOK)
                if self._closed:
                    return
                quiet = 0 if self._began else quiet + 1
                slow = time.monotonic() - _SLOW
                takes_long = any(began <= slow for began in self._began.values())
            if takes_long:
                with contextlib.suppress(OSError):  # too many files are open, for example
                    end_connects(self._hosts)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(_SLOW)  # it may wait for the master, or for the address of a host


def end_connects(hosts: Callable[[], Collection[str]]) -> int:
    """Shut down the sockets of this process that try to connect to one of ``hosts`` and got no answer for a second.
    Returns how many. Raises OSError."""
    if not (connecting := _connecting()):
        return 0
    wanted: set[bytes] = set().union(*map(_addresses, hosts()))
    inodes = {inode for inode, address in connecting.items() if address in wanted}
    ended = 0
    for entry in Path("/proc/self/fd").iterdir() if inodes else ():
        with contextlib.suppress(OSError):
            ended += _end(int(entry.name), inodes)
    return ended


def _end(descriptor: int, inodes: Collection[int]) -> bool:
    """Shut down a socket if it is one of these. Raises OSError."""
    copy = os.dup(descriptor)  # the descriptor itself may be another file a moment later
    try:
        about = os.fstat(copy)
        if not stat.S_ISSOCK(about.st_mode) or about.st_ino not in inodes:
            return False
        found = socket.socket(fileno=copy)
        try:
            found.shutdown(socket.SHUT_RDWR)
        finally:
            found.detach()
    finally:
        os.close(copy)
    return True


def _addresses(host: str) -> set[bytes]:
    """The addresses of a host, as bytes; none if it has no address."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return set()
    return {ipaddress.ip_address(str(where[0]).partition("%")[0]).packed for *_, where in found}


def _connecting() -> dict[int, bytes]:
    """The sockets of this network that try to connect for some seconds: inode, and address of the other end."""
    found = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/net", name).read_text().splitlines()[1:]:
                _, _, remote, state, _, _, repeated, _, _, inode, *_ = line.split()
                if int(state, 16) == _SYN_SENT and int(repeated, 16) >= _REPEATED:
                    found[int(inode)] = _packed(remote.partition(":")[0])
    return found


def _packed(text: str) -> bytes:
    """An address as in /proc/net/tcp, which has words in the order of this machine."""
    words = bytes.fromhex(text)
    return b"".join(int.from_bytes(words[i : i + 4], sys.byteorder).to_bytes(4, "big") for i in range(0, len(words), 4))
