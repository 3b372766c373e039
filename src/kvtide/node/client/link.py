"""A client's two connections to one run of a node, and the node's memory that the client has mapped.

A caller waits 2 seconds for an answer. A node that takes longer may be stopped, starved or swapped out while its
process is alive. In that case the link is kept, with everything that was mapped and granted, and only that request is a
miss (``NodeLate``). From then on the link is *behind*:

- The answer will still arrive. It is received, its memory is mapped, and what it grants is given back: see
  late_answers.py. No other request is sent before that, so that what is given back reaches the node before any later
  request. The same holds for a request of which only a part went into the socket: the rest is sent first.
- Operations that give back or set something are deferred, and reach the node when it answers again.
- The next caller waits too. If it also gets no answer in time, the link is *slow*: from then on every request is a miss
  at once. The deferred sender's thread receives what arrives, and sends an empty request (a probe) each time that
  everything is answered. When a probe is answered in time, the link is neither slow nor behind any more.

If the process is dead, or it is unknown whether it is alive, the link is closed and the node is unavailable.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import struct
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

import msgspec

from kvtide import errors, forks
from kvtide.block import Span
from kvtide.errors import KvtideError, LayoutError, TierError
from kvtide.node import protocol as p
from kvtide.node.client.completions import Completions
from kvtide.node.client.late_answers import giving_back
from kvtide.node.client.mappings import Mappings
from kvtide.node.client.peer_process import PeerProcess
from kvtide.version import __version__

__all__ = ["NodeLate", "NodeLink", "NodeRefused", "NodeUnavailable"]

log = logging.getLogger("kvtide.client")

_SPACE = socket.CMSG_SPACE(64 * 4)
_TOGETHER = 256
"""Maximum number of deferred operations sent with one request."""
_LONGEST = p.LENGTH.size + p.LARGEST
"""Maximum bytes of a frame, including its length field."""
_PATIENCE = 10.0
"""Seconds that a node may take to answer a hello: only the client's own thread waits for that."""
_ANSWER = 2.0
"""Seconds that a request waits for its answer. An event loop may be waiting for it."""
_IN_A_ROW = 2
"""After this many consecutive requests without an answer in time, no caller waits any more."""


class NodeRefused(TierError):  # noqa: N818 - to its user it is a TierError
    """There is a node, and it refuses this client."""


class NodeUnavailable(Exception):  # noqa: N818 - a state, not an error: it becomes a miss
    """There is no node."""


class NodeLate(NodeUnavailable):
    """There is a node, and it has not answered in time. The link is kept."""

    def __init__(self, sent: bool) -> None:
        """``sent``: the node will execute all that was asked, and what it grants is given back. Otherwise it executes
        nothing."""
        super().__init__("the node has not answered in time")
        self.sent = sent


