"""What is remembered of blocks that are gone, and that it stays small however large the tier is."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from kvtide.plan.history import MANY, History
from kvtide.plan.policy import Reuse
from kvtide.plan.recorded_uses import Counts, Marks, Use, Uses
from kvtide.testing.policy import Forest

_NAMES: Marks = np.random.default_rng(1).integers(1 << 63, (1 << 64) - 1, 100_000, np.uint64)


def names(count: int, start: int = 0) -> Marks:
    return _NAMES[start : start + count]


def history() -> History:
    return History((1,), 200_000)


def see(history: History, chain: Marks, returns: int, now: int) -> Counts:
    """A chain is used; answers how often, by then, its blocks have come back if they are stored anew."""
    every = chain > 0
    history.see(
        Uses(
            [
                Use(
                    chain,
                    np.zeros(len(chain), np.int16),
                    np.full_like(every, returns, np.int16),
                    every,
                    every,
                    every,
                    now,
                )
            ]
        )
    )
    return history.returns(chain)


def test_returns_of_what_was_here_are_counted_up_to_a_limit() -> None:
    past = history()
    one, two = names(20), names(20, start=100)
    assert past.returns(one).tolist() == [0] * 20
    assert see(past, one, 4, 20).tolist() == [5] * 20
    assert past.returns(two).tolist() == [0] * 20
    assert see(past, one, MANY, 40).tolist() == [MANY] * 20


@pytest.mark.parametrize("room", [100_000, 1_000_000, 50_000_000])
def test_of_a_large_tier_a_sample_is_remembered(room: int) -> None:
    past = history()
    known = see(past, names(20_000), 2, 20_000)
    tracemalloc.start()
    try:
        past.fit(room)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 16 << 20
    returns = past.returns(names(20_000))
    assert known.max() == returns.max() == 3
    assert (np.diff(returns) <= 0).all(), "a block came back at least as often as those that are chained to it"
    assert np.count_nonzero(returns) > 15_000
    assert not past.returns(names(20_000, start=20_000)).any()


def test_a_share_of_the_names_tells_the_same_of_a_kind() -> None:
    """Half of what is used comes back after 40,000 blocks, in a table of all names and in one of a share."""
    told = []
    for room in (1000, 400_000):
        past = history()
        past.fit(room)
        now = 0
        for number in range(40):
            for first in (number * 2000, (number - 20) * 2000):
                if first >= 0:
                    now += 1000
                    see(past, names(1000, first), 0, now)
        curves = past.curves()
        told.append((curves.rates[0], curves.hits[0, -1]))
    assert told[1][0] == pytest.approx(told[0][0], rel=0.1)
    assert told[0][1] > 0.1
    assert told[1][1] == pytest.approx(told[0][1], rel=0.3)


def test_a_block_that_came_back_very_often_may_be_stored_anew() -> None:
    forest = Forest(lambda index, room: Reuse(index, 0, room))
    forest.store((1, 2))
    for _ in range(MANY + 5):
        forest.ask((1, 2))
    forest.uses.learn()
    forest.evict()
    forest.evict()
    assert forest.ask((1, 2)) == 0
    forest.store((1, 2))
    forest.uses.learn()
    assert forest.ask((1, 2)) == 2
