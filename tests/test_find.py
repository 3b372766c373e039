"""Which blocks there are, each by itself: also those that no prefix reaches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvtide
from kvtide import Group, Kind, Layout, Model
from kvtide.store.session import SessionHost
from kvtide.testing.blocks import content
from tests.node.serving import Served, Thread

LAYOUT = Layout(
    (
        Group("full", Kind.FULL, 1, 1, 8, "bfloat16"),
        Group("state", Kind.STATE, 1, 1, 8, "bfloat16"),
        Group("draft", Kind.DRAFT, 1, 1, 8, "bfloat16"),
    ),
    16,
)
SETTINGS: dict[str, Any] = {"dram": {"budget": "8MiB", "segment": "1MiB"}}


@pytest.fixture(params=["store", "node"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SessionHost]:
    with kvtide.open(**SETTINGS) if request.param == "store" else Served(tmp_path / "node.sock", **SETTINGS) as home:
        yield home


def test_a_block_is_there_if_all_required_groups_have_it(home: SessionHost) -> None:
    with home.session(Model(LAYOUT, "w")) as session:
        tokens = list(range(16 * 5))

        def store(group: str, *blocks: int) -> None:
            size = LAYOUT.geometry[group].nbytes
            for block in blocks:
                session.store(tokens, {group: [content(b"x", size)]}, start=block)

        store("full", 0, 1, 3)
        store("state", 1, 3, 4)
        store("draft", 0, 2)
        assert session.find(tokens) == [False, True, False, True, False]
        assert session.find(tokens[:15]) == []
        with session.match(tokens) as match:
            assert match.blocks == 2, "the longest prefix needs other blocks"
        session.drop(tokens[:32])
        assert session.find(tokens) == [False, False, False, True, False]


def test_without_a_node_nothing_is_there(tmp_path: Path) -> None:
    node = Thread(tmp_path / "node.sock", **SETTINGS)
    with kvtide.connect(f"unix:{node.path}") as client, client.session(Model(LAYOUT, "w")) as session:
        node.close()
        assert session.find(list(range(32))) == [False, False]
