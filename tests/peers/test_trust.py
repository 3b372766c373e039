"""Who may read a node's blocks, and whose blocks a node reads."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide import config as configuration
from kvtide.errors import ConfigError
from kvtide.peers.server import PeerServer
from kvtide.store.store import Store
from kvtide.testing.interface import MODEL, OTHER_TENANT, PLAIN, SIZE, data, length, prompt, until
from kvtide.testing.keys import WRAPPING, ring_in
from kvtide.tiers.peers.greeting import ask_in
from kvtide.tiers.peers.protocol import PeerViolation, Violation
from kvtide.tiers.peers.tcp import Tcp
from kvtide.tiers.peers.trust import PeerTrust, addresses_of
from tests.node.certificates import Authority
from tests.peers.nodes import Stores, token

LOOPBACK = {"listen": "127.0.0.1:0"}


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    with Stores(tmp_path) as stores:
        yield stores


def certified(folder: Path, *names: str) -> dict[str, dict[str, str]]:
    """Settings for nodes of these names, with mutual TLS and no secret."""
    authority = Authority(folder)
    return {
        name: {
            "certificate": str(authority.issue(name)),
            "authority": str(authority.file),
            "names": " ".join(names),
            "token_file": "",
        }
        for name in names
    }


def listening(path: Path) -> list[str]:
    """Lines of the kernel's table for TCP sockets of this process that listen."""
    mine = {link.readlink().name for link in path.iterdir() if link.is_symlink()}
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                found.append(fields[1])
    return found


# -- settings ---------------------------------------------------------------------------------------------------


def test_by_default_nothing_listens_and_nobody_is_asked(stores: Stores) -> None:
    before = listening(Path("/proc/self/fd"))
    with stores.store() as store:
        assert listening(Path("/proc/self/fd")) == before
        assert list(store.statistics().tiers) == ["dram"]


@pytest.mark.parametrize("address", ["127.0.0.1:0", "0.0.0.0:0", "[::]:0"])
def test_without_authentication_nobody_is_served(tmp_path: Path, address: str) -> None:
    """Not on loopback either: every user of the host reaches it, and the node's socket is its own user's alone."""
    settings = configuration.read(None, env={}, dram={"budget": "4MiB", "segment": "1MiB"}, peers={"listen": address})
    with Store(settings) as store, pytest.raises(ConfigError, match=r"peers\.token_file.*peers\.certificate"):
        PeerServer(store)


def test_without_authentication_nobody_is_asked() -> None:
    settings = configuration.read(
        None, env={}, dram={"budget": "4MiB", "segment": "1MiB"}, peers={"addresses": "10.0.0.7:9411"}
    )
    with pytest.raises(ConfigError, match=r"peers\.token_file"):
        Store(settings)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"addresses": "host7"}, "a host and a port"),
        ({"addresses": "10.0.0.7:99999"}, "a host and a port"),
        ({"token_file": "/nowhere/token"}, "cannot read"),
        ({"certificate": "/nowhere/host7.pem"}, "all three"),
        ({"certificate": "/a.pem", "authority": "/b.pem", "names": "host7"}, "cannot be used"),
    ],
)
def test_settings_that_cannot_work(tmp_path: Path, wrong: dict[str, str], said: str) -> None:
    peers = {"addresses": "10.0.0.7:9411", "token_file": token(tmp_path), **wrong}
    with pytest.raises(ConfigError, match=said):
        Store(configuration.read(None, env={}, dram={"budget": "4MiB", "segment": "1MiB"}, peers=peers))


def test_a_secret_that_others_can_read_or_guess(tmp_path: Path) -> None:
    file = token(tmp_path, text="short")
    settings = configuration.read(None, env={}, peers={"listen": "127.0.0.1:0", "token_file": file})
    with pytest.raises(ConfigError, match="could be guessed"):
        PeerTrust(settings.peers, settings.security)
    token(tmp_path)
    Path(file).chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        PeerTrust(settings.peers, settings.security)


