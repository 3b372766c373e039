"""Hostile nodes: whatever one says, its connection is closed and counted, and nothing else happens."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from random import Random

import pytest

from kvtide import Session, Store
from kvtide.block import DIGEST
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.peers import callers
from kvtide.peers.callers import PeerCaller, PeerCallers
from kvtide.peers.server import PeerServer
from kvtide.testing.blocks import aligned, identity
from kvtide.testing.interface import MODEL, OTHER_TENANT, PLAIN, SIZE, data, held, length, prompt, until
from kvtide.tiers.base import Identity
from kvtide.tiers.format.record import header_bytes
from kvtide.tiers.peers import protocol as p
from kvtide.tiers.peers.greeting import ask_in, let_in, received
from kvtide.tiers.peers.protocol import Operation, Presence, RequestCredit, Violation
from kvtide.tiers.peers.tcp import Tcp
from kvtide.tiers.peers.transport import PeerConnection
from kvtide.tiers.peers.trust import PeerTrust
from tests.node import host
from tests.peers.fake_server import FakeServer
from tests.peers.nodes import Stores

WHO = identity(PLAIN, weights="given:contract")
TOKENS = prompt(1, 2, 3)


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    with Stores(tmp_path, timeout=0.5) as stores:
        yield stores


class Asker:
    """A node that knows the secret, and says what it likes."""

    def __init__(self, server: PeerServer, store: Store) -> None:
        trust = PeerTrust(store.config.peers, store.config.security)
        self.connection: PeerConnection = Tcp().connect(server.address, 10)
        self.connection.begin()
        ask_in(self.connection, trust.secret())
        self.close = self.connection.close

    def say(self, *parts: bytes) -> None:
        with suppress(OSError):  # the server may have closed it before it has read all
            self.connection.send([b"".join(parts)])

    def closed(self) -> bool:
        """Whether the server has closed the connection without a further word. Waits."""
        try:
            self.connection.receive([aligned(1)])
        except OSError:
            return True
        return False

    def locate(self, who: Identity, digests: list[bytes], number: int = 1) -> p.LocatedBlocks:
        body = p.pack_identity(who) + b"".join(digests)
        self.say(p.REQUEST.pack(Operation.LOCATE, 0, len(digests), len(body), number), body)
        _, _, count, size, _ = p.REPLY.unpack(received(self.connection, p.REPLY.size))
        return p.parse_located(bytes(received(self.connection, size)), count)

    def read(
        self, who: Identity, digest: bytes, first: int = 0, count: int = p.ALL, number: int = 1
    ) -> tuple[int, ...]:
        """What a block's part of an answer says; the record itself is received too."""
        body = p.pack_identity(who) + p.ITEM.pack(digest, first, count)
        self.say(p.REQUEST.pack(Operation.READ, 0, 1, len(body), number), body)
        received(self.connection, p.REPLY.size)
        part: tuple[int, ...] = p.PART.unpack(received(self.connection, p.PART.size))
        received(self.connection, part[1] + part[2])
        return part


@pytest.fixture
def served(stores: Stores) -> Iterator[tuple[Store, PeerServer, Session]]:
    store, server = stores.serving()
    with store.session(MODEL) as session:
        session.store(TOKENS, data(PLAIN, TOKENS))
        yield store, server, session
        good = stores.store(server.address)
        with good.session(MODEL) as other:
            assert length(other, TOKENS) == len(TOKENS), "others are served as before"
        until(lambda: server.statistics().bytes_held == 0)
        assert held(store) == 0


def digests(session: Session) -> list[bytes]:
    return [bytes(digest) for digest in session.chain(TOKENS).digests]


