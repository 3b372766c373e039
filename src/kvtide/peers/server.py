"""Serves a node's blocks to other nodes: one thread per connection, beside the node's own loop.

A connection's thread waits for a request, answers it and waits for the next one. It sends blocks directly from the
memory that they are in, and ``sendmsg`` releases the GIL, so the node's own clients are not delayed by more than the
headers and checksums cost.

Whatever an asker does costs its connection, and nothing else:

- Requests are read into memory of a fixed size, and a request for more than the credit that was granted ends the
  connection. So does anything that breaks the protocol.
- An answer must have been taken within ``peers.timeout``, and a second more for each 16 MiB of it; then the connection
  is interrupted, and what it held is free.
- Connections are limited, for each address and together; who is not authenticated yet keeps nobody out (callers.py).

Each end of that kind is counted by its reason. See blocks.py for what an answer may contain.
"""

from __future__ import annotations

import contextlib
import logging
import math
import ssl
import threading
import time
from collections import Counter
from collections.abc import Sequence

from kvtide import forks
from kvtide.block import DIGEST, Span
from kvtide.errors import ConfigError
from kvtide.peers.blocks import AskedBlock, PeerBlocks, SentBlock
from kvtide.peers.callers import GreetedPeer, PeerCaller, PeerCallers
from kvtide.peers.compressor import BlockCompressor
from kvtide.store.node_statistics import PeerServing
from kvtide.store.store import Store
from kvtide.tiers.format.encryption import OPEN
from kvtide.tiers.format.packer import Packer
from kvtide.tiers.peers.cluster import announced_address
from kvtide.tiers.peers.greeting import let_in, received
from kvtide.tiers.peers.protocol import (
    ALL,
    COMPRESSION,
    IDENTITY,
    ITEM,
    LARGEST_BODY,
    PART,
    REPLY,
    REQUEST,
    SLOWEST,
    Operation,
    PeerViolation,
    Presence,
    RequestCredit,
    Violation,
    pack_located,
    parse_identity,
)
from kvtide.tiers.peers.transport import PeerConnection
from kvtide.tiers.peers.trust import PeerTrust
from kvtide.tiers.peers.watchdog import Watchdog

__all__ = ["PeerServer"]

log = logging.getLogger("kvtide.peers")

_GREETING = 1.0
"""Seconds that a connection may take until it is authenticated, or ``peers.timeout`` if that is less."""
_PAUSE = 0.5
"""Seconds without accepting connections after the node ran out of file descriptors for them."""
_LITTLE = 256 << 10
"""Bytes that a slow link has still to carry while the next block is waited for: some milliseconds."""
_LOGGED = 10.0
"""Seconds between two log lines about closed connections."""


