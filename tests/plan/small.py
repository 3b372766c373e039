"""A small world for tests: blocks of 64 KiB, 16 of them in the smallest DRAM, and a clock that stands still."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtide import Layout, Model, Session, Store, config
from kvtide.block import BlockKey
from kvtide.testing import blocks

LAYOUT = Layout.attention(layers=8, heads=1, head_dim=256, dtype="int8", block_tokens=16)
MODEL = Model(LAYOUT, "given:small")
NBYTES = LAYOUT.geometry["full"].nbytes
SLOTS = (1 << 20) // NBYTES
"""How many blocks the smallest DRAM holds."""


class Clock:
    """Time that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


def open_store(path: Path | None = None, clock: Clock | None = None, **settings: dict[str, Any]) -> Store:
    """A store with 1 MiB of DRAM and, given a path, the smallest NVMe tier."""
    tree: dict[str, Any] = {"dram": {"budget": "1MiB", "segment": "1MiB"}}
    if path is not None:
        tree["nvme"] = {"path": str(path), "budget": "16MiB", "segment": "1MiB", "threads": 2}
    for section, values in settings.items():
        tree.setdefault(section, {}).update(values)
    return Store(config.read(env={}, **tree), clock=clock)


def prompt(*path: int) -> list[int]:
    """A prompt of one block per number: prompts that begin alike share blocks."""
    return [token for number in path for token in [number] * LAYOUT.block_tokens]


def content(session: Session, tokens: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
    """The right bytes of each of a prompt's blocks: they follow from its key."""
    return [blocks.content(k, NBYTES) for k in session.chain(tokens).keys(b"full")]


def keep(session: Session, *path: int, **options: Any) -> list[BlockKey]:
    """Store a prompt; answers its keys."""
    tokens = prompt(*path)
    session.store(tokens, content(session, tokens), **options)
    return session.chain(tokens).keys(b"full")


def length(session: Session, *path: int) -> int:
    """How many blocks of a prompt the store has."""
    with session.match(prompt(*path)) as match:
        return match.blocks


def right(session: Session, *path: int) -> int:
    """Load a prompt and check every byte; answers how many blocks came."""
    tokens = prompt(*path)
    with session.match(tokens) as match:
        loaded = session.load(match).wait(30)
        for view, data in zip(loaded.blocks, content(session, tokens), strict=False):
            assert view == memoryview(data), "a wrong byte"  # type: ignore[arg-type]
        return loaded.tokens // LAYOUT.block_tokens