HEAD = p.REQUEST
BODY = p.pack_identity(WHO)
RUBBISH: dict[str, tuple[Violation, Callable[[list[bytes]], bytes]]] = {
    "no operation": (Violation.GARBAGE, lambda d: HEAD.pack(7, 0, 1, 128, 1) + BODY + d[0]),
    "a field that must be zero": (Violation.GARBAGE, lambda d: HEAD.pack(1, 1, 1, 128, 1) + BODY + d[0]),
    "no items": (Violation.GARBAGE, lambda d: HEAD.pack(1, 0, 0, 96, 1) + BODY),
    "a size that is too small": (Violation.GARBAGE, lambda d: HEAD.pack(1, 0, 2, 128, 1) + BODY + d[0]),
    "a size that is too large": (Violation.GARBAGE, lambda d: HEAD.pack(1, 0, 1, 160, 1) + BODY + d[0] + d[1]),
    "a huge size": (Violation.OVER_CREDIT, lambda d: HEAD.pack(1, 0, 1, 0xFFFFFFFF, 1) + BODY),
    "too many keys": (Violation.OVER_CREDIT, lambda d: HEAD.pack(1, 0, 1025, 96 + 1025 * 32, 1) + BODY),
    "too many blocks": (
        Violation.OVER_CREDIT,
        lambda d: HEAD.pack(2, 0, 65, 96 + 65 * 40, 1) + BODY + 65 * p.ITEM.pack(d[0], 0, p.ALL),
    ),
    "too many bytes": (
        Violation.OVER_CREDIT,
        lambda d: HEAD.pack(2, 0, 64, 96 + 64 * 40, 1) + large() + 64 * p.ITEM.pack(d[0], 0, p.ALL),
    ),
    "too many sections": (
        Violation.OVER_CREDIT,
        lambda d: HEAD.pack(2, 0, 2, 96 + 2 * 40, 1) + BODY + 2 * p.ITEM.pack(d[0], 0, p.ALL - 1),
    ),
    "number zero": (Violation.REPLAYED, lambda d: HEAD.pack(1, 0, 1, 128, 0) + BODY + d[0]),
    "no sections": (Violation.GARBAGE, lambda d: HEAD.pack(1, 0, 1, 128, 1) + changed(sections=0) + d[0]),
    "a section of nothing": (Violation.GARBAGE, lambda d: HEAD.pack(1, 0, 1, 128, 1) + changed(section=0) + d[0]),
    "an element of nothing": (Violation.GARBAGE, lambda d: HEAD.pack(1, 0, 1, 128, 1) + changed(itemsize=0) + d[0]),
    "half a request": (Violation.SLOW, lambda d: HEAD.pack(1, 0, 1, 128, 1) + BODY),
}


def changed(**numbers: int) -> bytes:
    """An identity whose numbers are others."""
    fields = list(p.IDENTITY.unpack(BODY))
    for name, number in numbers.items():
        fields[["tokens", "sections", "section", "itemsize"].index(name) + 4] = number
    return p.IDENTITY.pack(*fields)


def large() -> bytes:
    return changed(sections=16, section=1 << 20)


@pytest.mark.parametrize("what", RUBBISH)
def test_a_request_that_is_none(served: tuple[Store, PeerServer, Session], what: str) -> None:
    store, server, session = served
    violation, make = RUBBISH[what]
    with closing(Asker(server, store)) as asker:
        asker.say(make(digests(session)))
        assert asker.closed()
    until(lambda: server.statistics().closed == {violation.value: 1})


def test_a_replayed_request(served: tuple[Store, PeerServer, Session]) -> None:
    store, server, session = served
    with closing(Asker(server, store)) as asker:
        assert asker.locate(WHO, digests(session), 1).presence.tolist() == [1, 1, 1]
        assert asker.locate(WHO, digests(session), 5).presence.tolist() == [1, 1, 1]
        body = BODY + digests(session)[0]
        asker.say(HEAD.pack(Operation.LOCATE, 0, 1, len(body), 5), body)
        assert asker.closed()
    until(lambda: server.statistics().closed == {Violation.REPLAYED.value: 1})


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4, bytes(100), b"\x16\x03\x01" * 40, b"KV"]
)
def test_a_greeting_that_is_none(served: tuple[Store, PeerServer, Session], said: bytes) -> None:
    _, server, _ = served
    with socket.create_connection(("127.0.0.1", int(server.address.rsplit(":", 1)[1]))) as sock:
        sock.sendall(said)
        with suppress(ConnectionError):
            assert sock.recv(1000) == b"", "nothing is said to a stranger"
    violation = Violation.SLOW if len(said) < p.HELLO.size else Violation.GARBAGE
    until(lambda: server.statistics().closed == {violation.value: 1})


