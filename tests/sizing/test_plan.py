"""The arithmetic keeps its own rules, and the verdicts follow from it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtide.errors import ConfigError, LayoutError, TraceError
from kvtide.plan.prefill import PrefillCost
from kvtide.replay.lru_curve import lru_curve
from kvtide.replay.run import slot_of
from kvtide.sizing.arithmetic import ENGINES, Assumptions, Host, StorageTier
from kvtide.sizing.hardware import GPUS, LINKS, TransferLink, gpu_of, link_of, measured
from kvtide.sizing.models import MODELS, shape_of
from kvtide.sizing.plan import Demand, SizingPlan, plan
from kvtide.sizing.trace import needed
from kvtide.sizing.verdict import WhyHelps
from tests.replay.test_replay import conversations
from tests.sizing.traces import returning_users


def host(model: str, gpus: int = 1) -> Host:
    shape, gpu, assume = shape_of(model), GPUS["h200"], Assumptions()
    return Host(shape, gpu, gpus, LINKS["pcie5"], Host.prefill(shape, gpu, gpus, assume), assume)


def tier(speed: float) -> StorageTier:
    return StorageTier("nvme", TransferLink("a disk", "nvme", speed, 1.0, "given"))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("speed", [0.3e9, 1e9, 3e9])
def test_loading_is_slower_before_the_break_even_and_quicker_after(model: str, speed: float) -> None:
    here, disk = host(model), tier(speed)
    even = here.break_even(disk)
    assert even is not None
    assert here.load(even, disk) <= here.compute(even)
    for tokens in (even * 2, even * 5):
        assert here.load(tokens, disk) <= here.compute(tokens)
    if even > 256:
        assert here.load(even - 256, disk) > here.compute(even - 256)


def test_the_break_even_of_full_attention_is_the_formula() -> None:
    """a n + b n^2 / 2 = c n, so n = 2 (c - a) / b."""
    here, disk = host("llama-3.1-8b"), tier(2.34e9)
    each = here.shape.token_bytes / 2.34e9
    exact = 2 * (each - here.cost.per_token) / here.cost.per_token_context
    assert here.break_even(disk) == math.ceil(exact / 256) * 256


def test_no_break_even_without_attention_that_grows() -> None:
    shape = shape_of("llama-3.1-8b")
    here = Host(shape, GPUS["h200"], 1, LINKS["pcie5"], PrefillCost(1e-5), Assumptions())
    assert here.break_even(tier(1e9)) is None


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gemma-3-27b", "qwen3-next-80b-a3b", "deepseek-v3"])
@pytest.mark.parametrize("tokens", [256, 4096, 100_000])
def test_both_at_once_is_never_slower_than_the_quicker_one(model: str, tokens: int) -> None:
    here, disk = host(model), tier(2e9)
    seconds, loaded = here.both(tokens, disk)
    assert seconds <= min(here.compute(tokens), here.load(tokens, disk)) * (1 + 1e-12)
    assert 0 <= loaded <= tokens
    slow, none = here.both(tokens, tier(1.0))
    assert none == 0
    assert slow == pytest.approx(here.compute(tokens))


def test_the_slowest_of_tier_and_bus_decides() -> None:
    here = host("llama-3.1-8b")
    assert here.load(8192, tier(1e12)) == here.kv(8192) / LINKS["pcie5"].speed
    assert here.load(8192, tier(1e9)) == here.kv(8192) / 1e9


def test_more_gpus_divide_heads_but_not_a_latent() -> None:
    """8 KV heads on 8 GPUs: each bus carries an eighth. MLA's latent goes to every GPU. On 16 GPUs a head is on two."""
    fast = tier(1e15)
    assert host("llama-3.1-70b", 8).load(8192, fast) == pytest.approx(host("llama-3.1-70b").load(8192, fast) / 8)
    assert host("deepseek-v3", 8).load(8192, fast) == pytest.approx(host("deepseek-v3").load(8192, fast))
    assert host("llama-3.1-70b", 16).kv_on_gpus(8192) == 2 * host("llama-3.1-70b").kv(8192)


