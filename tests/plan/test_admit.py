"""When blocks are written to disk: at once, when they are asked for again, or before they leave DRAM."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtide.index.index import Index
from kvtide.plan import admit
from kvtide.plan.history import Curves
from kvtide.plan.write_budget import WriteBudget
from kvtide.testing import blocks
from tests.plan.small import MODEL, NBYTES, SLOTS, Clock, content, keep, length, open_store, prompt, right


def disk_blocks(path: Path, store: str, *steps: str) -> int:
    """How many blocks are on disk after ``steps``, before the store is closed."""
    with open_store(path, nvme={"store": store}) as opened, opened.session(MODEL) as mine:
        for step in steps:
            if step == "store":
                keep(mine, 1, 2, 3)
            elif step == "match":
                length(mine, 1, 2)
            elif step == "prefetch":
                mine.prefetch(prompt(1, 2, 3)).wait(30)
            elif step == "fill":
                for number in range(100, 100 + 2 * SLOTS):
                    keep(mine, number)
                    assert opened.flush(30)
        assert opened.flush(30)
        return opened.statistics().tiers["nvme"].blocks


@pytest.mark.parametrize(
    ("store", "steps", "blocks"),
    [
        ("through", ["store"], 3),
        ("through", ["store", "store", "match"], 3),
        ("second-touch", ["store"], 0),
        ("second-touch", ["store", "match"], 2),
        ("second-touch", ["store", "prefetch", "match"], 3),
        ("second-touch", ["match", "store"], 0),
        ("eviction", ["store", "match"], 0),
    ],
)
def test_a_block_is_on_disk_when_its_mode_says(tmp_path: Path, store: str, steps: list[str], blocks: int) -> None:
    assert disk_blocks(tmp_path / "kv", store, *steps) == blocks


def test_eviction_writes_what_leaves_and_loses_nothing(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv", nvme={"store": "eviction"}) as opened, opened.session(MODEL) as mine:
        for number in range(3 * SLOTS):
            keep(mine, number)
            assert opened.flush(30)
        assert opened.statistics().tiers["nvme"].blocks >= 2 * SLOTS
        assert [right(mine, number) for number in range(3 * SLOTS)] == [1] * 3 * SLOTS


@pytest.mark.parametrize(
    ("store", "again"), [("through", [3, 1]), ("second-touch", [2, 0]), ("eviction", [3, 1])], ids=lambda v: str(v)
)
def test_what_each_mode_keeps_across_a_restart(tmp_path: Path, store: str, again: list[int]) -> None:
    with open_store(tmp_path / "kv", nvme={"store": store}) as opened, opened.session(MODEL) as mine:
        keep(mine, 1, 2, 3)
        keep(mine, 4)
        length(mine, 1, 2)
    with open_store(tmp_path / "kv", nvme={"store": store}) as opened, opened.session(MODEL) as mine:
        assert [right(mine, 1, 2, 3), right(mine, 4)] == again


def test_every_mode_of_the_configuration_has_a_class() -> None:
    names = ("through", "second-touch", "ghost", "eviction")
    found = [type(admit.make(name, Index(tiers=2), lambda: 0)) for name in names]
    assert found == [admit.Through, admit.SecondTouch, admit.Ghost, admit.OnEviction]


# -- what a ghost list says ---------------------------------------------------------------------------------


def test_until_something_is_known_of_blocks_all_are_written(tmp_path: Path) -> None:
    assert disk_blocks(tmp_path / "kv", "ghost", "store") == 3


def test_a_block_that_was_reserved_is_written_too(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv", nvme={"store": "ghost"}) as opened, opened.session(MODEL) as mine:
        tokens = prompt(1, 2, 3)
        with mine.reserve(tokens) as reservation:
            for view, data in zip(reservation.views, content(mine, tokens), strict=True):
                view[:] = memoryview(data)  # type: ignore[arg-type]
            reservation.seal()
        assert opened.flush(30)
        assert opened.statistics().tiers["nvme"].blocks == 3


def test_a_block_that_is_worth_it_takes_its_parents_along() -> None:
    index = Index(tiers=2)
    rows = np.array([index.add(key, bytes(32), depth) for depth, key in enumerate(blocks.keys(4))])
    index.kind[rows] = [0, 1, 0, 0]
    ghost = admit.Ghost(index, lambda: 10)
    hits = np.array([[0.0, 0.01], [0.0, 0.5]])
    ghost.learn(Curves(hits, np.array([[0.0, 1.0], [0.0, 1.0]]), np.array([1.0, 1.0])))
    assert ghost.on_store(rows).tolist() == [True, True, False, False]
    index.kind[rows] = [1, -1, -1, -1]
    assert ghost.on_store(rows).tolist() == [True, False, False, False], "of what is not known yet, nothing"


# -- the budget of writes -----------------------------------------------------------------------------------


def test_a_budget_allows_what_was_not_used_and_no_more() -> None:
    clock = Clock()
    budget = WriteBudget(10.0, clock)
    assert [budget.take(400), budget.take(400), budget.take(1)] == [True, True, False], "600 were left, 200 are owed"
    clock.now += 20
    assert not budget.take(1), "the debt is paid"
    clock.now += 0.1
    assert budget.take(1)
    clock.now += 1e6
    assert [budget.take(600), budget.take(1)] == [True, False], "a minute's worth is saved, not a week's"
    assert budget.take(100, last=True)
    budget.give_back(1000)
    assert budget.take(1), "what is not written after all does not count"


def test_the_tighter_of_two_limits_counts() -> None:
    clock = Clock()
    assert WriteBudget.of(0, 0.0, 1 << 40, clock) is None
    for limit, writes, rate in [(5, 0.0, 5.0), (0, 1.0, 100.0), (50, 1.0, 50.0), (500, 1.0, 100.0)]:
        found = WriteBudget.of(limit, writes, 86400 * 100, clock)
        assert found is not None
        assert found.rate == rate


@pytest.mark.parametrize("store", ["through", "eviction"])
def test_a_used_up_budget_drops_writes_and_nothing_else(tmp_path: Path, store: str) -> None:
    clock = Clock()
    tier = {"store": store, "write_limit": NBYTES // 20}  # three blocks a minute
    with open_store(tmp_path / "kv", clock, nvme=tier) as opened, opened.session(MODEL) as mine:
        for number in range(3 * SLOTS):
            keep(mine, number)
            assert opened.flush(30).complete
            assert right(mine, number) == 1
        statistics = opened.statistics()
        assert statistics.tiers["nvme"].blocks <= 4
        assert statistics.tiers["dram"].blocks == SLOTS, "DRAM does not wait for the disk"
        assert statistics.counts["stores dropped: the write budget of nvme is used up"] > 0