@pytest.mark.parametrize("versions", [(2, 9), (0, 0)])
def test_no_common_version(served: tuple[Store, PeerServer, Session], versions: tuple[int, int]) -> None:
    _, server, _ = served
    connection = Tcp().connect(server.address, 10)
    connection.send([p.Hello(*versions, 0, bytes(32)).pack()])
    assert p.Welcome.parse(received(connection, p.WELCOME.size)).version == 0
    until(lambda: server.statistics().closed == {Violation.VERSION.value: 1})
    connection.close()


def test_a_newer_asker_is_answered_in_this_version(served: tuple[Store, PeerServer, Session]) -> None:
    _, server, _ = served
    connection = Tcp().connect(server.address, 10)
    connection.send([p.Hello(1, 9, 0xFFFFFFFF, bytes(32)).pack()])
    welcome = p.Welcome.parse(received(connection, p.WELCOME.size))
    assert (welcome.version, welcome.features) == (1, p.FEATURES & ~p.ADDRESSED), "it announces no address"
    connection.close()


def test_many_strangers_keep_nobody_out_for_long(served: tuple[Store, PeerServer, Session]) -> None:
    _, server, _ = served
    host, port = server.address.rsplit(":", 1)
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection((host, int(port))))
        until(lambda: sum(server.statistics().closed.values()) == 100)
        assert server.statistics().closed[Violation.TOO_MANY.value] > 0
        until(lambda: server.statistics().connections == 0)


@pytest.mark.parametrize("said", [b"", p.Hello(1, 1, 0, bytes(32)).pack()[:-1]], ids=["nothing", "half a greeting"])
def test_strangers_that_come_back_keep_nobody_out(stores: Stores, said: bytes) -> None:
    """They connect again as soon as they were sent away, from the address that an honest node has too."""
    store, server = stores.serving(peers={"timeout": 5.0})
    host, port = server.address.rsplit(":", 1)
    stop = threading.Event()

    def come_back() -> None:
        while not stop.is_set():
            with suppress(OSError), socket.create_connection((host, int(port))) as sock:
                sock.sendall(said)
                sock.settimeout(0.1)
                while not stop.is_set():
                    with suppress(TimeoutError):
                        if not sock.recv(1):
                            break
            stop.wait(0.02)

    strangers = [threading.Thread(target=come_back) for _ in range(48)]
    with store.session(MODEL) as session, ExitStack() as stack:
        session.store(TOKENS, data(PLAIN, TOKENS))
        for stranger in strangers:
            stranger.start()
            stack.callback(stranger.join)
        stack.callback(stop.set)
        until(lambda: server.statistics().closed.get(Violation.TOO_MANY.value, 0) > 100)
        asked = stores.store(server.address, peers={"timeout": 5.0})
        with asked.session(MODEL) as other:
            until(lambda: length(other, TOKENS) == len(TOKENS))
    until(lambda: server.statistics().connections <= 5)


def test_the_beginning_of_a_request_has_a_deadline(served: tuple[Store, PeerServer, Session]) -> None:
    store, server, _ = served
    with closing(Asker(server, store)) as asker:
        asker.say(b"\1")
        assert asker.closed()
    until(lambda: server.statistics().closed == {Violation.SLOW.value: 1})


def test_one_address_does_not_get_all_connections(stores: Stores) -> None:
    store, server = stores.serving(peers={"timeout": 30.0})
    with ExitStack() as stack:
        kept = [stack.enter_context(closing(Asker(server, store))) for _ in range(callers._EACH)]
        more = stack.enter_context(closing(Asker(server, store)))
        assert more.closed()
        assert server.statistics().closed == {Violation.TOO_MANY.value: 1}
        assert kept[0].locate(WHO, [bytes(DIGEST)]).presence.tolist() == [0], "those that it has are served"
    until(lambda: server.statistics().connections == 0)


