"""Uses that are processed together give the same result as one after the other."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.index.index import DRAM, Index
from kvtide.plan.history import History
from kvtide.plan.policy import Duel
from kvtide.plan.recorded_uses import Marks, Use, Uses

TRAITS = (3,)
NAMES: Marks = np.random.default_rng(2).integers(1 << 63, (1 << 64) - 1, 40, np.uint64)
# some share an entry of the table, also within one chain
NAMES[20:30] = NAMES[:10] ^ np.uint64(1 << 50)
NAMES[11] = NAMES[10] ^ np.uint64(1 << 50)


@st.composite
def uses(draw: st.DrawFn) -> list[Use]:
    found, now = list[Use](), 0
    for _ in range(draw(st.integers(1, 30))):
        length = draw(st.integers(1, 8))
        first = draw(st.integers(0, len(NAMES) - length))
        now += length
        numbers = st.lists(st.integers(0, 2), min_size=length, max_size=length)
        flags = st.lists(st.booleans(), min_size=length, max_size=length)
        found.append(
            Use(
                NAMES[first : first + length],
                np.array(draw(numbers), np.int16),
                np.array(draw(numbers), np.int16),
                np.array(draw(flags)),
                np.array(draw(flags)),
                np.array(draw(flags)),
                now,
            )
        )
    return found


@st.composite
def joined(draw: st.DrawFn) -> tuple[list[Use], list[Uses]]:
    """Uses, and the same in a few groups."""
    every = draw(uses())
    cuts = sorted({0, len(every), *draw(st.lists(st.integers(0, len(every)), max_size=3))})
    return every, [Uses(every[first:last]) for first, last in pairwise(cuts)]


@pytest.mark.parametrize("room", [0, 1 << 16], ids=["every name", "a sample"])
@settings(deadline=None)
@given(both=joined())
def test_a_history_remembers_the_same(room: int, both: tuple[list[Use], list[Uses]]) -> None:
    every, groups = both
    one, other = History(TRAITS, 1000), History(TRAITS, 1000)
    for history in (one, other):
        history.fit(room)
    for use in every:
        one.see(Uses([use]))
    for group in groups:
        other.see(group)
    assert one.returns(NAMES).tolist() == other.returns(NAMES).tolist()
    first, second = one.curves(), other.curves()
    for name in ("hits", "time", "rates"):
        np.testing.assert_allclose(getattr(first, name), getattr(second, name), rtol=1e-12)


def _duel() -> Duel:
    duel = Duel(Index(tiers=1), DRAM, lambda: 12)
    duel.learn(History(TRAITS, 1000).curves())
    return duel


@settings(deadline=None)
@given(both=joined())
def test_policies_are_compared_the_same(both: tuple[list[Use], list[Uses]]) -> None:
    every, groups = both
    one, other = _duel(), _duel()
    for use in every:
        one.watch(Uses([use]))
    for group in groups:
        other.watch(group)
    told = [[[lead.hits(span) for span in range(3)] for lead in duel._leads.values()] for duel in (one, other)]
    assert told[0] == told[1]
    assert one._found == other._found


@settings(deadline=None)
@given(uses())
def test_scores_fall_along_each_chain_and_are_the_least_that_do(every: list[Use]) -> None:
    together = Uses(every)
    until = together.times + together.kinds
    falling = together.falling(until)
    for number, use in enumerate(every):
        start = together.starts[number]
        part = slice(start, start + len(use.marks))
        least = until[part].tolist()
        for depth in range(len(least)):
            assert falling[part][depth] + depth == max(least[depth:])
