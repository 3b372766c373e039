"""Clients and nodes of neighbouring versions work together; others say clearly what does not fit."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvtide.errors import TierError
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.node import protocol as p
from kvtide.node.client.client import Client
from kvtide.testing.interface import MODEL, PLAIN, SIZE, data, length, prompt
from tests.node.raw import answer, dialled, greet
from tests.node.serving import Thread, eventually

HELLO = bytes.fromhex(
    "4600000097a568656c6c6f0101a5302e312e30a0d92030303131323233333434353536363737383839396161"
    "6262636364646565666691b2303132333435363738396162636465662d33"
)
"""What a client said before there were minor versions."""
WELCOME = bytes.fromhex(
    "5c0000009aa777656c636f6d6501a5302e312e30d9206666656564646363626261613939383837373636353534343333323231313030"
    "cb3fe0000000000000c3ce00100000b030313233343536373839616263646566cf0000000100000000c3"
)
"""What a node answered then."""


class OldWelcome(msgspec.Struct, array_like=True, tag="welcome"):
    """As a client knew it then."""

    protocol: int
    version: str
    token: str
    deadline: float
    tokens: bool
    largest: int
    life: str = ""
    dram: int = 0
    colder: bool = True


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Thread]:
    tier = {"path": str(tmp_path / "tier"), "budget": "16MiB", "segment": "1MiB", "token_ids": True}
    thread = Thread(tmp_path / "node.sock", dram={"budget": "8MiB", "segment": "1MiB"}, nvme=tier)
    yield thread
    thread.close()


def test_a_client_of_today_is_served(node: Thread) -> None:
    with dialled(node.path) as sock:
        greet(sock, HELLO)
        told = answer(sock)
        assert msgspec.convert(told, OldWelcome).protocol == 1
        opening = p.Open(p.describe(PLAIN), PLAIN.block_tokens, MODEL.namespace(), DEFAULT_TENANT.tag)
        sock.sendall(p.frame(p.Request(1, [opening])))
        (session,) = answer(sock)[1]
        names, tokens = os.urandom(64), bytes(range(64)) * 2
        seen: list[list[bytes]] = []
        reserve = node.store.pipeline.reserve

        def noted(write_requests, **how):  # type: ignore[no-untyped-def]
            seen.append(list(write_requests[0].tokens))
            return reserve(write_requests, **how)

        node.store.pipeline.reserve = noted  # type: ignore[method-assign]
        sock.sendall(p.frame(p.Request(2, [p.Reserve(session, [0], names, 1, 2, None, 0, tokens)])))
        assert answer(sock)[1][0][0] == "reserved"
        assert seen == [[tokens[4 * SIZE :]]], "its tokens begin with the prompt"


def test_what_it_says_has_not_changed() -> None:
    hello = msgspec.msgpack.decode(HELLO[4:], type=p.Hello)
    assert (hello.oldest, hello.newest, hello.version, hello.mapped) == (1, 1, "0.1.0", ["0123456789abcdef-3"])
    assert (hello.minor, hello.minors, hello.features) == (0, (0, 1), [])
    now = msgspec.msgpack.decode(p.frame(p.Hello(*msgspec.structs.astuple(hello)))[4:])
    assert now[:7] == msgspec.msgpack.decode(HELLO[4:]), "fields are only added at the end"
    welcome = msgspec.msgpack.decode(WELCOME[4:], type=p.Welcome)
    assert (welcome.minor, welcome.minors, welcome.features) == (0, (0, 1), [])


class Fake:
    """A node that answers each hello with the same, and nothing else."""

    def __init__(self, path: Path, said: bytes) -> None:
        self.said = said
        self.hellos: list[p.Hello] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(sock)
            body = sock.recv(1 << 16)
            if body:
                self.hellos.append(msgspec.msgpack.decode(body[4:], type=p.Hello))
                sock.sendall(self.said)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for sock in self._open:
            sock.close()


def test_a_node_of_today_is_used(tmp_path: Path) -> None:
    fake = Fake(tmp_path / "node.sock", WELCOME)
    with Client(tmp_path / "node.sock") as client:
        assert client.connected
        assert client.dram == 4 << 30
        assert p.TOKENS_FROM_START not in client.link.welcome.features
        assert fake.hellos[0].minor == p.MINOR
        fake.close()


def test_a_node_that_does_not_know_hints_is_told_none(node: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p, "FEATURES", (p.TOKENS_FROM_START,))
    with Client(node.path) as client, client.session(MODEL) as session:
        tokens = prompt(1, 2)
        session.store(tokens, data(PLAIN, tokens))
        session.expect(tokens, turn="tool", returns_in=5)
        assert length(session, tokens) == len(tokens)
        assert client.link.alive
    assert "hints: the turn ended in a tool" not in node.store.statistics().counts


def test_a_node_of_today_is_told_hints_and_says_what_is_wrong_with_them(node: Thread) -> None:
    with Client(node.path) as client, client.session(MODEL) as session:
        assert p.EXPECT in client.link.welcome.features
        tokens = prompt(1, 2)
        session.store(tokens, data(PLAIN, tokens))
        session.expect(tokens, turn="tool", returns_in=5)
        session.expect(tokens, turn="end")
        assert length(session, tokens) == len(tokens), "it is answered after the hints"
        counts = node.store.statistics().counts
        assert counts["hints: the turn ended in a tool"] == counts["hints: the turn ended"] == 1
        number, digests = session.backend._number, session.chain(tokens).joined  # type: ignore[attr-defined]
        hints = [
            p.Expect(number, digests, "of the future"),
            p.Expect(number, digests, "tool", -1.0),
            p.Expect(number, digests, "tool", float("nan")),
            p.Expect(number, digests, "tool", float("inf")),
            p.Expect(number, digests[:33], "tool"),
            p.Expect(number + 1000, digests, "tool"),
            p.Expect(number, b"", "tool", 1e300),
        ]
        said = client.link.ask(list(hints))
        assert [isinstance(answer, p.Failure) for answer in said] == [False, True, True, True, True, True, False]
        assert length(session, tokens) == len(tokens)


@pytest.mark.parametrize(
    ("minor", "minors", "served"),
    [
        (0, (0, 1), True),
        (1, (0, 2), True),
        (2, (1, 3), True),
        (5, (1, 5), True),
        (3, (2, 4), False),
        (9, (8, 10), False),
    ],
)
def test_neighbours_work_together_and_others_are_told_both_ranges(
    node: Thread, minor: int, minors: tuple[int, int], served: bool
) -> None:
    with dialled(node.path) as sock:
        greet(sock, p.frame(p.Hello(1, 1, "9.9", "", "", [], minor, minors, ["of the future"])))
        said = answer(sock)
        if served:
            assert said[0] == "welcome"
        else:
            assert said[:2] == ["failure", "VersionError"]
            assert "speaks protocol 1.0 to 1.2" in said[2]
            assert f"the client (kvtide 9.9) 1.{minors[0]} to 1.{minors[1]}" in said[2]
            assert "upgrade the older one" in said[2]


def test_a_client_does_without_a_node_of_the_far_future_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "node.sock"
    far = p.frame(p.Welcome(1, "9.9", "t", 0.0, False, 1, "life", 1, True, 7, (6, 8), []))
    fake = Fake(path, far)
    with pytest.raises(TierError, match=r"1.0 to 1.2, the node \(kvtide 9.9\) 1.6 to 1.8: .* upgrade the older one"):
        Client(path)
    fake.close()
    path.unlink()
    fake = Fake(path, WELCOME)
    with Client(path) as client, caplog.at_level(logging.WARNING, "kvtide.client"):
        fake.said = far
        client.link.close()
        before = len(fake.hellos)
        eventually(lambda: len(fake.hellos) >= before + 3)
        with client.session(MODEL) as session:
            assert length_or_none(session) == 0
        assert sum("is not used" in m for m in caplog.messages) == 1
        fake.close()


def length_or_none(session) -> int:  # type: ignore[no-untyped-def]
    with session.match(prompt(1)) as match:
        return int(match.tokens)


def test_token_ids_go_with_their_own_blocks_alone(node: Thread) -> None:
    tokens = prompt(*range(1, 7))
    seen: list[bytes] = []
    reserve = node.store.pipeline.reserve

    def noted(write_requests, **how):  # type: ignore[no-untyped-def]
        seen.extend(write_requests[0].tokens)
        return reserve(write_requests, **how)

    node.store.pipeline.reserve = noted  # type: ignore[method-assign]
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(tokens[: 2 * SIZE], data(PLAIN, tokens[: 2 * SIZE]))
        session.store(tokens, data(PLAIN, tokens)[2:], start=2)
        assert length(session, tokens) == len(tokens)
        chain = session.chain(tokens)
        assert seen == [chain.tokens_of(i) for i in range(6)]