class Unconnected:
    """A connection as far as ``PeerCallers`` needs it."""

    due = 0.0
    encrypted = False

    def __init__(self, peer: str) -> None:
        self.peer = peer

    def close(self) -> None: ...
    def interrupt(self) -> None: ...


def test_connections_of_all_addresses_together_are_limited() -> None:
    """Those that were let in before the others had authenticated themselves are no exception."""
    found, most = PeerCallers(), callers._CONNECTIONS
    several = [PeerCaller(Unconnected(f"10.{n // 256}.{n % 256}.7:1")) for n in range(most + 24)]  # type: ignore[arg-type]
    for caller in several[: most - 6]:
        assert found.add(caller)
        found.known(caller)
    for caller in several[most - 6 :]:
        assert found.add(caller)
    for caller in several[most - 6 : most]:
        found.known(caller)
    for caller in several[most:]:
        with pytest.raises(p.PeerViolation, match="too many"):
            found.known(caller)


def test_fuzzed_requests(served: tuple[Store, PeerServer, Session]) -> None:
    """The structure is known, and some bytes of it are changed; requests that are still good are answered."""
    store, server, session = served
    random, names = Random(5), digests(session)
    good = HEAD.pack(2, 0, 3, 96 + 120, 1) + BODY + b"".join(p.ITEM.pack(d, 0, p.ALL) for d in names)
    for _ in range(150):
        request = bytearray(good)
        for _ in range(random.choice([1, 1, 2, 5])):
            request[random.randrange(len(request))] = random.choice([0, 1, 2, 255, random.randrange(256)])
        with closing(Asker(server, store)) as asker:
            asker.say(bytes(request[: random.choice([len(request), len(request), random.randrange(len(request))])]))
            asker.connection.interrupt() if random.random() < 0.9 else asker.closed()
    until(lambda: server.statistics().connections == 0)


# -- names and tenants ------------------------------------------------------------------------------------------


def test_only_who_names_a_block_and_its_owner_gets_it(served: tuple[Store, PeerServer, Session]) -> None:
    store, server, session = served
    names = digests(session)
    others = [
        identity(PLAIN, weights="given:other"),
        identity(PLAIN, weights="given:contract", tenant=OTHER_TENANT),
        p.parse_identity(changed(tokens=1)),
        p.parse_identity(p.IDENTITY.pack(bytes(32), DEFAULT_TENANT.tag, PLAIN.digest, b"full", SIZE, 4, 8192, 2)),
    ]
    with closing(Asker(server, store)) as asker:
        assert asker.locate(WHO, names, 1).presence.tolist() == [1, 1, 1]
        for number, who in enumerate(others, 2):
            same = who.fingerprint == WHO.fingerprint
            assert asker.locate(who, names, number).presence.tolist() == [int(same)] * 3
        assert asker.locate(WHO, [names[0][:-1] + b"\0", bytes(DIGEST)], 90).presence.tolist() == [0, 0]
        for number, who in enumerate(others, 100):
            assert asker.read(who, names[0], number=number)[0] == (Presence.HIT if who == others[2] else Presence.MISS)


@pytest.mark.parametrize("numbers", [{"sections": 5}, {"section": 4096}, {"sections": 65536, "section": 0xFFFFFFFF}])
def test_a_lie_about_the_shape_gets_nothing(served: tuple[Store, PeerServer, Session], numbers: dict[str, int]) -> None:
    """Else the bytes behind a block would be sent with it."""
    store, server, session = served
    with closing(Asker(server, store)) as asker:
        assert asker.read(p.parse_identity(changed(**numbers)), digests(session)[0])[0] == Presence.MISS


