"""A client's socket in the node's loop: receives complete frames, sends frames with file descriptors."""

from __future__ import annotations

import array
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from kvtide.node import protocol as p
from kvtide.node import work_limits
from kvtide.node.server.loop import Loop

__all__ = ["Connection", "Peer"]

log = logging.getLogger("kvtide.node")

_READ = 1 << 16
_PAUSE = 0.005
"""Seconds after which work that waits for memory is tried again."""
_UNSENT = 8 << 20
"""Maximum unsent bytes: a client with more does not read, and its connection is closed."""
_BEHIND = 1 << 20
_GIVEN = 4
"""Maximum number of descriptors that a client may send."""
_SPACE = socket.CMSG_SPACE(_GIVEN * 4 + 4)
_SO_PEERGROUPS = 59
"""Constant of Linux; Python has no name for it."""
_GROUPS = 256
"""Maximum number of a user's groups, as many as Python's call has space for: a user with more counts as in no group."""


class Peer(NamedTuple):
    """The process at the other end of a socket, as reported by the kernel: nothing need be read for that."""

    pid: int
    uid: int
    groups: frozenset[int]

    @classmethod
    def of(cls, sock: socket.socket) -> Peer:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, group = struct.unpack("3i", credentials)
        return cls(pid, uid, frozenset({group, *_groups(sock)}))


