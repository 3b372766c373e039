"""Every policy keeps the contract; what is learned pays where blocks come back, and costs nothing where it does not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.index.index import DRAM, Index
from kvtide.plan import policy
from kvtide.plan.policy import Duel, Lru, Policy, Reuse
from kvtide.plan.policy_lead import Lead
from kvtide.plan.shadow_cache import Shadow
from kvtide.plan.usage_tracker import Turn
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
        duel.leader = "reuse"
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
    assert followed.leader != "lru"
    assert auto > 2 * lru


def test_the_duel_loses_nothing_where_the_last_used_comes_next() -> None:
    lru, _ = hits("lru", turns(150), 40, 400)
    auto, _ = hits("auto", turns(150), 40, 400)
    assert auto >= lru


def test_a_lead_is_counted_in_requests() -> None:
    """A lead of 85 blocks, of prompts of 41, is less than one standard deviation; of prompts of one block, nine."""
    long, short = Lead(1), Lead(1)
    for difference in [41] * 4 + [-41] * 2 + [3]:
        long.add(difference, [1.0])
    for _ in range(85):
        short.add(1, [1.0])
    assert long.hits(0) == short.hits(0) == 85
    assert long.deviations(0) < 1
    assert short.deviations(0) > 6


def test_a_lead_is_forgotten_sooner_in_a_short_span() -> None:
    lead = Lead(2)
    for _ in range(300):
        lead.add(10, [0.9, 0.999])
    for _ in range(100):
        lead.add(-10, [0.9, 0.999])
    assert lead.hits(0) < -90
    assert lead.hits(1) > 0
    assert lead.deviations(0) < -1


def test_terms_that_were_given_when_room_was_cheap_end_when_it_is_dear() -> None:
    """A tier is filled by prompts that come back late, if at all; then others come back soon and need the room."""
    forest = Forest(make("reuse"), 400)
    for number in range(300):
        forest.ask((0, number))
        forest.store((0, number))
    forest.uses.learn()
    assert isinstance(forest.policy, Reuse)
    found = 0
    for round_ in range(60):
        for number in range(30):
            path = (1, number, *range(8))
            here = forest.ask(path)
            found += here if round_ >= 30 else 0
            forest.store(path)
        forest.uses.learn()
    assert found > 0.95 * 30 * 30 * 10


def test_a_shadow_keeps_the_highest_scores_and_the_chain_in_hand() -> None:
    shadow = Shadow()

    def use(names: list[int], scores: list[int], counted: list[bool]) -> int:
        return shadow.use(names, scores, [0] * len(names), counted, 4)

    assert use([1, 2, 3], [10, 9, 8], [True] * 3) == 0
    assert use([1, 2], [5, 4], [True, False]) == 1, "only what counts is counted"
    assert use([4, 5], [2, 1], [True] * 2) == 0
    assert [n for n in range(1, 6) if n in shadow] == [1, 2, 4, 5], "3 had the lowest score of the others"
    assert use([6, 7, 8, 9, 10, 11], [6, 5, 4, 3, 2, 1], [True] * 6) == 0
    assert [n for n in range(1, 12) if n in shadow] == [6, 7, 8, 9], "a chain longer than the tier keeps its head"


class _SimpleShadow:
    """The same cache, which looks at every name whenever one has to go."""

    def __init__(self) -> None:
        self.scores: dict[int, int] = {}
        self.since: dict[int, int] = {}

    def use(self, names: list[int], scores: list[int], since: list[int], counted: list[bool], capacity: int) -> int:
        hits = sum(asked for name, asked in zip(names, counted, strict=True) if name in self.scores)
        for name, score, time in zip(names, scores, since, strict=True):
            self.scores[name] = max(score, self.scores.get(name, score))
            self.since[name] = time
        while len(self.scores) > capacity:
            others = [name for name in self.scores if name not in names] or list(self.scores)
            del self.scores[min(others, key=lambda name: (self.scores[name], name))]
        return hits

    def bound(self, longest: int) -> None:
        self.scores = {name: min(score, self.since[name] + longest) for name, score in self.scores.items()}


class _ShadowUse(NamedTuple):
    prompt: int
    first: int
    """A use may begin inside its chain."""
    length: int
    stay: int
    chance: int
    room: int
    """The tier's size may change at any time."""


