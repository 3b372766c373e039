"""The default policy is not fooled: by traffic in which nothing can be learned, nor by traffic that changes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from kvtide import config
from kvtide.replay.run import replay
from kvtide.replay.trace import Trace, TraceRequest, chains

BLOCK = 64 << 10


def hits(trace: Trace, blocks: int, policy: str) -> int:
    """In the last three quarters, of a tier of so many blocks."""
    dram = {"budget": blocks * BLOCK, "segment": 64 * BLOCK, "policy": policy}
    return replay(trace, config.read(env={}, dram=dram), BLOCK, warm=0.25, best=False).tiers[0].hits


def trace(prompts: Iterator[tuple[int, ...]]) -> Trace:
    return chains(TraceRequest(float(number), path) for number, path in enumerate(prompts))


def by_chance(seed: int) -> Iterator[tuple[int, ...]]:
    """Prompts of 40 blocks of which half come back, by pure chance: much seems to be learned, and is not true."""
    chance = random.Random(seed)
    for number in range(1000):
        back = number - int(chance.expovariate(0.02)) - 1
        yield (back if back > 0 and chance.random() < 0.5 else number, *range(39))


def scans(rounds: int) -> Iterator[tuple[int, ...]]:
    """Ten documents that are asked for in turn, and between any two of them a long prompt that never comes again."""
    for number in range(rounds):
        yield (0, number % 10, *range(10))
        yield (1, 1000 + number, *range(38))


def turns(rounds: int) -> Iterator[tuple[int, ...]]:
    """Sixteen conversations at a time, each longer by some blocks at every turn."""
    for number in range(rounds):
        for length in range(1, 9):
            for user in range(16):
                yield (2, number, user, *range(3 * length))


@pytest.mark.parametrize("seed", range(4))
def test_what_comes_back_by_chance_costs_nothing(seed: int) -> None:
    """A prompt's blocks come back together: forty of them are one observation, not forty."""
    prompts = trace(by_chance(seed))
    assert hits(prompts, 1280, "auto") >= 0.99 * hits(prompts, 1280, "lru")


def test_it_gains_where_something_can_be_learned() -> None:
    prompts = trace(scans(1500))
    assert hits(prompts, 192, "auto") > 2 * hits(prompts, 192, "lru") + 100


def test_it_goes_back_to_least_recently_used_when_the_traffic_changes() -> None:
    before, after = list(scans(800)), list(turns(16))
    prompts = trace(iter(before + after))
    assert hits(prompts, 192, "auto") >= hits(prompts, 192, "lru")
    alone = trace(iter(after))
    assert hits(alone, 192, "auto") >= 0.99 * hits(alone, 192, "lru")
