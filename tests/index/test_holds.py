"""Holds are counted by whoever looks, however they began and ended before."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtide.index.holds import Holds, Rows

SIZE = 8
ROWS = st.sets(st.integers(1, SIZE - 1), min_size=1).map(lambda rows: np.array(sorted(rows), np.int64))


@given(st.lists(st.tuples(ROWS, st.booleans(), st.booleans()), max_size=8), st.randoms(use_true_random=False))
def test_who_looks_sees_every_hold(pieces: list[tuple[Rows, bool, bool]], chance: random.Random) -> None:
    """Some end with the array that they began with, some with another one of the same rows; some twice at a time."""
    holds = Holds(SIZE)
    expected = np.zeros(SIZE, np.int32)
    steps = [(i, begin) for i, (_, _, twice) in enumerate(pieces) for begin in (True, False) * (1 + twice)]
    open_now: list[int] = []
    chance.shuffle(steps)
    for i, begin in steps:
        rows, same, _ = pieces[i]
        if begin:
            holds.note(rows)
            open_now.append(i)
        elif i in open_now:
            open_now.remove(i)
            ending = rows if same else rows.copy()
            if not holds.strike(ending):
                holds.counts[ending] -= 1
        expected[:] = 0
        for held in open_now:
            expected[pieces[held][0]] += 1
        if chance.random() < 0.2:
            assert (holds.counts == expected).all()
    assert (holds.counts == expected).all()


def test_a_hold_on_nothing_is_not_kept_in_mind() -> None:
    holds = Holds(SIZE)
    for _ in range(1000):
        holds.note(np.zeros(0, np.int64))
    assert not holds._noted
