"""What callers say of a prompt's next use: learned from, kept for, bounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvtide import Tenant, config
from kvtide.index.index import DRAM, Index
from kvtide.plan import policy
from kvtide.plan import usage_tracker as usage
from kvtide.plan.eviction_ages import TickClock
from kvtide.plan.expected_use import ExpectedUse
from kvtide.plan.history import Curves
from kvtide.plan.policy import Policy
from kvtide.plan.usage_tracker import Turn
from kvtide.replay.simulation import Simulation
from kvtide.testing.clock import FakeClock
from kvtide.testing.policy import Forest
from tests.plan.small import MODEL, SLOTS, Clock, keep, length, open_store, prompt

ROOM = 40


def make(name: str) -> Callable[[Index, Callable[[], int]], Policy]:
    return lambda index, room: policy.make(name, index, DRAM, room)


def scan(forest: Forest, first: int, count: int) -> None:
    """Prompts of one block that come once, one a second."""
    for number in range(first, first + count):
        forest.clock.advance(1)
        forest.store((number,))


@pytest.mark.parametrize("name", ["lru", "reuse", "auto"])
def test_a_prompt_is_kept_until_its_return_and_then_ages_as_any_other(name: str) -> None:
    forest = Forest(make(name), ROOM)
    scan(forest, 100, 60)
    for path in [(1, 2, 3), (4, 5, 6)]:
        forest.store(path)
    forest.expect((1, 2, 3), None, 60.0)
    scan(forest, 1000, 55)
    assert (4, 5, 6) not in forest.rows
    assert (1, 2, 3) in forest.rows, "it is not back before 60 further uses"
    scan(forest, 2000, 70)
    assert (1, 2, 3) not in forest.rows
    assert (1,) not in forest.rows


@pytest.mark.parametrize("name", ["lru", "reuse"])
def test_what_comes_back_later_than_the_tier_can_wait_is_not_kept(name: str) -> None:
    forest = Forest(make(name), ROOM)
    scan(forest, 100, 60)
    forest.store((1, 2, 3))
    before = forest.scores()
    forest.expect((1, 2, 3), None, 10_000.0)
    assert forest.scores() == before


@pytest.mark.parametrize("name", ["lru", "reuse"])
def test_a_flood_of_hints_keeps_a_quarter_of_the_tier(name: str) -> None:
    forest = Forest(make(name), ROOM)
    scan(forest, 100, 60)
    for number in range(ROOM):
        forest.store((1, number))
        for _ in range(3):
            forest.expect((1, number), None, 30.0)
    forest.expect((1, *range(20)), None, 30.0)
    now = forest.uses.now()
    column = forest.index.used if name == "lru" else forest.index.until[DRAM]
    assert 0 < np.count_nonzero(column > now) <= ROOM // 4


def test_a_hint_is_learned_from_once_for_each_use() -> None:
    forest = Forest(make("reuse"), ROOM)
    forest.store((1, 2))
    turns: list[Turn] = ["tool", "end"] * 5000
    for turn in turns:
        forest.expect((1, 2), turn, None)
    assert len(forest.uses._recorded) == 2, "the store, and one hint"
    forest.ask((1, 2))
    forest.expect((1, 2), "end", None)
    assert len(forest.uses._recorded) == 4


def test_without_hints_kinds_are_those_of_no_hint() -> None:
    forest = Forest(make("reuse"), ROOM)
    forest.store((1, 2))
    forest.ask((1, 2))
    kinds = forest.index.kind[forest.chain((1, 2))]
    forest.expect((1, 2), "tool", None)
    hinted = forest.index.kind[forest.chain((1, 2))]
    assert (kinds < usage._WITHOUT_HINT).all()
    assert (hinted >= usage._WITHOUT_HINT).all()
    forest.ask((1, 2))
    assert (forest.index.kind[forest.chain((1, 2))] < usage._WITHOUT_HINT).all(), "a use begins anew"


@pytest.mark.parametrize("end", [0, 1])
def test_each_end_of_a_turn_has_kinds_of_its_own(end: int) -> None:
    kinds = np.arange(usage._WITHOUT_HINT, dtype=np.int16)
    hinted = usage._with_hint(kinds, end)
    assert hinted.min() >= usage._WITHOUT_HINT
    assert hinted.max() < math.prod(usage._TRAITS)
    assert ((hinted // usage._OTHERS - usage._RETURNS) // usage._ENDS == end).all()
    assert (hinted % usage._OTHERS == kinds % usage._OTHERS).all()


def test_curves_of_what_is_not_told_yet_are_those_of_what_it_becomes() -> None:
    kinds = math.prod(usage._TRAITS)
    random = np.random.default_rng(1)
    hits = np.sort(random.random((kinds, 5)), axis=1)
    rates = np.zeros(kinds)
    rates[0] = 1.0
    tool, end = (int(usage._with_hint(np.zeros(1, np.int16), number)[0]) for number in (0, 1))
    rates[tool], rates[end] = 0.25, 0.5
    curves = Curves(hits, hits.copy(), rates)
    mixed = usage._after_hint(curves).hits
    assert mixed[0] == pytest.approx(0.25 * hits[0] + 0.25 * hits[tool] + 0.5 * hits[end])
    assert (mixed[1:] == hits[1:]).all()
    cut = usage._until_hint(curves).hits
    assert cut[0].max() <= 0.95 * 0.75
    assert (cut[1:] == hits[1:]).all(), "nothing is hinted of the others"


def test_a_hint_that_comes_before_the_last_blocks_are_written_is_not_lost() -> None:
    with open_store(dram={"policy": "reuse"}) as store, store.session(MODEL) as session:
        keep(session, 1)
        with session.reserve(prompt(1, 2, 3), start=1) as reservation:
            session.expect(prompt(1, 2, 3), turn="end")
            reservation.seal()
        rows = store.index.rows(session.chain(prompt(1, 2, 3)).keys(b"full"))
        assert ((store.index.kind[rows] // usage._OTHERS - usage._RETURNS) // usage._ENDS == 1).all()
        keep(session, 1, 4)
        assert store.index.kind[store.index.rows(session.chain(prompt(1, 4)).keys(b"full"))[1]] < usage._WITHOUT_HINT


def tools(rounds: int) -> Iterator[tuple[tuple[int, ...], Turn]]:
    """Prompts of one shape: those that end in a tool's call come back, after many others, and the others do not."""
    for number in range(rounds):
        yield (0, number, 0, 0), "tool"
        for other in range(4):
            yield (1, 4 * number + other, 0, 0), "end"
        if number >= 10:
            yield (0, number - 10, 0, 0), "end"


