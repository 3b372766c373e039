"""What tests of nodes have in common."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.serving import Process


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Process]:
    """A node in a process of its own."""
    process = Process(tmp_path)
    yield process
    process.kill()
