"""A node's part in a cluster: it is a member, and tells the directory which blocks it has.

The order matters at the end: a node that stops leaves first, so that nobody finds it, then stops to serve. ``drain``
leaves earlier, while the node goes on serving those who know it, and writes what is hot to shared storage: see
drain.py.

To leave and to join may take long, if the directory does not answer. So ``drain`` and ``resume`` only say what is
wanted, and a thread does it, until nothing else is wanted any more: what was asked for last is what remains."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import replace

from kvtide.interrupts import again_if_interrupted
from kvtide.peers.announcer import Announcer
from kvtide.peers.drain import Drain
from kvtide.peers.membership import Membership
from kvtide.peers.server import PeerServer
from kvtide.store.node_statistics import ClusterServing, DrainStatistics
from kvtide.store.store import Store
from kvtide.tiers.peers.cluster import announced_address, directory_of
from kvtide.tiers.peers.measurements import Measurement

__all__ = ["ClusterNode"]

log = logging.getLogger("kvtide.peers")


class ClusterNode:
    """See the module's docstring. Thread-safe. Raises ConfigError."""

    def __init__(self, store: Store, server: PeerServer) -> None:
        settings = store.config.peers
        self._store = store
        self._lease = settings.lease
        self.address = announced_address(settings, server.address)
        self._lock = threading.Lock()
        self._drain: Drain | None = None
        """The drain that is wanted, or was; None: be a member."""
        self._earlier: list[Drain] = []
        """Drains that were stopped, and may still wait for a storage."""
        self._thread: threading.Thread | None = None
        """The one that leaves and joins; it alone changes ``_member``."""
        self._member = True
        self._listed, self._listed_until = "", 0.0
        """Why the directory may list this node although it has left, and until when."""
        self._closed = False
        with contextlib.ExitStack() as undo:
            self._directory = directory_of(settings)
            undo.callback(self._directory.close)
            self._membership, self._announcer = self._join()
            undo.pop_all()

    def __repr__(self) -> str:
        return f"<ClusterNode {self.address}{', draining' if self._drain is not None else ''}>"

    def _join(self) -> tuple[Membership, Announcer]:
        membership = Membership(
            self._directory, self._store.name, self.address, lease=self._lease, measured=self._measured
        )
        announcer = Announcer.of(self._store, self._directory, membership)
        with contextlib.ExitStack() as undo:  # there may be no more threads
            undo.callback(membership.close)
            undo.callback(announcer.close)
            membership.start()
            announcer.start()
            undo.pop_all()
        return membership, announcer

    def _measured(self) -> dict[str, Measurement]:
        """What this node has measured of the others, by their addresses."""
        nodes = self._store.main.nodes
        members = nodes.statistics().members if nodes is not None else ()
        return {member.address: Measurement(member.bytes_per_second, member.round_trip) for member in members}

    def statistics(self) -> ClusterServing:
        own, drain = self._membership.own, self._drain
        announced = self._announcer.statistics()
        return ClusterServing(
            self.address,
            own.number if own is not None else 0,
            own.epoch if own is not None else 0,
            announced.stored,
            announced.removed,
            announced.rows_left,
            announced.rebuilds,
            announced.failures,
            self._drained(drain) if drain is not None else None,
            "" if drain is not None else self._membership.problem,
            sum(member.name != self._store.name for member in self._membership.members().values()),
        )

    def _drained(self, drain: Drain) -> DrainStatistics:
        left = self._listed_until - time.monotonic()
        done = drain.statistics()
        return replace(done, listed=self._listed, lease=left) if self._listed and left > 0 else done

    def drain(self) -> None:
        """Leave the directory, so that nobody finds this node any more, and write what is hot to shared storage, in the
        background: ``statistics`` says how far that is. Does not wait. If one has ended, begins another."""
        with self._lock:
            if not self._closed and (self._drain is None or self._drain.done):
                self._drain = Drain(self._store)
                self._settle()

    def resume(self) -> None:
        """Undo ``drain``, whether it has ended or not: be a member again. What was written stays. Does not wait."""
        with self._lock:
            if self._closed:
                return
            if self._drain is not None:
                self._drain.stop()
                self._earlier = [drain for drain in (*self._earlier, self._drain) if not drain.done]
                self._drain = None
            self._settle()

    def _settle(self) -> None:
        """Do what is wanted now. Call with the lock held."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvtide-drain-begin", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        begun: Drain | None = None
        while True:
            with self._lock:
                wanted = self._drain
                if self._closed or (self._member if wanted is None else wanted is begun):
                    self._thread = None
                    return
            try:
                if wanted is None:
                    self._membership, self._announcer = self._join()
                    self._member = True
                elif self._member:
                    self._leave()
                    self._member = False
                else:
                    begun = wanted
                    wanted.start()
            except Exception as e:
                log.exception("the node could not %s", "join its cluster again" if wanted is None else "be drained")
                with self._lock:
                    if wanted is not None:
                        wanted.fail(str(e) or type(e).__name__)
                    self._thread = None
                return

    def _leave(self) -> None:
        again_if_interrupted(self._announcer.close)
        again_if_interrupted(self._membership.close)
        self._listed, self._listed_until = self._membership.listed, time.monotonic() + self._lease

    def close(self) -> None:
        """Leave the cluster. May be repeated."""
        with self._lock:
            self._closed = True
            thread, drains = self._thread, [*self._earlier, *([self._drain] if self._drain is not None else [])]
            for drain in drains:
                drain.stop()
        if thread is not None:
            again_if_interrupted(thread.join)
        for drain in drains:
            again_if_interrupted(drain.join)
        if self._member:
            self._leave()
        self._directory.close()
