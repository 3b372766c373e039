"""Messages as a client would build them, with lies in them: each is answered, refused, or ends its connection.

The strategies know the protocol's types: fields have mostly values that make sense together (numbers of sessions and
rights that there are, digests of blocks that are here), and now and then one that does not: another type, a wrong size,
a negative number, something nested. So lies are met deep inside, not at the door. Beside it another client is served.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide import errors
from kvtide.index.keys import DEFAULT_TENANT, Model, Tenant
from kvtide.node import protocol as p
from kvtide.node.client.client import Client
from kvtide.store.session import Session
from kvtide.testing.interface import MODEL, PLAIN, data, length, prompt
from tests.node.raw import answer, dialled, greet, packed
from tests.node.serving import Thread, eventually


class Faults(logging.Handler):
    """Requests that the node could not do for a fault of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(record)


class World:
    """A node, another client of it, and the token of the last hostile one, whose rights are kept till it is told."""

    def __init__(self, node: Thread, beside: Session, faults: Faults) -> None:
        self.node = node
        self.beside = beside
        self.faults = faults
        self.tokens: list[str] = []


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    faults = Faults()
    logging.getLogger("kvtide").addHandler(faults)
    node = Thread(tmp_path_factory.mktemp("node") / "node.sock", dram={"budget": "64MiB", "segment": "4MiB"})
    try:
        # Of another model and tenant: what the hostile ones know the names of, they may drop and forget.
        beside = Tenant("beside", b"a secret that no hostile one knows")
        with Client(node.path) as client, client.session(Model(PLAIN, "given:beside"), beside) as session:
            session.store(prompt(1, 2, 3), data(PLAIN, prompt(1, 2, 3)))
            before = open_files()
            world = World(node, session, faults)
            yield world
            client.link.ask([p.EndEarlierRights(token) for token in world.tokens])
            eventually(lambda: client.statistics().held == 0)
            eventually(lambda: open_files() <= before + 16)  # of segments that came meanwhile
    finally:
        logging.getLogger("kvtide").removeHandler(faults)
        node.close()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# -- truth and lies -----------------------------------------------------------------------------------------

NAMES = b"".join(MODEL.namer(DEFAULT_TENANT).chain(prompt(1, 2, 3)).digests)
OTHERS = os.urandom(128)
GROUPS = [list(msgspec.structs.astuple(g)) for g in p.describe(PLAIN)]
INVITATION = "an invitation with more than sixteen letters"


class Ref(NamedTuple):
    """A number that the node gave: one of those in answers of a kind."""

    kind: str
    which: int


def refs(kind: str) -> st.SearchStrategy[Any]:
    return st.builds(Ref, st.just(kind), st.integers(0, 5))


numbers = st.integers(0, 12)
anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 3),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(),
        st.text(max_size=20),
        st.binary(max_size=70),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=5,
)
prompts = st.one_of(
    st.sampled_from([NAMES, NAMES, NAMES, NAMES[:64], OTHERS, b""]),
    st.builds(lambda n: os.urandom(32 * n), st.integers(0, 5)),
)
groups = st.builds(
    lambda where, what: [[*GROUPS[0][:where], what, *GROUPS[0][where + 1 :]]], st.integers(0, 9), anything
)
TRUTHS: dict[str, st.SearchStrategy[Any]] = {
    "session": st.integers(1, 2),
    "member": refs("joined"),
    "rank": st.integers(0, 1),
    "holding": refs("matched"),
    "reservation": refs("reserved"),
    "groups": st.just([0]),
    "block_tokens": st.sampled_from([16, 32]),
    "namespace": st.sampled_from([MODEL.namespace(DEFAULT_TENANT), bytes(32)]),
    "tenant": st.sampled_from([DEFAULT_TENANT.tag, bytes(16)]),
    "digests": prompts,
    "have": st.integers(0, 3),
    "start": st.integers(0, 1),
    "stop": st.integers(1, 3),
    "step": st.sampled_from([1, -1]),
    "ttl": st.sampled_from([None, 0.001, 60.0]),
    "deadline": st.sampled_from([None, 0.0, 1.0]),
    "prefill": st.sampled_from([None, 0.0, 1e6]),
    "cost": st.sampled_from([None, (0.0, 0.0), (1e-6, 1e-9), (-1.0, 0.0), (float("nan"), 1.0)]),
    "priority": st.integers(-100, 100),
    "tokens": st.sampled_from([b"", bytes(256)]),
    "after": st.one_of(st.none(), refs("reserved")),
    "sealed": st.booleans(),
    "good": st.booleans(),
    "on": st.booleans(),
    "token": st.sampled_from([INVITATION, INVITATION[:16], ""]),
    "holdings": st.lists(refs("matched"), max_size=3),
    "rights": st.lists(st.one_of(refs("matched"), refs("reserved")), max_size=3),
    "writers": st.sampled_from([[], [], [0], [0, 1], [1, 1]]),
    "names": st.lists(st.text(max_size=8), max_size=3),
}
KINDS = get_args(p.Operation)


integers = st.one_of(st.integers(-3, 20), st.integers(-(2**63), 2**63 - 1))
LIES: dict[type, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: integers,
    Ref: integers,
    float: st.one_of(st.floats(), integers),
    str: st.text(max_size=40),
    bytes: st.binary(max_size=200),
    list: st.lists(integers, max_size=20),
}


