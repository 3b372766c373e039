"""A node's part in a cluster: it is a member, and tells the directory which blocks it has.

The order matters at the end: a node that stops leaves first, so that nobody finds it, then stops to serve. ``drain``
leaves earlier, while the node goes on serving those who know it, and writes what is hot to shared storage: see
drain.py."""

from __future__ import annotations

import contextlib
import logging
import threading

from kvtide.interrupts import again_if_interrupted
from kvtide.peers.announcer import Announcer
from kvtide.peers.drain import Drain
from kvtide.peers.membership import Membership
from kvtide.peers.server import PeerServer
from kvtide.store.node_statistics import ClusterServing
from kvtide.store.store import Store
from kvtide.tiers.peers.cluster import announced_address, directory_of

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
        self._closed = False
        with contextlib.ExitStack() as undo:
            self._directory = directory_of(settings)
            undo.callback(self._directory.close)
            self._membership, self._announcer = self._join()
            undo.pop_all()
        log.info("member of the cluster %r at %s", settings.cluster, self.address)

    def __repr__(self) -> str:
        return f"<ClusterNode {self.address}{', draining' if self._drain is not None else ''}>"

    def _join(self) -> tuple[Membership, Announcer]:
        membership = Membership(self._directory, self._store.name, self.address, lease=self._lease)
        announcer = Announcer.of(self._store, self._directory, membership)
        membership.start()
        announcer.start()
        return membership, announcer

    def statistics(self) -> ClusterServing:
        own = self._membership.own
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
            self._drain.statistics() if self._drain is not None else None,
        )

    def drain(self) -> None:
        """Be found by nobody from now on, and write what is hot to shared storage, in the background: ``statistics``
        says how far that is. May be repeated."""
        with self._lock:
            if self._drain is None and not self._closed:
                self._leave()
                self._drain = Drain(self._store)

    def resume(self) -> None:
        """Undo ``drain``: be a member again. What was written stays."""
        with self._lock:
            if self._drain is not None and not self._closed:
                self._drain.close()
                self._drain = None
                self._membership, self._announcer = self._join()

    def _leave(self) -> None:
        again_if_interrupted(self._announcer.close)
        again_if_interrupted(self._membership.close)

    def close(self) -> None:
        """Leave the cluster. May be repeated."""
        with self._lock:
            self._closed = True
            if self._drain is not None:
                self._drain.close()
            else:
                self._leave()
            self._directory.close()
