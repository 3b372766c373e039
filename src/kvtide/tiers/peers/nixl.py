"""NIXL beside TCP: large parts go through memory that the other end reads by RDMA.

A connection begins as TCP. When both ends have authenticated each other, and both have NIXL, each tells the other where
its chunks are; from then on what is sent travels as frames::

    kind (u8: 1 bytes, 2 chunk, 3 read), zeros (3), bytes (u32), offset (u64)

- *bytes*: they follow.
- *chunk*: they are in the sender's chunk at that offset. The receiver reads them by NIXL, and says *read*.
- *read*: that chunk is not needed any more.

So a stream has the same bytes as over TCP, in the same order, and whatever is said of deadlines, checksums and credit
holds: a deadline interrupts the socket and the channel (nixl_helper.py). ``send`` copies large parts into chunks, and
``receive`` copies chunks to where the bytes are for: the spans of a caller are never given to NIXL, because that cannot
cancel a transfer. docs/design/0009-nixl.md has the reasons, and what it costs.

Whoever sends frames that are not as they must be is disconnected, and nothing outside of its chunks is asked for."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from kvtide.block import Span
from kvtide.errors import ConfigError
from kvtide.tiers.peers.nixl_helper import ANSWER, FREE, LARGEST_METADATA, READ
from kvtide.tiers.peers.nixl_process import CHUNK, NixlOffer, NixlProcess
from kvtide.tiers.peers.protocol import NIXL, PeerViolation, Violation
from kvtide.tiers.peers.transport import PeerConnection, PeerListener, PeerTransport

__all__ = ["Nixl", "NixlConnection"]

log = logging.getLogger("kvtide.peers")

_OFFER = struct.Struct("<IQQ")
"""Bytes of metadata that follow (0: no NIXL), address and number of bytes of the chunks."""
_FRAME = struct.Struct("<B3xIQ")
_BYTES, _CHUNK, _READ = 1, 2, 3
_SMALLEST = 256 << 10
"""What is sent with fewer bytes goes by TCP."""
_AHEAD = 4
"""Chunks that the other end has not read yet, of a connection."""
_EARLY = 1 << 20
"""Bytes that may come while this end waits until a chunk was read."""
_LONGEST = 30.0
"""Seconds for reading a chunk, whatever the deadline: while a server waits for a request it has none."""
_REST = 60.0
"""Seconds for which an address is used by TCP after NIXL failed there."""


class NixlConnection:
    """A connection that uses NIXL after ``agreed``, if the other end does."""

    def __init__(self, tcp: PeerConnection, process: NixlProcess, failed: Callable[[], None], features: int) -> None:
        """``failed`` is called when NIXL could not read."""
        self._tcp = tcp
        self._process = process
        self._failed = failed
        self.features = features
        self.peer = tcp.peer
        self.encrypted = tcp.encrypted
        self.due = math.inf
        self.begin = tcp.begin
        self._theirs: NixlOffer | None = None
        self._channel: socket.socket | None = None
        self._interrupted = False
        self._later = False
        """Whether NIXL was not ready here when this connection was made, and the other end has it."""
        self._sending = False
        self._sent: deque[int] = deque()
        """Chunks that the other end has not read yet."""
        self._early: deque[tuple[int, int, int, Span]] = deque()
        """Frames that came while this end waited to send, with their bytes."""
        self._left: Span = memoryview(b"")
        """What was received and not asked for yet."""
        self._coming = 0
        """Bytes of a frame that are still to be received."""
        self._held = False
        """Whether ``_left`` is in a chunk."""

    def __repr__(self) -> str:
        return f"<connection to {self.peer}, {self.carrier}>"

    @property
    def carrier(self) -> str:
        return "NIXL" if self._theirs is not None else self._tcp.carrier

    def agreed(self, features: int) -> None:
        if not features & NIXL:
            return
        mine = self._process.offer()
        if mine is None:
            self._tcp.send([_OFFER.pack(0, 0, 0)])
        else:
            self._tcp.send([_OFFER.pack(len(mine.metadata), mine.base, mine.nbytes) + mine.metadata])
        head = bytearray(_OFFER.size)
        self._tcp.receive([memoryview(head)])
        size, base, nbytes = _OFFER.unpack(head)
        if size > LARGEST_METADATA or base + nbytes >= 1 << 64:
            raise PeerViolation(Violation.GARBAGE)
        metadata = bytearray(size)
        self._tcp.receive([memoryview(metadata)])
        self._later = mine is None and size > 0
        if mine is not None and size:
            self._theirs = NixlOffer(base, nbytes, bytes(metadata))

    # -- sending ------------------------------------------------------------------------------------------

    def send(self, parts: Sequence[Span | bytes]) -> None:
        if self._theirs is None:
            self._tcp.send(parts)
            return
        self._sending = True
        try:
            self._send(parts)
        finally:
            self._sending = False

    def _send(self, parts: Sequence[Span | bytes]) -> None:
        left: Sequence[Span | bytes] = [part for part in parts if len(part)]
        size = sum(map(len, left))
        while size >= _SMALLEST and (chunk := self._free_chunk()) is not None:
            into = self._process.at(chunk, min(size, CHUNK))
            left = _copied(left, into)
            size -= len(into)
            self._tcp.send([_FRAME.pack(_CHUNK, len(into), chunk)])
        while size:
            some, left = _first(left, min(size, 1 << 31))
            nbytes = sum(map(len, some))
            self._tcp.send([_FRAME.pack(_BYTES, nbytes, 0), *some])
            size -= nbytes

    def _free_chunk(self) -> int | None:
        """A chunk to send; None: others have them all. Waits until the other end has read some of this connection."""
        while True:
            if len(self._sent) < _AHEAD and (chunk := self._process.take()) is not None:
                self._sent.append(chunk)
                return chunk
            if not self._sent:
                return None
            self._wait_for_read()

    def _wait_for_read(self) -> None:
        """Receive until the other end has read a chunk."""
        before = len(self._sent)
        while len(self._sent) == before:
            self._hear()

    def _hear(self) -> None:
        """Receive what comes next, and keep it unless it says that a chunk was read."""
        if self._coming:  # the rest of a frame
            kind, nbytes, offset, self._coming = _BYTES, self._coming, 0, 0
        else:
            kind, nbytes, offset = self._next()
            if kind == _READ:
                return
        size = nbytes if kind == _BYTES else 0
        if len(self._early) == _EARLY >> 10 or size + sum(len(one[3]) for one in self._early) > _EARLY:
            raise OSError(errno.ENOBUFS, "the other end sends, and does not receive")
        data = memoryview(bytearray(size))
        self._tcp.receive([data])
        self._early.append((kind, nbytes, offset, data))

    def _hear_of_reads(self) -> None:
        """Receive what is there already, if it may say that chunks were read."""
        while self._sent and not self._sending and not self._coming and self._tcp.ended():
            self._hear()

    # -- receiving ----------------------------------------------------------------------------------------

    def receive(self, parts: Sequence[Span]) -> None:
        if self._theirs is None:
            self._tcp.receive(parts)
            return
        left = [part for part in parts if part]
        while left:
            if self._left:
                some, left = _first(left, min(len(self._left), sum(map(len, left))))
                for part in some:
                    _copy(part, self._left[: len(part)])
                    self._left = self._left[len(part) :]
                if self._held:
                    self._check_held()
                if not self._left:
                    self._let_go()
            elif self._coming:
                some, left = _first(left, min(self._coming, sum(map(len, left))))
                self._coming -= sum(map(len, some))
                self._tcp.receive(some)
            else:
                self._advance()

    def _advance(self) -> None:
        """Receive the beginning of the next frame."""
        if self._early:
            kind, nbytes, offset, data = self._early.popleft()
            if kind == _BYTES:
                self._left = data
                return
        else:
            kind, nbytes, offset = self._next()
        if kind == _BYTES:
            self._coming = nbytes
        elif kind == _CHUNK:
            self._left = self._fetched(offset, nbytes)
            self._tcp.send([_FRAME.pack(_READ, 0, offset)])

    def _next(self) -> tuple[int, int, int]:
        """The head of the next frame. Raises PeerViolation."""
        head = bytearray(_FRAME.size)
        self._tcp.receive([memoryview(head)])
        kind, nbytes, offset = _FRAME.unpack(head)
        theirs = self._theirs
        if kind == _READ and self._sent and offset == self._sent[0]:
            self._process.give(self._sent.popleft())
        elif not (
            (kind == _BYTES and nbytes)
            or (kind == _CHUNK and theirs and 0 < nbytes <= CHUNK and offset + nbytes <= theirs.nbytes)
        ):
            raise PeerViolation(Violation.GARBAGE)
        return kind, nbytes, offset

    def _fetched(self, offset: int, nbytes: int) -> Span:
        """Read a part of the other end's chunks. Raises OSError."""
        try:
            channel = self._open_channel()
            channel.send(READ.pack(offset, nbytes))
            answer = channel.recv(ANSWER.size)
            if len(answer) != ANSWER.size:
                raise ConnectionResetError(errno.ECONNRESET, "NIXL could not read what the other end sent")
        except OSError:
            if not self._interrupted or time.monotonic() >= self.due:  # else it was not wanted any more
                self._failed()
            raise
        self._held = True
        return self._process.at(ANSWER.unpack(answer)[0], nbytes)

    def _open_channel(self) -> socket.socket:
        if self._channel is None:
            theirs = self._theirs
            assert theirs is not None
            self._channel = self._process.channel(theirs)
            self._channel.settimeout(_LONGEST)
        if self._interrupted:  # it may have been before there was a channel to interrupt
            raise ConnectionAbortedError(errno.ECONNABORTED, "the connection was interrupted")
        return self._channel

    def _check_held(self) -> None:
        """Raises OSError if the chunk that is held may be used by another transfer: if the channel has ended."""
        assert self._channel is not None
        ended = select.poll()
        ended.register(self._channel, select.POLLIN)
        if ended.poll(0):
            raise ConnectionAbortedError(errno.ECONNABORTED, "the connection was interrupted, or NIXL has ended")

    def _let_go(self) -> None:
        if self._held and self._channel is not None:
            self._held = False
            self._channel.send(FREE)

    # -- the end ------------------------------------------------------------------------------------------

    def ended(self) -> bool:
        if self._later and self._process.offer() is not None:
            return True  # a new one can use NIXL
        try:
            self._hear_of_reads()
        except OSError:
            return True
        return bool(self._left or self._coming or self._early) or self._tcp.ended()

    def unsent(self) -> int:
        try:
            self._hear_of_reads()
        except OSError:  # it is closed
            return 0
        return self._tcp.unsent() + CHUNK * len(self._sent)

    def interrupt(self) -> None:
        self._interrupted = True
        self._tcp.interrupt()
        if (channel := self._channel) is not None:
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._tcp.close()
        self._release()

    def abort(self) -> None:
        self._tcp.abort()
        self._release()

    def _release(self) -> None:
        self._left = memoryview(b"")
        if self._channel is not None:
            self._channel.close()
        while self._sent:
            self._process.give(self._sent.popleft())

    def forked(self) -> None:
        self._tcp.forked()
        if self._channel is not None:
            with contextlib.suppress(OSError):
                os.close(self._channel.detach())


