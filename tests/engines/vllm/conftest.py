"""Engines for these tests: they take half a minute to start, so those that can be shared are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.node.client.client import Client
from tests.engines.vllm.checkpoints import checkpoint
from tests.engines.vllm.engines import Engine, engine
from tests.engines.vllm.kept import Node, at_rest


def pytest_configure(config: pytest.Config) -> None:
    """Warnings are errors here as elsewhere, but not those that vLLM and its torch give each other."""
    config.addinivalue_line("filterwarnings", r"ignore::DeprecationWarning:(torch|vllm)\.")
    config.addinivalue_line("filterwarnings", r"ignore:`torch.jit")


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """SmolLM2 in an engine without a connector: what all others are compared with."""
    with engine(checkpoint(), tmp_path_factory.mktemp("plain") / "engine.log") as running:
        yield running


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node of a test's own, in which nothing is left over."""
    running = Node(tmp_path)
    yield running
    with Client(running.path) as client:
        at_rest(client)
    running.kill()