@settings(deadline=None)
@given(
    st.lists(
        st.builds(
            _ShadowUse,
            st.integers(0, 5),
            st.sampled_from([0, 0, 0, 1, 3]),
            st.integers(1, 6),
            st.sampled_from([0, 0, 10, 40]),
            st.integers(0, 9),
            st.sampled_from([1, 4, 7, 10]),
        ),
        max_size=60,
    ),
)
def test_a_shadow_keeps_what_a_simple_cache_keeps(uses: list[_ShadowUse]) -> None:
    shadow, simple, now = Shadow(), _SimpleShadow(), 0
    for prompt, first, length, stay, chance, room in uses:
        now += length
        names = [10 * prompt + first + depth for depth in range(length)]
        since = [now - depth for depth in range(length)]
        scores = [now + stay - depth for depth in range(length)]
        counted = [depth % 2 == chance % 2 for depth in range(length)]
        assert shadow.use(names, scores, since, counted, room) == simple.use(names, scores, since, counted, room)
        if chance == 0:
            shadow.bound(10)
            simple.bound(10)
        assert {name for name in range(60) if name in shadow} == set(simple.scores)
        assert len(shadow) == len(simple.scores)


def test_a_shadow_ends_with_scores_that_rise_along_a_chain() -> None:
    shadow = Shadow()
    shadow.use([3, 4], [90, 89], [0, 0], [True] * 2, 4)
    shadow.use([1, 2, 3, 4], [50, 49, 48, 47], [0] * 4, [True] * 4, 4)
    shadow.use([5, 6, 7, 8], [10, 9, 8, 7], [0] * 4, [True] * 4, 4)
    assert [n for n in range(1, 9) if n in shadow] == [5, 6, 7, 8]


def test_a_tier_that_shrinks_below_the_chain_in_hand() -> None:
    shadow = Shadow()
    for scores, capacity in (([6, 5, 4, 3, 2, 1], 10), ([6, 5, 4, 3, 2, 1], 4)):
        shadow.use([1, 2, 3, 4, 5, 6], scores, [0] * 6, [True] * 6, capacity)
    assert [n for n in range(1, 7) if n in shadow] == [1, 2, 3, 4]


def test_a_shadow_has_the_whole_prefix_of_what_it_has_with_hints_too() -> None:
    forest = Forest(make("auto"), 12)
    forest.store((90,))
    forest.uses.learn()
    for path in ((1, 2, 3, 4), (1, 2, 3, 5, 6)):
        forest.store(path)
    for path in ((1, 2, 3, 4), (1, 2, 3, 5, 6)):  # they share three blocks, which get one hint
        forest.expect(path, "tool", None)
    forest.store(tuple(range(20, 29)))
    forest.uses.learn()
    duel = forest.policy
    assert isinstance(duel, Duel)
    marked = {path: int(forest.index.mark[row]) for path, row in forest.rows.items()}
    for name, shadow in duel._shadows.items():
        for block, mark in marked.items():
            if mark in shadow:
                assert all(marked[block[:end]] in shadow for end in range(1, len(block))), (name, block)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10_000))
def test_learning_ends_where_hinted_conversations_share_a_prompt_and_the_tier_changes(seed: int) -> None:
    chance, room = random.Random(seed), 60
    forest = Forest(lambda index, _: policy.make("auto", index, DRAM, lambda: room), 60)
    live: list[tuple[int, ...]] = [(1000 + number % 3, *range(6), number) for number in range(12)]
    ends: tuple[Turn | None, ...] = (None, "tool", "end")
    for step in range(150):
        room = chance.choice([30, 45, 60])
        number = chance.randrange(len(live))
        live[number] = path = (*live[number], 100 + step)
        forest.ask(path)
        forest.store(path)
        forest.expect(path, chance.choice(ends), None)
        if step % 10 == 0:
            forest.uses.learn()
    assert forest.policy.in_charge in ("lru", "bounded", "reuse")


def test_a_shadow_bounds_what_was_used_long_ago() -> None:
    shadow = Shadow()
    shadow.use([1], [1000], [0], [True], 2)
    shadow.use([2], [30], [20], [True], 2)
    shadow.bound(25)
    shadow.use([3], [40], [21], [True], 2)
    assert [n for n in (1, 2, 3) if n in shadow] == [2, 3], "1 was to stay for long, but was used too long ago"


@pytest.mark.parametrize(("name", "kind"), [("lru", Lru), ("reuse", Reuse), ("auto", Duel)])
def test_every_policy_of_the_configuration_has_a_class(name: str, kind: type) -> None:
    assert type(make(name)(Index(tiers=1), lambda: 1)) is kind