def hits(hinted: bool) -> int:
    forest = Forest(make("reuse"), 100)
    found = 0
    for number, (path, turn) in enumerate(tools(600)):
        here = forest.ask(path)
        forest.store(path)
        if hinted:
            forest.expect(path, turn, None)
        if not number % 50:
            forest.uses.learn()
        found += here - 1 if here and number >= 1800 else 0
    return found


def test_reuse_learns_which_ends_of_a_turn_come_back() -> None:
    assert hits(hinted=True) > 1.3 * max(1, hits(hinted=False))


def test_the_rate_of_uses_is_that_of_the_last_minute() -> None:
    clock = FakeClock()
    tick_clock = TickClock(clock)
    assert tick_clock.rate(100) == 0, "not known yet"
    for second in range(600):
        tick_clock.note(second)
        clock.advance(1)
    assert tick_clock.rate(600) == pytest.approx(1.0, rel=0.05)
    for second in range(60):
        tick_clock.note(600 + 10 * second)
        clock.advance(1)
    assert tick_clock.rate(1200) == pytest.approx(10.0, rel=0.1)
    clock.advance(600)
    assert tick_clock.rate(1200) < 1


@pytest.mark.parametrize("name", ["lru", "reuse", "auto"])
def test_a_store_keeps_what_is_expected_though_its_queue_of_victims_is_old(name: str) -> None:
    clock = Clock()
    with open_store(clock=clock, dram={"policy": name}) as store, store.session(MODEL) as session:

        def scan(first: int, count: int) -> None:
            for number in range(first, first + count):
                clock.now += 1
                keep(session, number)

        scan(100, 2 * SLOTS)
        keep(session, 1, 2)
        session.expect(prompt(1, 2), turn="tool", returns_in=SLOTS - 2)
        keep(session, 3, 4)
        scan(1000, SLOTS - 2)
        assert store.index.row(session.chain(prompt(1, 2)).keys(b"full")[1]) > 0
        assert store.index.row(session.chain(prompt(3, 4)).keys(b"full")[1]) == 0 or name != "lru"
        assert length(session, 1, 2) == 2
        assert store.statistics().counts["hints: the turn ended in a tool"] == 1


