"""A client's two connections to one life of a node, and its memory as far as we have mapped it."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Hashable
from pathlib import Path

import msgspec
import numpy as np

from kvtide.block import Span
from kvtide.errors import TierError
from kvtide.node import protocol as p
from kvtide.node.mapping import Mappings
from kvtide.node.promises import Promises
from kvtide.version import __version__

__all__ = ["Line", "Lost"]

_PATIENCE = 10.0
"""Seconds that a node may take to say hello: nobody but our own thread waits for that."""
_ANSWER = 2.0
"""Seconds after which a node that does not answer a request counts as dead. An event loop may wait for the answer."""


class Lost(Exception):  # noqa: N818 - a state, not an error: it becomes a miss
    """There is no node."""


class Line:
    """The two connections to one life of a node, and its memory as far as we have mapped it."""

    def __init__(self, path: Path, name: str, mappings: Mappings) -> None:
        self._requests = self._notices = None
        self._name = name
        self._mappings = mappings
        self.lent = set(mappings.names)
        """Memory that the node knows us to have, of earlier nodes too."""
        self._process = os.getpid()
        try:
            self._requests = self._dial(path)
            pidfd = os.pidfd_open(os.getpid())
            try:
                self.welcome = self._greet(self._requests, "", [pidfd])
            finally:
                os.close(pidfd)
            self._notices = self._dial(path)
            self._greet(self._notices, self.welcome.token, [])
            self._notices.settimeout(None)
            self._requests.settimeout(_ANSWER)
        except BaseException:
            self.close()
            raise
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._received = bytearray()
        self._heard = bytearray()
        self._descriptors: list[int] = []
        self._replies = msgspec.msgpack.Decoder(p.Reply)
        self._tidings = msgspec.msgpack.Decoder(p.Notice)
        self._segments: dict[int, Span] = {}
        self.promises = Promises()
        self._rights: set[Hashable] = set()
        self._rights_lock = threading.Lock()
        self._finished = False
        self.alive = True

    @staticmethod
    def _dial(path: Path) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        sock.settimeout(_PATIENCE)
        try:
            sock.connect(str(path))
        except BaseException:
            sock.close()
            raise
        return sock

    def _greet(self, sock: socket.socket, token: str, descriptors: list[int]) -> p.Welcome:
        hello = p.frame(p.Hello(p.PROTOCOL, p.PROTOCOL, __version__, token, self._name, sorted(self.lent)))
        socket.send_fds(sock, [hello], descriptors)
        body = b""
        while not p.whole(body):
            data = sock.recv(4096)
            if not data:
                raise TierError("the node closed the connection at once; its log says why")
            body += data
        answer = msgspec.msgpack.decode(body[4:], type=p.Welcome | p.Failure)
        if isinstance(answer, p.Failure):
            raise TierError(f"the node refused us: {answer.text}")
        return answer

    def close(self) -> None:
        """Hang up. Wakes whoever waits."""
        self.alive = False
        for sock in (self._requests, self._notices):
            if sock is not None:
                if os.getpid() == self._process:  # else it is our parent's line too, which goes on
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)
                sock.close()

    def unmap(self) -> None:
        """Let go of the memory, but for what views of it are still in use."""
        self._segments = {}

    # -- rights -------------------------------------------------------------------------------------------

    def own(self, right: Hashable) -> None:
        """We have that right, until ``disown``."""
        with self._rights_lock:
            if self._finished:
                raise Lost
            self._rights.add(right)

    def disown(self, right: Hashable) -> None:
        """The memory of that right is not looked at any more."""
        self._rights.discard(right)

    def finish(self) -> bool:
        """For a line that was lost: whether nothing that it gave us is in use, nor ever will be."""
        with self._rights_lock:
            self._finished = not self._rights
            return self._finished

    # -- requests -----------------------------------------------------------------------------------------

    def ask(self, operations: list[p.Operation]) -> list[p.Answer]:
        """Send operations and wait for their answers."""
        with self._lock:
            number = self._send(operations)
            while (reply := self._receive()).number != number:
                pass  # of a request whose answers nobody wanted
        return reply.answers

    def post(self, operation: p.Operation) -> None:
        """Send an operation whose answer does not matter."""
        with self._lock:
            self._send([operation])

    def _send(self, operations: list[p.Operation]) -> int:
        assert self._requests is not None
        # A line cannot be shared with a child: each would take the other's answers.
        if not self.alive or os.getpid() != self._process:
            raise Lost
        number = next(self._numbers)
        try:
            self._requests.sendall(p.frame(p.Request(number, operations)))
        except OSError as e:
            self.close()
            raise Lost from e
        return number

    def _receive(self) -> p.Reply:
        received = self._received
        assert self._requests is not None
        while not (end := p.whole(received)):
            try:
                data, fds, _, _ = socket.recv_fds(self._requests, 1 << 18, 64)
            except OSError as e:
                self.close()
                raise Lost from e
            self._descriptors += fds
            if not data:
                self.close()
                raise Lost
            received += data
        try:
            reply = self._replies.decode(bytes(memoryview(received)[4:end]))
            for serial in reply.segments:
                name = f"{self.welcome.life}-{serial}"
                self.lent.add(name)
                self._segments[serial] = self._mappings.map(self._descriptors.pop(0), name)
        except (msgspec.MsgspecError, TierError, OSError, IndexError) as e:
            self.close()
            raise Lost from e
        del received[:end]
        for serial in reply.gone:
            self._segments.pop(serial, None)
        return reply

    def spans(self, addresses: bytes, nbytes: int) -> list[Span]:
        """The memory of slots."""
        segments, found = self._segments, []
        for address in np.frombuffer(addresses, np.uint64).tolist():
            start = address & 0xFFFFFFFFFF
            segment = segments.get(address >> 40)
            if segment is None:
                raise Lost
            found.append(segment[start : start + nbytes])
        return found

    # -- notices ------------------------------------------------------------------------------------------

    def hear(self) -> p.Notice:
        """Wait for the next notice."""
        heard = self._heard
        assert self._notices is not None
        while not (end := p.whole(heard)):
            try:
                data = self._notices.recv(1 << 18)
            except OSError as e:
                raise Lost from e
            if not data:
                raise Lost
            heard += data
        notice: p.Notice = self._tidings.decode(memoryview(heard)[4:end])
        del heard[:end]
        return notice
