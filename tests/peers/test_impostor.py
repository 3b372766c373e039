"""Who can write to the directory, and connect to the nodes, and does not know their secret: is never read from."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from kvtide.peers.cluster_node import ClusterNode
from kvtide.peers.server import PeerServer
from kvtide.testing.interface import MODEL, PLAIN, data, length, prompt, until
from kvtide.testing.servers import free_ports
from kvtide.tiers.peers import protocol as p
from kvtide.tiers.peers.directory import open_directory
from kvtide.tiers.peers.greeting import ask_in, received
from kvtide.tiers.peers.tcp import Tcp
from kvtide.tiers.peers.transport import PeerConnection
from tests.peers.cluster import Cluster, Part
from tests.peers.nodes import Proxy, Stores, token

TOKENS = prompt(1, 2, 3)


class Impostor:
    """Passes what is said in greetings to a node and back, and then lets askers talk to a server of its own, whose
    secret it knows."""

    def __init__(self, node: str, own: PeerServer, secret: bytes) -> None:
        self._node, self._own, self._secret = node, own, secret
        self._listener = Tcp().listen("127.0.0.1:0")
        self.address = self._listener.address
        self.greeted = self.let_in = 0
        """How many askers said a greeting, and how many proved then that they know the nodes' secret."""
        self._connections: list[PeerConnection] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                asker = self._kept(self._listener.accept())
                self._threads.append(threading.Thread(target=self._serve, args=(asker,)))
                self._threads[-1].start()

    def _kept(self, connection: PeerConnection) -> PeerConnection:
        self._connections.append(connection)
        return connection

    def _serve(self, asker: PeerConnection) -> None:
        with suppress(OSError):
            node = self._kept(Tcp().connect(self._node, 10))
            node.send([bytes(received(asker, p.HELLO.size))])
            asker.send([bytes(received(node, p.WELCOME.size))])
            self.greeted += 1
            node.send([bytes(received(asker, p.PROOF))])
            self.let_in += 1
            own = self._kept(Tcp().connect(self._own.address, 10))
            ask_in(own, self._secret)
            self._threads.append(threading.Thread(target=self._pass_on, args=(own, asker)))
            self._threads[-1].start()
            self._pass_on(asker, own)

    def _pass_on(self, source: PeerConnection, target: PeerConnection) -> None:
        with suppress(OSError):
            while some := source._sock.recv(1 << 16):  # type: ignore[attr-defined]
                target.send([some])

    def close(self) -> None:
        self._listener.close()
        self._threads[0].join()
        for connection in self._connections:
            connection.interrupt()
        for thread in self._threads:
            thread.join()
        for connection in self._connections:
            connection.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as cluster:
        yield cluster


def test_who_passes_on_a_members_greeting_is_not_asked(cluster: Cluster, tmp_path: Path) -> None:
    """It names itself as the member's address, and has blocks with other bytes under the same keys."""
    member = cluster.part(lease=60.0)
    with member.store.session(MODEL) as session:
        session.store(TOKENS, data(PLAIN, TOKENS))
    forger = tmp_path / "forger"
    forger.mkdir()
    secret = "another secret, of the one who forges: 0123456789"
    with ExitStack() as stack:
        stores = stack.enter_context(Stores(forger, token_file=token(forger, "forged", secret)))
        store, server = stores.serving()
        with store.session(MODEL) as session:
            session.store(TOKENS, data(PLAIN, prompt(4, 5, 6)))
        impostor = stack.enter_context(closing(Impostor(member.node.address, server, secret.encode())))
        directory = stack.enter_context(closing(open_directory(cluster.valkey.url, cluster="kvtide")))
        directory.join(member.store.name, impostor.address, 60.0)
        reader = cluster.reader()
        with reader.session(MODEL) as session:
            until(lambda: length(session, TOKENS) > 0 or impostor.greeted > 0)
            assert length(session, TOKENS) == 0
        assert impostor.let_in == 0
        assert server.statistics().requests == 0


def test_a_member_is_asked_at_the_address_that_it_announces(cluster: Cluster) -> None:
    """Another name of the same host is not enough: nobody but the member says where it is."""
    member = cluster.part(lease=60.0)
    with member.store.session(MODEL) as session:
        session.store(TOKENS, data(PLAIN, TOKENS))
    with closing(open_directory(cluster.valkey.url, cluster="kvtide")) as directory:
        port = member.node.address.rpartition(":")[2]
        directory.join(member.store.name, f"localhost:{port}", 60.0)
        reader = cluster.reader()
        with reader.session(MODEL) as session:
            assert length(session, TOKENS) == 0
            directory.join(member.store.name, member.node.address, 60.0)
            until(lambda: length(session, TOKENS) == len(TOKENS))


def test_a_member_behind_a_proxy_is_asked_there(cluster: Cluster) -> None:
    """What proves an address is that the node announces it, and not where its port is."""
    listen = f"127.0.0.1:{free_ports(1)[0]}"
    with ExitStack() as stack:
        proxy = stack.enter_context(closing(Proxy(listen)))
        store = cluster.stores.store(peers={"listen": listen, "announce": proxy.address})
        server = PeerServer(store)
        member = Part(store, server, ClusterNode(store, server))
        stack.callback(member.close)
        with store.session(MODEL) as session:
            session.store(TOKENS, data(PLAIN, TOKENS))
        reader = cluster.reader()
        with reader.session(MODEL) as session:
            until(lambda: length(session, TOKENS) == len(TOKENS))
        assert proxy.passed
        reader.close()