def test_lies_about_the_shape_of_a_block_on_disk_take_no_memory(stores: Stores, tmp_path: Path) -> None:
    """Each is about another number of sections, up to the most."""
    disk = {"path": str(tmp_path / "tier"), "budget": "64MiB", "segment": "16MiB", "store": "through"}
    tiers = {"nvme": disk, "dram": {"budget": "1GiB", "segment": "1MiB"}, "peers": {"timeout": 30.0}}
    store, _ = stores.serving(**tiers)
    with store.session(MODEL) as session:
        session.store(TOKENS, data(PLAIN, TOKENS))
        assert store.flush(30)
    store.close()
    store, server = stores.serving(**tiers)  # in memory there is nothing
    with store.session(MODEL) as session, closing(Asker(server, store)) as asker:
        name = digests(session)[0]
        before = host.resident(os.getpid())
        for number in range(1, 25):
            who = p.parse_identity(changed(sections=(1 << 16) - number, section=1))
            assert asker.read(who, name, number=number)[0] == Presence.MISS
        assert host.resident(os.getpid()) - before < 64 << 20
        assert asker.read(WHO, name, number=99)[0] == Presence.HIT


@pytest.mark.parametrize("sections", [(0, 5), (4, 1), (1, p.ALL), (3, 2), (0xFFFFFFFF, 1)])
def test_sections_that_no_block_has(served: tuple[Store, PeerServer, Session], sections: tuple[int, int]) -> None:
    store, server, session = served
    assert PLAIN.geometry["full"].sections == 4
    with closing(Asker(server, store)) as asker:
        assert asker.read(WHO, digests(session)[0], *sections)[0] == Presence.MISS
        assert asker.read(WHO, digests(session)[0], 1, 2, number=2) == (
            Presence.HIT,
            header_bytes(4),
            2 * PLAIN.geometry["full"].stride,
        )


# -- a server that lies -----------------------------------------------------------------------------------------


class Liar(FakeServer):
    """A server that knows the secret. ``answer`` gets each request's head and body, and what to say to it."""

    def __init__(
        self,
        stores: Stores,
        answer: Callable[[tuple[int, ...], bytes], bytes],
        credit: RequestCredit = RequestCredit(),  # noqa: B008 - a value
    ) -> None:
        self._credit = credit
        settings = stores.store(peers={"listen": "127.0.0.1:0"}).config
        self._trust = PeerTrust(settings.peers, settings.security)
        self._answer = answer
        self.requests = 0
        super().__init__()

    def _serve(self, connection: PeerConnection) -> None:
        let_in(connection, self._trust.secret(), self._credit, bytes(16))
        while True:
            head = p.REQUEST.unpack(received(connection, p.REQUEST.size))
            body = bytes(received(connection, head[3]))
            self.requests += 1
            connection.send([self._answer(head, body)])


def located(head: tuple[int, ...]) -> bytes:
    """The answer that every block is there."""
    count = head[2]
    columns = struct.pack(f"<{count}d", *[float("inf")] * count) + bytes((4 + DIGEST + 1) * count)
    body = bytes([1]) * count + columns
    return p.REPLY.pack(head[0], 0, count, len(body), head[4]) + body


FOOTPRINT = PLAIN.geometry["full"].footprint
LIES: dict[str, Callable[[tuple[int, ...]], bytes]] = {
    "another number": lambda h: p.REPLY.pack(h[0], 0, h[2], 16 * h[2], h[4] + 1) + bytes(16 * h[2]),
    "another operation": lambda h: p.REPLY.pack(9, 0, h[2], 16 * h[2], h[4]) + bytes(16 * h[2]),
    "another count": lambda h: p.REPLY.pack(h[0], 0, h[2] + 1, 16 * h[2], h[4]) + bytes(16 * h[2]),
    "a huge answer": lambda h: p.REPLY.pack(h[0], 0, h[2], 0xFFFFFFFF, h[4]),
    "a short answer": lambda h: p.REPLY.pack(h[0], 0, h[2], 8, h[4]) + bytes(8),
    "a presence that is none": lambda h: p.REPLY.pack(h[0], 0, h[2], 16 * h[2], h[4]) + bytes([9] * 16 * h[2]),
    "another header": lambda h: part(h, 8192, FOOTPRINT, 8192 + FOOTPRINT),
    "a longer block": lambda h: part(h, 4096, FOOTPRINT + 4096, FOOTPRINT + 8192),
    "a shorter block": lambda h: part(h, 4096, 4096, 8192),
    "a miss with bytes": lambda h: part(h, 4096, FOOTPRINT, 4096 + FOOTPRINT, Presence.MISS),
    "zeros": lambda h: part(h, 4096, FOOTPRINT, 4096 + FOOTPRINT),
    "misses": lambda h: part(h, 0, 0, 0, Presence.MISS),
    "busy": lambda h: part(h, 0, 0, 0, Presence.BUSY),
}


