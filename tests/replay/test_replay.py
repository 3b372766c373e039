"""A replay decides as the store does, and its figures add up."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.policies import lru_hits
from kvtide import config
from kvtide.errors import ConfigError, TraceError
from kvtide.plan import usage_tracker
from kvtide.replay.optimum import optimum
from kvtide.replay.plot import svg, sweep_svg
from kvtide.replay.run import ReplayReport, led, replay
from kvtide.replay.speeds import TierSpeeds
from kvtide.replay.sweep import sweep
from kvtide.replay.trace import Trace, TraceRequest, chains

BLOCK = 64 << 10
MIB = 1 << 20
SLOTS = MIB // BLOCK


def conversations(users: int, turns: int, seed: int = 1) -> Trace:
    """Users who come back at random, each time with a few blocks more, over one shared head."""
    chance = random.Random(seed)
    lengths = [1] * users
    found = []
    for number in range(users * turns):
        user = chance.randrange(users)
        lengths[user] = 1 if lengths[user] > 12 else lengths[user] + chance.randint(1, 2)
        found.append(TraceRequest(float(number), (0, *(1000 * user + i for i in range(lengths[user])))))
    return chains(found)


def run(trace: Trace, dram: int, **nvme: Any) -> ReplayReport:
    tiers: dict[str, Any] = {"dram": {"budget": dram * MIB, "segment": MIB, "policy": nvme.pop("dram_policy", "lru")}}
    if nvme:
        tiers["nvme"] = {"path": "replayed", "segment": MIB, **nvme, "budget": nvme["budget"] * MIB}
    return replay(trace, config.read(env={}, **tiers), BLOCK, warm=0.25, speeds=TierSpeeds(1e9, 1e8, 1e7))


def test_lru_is_lru() -> None:
    trace = conversations(30, 20)
    report = run(trace, dram=2)
    assert report.tiers[0].hits == lru_hits(trace, 2 * SLOTS, report.warming)
    assert report.hit_rate == report.tiers[0].hits / report.blocks
    assert report.optimum is not None
    assert report.hit_rate < report.optimum < 1


def test_a_tier_that_holds_everything_is_optimal() -> None:
    trace = conversations(10, 20)
    report = run(trace, dram=1, budget=64)
    assert report.hit_rate == report.optimum
    dram, nvme = report.tiers
    assert dram.hits + nvme.hits == round(report.hit_rate * report.blocks)
    assert nvme.bytes_read == nvme.hits * BLOCK
    assert nvme.evicted == 0
    assert report.seconds["of reads from the colder tier"] == pytest.approx(nvme.bytes_read / 1e8)


def test_what_each_admission_writes() -> None:
    trace = conversations(40, 25)
    reports = {store: run(trace, dram=1, budget=16, store=store) for store in ("through", "second-touch", "eviction")}
    written = {store: report.tiers[1].bytes_written for store, report in reports.items()}
    assert written["second-touch"] < written["eviction"] <= written["through"]
    assert reports["through"].write_amplification == pytest.approx(1.0)
    assert reports["second-touch"].hit_rate < reports["through"].hit_rate


def test_what_never_comes_back_is_not_written_once_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten documents asked for in turn, and between them prompts that nobody asks for again."""
    monkeypatch.setattr(usage_tracker, "_BATCH", 1000)
    prompts = [p for n in range(500) for p in ((0, n % 10, 1, 2, 3, 4), (1, 1000 + n, *range(18)))]
    trace = chains(TraceRequest(float(i), p) for i, p in enumerate(prompts))
    through, ghost = (run(trace, dram=5, budget=16, store=store) for store in ("through", "ghost"))
    assert ghost.tiers[1].bytes_written < through.tiers[1].bytes_written / 2
    assert ghost.hit_rate == through.hit_rate


