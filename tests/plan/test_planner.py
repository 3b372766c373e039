"""Load or recompute: the length that is expected to be quickest, against trying them all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide import Group, Kind, Layout
from kvtide.index.index import DRAM, SEALED, Index, Mask, Rows
from kvtide.plan.planner import Plan, Planner, Source
from kvtide.plan.prefill import Prefill, PrefillCost, cost_of
from kvtide.plan.tier_speed import Speed
from kvtide.testing import blocks
from tests.plan.small import LAYOUT, MODEL, SLOTS, Clock, keep, open_store, prompt

NVME = 1
NOWHERE, IN_DRAM, ON_DISK, IN_BOTH = range(4)
KINDS = {
    "full": Group("full", Kind.FULL, 1, 1, 4096, "int8", page=1),
    "near": Group("near", Kind.WINDOW, 1, 1, 8192, "int8", window=3, page=1),
    "mamba": Group("mamba", Kind.STATE, 1, 1, 4096 * 5, "int8", page=1),
    "eagle": Group("eagle", Kind.DRAFT, 1, 1, 4096, "int8", page=1),
}


def known(rate: float, clock: Clock | None = None) -> Speed:
    """A speed that was measured often enough, just now."""
    speed = Speed(clock)
    for _ in range(3):
        speed.measured(int(rate), 1.0)
    return speed


class Case:
    """Blocks here and there, as the planner gets them."""

    def __init__(self, layout: Layout, where: dict[str, list[int]], rate: float) -> None:
        self.layout, self.where, self.rate = layout, where, rate
        self.index = Index(tiers=2)
        self.clock = Clock()
        self.speed = known(rate, self.clock)
        self.planner = Planner(self.index, [Source(NVME, "nvme", self.speed)])
        self.rows: dict[str, Rows] = {}
        whole: dict[str, Mask] = {}
        for name, places in where.items():
            keys = blocks.keys(len(places), name.encode())
            for key, place in zip(keys, places, strict=True):
                if place != NOWHERE:
                    row = self.index.add(key, bytes(32), 0)
                    if place in (IN_DRAM, IN_BOTH):
                        self.index.put(row, DRAM, SEALED, 1)
                    if place in (ON_DISK, IN_BOTH):
                        self.index.put(row, NVME, SEALED, 1)
            self.rows[name] = self.index.rows(keys)
            whole[name] = self.index.usable(self.rows[name], 0.0)
        self.whole = whole

    @property
    def count(self) -> int:
        return len(next(iter(self.rows.values())))

    def usable(self, have: int) -> Mask:
        whole = {n: m.copy() for n, m in self.whole.items()}
        for mask in whole.values():
            mask[:have] = True
        return self.index.lengths(self.layout, self.rows, whole)

    def plan(self, have: int = 0, prefill: Prefill = 0.0, queued: int = 0, limit: int = 1 << 60) -> Plan:
        cost = cost_of(prefill)
        return self.planner.plan(self.layout, self.rows, self.usable(have), have, cost, [queued], limit)

    # -- the same by counting block by block --------------------------------------------------------------

    def needed(self, length: int, have: int) -> list[tuple[str, int]]:
        return [
            (g.name, block)
            for g in self.layout.groups
            for block in g.needs(length, self.layout.block_tokens)
            if block >= have
        ]

    def nbytes(self, wanted: list[tuple[str, int]]) -> int:
        return sum(self.layout.geometry[name].footprint for name, _ in wanted)

    def load_seconds(self, length: int, have: int, queued: int) -> float:
        cold = [(name, b) for name, b in self.needed(length, have) if self.where[name][b] == ON_DISK]
        return (self.nbytes(cold) + queued) / self.rate if cold else 0.0

    def compute_seconds(self, length: int, prefill: PrefillCost) -> float:
        tokens = range(length * self.layout.block_tokens, self.count * self.layout.block_tokens)
        # A token attends to those before it, and half to itself.
        return sum(prefill.per_token + prefill.per_token_context * (token + 0.5) for token in tokens)

    def seconds(self, length: int, have: int, prefill: PrefillCost, queued: int) -> float:
        return self.load_seconds(length, have, queued) + self.compute_seconds(length, prefill)

    def allowed(self, have: int, limit: int) -> list[int]:
        usable = np.flatnonzero(self.usable(have)).tolist()
        return [n for n in usable if self.nbytes(self.needed(n, have)) <= limit]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    names = draw(st.lists(st.sampled_from(["near", "mamba", "eagle"]), max_size=2, unique=True))
    layout = Layout(tuple(KINDS[n] for n in ["full", *names]), draw(st.sampled_from([1, 2, 4])))
    count = draw(st.integers(0, 10))
    # Mostly present: an absent block ends the story early.
    place = st.sampled_from([NOWHERE, IN_DRAM, ON_DISK, IN_BOTH, ON_DISK, IN_DRAM, ON_DISK])
    where = {g.name: draw(st.lists(place, min_size=count, max_size=count)) for g in layout.groups}
    return Case(layout, where, draw(st.sampled_from([1e4, 1e6])))


@given(cases(), st.data())
def test_the_plan_is_the_quickest_of_all_lengths(case: Case, data: st.DataObject) -> None:
    have = data.draw(st.integers(0, case.count))
    per_token, per_context = st.sampled_from([0.0, 1e-3, 0.1, 1.0]), st.sampled_from([0.0, 1e-4, 0.01, 0.1])
    prefill = PrefillCost(data.draw(per_token), data.draw(per_context))
    queued = data.draw(st.sampled_from([0, 50_000]))
    plan = case.plan(have, prefill, queued)
    allowed = [n for n in case.allowed(have, 1 << 60) if n >= have]
    best = min(case.seconds(n, have, prefill, queued) for n in allowed)
    assert plan.blocks in allowed
    assert case.seconds(plan.blocks, have, prefill, queued) == pytest.approx(best)
    longer = [n for n in allowed if n > plan.blocks]
    assert all(case.seconds(n, have, prefill, queued) > best * (1 - 1e-9) for n in longer)
    assert plan.load_seconds == pytest.approx(case.load_seconds(plan.blocks, have, queued))
    assert plan.compute_seconds == pytest.approx(case.compute_seconds(plan.blocks, prefill))
    assert plan.trial is None


@given(cases(), st.data())
def test_without_a_prefill_speed_the_longest_that_fits_is_taken(case: Case, data: st.DataObject) -> None:
    have = data.draw(st.integers(0, case.count))
    limit = data.draw(st.sampled_from([1 << 60, 200_000, 60_000, 1]))
    plan = case.plan(have, limit=limit)
    assert plan.blocks == max(case.allowed(have, limit))
    assert plan.compute_seconds is None
    assert plan.load_seconds == pytest.approx(case.load_seconds(plan.blocks, have, 0))


def full(*places: int, rate: float = 1e4) -> Case:
    return Case(Layout((KINDS["full"],), 1), {"full": list(places)}, rate)


def test_a_disk_hit_that_is_slower_than_computing_is_not_made() -> None:
    case = full(*[IN_DRAM] * 3, *[ON_DISK] * 5)  # 8 KiB a block at 10 kB/s: 0.8 s to load
    assert case.plan(prefill=10.0).blocks == 3, "0.1 s to compute"
    assert case.plan(prefill=1.0).blocks == 8, "1 s to compute"
    assert case.plan(prefill=1.0, queued=100_000).blocks == 3, "others wait before us"


def test_cold_blocks_before_warm_ones_may_be_worth_it() -> None:
    case = full(ON_DISK, *[IN_DRAM] * 20)
    assert case.plan(prefill=10.0).blocks == 21, "0.8 s to load what takes 2.1 s to compute"
    assert full(ON_DISK, IN_DRAM).plan(prefill=10.0).blocks == 0


def test_what_the_caller_has_costs_nothing() -> None:
    case = full(*[ON_DISK] * 4, *[IN_DRAM] * 2)
    assert case.plan(prefill=10.0).blocks == 0
    assert case.plan(have=4, prefill=10.0).blocks == 6


def test_of_equally_quick_lengths_the_longest() -> None:
    # Loading takes exactly as long as computing: 8192 bytes at 8192 a second, one token a second.
    assert full(*[ON_DISK] * 4, rate=8192.0).plan(prefill=1.0).blocks == 4


def test_the_end_of_a_long_prompt_is_worth_a_load_that_its_beginning_is_not() -> None:
    # 0.8 s to load a block; computing one takes 0.2 s at the beginning and 1.2 s at the end.
    case = full(*[ON_DISK] * 21)
    linear, curve = PrefillCost(0.7), PrefillCost(0.2, 0.05)
    assert curve.seconds(0, 21) == pytest.approx(linear.seconds(0, 21), rel=0.1)
    assert case.plan(prefill=linear).blocks == 0
    case = full(*[ON_DISK] * 10, *[NOWHERE] * 11)
    assert case.plan(prefill=curve).blocks == 0, "0.8 s a block, which 0.45 s computes on average"
    case = full(*[IN_DRAM] * 13, *[ON_DISK] * 8)
    assert case.plan(prefill=curve).blocks == 21
    assert case.plan(prefill=linear).blocks == 13


# -- trials -------------------------------------------------------------------------------------------------


def large(speed: Speed, count: int = 200) -> Case:
    """Blocks of 1 MiB on a disk of which ``speed`` is believed."""
    group = Group("full", Kind.FULL, 1, 1, 1 << 19, "int8", page=1)
    case = Case(Layout((group,), 1), {"full": [ON_DISK] * count}, 1.0)
    case.planner = Planner(case.index, [Source(NVME, "nvme", speed)])
    return case


COMPUTE = PrefillCost(1e-3 * 2**20 / 1e6)
"""As fast as a disk of 1 GB/s loads blocks of 1 MiB."""


def test_what_was_never_measured_is_tried_with_a_part_and_then_known() -> None:
    clock = Clock()
    speed = Speed(clock)
    case, quick = large(speed), PrefillCost(COMPUTE.per_token / 1.5)
    plan = case.plan(prefill=quick)
    assert plan.blocks == 32, "32 MiB, though 1 GB/s, as is guessed, were slower than computing"
    assert plan.trial == pytest.approx(quick.seconds(0, 32)), "it may take as long as computing them"
    assert plan.slower == 168
    assert case.plan(prefill=quick).blocks == 0, "one at a time"
    speed.measured(32 << 20, (32 << 20) / 2.2e9)
    plan = case.plan(prefill=quick)
    assert (plan.blocks, plan.trial) == (200, None)


def test_a_belief_that_is_too_low_is_corrected_within_a_few_trials() -> None:
    clock = Clock()
    case = large(speed := known(1e8, clock))
    assert case.plan(prefill=COMPUTE).blocks == 0, "just measured"
    for _ in range(3):
        clock.now += 10
        plan = case.plan(prefill=COMPUTE)
        if plan.blocks:
            speed.measured(plan.blocks << 20, (plan.blocks << 20) / 2.2e9)  # by now the disk is idle again
    plan = case.plan(prefill=COMPUTE)
    assert (plan.blocks, plan.trial) == (200, None)


def test_a_belief_that_is_too_high_is_corrected_by_the_loads_that_it_causes() -> None:
    case = large(speed := known(1e11))
    assert case.plan(prefill=COMPUTE).blocks == 200
    for _ in range(4 * 6):  # a load of 200 MB ends in many measurements
        speed.measured(32 << 20, (32 << 20) / 1e8)
    assert case.plan(prefill=COMPUTE).blocks == 0


def test_a_trial_is_not_repeated_before_its_time() -> None:
    clock = Clock()
    case = large(known(1e8, clock))
    clock.now += 9.9
    assert case.plan(prefill=COMPUTE).trial is None
    clock.now += 0.1
    assert case.plan(prefill=COMPUTE).trial is not None
    for seconds, due in [(0.0, False), (9.9, False), (0.1, True), (5.0, False)]:
        clock.now += seconds
        assert (case.plan(prefill=COMPUTE).trial is not None) is due


def test_nothing_is_tried_where_no_disk_could_be_fast_enough_or_reads_are_under_way() -> None:
    case = large(Speed(Clock()))
    assert case.plan(prefill=PrefillCost(COMPUTE.per_token / 1000)).blocks == 0
    assert case.plan(prefill=COMPUTE, queued=1 << 40).blocks == 0
    assert case.plan(prefill=PrefillCost(COMPUTE.per_token / 2)).trial is not None


@given(cases(), st.data())
def test_a_trial_takes_a_usable_length_beyond_the_best_and_never_more_than_fits(
    case: Case, data: st.DataObject
) -> None:
    case.clock.now += 10
    have = data.draw(st.integers(0, case.count))
    limit = data.draw(st.sampled_from([1 << 60, 200_000, 60_000]))
    prefill = PrefillCost(data.draw(st.sampled_from([1e-6, 1e-3, 0.1])), data.draw(st.sampled_from([0.0, 1e-3])))
    tried = case.plan(have, prefill, limit=limit)
    plain = case.plan(have, prefill, limit=limit)
    assert plain.trial is None
    if tried.trial is None:
        assert tried == plain
    else:
        assert tried.blocks > plain.blocks
        assert tried.blocks in case.allowed(have, limit)
        tokens = case.layout.block_tokens
        assert tried.trial == pytest.approx(prefill.seconds(have * tokens, tried.blocks * tokens))


# -- through the store --------------------------------------------------------------------------------------


def test_a_match_is_cut_to_what_dram_can_hold(tmp_path: Path) -> None:
    path = range(2 * SLOTS)
    with open_store(tmp_path / "kv") as store, store.session(MODEL) as mine:
        for end in range(1, len(path) + 1):
            keep(mine, *path[:end])
            assert store.flush(30)
        with mine.match(prompt(*path)) as match:
            assert match.blocks == SLOTS
            loaded = mine.load(match).wait(30)
            assert loaded.tokens == match.tokens
        with mine.match(prompt(*path), have=SLOTS * LAYOUT.block_tokens) as match:
            assert match.blocks == 2 * SLOTS
            loaded = mine.load(match).wait(30)
            assert (loaded.tokens, loaded.first) == (match.tokens, {"full": SLOTS})
            expected = blocks.content(mine.chain(prompt(*path)).keys(b"full")[SLOTS], len(loaded.blocks[0]))
            assert loaded.blocks[0] == memoryview(expected)  # type: ignore[arg-type]


def test_the_prefill_speed_of_the_call_goes_before_that_of_the_configuration(tmp_path: Path) -> None:
    slow = {"prefill_tokens_per_second": 1e15}
    with open_store(tmp_path / "kv") as store, store.session(MODEL) as mine:
        keep(mine, 1, 2, 3)
    with open_store(tmp_path / "kv", plan=slow) as store, store.session(MODEL) as mine:
        with mine.match(prompt(1, 2, 3)) as match:
            assert match.blocks == 0, "computing is quicker than any disk"
        with mine.match(prompt(1, 2, 3), prefill=1.0) as match:
            assert match.blocks == 3
            assert match.plan.load_seconds > 0
            assert match.plan.compute_seconds == 0.0
        with mine.match(prompt(1, 2, 3), prefill=0) as match:
            assert match.blocks == 3


@pytest.mark.parametrize(
    ("queued", "seconds"), [((0, 0), 4.0), ((8 * 8192, 0), 4.0), ((0, 8192), 5.0), ((80 * 8192, 0), 8.4)]
)
def test_each_tier_counts_with_its_own_speed_and_queue_and_all_at_the_same_time(
    queued: tuple[int, int], seconds: float
) -> None:
    index = Index(tiers=3)
    layout = Layout((KINDS["full"],), 1)
    fast, slow = known(10 * 8192), known(8192)
    keys = blocks.keys(8)
    for i, key in enumerate(keys):
        index.put(index.add(key, bytes(32), i), 1 if i < 4 else 2, SEALED, 1)
    rows = {"full": index.rows(keys)}
    planner = Planner(index, [Source(1, "nvme", fast), Source(2, "files", slow)])
    plan = planner.plan(layout, rows, np.ones(9, np.bool_), 0, None, queued, 1 << 60)
    assert plan.blocks == 8
    assert plan.load_seconds == pytest.approx(seconds)
    # Two tokens a second: the fast ones are worth it, and the slow ones are quicker to compute.
    plan = planner.plan(layout, rows, np.ones(9, np.bool_), 0, PrefillCost(0.5), (0, 0), 1 << 60)
    assert (plan.blocks, plan.slower) == (4, 4)


@pytest.mark.parametrize(("queued", "tier"), [(0, 1), (1 << 30, 2)])
def test_of_two_nodes_the_one_is_expected_that_will_be_read_from(queued: int, tier: int) -> None:
    """The faster one, unless too much is queued there."""
    index = Index(tiers=3)
    row = index.add(blocks.keys(1)[0], bytes(32), 0)
    for number in (1, 2):
        index.put(row, number, SEALED, 1)
    fast, slow = Source(1, "a", known(2e9), True, lambda: queued), Source(2, "b", known(1e9), True)
    assert Planner(index, [fast, slow]).tiers_of(np.array([row])).tolist() == [tier]
