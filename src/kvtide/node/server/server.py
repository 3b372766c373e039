"""The node: one store for all processes of a host, behind a unix socket.

One thread runs everything here, in an asyncio loop that reads and writes its sockets itself, because descriptors go
with the bytes. Nothing in it blocks: a desk decides in microseconds, and what takes longer (loads, drops, flushes) ends
with a notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import secrets
import socket
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from kvtide.errors import ConfigError
from kvtide.node import protocol as p
from kvtide.node.roles import Role
from kvtide.node.server.access import Access, AccessList
from kvtide.node.server.connection import Connection, Peer
from kvtide.node.server.handler import LARGEST_PART, ClientHandler
from kvtide.node.server.ledger import Ledger, beside
from kvtide.node.server.loop import Loop
from kvtide.node.server.refusals import Refusals
from kvtide.node.server.workers import ServerWorkerGroup
from kvtide.security.audit import audit_of
from kvtide.store.node_statistics import NodeStatistics, Status
from kvtide.store.store import Store
from kvtide.transfer.written import Flushed
from kvtide.version import __version__

__all__ = ["Node"]

log = logging.getLogger("kvtide.node")

_FIRST = 30.0
"""Seconds that a node waits for its first client at least."""
_HELLO = 5.0
"""Seconds that a connection has to say hello."""
_STRANGERS = 64
"""Connections of one user that have not yet; the oldest of them must go for another."""
_TURNED_AWAY = 64
"""Connections of users without a role that are told so; the oldest must go for another."""
_TOLD = 1.0
"""Seconds that such a connection stays open, so that who has just connected can read why."""
_GREETING = 4096
"""Bytes of a hello, besides ``_MAPPED`` for each segment that there may be: it names those that a client has mapped."""
_MAPPED = 32
_CONNECTIONS = 2048
_OF_ONE_USER = 0.75
"""Of all connections, those that a user who is no administrator may have: others must find some."""
_CLIENTS = 100
"""Of one process, those included that are gone while it may still use what they held."""
_HIDDEN = (
    "this node cannot see the process that connects, and so could not tell when memory that it lent is free again; let "
    "it see all of the host's processes: hostPID: true in Kubernetes, docker run --pid=host"
)
_PAUSE = 0.5
"""Seconds without new connections when there are no descriptors for them."""


class Node:
    """Serves a store at ``path``. Make it and call everything here in the thread of a ``Loop``."""

    def __init__(self, store: Store, path: Path, ledger: Ledger | None = None) -> None:
        self.store = store
        self.path = path
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Loop)
        self.loop = loop
        self.ledger = ledger or Ledger(beside(path, "lent"))
        self._connections: set[Connection] = set()
        self._strangers: defaultdict[int, dict[Connection, asyncio.TimerHandle]] = defaultdict(dict)
        """By user: connections that have not said hello."""
        self._turned_away: deque[socket.socket] = deque()
        self._refused_users: set[int] = set()
        """That the log has told of."""
        self._flushing: list[Callable[[Flushed], None]] = []
        self._flushes: list[Callable[[Flushed], None]] = []
        self._handlers: dict[str, ClientHandler] = {}
        self.numbers: Iterator[int] = itertools.count(1)
        self.worker_groups: dict[str, ServerWorkerGroup] = {}
        self._idle: tuple[float, Callable[[], None]] | None = None
        self._idling: asyncio.TimerHandle | None = None
        self._began = self.loop.time()
        self._requests: Counter[int] = Counter()
        self._failures: Counter[int] = Counter()
        """By trust domain, of clients that have left."""
        self._closed = False
        self._hello = msgspec.msgpack.Decoder(p.Hello)
        self._access_list = AccessList(store.config.node.users)
        for warning in self._access_list.warnings:
            log.warning("%s", warning)
        self.refusals = Refusals(audit_of(store.config.security))
        self._listener = self._bind()
        self._pause: asyncio.TimerHandle | None = None
        self._listen()
        self.ledger.attach(self.loop, [part.dram for part in store.parts])

    def _listen(self) -> None:
        self.loop.add_reader(self._listener.fileno(), self._accept)

    def _bind(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            old = os.umask(0o111 if self._access_list else 0o177)  # who comes is looked at when it has come
            try:
                listener.bind(str(self.path))
            finally:
                os.umask(old)
            listener.listen(128)
        except OSError as e:
            listener.close()
            raise ConfigError(f"cannot listen on {self.path}: {e.strerror or e}. Give another socket") from e
        return listener

    def soon(self, call: Callable[[], None]) -> None:
        """Call in the loop, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(call)

    def flush(self, done: Callable[[Flushed], None]) -> None:
        """Call when colder tiers have what they were given."""
        self._flushes.append(done)
        if not self._flushing:
            self._flush()

    def _flush(self) -> None:
        """One thread waits for all; it must not hold up the end of the process, whatever the disk does."""

        def wait() -> None:
            found = Flushed(0, complete=False)
            try:
                found = self.store.flush()
            finally:  # whatever happened: those who wait are told, and the next can begin
                self.soon(lambda: self._flushed(found))

        self._flushing, self._flushes = self._flushes, []
        try:
            threading.Thread(target=wait, name="kvtide-flush", daemon=True).start()
        except RuntimeError as e:  # the system has no more threads
            log.warning("a flush could not begin: %s", e)
            self.soon(lambda: self._flushed(Flushed(0, complete=False)))

    def _flushed(self, found: Flushed) -> None:
        done, self._flushing = self._flushing, []
        for call in done:
            call(found)
        if self._flushes:
            self._flush()

    def when_idle(self, seconds: float, call: Callable[[], None]) -> None:
        """Stop serving and call when no client was there for so long; the first one is given time to come."""
        self._idle = seconds, call
        if not self._handlers:
            self._wait_for_others(_FIRST)

    def _wait_for_others(self, at_least: float) -> None:
        if self._idle is not None:
            seconds, call = self._idle
            self._idling = self.loop.call_later(max(seconds, at_least), self._give_up, call)

    def _give_up(self, call: Callable[[], None]) -> None:
        self.close()  # at once: nobody must be greeted while whoever is called makes up his mind
        call()

    def left(self, token: str, domain: int, requests: int, failures: int) -> None:
        """A client has ended, and holds nothing any more."""
        del self._handlers[token]
        self._requests[domain] += requests
        self._failures[domain] += failures
        if not self._handlers:
            self._wait_for_others(0.0)

    def forget(self, token: str, process: int) -> None:
        """A process says that it uses nothing of an earlier client of its own any more."""
        handler = self._handlers.get(token)
        if handler is not None and handler.process == process:
            handler.over()

    def status(self, domain: int | None = None) -> Status:
        """What we and the store have done, for a client of a trust domain; None: for administrators.

        They are told of all clients, others of those of their domain, and not of tenants.
        """
        guests = [g for g in self._handlers.values() if domain in (None, g.domain)]
        store = self.store.statistics()
        requests, failures = (c.total() if domain is None else c[domain] for c in (self._requests, self._failures))
        node = NodeStatistics(
            os.getpid(),
            str(self.path),
            self.loop.time() - self._began,
            self._closed,
            requests + sum(g.requests for g in guests),
            failures + sum(g.failures for g in guests),
            [g.statistics() for g in guests],
            self._access_list.warnings if domain is None else [],
        )
        return Status(store if domain is None else replace(store, tenants={}), node)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as e:
            log.warning("cannot take a connection: %s", e.strerror)
            if e.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self.loop.remove_reader(self._listener.fileno())  # else it would be readable all the time
                self._pause = self.loop.call_later(_PAUSE, self._listen)
            return
        sock.setblocking(False)
        peer = Peer.of(sock)
        access = self._access_list.of(peer.uid, peer.groups)
        if access is None:  # before anything of it is read
            self._turn_away(sock, peer)
            return
        connection = Connection(self.loop, sock, peer, self._largest_hello())
        if not connection.open:
            return
        self._connections.add(connection)
        late = self.loop.call_later(_HELLO, connection.close, f"it said no hello within {_HELLO:g} seconds")
        strangers = self._strangers[peer.uid]
        strangers[connection] = late
        connection.receive = lambda body: self._greet(connection, access, body)
        connection.lost = lambda: self._lost(connection)
        if len(strangers) > _STRANGERS:
            next(iter(strangers)).close("others wait to say hello, and it does not")

    def _largest_hello(self) -> int:
        """Bytes that a hello may have. What clients still have of earlier nodes, it may name as well."""
        drams = [part.config.dram for part in self.store.parts]
        segments = sum(-(-dram.budget // dram.segment) for dram in drams) + self.ledger.segments
        return _GREETING + _MAPPED * segments

    def _turn_away(self, sock: socket.socket, peer: Peer) -> None:
        """Say why, and read nothing. It is closed a little later: closed at once, its own hello would fail first."""
        text = f"user {peer.uid} has no role at this node; its administrator gives roles by node.users"
        if peer.uid not in self._refused_users:
            self._refused_users.add(peer.uid)
            log.warning("process %d: %s; it is told once here, however often it tries", peer.pid, text)
        with contextlib.suppress(OSError):
            sock.send(p.frame(p.Failure("AccessError", text)))
        if len(self._turned_away) >= _TURNED_AWAY:
            self._turned_away.popleft().close()
        self._turned_away.append(sock)
        self.loop.call_later(_TOLD, sock.close)

    def _lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._known(connection)

    def _known(self, connection: Connection) -> None:
        """It is no stranger any more."""
        strangers = self._strangers[connection.uid]
        if (late := strangers.pop(connection, None)) is not None:
            late.cancel()
        if not strangers:
            del self._strangers[connection.uid]

    def _refuse(self, connection: Connection, kind: str, text: str) -> None:
        connection.send(p.Failure(kind, text))
        connection.close(text)

    def _greet(self, connection: Connection, access: Access, body: bytes | memoryview) -> None:
        """The first frame of a connection."""
        hello = self._hello.decode(body)
        self._known(connection)
        if not (hello.oldest <= p.PROTOCOL <= hello.newest and p.speaks(hello.minor, hello.minors)):
            whose = f"the client (kvtide {hello.version or 'of an unknown version'})"
            ours, majors = f"this node (kvtide {__version__})", (hello.oldest, hello.newest)
            self._refuse(connection, "VersionError", p.mismatch(ours, whose, majors, hello.minors))
            return
        if len(self._connections) > _CONNECTIONS:
            self._refuse(connection, "TierError", f"this node has {_CONNECTIONS} connections; close some")
            return
        most = int(_CONNECTIONS * _OF_ONE_USER)
        if access.role is not Role.ADMIN and sum(c.uid == connection.uid for c in self._connections) > most:
            text = f"user {connection.uid} has {most} connections to this node; close some"
            self._refuse(connection, "TierError", text)
            return
        if hello.token:
            handler = self._handlers.get(hello.token)
            if handler is None or handler.notices.connection is not None:
                connection.close("its token is not known")
                return
            connection.receive = lambda _: connection.close("notices go one way")
        elif sum(g.process == connection.pid for g in self._handlers.values()) >= _CLIENTS:
            self._refuse(connection, "TierError", f"this process has {_CLIENTS} clients; close some")
            return
        elif not connection.pid:  # so the kernel names a process that it hides
            self._refuse(connection, "TierError", _HIDDEN)
            return
        else:
            pidfd = self._pidfd(connection)
            if pidfd is None:
                connection.close("no pidfd of its own process came with its hello")
                return
            name = hello.client or secrets.token_hex(16)
            if wrong := self.ledger.arrived(name, connection.pid, hello.mapped):
                os.close(pidfd)
                self._refuse(connection, "TierError", wrong)
                return
            features = frozenset(hello.features).intersection(p.FEATURES)
            handler = ClientHandler(self, connection, access, name, secrets.token_hex(16), pidfd, features)
            self._handlers[handler.token] = handler
            log.info("client %d, kvtide %s, is here", connection.pid, hello.version or "of an unknown version")
            if self._idling is not None:
                self._idling.cancel()
        config = self.store.config
        connection.greeted = True
        connection.largest = p.LARGEST
        connection.send(
            p.Welcome(
                p.PROTOCOL,
                __version__,
                handler.token,
                config.plan.deadline_seconds,
                config.nvme.token_ids,
                min(self.store.largest_part, LARGEST_PART),
                self.ledger.life,
                config.dram.budget,
                self.store.has_colder,
                p.MINOR,
                p.MINORS,
                list(p.FEATURES),
            )
        )
        if hello.token:
            handler.notices.connect(connection)

    @staticmethod
    def _pidfd(connection: Connection) -> int | None:
        """The pidfd that came, if it is the one of the process at the other end."""
        while connection.descriptors:
            fd = connection.descriptors.pop()
            try:
                facts = Path(f"/proc/self/fdinfo/{fd}").read_text()
            except OSError:
                facts = ""
            if f"\nPid:\t{connection.pid}\n" in facts:
                return fd
            os.close(fd)
        return None

    def close(self) -> None:
        """Stop serving. What clients hold is given back: their mappings stay valid, the store is not."""
        if self._closed:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._closed = True
        self.loop.remove_reader(self._listener.fileno())
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        for connection in list(self._connections):
            connection.close()
        for sock in self._turned_away:
            sock.close()
        self.ledger.close()