class NodeLink:
    """The two connections to one run of a node, and the node's memory that the client has mapped."""

    def __init__(self, path: Path, name: str, mappings: Mappings) -> None:
        self._sockets: list[socket.socket] = []
        self._requests = self._notices = None
        self._path = path
        self._name = name
        self._mappings = mappings
        self._patience = _ANSWER
        self._peer: PeerProcess | None = None
        self.lent = set(mappings.names)
        """Names of the memory that the node knows this client to have mapped, including memory of earlier nodes."""
        self._origin = forks.here
        self._lock = threading.Lock()
        self._rights_lock = threading.Lock()
        forks.tell(self)
        try:
            self._requests = self._dial(path)
            self._peer = PeerProcess(self._requests)
            pidfd = os.pidfd_open(os.getpid())
            try:
                self.welcome = self._greet(self._requests, "", [pidfd])
            finally:
                os.close(pidfd)
            self._notices = self._dial(path)
            self._greet(self._notices, self.welcome.token, [])
            self._notices.settimeout(None)
            # Use the kernel's socket timeout: with Python's, each call would poll first.
            self._requests.settimeout(None)
            seconds, rest = divmod(self._patience, 1)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                limit = struct.pack("@ll", int(seconds), int(rest * 1e6))
                self._requests.setsockopt(socket.SOL_SOCKET, option, limit)
        except BaseException:
            self.close()
            raise
        self._flags = 0
        """Flags for sending and receiving; used by the thread that holds the lock."""
        self._numbers = itertools.count(1)
        self._buffers = [bytearray(1 << 16)]
        self._received = bytearray()
        """The beginning of a reply that has not arrived completely."""
        self._behind = False
        """Whether an answer is overdue, a frame is partly unsent, or the link is slow."""
        self.slow = False
        """Whether requests are not sent, because the last ones were not answered in time."""
        self._overdue = 0
        """Number of consecutive requests that were not answered in time."""
        self._owed: tuple[int, list[p.Operation], int] | None = None
        """The request whose answer is overdue: its number, its caller's operations, and how many operations precede
        those in it."""
        self._unsent = memoryview(b"")
        """The rest of a frame that went into the socket only in part."""
        self._last = self._answered = 0
        """Number of the last request sent, and, while the link is behind, of the last one answered."""
        self._probed: float | None = None
        """When the last probe was sent, to measure how long the node takes to answer."""
        self._waiting: deque[p.Operation] = deque()
        """Deferred operations."""
        self._late: p.Operation | None = None
        """The first deferred operation at the time of the last nudge."""
        self.busy = False
        """Whether anything was deferred since the last nudge."""
        self.watch: Callable[[NodeLink], None] | None = None
        """Registers this link to be nudged regularly. Without it nothing is deferred."""
        self.watched = False
        self._heard = bytearray()
        self._descriptors: list[int] = []
        self._replies = msgspec.msgpack.Decoder(p.Reply)
        self._notice_decoder = msgspec.msgpack.Decoder(p.Notice)
        self._segments: dict[int, Span] = {}
        self.completions = Completions()
        self._rights: dict[Hashable, Sequence[p.Slots]] = {}
        self._kept: dict[Hashable, dict[int, Span]] = {}
        """By right, once the link is lost: the memory of its slots."""
        self.alive = True

    def _dial(self, path: Path) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._sockets.append(sock)
        sock.settimeout(_PATIENCE)
        sock.connect(str(path))
        return sock

    def _greet(self, sock: socket.socket, token: str, descriptors: list[int]) -> p.Welcome:
        mapped, features = sorted(self.lent), list(p.FEATURES)
        majors = p.PROTOCOL, p.PROTOCOL
        hello = p.frame(p.Hello(*majors, __version__, token, self._name, mapped, p.MINOR, p.MINORS, features))
        socket.send_fds(sock, [hello], descriptors)
        body = b""
        while not p.whole(body):
            data = sock.recv(4096)
            if not data:
                raise TierError("the node closed the connection at once; its log says why")
            body += data
        answer = msgspec.msgpack.decode(body[4:], type=p.Welcome | p.Failure)
        if isinstance(answer, p.Failure):
            kind = getattr(errors, answer.kind, TierError)
            raise (NodeRefused if kind is TierError else kind)(f"the node refused us: {answer.text}")
        if answer.protocol != p.PROTOCOL or not p.speaks(answer.minor, answer.minors):
            us, them, majors = f"kvtide {__version__}", f"the node (kvtide {answer.version})", (answer.protocol,) * 2
            raise NodeRefused(f"this client cannot use the node: {p.mismatch(us, them, majors, answer.minors)}")
        return answer

    def close(self) -> None:
        """Hang up. Wakes the threads that wait for this link."""
        self.alive = False
        for sock in self._sockets:
            if self._origin is forks.here:  # otherwise it is also the parent process's link, which stays in use
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        if self._peer is not None:
            self._peer.close()

    def forked(self) -> None:
        """Close the link in a forked child: parent and child would take each other's answers."""
        self._lock, self._rights_lock = threading.Lock(), threading.Lock()
        self.close()

    def unmap(self) -> None:
        """Drop the references to mapped memory, except for memory of rights still held. Views in use keep their mapping
        too."""
        with self._rights_lock:
            self._kept = {right: self._memory(slots) for right, slots in self._rights.items()}
            self._segments = {}

    def _memory(self, slots: Sequence[p.Slots]) -> dict[int, Span]:
        """The memory that contains these slots, by segment."""
        named = {address >> 40 for some in slots for address in memoryview(some.places).cast("Q")}
        return {serial: memory for serial, memory in self._segments.items() if serial in named}

    # -- rights -------------------------------------------------------------------------------------------

    def own(self, right: Hashable, slots: Sequence[p.Slots] = ()) -> None:
        """Register a right, until ``disown``, and keep the memory of its slots until then, even if the node dies."""
        with self._rights_lock:
            if not self.alive:
                raise NodeUnavailable
            self._rights[right] = slots

    def disown(self, right: Hashable) -> None:
        """The memory of that right is not used any more."""
        with self._rights_lock:
            self._rights.pop(right, None)
            self._kept.pop(right, None)

    def finish(self) -> bool:
        """For a link that was lost: whether nothing that the node granted over it is in use, or ever will be."""
        return not self._rights

    # -- requests -----------------------------------------------------------------------------------------

    def ask_one(self, operation: p.Operation) -> p.Answer:
        """Send an operation and wait for its answer. Raises the error that the node reports, or NodeUnavailable."""
        answer = self.ask([operation])[-1]
        if isinstance(answer, p.Failure):
            kind = getattr(errors, answer.kind, KvtideError)
            raise kind(answer.text)
        return answer

    def ask(self, operations: list[p.Operation]) -> list[p.Answer]:
        """Send operations, after those that were deferred, and wait for their answers.

        If there are too many for one request, several are sent, one after the other. Raises LayoutError, and sends
        nothing, for an operation that is larger than a request may be.
        """
        if len(operations) > p.OPERATIONS:
            return self._ask_in_parts(operations)
        with self._lock:
            try:
                if self._behind:
                    self._catch_up()
                number, before = self._send(operations)
                try:
                    while (reply := self._receive()).number != number:
                        pass  # the reply to a request whose answers are not needed
                except BlockingIOError:
                    self._owed = number, operations, before
                    raise self._waited(sent=True) from None
            except Exception:
                raise
            except BaseException:  # interrupted in the middle of a message: the following bytes would be misread
                self.close()
                raise
            self._overdue = 0
        return reply.answers[before:] if before else reply.answers

    def _ask_in_parts(self, operations: list[p.Operation]) -> list[p.Answer]:
        answers: list[p.Answer] = []
        for at in range(0, len(operations), p.OPERATIONS):
            try:
                answers += self.ask(operations[at : at + p.OPERATIONS])
            except NodeLate:
                self._give_back(operations, answers)
                raise NodeLate(sent=False) from None
        return answers

    def tell(self, operation: p.Operation) -> None:
        """Send an operation whose answer is not needed, and wait until it is done; if that takes too long, it is done
        when the node answers again. Raises the error that the node reports, or NodeUnavailable."""
        try:
            self.ask_one(operation)
        except NodeLate as late:
            if not late.sent:
                self.later(operation)

    def post(self, *operations: p.Operation) -> None:
        """Send operations whose answers are not needed, after those that were deferred; defer them while the link is
        behind."""
        with self._lock:
            try:
                self._check()
                if self._behind:
                    self._waiting.extend(operations)
                    self._attract()
                    return
                self._send(list(operations))
            except NodeLate as late:
                if not late.sent:
                    self._waiting.extend(operations)
            except Exception:
                raise
            except BaseException:
                self.close()
                raise

    @property
    def behind(self) -> bool:
        """Whether answers of the node are overdue, so that operations posted now are deferred."""
        return self._behind

    def later(self, operation: p.Operation) -> None:
        """Defer an operation whose answer is not needed: it is sent with the next request, or soon by ``nudge``."""
        self._check()
        self._waiting.append(operation)
        if self.watch is None:
            self.post()
        else:
            self._attract()

    def _attract(self) -> None:
        """Register the link to be nudged."""
        self.busy = True
        if self.watch is not None and not self.watched:
            self.watched = True
            self.watch(self)

    def nudge(self) -> bool:
        """Send what was deferred before the last nudge, and receive overdue answers. Returns whether to nudge again
        soon."""
        if self._behind:
            self._attend()
            return True
        waiting = next(iter(self._waiting.copy()), None)
        if waiting is not None and waiting is self._late:
            self.post()
        self._late = waiting
        busy, self.busy = self.busy, False
        return busy

    def _check(self) -> None:
        if not self.alive:
            raise NodeUnavailable

    def _send(self, operations: list[p.Operation]) -> tuple[int, int]:
        """Returns the number of the request, and how many deferred operations precede the given ones in it."""
        self._check()
        before: list[p.Operation] = []
        while self._waiting:  # the lock is held: no other thread takes from it
            before.append(self._waiting.popleft())
            if len(before) == _TOGETHER:
                self._transmit(before)
                before = []
        try:
            if len(before) + len(operations) > p.OPERATIONS:
                self._transmit(before)
                before = []
            number, frame = self._encoded(before + operations)
            if len(frame) > _LONGEST:
                number, frame = self._encoded(operations)  # without the deferred ones they may be short enough
                self._check_length(frame)
                self._transmit(before)
                before = []
        except NodeUnavailable:
            raise
        except Exception:  # one of the operations cannot be encoded; keep the deferred ones, which can
            self._waiting.extendleft(reversed(before))
            raise
        try:
            self._put(number, frame)
        except NodeLate:
            self._owed = number, operations, len(before)
            raise
        return number, len(before)

    def _encoded(self, operations: list[p.Operation]) -> tuple[int, bytes]:
        """Returns the number of a request and its frame."""
        number = next(self._numbers)
        return number, p.frame(p.Request(number, operations))

    @staticmethod
    def _check_length(frame: bytes) -> None:
        """Raises LayoutError if a frame is too long: the node would hang up, and all sessions of this process would
        miss."""
        if len(frame) > _LONGEST:
            raise LayoutError(
                f"this call needs a message of {len(frame)} bytes, and a node takes {p.LARGEST} at most: give a "
                "shorter prompt, or larger blocks"
            )

    def _transmit(self, operations: list[p.Operation]) -> None:
        """Send deferred operations in a request of their own. If it is sent only in part, nothing else may be sent
        yet."""
        try:
            self._put(*self._encoded(operations))
        except NodeLate:
            raise NodeLate(sent=False) from None

    def _put(self, number: int, frame: bytes) -> None:
        """Send a frame. Raises NodeLate if only a part was sent: the rest is kept and sent first."""
        assert self._requests is not None
        self._last = number
        try:
            sent = self._requests.send(frame, self._flags)
        except BlockingIOError:
            self._unsent = memoryview(frame)
            raise self._waited(sent=True) from None
        except OSError as e:
            self.close()
            raise NodeUnavailable from e
        if sent < len(frame):
            self._unsent = memoryview(frame)[sent:]
            self._send_rest()

    def _send_rest(self) -> None:
        """Send the rest of a frame. Raises NodeLate or NodeUnavailable."""
        assert self._requests is not None
        try:
            while self._unsent:
                self._unsent = self._unsent[self._requests.send(self._unsent, self._flags) :]
        except BlockingIOError:
            raise self._waited(sent=True) from None
        except OSError as e:
            self.close()
            raise NodeUnavailable from e

    # -- a node that is late ------------------------------------------------------------------------------

    def _waited(self, sent: bool) -> NodeUnavailable:
        """The exception to raise when the node has not answered in time, or has not read what was sent."""
        assert self._peer is not None
        if self.watch is None or not self._peer.alive:
            self.close()
            return NodeUnavailable()
        self._behind = True
        if not self._flags:  # otherwise no caller waited
            self._overdue += 1
        if self._overdue >= _IN_A_ROW and not self.slow:
            self.slow, self._probed = True, None
            log.warning(
                "the node at %s is alive, but has twice not answered within %g s: everything is a miss until it does",
                self._path,
                self._patience,
            )
        self._attract()
        return NodeLate(sent)

    def _catch_up(self) -> None:
        """Wait for the overdue answer; the lock is held. Raises NodeLate if it does not arrive, or if the link is
        slow."""
        self._check()
        if self.slow:
            raise NodeLate(sent=False)
        try:
            self._send_rest()
            while self._owed is not None:
                self._settle(self._receive())
        except NodeLate:
            raise NodeLate(sent=False) from None
        except BlockingIOError:
            raise self._waited(sent=False) from None
        self._behind = False

    def _settle(self, reply: p.Reply) -> None:
        """Process an answer that no caller waits for."""
        self._answered = reply.number or self._answered
        if self._owed is not None and self._owed[0] == reply.number:
            (_, operations, before), self._owed = self._owed, None
            self._give_back(operations, reply.answers[before:])

    def _give_back(self, operations: list[p.Operation], answers: list[p.Answer]) -> None:
        # there may be answers only for the parts before the last
        for operation, answer in zip(operations, answers, strict=False):
            if (given_back := giving_back(operation, answer)) is not None:
                self._waiting.append(given_back)
        self._attract()

    def _attend(self) -> None:
        """Receive overdue answers and send the rest of a frame, without waiting; while the link is slow, probe it."""
        if not self._lock.acquire(blocking=False):
            return  # the thread that holds the lock receives it
        try:
            self._flags = socket.MSG_DONTWAIT
            self._check()
            self._send_rest()
            with contextlib.suppress(BlockingIOError):
                while True:
                    self._settle(self._receive())
            if self._owed is None and self._unsent.nbytes == 0:
                self._probe()
        except NodeLate:
            pass  # the socket is full
        finally:
            self._flags = 0
            self._lock.release()

    def _probe(self) -> None:
        """No answer is overdue: end the slow state if a probe was answered in time, otherwise send another probe."""
        if self.slow and self._probed is not None and self._answered == self._last:
            if time.monotonic() - self._probed <= self._patience:
                self.slow, self._overdue = False, 0
                log.info("the node at %s answers in time again", self._path)
            self._probed = None
        if not self.slow:
            self._behind = False
            if self._waiting:
                self._send([])
        elif self._probed is None and self._answered == self._last:
            self._probed = time.monotonic()
            self._send([])

    def push(self) -> None:
        """Send what was deferred, as far as possible without waiting. For closing: nothing will be received any
        more."""
        with self._lock, contextlib.suppress(NodeUnavailable):
            try:
                self._flags = socket.MSG_DONTWAIT
                self._check()
                self._send_rest()
                if self._waiting:
                    self._send([])
            finally:
                self._flags = 0

    def _receive(self) -> p.Reply:
        """Returns the next reply. Raises BlockingIOError if it does not arrive in time: the bytes received so far are
        kept."""
        received, (buffer,) = self._received, self._buffers
        assert self._requests is not None
        while not received or not (end := p.whole(received)):
            try:
                size, ancillary, _, _ = self._requests.recvmsg_into(
                    self._buffers, _SPACE, socket.MSG_CMSG_CLOEXEC | self._flags
                )
            except BlockingIOError:
                raise
            except OSError as e:
                self.close()
                raise NodeUnavailable from e
            for level, kind, content in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    self._descriptors += array("i", content[: len(content) - len(content) % 4])
            if not size:
                self.close()
                raise NodeUnavailable
            if not received and p.whole(buffer, size) == size:
                return self._understood(memoryview(buffer)[p.LENGTH.size : size])
            received += memoryview(buffer)[:size]
        reply = self._understood(bytes(memoryview(received)[p.LENGTH.size : end]))
        del received[:end]
        return reply

    def _understood(self, body: bytes | memoryview) -> p.Reply:
        try:
            reply = self._replies.decode(body)
            for serial in reply.segments:
                name = f"{self.welcome.life}-{serial}"
                self._segments[serial] = self._mappings.map(self._descriptors.pop(0), name)
                self.lent.add(name)
        except (msgspec.MsgspecError, TierError, OSError, IndexError) as e:
            self.close()
            while self._descriptors:
                os.close(self._descriptors.pop())
            raise NodeUnavailable from e
        for serial in reply.gone:
            self._segments.pop(serial, None)
        return reply

    def spans(self, addresses: bytes, nbytes: int, right: Hashable = None) -> list[Span]:
        """The memory of slots, either of a right or newly granted ones."""
        with self._rights_lock:
            memory = self._kept.get(right, self._segments)
        found = []
        try:
            for address in memoryview(addresses).cast("Q"):
                start = address & 0xFFFFFFFFFF
                found.append(memory[address >> 40][start : start + nbytes])
        except KeyError:
            raise NodeUnavailable from None
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
                raise NodeUnavailable from e
            if not data:
                raise NodeUnavailable
            heard += data
        notice: p.Notice = self._notice_decoder.decode(memoryview(heard)[4:end])
        del heard[:end]
        return notice