def test_a_tier_keeps_every_window_and_every_state() -> None:
    """Gemma's 52 layers with a window: all 512 blocks of 131,072 tokens are stored, 4 are loaded. Full attention has no
    such difference."""
    gemma = host("gemma-3-27b")
    block = gemma.shape.layout.geometry["window"].footprint
    assert gemma.stored(131_072) - gemma.kv(131_072) == (512 - 4) * block
    nexts = host("qwen3-next-80b-a3b")
    assert nexts.stored(2560) - nexts.kv(2560) == 9 * nexts.shape.layout.geometry["state"].footprint
    assert host("llama-3.1-8b").stored(131_072) == host("llama-3.1-8b").kv(131_072)


def one(model: str = "llama-3.1-8b", tokens: int = 8192, **demand: Any) -> dict[str, tuple[bool, str]]:
    found = plan(model, contexts=[tokens], demand=Demand(**demand))
    return {verdict.tier: (verdict.helps, verdict.why) for verdict in found.verdicts}


def test_long_contexts_of_many_users_are_helped() -> None:
    found = plan("llama-3.1-70b", contexts=[131_072], demand=Demand(users=8))
    assert [verdict.why for verdict in found.verdicts] == [WhyHelps.FASTER] * 3
    assert found.gpus == 2
    assert found.gpus_chosen
    crowded = plan("llama-3.1-70b", contexts=[131_072], demand=Demand(users=20)).verdicts[0]
    assert crowded.helps
    assert "It holds 12 of 20 contexts" in crowded.reason


def test_what_has_no_reuse_or_fits_is_not_helped() -> None:
    assert set(one(hit_rate=0).values()) == {(False, WhyHelps.NO_REUSE)}
    assert set(one(users=8).values()) == {(False, WhyHelps.FITS_IN_GPU)}


def test_many_small_contexts_gain_little() -> None:
    assert set(one(tokens=512, users=100_000).values()) == {(False, WhyHelps.LITTLE)}


def test_small_contexts_are_worth_it_if_they_spare_the_gpus() -> None:
    """500,000 hits of 512 tokens an hour: 139 x 11.5 ms of computing each second are 1.6 GPUs; a disk at 6.2 GB/s
    delivers 92 of them a second, DRAM over PCIe 5 798."""
    assert one(tokens=512, requests_per_hour=500_000) == {
        "dram": (True, WhyHelps.THROUGHPUT),
        "nvme": (False, WhyHelps.SATURATED),
        "network": (True, WhyHelps.THROUGHPUT),
    }
    assert set(one(tokens=512, requests_per_hour=5000).values()) == {(False, WhyHelps.LITTLE)}


def test_a_voice_agent_keeps_its_context_in_gpu_memory() -> None:
    found = plan("llama-3.1-8b", contexts=[4096], demand=Demand(users=500, target=0.3, at_once=32))
    assert [verdict.why for verdict in found.verdicts] == [WhyHelps.TOO_LATE, WhyHelps.LITTLE, WhyHelps.TOO_LATE]
    assert "keep it in GPU memory" in found.verdicts[0].reason
    alone = plan("llama-3.1-8b", contexts=[4096], demand=Demand(users=500, target=0.3)).verdicts[0]
    assert alone.helps
    assert re.search(r" times as fast; \d+ loads at once stay within 300 ms, so keep the contexts ", alone.reason)
    assert "nothing is within the target" in (
        plan("llama-3.1-8b", contexts=[4096], demand=Demand(target=0.01)).verdicts[0].reason
    )


def test_a_disk_slower_than_computing_does_not_help() -> None:
    found = plan("llama-3.1-8b", contexts=[8192], nvme="2GB").verdicts[1]
    assert (found.tier, found.helps, found.why) == ("nvme", False, WhyHelps.SLOWER)
    assert "from 100,096 tokens on it is quicker" in found.reason


def test_both_at_once_is_said_of_engines_that_can_and_where_something_is_loaded() -> None:
    vllm = plan("llama-3.1-8b", contexts=[8192], nvme="2GB").verdicts[1]
    assert "Both at once" not in vllm.reason
    able = ENGINES["transformers"]
    assert "Both at once, with 41% loaded, takes 218 ms" in (
        plan("llama-3.1-8b", contexts=[8192], nvme="2GB", assume=able).verdicts[1].reason
    )
    slow = plan("llama-3.1-8b", contexts=[8192], nvme="100MB", assume=able)
    assert slow.contexts[0].tiers["nvme"].both_loaded == 0
    assert "Both at once" not in slow.verdicts[1].reason


