"""An asker's connection to another node: made when it is first needed, and again after it failed.

A link is used by one thread. Each lookup, and the requests of each read together, have one deadline for everything,
connecting included (only the resolver of host names has none); a ``Watchdog`` keeps it. A lookup's deadline is short,
because a prompt waits for it; that of a read grows with the bytes that arrive (``SLOWEST``). Whatever
fails (a deadline, a closed connection, an answer that breaks the protocol) closes the connection, because what comes
next on it could be the rest of an answer to something else."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvtide.block import ALIGN, DIGEST, BlockKey, Span
from kvtide.errors import ConfigError
from kvtide.tiers.base import Identity
from kvtide.tiers.peers.availability import OtherNode, OwnAddress
from kvtide.tiers.peers.greeting import ask_in, received
from kvtide.tiers.peers.protocol import (
    ALL,
    COMPRESSION,
    ITEM,
    PART,
    REPLY,
    REQUEST,
    SLOWEST,
    LocatedBlocks,
    Operation,
    PeerViolation,
    Presence,
    RequestCredit,
    Violation,
    Welcome,
    pack_identity,
    parse_located,
)
from kvtide.tiers.peers.transport import PeerConnection
from kvtide.tiers.peers.trust import PeerTrust
from kvtide.tiers.peers.watchdog import Watchdog

__all__ = ["LOOKUP", "Arrival", "PeerLink", "WantedBlock", "many_processors"]

LOOKUP = 0.5
"""Seconds that a lookup may take at most, connecting included."""
_LARGEST = 1 << 20
"""The most bytes of an answer besides records."""
_AHEAD = 1
"""Requests that are sent before the answer to the one before them is read."""
_SMALL_PIECE, _LARGE_PIECE = 512 << 10, 8 << 20
"""Bytes that are received at a time, of one block or several. While they are verified, the kernel receives more. What
is small is still in the processor's cache then, but it takes more calls: that pays with many processors."""
_PROCESSORS = 4


def many_processors() -> bool:
    """Whether there are enough for all connections to verify blocks while others receive some."""
    return len(os.sched_getaffinity(0)) >= _PROCESSORS


class WantedBlock(NamedTuple):
    """A block to read, and where to."""

    key: BlockKey
    sections: range | None
    """None: all."""
    header: Span
    """As long as the header of its record may be. That of one that is not compressed has ``ALIGN`` bytes."""
    payload: Span
    """As long as the sections."""


class Arrival(NamedTuple):
    """What has arrived of a block, the one of that number among those that were wanted."""

    number: int
    presence: Presence
    nbytes: int
    """Bytes of its sections, from the first on; fewer than they have, if they are compressed."""
    complete: bool
    """Whether that is all of it."""


class _Allowance:
    """The deadline of a read: it has a timeout, and a moment more for each piece that the other node has begun to send.
    So a large block may arrive over a slow connection, and a node that hangs costs the timeout, whatever was asked."""

    def __init__(self, watchdog: Watchdog, connection: PeerConnection, timeout: float, share: float) -> None:
        """``share``: bytes that arrive over all connections for each byte over this one. They have one link."""
        self._watchdog = watchdog
        self._connection = connection
        self._share = share
        self._end = time.monotonic() + timeout

    def more(self, nbytes: int) -> None:
        """So many bytes more are received now."""
        self._end += self._share * nbytes / SLOWEST
        self._watchdog.limit(self._connection, self._end - time.monotonic())


def _check_wanted(stopped: Callable[[], bool]) -> None:
    if stopped():
        raise OSError(errno.ECANCELED, "the read was stopped")


def _body(identity: Identity, blocks: Sequence[WantedBlock]) -> bytes:
    return pack_identity(identity) + b"".join(
        ITEM.pack(block.key[:DIGEST], *((0, ALL) if (s := block.sections) is None else (s.start, len(s))))
        for block in blocks
    )


