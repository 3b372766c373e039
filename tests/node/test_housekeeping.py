"""What a node removes for one client keeps no other waiting, however many blocks it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtide import Group, Kind, Layout, Model
from kvtide.index import work_slices
from kvtide.node.client.client import Client
from kvtide.testing.clock import FakeClock
from tests.bounds import watch
from tests.node.serving import Thread, eventually

TOKENS = 16
MODEL = Model(Layout((Group("mla", Kind.MLA, 1, 1, 128, "bfloat16", page=TOKENS),), TOKENS), "housekeeping")
BLOCK = np.zeros(MODEL.layout.geometry["mla"].nbytes, np.uint8)
COUNT = 4 * work_slices.SLICE


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def node(tmp_path: Path, clock: FakeClock) -> Iterator[Thread]:
    node = Thread(tmp_path / "node.sock", clock=clock, dram={"budget": "32MiB", "segment": "8MiB"})
    yield node
    node.close()


def prompt(*blocks: int) -> list[int]:
    return [number for number in blocks for _ in range(TOKENS)]


LONG = prompt(*range(1000, 1000 + COUNT))


def test_blocks_of_a_client_that_expire_cost_another_nothing(node: Thread, clock: FakeClock) -> None:
    with Client(node.path) as one, Client(node.path) as two:
        mine, others = one.session(MODEL), two.session(MODEL)
        assert mine.store(LONG, [BLOCK] * COUNT, ttl=60).stored == COUNT
        assert others.store(prompt(1), [BLOCK]).stored == 1
        lock, line = watch(node.store), two._link
        clock.advance(61)
        assert not any(mine.find(LONG))
        while two.statistics().blocks > 1:
            with others.match(prompt(1)) as match:
                assert match.blocks == 1
        assert lock.most <= work_slices.SLICE
        assert two._link is line, "nobody was cut off"


def test_a_client_drops_and_expires_in_turns_with_others(node: Thread, clock: FakeClock) -> None:
    turns: list[int] = []
    node.store.follow(lambda event: turns.append(len(node.store.index)))
    with Client(node.path) as client, client.session(MODEL) as session:
        assert session.store(LONG, [BLOCK] * COUNT).stored == COUNT
        assert session.expire(LONG, 600, start=COUNT // 2) == COUNT // 2
        turns.clear()
        lock = watch(node.store)
        assert session.drop(LONG[: TOKENS * (COUNT // 2)]) == COUNT // 2
        assert lock.most <= work_slices.SLICE
        assert len(turns) == COUNT // 2 // work_slices.SLICE
        clock.advance(601)
        eventually(lambda: client.statistics().blocks == 0)


def test_a_client_that_goes_in_the_middle_of_a_drop_leaves_nothing_half_done(node: Thread) -> None:
    client = Client(node.path)
    session = client.session(MODEL)
    assert session.store(LONG, [BLOCK] * COUNT).stored == COUNT
    gone: list[None] = []

    def leave(event: object) -> None:
        if not gone:
            gone.append(None)
            for connection in list(node.node._connections):
                node.node.soon(connection.close)

    node.store.follow(leave)
    with pytest.raises(Exception, match="drop them again"):
        session.drop(LONG)
    eventually(lambda: len(node.store.index) == 0)
    client.close()