def test_a_write_budget_holds() -> None:
    trace = conversations(40, 25)
    free = run(trace, dram=1, budget=16)
    limited = run(trace, dram=1, budget=16, write_limit=BLOCK // 4)
    seconds = float(trace.seconds[-1] - trace.seconds[limited.warming])
    assert 0 < limited.tiers[1].bytes_written <= seconds * BLOCK / 4 + 60 * BLOCK
    assert limited.tiers[1].bytes_written < free.tiers[1].bytes_written / 2


@pytest.mark.parametrize("store", ["through", "second-touch"])
def test_real_bytes_are_found_as_often_as_those_that_are_not_there(tmp_path: Path, store: str) -> None:
    trace = conversations(20, 12)
    tiers: dict[str, Any] = {
        "dram": {"budget": MIB, "segment": MIB, "policy": "lru"},
        "nvme": {"path": str(tmp_path / "kv"), "budget": 64 * MIB, "segment": MIB, "store": store},
    }
    real = replay(trace, config.read(env={}, **tiers), BLOCK, real=True)
    simulated_tier = replay(trace, config.read(env={}, **tiers), BLOCK)
    assert real.hit_rate == simulated_tier.hit_rate
    assert [t.hits for t in real.tiers] == [t.hits for t in simulated_tier.tiers]
    assert real.tiers[1].bytes_written == simulated_tier.tiers[1].bytes_written
    for tier in real.tiers:
        assert tier.held_before + tier.bytes_written // BLOCK - tier.evicted == tier.held


def test_an_empty_trace_is_an_error() -> None:
    with pytest.raises(TraceError, match="no request with a full block"):
        replay(chains([]), config.read(env={}), BLOCK)


def test_who_led_is_told_from_request_to_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """One document between many that nobody asks for again: what was learnt does better than LRU."""
    monkeypatch.setattr(usage_tracker, "_BATCH", 500)
    prompts = [p for n in range(400) for p in ((0, n % 10, 1, 2, 3, 4), (1, 1000 + n, *range(18)))]
    trace = chains(TraceRequest(float(i), p) for i, p in enumerate(prompts))
    report = run(trace, dram=5, dram_policy="auto")
    assert report.in_charge[0] == (0, "lru")
    assert [name for _, name in report.in_charge][:2] == ["lru", "reuse"]
    number = report.in_charge[1][0]
    assert 0 < number < report.requests
    assert sum(led(report).values()) == report.requests - report.warming
    picture = svg(report, "x")
    assert picture.count('class="led"') == len([n for n, _ in report.in_charge if n > report.warming]) + 1
    assert "in charge of DRAM" in picture
    alone = run(trace, dram=5, dram_policy="lru")
    assert alone.in_charge == [(0, "lru")]
    assert 'class="led"' not in svg(alone, "x")


def test_requests_of_tenants_find_only_their_own() -> None:
    requests = [TraceRequest(float(i), (1, 2, 3), tenant) for i, tenant in enumerate("aabbab")]
    report = replay(chains(requests), config.read(env={}), BLOCK, warm=0.0)
    assert (report.hits, report.misses, report.unique) == (12, 6, 6)


def test_a_tier_smaller_than_a_block_is_refused() -> None:
    tiers: dict[str, Any] = {"dram": {"budget": 64 * MIB}, "nvme": {"path": "replayed", "budget": 16 * MIB}}
    with pytest.raises(ConfigError, match=r"nvme\.budget is 16 MiB, less than one block, which takes 32 MiB"):
        replay(conversations(2, 2), config.read(env={}, **tiers), 32 * MIB)


def test_a_sweep_over_one_size_has_a_picture() -> None:
    settings = config.read(env={}, dram={"budget": 2 * MIB, "policy": "lru"})
    found = sweep(conversations(10, 10), [("2MiB", settings)], BLOCK, 0.4, True, False, lambda _: lambda _: None)
    assert list(found.rows[0].hit_rates) == ["lru"]
    picture = sweep_svg(found, "a <trace>")
    assert picture.count("<polyline") == 1
    assert "a &lt;trace&gt;" in picture
    assert "nan" not in picture


def test_the_picture_shows_tiers_and_optimum() -> None:
    picture = svg(run(conversations(10, 20), dram=1, budget=16), "a <trace>")
    assert picture.startswith("<svg")
    assert picture.count("<polygon") == 2
    assert "a &lt;trace&gt;" in picture
    assert "optimum" in picture


# -- the optimum --------------------------------------------------------------------------------------------


def most_hits(trace: Trace, capacity: int) -> int:
    """By trying everything: what stays after each request is any set of whole prefixes seen so far."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    parents: dict[int, int] = {}
    for chain in trace.blocks:
        blocks = chain.tolist()
        parents.update(zip(blocks[1:], blocks, strict=False))
        after: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            found = next((i for i, b in enumerate(blocks) if b not in held), len(blocks))
            pool = sorted(held | set(blocks))
            for number in range(1 << len(pool)):
                kept = frozenset(b for i, b in enumerate(pool) if number >> i & 1)
                if len(kept) <= capacity and all(parents.get(b, b) in kept for b in kept):
                    after[kept] = max(after.get(kept, 0), hits + found)
        states = after
    return max(states.values())


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=6),
    st.integers(0, 4),
)
def test_no_cache_of_that_size_finds_more(prompts: list[list[int]], capacity: int) -> None:
    trace = chains(TraceRequest(float(i), tuple(p)) for i, p in enumerate(prompts))
    assert optimum(trace, capacity).hits == most_hits(trace, capacity)


def test_the_optimum_counts_only_what_it_is_asked_to() -> None:
    trace = chains(TraceRequest(float(i), (1, 2, 3)) for i in range(5))
    assert [optimum(trace, 3, start).hits for start in range(5)] == [12, 12, 9, 6, 3]
    assert optimum(trace, 3).kept == 3
    assert optimum(trace, 1).hits == 4
    assert np.isclose(optimum(trace, 0).hits, 0)