class PeerLink:
    """See the module's docstring."""

    def __init__(
        self,
        address: str,
        trust: PeerTrust,
        timeout: float,
        watchdog: Watchdog,
        own: bytes,
        named: bytes = b"",
    ) -> None:
        """``own`` is the name of the store that asks, ``named`` that of the one to be asked; empty: any."""
        self._address = address
        self._trust = trust
        self._timeout = timeout
        self._watchdog = watchdog
        self._own = own
        self._named = named
        self._piece = _SMALL_PIECE if many_processors() else _LARGE_PIECE
        self._connection: PeerConnection | None = None
        self._credit = RequestCredit()
        self._features = 0
        self._number = 0
        self._busy = threading.Lock()
        """Held while a request is under way, so that ``close`` does not release what is in use."""
        self._state = threading.Lock()
        self._receiving = False
        """Whether a request may receive something now. Changed with ``_state`` held."""
        self._closed = False

    def __repr__(self) -> str:
        return f"<link to {self._address}{'' if self._connection is not None else ', not connected'}>"

    @property
    def credit(self) -> RequestCredit:
        """What one request may ask for; before the first connection, a guess."""
        return self._credit

    @property
    def carrier(self) -> str:
        """What moves the bytes; empty: it is not connected."""
        connection = self._connection
        return "" if connection is None else connection.carrier

    @property
    def compresses(self) -> bool:
        """Whether the node can send compressed blocks, as far as is known."""
        return bool(self._features & COMPRESSION)

    def greet(self) -> None:
        """Connect anew, to see whether the node answers. Raises OSError."""
        with self._busy:
            self._drop()
        with self._request(self._timeout):
            pass

    def locate(self, identity: Identity, keys: Sequence[BlockKey]) -> LocatedBlocks:
        """Ask which blocks of an identity are there. Raises OSError."""
        with self._request(min(LOOKUP, self._timeout)) as connection:
            whole = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), -1)
            body = pack_identity(identity) + whole[:, :DIGEST].tobytes()
            size = self._answer(
                connection, Operation.LOCATE, len(keys), self._ask(connection, Operation.LOCATE, len(keys), body)
            )
            return parse_located(memoryview(received(connection, size)), len(keys))

    def read(
        self,
        identity: Identity,
        requests: Iterable[Sequence[WantedBlock]],
        stopped: Callable[[], bool] = lambda: False,
        *,
        compressed: bool = False,
        share: float = 1.0,
    ) -> Generator[Arrival, None, None]:
        """Read blocks of an identity, with a request for each sequence of them. Says of each block, in their order,
        what has arrived: of one with a HIT the header, and so many bytes of its sections, not yet verified. Raises
        OSError.

        ``compressed``: blocks may be compressed, if the node can do that. They are received where the block is to be.
        ``share``: bytes that other links read from the node meanwhile, and this one, for each byte of this one.

        While the caller verifies what has arrived, the next bytes are on their way: the kernel receives them, and the
        next request is sent before the answer to the one before is read. Close the iterator if it is not exhausted.

        ``stopped``: whether nothing shall be received any more; see ``stop``.
        """
        with self._request(self._timeout, stopped) as connection:
            allowed = _Allowance(self._watchdog, connection, self._timeout, share)
            asked: deque[tuple[int, int, Sequence[WantedBlock]]] = deque()
            first = 0
            small = compressed and self.compresses
            operation, arrivals = (
                (Operation.READ_COMPRESSED, self._compressed) if small else (Operation.READ, self._arrivals)
            )
            for blocks in requests:
                asked.append((self._ask(connection, operation, len(blocks), _body(identity, blocks)), first, blocks))
                first += len(blocks)
                if len(asked) > _AHEAD:
                    yield from arrivals(connection, allowed, *asked.popleft())
            while asked:
                yield from arrivals(connection, allowed, *asked.popleft())

    def _arrivals(
        self, connection: PeerConnection, allowed: _Allowance, request: int, first: int, blocks: Sequence[WantedBlock]
    ) -> Iterator[Arrival]:
        """Receive the answer to a request, whose blocks are numbered from ``first`` on."""
        size = self._answer(connection, Operation.READ, len(blocks), request)
        if size != len(blocks) * PART.size:
            raise PeerViolation(Violation.GARBAGE)
        parts = list(PART.iter_unpack(received(connection, size)))
        for block, (presence, header, payload) in zip(blocks, parts, strict=True):
            expected = (ALIGN, len(block.payload)) if presence == Presence.HIT else (0, 0)
            if presence > Presence.BUSY or (header, payload) != expected:
                raise PeerViolation(Violation.GARBAGE)
        into: list[Span] = []
        arrived: list[Arrival] = []
        """What will have arrived when ``into`` is filled."""
        size = 0
        most = self._piece
        for number, (block, (presence, _, nbytes)) in enumerate(zip(blocks, parts, strict=True), first):
            if presence != Presence.HIT:
                arrived.append(Arrival(number, Presence(presence), 0, complete=True))
                continue
            into.append(block.header[:ALIGN])
            for start in range(0, nbytes, most):
                piece = block.payload[start : start + most]
                if size + len(piece) > most:
                    allowed.more(size)
                    connection.receive(into)
                    yield from arrived
                    into, arrived, size = [], [], 0
                into.append(piece)
                arrived.append(Arrival(number, Presence.HIT, start + len(piece), start + len(piece) == nbytes))
                size += len(piece)
        allowed.more(size)
        connection.receive(into)
        yield from arrived

    def _compressed(
        self, connection: PeerConnection, allowed: _Allowance, request: int, first: int, blocks: Sequence[WantedBlock]
    ) -> Iterator[Arrival]:
        """Receive the answer to a request for blocks that may be compressed."""
        if self._answer(connection, Operation.READ_COMPRESSED, len(blocks), request):
            raise PeerViolation(Violation.GARBAGE)
        for number, block in enumerate(blocks, first):
            allowed.more(len(block.payload))  # it may have to be compressed first
            presence, header, nbytes = PART.unpack(received(connection, PART.size))
            if presence in (Presence.MISS, Presence.BUSY) and not header and not nbytes:
                yield Arrival(number, Presence(presence), 0, complete=True)
                continue
            small = 0 < nbytes < len(block.payload) and block.sections is None
            expected = len(block.header) if small else ALIGN
            if presence != Presence.HIT or header != expected or not (small or nbytes == len(block.payload)):
                raise PeerViolation(Violation.GARBAGE)
            connection.receive([block.header[:header], block.payload[:nbytes]])
            yield Arrival(number, Presence.HIT, nbytes, complete=True)

    def _ask(self, connection: PeerConnection, operation: Operation, items: int, body: bytes) -> int:
        """Send a request; returns its number."""
        self._number += 1
        connection.send([REQUEST.pack(operation, 0, items, len(body), self._number) + body])
        return self._number

    def _answer(self, connection: PeerConnection, operation: Operation, items: int, request: int) -> int:
        """Receive the head of the answer to a request; returns the number of bytes that follow it."""
        kind, _, count, size, number = REPLY.unpack(received(connection, REPLY.size))
        if number != request:
            raise PeerViolation(Violation.REPLAYED)
        if kind != operation or count != items or size > _LARGEST:
            raise PeerViolation(Violation.GARBAGE)
        return int(size)

    @contextlib.contextmanager
    def _request(self, seconds: float, stopped: Callable[[], bool] = lambda: False) -> Iterator[PeerConnection]:
        end = time.monotonic() + seconds
        with self._busy:
            try:
                if self._connection is not None and self._connection.ended():
                    self._drop()  # between two requests: the node was restarted since then, and may be back
                connection = self._connection or self._connect(end, stopped)
                self._watchdog.limit(connection, end - time.monotonic())
                with self._state:
                    _check_wanted(stopped)
                    self._receiving = True
                try:
                    yield connection
                finally:
                    with self._state:
                        self._receiving = False
                connection.due = math.inf
            except BaseException as e:
                due = end if self._connection is None else self._connection.due
                self._drop()
                late = isinstance(e, TimeoutError) or time.monotonic() >= due
                if late and isinstance(e, OSError) and not isinstance(e, PeerViolation):
                    raise TimeoutError(errno.ETIMEDOUT, "the node does not answer") from e
                raise

    def _connect(self, end: float, stopped: Callable[[], bool]) -> PeerConnection:
        self._check_open()
        try:
            secret = self._trust.secret()
            self._connection = connection = self._trust.transport.connect(self._address, end - time.monotonic())
            self._number = 0
            self._watchdog.add(connection)
            self._watchdog.limit(connection, end - time.monotonic())
            self._check_open()  # ``close`` and ``stop`` may have seen no connection to interrupt
            _check_wanted(stopped)
            connection.begin()
        except ConfigError as e:  # files of secrets and certificates are read now
            raise OSError(errno.EACCES, str(e)) from e
        # Who is named was found in a directory, and so was the address: see protocol.py.
        welcome = ask_in(connection, secret, self._address if self._named else "", self._check_node)
        self._credit = welcome.credit
        self._features = welcome.features
        return connection

    def _check_node(self, welcome: Welcome) -> None:
        if welcome.node == self._own:
            raise OwnAddress(errno.ELOOP, "the address is this node's own")
        if self._named and welcome.node != self._named:
            raise OtherNode(errno.ESTALE, "another node is at its address now, or it was restarted")

    def stop(self) -> bool:
        """Make a read end soon whose ``stopped`` is true by now. Returns whether it receives nothing any more: it has
        ended, or will look at ``stopped`` before it begins. Otherwise its memory is used until it has ended."""
        with self._state:
            if (connection := self._connection) is not None:
                connection.interrupt()
            return not self._receiving

    def _check_open(self) -> None:
        if self._closed:
            raise OSError(errno.ESHUTDOWN, "the tier is closed")

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._watchdog.remove(connection)
            connection.close()

    def close(self) -> None:
        """End a request under way, and release the connection."""
        self._closed = True
        if (connection := self._connection) is not None:
            connection.interrupt()
        # A request may be making a connection. Then that request releases it.
        if self._busy.acquire(timeout=self._timeout):
            try:
                self._drop()
            finally:
                self._busy.release()

    def forked(self) -> None:
        """In a forked child: close its copy of the connection."""
        if self._connection is not None:
            self._connection.forked()
