"""Load or recompute: the length that is expected to be quickest, against trying them all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide import Group, Kind, Layout
from kvtide.index.index import DRAM, SEALED, Index, Mask, Rows
from kvtide.plan.cost import Speed
from kvtide.plan.planner import Plan, Planner, Source
from kvtide.testing import blocks
from tests.plan.small import LAYOUT, MODEL, SLOTS, keep, open_store, prompt

NVME = 1
NOWHERE, IN_DRAM, ON_DISK, IN_BOTH = range(4)
KINDS = {
    "full": Group("full", Kind.FULL, 1, 1, 4096, "int8", page=1),
    "near": Group("near", Kind.WINDOW, 1, 1, 8192, "int8", window=3, page=1),
    "mamba": Group("mamba", Kind.STATE, 1, 1, 4096 * 5, "int8", page=1),
    "eagle": Group("eagle", Kind.DRAFT, 1, 1, 4096, "int8", page=1),
}


class Case:
    """Blocks here and there, as the planner gets them."""

    def __init__(self, layout: Layout, where: dict[str, list[int]], rate: float) -> None:
        self.layout, self.where, self.rate = layout, where, rate
        self.index = Index(tiers=2)
        speed = Speed()
        speed.measured(int(rate), 1.0)
        self.planner = Planner(self.index, [Source(NVME, "nvme", speed)])
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

    def plan(self, have: int = 0, prefill: float = 0.0, queued: int = 0, limit: int = 1 << 60) -> Plan:
        return self.planner.plan(self.layout, self.rows, self.usable(have), have, prefill, [queued], limit)

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

    def seconds(self, length: int, have: int, prefill: float, queued: int) -> float:
        rest = (self.count - length) * self.layout.block_tokens / prefill
        return self.load_seconds(length, have, queued) + rest

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
    prefill = data.draw(st.sampled_from([1.0, 10.0, 1000.0]))
    queued = data.draw(st.sampled_from([0, 50_000]))
    plan = case.plan(have, prefill, queued)
    allowed = [n for n in case.allowed(have, 1 << 60) if n >= have]
    best = min(case.seconds(n, have, prefill, queued) for n in allowed)
    assert plan.blocks in allowed
    assert case.seconds(plan.blocks, have, prefill, queued) == pytest.approx(best)
    longer = [n for n in allowed if n > plan.blocks]
    assert all(case.seconds(n, have, prefill, queued) > best * (1 - 1e-9) for n in longer)
    assert plan.load_seconds == pytest.approx(case.load_seconds(plan.blocks, have, queued))
    assert plan.compute_seconds == pytest.approx((case.count - plan.blocks) * case.layout.block_tokens / prefill)


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
    fast, slow = Speed(), Speed()
    fast.measured(10 * 8192, 1.0)
    slow.measured(8192, 1.0)
    keys = blocks.keys(8)
    for i, key in enumerate(keys):
        index.put(index.add(key, bytes(32), i), 1 if i < 4 else 2, SEALED, 1)
    rows = {"full": index.rows(keys)}
    planner = Planner(index, [Source(1, "nvme", fast), Source(2, "files", slow)])
    plan = planner.plan(layout, rows, np.ones(9, np.bool_), 0, 0.0, queued, 1 << 60)
    assert plan.blocks == 8
    assert plan.load_seconds == pytest.approx(seconds)
    # Two tokens a second: the fast ones are worth it, and the slow ones are quicker to compute.
    plan = planner.plan(layout, rows, np.ones(9, np.bool_), 0, 2.0, (0, 0), 1 << 60)
    assert (plan.blocks, plan.slower) == (4, 4)
