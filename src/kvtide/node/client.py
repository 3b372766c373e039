"""A store behind a socket: the same interface, with the bytes in memory that both processes map.

A client has two connections. Over the first the calling thread itself sends a request and reads the reply, so that no
other thread must wake for it. Over the second a thread of ours hears what happens in its own time: ends of loads and
drops, events, and the node's death.

When the node dies everything is a miss at once: no call waits for it, blocks that were handed out stay readable (the
mapping is ours), and the thread tries to reach its successor.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from kvtide import errors
from kvtide.block import BlockKey
from kvtide.clock import Clock, SystemClock
from kvtide.door import Door
from kvtide.errors import ClosedError, KvtideError, TierError
from kvtide.events import BlockRemoved, BlockStored, Event, Feed
from kvtide.index.keys import DEFAULT_TENANT, Model, Tenant
from kvtide.index.weights import WeightsId, identify
from kvtide.node import protocol as p
from kvtide.node.line import Line, Lost
from kvtide.node.mapping import Mappings
from kvtide.node.remote import Promise, RemoteDesk, give_up, keep
from kvtide.session import Session
from kvtide.store import Statistics
from kvtide.tiers.copier import Copier
from kvtide.transfer.transfer import Transfer

__all__ = ["Client", "connect"]

log = logging.getLogger("kvtide.client")

T = TypeVar("T", bound="Transfer | Promise")


class Client:
    """A node's store, with the interface of ``Store``. Made by ``kvtide.connect``; close it, or use it in a ``with``.

    Safe from any thread.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock: Clock = SystemClock()
        self.copier = Copier()
        self.door = Door("this store is closed; connect again with kvtide.connect(...)")
        self.closed = False
        self._feed = Feed()
        self._sessions: set[Session] = set()
        self._lock = threading.Lock()
        self._promises: dict[int, Transfer | Promise] = {}
        self._early: dict[int, p.Ended] = {}
        """Ends of what nobody has asked for yet: the notice overtook the reply."""
        self._closing = threading.Event()
        self._name = secrets.token_hex(16)
        self._mappings = Mappings()
        try:
            self._line: Line | None = Line(path, self._name, self._mappings)
        except OSError as e:
            self.copier.close()
            raise TierError(f"no node answers at {path} ({e.strerror or e}); start one with: kvtide node") from e
        except BaseException:
            self.copier.close()
            raise
        self.deadline = self._line.welcome.deadline
        self._listener = threading.Thread(target=self._listen, name="kvtide-client", daemon=True)
        self._listener.start()
        self._reporter = threading.Thread(target=self._report, name="kvtide-unmapped", daemon=True)
        self._reporter.start()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "connected" if self.connected else "without a node"
        return f"<Client of {self.path}, {state}>"

    @property
    def connected(self) -> bool:
        """Whether a node is there. Without one everything is a miss."""
        return self._line is not None and self._line.alive

    @property
    def line(self) -> Line:
        line = self._line
        if line is None or not line.alive:
            raise Lost
        return line

    def ask(self, line: Line, *operations: p.Operation) -> list[p.Answer]:
        """Ask a node, in one message. Raises what it says is wrong, or Lost."""
        answers = line.ask(list(operations))
        for answer in answers:
            if isinstance(answer, p.Failure):
                kind = getattr(errors, answer.kind, KvtideError)
                raise kind(answer.text)
        return answers

    # -- what ends in its own time ------------------------------------------------------------------------

    def promised(self, line: Line, operation: p.Operation, promise: T) -> T:
        """Ask for something whose end will be told to ``promise``."""
        if isinstance(promise, Transfer):
            promise.expect([0])
        (number,) = self.ask(line, operation)
        assert isinstance(number, int)
        with self._lock:
            ended = self._early.pop(number, None)
            if ended is None and line is self._line:
                self._promises[number] = promise
        if ended is not None:
            keep(promise, ended)
        elif line is not self._line:
            give_up(promise)
        elif isinstance(promise, Transfer):
            promise.on_end(lambda: self._over(line, number))
        return promise

    def _over(self, line: Line, number: int) -> None:
        """A transfer ended; if the node does not know that, tell it."""
        with self._lock:
            known = self._promises.pop(number, None) is None
        if not known:
            with contextlib.suppress(Lost):
                line.post(p.Cancel(number))

    def _listen(self) -> None:
        pause = 0.05
        while not self._closing.is_set():
            line = self._line
            if line is not None:
                try:
                    while True:
                        self._heard(line.hear())
                except Lost:
                    pass
                except Exception:
                    log.exception("the node said what cannot be understood; hanging up")
                self._lost(line)
            if self._closing.is_set():
                return
            try:
                fresh = Line(self.path, self._name, self._mappings)
                if self._feed.followed:
                    fresh.post(p.Follow(True))
            except (OSError, KvtideError, msgspec.MsgspecError, Lost):
                self._closing.wait(pause)
                pause = min(2.0, 2 * pause)
                continue
            pause = 0.05
            log.info("connected to the node at %s again", self.path)
            self._line = fresh
            for name in set(fresh.offered) - set(self._mappings.names):
                self._mappings.ended.put(name)  # it ended while there was nobody to be told
            if self._closing.is_set():
                fresh.close()

    def _report(self) -> None:
        """Tell the node what memory we have let go."""
        while (name := self._mappings.ended.get()) is not None:
            with contextlib.suppress(Lost):  # its successor asks for all that we have
                self.line.post(p.Unmapped([name]))

    def _lost(self, line: Line) -> None:
        line.close()
        line.forget()
        with self._lock:
            self._line = None
            promises, self._promises = self._promises, {}
            self._early.clear()
        if not self._closing.is_set():
            log.warning("the node at %s is gone; everything is a miss until it is back", self.path)
        for promise in promises.values():
            give_up(promise)

    def _heard(self, notice: p.Notice) -> None:
        match notice:
            case p.Ended():
                with self._lock:
                    promise = self._promises.pop(notice.number, None)
                    if promise is None:
                        self._early[notice.number] = notice
                        while len(self._early) > 1000:  # of loads that were given up: nobody will ask
                            del self._early[next(iter(self._early))]
                if promise is not None:
                    keep(promise, notice)
            case p.Stored():
                self._feed.publish([BlockStored(notice.tier, tuple(BlockKey(k) for k in notice.keys))])
            case p.Removed():
                keys = tuple(BlockKey(k) for k in notice.keys)
                self._feed.publish([BlockRemoved(notice.tier, keys, notice.reason)])

    # -- for everybody ------------------------------------------------------------------------------------

    def session(self, model: Model, tenant: Tenant = DEFAULT_TENANT) -> Session:
        """The store as one engine sees it: for one model and tenant."""
        if self.closed:
            raise ClosedError("this store is closed; connect again with kvtide.connect(...)")
        session = Session(self, model, tenant, RemoteDesk(self, model, tenant))
        self._sessions.add(session)
        return session

    def ended(self, session: Session) -> None:
        """``session`` was closed."""
        self._sessions.discard(session)

    def weights(self, path: str | Path | None = None, weights_id: str | None = None) -> WeightsId:
        """The identity of weights by their path or a name of your own: what ``Model`` takes as ``weights``."""
        return identify(path, weights_id, "")

    def follow(self, follower: Callable[[Event], None]) -> Callable[[], None]:
        """Call ``follower`` for every block stored or removed at the node. The answer, called, ends that."""
        unfollow = self._feed.follow(follower)
        with contextlib.suppress(Lost):
            self.ask(self.line, p.Follow(True))
        return unfollow

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until colder tiers have what they were given. False if ``timeout`` seconds passed before."""
        try:
            promise = self.promised(self.line, p.Flush(), Promise())
        except Lost:
            return False
        return promise.event.wait(timeout) and not promise.lost

    def statistics(self) -> Statistics:
        """The statistics of the node's store."""
        try:
            (found,) = self.ask(self.line, p.Statistics())
        except Lost:
            return Statistics(0, 0, 0, {}, {}, {})
        return msgspec.convert(found, Statistics)

    def close(self) -> None:
        """End all sessions and hang up. The node and its blocks live on."""
        if self.closed:
            return
        self.closed = True
        for session in list(self._sessions):
            session.close()
        self.door.shut()
        if (line := self._line) is not None:
            line.forget()
        self._mappings.ended.put(None)
        self._reporter.join()
        with contextlib.suppress(Lost):
            self.ask(self.line)  # when it answers, it knows of all that was given back
        self._closing.set()
        if (line := self._line) is not None:
            line.close()
        self._listener.join()
        self.copier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def connect(address: str) -> Client:
    """The store of a node: ``kvtide.connect("unix:/run/kvtide.sock")``. See ``kvtide node --help``."""
    kind, _, path = address.partition(":")
    if kind != "unix" or not path:
        raise errors.ConfigError(f"an address looks like unix:/run/kvtide.sock, not {address!r}")
    return Client(Path(path))
