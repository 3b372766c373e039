"""The figures of a report agree with each other, whatever the trace, the policies and the sizes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide import config
from kvtide.replay.compare import policies
from kvtide.replay.optimum import optimum
from kvtide.replay.run import ReplayReport, led, replay
from kvtide.replay.trace import Trace, TraceRequest, chains

BLOCK = 64 << 10
MIB = 1 << 20
STORES = ("through", "second-touch", "ghost", "eviction")

prompts = st.tuples(st.integers(0, 5), st.integers(1, 24), st.integers(0, 24), st.sampled_from(["", "a", "b"]))
"""A document, how much of it is asked for, what follows it, and whose it is."""


def trace_of(found: list[tuple[int, int, int, str]]) -> Trace:
    return chains(
        TraceRequest(
            float(i), (*(100 * head + n for n in range(length)), *(10_000 * i + n for n in range(more))), tenant
        )
        for i, (head, length, more, tenant) in enumerate(found)
    )


def check(report: ReplayReport, trace: Trace) -> None:
    counted = trace.blocks[report.warming :]
    assert report.blocks == sum(len(blocks) for blocks in counted)
    assert report.hits + report.misses == report.blocks
    assert report.hits == sum(tier.hits for tier in report.tiers)
    assert report.hit_rate == report.hits / report.blocks
    every = optimum(trace, sum(tier.blocks for tier in report.tiers), report.warming)
    assert report.hits <= every.hits
    assert report.optimum == every.hits / report.blocks
    for tier in report.tiers:
        assert tier.hit_rate == tier.hits / report.blocks
        assert tier.held_before + tier.bytes_written // report.block_bytes - tier.evicted == tier.held
        assert max(tier.held_before, tier.held) <= tier.blocks
        assert tier.bytes_read % report.block_bytes == tier.bytes_written % report.block_bytes == 0
    dram, *below = report.tiers
    assert dram.bytes_read == report.hits * report.block_bytes
    computed = dram.bytes_written
    for tier in below:
        assert tier.bytes_read == tier.hits * report.block_bytes
        computed -= tier.bytes_read
        assert report.write_amplification * computed == pytest.approx(tier.bytes_written if computed else 0)
    assert computed <= report.misses * report.block_bytes
    assert sum(led(report).values()) == len(counted)
    assert [number for number, _ in report.in_charge] == sorted({number for number, _ in report.in_charge})


@settings(max_examples=60, deadline=None)
@given(
    found=st.lists(prompts, min_size=2, max_size=60),
    dram=st.integers(1, 4),
    nvme=st.sampled_from([0, 16, 17]),
    policy=st.sampled_from(policies()),
    cold=st.sampled_from(policies()),
    store=st.sampled_from(STORES),
    warm=st.sampled_from([0.0, 0.4, 0.9]),
    block=st.sampled_from([BLOCK, 100_000, MIB]),
)
def test_the_figures_of_a_report_agree(
    found: list[tuple[int, int, int, str]],
    dram: int,
    nvme: int,
    policy: str,
    cold: str,
    store: str,
    warm: float,
    block: int,
) -> None:
    trace = trace_of(found)
    tiers: dict[str, Any] = {"dram": {"budget": dram * MIB, "segment": MIB, "policy": policy}}
    if nvme:
        path = {"path": "replayed", "budget": nvme * MIB, "segment": MIB}
        tiers["nvme"] = {**path, "policy": cold, "store": store}
    check(replay(trace, config.read(env={}, **tiers), block, warm), trace)


def test_hit_rates_depend_on_blocks_and_not_on_their_bytes() -> None:
    trace = trace_of([(n * 7 % 6, 24, 24, "") for n in range(60)])
    hits = set()
    for block in (MIB, 64 * MIB, 1024 * MIB):
        settings = config.read(env={}, dram={"budget": 200 * block, "policy": "lru"})
        hits.add(replay(trace, settings, block, best=False).hits)
    assert len(hits) == 1
