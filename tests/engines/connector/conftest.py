"""A real node for each test, and engines of it: at the end of each nothing may be held there any more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtide.block import Group, Kind, Layout
from kvtide.engines.connector import node_thread
from kvtide.node.client.client import Client
from tests.engines.connector.toy import LAYOUT, Toy
from tests.node.serving import Process, eventually

Engines = Callable[..., Toy]


def windows(*sizes: int) -> Layout:
    """Full attention, and groups with windows of these sizes."""
    near = [Group(f"window{n}", Kind.WINDOW, 1, 4, 8, "bfloat16", window=n) for n in sizes]
    return Layout((*LAYOUT.groups, *near), LAYOUT.block_tokens)


@pytest.fixture(autouse=True)
def moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, a node that lives answers in a moment. Tests of one that hangs set it to nothing."""
    monkeypatch.setattr(node_thread, "_MOMENT", 60.0)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Process]:
    process = Process(tmp_path, KVTIDE_DRAM_PREFAULT="true")
    yield process
    process.kill()


@pytest.fixture
def engines(node: Process) -> Iterator[Engines]:
    """Make engines of the node; the settings are those of ``Toy``."""
    made: list[Toy] = []

    def make(**settings: Any) -> Toy:
        made.append(Toy(lambda: Client(node.path), **settings))
        return made[-1]

    yield make
    with Client(node.path) as client:
        for toy in made:
            toy.at_rest()
        eventually(lambda: client.statistics().held == 0)  # while the engines live: they have given all back themselves
        assert not any(c.slots_quarantined for c in client.status().node.clients)
    for toy in made:
        toy.close()
    node.at_rest()