@st.composite
def operations(draw: st.DrawFn, kinds: tuple[type[msgspec.Struct], ...] = KINDS) -> list[Any]:
    """Mostly a true one; or with a lie that has the right type; or, seldom, one that has not."""
    kind = draw(st.sampled_from(kinds))
    told = [draw(TRUTHS.get(f.name, numbers)) for f in msgspec.structs.fields(kind)]
    if kind is p.Open:
        told[0] = draw(st.one_of(st.just(GROUPS), groups))
    how = draw(st.integers(0, 40))
    if told and how < 12:
        where = draw(st.integers(0, len(told) - 1))
        told[where] = draw(LIES.get(type(told[where]), integers))
    elif told and how == 12:
        told[draw(st.integers(0, len(told) - 1))] = draw(anything)
    elif how == 13:
        told = told[: draw(st.integers(0, len(told)))]
    elif how == 14:
        told.append(draw(anything))
    return [kind.__struct_config__.tag, *told]


requests = st.lists(st.lists(operations(), max_size=5), max_size=8)
endings = st.one_of(
    st.just(b""),
    st.binary(max_size=40),
    st.builds(lambda size, body: p.LENGTH.pack(size) + body, st.integers(0, 2**32 - 1), st.binary(max_size=40)),
    st.builds(lambda what: packed(what), anything),
    st.builds(lambda depth: p.LENGTH.pack(depth) + b"\x91" * depth, st.integers(1, 100_000)),
    st.just(p.frame(p.Hello(1, 1, "again"))),
)


def resolved(value: Any, given_numbers: dict[str, list[int]]) -> Any:
    """With the numbers that the node really gave."""
    if isinstance(value, Ref):
        found = given_numbers.get(value.kind, [value.which])
        return found[-1 - value.which % len(found)]
    return [resolved(v, given_numbers) for v in value] if isinstance(value, list) else value


# -- what must hold -----------------------------------------------------------------------------------------


def well_formed(reply: Any, request: list[Any]) -> None:
    found = msgspec.convert(reply, p.Reply)
    assert len(found.answers) == len(request)
    for given_answer in found.answers:
        if isinstance(given_answer, p.Failure):
            assert issubclass(getattr(errors, given_answer.kind), errors.KvtideError)
            assert given_answer.text


def unharmed(world: World) -> None:
    assert length(world.beside, prompt(1, 2, 3)) == 48
    assert not world.faults.found, world.faults.found[0].getMessage() + str(world.faults.found[0].exc_info)


@given(requests, endings, st.integers(0, 6))
@settings(max_examples=400, deadline=None)
def test_lies_deep_inside(world: World, asked: list[list[Any]], ending: bytes, descriptors: int) -> None:
    with dialled(world.node.path) as sock, dialled(world.node.path) as notices:
        greet(sock)
        welcome = answer(sock)
        assert welcome[0] == "welcome"
        forget, world.tokens = [["forget", t] for t in world.tokens], [welcome[3]]
        notices.sendall(packed(["hello", 1, 1, "", welcome[3]]))
        first = [*forget, *[["open", GROUPS, 16, MODEL.namespace(DEFAULT_TENANT), DEFAULT_TENANT.tag]] * 2]
        first += [["invite", 1, INVITATION, 2], ["join", INVITATION, 0], ["match", 1, NAMES, 0, None]]
        first += [["reserve", 1, [0], os.urandom(96), 0, 2, None, 0, b"", None, writers] for writers in ([], [0])]
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            given_numbers: dict[str, list[int]] = {}
            for number, request in enumerate([first, *asked], 1):
                sock.sendall(packed([number, resolved(request, given_numbers)]))
                if (reply := answer(sock)) is None:
                    break
                assert reply[0] == number
                well_formed(reply, request)
                for found in reply[1]:
                    if isinstance(found, list) and found[0] in ("matched", "reserved", "joined"):
                        given_numbers.setdefault(found[0], []).append(found[1])
            if ending:
                socket.send_fds(sock, [ending], [sock.fileno()] * descriptors)
                notices.sendall(ending)
            sock.shutdown(socket.SHUT_WR)
            while answer(sock) is not None:
                pass
    unharmed(world)


@given(
    st.lists(st.one_of(endings, operations().map(lambda o: packed(resolved(o, {})))), min_size=1, max_size=4),
    st.integers(0, 6),
)
@settings(max_examples=100, deadline=None)
def test_lies_instead_of_a_hello(world: World, frames: list[bytes], descriptors: int) -> None:
    with dialled(world.node.path) as sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for frame in frames:
            if frame:
                socket.send_fds(sock, [frame], [sock.fileno()] * descriptors)
        sock.shutdown(socket.SHUT_WR)
        while answer(sock) is not None:
            pass
    unharmed(world)


hellos = st.builds(
    lambda told, where, lie: packed(["hello", *told[:where], lie, *told[where + 1 :]]),
    st.just([1, 1, "", "", "", []]),
    st.integers(0, 6),
    anything,
)


@given(hellos)
@settings(max_examples=100, deadline=None)
def test_lies_in_a_hello(world: World, hello: bytes) -> None:
    with dialled(world.node.path) as sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        greet(sock, hello)
        sock.shutdown(socket.SHUT_WR)
        found = answer(sock)
        assert found is None or found[0] in ("welcome", "failure")
    unharmed(world)
