"""Who can write to the directory, and connect to the nodes, and does not know their secret: is never read from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
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
from tests.peers.fake_server import FakeServer
from tests.peers.nodes import Proxy, Stores, token

TOKENS = prompt(1, 2, 3)


class Impostor(FakeServer):
    """Passes what is said in greetings to a node and back, and then lets askers talk to a server of its own, whose
    secret it knows."""

    def __init__(self, node: str, own: PeerServer, secret: bytes) -> None:
        self._node, self._own, self._secret = node, own, secret
        self.greeted = self.let_in = 0
        """How many askers said a greeting, and how many proved then that they know the nodes' secret."""
        super().__init__()

    def _serve(self, connection: PeerConnection) -> None:
        node = self._kept(Tcp().connect(self._node, 10))
        node.send([bytes(received(connection, p.HELLO.size))])
        connection.send([bytes(received(node, p.WELCOME.size))])
        self.greeted += 1
        node.send([bytes(received(connection, p.PROOF))])
        self.let_in += 1
        own = self._kept(Tcp().connect(self._own.address, 10))
        ask_in(own, self._secret)
        self._begin(self._pass_on, own, connection)
        self._pass_on(connection, own)

    def _pass_on(self, source: PeerConnection, target: PeerConnection) -> None:
        while some := source._sock.recv(1 << 16):  # type: ignore[attr-defined]
            target.send([some])


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