class _Listener:
    def __init__(self, tcp: PeerListener, process: NixlProcess) -> None:
        self._tcp = tcp
        self._process = process
        self.address = tcp.address
        self.close = tcp.close
        self.forked = tcp.forked

    def accept(self) -> PeerConnection:
        self._process.start_soon()
        return NixlConnection(self._tcp.accept(), self._process, lambda: None, NIXL)


class Nixl:
    """NIXL beside ``tcp``, with the agent of ``process``."""

    def __init__(self, tcp: PeerTransport, process: NixlProcess, *, forced: bool = True) -> None:
        """``forced``: not to listen if the agent does not start."""
        self._tcp = tcp
        self._process = process
        self._forced = forced
        self._resting: dict[str, float] = {}

    def connect(self, address: str, timeout: float) -> PeerConnection:
        self._process.start_soon()
        connection = self._tcp.connect(address, timeout)

        def failed() -> None:
            self._resting[address] = time.monotonic() + _REST

        rests = time.monotonic() < self._resting.get(address, 0.0)
        return NixlConnection(connection, self._process, failed, 0 if rests else NIXL)

    def listen(self, address: str) -> PeerListener:
        """Starts the agent too. Raises OSError, and ConfigError if the agent does not start."""
        try:
            self._process.start()
        except OSError as e:
            if self._forced:
                raise ConfigError(f'peers.fabric is "nixl": {e.strerror or e}; or set it to "auto" or "tcp"') from e
            log.warning("blocks are sent over TCP: %s", e.strerror or e)
        return _Listener(self._tcp.listen(address), self._process)


def _copy(into: Span, data: Span | bytes) -> None:
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))  # without the GIL


def _copied(parts: Sequence[Span | bytes], into: Span) -> Sequence[Span | bytes]:
    """Fill ``into`` with the first bytes of ``parts``; returns the rest."""
    some, rest = _first(parts, len(into))
    for part in some:
        _copy(into[: len(part)], part)
        into = into[len(part) :]
    return rest


def _first(parts: Sequence[Span | bytes], count: int) -> tuple[list[Span], list[Span]]:
    """The first ``count`` bytes of ``parts``, and the others."""
    some: list[Span] = []
    for i, part in enumerate(parts):
        view = memoryview(part)
        if len(view) >= count:
            rest = [view[count:]] if len(view) > count else []
            return [*some, view[:count]], [*rest, *(memoryview(other) for other in parts[i + 1 :])]
        some.append(view)
        count -= len(view)
    return some, []
