"""Blocks are given to nodes that have them, and to few of them."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kvtide.plan.assign_blocks import assign_blocks

HOLDERS = st.lists(st.lists(st.integers(0, 6), unique=True, max_size=4), max_size=40)


@given(HOLDERS, st.integers(1, 8), st.lists(st.floats(0.1, 10), min_size=7, max_size=7))
def test_each_block_goes_to_one_node_that_has_it(holders: list[list[int]], most: int, costs: list[float]) -> None:
    found = assign_blocks(holders, lambda node, blocks: 1 + costs[node] * blocks, most)
    given_out = [number for some in found.values() for number in some]
    assert len(given_out) == len(set(given_out))
    assert all(node in holders[number] for node, some in found.items() for number in some)
    assert len(found) <= most
    if most >= 7:
        assert set(given_out) == {number for number, nodes in enumerate(holders) if nodes}


@given(st.lists(st.lists(st.integers(1, 6), unique=True, max_size=4), min_size=1, max_size=40))
def test_a_prompt_that_one_node_has_whole_stays_there(others: list[list[int]]) -> None:
    """All nodes are equally fast, so the fixed cost of a second one is not worth it."""
    holders = [[*some, 0] for some in others]
    found = assign_blocks(holders, lambda node, blocks: 1 + 0.01 * blocks, 8)
    assert len(found) == 1


def test_a_much_faster_node_is_preferred_to_one_that_has_more() -> None:
    holders = [[0, 1]] * 10 + [[0]]
    found = assign_blocks(holders, lambda node, blocks: blocks * (10.0 if node == 0 else 0.1), 8)
    assert found == {1: [*range(10)], 0: [10]}


def test_a_node_that_takes_for_ever_is_not_asked() -> None:
    assert assign_blocks([[0], [0, 1]], lambda node, blocks: math.inf if node == 0 else 1.0, 8) == {1: [1]}
