"""Clients of a node that mean harm: what they get, and what the others still get meanwhile, in numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.errors import AccessError
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.node import protocol as p
from kvtide.node.client.client import Client
from kvtide.node.roles import Role
from kvtide.node.server.access import Access, AccessList
from kvtide.testing.interface import MODEL, PLAIN, SIZE, data, length, prompt
from tests.node.raw import answer, dialled, greet
from tests.node.serving import Thread, eventually

OWN = Access(Role.ADMIN)
OPEN = p.Open(p.describe(PLAIN), PLAIN.block_tokens, MODEL.namespace(), DEFAULT_TENANT.tag)
PROMPTS = [prompt(number) for number in range(8)]


class Users(AccessList):
    """Whoever connects next is the user that the test says: only root could come as several."""

    def __init__(self) -> None:
        super().__init__("")
        self.next: Access | None = OWN

    def __bool__(self) -> bool:
        return True

    def of(self, *_: object) -> Access | None:
        return self.next


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Thread]:
    thread = Thread(tmp_path / "node.sock", dram={"budget": "16MiB", "segment": "4MiB"})
    thread.node._access_list = Users()
    yield thread
    thread.close()


def come_as(node: Thread, trust: Access | None) -> None:
    users = node.node._access_list
    assert isinstance(users, Users)
    users.next = trust


@pytest.fixture
def victim(node: Thread) -> Iterator[Client]:
    """The node's own user, who has eight prompts there."""
    with Client(node.path) as client:
        with client.session(MODEL) as session:
            for tokens in PROMPTS:
                session.store(tokens, data(PLAIN, tokens))
        yield client


def hits(client: Client) -> int:
    """Prompts that are found, with all their bytes."""
    with client.session(MODEL) as session:
        return sum(length(session, tokens) == SIZE for tokens in PROMPTS)


def test_a_user_without_a_role_gets_nothing_and_costs_nobody_anything(node: Thread, victim: Client) -> None:
    come_as(node, None)
    for _ in range(50):
        with contextlib.suppress(OSError), dialled(node.path) as sock:
            greet(sock)
            said = answer(sock)
            assert said is None or said[0] != "welcome"
    with pytest.raises(AccessError), Client(node.path) as stranger:
        stranger.session(MODEL)
    come_as(node, OWN)
    assert hits(victim) == len(PROMPTS)
    assert len(victim.status().node.clients) == 1


def test_a_user_of_another_domain_finds_nothing_by_the_same_names_and_changes_nothing(
    node: Thread, victim: Client
) -> None:
    """The names of the default tenant's blocks are known to everybody."""
    come_as(node, Access(Role.WRITE, 1, b"\0blue"))
    with Client(node.path) as other, other.session(MODEL) as session:
        assert [length(session, tokens) for tokens in PROMPTS] == [0] * len(PROMPTS)
        assert [session.find(tokens) for tokens in PROMPTS] == [[False]] * len(PROMPTS)
        assert sum(session.drop(tokens) for tokens in PROMPTS) == 0
        assert sum(session.pin(tokens) for tokens in PROMPTS) == 0
        heard: list[object] = []
        with contextlib.ExitStack() as stack:
            stack.callback(other.follow(heard.append))
            come_as(node, OWN)
            with victim.session(MODEL) as mine:
                mine.store(prompt(100), data(PLAIN, prompt(100)))
            assert hits(victim) == len(PROMPTS)
        assert heard == []
    assert hits(victim) == len(PROMPTS)


def test_a_reader_of_the_same_domain_cannot_change_what_others_have(node: Thread, victim: Client) -> None:
    come_as(node, Access(Role.READ))
    with Client(node.path) as reader, reader.session(MODEL) as session:
        assert sum(length(session, tokens) == SIZE for tokens in PROMPTS) == len(PROMPTS), "that is what it may do"
        for change in (
            lambda: session.drop(PROMPTS[0]),
            lambda: session.expire(PROMPTS[0], 0.001),
            lambda: reader.forget(DEFAULT_TENANT.tag),
        ):
            with pytest.raises(AccessError):
                change()
    come_as(node, OWN)
    assert hits(victim) == len(PROMPTS)


def test_silent_clients_leave_others_their_hits(node: Thread, victim: Client) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(dialled(node.path))  # and says no word
        assert hits(victim) == len(PROMPTS)
        with Client(node.path) as another:
            assert hits(another) == len(PROMPTS), "one who comes now is let in"


def test_a_flood_of_questions_leaves_others_their_turn(node: Thread, victim: Client) -> None:
    """The flood is sent and never read. The victim is served at once, and the flooder is sent away."""
    digests = b"".join(MODEL.namer(DEFAULT_TENANT).chain(PROMPTS[0]).digests)
    with dialled(node.path) as sock:
        greet(sock)
        assert answer(sock)[0] == "welcome"
        sock.sendall(p.frame(p.Request(1, [OPEN])))
        session = answer(sock)[1][0]
        sock.settimeout(0.2)
        sent = 0
        flood = p.frame(p.Request(2, [p.Find(session, digests)] * 200)) * 20
        with contextlib.suppress(OSError):  # the node does not accept more from a client that does not read
            while sent < 100:
                sock.sendall(flood)
                sent += 1
        assert hits(victim) == len(PROMPTS)
    eventually(lambda: len(victim.status().node.clients) == 1)
    assert hits(victim) == len(PROMPTS)