def test_strangers_do_not_fill_the_log(stores: Stores, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While the secret cannot be used, each connection is refused, and anybody can make connections."""
    _, server = stores.serving()
    file = Path(stores.peers["token_file"])
    file.chmod(0o644)
    host, port = server.address.rsplit(":", 1)
    for _ in range(20):
        with socket.create_connection((host, int(port))) as sock:
            assert sock.recv(1) == b""
    assert caplog.text.count("other nodes are refused: peers.token_file") == 1
    file.chmod(0o600)


def test_an_address_that_is_taken(stores: Stores) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        store = stores.store(peers={"listen": f"127.0.0.1:{taken.getsockname()[1]}"})
        with pytest.raises(ConfigError, match="cannot serve other nodes"):
            PeerServer(store)


def test_more_addresses_than_a_node_may_ask(stores: Stores) -> None:
    addresses = [f"10.0.0.{n}:9411" for n in range(17)]
    with pytest.raises(ConfigError, match=r"peers\.addresses names 17 nodes, and a node asks at most 16"):
        stores.store(*addresses)
    settings = configuration.read(None, env={}, peers={"addresses": " ".join([*addresses[:16], addresses[0]])})
    assert addresses_of(settings.peers) == addresses[:16], "one that is named twice counts once"


def test_encrypted_blocks_travel_over_tls_only(stores: Stores, tmp_path: Path) -> None:
    ring_in(tmp_path).close()
    security = encrypted(tmp_path)
    with pytest.raises(ConfigError, match=r"would travel unencrypted: set peers\.certificate"):
        stores.store("10.0.0.7:9411", security=security)
    store = stores.store(security=security, peers={"listen": "127.0.0.1:0"})
    with pytest.raises(ConfigError, match=r"would travel unencrypted: set peers\.certificate"):
        PeerServer(store)


def encrypted(folder: Path) -> dict[str, str | bool]:
    key = folder / "wrapping"
    if not key.exists():
        key.write_bytes(WRAPPING)
        key.chmod(0o600)
    return {"encrypt": True, "key_source": f"file:{key}", "key_file": str(folder / "keys.json")}


# -- a secret ---------------------------------------------------------------------------------------------------


def test_another_secret_or_none_gets_nothing(stores: Stores, tmp_path: Path) -> None:
    one, server = stores.serving()
    other = token(tmp_path, "other", "another secret that these nodes do not know")
    two = stores.store(server.address, peers={"token_file": other})
    with one.session(MODEL) as first, two.session(MODEL) as second:
        first.store(prompt(1), data(PLAIN, prompt(1)))
        assert length(second, prompt(1)) == 0
    assert server.statistics().requests == 0
    (reason,) = dict(two.statistics().tiers[f"peer {server.address}"].reasons)
    assert Violation.UNPROVEN.value in reason
    # The server proves itself first, so an honest asker with another secret has left before it says anything. One that
    # goes on is sent away.
    connection = Tcp().connect(server.address, 5)
    connection.begin()
    with pytest.raises(PeerViolation, match=Violation.UNPROVEN.value):
        ask_in(connection, b"a guess")
    connection.send([bytes(32)])
    until(lambda: server.statistics().closed == {Violation.UNPROVEN.value: 1})
    connection.close()


def test_a_server_without_the_secret_is_told_nothing(stores: Stores, tmp_path: Path) -> None:
    """It serves with another secret: what it hears is a greeting, and neither a proof nor a digest."""
    impostor, server = stores.serving(peers={"token_file": token(tmp_path, "own", "the secret of an impostor, of 32")})
    two = stores.store(server.address)
    with impostor.session(MODEL) as first, two.session(MODEL) as second:
        first.store(prompt(1), data(PLAIN, prompt(1)))
        assert length(second, prompt(1)) == 0
    assert server.statistics().requests == 0


def test_a_proof_is_worth_nothing_a_second_time(stores: Stores) -> None:
    """Everything that an asker once said is said again, to the same server."""
    _, server = stores.serving()
    said: list[bytes] = []

    class Recording:
        def __init__(self) -> None:
            self._connection = Tcp().connect(server.address, 5)
            self.features = self._connection.features
            self.agreed = self._connection.agreed
            self.close = self._connection.close
            self.receive = self._connection.receive

        def send(self, parts: list[bytes]) -> None:
            said.append(b"".join(parts))
            self._connection.send(parts)

    trust = PeerTrust(stores_settings(stores).peers, stores_settings(stores).security)
    first = Recording()
    ask_in(first, trust.secret())  # type: ignore[arg-type]
    again = Tcp().connect(server.address, 5)
    again.send([said[0]])
    again.receive([memoryview(bytearray(112))])
    again.send([said[1]])
    until(lambda: server.statistics().closed == {Violation.UNPROVEN.value: 1})
    first.close()
    again.close()


def stores_settings(stores: Stores) -> configuration.Config:
    return configuration.read(None, env={}, peers={**stores.peers, "listen": "127.0.0.1:0"})


def test_the_secret_is_never_sent_nor_logged(stores: Stores, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = Path(str(stores.peers["token_file"])).read_bytes()
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as spy:
        two = stores.store(f"127.0.0.1:{spy.getsockname()[1]}", peers={"timeout": 0.3})
        with two.session(MODEL) as session:
            session.find(prompt(1))
            sock, _ = spy.accept()
            with sock:
                while part := sock.recv(1000):
                    heard += part
        assert len(heard) == 48
        assert secret not in heard
    assert secret.decode() not in caplog.text


def test_a_secret_that_changes_is_used_from_the_next_connection_on(stores: Stores, tmp_path: Path) -> None:
    one, server = stores.serving()
    proxy = stores.proxy(server)
    two = stores.store(proxy.address)
    with one.session(MODEL) as first, two.session(MODEL) as second:
        first.store(prompt(1, 2, 3), data(PLAIN, prompt(1, 2, 3)))
        assert length(second, prompt(1)) == SIZE
        token(tmp_path, text="the secret that came afterwards, of 32 letters")
        proxy.cut()
        until(lambda: length(second, prompt(1, 2, 3)) == 3 * SIZE)
        assert not server.statistics().closed


# -- certificates -----------------------------------------------------------------------------------------------


def test_blocks_over_mutual_tls(stores: Stores, tmp_path: Path) -> None:
    settings = certified(tmp_path, "host7", "host8")
    one, server = stores.serving(peers=settings["host7"])
    two = stores.store(server.address, peers=settings["host8"])
    tokens = prompt(*range(40))
    with one.session(MODEL) as first, two.session(MODEL) as second:
        first.store(tokens, data(PLAIN, tokens))
        assert length(second, tokens) == len(tokens)
    assert not server.statistics().closed


def test_encrypted_tenants_over_tls(stores: Stores, tmp_path: Path) -> None:
    settings = certified(tmp_path, "host7", "host8")
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        ring_in(folder).close()
    one, server = stores.serving(peers=settings["host7"], security=encrypted(folders[0]))
    two = stores.store(server.address, peers=settings["host8"], security=encrypted(folders[1]))
    plain = stores.store(server.address)
    tokens = prompt(*range(4))
    with one.session(MODEL) as first, two.session(MODEL) as second, plain.session(MODEL) as third:
        first.store(tokens, data(PLAIN, tokens))
        assert length(second, tokens) == len(tokens)
        assert length(third, tokens) == 0, "over plain TCP nothing is said"
    until(lambda: list(server.statistics().closed) == [Violation.CERTIFICATE.value])


@pytest.mark.parametrize("who", ["reader", "server"])
@pytest.mark.parametrize("keys", ["of each node", "of both"])
def test_a_tenant_that_was_forgotten_is_read_again(stores: Stores, tmp_path: Path, who: str, keys: str) -> None:
    """Where another process destroyed its keys, a node refuses the tenant only until it has dropped its blocks."""
    settings = certified(tmp_path, "host7", "host8")
    folders = [tmp_path / name for name in ("a", "b" if keys == "of each node" else "a")]
    for folder in folders:
        folder.mkdir(exist_ok=True)
        ring_in(folder).close()
    one, server = stores.serving(peers=settings["host7"], security=encrypted(folders[0]))
    two = stores.store(server.address, peers=settings["host8"], security=encrypted(folders[1]))
    with one.session(MODEL, tenant=OTHER_TENANT) as first, two.session(MODEL, tenant=OTHER_TENANT) as second:
        first.store(prompt(1), data(PLAIN, prompt(1)))
        assert length(second, prompt(1)) == SIZE
        assert (one if who == "server" else two).forget(OTHER_TENANT.tag).blocks
        turns = iter(range(2, 1000))

        def read() -> bool:
            new = prompt(next(turns))  # a block that was not found is not asked for again at once
            first.store(new, data(PLAIN, new))
            return length(second, new) == SIZE

        until(read)


def test_certificates_and_a_secret(stores: Stores, tmp_path: Path) -> None:
    """Where both are set, both are needed."""
    settings = certified(tmp_path, "host7", "host8")
    both = {name: {**one, "token_file": stores.peers["token_file"]} for name, one in settings.items()}
    one, server = stores.serving(peers=both["host7"])
    two = stores.store(server.address, peers=both["host8"])
    three = stores.store(server.address, peers=settings["host8"])
    with one.session(MODEL) as first, two.session(MODEL) as second, three.session(MODEL) as third:
        first.store(prompt(1), data(PLAIN, prompt(1)))
        assert length(second, prompt(1)) == SIZE
        assert length(third, prompt(1)) == 0


def test_a_strange_certificate_gets_nothing(stores: Stores, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = {"authority": str(authority.file), "names": "host7 host8", "token_file": ""}
    one, server = stores.serving(peers={**own, "certificate": str(authority.issue("host7"))})
    stranger = {**own, "certificate": str(authority.issue("prometheus"))}
    two = stores.store(server.address, peers=stranger)
    with one.session(MODEL) as first, two.session(MODEL) as second:
        first.store(prompt(1), data(PLAIN, prompt(1)))
        assert length(second, prompt(1)) == 0
    assert server.statistics().requests == 0
    until(lambda: Violation.CERTIFICATE.value in server.statistics().closed)


def test_a_stranger_that_says_nothing_is_slow_also_over_tls(stores: Stores, tmp_path: Path) -> None:
    """It is not counted as one without an accepted certificate, which would be looked for in the configuration."""
    settings = certified(tmp_path, "host7")
    _, server = stores.serving(peers={**settings["host7"], "timeout": 0.3})
    host, port = server.address.rsplit(":", 1)
    with socket.create_connection((host, int(port))):
        until(lambda: server.statistics().closed == {Violation.SLOW.value: 1})
