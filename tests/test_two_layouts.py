"""Two models that take turns: each finds nearly the whole budget, of DRAM and of NVMe, again and again.

Slots of one size are of no use to the other, so every turn must cut the segments anew, and what is left over at their
ends must not add up.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvtide import config
from kvtide.block import BlockKey, Layout
from kvtide.index.index import DRAM, SEALED
from kvtide.index.keys import Model
from kvtide.store.partition import NVME
from kvtide.store.session import Session
from kvtide.store.store import Store
from kvtide.testing import blocks
from tests.books import agree, tier_bytes

KIB, MIB = 1 << 10, 1 << 20
TURNS = 10
TOKENS = 16
PROMPT = 4
BUDGETS = {DRAM: 64 * MIB, NVME: 128 * MIB}


def model(kib: int) -> Model:
    """Blocks of just so many KiB, in 8 sections."""
    head_dim, rest = divmod(kib * KIB, 8 * TOKENS * 2)
    assert not rest
    return Model(Layout.attention(layers=4, heads=1, head_dim=head_dim, block_tokens=TOKENS), "turns")


def fill(store: Store, session: Session, turn: int) -> list[BlockKey]:
    """Store more new blocks than either tier has room for; answers their keys."""
    size = session.layout.geometry["full"].nbytes
    keys = []
    for prompt in range(int(1.4 * BUDGETS[NVME] / size / PROMPT)):
        tokens = np.repeat(np.arange(PROMPT, dtype=np.uint32) + (turn << 20) + prompt * PROMPT, TOKENS)
        names = session.chain(tokens).keys(b"full")
        data = [blocks.content(key, size) for key in names]
        while session.store(tokens, data).dropped:
            # DRAM is full of blocks that wait to be written.
            assert store.flush(60)
        keys += names
    assert store.flush(60)
    return keys


def share(store: Store, number: int, session: Session, keys: list[BlockKey]) -> float:
    """Which part of a tier's budget these blocks fill, counted in the bytes that an engine sees."""
    index = store.index
    with index.lock:
        here = np.count_nonzero(index.state[number][index.rows(keys)] == SEALED)
    return int(here) * session.layout.geometry["full"].nbytes / BUDGETS[number]


def mapped() -> int:
    """Bytes of arenas that this process really has in memory, whatever any book says."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:kvtide" in line:
            start, _, end = line.split()[0].partition("-")
            total += int(end, 16) - int(start, 16)
    return total


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Memory must be given back because nobody refers to it, not because garbage happened to be collected."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((1024, 1332), id="1 MiB and a third more"),
        pytest.param((1024, 1028), id="hardly different"),
        pytest.param((2660, 3780), id="three or two in a segment"),
        pytest.param((4100, 512), id="just over half a segment, and small"),
    ],
)
def test_two_layouts_take_turns(tmp_path: Path, sizes: tuple[int, int]) -> None:
    settings = config.read(
        env={},
        dram={"budget": BUDGETS[DRAM], "segment": 8 * MIB},
        nvme={"path": str(tmp_path / "tier"), "budget": BUDGETS[NVME], "segment": 8 * MIB},
    )
    with Store(settings, mapped=True) as store:
        sessions = [store.session(model(kib)) for kib in sizes]
        for turn in range(TURNS):
            session = sessions[turn % 2]
            keys = fill(store, session, turn)
            filled = {number: share(store, number, session, keys) for number in BUDGETS}
            assert all(part >= 0.9 for part in filled.values()), f"turn {turn}: {filled}"
            assert mapped() <= store.dram.statistics().bytes_taken <= BUDGETS[DRAM]
            assert tier_bytes(tmp_path / "tier") <= BUDGETS[NVME]
        agree(store)
    assert not mapped()
