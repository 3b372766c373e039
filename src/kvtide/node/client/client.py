"""A store that runs in a node: the interface of ``Store``, with the blocks in memory that both processes map.

A client has two connections. On the first, the calling thread itself sends a request and reads the reply, so that no
other thread has to wake up for it. On the second, the listener thread receives notices: ends of loads and drops,
events, and the end of the connection when the node dies. Followers and callbacks are called on a third thread, where
they may do anything.

When the node dies, every call is a miss at once: no call waits for it, blocks that were handed out stay readable (the
mapping belongs to this process), and the listener thread tries to reach the node's successor. If the node is alive and
only the connection was lost, the node keeps what it granted to this client; the client tells it to forget that when
none of it is in use any more.

When the node is alive but does not answer for 2 seconds, because it was stopped or is starved, that call is a miss, and
soon all calls are, without waiting. The connection and all rights are kept: see link.py.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from kvtide import arguments, errors, forks
from kvtide.block import BlockKey
from kvtide.clock import Clock, SystemClock
from kvtide.errors import KvtideError, LayoutError, RightError, TierError, UnknownTenantError
from kvtide.events import Backlog, BlockRemoved, BlockStored, Event, EventsLost, Feed
from kvtide.index.keys import Model, Tenant
from kvtide.index.weights_identity import WeightsId, identify
from kvtide.node import protocol as p
from kvtide.node.client.backend import RemoteBackend
from kvtide.node.client.completions import Completion
from kvtide.node.client.deferred_sender import DeferredSender
from kvtide.node.client.link import NodeLate, NodeLink, NodeUnavailable
from kvtide.node.client.mappings import Mappings
from kvtide.node.client.workers import Worker, WorkerGroup
from kvtide.serial_executor import SerialExecutor
from kvtide.store.backend import Backend
from kvtide.store.forget import Forgotten
from kvtide.store.node_statistics import NodeStatistics, Status
from kvtide.store.session import Session, SessionHost
from kvtide.store.store import Statistics
from kvtide.tiers.dram.copy import Copier
from kvtide.transfer.transfer import Transfer
from kvtide.transfer.write_results import Flushed, Unwritten

__all__ = ["Client", "connect"]

log = logging.getLogger("kvtide.client")

T = TypeVar("T", bound="Transfer | Completion")

_SOON, _LATER, _MUCH_LATER = 0.05, 2.0, 30.0
"""Seconds between attempts to reach a node: the first pause, and the longest one if no node answers, or if it refuses
this client."""
_RANKS = 1 << 16
"""Maximum number of ranks of one engine: more than any engine has."""
_CLOSING = 5.0
"""Seconds that closing waits for a callback."""


class Client(SessionHost):
    """A node's store, with the interface of ``Store``. Made by ``kvtide.connect``; close it, or use it in a ``with``.

    Safe from any thread.
    """

    def __init__(self, path: Path, dial: Callable[[str, Mappings], NodeLink] | None = None) -> None:
        """``dial`` connects to the node, and may start it; it is given this client's name and mappings."""
        super().__init__("connect again with kvtide.connect(...)")
        self.path = path
        self._dial = dial or functools.partial(NodeLink, path)
        self.clock: Clock = SystemClock()
        self.copier = Copier()
        self._feed = Feed()
        self._backlog = Backlog()
        self._following = threading.Lock()
        self._past: set[NodeLink] = set()
        """Lost links whose rights the node may still keep for this client."""
        self._closing = threading.Event()
        self.dialing = False
        """Whether the listener thread is connecting to a node."""
        self._name = secrets.token_hex(16)
        self._mappings = Mappings(lambda: self.calls.put(self._tell_unmapped))
        # If anything fails, such as starting a thread, the connection is closed and the threads are ended.
        with contextlib.ExitStack() as undo:
            undo.callback(self.copier.close)
            try:
                link = self._dial(self._name, self._mappings)
            except OSError as e:
                raise TierError(f"no node answers at {path} ({e.strerror or e}); start one with: kvtide node") from e
            self._link: NodeLink | None = link
            undo.callback(link.close)
            self.deadline = link.welcome.deadline
            self.dram = link.welcome.dram
            """Bytes of DRAM that the blocks of the current node, or of the last one, may use."""
            self.calls = SerialExecutor("kvtide-client-calls")
            undo.callback(self.calls.close, _CLOSING)
            self._deferred_sender = DeferredSender()
            undo.callback(self._deferred_sender.close)
            link.watch = self._deferred_sender.watch
            self._listener = threading.Thread(target=self._listen, name="kvtide-client", daemon=True)
            self._listener.start()
            undo.pop_all()

    def __repr__(self) -> str:
        there = "connected to a node that is slow" if self.slow else "connected"
        state = "closed" if self.closed else there if self.connected else "without a node"
        return f"<Client of {self.path}, {state}>"

    @property
    def connected(self) -> bool:
        """Whether a node is connected. Without one every call is a miss."""
        return self._link is not None and self._link.alive

    @property
    def slow(self) -> bool:
        """Whether the node is connected but has not answered in time; every call is a miss until it does."""
        link = self._link
        return link is not None and link.alive and link.slow

    @property
    def link(self) -> NodeLink:
        forks.check(self.origin, "client")
        link = self._link
        if link is None or not link.alive:
            raise NodeUnavailable
        return link

    # -- operations that end later, and notices -----------------------------------------------------------

    def promised(self, link: NodeLink, operation: p.Operation, completion: T) -> T:
        """Send an operation whose end the node will report to ``completion``."""
        if isinstance(completion, Transfer):
            completion.expect([0])
        number = link.ask_one(operation)
        assert isinstance(number, int)
        link.completions.add(number, completion)
        if isinstance(completion, Transfer):
            completion.on_end(lambda: self._over(link, number))
        return completion

    def _over(self, link: NodeLink, number: int) -> None:
        """A transfer has ended; cancel it at the node if the node has not reported its end."""
        if link.completions.withdraw(number):
            with contextlib.suppress(NodeUnavailable):
                link.post(p.Cancel(number))

    def _listen(self) -> None:
        pause, refusal = _SOON, ""
        while not self._closing.is_set():
            link = self._link
            if link is not None:
                self._hear(link)
                pause = _SOON
                continue
            try:
                self.dialing = True
                self._connect(self._dial(self._name, self._mappings))
            except (OSError, KvtideError, msgspec.MsgspecError) as e:
                if isinstance(e, KvtideError) and str(e) != refusal:  # logged once, however often it is tried
                    refusal = str(e)
                    log.warning("the node at %s is not used, and everything is a miss: %s", self.path, e)
                self._closing.wait(pause)
                pause = min(_MUCH_LATER if isinstance(e, KvtideError) else _LATER, 2 * pause)
            finally:
                self.dialing = False

    def _hear(self, link: NodeLink) -> None:
        """Receive notices until the connection ends."""
        try:
            while True:
                self._heard(link, link.hear())
        except NodeUnavailable:
            pass
        except Exception:
            log.exception("the node sent an invalid notice; the connection is closed")
        link.close()
        link.unmap()
        self._past.add(link)
        self._link = None
        if not self._closing.is_set():
            log.warning("the node at %s is gone; everything is a miss until it is back", self.path)
        link.completions.give_up()

    def _connect(self, link: NodeLink) -> None:
        """Start to use a new link."""
        link.watch = self._deferred_sender.watch
        self._link, self.dram = link, link.welcome.dram
        if self._closing.is_set():
            link.close()
            return
        log.info("connected to the node at %s again", self.path)
        self._tell_unmapped()
        self.settle()
        if self._feed.followed:
            self._follow()
            self._happened(EventsLost(0))

    def _tell_unmapped(self) -> None:
        """Tell the node which memory this client has unmapped."""
        with contextlib.suppress(NodeUnavailable):
            link = self.link
            gone = link.lent - set(self._mappings.names)
            link.tell(p.Unmapped(sorted(gone)))
            link.lent -= gone

    def settle(self) -> None:
        """Let the node forget the rights of lost links, as far as none of them is in use."""
        if self.origin is not forks.here:
            return
        for past in [link for link in list(self._past) if link.finish()]:
            with contextlib.suppress(NodeUnavailable):
                self.link.post(p.EndEarlierRights(past.welcome.token))
                self._past.discard(past)

    def _heard(self, link: NodeLink, notice: p.Notice) -> None:
        match notice:
            case p.Ended():
                link.completions.ended(notice)
            case p.Stored():
                self._happened(BlockStored(notice.tier, tuple(BlockKey(k) for k in notice.keys)))
            case p.Removed():
                self._happened(BlockRemoved(notice.tier, tuple(BlockKey(k) for k in notice.keys), notice.reason))
            case p.EventsLost():
                self._happened(EventsLost(notice.count))

    def _happened(self, event: Event) -> None:
        if self._backlog.put(event):
            self.calls.put(self._publish)

    def _publish(self) -> None:
        while (event := self._backlog.take()) is not None:
            self._feed.publish([event])

    # -- the interface of a store -------------------------------------------------------------------------

    def _backend(self, model: Model, tenant: Tenant) -> Backend:
        backend = RemoteBackend(self, model, tenant)
        if self._feed.followed:
            backend.open()
        return backend

    def worker_group(self, session: Session, ranks: int) -> WorkerGroup:
        """Open a session to the workers of an engine of several processes, one for each of ``ranks`` ranks."""
        forks.check(self.origin, "client")
        ranks = arguments.integer(ranks, "ranks")
        if not 1 <= ranks <= _RANKS:
            raise LayoutError(f"ranks is {ranks}; give 1 to {_RANKS}")
        arguments.kind(session, Session, "session")
        if session not in self._sessions:
            raise RightError("this session is closed, or of another store")
        return WorkerGroup(session, ranks)

    def join(self, token: str, rank: int) -> Worker:
        """Become a worker of another process's session; ``token`` is that of its worker group."""
        token, rank = arguments.text(token, "token"), arguments.integer(rank, "rank")
        try:
            return Worker(self, token, rank)
        except NodeUnavailable:
            raise TierError(f"no node answers at {self.path}; join again when it is back") from None

    def weights(self, path: str | Path | None = None, weights_id: str | None = None) -> WeightsId:
        """The identity of weights by their path or by a name of your own, for ``weights`` of ``Model``."""
        return identify(path, weights_id, "")

    def follow(self, follower: Callable[[Event], None]) -> Callable[[], None]:
        """Call ``follower`` for every block stored or removed at the node of the models and tenants that this client
        has a session for; an administrator's follower is called for all blocks. Call the returned function to stop.

        The follower is called on the callback thread, one event after the other, and may use and close this store. If
        it is slow, or the node was away, it gets ``EventsLost``.
        """
        forks.check(self.origin, "client")
        leave = self._feed.follow(follower)
        self._follow()

        def unfollow() -> None:
            if self.origin is forks.here:
                leave()
                self._follow()

        return unfollow

    def _follow(self) -> None:
        """Let the node send events if, and only if, there are followers."""
        with self._following, contextlib.suppress(NodeUnavailable):
            self.link.tell(p.Follow(self._feed.followed))
        if self._feed.followed:
            for session in list(self._sessions):
                if isinstance(backend := session.backend, RemoteBackend):
                    backend.open()

    def flush(self, timeout: float | None = None) -> Flushed:
        """Wait until the node's tiers below DRAM have written what they were given, ``timeout`` seconds at most.

        The result covers the whole node and has the form of ``Store.flush``: what is written, what is not and why.
        """
        timeout = arguments.seconds(timeout, "timeout")
        try:
            completion = self.promised(self.link, p.Flush(), Completion())
        except NodeUnavailable:
            return Flushed(0, complete=False)
        if not completion.event.wait(timeout) or (found := completion.report) is None or found.written < 0:
            return Flushed(0, complete=False)
        return Flushed(found.written, _reasons(found.unwritten), _reasons(found.lost))

    def dropped(self, reason: p.DropReason, blocks: int) -> None:
        """Let the node count blocks that an engine could not store."""
        with contextlib.suppress(NodeUnavailable):
            self.link.post(p.NotStored(reason, blocks))

    def forget(self, tenant: bytes) -> Forgotten:
        """Let the node destroy the keys and blocks of the tenant with that tag; returns how many blocks there were.

        For administrators. Raises UnknownTenantError if the node has neither a key nor a block of the tenant, TierError
        if the node could not forget it.
        """
        arguments.kind(tenant, bytes, "tenant")
        if len(tenant) != 16 or tenant == bytes(16):
            raise LayoutError(f"a tenant's tag has 16 bytes, not all zero; this is {tenant.hex()!r}")
        try:
            completion = self.promised(self.link, p.ForgetTenant(tenant), Completion())
        except NodeLate:
            raise TierError(
                f"the node at {self.path} has not answered in time, and may forget the tenant or not; ask again "
                "when it answers"
            ) from None
        except NodeUnavailable:
            raise TierError(f"the node at {self.path} went away before it was asked to forget a tenant") from None
        completion.event.wait()
        if completion.count == p.NO_TENANT and completion.failure:
            raise UnknownTenantError(completion.failure)
        if completion.lost or completion.failure:
            raise TierError(completion.failure or f"the node at {self.path} went away before it had forgotten a tenant")
        report = completion.report or p.Ended(0)
        return Forgotten(completion.count, max(0, report.held), report.announced)

    def models(self, tenant: bytes) -> list[bytes]:
        """Descriptions of the models of the tenant with that tag that the node knows (``store/known_models.py``), the
        one used last first; none from a node that does not tell. Raises NodeUnavailable."""
        link = self.link
        if p.EXPLAIN not in link.welcome.features:
            return []
        answer = link.ask_one(p.Models(tenant))
        return msgspec.convert(answer, dict[str, list[bytes]])["models"]

    def drain(self, *, resume: bool = False) -> bool:
        """Let the node leave its cluster and write what is hot to shared storage, in the background: see ``status``.
        With ``resume``: let it be a member again. For administrators. Returns False if it is in no cluster, or of an
        older version. Raises NodeUnavailable."""
        link = self.link
        return p.DRAIN in link.welcome.features and link.ask_one(p.Drain(resume)) is True

    def statistics(self) -> Statistics:
        """The statistics of the node's store."""
        return self.status().store

    def status(self) -> Status:
        """The statistics of the node's store and of the node itself. Empty while there is no node."""
        try:
            found = self.link.ask_one(p.Statistics())
        except NodeUnavailable:
            return Status(Statistics(0, 0, 0, {}, {}, {}), NodeStatistics())
        return msgspec.convert(found, Status)

    def close(self) -> None:
        """End all sessions and hang up. The node keeps running, and keeps its blocks."""
        if not self._end_sessions():
            return
        self._ended = True
        if (link := self._link) is not None:
            link.unmap()
        self._mappings.close()
        self._tell_unmapped()  # once this is answered, the node has also processed everything given back before
        self._closing.set()
        if (link := self._link) is not None:
            try:
                link.push()
            finally:
                link.close()
        # otherwise this would wait for a node that hangs; if that node answers later, the listener closes the link
        if not self.dialing:
            self._listener.join(_CLOSING)
        self._deferred_sender.close()
        self.calls.close(_CLOSING)
        self.copier.close()


def _reasons(counts: dict[str, int]) -> dict[Unwritten, int]:
    found = Counter[Unwritten]()
    for value, count in counts.items():
        found[Unwritten.of(value)] += count
    return dict(found)


def connect(address: str) -> Client:
    """The store of a node: ``kvtide.connect("unix:/run/kvtide.sock")``. See ``kvtide node --help``."""
    kind, _, path = address.partition(":")
    if kind != "unix" or not path:
        raise errors.ConfigError(f"an address looks like unix:/run/kvtide.sock, not {address!r}")
    return Client(Path(path))
