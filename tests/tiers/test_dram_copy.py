"""Copies by several threads are copies."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvtide.tiers.dram import copy as copier_module
from kvtide.tiers.dram.copy import Bytes, Copier


def pair(seed: int, *shape: int) -> tuple[Bytes, Bytes]:
    return np.zeros(shape, np.uint8), np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


@pytest.mark.parametrize("threads", [0, 1, 2, 4])
@pytest.mark.parametrize(
    "shapes",
    [
        [(1,)],
        [(4096,), (1,), (777,)],
        [(5 << 20,)],
        [(3 << 20,), (1 << 20,), (1,), ((1 << 20) + 1,)],
        [(3, 3 << 20), (64, 65536), (2, 1)],
        [(100, 50_001), (7, 1 << 20)],
    ],
    ids=str,
)
def test_every_byte_arrives(shapes: list[tuple[int, ...]], threads: int) -> None:
    copier = Copier(threads)
    pairs = [pair(i, *shape) for i, shape in enumerate(shapes)]
    copier.copy(pairs)
    assert all(np.array_equal(target, source) for target, source in pairs)
    copier.close()


def test_between_padded_sections() -> None:
    """Rows of a padded slot, and a caller's buffer without padding; the padding stays as it was."""
    slot = np.full((64, 131_072), 7, np.uint8)
    source = pair(1, 64, 130_000)[1]
    copier = Copier(2)
    copier.copy([(slot[:, :130_000], source)])
    assert np.array_equal(slot[:, :130_000], source)
    assert (slot[:, 130_000:] == 7).all()
    copier.close()


def test_every_byte_arrives_though_somebody_else_needs_a_core() -> None:
    copier = Copier(busy=lambda: True)
    pairs = [pair(i, 3 << 20) for i in range(5)]
    copier.copy(pairs)
    assert all(np.array_equal(target, source) for target, source in pairs)
    copier.close()


def test_nothing_to_copy() -> None:
    copier = Copier(2)
    copier.copy([])
    copier.close()


def test_many_callers_at_once() -> None:
    """More batches than threads: nobody waits for a helper that never comes."""
    copier = Copier(2)
    batches = [[pair(10 * i + j, 3 << 20) for j in range(2)] for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(copier.copy, batches))
    assert all(np.array_equal(target, source) for batch in batches for target, source in batch)
    copier.close()


def test_a_copy_that_cannot_be_is_an_error_of_the_caller() -> None:
    copier = Copier(2)
    target, source = pair(1, 6 << 20)
    target.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        copier.copy([(target, source)])
    copier.close()


def test_who_is_interrupted_leaves_nobody_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots are given to others then."""
    work = copier_module._Pieces.work

    def interrupted(pieces: copier_module._Pieces) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        work(pieces)

    monkeypatch.setattr(copier_module._Pieces, "work", interrupted)
    target, source = np.zeros(256 << 20, np.uint8), np.ones(256 << 20, np.uint8)
    copier = Copier(2)
    with pytest.raises(KeyboardInterrupt):
        copier.copy([(target, source)])
    left = target[:: 1 << 20].copy()
    copier.close()
    assert (target[:: 1 << 20] == left).all(), "somebody went on"
    assert not target.all()
