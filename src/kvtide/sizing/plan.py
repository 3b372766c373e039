"""``plan``: will a cache outside GPU memory help this model on this hardware, and what does it need?

Call it from a notebook, or use ``kvtide plan``::

    from kvtide.sizing.plan import Demand, plan

    report = plan("llama-3.1-70b", gpu="h200", contexts=[8192, 131072], demand=Demand(users=8))
    print(report.verdicts[0].reason)
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvtide.errors import ConfigError
from kvtide.plan.prefill import Prefill, cost_of
from kvtide.sizing.arithmetic import Assumptions, Host, StorageTier
from kvtide.sizing.hardware import TransferLink, gpu_of, link_of
from kvtide.sizing.models import ModelShape, shape_of
from kvtide.sizing.verdict import Demand, Saving, TierVerdict, judge, saving
from kvtide.units import parse_size

__all__ = ["CONTEXTS", "ContextPlan", "Demand", "PlannedTier", "SizingPlan", "TierTimes", "plan"]

CONTEXTS = (8192, 32_768, 131_072)


class TierTimes(msgspec.Struct, frozen=True):
    """A prompt of one length, found in one tier. Times are in seconds."""

    load: float
    first_token: float
    both: float
    """First token when the front is computed while the rest is loaded, which not every engine can
    (``Assumptions.overlaps``)."""
    both_loaded: int
    """Tokens that are loaded then."""
    fit: int | None
    """Contexts of this length that fit; None: not limited."""
    loads_per_second: float
    """How many such prompts the tier can deliver each second."""
    decode_tokens_per_second: float
    """If KV stayed in the tier and were read for each token: tokens per second of one request."""


class ContextPlan(msgspec.Struct, frozen=True):
    """Prompts of one length."""

    tokens: int
    kv_bytes: int
    """What a load reads."""
    stored_bytes: int
    """What a tier keeps: more than that with windows and states."""
    compute: float
    """Seconds of the GPUs."""
    first_token_computed: float
    first_token_gpu: float
    """If its KV is still in GPU memory."""
    decode_tokens_per_second: float
    """Of one request, with its KV in GPU memory."""
    fit_in_gpu: int
    break_even_speed: float
    """Bytes per second at which loading is as fast as computing."""
    tiers: dict[str, TierTimes]


class PlannedTier(msgspec.Struct, frozen=True):
    name: str
    link: str
    source: str
    speed: float
    """Bytes per second, all drives or ports together."""
    capacity: float | None
    break_even: int | None
    """Tokens from which on loading is at least as fast as computing; None: never."""


class SizingPlan(msgspec.Struct, frozen=True):
    """What ``plan`` computes. Sizes are in bytes, times in seconds."""

    model: str
    model_source: str
    kv_dtype: str
    parameters: float
    multiplied: float
    weights: float
    token_bytes: int
    """KV by which a token makes a context longer."""
    token_bytes_fp8: int
    block_tokens: int
    block_bytes: int
    gpu: str
    gpu_source: str
    gpus: int
    gpus_chosen: bool
    """Whether their number was chosen here: the fewest that hold the weights."""
    bus: str
    bus_speed: float
    """Of each GPU."""
    kv_memory: float
    """GPU memory left for KV, of all GPUs; negative: the weights do not fit."""
    per_token: float
    per_token_context: float
    """The cost of a prompt: seconds per token, and per token and token of context before it."""
    cost_given: bool
    assumptions: Assumptions
    tiers: list[PlannedTier]
    contexts: list[ContextPlan]
    verdicts: list[TierVerdict]
    savings: list[Saving]
    """For the last of ``contexts``, if the requests of an hour are given."""


def plan(
    model: str,
    gpu: str = "h200",
    *,
    gpus: int | None = None,
    kv_dtype: str = "auto",
    contexts: Sequence[int] = CONTEXTS,
    bus: str | None = None,
    dram: str | TransferLink = "ddr5-12",
    dram_capacity: str | int = "512GiB",
    nvme: str | TransferLink = "nvme-gen4",
    drives: int = 1,
    nvme_capacity: str | int = "4TB",
    network: str | None = "100gbe",
    prefill: Prefill | None = None,
    assume: Assumptions | None = None,
    demand: Demand | None = None,
) -> SizingPlan:
    """Plan KV-cache tiers for ``model`` on ``gpus`` of ``gpu``.

    ``model`` is a name of the built-in table, a config.json, its folder, or a name in the Hugging Face cache. Links and
    disks are names of the table of hardware or speeds such as "6.5GB" (a second). ``prefill`` replaces the estimated
    cost of computing by a measured one: a ``PrefillCost``, or tokens per second. ``demand`` describes the requests, and
    decides the verdicts. Raises ConfigError or LayoutError, which say what to give instead.
    """
    assume, demand = assume or Assumptions(), demand or Demand()
    _check(gpus, contexts, drives, demand, assume)
    shape, card = shape_of(model, kv_dtype), gpu_of(gpu)
    count = gpus or _enough(shape, card.memory * assume.usable)
    cost = None if prefill is None else cost_of(prefill)
    if cost is not None and cost.per_token <= 0:
        raise ConfigError("the given cost of computing is 0 seconds a token: give a measured one, or none")
    host = Host(
        shape, card, count, link_of(bus or card.link, "bus"), cost or Host.prefill(shape, card, count, assume), assume
    )
    tiers = [
        StorageTier("dram", _link(dram, "dram"), 1, parse_size(dram_capacity)),
        StorageTier("nvme", _link(nvme, "nvme"), drives, parse_size(nvme_capacity)),
        *([] if network is None else [StorageTier("network", _link(network, "network"))]),
    ]
    longest = max(contexts)
    return SizingPlan(
        model=shape.name,
        model_source=shape.source,
        kv_dtype=shape.layout.groups[0].dtype,
        parameters=shape.parameters,
        multiplied=shape.multiplied,
        weights=shape.weights,
        token_bytes=shape.token_bytes,
        token_bytes_fp8=shape_of(model, "fp8").token_bytes,
        block_tokens=shape.layout.block_tokens,
        block_bytes=shape.block_bytes,
        gpu=card.name,
        gpu_source=card.source,
        gpus=count,
        gpus_chosen=gpus is None,
        bus=host.bus.name,
        bus_speed=host.bus.speed,
        kv_memory=host.kv_memory,
        per_token=host.cost.per_token,
        per_token_context=host.cost.per_token_context,
        cost_given=cost is not None,
        assumptions=assume,
        tiers=[PlannedTier(t.name, t.link.name, t.link.source, t.speed, t.capacity, host.break_even(t)) for t in tiers],
        contexts=[_at(host, tokens, tiers) for tokens in sorted(set(contexts))],
        verdicts=[judge(host, tier, longest, demand) for tier in tiers],
        savings=[saving(host, tier, longest, demand) for tier in tiers] if demand.requests_per_hour else [],
    )


def _link(given: str | TransferLink, kind: str) -> TransferLink:
    return given if isinstance(given, TransferLink) else link_of(given, kind)


def _check(gpus: int | None, contexts: Sequence[int], drives: int, demand: Demand, assume: Assumptions) -> None:
    if not contexts:
        raise ConfigError("no length of a prompt is given: give at least one, 8192 say")
    for tokens in contexts:
        if not 1 <= tokens <= 1 << 24:
            raise ConfigError(f"a context of {tokens} tokens: it must be at least 1 and at most {1 << 24:,}")
    for name, number in (("gpus", gpus), ("drives", drives)):
        if number is not None and not 1 <= number <= 1024:
            raise ConfigError(f"{name} is {number}; it must be at least 1 and at most 1,024")
    demand.check()
    for name in ("matmul", "attention", "while_loading", "memory", "usable"):
        if not 0 < getattr(assume, name) <= 1:
            raise ConfigError(f"{name} is {getattr(assume, name):g}; it is a part: above 0, and at most 1")
    if not 0 <= assume.engine_seconds < 3600:
        raise ConfigError(f"engine_seconds is {assume.engine_seconds:g}; it must be seconds, 0 or more")


def _enough(shape: ModelShape, usable: float) -> int:
    """The fewest GPUs, a power of two, that hold the weights and a tenth of that in KV."""
    count = 1
    while count * usable < 1.1 * shape.weights and count < 1024:
        count *= 2
    return count


def _at(host: Host, tokens: int, tiers: Sequence[StorageTier]) -> ContextPlan:
    compute = host.compute(tokens)
    return ContextPlan(
        tokens=tokens,
        kv_bytes=host.kv(tokens),
        stored_bytes=host.stored(tokens),
        compute=compute,
        first_token_computed=host.first_token(tokens, compute, False),
        first_token_gpu=host.first_token(tokens, 0.0, True),
        decode_tokens_per_second=1 / host.decode(tokens),
        fit_in_gpu=host.fit_in_gpu(tokens),
        break_even_speed=host.break_even_speed(tokens),
        tiers={tier.name: _times(host, tokens, tier) for tier in tiers},
    )


def _times(host: Host, tokens: int, tier: StorageTier) -> TierTimes:
    load = host.load(tokens, tier)
    both, loaded = host.both(tokens, tier)
    return TierTimes(
        load=load,
        first_token=host.first_token(tokens, load, True),
        both=host.first_token(tokens, both, loaded > 0),
        both_loaded=loaded,
        fit=host.fit(tokens, tier),
        loads_per_second=1 / load,
        decode_tokens_per_second=1 / host.decode(tokens, tier),
    )
