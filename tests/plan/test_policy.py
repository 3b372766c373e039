"""Every policy keeps the contract; what is learned pays where blocks come back, and costs nothing where it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvtide.index.index import DRAM, Index
from kvtide.plan import policy
from kvtide.plan.policy import Duel, Lru, Policy, Reuse
from kvtide.plan.shadow import Shadow
from kvtide.testing.policy import Forest, PolicyContract


class TestLru(PolicyContract):
    def make(self, index: Index, room: Callable[[], int]) -> Policy:
        return Lru(index)


class TestReuse(PolicyContract):
    def make(self, index: Index, room: Callable[[], int]) -> Policy:
        return Reuse(index, DRAM, room)


class TestDuel(PolicyContract):
    def make(self, index: Index, room: Callable[[], int]) -> Policy:
        return Duel(index, DRAM, room)


class TestDuelThatFollowsReuse(PolicyContract):
    def make(self, index: Index, room: Callable[[], int]) -> Policy:
        duel = Duel(index, DRAM, room)
        duel.leader = duel.reuse
        return duel


def make(name: str) -> Callable[[Index, Callable[[], int]], Policy]:
    return lambda index, room: policy.make(name, index, DRAM, room)


def scans(rounds: int) -> Iterator[tuple[int, ...]]:
    """Ten documents that are asked for in turn, and between any two of them a long prompt that never comes again."""
    for number in range(rounds):
        yield (0, number % 10, 1, 2)
        yield (1, 1000 + number, *range(18))


def turns(rounds: int) -> Iterator[tuple[int, ...]]:
    """Conversations, one after another: what was used last is what comes next."""
    for number in range(rounds):
        for length in range(1, 9):
            yield (number, *range(length))


def hits(name: str, prompts: Iterator[tuple[int, ...]], room: int, skip: int) -> tuple[int, Policy]:
    """Blocks found in a tier of ``room`` blocks, after the first ``skip`` prompts."""
    forest = Forest(make(name), room)
    found = 0
    for number, path in enumerate(prompts):
        here = forest.ask(path)
        forest.store(path)
        if forest.uses.learns and not number % 50:
            forest.uses.learn()
        found += here if number >= skip else 0
    return found, forest.policy


def test_what_comes_back_outlasts_what_does_not() -> None:
    lru, _ = hits("lru", scans(600), 80, 800)
    reuse, _ = hits("reuse", scans(600), 80, 800)
    assert reuse > 2 * lru


def test_the_duel_follows_the_better_one() -> None:
    lru, _ = hits("lru", scans(600), 80, 800)
    auto, followed = hits("auto", scans(600), 80, 800)
    assert isinstance(followed, Duel)
    assert followed.leader is followed.reuse
    assert auto > 2 * lru


def test_the_duel_loses_nothing_where_the_last_used_comes_next() -> None:
    lru, _ = hits("lru", turns(150), 40, 400)
    auto, _ = hits("auto", turns(150), 40, 400)
    assert auto >= lru


def test_a_shadow_keeps_the_highest_scores_and_the_chain_in_hand() -> None:
    shadow = Shadow()
    assert shadow.use([1, 2, 3], [10, 9, 8], [True] * 3, 4) == 0
    assert shadow.use([1, 2], [5, 4], [True, False], 4) == 1, "only what counts is counted"
    assert shadow.use([4, 5], [2, 1], [True] * 2, 4) == 0
    assert [n for n in range(1, 6) if n in shadow] == [1, 2, 4, 5], "3 had the lowest score of the others"
    assert shadow.use([6, 7, 8, 9, 10, 11], [6, 5, 4, 3, 2, 1], [True] * 6, 4) == 0
    assert [n for n in range(1, 12) if n in shadow] == [6, 7, 8, 9], "a chain longer than the tier keeps its head"


@pytest.mark.parametrize(("name", "kind"), [("lru", Lru), ("reuse", Reuse), ("auto", Duel)])
def test_every_policy_of_the_configuration_has_a_class(name: str, kind: type) -> None:
    assert type(make(name)(Index(tiers=1), lambda: 1)) is kind
