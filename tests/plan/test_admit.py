"""When blocks are written to disk: at once, when they are asked for again, or before they leave DRAM."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtide.plan import admit
from tests.plan.small import MODEL, SLOTS, keep, length, open_store, prompt, right


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
    found = [type(admit.make(name)) for name in ("through", "second-touch", "eviction")]
    assert found == [admit.Through, admit.SecondTouch, admit.OnEviction]