class PeerServer:
    """Serves the blocks of a store at ``peers.listen``, until ``close``. Raises ConfigError."""

    def __init__(self, store: Store, credit: RequestCredit | None = None) -> None:
        settings = store.config.peers
        self._trust = PeerTrust(settings, store.config.security)
        self._timeout = settings.timeout
        self._name = store.name
        self._blocks = PeerBlocks(store, settings.timeout)
        self._credit = credit or self._blocks.credit
        self._compressor = BlockCompressor(store.clock)
        self._lock = threading.Lock()
        self._callers = PeerCallers()
        self._counts: Counter[str] = Counter()
        self._violations: Counter[Violation] = Counter()
        self._logged = -math.inf
        self._stop = threading.Event()
        try:
            self._listener = self._trust.transport.listen(settings.listen)
        except OSError as e:
            raise ConfigError(
                f"cannot serve other nodes at {settings.listen!r}: {e.strerror or e}. Give peers.listen a free address "
                "of this host, such as 10.0.0.7:9411"
            ) from e
        self.address = self._listener.address
        with contextlib.ExitStack() as undo:
            undo.callback(self._listener.close)
            # Of a node that is in no directory, others have the address from their own settings, as it is called there.
            self._announced = announced_address(settings, self.address) if settings.directory else ""
            self._watchdog = Watchdog(settings.timeout)
            undo.callback(self._watchdog.close)
            self._acceptor = threading.Thread(target=self._accept, name="kvtide-peers-accept", daemon=True)
            self._acceptor.start()
            undo.pop_all()
        forks.tell(self)
        log.info("serving blocks to other nodes at %s", self.address)

    def __repr__(self) -> str:
        return f"<PeerServer at {self.address}, {len(self._callers)} connections>"

    def statistics(self) -> PeerServing:
        with self._lock:
            return PeerServing(
                self.address,
                len(self._callers),
                self._counts["requests"],
                self._counts["located"],
                self._counts["sent"],
                self._counts["missed"],
                self._counts["busy"],
                self._counts["bytes"],
                self._blocks.bytes_held,
                {violation.value: count for violation, count in self._violations.items()},
                self._counts["compressed"],
                self._counts["uncompressed"],
            )

    def close(self) -> None:
        """Serve no more: end all connections, and wait until they hold nothing. May be repeated."""
        with self._lock:
            self._stop.set()
        self._listener.close()
        self._acceptor.join()
        self._watchdog.interrupt_all()
        for caller in self._callers:
            if caller.thread is not None and caller.thread.ident is not None:
                caller.thread.join()
        self._compressor.close()
        self._watchdog.close()

    def forked(self) -> None:
        self._listener.forked()
        for caller in self._callers:
            caller.connection.forked()

    # -- connections --------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                connection = self._listener.accept()
            except OSError as e:
                if self._stop.is_set():
                    return
                log.warning("cannot accept a connection of another node: %s", e.strerror or e)
                self._stop.wait(_PAUSE)
                continue
            caller = PeerCaller(connection)
            caller.thread = threading.Thread(target=self._serve, args=(caller,), name="kvtide-peers-serve", daemon=True)
            with self._lock:  # ``close`` sees it, or it sees that it is too late
                added = not self._stop.is_set() and self._callers.add(caller)
            if not added:
                self._ended(connection, Violation.TOO_MANY)
                connection.close()
                continue
            self._watchdog.add(connection)
            try:
                caller.thread.start()
            except RuntimeError:  # the system cannot start more threads
                self._over(caller, Violation.TOO_MANY)

    def _serve(self, caller: PeerCaller) -> None:
        connection, violation = caller.connection, None
        try:
            self._watchdog.limit(connection, min(self._timeout, _GREETING))
            connection.begin()
            features = let_in(GreetedPeer(caller), self._trust.secret(), self._credit, self._name, self._announced)
            self._callers.known(caller)
            packer, last = Packer("raw", OPEN), 0
            while not self._stop.is_set():
                last = self._answer(connection, packer, last, features)
        except PeerViolation as e:
            violation = e.violation
        except OSError as e:  # of TLS too
            if connection.due <= time.monotonic():
                violation = Violation.SLOW
            elif isinstance(e, ssl.SSLError | PermissionError):
                violation = Violation.CERTIFICATE if caller.stranger else Violation.GARBAGE
        except ConfigError as e:
            if self._may_log():
                log.error("other nodes are refused: %s", e)
        except Exception:
            log.exception("a connection of the node at %s failed", connection.peer)
        finally:
            self._over(caller, caller.ended or violation)

    def _over(self, caller: PeerCaller, violation: Violation | None) -> None:
        self._watchdog.remove(caller.connection)
        self._ended(caller.connection, violation)
        self._callers.close(caller)

    def _ended(self, connection: PeerConnection, violation: Violation | None) -> None:
        if violation is None or self._stop.is_set():
            return
        with self._lock:
            self._violations[violation] += 1
        if self._may_log():
            log.warning("a connection from %s was closed: %s", connection.peer, violation)

    def _may_log(self) -> bool:
        """Whether a line about a connection may be logged: anybody can make as many as they like."""
        with self._lock:
            now = time.monotonic()
            due = now - self._logged >= _LOGGED
            if due:
                self._logged = now
            return due

    # -- requests -----------------------------------------------------------------------------------------

    def _answer(self, connection: PeerConnection, packer: Packer, last: int, features: int) -> int:
        """Wait for a request and answer it; returns its number."""
        connection.due = math.inf
        head = received(connection, 1)
        self._watchdog.limit(connection, self._timeout)  # from its first byte on
        head += received(connection, REQUEST.size - 1)
        operation, zero, count, size, number = REQUEST.unpack(head)
        known = operation in (Operation.LOCATE, Operation.READ)
        known |= operation == Operation.READ_COMPRESSED and bool(features & COMPRESSION)
        if zero or not count or not known:
            raise PeerViolation(Violation.GARBAGE)
        if number <= last:
            raise PeerViolation(Violation.REPLAYED)
        each, most = (DIGEST, self._credit.keys) if operation == Operation.LOCATE else (ITEM.size, self._credit.blocks)
        if count > most or size > LARGEST_BODY:
            raise PeerViolation(Violation.OVER_CREDIT)
        if size != IDENTITY.size + count * each:
            raise PeerViolation(Violation.GARBAGE)
        body = memoryview(received(connection, size))
        items = body[IDENTITY.size :]
        with self._lock:
            self._counts["requests"] += 1
        if operation == Operation.LOCATE:
            self._locate(connection, body, items, number)
        else:
            asked = [AskedBlock(*item) for item in ITEM.iter_unpack(items)]
            self._read(connection, packer, body, asked, number, compressed=operation == Operation.READ_COMPRESSED)
        return int(number)

    def _locate(self, connection: PeerConnection, body: Span, digests: Span, number: int) -> None:
        found = self._blocks.locate(parse_identity(body[: IDENTITY.size]), digests)
        answer = pack_located(found)
        connection.send([REPLY.pack(Operation.LOCATE, 0, len(found.presence), len(answer), number) + answer])
        with self._lock:
            self._counts["located"] += len(found.depths)

    def _read(
        self,
        connection: PeerConnection,
        packer: Packer,
        body: Span,
        asked: Sequence[AskedBlock],
        number: int,
        compressed: bool,
    ) -> None:
        identity = parse_identity(body[: IDENTITY.size])
        geometry = identity.geometry
        if len(asked) > 1:
            sections = sum(geometry.sections if one.sections == ALL else one.sections for one in asked)
            if sections * geometry.stride > self._credit.nbytes:
                raise PeerViolation(Violation.OVER_CREDIT)
        spare = self._compressor.needed(geometry, identity.itemsize) if compressed else 0
        with self._blocks.opened(identity, asked, packer, connection, spare) as sent:
            parts = b"".join([PART.pack(one.presence, one.size, len(one.payload)) for one in sent])
            seconds = self._timeout + sum(one.size + len(one.payload) for one in sent) / SLOWEST
            self._watchdog.limit(connection, seconds)  # what it took to prepare is not the asker's fault
            if compressed:
                self._send_compressed(connection, sent, number)
                return
            ready: list[Span | bytes] = [REPLY.pack(Operation.READ, 0, len(sent), len(parts), number) + parts]
            for one in sent:
                if one.presence != Presence.HIT:
                    continue
                if (header := one.known) is None:
                    # While checksums are computed, the kernel sends what is before.
                    connection.send(ready)
                    ready, header = [], one.make()
                ready += (header, one.payload)
            connection.send(ready)
        self._count(sent)

    def _send_compressed(self, connection: PeerConnection, sent: Sequence[SentBlock], number: int) -> None:
        ready: list[Span | bytes] = [REPLY.pack(Operation.READ_COMPRESSED, 0, len(sent), 0, number)]
        compressed = uncompressed = 0

        def busy() -> bool:
            return connection.unsent() > _LITTLE and time.monotonic() < connection.due

        with contextlib.closing(self._compressor.records(sent, busy)) as records:
            for one, (header, payload) in zip(sent, records, strict=True):
                connection.send([*ready, PART.pack(one.presence, len(header), len(payload)), header, payload])
                ready = []
                if len(payload) < len(one.payload):
                    compressed, uncompressed = compressed + len(payload), uncompressed + len(one.payload)
        self._count(sent, compressed, uncompressed)

    def _count(self, sent: Sequence[SentBlock], compressed: int = 0, uncompressed: int = 0) -> None:
        """``compressed``: the bytes that were sent of blocks with so many bytes, ``uncompressed``."""
        with self._lock:
            counts = self._counts
            for one in sent:
                name = {Presence.HIT: "sent", Presence.MISS: "missed", Presence.BUSY: "busy"}[one.presence]
                counts[name] += 1
                counts["bytes"] += len(one.payload)
            counts["bytes"] -= uncompressed - compressed
            counts["compressed"] += compressed
            counts["uncompressed"] += uncompressed
