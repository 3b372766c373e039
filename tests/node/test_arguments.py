"""A wrong argument is refused at the caller: alike embedded and through a node, and nobody's connection suffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtide
from kvtide import config as configuration
from kvtide.block import Group, Kind, Layout
from kvtide.errors import ArgumentError, KvtideError, LayoutError, RightError
from kvtide.index.keys import Extra, Tenant
from kvtide.node import protocol as p
from kvtide.node.client.client import Client
from kvtide.store.session import Session, SessionHost
from kvtide.store.store import Store
from kvtide.testing.interface import MODEL, PLAIN, SIZE, data, length, prompt
from tests.node.raw import answer, dialled, greet, packed
from tests.node.serving import Thread

TOKENS = prompt(1, 2)
SMALL: dict[str, Any] = {"dram": {"budget": "8MiB", "segment": "1MiB"}}


class World:
    """An embedded store and one behind a node, the latter with a second session of the same process."""

    def __init__(self, path: Path) -> None:
        self.node = Thread(path, **SMALL)
        self.client = Client(path)
        self.link = self.client.link
        self.embedded = Store(configuration.read(None, **SMALL))
        self.homes: list[SessionHost] = [self.embedded, self.client]
        self.sessions = [home.session(MODEL) for home in self.homes]
        self.beside = self.client.session(MODEL)
        for session in self.sessions:
            session.store(TOKENS, data(PLAIN, TOKENS))

    def unharmed(self) -> None:
        """The connection is the same as ever, and both sessions of the process find what is there."""
        assert self.client.link is self.link
        assert self.link.alive
        for session in (self.sessions[1], self.beside):
            assert length(session, TOKENS) == len(TOKENS)

    def close(self) -> None:
        self.client.close()
        self.node.close()
        self.embedded.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    found = World(tmp_path_factory.mktemp("node") / "node.sock")
    yield found
    found.close()


def outcome(call: Callable[[], Any]) -> type[Exception] | str:
    """The class of its error; else what kind of answer it gave."""
    try:
        found = call()
    except KvtideError as e:  # nothing else may come out
        return type(e)
    if hasattr(found, "release"):
        found.release()
    if hasattr(found, "abort"):
        found.abort()
    return type(found).__name__.removeprefix("_Remote")


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 3),
    st.sampled_from([2**63, -(2**63) - 1, 2**64, 10**5000, -(10**5000)]),
    st.floats(),
    st.sampled_from([math.nan, math.inf, -math.inf, 2.5, -1.0, 1e308, 1e-320]),
    st.text(max_size=3),
    st.sampled_from(["\ud800", b"", b"x", [], [1], {}, object(), 1j, Fraction(1, 3), len]),
    st.sampled_from([np.int64(1), np.uint8(2), np.int64(-1), np.float32(0.5), np.float64(math.nan), np.bool_(True)]),
    st.sampled_from([np.zeros(1), np.zeros(2, np.int64), np.array(1), np.array(1.5), np.array(True)]),
)
"""What somebody might pass by mistake, and some that is right."""

KEYWORDS: dict[str, list[str]] = {
    "match": ["tokens", "extras", "have", "prefill"],
    "find": ["tokens", "extras"],
    "store": ["tokens", "blocks", "extras", "start", "ttl", "priority"],
    "reserve": ["tokens", "extras", "start", "stop", "ttl", "priority"],
    "pin": ["tokens", "extras", "stop"],
    "unpin": ["tokens", "extras", "stop"],
    "prefetch": ["tokens", "extras", "deadline"],
    "chain": ["tokens", "extras"],
    "load": ["match", "into", "deadline"],
}


def call(session: Session, method: str, wrong: dict[str, Any]) -> Any:
    """A call that is right but for what is wrong in it."""
    if method == "load":
        with session.match(TOKENS) as match:
            return session.load(**{"match": match, **wrong}).wait().tokens
    right: dict[str, Any] = {"tokens": TOKENS}
    if method == "store":
        right["blocks"] = data(PLAIN, TOKENS)
    found = getattr(session, method)(**{**right, **wrong})
    if method == "prefetch":
        found.wait(10)
    if method == "pin":
        session.unpin(TOKENS)
    return found


mistakes = st.sampled_from([(method, name) for method, names in KEYWORDS.items() for name in names])


@given(mistakes, anything)
@settings(max_examples=600, deadline=None)
def test_a_wrong_argument_is_the_same_error_in_both_stores(world: World, where: tuple[str, str], value: Any) -> None:
    method, name = where
    first, second = (outcome(lambda s=s: call(s, method, {name: value})) for s in world.sessions)  # type: ignore[misc]
    assert first == second, f"{method}({name}={value!r})"
    world.unharmed()


@given(st.sampled_from(["drop", "flush", "follow", "forget", "session", "wait", "on_end"]), anything)
@settings(max_examples=150, deadline=None)
def test_and_so_are_those_of_other_calls(world: World, what: str, value: Any) -> None:
    def called(session: Session, home: Any) -> Any:
        match what:
            case "drop":
                return session.drop(prompt(9), start=value)
            case "flush":
                return home.flush(value)
            case "follow":
                home.follow(value)()
                return None
            case "forget":
                return home.forget(value)
            case "session":
                return home.session(value)
            case "wait":
                with session.match(TOKENS) as match:
                    return session.load(match).wait(value)
            case _:
                return session.prefetch(TOKENS).on_end(value)

    both = zip(world.sessions, world.homes, strict=True)
    first, second = (outcome(lambda s=s, h=h: called(s, h)) for s, h in both)  # type: ignore[misc]
    assert first == second, f"{what} {value!r}"
    world.unharmed()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"priority": 2.5}, ArgumentError),
        ({"priority": "high"}, ArgumentError),
        ({"priority": True}, ArgumentError),
        ({"priority": None}, ArgumentError),
        ({"priority": np.float64(2)}, ArgumentError),
        ({"priority": 10**400}, LayoutError),
        ({"ttl": "60"}, ArgumentError),
        ({"ttl": math.nan}, LayoutError),
        ({"ttl": 10**400}, LayoutError),
        ({"start": 0.0}, ArgumentError),
        ({"extras": [1]}, ArgumentError),
        ({"extras": 5}, ArgumentError),
    ],
)
def test_what_is_refused(world: World, options: dict[str, Any], error: type[Exception]) -> None:
    for session in world.sessions:
        with pytest.raises(error) as raised:
            session.store(TOKENS, data(PLAIN, TOKENS), **options)
        assert type(raised.value) is error
        assert isinstance(raised.value, ValueError)
        (name,) = options
        assert name in str(raised.value)
        assert len(str(raised.value)) < 200
    world.unharmed()


def test_numbers_of_numpy_are_numbers(world: World) -> None:
    tokens = prompt(50, 51)
    for session in world.sessions:
        stored = session.store(  # type: ignore[call-overload]
            tokens,
            data(PLAIN, tokens)[1:],
            [Extra("image", b"x", np.int64(SIZE), np.int32(SIZE + 1))],  # type: ignore[arg-type]
            start=np.int64(1),
            ttl=np.float32(60),
            priority=np.int8(3),
        )
        assert stored.stored == 1
        with session.match(TOKENS, have=np.int64(SIZE), prefill=np.float32(0)) as match:  # type: ignore[arg-type]
            assert session.load(match, deadline=np.float64(10)).wait(np.int64(10)).tokens == len(TOKENS)  # type: ignore[arg-type]
        assert session.pin(TOKENS, stop=np.uint8(1)) == 1  # type: ignore[arg-type]
        assert session.unpin(TOKENS, stop=np.uint8(1)) == 1  # type: ignore[arg-type]


def test_a_layout_has_whole_numbers() -> None:
    right = Group("full", Kind.FULL, 2, 2, 16, "float16")
    for wrong in ({"layers": 2.0}, {"heads": True}, {"head_dim": "16"}, {"page": None}, {"kind": "full"}, {"name": 5}):
        with pytest.raises(ArgumentError):
            replace(right, **wrong)
    with pytest.raises(ArgumentError, match="block_tokens"):
        Layout((right,), 16.0)  # type: ignore[arg-type]
    numpys = replace(right, layers=np.int64(2))  # type: ignore[arg-type]
    assert Layout((numpys,), 16).digest == Layout((right,), 16).digest
    with pytest.raises(ArgumentError, match="secret"):
        Tenant("x", "x" * 32)  # type: ignore[arg-type]


def test_arguments_of_a_worker_group_are_checked_too(world: World) -> None:
    session = world.beside
    for ranks in (2.0, "2", True, None):
        with pytest.raises(ArgumentError):
            world.client.worker_group(session, ranks)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="ranks is 0"):
        world.client.worker_group(session, 0)
    with world.client.session(MODEL) as apart:
        group = world.client.worker_group(apart, 1)
        with pytest.raises(ArgumentError, match="priority"):
            group.delegate(prompt(7), priority=1.5)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="rank"):
            world.client.join(group.token, 0.0)  # type: ignore[arg-type]
        with world.client.join(group.token, np.int64(0)) as worker:  # type: ignore[arg-type]
            for ticket in ("nonsense", "x/" + "9" * 40):
                with pytest.raises(RightError, match="no ticket"):
                    worker.step([ticket])
            with pytest.raises(ArgumentError):
                worker.step([5])  # type: ignore[list-item]
            many = [group.delegate(prompt(7)).ticket] * 3000
            with worker.step(stores=many) as step:
                assert all(step.stores), "more than one message holds, and all are answered"
    world.unharmed()


def test_a_prompt_that_no_message_can_hold_is_refused_at_the_caller(world: World) -> None:
    namer = world.beside.chain().namer
    chain = namer.apart("x", [n.to_bytes(4, "little") for n in range(p.LARGEST // 32 + 1)])
    for ask in (world.beside.match, world.beside.find, world.beside.pin, world.beside.drop):
        with pytest.raises(LayoutError, match="give a shorter prompt"):
            ask(chain)
    world.unharmed()


def test_what_was_put_off_is_sent_though_a_call_after_it_is_refused(world: World) -> None:
    session = world.beside
    match = session.match(TOKENS)
    assert world.client.statistics().held == 2
    match.release()
    chain = session.chain().namer.apart("x", [n.to_bytes(4, "little") for n in range(p.LARGEST // 32 + 1)])
    with pytest.raises(LayoutError):
        session.find(chain)
    assert world.client.statistics().held == 0
    world.unharmed()


@pytest.mark.parametrize(
    "wrong",
    [
        ["reserve", 1, [0], bytes(32), 0, 1, None, 2.5],
        ["match", 1, bytes(32), 0, "fast"],
        ["match", 1, "digests", 0, None],
        ["unheard of", 1],
        ["pin"],
        [],
        7,
        None,
        {"match": 1},
        ["invite", 1, "x" * 300, 1],
    ],
)
def test_an_operation_that_is_not_understood_ends_that_call_alone(world: World, wrong: Any) -> None:
    with dialled(world.node.path) as sock:
        greet(sock)
        assert answer(sock)[0] == "welcome"
        sock.sendall(packed([1, [["flush"], wrong, ["statistics"]]]))
        number, (before, refused, after), *_ = answer(sock)
        assert number == 1
        assert isinstance(before, int)
        assert refused[:2] == ["failure", "LayoutError"]
        assert "does not understand" in refused[2]
        assert "store" in after
    world.unharmed()


def test_token_ids_of_a_prompt_too_long_for_them_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Thread(
        tmp_path / "node.sock",
        nvme={"path": str(tmp_path / "tier"), "budget": "16MiB", "segment": "1MiB", "token_ids": True},
        **SMALL,
    )
    with kvtide.connect(f"unix:{node.path}") as client, client.session(MODEL) as session:
        monkeypatch.setattr(p, "LARGEST", (1 << 16) + 100)
        tokens = prompt(*range(1, 5))
        assert session.store(tokens, data(PLAIN, tokens)).stored == 4
        assert length(session, tokens) == len(tokens)
        assert client.flush(30)
    node.close()