def test_a_model_that_kvtide_refuses_is_not_helped() -> None:
    assert set(one("qwen3-next-80b-a3b", 131_072).values()) == {(False, WhyHelps.REFUSED)}
    found = plan("qwen3-next-80b-a3b", demand=Demand(requests_per_hour=1000))
    assert [saved.gpu_hours for saved in found.savings] == [0, 0, 0]


def test_a_tier_that_holds_no_context_is_not_helpful() -> None:
    small = plan(
        "llama-3.1-70b", contexts=[131_072], dram_capacity="16GiB", demand=Demand(requests_per_hour=100, hit_rate=0.5)
    )
    assert [verdict.why for verdict in small.verdicts] == [WhyHelps.TOO_SMALL, WhyHelps.FASTER, WhyHelps.FASTER]
    assert small.verdicts[0].reason == "it holds 16 GiB, and one context of 131,072 tokens takes 40 GiB"
    assert small.savings[0].gpu_hours == 0 < small.savings[1].gpu_hours


def test_a_tier_with_too_little_speed_helps_in_part() -> None:
    found = plan("llama-3.1-70b", contexts=[131_072], demand=Demand(requests_per_hour=1000, hit_rate=0.9))
    nvme = found.verdicts[1]
    assert (nvme.helps, nvme.why) == (True, WhyHelps.LIMITED)
    assert "of 900; the others are computed" in nvme.reason


def test_savings_are_of_the_prices_given_and_of_no_others() -> None:
    """1,000 prompts, of which 600 are found, each of 32.9 s on 2 GPUs: 10.96 hours; NVMe delivers 520 of them."""
    demand = Demand(requests_per_hour=1000, hit_rate=0.6, gpu_price=2.0, dram_price=0.01)
    found = plan("llama-3.1-70b", contexts=[131_072], demand=demand)
    dram, nvme, _ = found.savings
    compute = found.contexts[0].compute
    assert dram.gpu_hours == pytest.approx(600 * compute * 2 / 3600)
    assert dram.worth == pytest.approx(2 * dram.gpu_hours)
    assert dram.cost == pytest.approx(5.12)
    assert nvme.gpu_hours == pytest.approx(3600 / found.contexts[0].tiers["nvme"].load * compute * 2 / 3600)
    assert nvme.cost is None
    assert plan("llama-3.1-70b").savings == []


def test_a_measured_cost_replaces_the_estimate() -> None:
    given = plan("llama-3.1-8b", contexts=[10_000], prefill=PrefillCost(1e-5, 1e-9))
    assert given.contexts[0].compute == pytest.approx(1e-5 * 1e4 + 1e-9 * 1e8 / 2)
    assert given.cost_given
    assert plan("llama-3.1-8b", contexts=[10_000], prefill=20_000.0).contexts[0].compute == pytest.approx(0.5)


def test_a_plan_is_json_and_back() -> None:
    found = plan("gpt-oss-120b", "h100", prefill=1e9, nvme="100MB", network=None)
    assert found.tiers[1].break_even is None
    assert msgspec.json.decode(msgspec.json.encode(found), type=SizingPlan) == found


