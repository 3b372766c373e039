"""Holds are counted when the count is needed, and the count is right however they began and ended."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtide.index.hold_counts import HoldCounts, Rows

SIZE = 8
ROWS = st.sets(st.integers(1, SIZE - 1), min_size=1).map(lambda rows: np.array(sorted(rows), np.int64))


@given(st.lists(ROWS, max_size=8), st.randoms(use_true_random=False))
def test_who_looks_sees_every_hold(pieces: list[Rows], chance: random.Random) -> None:
    holds = HoldCounts(SIZE)
    steps = [(i, begin) for i in range(1, len(pieces) + 1) for begin in (True, False)]
    chance.shuffle(steps)
    open_now: list[int] = []
    moving = np.zeros(SIZE, np.int32)
    for i, begin in steps:
        if begin:
            holds.note(i, pieces[i - 1])
            open_now.append(i)
        elif i in open_now:
            open_now.remove(i)
            holds.strike(i)
        if chance.random() < 0.2:
            holds.move(pieces[i - 1])
            moving[pieces[i - 1]] += 1
        expected = moving.copy()
        for held in open_now:
            expected[pieces[held - 1]] += 1
        assert len(holds) == len(open_now)
        if chance.random() < 0.2:
            assert (holds.counts == expected).all()
        if chance.random() < 0.1:
            holds.recount(moving)
    assert (holds.counts == expected).all() if steps else True


def test_a_hold_on_nothing_is_not_kept_in_mind() -> None:
    holds = HoldCounts(SIZE)
    for i in range(1000):
        holds.note(i, np.zeros(0, np.int64))
    assert len(holds) == 0