class Connection:
    """A connection. ``receive`` is called with the body of each frame, and ``lost``, once, when the connection has
    ended.

    ``receive`` returns the work on that frame as an iterator of steps, each yielding the units it took (see
    ``work_limits.py``), or the units if the work is done already. The steps must not use the body. When the units of a
    turn are spent, the other clients are served before the next step, and nothing more is read from this one.
    """

    def __init__(self, loop: Loop, sock: socket.socket, peer: Peer, largest: int = p.LARGEST) -> None:
        """``largest``: maximum bytes of its first frame."""
        self._loop = loop
        self.largest = largest
        """Maximum bytes of a frame; a longer one closes the connection before it is read."""
        self._sock = sock
        self._buffer = bytearray(_READ)
        self._received = bytearray()
        """The beginning of a frame that has not arrived completely."""
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()
        self.unsent_bytes = 0
        self._reading = True
        self._writing = False
        self._work: Iterator[int] | None = None
        """The remaining work on the last frame."""
        self._spent = 0
        """Units spent in this turn."""
        self._paused = False
        """Whether the work on a frame waits for something other than its turn."""
        self.descriptors: list[int] = []
        """Received descriptors that were not taken yet."""
        self.greeted = False
        """Whether the hello was accepted. Descriptors are received with the hello only; later the kernel closes
        them."""
        self.receive: Callable[[bytes | memoryview], Iterator[int] | int | None] = lambda body: None
        self.lost: Callable[[], None] = lambda: None
        self.drained: Callable[[], None] = lambda: None
        """Called when the client has read everything."""
        self.open = True
        self.pid, self.uid = peer.pid, peer.uid
        self._attend()

    def __repr__(self) -> str:
        return f"<Connection of process {self.pid}{'' if self.open else ', closed'}>"

    def close(self, reason: str = "") -> None:
        """Close the connection; ``reason`` is logged."""
        if not self.open:
            return
        self.open = False
        self._work = None
        if reason:
            log.warning("client %d: %s; its connection is closed", self.pid, reason)
        self._reading = self._writing = False
        self._attend()
        self._sock.close()
        for fd in self.descriptors + [fd for _, fds in self._unsent for fd in fds]:
            os.close(fd)
        self.descriptors.clear()
        self._unsent.clear()
        self.lost()

    def _attend(self) -> None:
        readable, writable = self._readable if self._reading else None, self._writable if self._writing else None
        try:
            self._loop.attend(self._sock.fileno(), readable, writable)
        except OSError as e:
            self.close(f"its socket cannot be polled: {e.strerror}")

    def _readable(self) -> None:
        try:
            size = self._sock.recv_into(self._buffer) if self.greeted else self._receive_descriptors()
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        if len(self.descriptors) > _GIVEN:
            self.close("too many descriptors")
            return
        if not size:
            self.close()
            return
        self._spent = 0
        if not self._received and size <= self.largest and p.whole(self._buffer, size) == size:
            if not self._advance(memoryview(self._buffer)[p.LENGTH.size : size]):
                self._wait_for_others()
        else:
            self._received += memoryview(self._buffer)[:size]
            self._take_frames()

    def _receive_descriptors(self) -> int:
        size, ancillary, _, _ = self._sock.recvmsg_into([self._buffer], _SPACE, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self.descriptors.extend(array.array("i", content[: len(content) - len(content) % 4]))
        return size

    def _take_frames(self) -> None:
        received, at = self._received, 0
        while self.open and len(received) - at >= p.LENGTH.size:
            (size,) = p.LENGTH.unpack_from(received, at)
            if size > self.largest:
                self.close(f"a frame of {size} bytes, where {self.largest} are allowed")
                return
            start = at + p.LENGTH.size
            if len(received) < start + size:
                break
            at = start + size
            if not self._advance(bytes(memoryview(received)[start:at])):
                self._wait_for_others()
                break
        del received[:at]

    def _advance(self, body: bytes | memoryview | None = None) -> bool:
        """Continue the work on a frame, or begin that on ``body``. Returns False if this turn's units are spent."""
        try:
            if body is not None:
                self._spent += work_limits.MESSAGE + len(body) // work_limits.DECODED
                found = self.receive(body)
                if isinstance(found, int):
                    self._spent += found
                    return self._spent < work_limits.TURN
                self._work = found
            if self._work is not None:
                for units in self._work:
                    if units == work_limits.PAUSE:
                        self._paused = True
                        return False
                    self._spent += units
                    if self._spent >= work_limits.TURN or not self.open:
                        return False
                self._work = None
            return self._spent < work_limits.TURN
        except msgspec.MsgspecError as e:
            self.close(f"not understood: {e}")
        except RecursionError:
            self.close("not understood: nested too deeply")
        except Exception:  # a bug of the node closes only this client's connection
            log.exception("a request of client %d failed", self.pid)
            self.close("its request failed")
        return False

    def _wait_for_others(self) -> None:
        """Stop reading, and continue after the other clients were served."""
        if self.open:
            if self._reading:
                self._reading = False
                self._attend()
            if self._paused:
                self._paused = False
                self._loop.call_later(_PAUSE, self._go_on)
            else:
                self._loop.after_others(self._go_on)

    def _go_on(self) -> None:
        self._spent = 0
        if not self.open:
            return
        if not self._advance():
            self._wait_for_others()
            return
        self._reading = True
        self._attend()
        self._take_frames()

    @property
    def behind(self) -> bool:
        """Whether the client reads more slowly than the node writes: whatever can wait should not be sent."""
        return self.unsent_bytes > _BEHIND

    def send(self, message: msgspec.Struct, descriptors: Sequence[int] = ()) -> None:
        """Send a frame, now or when the client reads. Takes ownership of the descriptors."""
        if not self.open:
            for fd in descriptors:
                os.close(fd)
            return
        data, sent = p.frame(message), 0
        if not self._unsent and not descriptors:
            try:
                sent = self._sock.send(data)
            except BlockingIOError:
                pass
            except ConnectionError:
                return  # the client hung up; what it gave back before must still be read
            except OSError:
                self.close()
                return
            if sent == len(data):
                return
        self._unsent.append((memoryview(data)[sent:], list(descriptors)))
        self.unsent_bytes += len(data) - sent
        if not self._writing:
            self._writable()
        if self.unsent_bytes > _UNSENT:
            self.close("it does not read its replies")

    def _writable(self) -> None:
        while self._unsent:
            data, descriptors = self._unsent[0]
            try:
                # Descriptors are sent with the first byte.
                sent = socket.send_fds(self._sock, [data], descriptors) if descriptors else self._sock.send(data)
            except BlockingIOError:
                break
            except ConnectionError:  # the client hung up; what it gave back before must still be read
                sent = len(data)
            except OSError:
                self.close()
                return
            for fd in descriptors:
                os.close(fd)
            self.unsent_bytes -= sent
            if sent == len(data):
                self._unsent.popleft()
            else:
                self._unsent[0] = (data[sent:], [])
        if bool(self._unsent) != self._writing:
            self._writing = not self._writing
            self._attend()
            if not self._writing:
                self.drained()


def _groups(sock: socket.socket) -> array.array[int]:
    """The supplementary groups of the process at the other end, as of when it connected."""
    try:
        return array.array("I", sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS * 4))
    except OSError:
        return array.array("I")
