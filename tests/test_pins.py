"""What is pinned is charged as long as it is pinned and there, in whatever order things happen."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtide import Group, Kind, Layout, Model, config
from kvtide.node.client.client import Client
from kvtide.store.backend import LocalBackend
from kvtide.store.session import Session, SessionHost
from kvtide.store.store import Store
from kvtide.testing.clock import FakeClock
from tests.node.serving import Thread, eventually

TOKENS = 16
MODEL = Model(
    Layout(
        (
            Group("mla", Kind.MLA, 1, 1, 128, "bfloat16", page=TOKENS),
            Group("draft", Kind.DRAFT, 1, 1, 64, "bfloat16", page=TOKENS),
        ),
        TOKENS,
    ),
    "pins",
)
SETTINGS: dict[str, Any] = {"dram": {"budget": "16MiB", "segment": "1MiB"}, "node": {"client_share": 0.5}}
PATHS = [(1,), (1, 2), (1, 2, 3), (4, 5), (6,)]
PROFILE = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)

steps = st.lists(
    st.tuples(
        st.sampled_from(["store", "store briefly", "pin", "pin", "unpin", "drop", "expire", "time passes", "close"]),
        st.integers(0, 1),
        st.sampled_from(PATHS),
    ),
    max_size=25,
)


def prompt(path: tuple[int, ...]) -> list[int]:
    return [number for number in path for _ in range(TOKENS)]


def blocks(count: int) -> dict[str, list[np.ndarray[Any, Any]]]:
    return {g.name: [np.zeros(MODEL.layout.geometry[g.name].nbytes, np.uint8)] * count for g in MODEL.layout.groups}


def play(
    home: SessionHost, clock: FakeClock, done: list[tuple[str, int, tuple[int, ...]]], check: Callable[[], None]
) -> None:
    """Two sessions do these things in turn, and then all of it ends."""
    sessions: list[Session] = [home.session(MODEL) for _ in range(2)]
    for what, who, path in done:
        session, tokens = sessions[who], prompt(path)
        match what:
            case "store":
                session.store(tokens, blocks(len(path)))
            case "store briefly":
                session.store(tokens, blocks(len(path)), ttl=5)
            case "pin":
                session.pin(tokens)
            case "unpin":
                session.unpin(tokens)
            case "drop":
                session.drop(tokens)
            case "expire":
                session.expire(tokens, 5)
            case "time passes":
                clock.advance(6)
                assert not session.find(prompt((9,)))[0]
            case "close":
                session.close()
                sessions[who] = home.session(MODEL)
        check()
    for path in PATHS:
        sessions[0].drop(prompt(path))
    check()
    sessions[0].close()
    sessions[1].unpin(prompt((1, 2, 3)))


@PROFILE
@given(steps)
def test_pins_of_a_store(done: list[tuple[str, int, tuple[int, ...]]]) -> None:
    clock = FakeClock()
    with Store(config.read(env={}, **SETTINGS), clock=clock) as store:

        def check() -> None:
            backends = [session.backend for session in store._sessions]
            with store.index.lock:
                rows = {row for row, count in enumerate(store.index.pins[: store.index.size]) if count}
                pinned = [backend.pins for backend in backends if isinstance(backend, LocalBackend)]
                assert set().union(*(pins._counts for pins in pinned)) == rows, "a pin of nobody, or of nothing"
                for pins in pinned:
                    assert pins.nbytes == sum(pins._sizes.values()) == pins.charge.nbytes >= 0
                    for row in pins._counts:
                        assert store.index.row(store.index.key(row)) == row, "pinned, and nobody could unpin it"

        play(store, clock, done, check)
        check()
        assert (store.statistics().pinned, store.statistics().blocks) == (0, 0)
        for session in store._sessions:
            assert isinstance(session.backend, LocalBackend)
            assert session.backend.pins.nbytes == 0


@settings(parent=PROFILE, max_examples=15)
@given(steps)
def test_pins_of_a_client(done: list[tuple[str, int, tuple[int, ...]]]) -> None:
    clock = FakeClock()
    with tempfile.TemporaryDirectory() as folder:
        node = Thread(Path(folder) / "node.sock", clock=clock, **SETTINGS)
        try:
            with Client(node.path) as client:
                assert client.statistics().pinned == 0
                (handler,) = node.node._handlers.values()
                full = handler._account.room
                play(client, clock, done, lambda: None)
                eventually(lambda: client.statistics().pinned == 0)
                eventually(lambda: handler._account.room == full)
        finally:
            node.close()


@pytest.mark.parametrize("how", ["drop", "expire"])
def test_a_client_can_pin_as_much_again_when_what_it_pinned_is_gone(tmp_path: Path, how: str) -> None:
    """Else after a while every match of it would be a miss, and every store refused."""
    clock = FakeClock()
    node = Thread(tmp_path / "node.sock", clock=clock, **SETTINGS)
    try:
        with Client(node.path) as client, client.session(MODEL) as session:
            each = sum(g.footprint for g in MODEL.layout.geometry.values())
            count = int(0.4 * 16 * (1 << 20)) // (2 * max(g.footprint for g in MODEL.layout.geometry.values()))
            assert 5 * count * each > 0.5 * (16 << 20), "more than its share in all"
            for turn in range(5):
                path = tuple(range(1000 * turn + 1, 1000 * turn + 1 + count))
                assert session.store(prompt(path), blocks(count), ttl=60).dropped == 0
                assert session.pin(prompt(path)) == 2 * count, f"turn {turn}"
                if how == "drop":
                    session.drop(prompt(path))
                else:
                    clock.advance(61)
                    eventually(lambda: client.statistics().pinned == 0)
                assert session.unpin(prompt(path)) == 0
    finally:
        node.close()
