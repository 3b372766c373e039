"""The curve of all sizes is what a cache of each size finds."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.policies import lru_hits
from kvtide.replay.lru_curve import lru_curve
from kvtide.replay.trace import Trace, TraceRequest, chains
from tests.replay.test_replay import conversations


def branching(seed: int, count: int) -> Trace:
    """Prompts that branch off one another."""
    chance, made = random.Random(seed), list[tuple[int, ...]]()
    for _ in range(count):
        base = chance.choice(made) if made and chance.random() < 0.7 else ()
        made.append((*base[: chance.randrange(len(base) + 1)], *chance.choices(range(3), k=chance.randrange(1, 6))))
    return chains(TraceRequest(float(n), blocks) for n, blocks in enumerate(made))


@settings(max_examples=50, deadline=None)
@given(st.integers(), st.integers(1, 60), st.floats(0, 1))
def test_every_size_finds_what_a_cache_of_it_does(seed: int, count: int, warm: float) -> None:
    trace = branching(seed, count)
    start = int(count * warm)
    curve = lru_curve(trace, start)
    for blocks in range(trace.unique + 2):
        assert curve.hits(blocks) == lru_hits(trace, blocks, start)
    assert curve.hits(trace.unique) == curve.most


def test_the_smallest_size_for_a_number_of_hits_and_where_the_curve_bends() -> None:
    curve = lru_curve(conversations(30, 20), 100)
    for hits in range(1, curve.most + 1):
        blocks = curve.size(hits)
        assert curve.hits(blocks) >= hits > curve.hits(blocks - 1)
    bend = curve.bend(40, 0.9)
    missed = curve.most - curve.hits(40)
    assert curve.hits(bend) - curve.hits(40) >= 0.9 * missed > curve.hits(bend - 1) - curve.hits(40)
    assert curve.bend(10**6, 0.9) == 10**6, "no size finds more than one that holds all"
    assert lru_curve(chains([])).size(5) == 0