def test_hardware_of_ones_own() -> None:
    assert link_of("6.5GB", "nvme").speed == 6.5e9
    assert gpu_of("H200") is GPUS["h200"]
    assert {kind: link.speed > 0 for kind, link in measured().items()} == {"dram": True, "nvme": True}
    for link in LINKS.values():
        assert link.source
        assert 0 < link.share <= 1
    assert all(gpu.source and LINKS[gpu.link].kind == "bus" for gpu in GPUS.values())


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: plan("llama-3.1-8b", "h20"), "did you mean h200"),
        (lambda: plan("llama-3.1-8b", nvme="nvme-gen6"), "did you mean nvme-gen5"),
        (lambda: plan("llama-3.1-8b", bus="fast"), "choose one of pcie4"),
        (lambda: plan("llama-3.1-8b", contexts=[]), "at least one"),
        (lambda: plan("llama-3.1-8b", contexts=[0]), "a context of 0 tokens"),
        (lambda: plan("llama-3.1-8b", gpus=0), "gpus is 0"),
        (lambda: plan("llama-3.1-8b", prefill=PrefillCost(0.0)), "cost of computing is 0"),
        (lambda: plan("llama-3.1-8b", drives=0), "drives is 0"),
        (lambda: plan("llama-3.1-8b", assume=Assumptions(matmul=2)), "matmul is 2"),
        (lambda: plan("llama-3.1-8b", assume=Assumptions(engine_seconds=-1)), "engine_seconds is -1"),
        (lambda: plan("llama-3.1-8b", demand=Demand(hit_rate=60)), "a hit rate of 60"),
        (lambda: plan("llama-3.1-8b", demand=Demand(target=0)), "a target of 0"),
        (lambda: plan("llama-3.1-8b", demand=Demand(users=0)), "users is 0"),
        (lambda: plan("llama-3.1-8b", demand=Demand(gpu_price=-1, requests_per_hour=1)), "gpu_price is -1"),
        (lambda: plan("llama-3.1-8b", demand=Demand(gpu_price=2)), "without requests_per_hour"),
        (lambda: plan("llama-3.1-8b", dram_capacity="much"), "'much' is not a size"),
        (lambda: plan("llama-3.1-8b", kv_dtype="int3"), "int3 is not supported"),
    ],
)
def test_what_means_nothing_is_refused(wrong: Callable[[], Any], words: str) -> None:
    with pytest.raises((ConfigError, LayoutError), match=words):
        wrong()


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # where no kvtide.toml is
    return returning_users(tmp_path / "trace.jsonl")


def test_a_trace_says_how_many_bytes_are_needed(trace: Path) -> None:
    shape = shape_of("llama-3.1-8b")
    found = needed(trace, shape, 0.5, policy="lru")
    assert (found.block_tokens, found.block_bytes) == (256, shape.block_bytes)
    assert found.reached >= 0.5
    below = [nbytes for nbytes, rate in found.tried if rate < 0.5]
    assert below
    assert max(below) < found.bytes <= max(1.1 * max(below), max(below) + slot_of(shape.block_bytes))


@pytest.mark.parametrize("policy", ["lru", "auto", "reuse"])
def test_the_search_ends_where_a_tenth_less_does_not_suffice(policy: str) -> None:
    """Traffic in which sizes differ much, unlike in the trace above."""
    found = conversations(40, 25)._replace(block_tokens=256)
    for hit_rate in (0.3, 0.5, 0.7):
        result = needed(found, shape_of("llama-3.1-8b"), hit_rate, policy)
        slot = slot_of(result.block_bytes)
        below = [nbytes for nbytes, rate in result.tried if rate < hit_rate]
        assert result.reached >= hit_rate
        assert dict(result.tried)[result.bytes] == result.reached
        assert below == [] or result.bytes <= max(1.1 * max(below), max(below) + slot)
        assert len(result.tried) <= 6
        if policy == "lru":
            curve = lru_curve(found, int(0.4 * len(found.blocks)))
            asked = sum(map(len, found.blocks[int(0.4 * len(found.blocks)) :]))
            assert curve.hits(result.bytes // slot - 1) < hit_rate * asked, "the smallest of all"


def test_a_policy_as_good_as_possible_is_replayed_once(trace: Path) -> None:
    """Everything that can be found is found with room for every block: where the best possible cache begins too."""
    found = needed(trace, shape_of("llama-3.1-8b"), 0.7)
    assert found.reached >= 0.7
    assert len(found.tried) <= 6


def test_a_hit_rate_that_no_memory_reaches_is_refused(trace: Path) -> None:
    with pytest.raises(ConfigError, match="nothing is ever evicted reaches"):
        needed(trace, shape_of("llama-3.1-8b"), 0.99)
    with pytest.raises(ConfigError, match="a hit rate of 1 is wanted"):
        needed(trace, shape_of("llama-3.1-8b"), 1.0)
    with pytest.raises(TraceError):
        needed(trace.parent / "missing", shape_of("llama-3.1-8b"), 0.5)
