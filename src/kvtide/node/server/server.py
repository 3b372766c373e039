"""The node: one store for all processes of a host, reached over a unix socket.

One thread runs everything here, in an asyncio loop that reads and writes its sockets directly, because file descriptors
are sent with the bytes. Nothing in the loop blocks: a Backend decides in microseconds, and operations that take longer
(loads, drops, flushes) end with a notice.
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
from pathlib import Path

import msgspec

from kvtide.errors import ConfigError
from kvtide.node import protocol as p
from kvtide.node.roles import NEEDS, Role
from kvtide.node.server.access import Access, AccessList
from kvtide.node.server.client_handler import LARGEST_PART, ClientHandler
from kvtide.node.server.connection import Connection, Peer
from kvtide.node.server.handler_context import BlockDescriber
from kvtide.node.server.loop import Loop
from kvtide.node.server.mapped_memory import MappedMemory, beside
from kvtide.node.server.refusals import Refusals
from kvtide.node.server.workers import ServerWorkerGroup
from kvtide.peers.cluster_node import ClusterNode
from kvtide.peers.server import PeerServer
from kvtide.security.audit import audit_of
from kvtide.store.node_statistics import NodeStatistics, Status, reported_settings, without_recording
from kvtide.store.store import Store
from kvtide.transfer.write_results import Flushed
from kvtide.version import __version__

__all__ = ["Node"]

log = logging.getLogger("kvtide.node")

_FIRST = 30.0
"""Minimum seconds that a node waits for its first client."""
_HELLO = 5.0
"""Seconds within which a new connection must send its hello."""
_STRANGERS = 64
"""Connections of one user that have not sent a hello; if there are more, the oldest is closed."""
_TURNED_AWAY = 64
"""Connections of users without a role that are kept open to be told so; if there are more, the oldest is closed."""
_TOLD = 1.0
"""Seconds that such a connection stays open, so that the client can read the refusal."""
_GREETING = 4096
"""Bytes of a hello, plus ``_MAPPED`` for each possible segment: a hello names the segments that a client has mapped."""
_MAPPED = 32
_CONNECTIONS = 2048
_OF_ONE_USER = 0.75
"""Share of all connections that one user who is not an administrator may have: the rest is left to others."""
_CLIENTS = 100
"""Clients of one process, including those that are disconnected while the process may still use what they held."""
_HIDDEN = (
    "this node cannot see the process that connects, and so could not know when memory that it lent is free again; let "
    "it see all of the host's processes: hostPID: true in Kubernetes, docker run --pid=host"
)
_PAUSE = 0.5
"""Seconds without accepting connections after the node ran out of file descriptors for them."""


class Node:
    """Serves a store at ``path``. Create it and call its methods in the thread of a ``Loop``."""

    def __init__(self, store: Store, path: Path, mapped_memory: MappedMemory | None = None) -> None:
        self.store = store
        self.path = path
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Loop)
        self.loop = loop
        self.mapped_memory = mapped_memory or MappedMemory(beside(path, "lent"))
        self._connections: set[Connection] = set()
        self._strangers: defaultdict[int, dict[Connection, asyncio.TimerHandle]] = defaultdict(dict)
        """By user: connections that have not sent a hello."""
        self._turned_away: deque[socket.socket] = deque()
        self._refused_users: set[int] = set()
        """Users without a role whose refusal was logged."""
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
        self.peers: PeerServer | None = None
        """Serves other nodes, if they are served."""
        self.cluster: ClusterNode | None = None
        """Makes this node a member of a cluster, if there is a directory."""
        self.events: BlockDescriber | None = None
        """Publishes KV events, if there are to be any."""
        self._access_list = AccessList(store.config.node.users)
        for warning in self._access_list.warnings:
            log.warning("%s", warning)
        self.refusals = Refusals(audit_of(store.config.security))
        self._listener = self._bind()
        self._pause: asyncio.TimerHandle | None = None
        self._listen()
        self.mapped_memory.attach(self.loop, [partition.dram for partition in store.partitions])

    def _listen(self) -> None:
        self.loop.add_reader(self._listener.fileno(), self._accept)

    def _bind(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            old = os.umask(0o111 if self._access_list else 0o177)  # users are checked when they connect
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
        """Call ``call`` in the loop. Safe from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits any more
            self.loop.call_soon_threadsafe(call)

    def flush(self, done: Callable[[Flushed], None]) -> None:
        """Call ``done`` when the colder tiers have written what they were given."""
        self._flushes.append(done)
        if not self._flushing:
            self._flush()

    def _flush(self) -> None:
        """Flush on one thread for all who wait. It is a daemon: it must not delay the process's exit, whatever the disk
        does."""

        def wait() -> None:
            found = Flushed(0, complete=False)
            try:
                found = self.store.flush()
            finally:  # in any case: callers that wait are told, and the next flush can begin
                self.soon(lambda: self._flushed(found))

        self._flushing, self._flushes = self._flushes, []
        try:
            threading.Thread(target=wait, name="kvtide-flush", daemon=True).start()
        except RuntimeError as e:  # the system cannot start more threads
            log.warning("a flush could not begin: %s", e)
            self.soon(lambda: self._flushed(Flushed(0, complete=False)))

    def _flushed(self, found: Flushed) -> None:
        done, self._flushing = self._flushing, []
        for call in done:
            call(found)
        if self._flushes:
            self._flush()

    def when_idle(self, seconds: float, call: Callable[[], None]) -> None:
        """Stop serving and call ``call`` after ``seconds`` without a client; the first client is given more time."""
        self._idle = seconds, call
        if not self._handlers:
            self._wait_for_others(_FIRST)

    def _wait_for_others(self, at_least: float) -> None:
        if self._idle is not None:
            seconds, call = self._idle
            self._idling = self.loop.call_later(max(seconds, at_least), self._give_up, call)

    def _give_up(self, call: Callable[[], None]) -> None:
        self.close()  # at once: no client may be accepted while the callback decides what to do
        call()

    def left(self, token: str, domain: int, requests: int, failures: int) -> None:
        """A client has ended and has no rights any more."""
        del self._handlers[token]
        self._requests[domain] += requests
        self._failures[domain] += failures
        if not self._handlers:
            self._wait_for_others(0.0)

    def drain(self, resume: bool) -> bool:
        """Leave the cluster and write what is hot to shared storage, or ``resume``. Does not wait. Returns whether the
        node is in a cluster."""
        cluster = self.cluster
        if cluster is not None:
            if resume:
                cluster.resume()
            else:
                cluster.drain()
        return cluster is not None

    def forget(self, token: str, process: int) -> None:
        """A process reports that it does not use the rights of an earlier client of its own any more."""
        handler = self._handlers.get(token)
        if handler is not None and handler.process == process:
            handler.end()

    def status(self, domain: int | None = None) -> Status:
        """Statistics of the node and its store, for a client of trust domain ``domain``; None: for administrators.

        Administrators see all clients; other clients see the clients of their domain, and no tenants.
        """
        clients = [c for c in self._handlers.values() if domain in (None, c.domain)]
        store = self.store.statistics()
        requests, failures = (c.total() if domain is None else c[domain] for c in (self._requests, self._failures))
        node = NodeStatistics(
            os.getpid(),
            str(self.path),
            self.loop.time() - self._began,
            self._closed,
            requests + sum(c.requests for c in clients),
            failures + sum(c.failures for c in clients),
            [c.statistics() for c in clients],
            self._access_list.warnings if domain is None else [],
            reported_settings(self.store.given) if domain is None else {},
            self.peers.statistics() if self.peers is not None else None,
            self.cluster.statistics() if self.cluster is not None else None,
            self.events.statistics() if self.events is not None else None,
        )
        return Status(store if domain is None else without_recording(store), node)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as e:
            log.warning("cannot accept a connection: %s", e.strerror)
            if e.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self.loop.remove_reader(self._listener.fileno())  # otherwise it would be readable all the time
                self._pause = self.loop.call_later(_PAUSE, self._listen)
            return
        sock.setblocking(False)
        peer = Peer.of(sock)
        access = self._access_list.of(peer.uid, peer.groups)
        if access is None:  # before anything is read from it
            self._turn_away(sock, peer)
            return
        connection = Connection(self.loop, sock, peer, self._largest_hello())
        if not connection.open:
            return
        self._connections.add(connection)
        late = self.loop.call_later(_HELLO, connection.close, f"it sent no hello within {_HELLO:g} seconds")
        strangers = self._strangers[peer.uid]
        strangers[connection] = late
        connection.receive = lambda body: self._greet(connection, access, body)
        connection.lost = lambda: self._lost(connection)
        if len(strangers) > _STRANGERS:
            next(iter(strangers)).close("it sent no hello, and too many other connections wait")

    def _largest_hello(self) -> int:
        """Maximum bytes of a hello, which may also name memory of earlier nodes."""
        drams = [partition.config.dram for partition in self.store.partitions]
        segments = sum(-(-dram.budget // dram.segment) for dram in drams) + self.mapped_memory.segments
        return _GREETING + _MAPPED * segments

    def _turn_away(self, sock: socket.socket, peer: Peer) -> None:
        """Send the reason, and read nothing. The socket is closed a little later: if it were closed at once, the
        client's own hello would fail first."""
        text = f"user {peer.uid} has no role at this node; its administrator gives roles by node.users"
        if peer.uid not in self._refused_users:
            self._refused_users.add(peer.uid)
            log.warning("process %d: %s; logged once, however often it tries", peer.pid, text)
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
        """The connection has sent its hello, or is closed: stop its timeout."""
        strangers = self._strangers[connection.uid]
        if (late := strangers.pop(connection, None)) is not None:
            late.cancel()
        if not strangers:
            del self._strangers[connection.uid]

    def _refuse(self, connection: Connection, kind: str, text: str) -> None:
        connection.send(p.Failure(kind, text))
        connection.close(text)

    def _greet(self, connection: Connection, access: Access, body: bytes | memoryview) -> None:
        """Process the hello, the first frame of a connection."""
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
            connection.receive = lambda _: connection.close("it sent data over its connection for notices")
        elif sum(g.process == connection.pid for g in self._handlers.values()) >= _CLIENTS:
            self._refuse(connection, "TierError", f"this process has {_CLIENTS} clients; close some")
            return
        elif not connection.pid:  # 0 means that the process is hidden from this pid namespace
            self._refuse(connection, "TierError", _HIDDEN)
            return
        else:
            pidfd = self._pidfd(connection)
            if pidfd is None:
                connection.close("no pidfd of its own process came with its hello")
                return
            name = hello.client or secrets.token_hex(16)
            if wrong := self.mapped_memory.arrived(name, connection.pid, hello.mapped):
                os.close(pidfd)
                self._refuse(connection, "TierError", wrong)
                return
            features = frozenset(hello.features).intersection(p.FEATURES)
            handler = ClientHandler(self, connection, access, name, secrets.token_hex(16), pidfd, features)
            self._handlers[handler.token] = handler
            log.info("client %d, kvtide %s, has connected", connection.pid, hello.version or "of an unknown version")
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
                min(self.store.main.largest_part, LARGEST_PART),
                self.mapped_memory.life,
                config.dram.budget,
                self.store.main.has_colder,
                p.MINOR,
                p.MINORS,
                list(p.FEATURES),
                self.events.wants if self.events is not None and access.role >= NEEDS[p.Describe] else 0,
            )
        )
        if hello.token:
            handler.notices.connect(connection)

    @staticmethod
    def _pidfd(connection: Connection) -> int | None:
        """Returns the received pidfd if it belongs to the process at the other end."""
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
        """Stop serving. All rights of clients are given back: their mappings stay valid, their access to the store
        ends."""
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
        self.mapped_memory.close()
