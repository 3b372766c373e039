"""Neighbours on the disk are read together, and each is judged alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.block import ALIGN, Span
from kvtide.testing.blocks import keys
from kvtide.testing.faults import Fault, FaultyDisk, How
from kvtide.testing.tier import Caller, shaped
from kvtide.tiers.nvme.tier import Nvme

FOUR = shaped(4, 4100)
COUNT = 12
RUN = 3
"""Of 12 blocks each of the four threads takes as many."""


class Counted(FaultyDisk):
    """Knows how many blocks' headers and payloads each read asked for."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.reads: list[int] = []

    def read(self, fd: int, into: Sequence[Span], offset: int) -> int:
        self.reads.append(len(into))
        return super().read(fd, into, offset)


@pytest.fixture
def disk() -> Counted:
    return Counted()


@pytest.fixture
def caller(tmp_path: Path, disk: Counted) -> Iterator[Caller]:
    caller = Caller(Nvme(tmp_path / "tier", 4 << 20, segment=1 << 20, threads=2, disk=disk))
    yield caller
    caller.close()


def written(caller: Caller, disk: Counted) -> list[int]:
    places = caller.write(keys(COUNT), FOUR)
    assert places == list(range(COUNT)), "neighbours, in order"
    disk.reads.clear()
    return places


def test_neighbours_are_read_in_one_call(caller: Caller, disk: Counted) -> None:
    places = written(caller, disk)
    assert all(caller.finds(keys(COUNT), FOUR, places))
    assert disk.reads == [2 * RUN] * (COUNT // RUN)


def test_a_few_blocks_are_shared_by_all_threads(caller: Caller, disk: Counted) -> None:
    places = written(caller, disk)
    assert all(caller.finds(keys(4), FOUR, places[:4]))
    assert disk.reads == [2] * 4


def test_slots_that_came_free_in_any_order_are_neighbours_again(caller: Caller, disk: Counted) -> None:
    places = written(caller, disk)
    order = Random(1).sample(range(COUNT), COUNT)
    caller.evict([keys(COUNT)[i] for i in order], [places[i] for i in order])
    assert caller.write(keys(COUNT, start=50), FOUR) == places


@pytest.mark.parametrize("page", range(9), ids=lambda page: "header" if page == 0 else f"page {page} of the payload")
@pytest.mark.parametrize("bad", range(RUN))
def test_a_damaged_block_spoils_no_neighbour(
    tmp_path: Path, caller: Caller, disk: Counted, bad: int, page: int
) -> None:
    places = written(caller, disk)
    slot = ALIGN + FOUR.geometry.footprint
    with (tmp_path / "tier" / "00000.segment").open("r+b") as file:
        # Of a section's second page the first four bytes are its own; the rest is padding.
        at = ALIGN + places[bad] * slot + page * ALIGN + 1
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))
    assert caller.finds(keys(COUNT), FOUR, places) == [i != bad for i in range(COUNT)]


@pytest.mark.parametrize("gone", range(RUN))
def test_an_evicted_block_spoils_no_neighbour(caller: Caller, disk: Counted, gone: int) -> None:
    places = written(caller, disk)
    caller.evict([keys(COUNT)[gone]], [places[gone]])
    assert caller.finds(keys(COUNT), FOUR, places) == [i != gone for i in range(COUNT)]


def test_a_run_that_cannot_be_read_is_read_block_by_block(caller: Caller, disk: Counted) -> None:
    places = written(caller, disk)
    disk.arm(Fault("read", How.FAIL, files="*.segment"))
    assert all(caller.finds(keys(COUNT), FOUR, places))
    assert caller.statistics().failed_reads == 0
    assert sorted(disk.reads) == [2] * RUN + [2 * RUN] * (COUNT // RUN)


@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_is_cut_short_gives_what_came(tmp_path: Path, seed: int) -> None:
    disk = Counted(seed)
    caller = Caller(Nvme(tmp_path / "tier", 4 << 20, segment=1 << 20, threads=2, disk=disk))
    places = written(caller, disk)
    disk.arm(Fault("read", How.SHORT, files="*.segment"))
    found = caller.finds(keys(COUNT), FOUR, places)
    first = found.index(False)
    run = found[first - first % RUN : first - first % RUN + RUN]
    assert run == sorted(run, reverse=True), "whole to where it ended, and nothing after"
    assert found.count(False) == run.count(False), "no other run"
    assert caller.statistics().failed_reads == found.count(False)
    assert all(caller.finds(keys(COUNT), FOUR, places))
    caller.close()


ITEMS = st.lists(
    st.tuples(st.integers(0, COUNT - 1), st.sampled_from([None, range(4), range(1, 3), range(3, 4)])),
    min_size=1,
    max_size=40,
)


@settings(deadline=None)
@given(items=ITEMS, gone=st.sets(st.integers(0, COUNT - 1)))
def test_any_batch_is_answered_block_by_block(
    tmp_path_factory: pytest.TempPathFactory, items: list[tuple[int, range | None]], gone: set[int]
) -> None:
    """In any order, with repetitions, whole or in part, with holes."""
    caller = Caller(Nvme(tmp_path_factory.mktemp("tier"), 4 << 20, segment=1 << 20, threads=1))
    places = caller.write(keys(COUNT), FOUR)
    caller.evict([keys(COUNT)[i] for i in gone], [places[i] for i in gone])
    batch = [caller.read_item(keys(COUNT)[i], FOUR, places[i], sections) for i, sections in items]
    assert caller.read(batch) == [i not in gone for i, _ in items]
    caller.close()
