"""Every transport between nodes, under the one contract."""

from __future__ import annotations

import contextlib
import functools
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtide import config as configuration
from kvtide.testing.transport import TransportContract
from kvtide.tiers.peers.tcp import Tcp
from kvtide.tiers.peers.transport import PeerConnection, PeerTransport
from kvtide.tiers.peers.trust import PeerTrust
from tests.node.certificates import Authority
from tests.peers.nixl import NEEDS_NIXL, SHARED, TCP, TwoAgents
from tests.peers.nodes import black_hole


class TestTcp(TransportContract):
    def make(self, folder: Path) -> PeerTransport:
        return Tcp()


class TestTls(TransportContract):
    encrypted = True

    def make(self, folder: Path) -> PeerTransport:
        authority = Authority(folder)
        return tls(authority, authority.issue("host7"), "host7")


@pytest.fixture(scope="module")
def agents_of() -> Iterator[Callable[[str], TwoAgents]]:
    """A transport for each value of UCX_TLS: to start one takes a second."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda transports: stack.enter_context(contextlib.closing(TwoAgents(transports))))


class TestNixl(TransportContract):
    transports = SHARED
    pytestmark = NEEDS_NIXL

    @pytest.fixture
    def transport(self, agents_of: Callable[[str], TwoAgents]) -> PeerTransport:
        return agents_of(self.transports)

    def make(self, folder: Path) -> PeerTransport:
        raise NotImplementedError


class TestNixlOverTcp(TestNixl):
    transports = TCP


def tls(authority: Authority, certificate: Path, names: str) -> PeerTransport:
    settings = configuration.read(
        None,
        env={},
        peers={
            "listen": "x",
            "certificate": str(certificate),
            "authority": str(authority.file),
            "names": names,
        },
    )
    return PeerTrust(settings.peers, settings.security).transport


@pytest.mark.parametrize("stranger", ["another authority", "another name", "expired", "without TLS"])
@pytest.mark.parametrize("side", ["asks", "serves"])
def test_certificates_that_are_not_accepted(tmp_path: Path, stranger: str, side: str) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    good = tls(authority, authority.issue("host7"), "host7 host8")
    bad: PeerTransport = Tcp()
    if stranger == "another authority":
        bad = tls(other, other.issue("host8"), "host7 host8")
    elif stranger != "without TLS":
        name = "prometheus" if stranger == "another name" else "host8"
        bad = tls(authority, authority.issue(name, expired=stranger == "expired"), "host7 host8")
    serves, asks = (good, bad) if side == "asks" else (bad, good)
    listener = serves.listen("127.0.0.1:0")
    failed: list[OSError] = []

    def accept() -> None:
        connection = listener.accept()
        try:
            connection.begin()
            connection.receive([memoryview(bytearray(4))])
            connection.send([b"pong"])
        except OSError as e:
            failed.append(e)
        finally:
            connection.close()

    thread = threading.Thread(target=accept)
    thread.start()
    connection = asks.connect(listener.address, 10)
    try:
        assert talk_fails(connection)
    finally:
        connection.close()
        thread.join(30)
        listener.close()
    assert not thread.is_alive()
    assert any(isinstance(e, ssl.SSLError | PermissionError | ConnectionError) for e in failed) or side == "serves"


def talk_fails(connection: PeerConnection) -> bool:
    """Whether a connection gets no answer."""
    try:
        connection.begin()
        connection.send([b"ping" * 100])
        connection.receive([memoryview(bytearray(4))])
    except OSError:
        return True
    return False


def test_all_addresses_of_a_host_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four that say nothing cost no more than one, and do not hide a fifth that answers."""
    listener = Tcp().listen("127.0.0.1:0")
    host, port = listener.address.rsplit(":", 1)
    with black_hole() as address:
        to = "127.0.0.1", int(address.rsplit(":", 1)[1])
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", to)] * 4
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            Tcp().connect("host7:9411", 2.0)
        assert time.monotonic() - began < 6, "not two seconds each"
        found = [*found, (socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, int(port)))]
        Tcp().connect("host7:9411", 2.0).close()
    listener.close()
