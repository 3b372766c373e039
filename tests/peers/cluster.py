"""A cluster of stores in this process, with a real Valkey for its directory."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from kvtide.index.index import DRAM, SEALED
from kvtide.peers.cluster_node import ClusterNode
from kvtide.peers.server import PeerServer
from kvtide.store.store import Store
from kvtide.testing.interface import until
from kvtide.testing.servers import ValkeyServer
from tests.peers.nodes import Proxy, Stores

__all__ = ["Cluster", "Part"]

LEASE = 2.0


class Part:
    """A store that serves its blocks, and is a member."""

    def __init__(self, store: Store, server: PeerServer, node: ClusterNode) -> None:
        self.store = store
        self.server = server
        self.node = node

    def announced(self) -> None:
        """Wait until the directory has all of its blocks."""
        index = self.store.index
        keys = [index.key(row) for row in range(1, index.size) if index.state[DRAM][row] == SEALED]

        def said() -> bool:
            own = self.node._membership.own
            try:
                return own is not None and all(own.number in who for who in self.node._directory.holders(keys))
            except TimeoutError:  # the server had no processor for so long
                return False

        until(said)

    def die(self) -> None:
        """End without leaving: the lease stays until it ends."""
        self.node._announcer.close()
        membership = self.node._membership
        membership._directory = _Silent()  # type: ignore[assignment]
        membership.close()
        self.server.close()

    def close(self) -> None:
        self.node.close()
        self.server.close()
        self.store.close()


class _Silent:
    def leave(self, member: object) -> None:
        """The node is dead: it does not say so."""

    def close(self) -> None: ...


class Cluster:
    """Inside its ``with`` the directory's server runs."""

    def __init__(self, folder: Path, **peers: Any) -> None:
        self.valkey = ValkeyServer(folder / "valkey", maxmemory_policy="noeviction")
        self.stores = Stores(folder, **{"lease": LEASE, **peers})
        self._stack = ExitStack()

    def __enter__(self) -> Cluster:
        self._stack.enter_context(self.valkey)
        self._stack.enter_context(self.stores)
        self.stores.peers["directory"] = self.valkey.url
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def part(self, listen: str = "127.0.0.1:0", lease: float = LEASE, announce: str = "", **settings: Any) -> Part:
        """A node: a store, its server, its membership."""
        store = self.stores.store(**settings, peers={"listen": listen, "lease": lease, "announce": announce})
        server = PeerServer(store)
        part = Part(store, server, ClusterNode(store, server))
        self._stack.callback(part.close)
        return part

    def proxy(self, address: str) -> Proxy:
        """Between askers and a node that will listen at the address."""
        return self._stack.enter_context(closing(Proxy(address)))

    def reader(self, **settings: Any) -> Store:
        """A store that only reads."""
        return self.stores.store(**settings)