def test_a_hint_does_not_take_another_tenants_share() -> None:
    kept = []
    for hinted in (False, True):
        clock = Clock()
        with open_store(clock=clock, dram={"policy": "lru"}) as store:
            mine, theirs = store.session(MODEL), store.session(MODEL, Tenant("other", b"0" * 32))
            for number in range(SLOTS // 2):
                clock.now += 1
                keep(theirs, number)
            for number in range(4 * SLOTS):
                clock.now += 1
                keep(mine, number)
                if hinted:
                    mine.expect(prompt(number), turn="tool", returns_in=SLOTS / 2)
            kept.append(sum(bool(length(theirs, number)) for number in range(SLOTS // 2)))
    without, hinted_others = kept
    assert hinted_others == without >= SLOTS // 2 - 1


def test_a_replay_tells_what_its_trace_knows() -> None:
    world = Simulation(config.read(env={}, dram={"budget": "1MiB", "segment": "1MiB", "policy": "lru"}), 64 << 10)
    for number in range(32):
        world.clock.now += 1
        world.request([1000 + number])
    world.request([1, 2], "", "tool", 12.0)
    for number in range(13):
        world.clock.now += 1
        world.request([2000 + number])
    world.clock.now += 1
    plain = Simulation(config.read(env={}, dram={"budget": "1MiB", "segment": "1MiB", "policy": "lru"}), 64 << 10)
    assert plain.request([1, 2], turn="end")["dram"] == 0
    assert world.request([1, 2])["dram"] == 2
    assert world.pipeline.counts["hints: the turn ended in a tool"] == 1


@pytest.mark.parametrize("name", ["lru", "auto", "reuse"])
def test_the_row_of_a_block_that_was_expected_and_dropped_keeps_nothing_of_it(name: str) -> None:
    """Else a new block there would outrank its own parent."""
    clock = Clock()
    with open_store(clock=clock, dram={"policy": name}) as store, store.session(MODEL) as session:
        for number in range(100, 100 + 2 * SLOTS):
            clock.now += 1
            keep(session, number)
        keep(session, 70)
        keep(session, 1, 2)
        session.expect(prompt(1, 2), returns_in=SLOTS - 2)
        session.drop(prompt(1, 2))
        keep(session, 70, 7)
        rows = store.index.rows(session.chain(prompt(70, 7)).keys(b"full"))
        parent, child = store.index.used[rows].tolist()
        assert parent > child


def test_a_prompt_that_is_hinted_again_is_counted_once() -> None:
    """Somebody who is always back early must not use up what may be kept for all."""
    ahead, column = ExpectedUse(), np.zeros(2000, np.int64)
    rows = np.arange(1, 51)
    for turn in range(20):
        now = 20 * turn
        column[rows] = np.maximum(column[rows], np.arange(now, now - 50, -1))
        assert len(ahead.keep(column, rows, now, now + 600, 1000)) == 50
    assert len(ahead.keep(column, np.arange(100, 150), 400, 900, 1000)) == 50


def test_hinting_again_does_not_keep_more_than_a_quarter() -> None:
    ahead, column = ExpectedUse(), np.zeros(2000, np.int64)
    for now in range(0, 3000, 100):
        for first in range(0, 1000, 50):  # each of them over and over
            ahead.keep(column, np.arange(first, first + 50), now, now + 150, 1000)
        assert np.count_nonzero(column > now) <= 250
