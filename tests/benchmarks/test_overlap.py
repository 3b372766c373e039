"""Where the curves of computing and loading meet."""

from __future__ import annotations

import pytest

from kvtide.benchmarks.overlap import crossing
from kvtide.errors import ConfigError


def test_curves_meet_where_they_have_all_tokens_between_them() -> None:
    assert crossing([(10.0, 100)], [(10.0, 100)], 100) == (5.0, 50)
    assert crossing([(30.0, 100)], [(10.0, 100)], 100) == (7.5, 25)
    # Computing slows down with the tokens before, and nothing is loaded in the first second.
    assert crossing([(1.0, 40), (3.0, 60), (9.0, 100)], [(1.0, 0), (3.0, 40), (6.0, 100)], 100) == (3.0, 60)


def test_curves_that_do_not_meet_are_no_measurement() -> None:
    with pytest.raises(ConfigError, match="of 100 tokens 40 were computed and 50 loaded"):
        crossing([(1.0, 40)], [(1.0, 50)], 100)
