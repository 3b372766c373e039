"""What computing a prompt costs, learned from what an engine did."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import LayoutError
from kvtide.plan.prefill import PrefillCost, PrefillFit, cost_of, reach

TRUTH = PrefillCost(3e-5, 9e-10)


def learned(
    parts: list[tuple[int, int]], truth: PrefillCost = TRUTH, noise: float = 0.0, odd: float = 0.0
) -> PrefillCost:
    """What is believed after an engine has computed those parts of prompts. A share of them takes 100 times as long."""
    rng, fit = random.Random(1), PrefillFit()
    for start, stop in parts:
        seconds = truth.seconds(start, stop) * rng.uniform(1 - noise, 1 + noise)
        fit.add(stop - start, reach(start, stop), seconds * (100 if rng.random() < odd else 1))
    assert fit.cost is not None
    return fit.cost


def chunks(length: int, size: int = 2048) -> list[tuple[int, int]]:
    return [(start, min(start + size, length)) for start in range(0, length, size)]


@given(st.integers(0, 300), st.integers(0, 300))
def test_it_is_the_sum_over_all_tokens(first: int, second: int) -> None:
    start, stop = sorted((first, second))
    each = [TRUTH.per_token + TRUTH.per_token_context * (token + 0.5) for token in range(start, stop)]
    assert TRUTH.seconds(start, stop) == pytest.approx(sum(each))
    assert TRUTH.seconds(np.array([start, stop]), stop).tolist() == pytest.approx([sum(each), 0.0])


def test_a_plain_speed_is_a_cost_without_attention() -> None:
    assert cost_of(2000.0) == PrefillCost(1 / 2000)
    assert cost_of(0.0) is None
    assert cost_of(TRUTH) is TRUTH
    for speed in (float("inf"), 5e-324):
        cost = cost_of(speed)
        assert cost is not None
        assert 0 <= cost.seconds(0, 1 << 20) < float("inf")


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "1"])
def test_what_is_no_time_is_refused(value: float) -> None:
    with pytest.raises(LayoutError, match="per_token is"):
        PrefillCost(value)
    with pytest.raises(LayoutError, match="per_token_context is"):
        PrefillCost(1.0, value)


def test_both_parts_are_learned_from_one_long_prompt() -> None:
    found = learned(chunks(131_072))
    assert found.per_token == pytest.approx(TRUTH.per_token, rel=1e-3)
    assert found.per_token_context == pytest.approx(TRUTH.per_token_context, rel=1e-3)


def test_steps_in_which_something_is_compiled_do_not_matter() -> None:
    found = learned(chunks(131_072) * 2, noise=0.05, odd=0.15)
    for tokens in (8_192, 32_768, 131_072):
        assert found.seconds(0, tokens) == pytest.approx(TRUTH.seconds(0, tokens), rel=0.1)


def test_the_slow_first_call_is_forgotten_with_the_second() -> None:
    fit = PrefillFit()
    fit.add(512, reach(0, 512), 30.0)
    fit.add(512, reach(0, 512), 0.1)
    assert fit.cost == PrefillCost(0.1 / 512)


def test_short_prompts_say_nothing_of_long_ones() -> None:
    """Their noise must not: the second part would count a hundred times as much at the end of a long prompt."""
    parts = [(start, start + 600) for start in range(0, 1200, 20)]
    assert learned(parts, PrefillCost(3e-5), noise=0.2).per_token_context == 0.0
    assert learned(chunks(2048 * 5)).per_token_context == 0.0, "too few"


def test_calls_of_the_same_length_are_a_plain_speed() -> None:
    found = learned([(0, 4096)] * 64)
    assert found.per_token == pytest.approx(TRUTH.seconds(0, 4096) / 4096)
    assert found.per_token_context == 0.0


def test_it_follows_an_engine_that_becomes_slower() -> None:
    slower = PrefillCost(2 * TRUTH.per_token, 2 * TRUTH.per_token_context)
    fit = PrefillFit()
    for truth in (TRUTH, slower):
        for start, stop in chunks(131_072):
            fit.add(stop - start, reach(start, stop), truth.seconds(start, stop))
    assert fit.cost is not None
    assert fit.cost.seconds(0, 131_072) == pytest.approx(slower.seconds(0, 131_072), rel=0.05)


@given(
    st.lists(
        st.tuples(st.integers(1, 1 << 20), st.floats(0, 1e14), st.floats(1e-9, 1e6)),
        min_size=1,
        max_size=100,
    )
)
def test_whatever_was_seen_the_cost_is_finite_and_not_negative(seen: list[tuple[int, float, float]]) -> None:
    fit = PrefillFit()
    for one in seen:
        fit.add(*one)
    assert fit.cost is not None
    assert 0 <= fit.cost.seconds(0, 1 << 20) < float("inf")


def test_what_cannot_have_been_is_not_learned() -> None:
    fit = PrefillFit()
    for one in [(0, 0.0, 1.0), (10, -1.0, 1.0), (10, 1.0, 0.0), (10, 1.0, float("nan")), (10, 1.0, float("inf"))]:
        fit.add(*one)
    assert fit.cost is None