def part(head: tuple[int, ...], header: int, payload: int, nbytes: int, presence: Presence = Presence.HIT) -> bytes:
    """An answer that says this of every block, with as many zeros as that is."""
    said = p.PART.pack(presence, header, payload) * head[2]
    return p.REPLY.pack(head[0], 0, head[2], len(said), head[4]) + said + bytes(nbytes * head[2])


@pytest.mark.parametrize("lie", LIES)
def test_a_server_that_lies_costs_misses(stores: Stores, lie: str) -> None:
    def answer(head: tuple[int, ...], body: bytes) -> bytes:
        return located(head) if head[0] == Operation.LOCATE else LIES[lie](head)

    with closing(Liar(stores, answer)) as liar:
        store = stores.store(liar.address)
        with store.session(MODEL) as session:
            with session.match(TOKENS, wait=30) as match:
                assert match.tokens == len(TOKENS)
                assert session.load(match).wait(30).tokens == 0
            session.store(TOKENS, data(PLAIN, TOKENS))
            assert length(session, TOKENS) == len(TOKENS)
        assert held(store) == 0
        store.close()


def test_a_lookup_of_many_requests_has_one_deadline(stores: Stores) -> None:
    """The server wants each block asked for alone, and is slow to answer: a prompt does not wait for all of that."""

    def answer(head: tuple[int, ...], body: bytes) -> bytes:
        time.sleep(0.1)
        return p.REPLY.pack(head[0], 0, head[2], head[2], head[4]) + bytes(head[2])

    many = prompt(*range(100))
    with closing(Liar(stores, answer, RequestCredit(keys=1))) as liar:
        store = stores.store(liar.address, peers={"timeout": 5.0})
        with store.session(MODEL) as session:
            assert length(session, prompt(999)) == 0, "the server is known from now on"
            assert length(session, many) == 0
            assert length(session, many) == 0, "what was not asked for in time counts as absent for a while"
        assert liar.requests < 20
        store.close()


def test_records_of_another_block_are_misses(stores: Stores) -> None:
    """The server sends whole, correct records: each of another block than the one that was asked for."""
    one, server = stores.serving()
    with one.session(MODEL) as first:
        first.store(TOKENS, data(PLAIN, TOKENS))
        names = digests(first)

        def answer(head: tuple[int, ...], body: bytes) -> bytes:
            if head[0] == Operation.LOCATE:
                return located(head)
            with closing(Asker(server, one)) as asker:
                wrong = b"".join(
                    p.ITEM.pack(names[(names.index(body[i : i + 32]) + 1) % 3], 0, p.ALL)
                    for i in range(96, len(body), 40)
                )
                request = body[:96] + wrong
                asker.say(p.REQUEST.pack(Operation.READ, 0, head[2], len(request), 1), request)
                rest = received(asker.connection, p.REPLY.size + head[2] * (p.PART.size + 4096 + FOOTPRINT))
                return p.REPLY.pack(head[0], 0, head[2], p.PART.size * head[2], head[4]) + rest[p.REPLY.size :]

        with closing(Liar(stores, answer)) as liar:
            store = stores.store(liar.address)
            with store.session(MODEL) as session, session.match(TOKENS, wait=30) as match:
                assert session.load(match).wait(30).tokens == 0
            reasons = dict(store.statistics().tiers[f"peer {liar.address}"].reasons)
            assert reasons == {"another block": 3}
            store.close()
