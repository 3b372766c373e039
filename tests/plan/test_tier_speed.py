"""Speed from measurement."""

from __future__ import annotations

import pytest

from kvtide.plan.tier_speed import Speed


def test_before_any_measurement_it_is_a_guess_and_says_so() -> None:
    speed = Speed()
    assert speed.statistics().measured == 0
    assert speed.seconds(1 << 30) > 0


def test_the_first_measurement_replaces_the_guess() -> None:
    speed = Speed()
    speed.measured(1000, 2.0)
    assert speed.seconds(500) == pytest.approx(1.0)
    assert (speed.statistics().bytes_per_second, speed.statistics().measured) == (500.0, 1)


def test_it_follows_a_change_and_does_not_jump_at_one_outlier() -> None:
    speed = Speed()
    speed.measured(1000, 1.0)
    speed.measured(10_000, 1.0)
    assert 1000 < speed.statistics().bytes_per_second < 5500
    for _ in range(30):
        speed.measured(10_000, 1.0)
    assert speed.statistics().bytes_per_second == pytest.approx(10_000, rel=0.01)


@pytest.mark.parametrize(("nbytes", "seconds"), [(0, 1.0), (-1, 1.0), (1, 0.0), (1, -1.0)])
def test_what_cannot_be_a_measurement_is_ignored(nbytes: int, seconds: float) -> None:
    speed = Speed()
    before = speed.statistics()
    speed.measured(nbytes, seconds)
    assert speed.statistics() == before
