"""The tests that tell whether two samples differ: right where it can be counted, silent about chance, and not blind."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from kvtide.benchmarks.difference import Sample, difference, kolmogorov_smirnov, mann_whitney

TESTS = [mann_whitney, kolmogorov_smirnov]


def rank_sum(a: Sample, b: Sample) -> float:
    return abs(float((a[:, None] > b).sum() + (a[:, None] == b).sum() / 2) - len(a) * len(b) / 2)


def farthest(a: Sample, b: Sample) -> float:
    at = np.concatenate([a, b])[:, None]
    return float(np.abs((a <= at).mean(1) - (b <= at).mean(1)).max())


@pytest.mark.parametrize(
    ("test", "statistic", "step"),
    [(mann_whitney, rank_sum, 1), (mann_whitney, rank_sum, 8), (kolmogorov_smirnov, farthest, 1)],
    ids=["larger", "larger, ties", "other"],
)
@pytest.mark.parametrize("shift", [0, 10, 20])
def test_p_is_the_part_of_all_divisions_that_differ_as_much(
    test: Callable[[Sample, Sample], float], statistic: Callable[[Sample, Sample], float], step: int, shift: int
) -> None:
    """Two thousand of all ways to divide the same values into two samples. How far apart two samples are comes in
    steps, and p may be anywhere on a step."""
    random = np.random.default_rng(0)
    values = np.concatenate([random.permutation(60), random.permutation(60) + shift]) // step * 1.0
    here = statistic(values[:60], values[60:])
    far = np.array([statistic(d[:60], d[60:]) for d in (random.permutation(values) for _ in range(2000))])
    more, as_much = (far > here + 1e-9).mean(), (far > here - 1e-9).mean()
    assert more - 0.03 < test(values[:60], values[60:]) < as_much + 0.03


@pytest.mark.parametrize("test", TESTS)
def test_chance_is_found_as_often_as_it_should_be(test: Callable[[Sample, Sample], float]) -> None:
    random = np.random.default_rng(1)
    found = [test(random.lognormal(size=300), random.lognormal(size=300)) for _ in range(1000)]
    for level in (0.01, 0.05, 0.5):
        assert np.mean(np.array(found) < level) == pytest.approx(level, abs=4 * math.sqrt(level / 1000))


def test_a_small_difference_is_found_and_measured() -> None:
    random = np.random.default_rng(2)
    a, b = random.lognormal(size=10_000), random.lognormal(size=10_000) + 0.1
    found = difference(a, b)
    assert found.p < 1e-6
    assert found.interval[0] < 0.1 < found.interval[1]
    assert found.interval[0] > 0
    assert "Mann-Whitney" in found.told("us")


def test_another_spread_around_the_same_middle_is_found() -> None:
    random = np.random.default_rng(3)
    found = difference(random.normal(size=5000), 1.3 * random.normal(size=5000))
    assert found.larger > 0.01
    assert found.other < 1e-6
    assert found.p < 1e-6


def test_equal_values_do_not_differ() -> None:
    same = np.ones(50)
    assert difference(same, same).p == 1.0
