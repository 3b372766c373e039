"""Whether a tier helps, with the reason in numbers, and what it saves at the prices that are given."""

from __future__ import annotations

import enum
import math

import msgspec

from kvtide.block import Kind
from kvtide.errors import ConfigError
from kvtide.formatting import size
from kvtide.sizing.arithmetic import Host, StorageTier

__all__ = ["Demand", "Saving", "TierVerdict", "WhyHelps", "judge", "saving"]

GIB = 1 << 30
_MUCH = 0.1
"""The part of the GPUs' time that hits must spare, to justify a tier if users do not notice it."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that are expected, and prices. All are optional."""

    users: int | None = None
    """Contexts that should be kept, each of the longest length."""
    hit_rate: float | None = None
    """The part of the prompts' tokens that was seen before."""
    target: float | None = None
    """The longest time to the first token, in seconds."""
    at_once: int = 1
    """Prompts that arrive together."""
    requests_per_hour: float | None = None
    gpu_price: float | None = None
    """Of a GPU and hour."""
    dram_price: float | None = None
    """Of a GiB and hour."""
    nvme_price: float | None = None

    def check(self) -> None:
        """Raise ConfigError for a number that means nothing."""
        if self.hit_rate is not None and not 0 <= self.hit_rate <= 1:
            raise ConfigError(f"a hit rate of {self.hit_rate:g}: it is a part, from 0 to 1; 0.6, say")
        if self.target is not None and not 0 < self.target < math.inf:
            raise ConfigError(f"a target of {self.target:g} seconds: it must be above 0")
        for name in ("users", "at_once"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise ConfigError(f"{name} is {count}; it must be at least 1")
        for name in ("requests_per_hour", "gpu_price", "dram_price", "nvme_price"):
            if (number := getattr(self, name)) is not None and not 0 <= number < math.inf:
                raise ConfigError(f"{name} is {number:g}; it must be 0 or more")
        prices = [name for name in ("gpu_price", "dram_price", "nvme_price") if getattr(self, name) is not None]
        if prices and self.requests_per_hour is None:
            raise ConfigError(f"{prices[0]} has no effect without requests_per_hour: give the requests of an hour too")


class WhyHelps(enum.StrEnum):
    """Why a tier helps or not: one word for programs."""

    REFUSED = "refused"
    FASTER = "faster"
    NO_REUSE = "no reuse"
    FITS_IN_GPU = "fits in GPU memory"
    TOO_SMALL = "too small"
    SLOWER = "slower than computing"
    LITTLE = "saves little"
    LIMITED = "faster, for a part"
    SATURATED = "saturated"
    THROUGHPUT = "spares the GPUs"
    TOO_LATE = "too late"


class TierVerdict(msgspec.Struct, frozen=True):
    tier: str
    helps: bool
    why: WhyHelps
    reason: str


class Saving(msgspec.Struct, frozen=True):
    """What a tier saves in an hour."""

    tier: str
    gpu_hours: float
    """Hours of GPUs, all together, that are not spent computing."""
    worth: float | None
    """The price of those; None: no price is given."""
    cost: float | None
    """The price of the tier's capacity."""


def seconds(number: float) -> str:
    """A time for people."""
    if number >= 100:
        return f"{number:,.0f} s"
    return f"{number:.3g} s" if number >= 1 else f"{1000 * number:.3g} ms"


def judge(host: Host, tier: StorageTier, tokens: int, demand: Demand) -> TierVerdict:
    """Whether loading prompts of ``tokens`` from ``tier`` helps. The first rule that applies decides."""
    compute, load = host.compute(tokens), host.load(tokens, tier)
    computed, loaded = host.first_token(tokens, compute, False), host.first_token(tokens, load, True)

    def no(why: WhyHelps, reason: str) -> TierVerdict:
        return TierVerdict(tier.name, False, why, reason)

    if _refused(host):
        return no(
            WhyHelps.REFUSED,
            "kvtide refuses models of which some layers keep a state, and the engine runs without it; the figures are "
            "those of a store that could keep the state",
        )
    if demand.hit_rate == 0:
        return no(
            WhyHelps.NO_REUSE,
            "no prompt begins like an earlier one: storing takes memory and bus, and nothing is loaded",
        )
    if demand.users is not None and demand.users <= host.fit_in_gpu(tokens):
        return no(
            WhyHelps.FITS_IN_GPU,
            f"GPU memory holds {host.fit_in_gpu(tokens):,} contexts of {tokens:,} tokens, and there are "
            f"{demand.users:,}: the engine's own prefix cache finds them, unless it restarts",
        )
    if host.fit(tokens, tier) == 0:
        return no(
            WhyHelps.TOO_SMALL,
            f"it holds {size(tier.capacity or 0)}, and one context of {tokens:,} tokens takes "
            f"{size(host.stored(tokens))}",
        )
    if load >= compute:
        even = host.break_even(tier)
        slower = f"loading {tokens:,} tokens takes {seconds(load)}, computing {seconds(compute)}; " + (
            f"from {even:,} tokens on it is quicker" if even else "it never becomes quicker"
        )
        if host.assume.overlaps:
            both, part = host.both(tokens, tier)
            if part:
                slower += f". Both at once, with {part / tokens:.0%} loaded, takes {seconds(both)}"
        return no(WhyHelps.SLOWER, slower)
    if computed - loaded < host.assume.engine_seconds:
        return _small(host, tier, tokens, demand, computed - loaded)
    if demand.target is not None and (late := _late(host, tier, tokens, demand, demand.target)):
        return no(WhyHelps.TOO_LATE, late)
    gain = (
        f"the first token of {tokens:,} tokens comes after {seconds(loaded)} instead of {seconds(computed)}: "
        f"{computed / loaded:.1f} times as fast"
    )
    if demand.target is not None:
        most = math.floor((demand.target - host.first_token(tokens, 0.0, True)) / load)
        gain += f"; {most:,} {'load stays' if most == 1 else 'loads at once stay'} within {seconds(demand.target)}"
        if demand.target < 1:
            gain += ", so keep the contexts of live conversations in GPU memory"
    holds = host.fit(tokens, tier)
    if demand.users is not None and holds is not None and holds < demand.users:
        gain += f". It holds {holds:,} of {demand.users:,} contexts"
    if (wanted := _loads(demand)) * load > 1:
        gain += f". It delivers {3600 / load:,.0f} prompts an hour of {3600 * wanted:,.0f}; the others are computed"
        return TierVerdict(tier.name, True, WhyHelps.LIMITED, gain)
    return TierVerdict(tier.name, True, WhyHelps.FASTER, gain)


def _refused(host: Host) -> bool:
    """Whether kvtide refuses the model, so that nothing is stored or loaded."""
    return any(group.kind is Kind.STATE for group in host.shape.layout.groups)


def _small(host: Host, tier: StorageTier, tokens: int, demand: Demand, saved: float) -> TierVerdict:
    """For contexts so small that users hardly notice a hit: it helps if it spares much of the GPUs' time."""
    compute, load, own = host.compute(tokens), host.load(tokens, tier), host.assume.engine_seconds
    how = f"{seconds(saved)} of {seconds(own + compute)} are" if saved > 0 else "nothing is"
    small = (
        f"contexts of {tokens:,} tokens are small: until the first token {how} saved, less than the engine's own "
        f"{seconds(own)} for a request"
    )
    loads = _loads(demand)
    if loads * load >= 1:
        busy = f"{small}; and {3600 * loads:,.0f} loads an hour are more than the {3600 / load:,.0f} that it delivers"
        return TierVerdict(tier.name, False, WhyHelps.SATURATED, busy)
    if loads * compute >= _MUCH:
        spared = f"{small}; but hits spare {loads * compute:.0%} of the time of all GPUs"
        return TierVerdict(tier.name, True, WhyHelps.THROUGHPUT, spared)
    return TierVerdict(tier.name, False, WhyHelps.LITTLE, f"{small}; each hit spares the GPUs {seconds(compute)}")


def _loads(demand: Demand) -> float:
    """Loads per second."""
    hits = 1.0 if demand.hit_rate is None else demand.hit_rate
    return (demand.requests_per_hour or 0.0) / 3600 * hits


def _late(host: Host, tier: StorageTier, tokens: int, demand: Demand, target: float) -> str:
    """Why the tier misses the target; empty: it does not."""
    last = host.first_token(tokens, demand.at_once * host.load(tokens, tier), True)
    if last <= target:
        return ""
    own = host.first_token(tokens, 0.0, True)
    which = "the first token" if demand.at_once == 1 else f"the last of {demand.at_once:,} first tokens"
    keep = f"keep it in GPU memory ({seconds(own)})" if own <= target else "nothing is within the target"
    return f"{which} of {tokens:,} tokens comes after {seconds(last)}, later than {seconds(target)}: {keep}"


def saving(host: Host, tier: StorageTier, tokens: int, demand: Demand) -> Saving:
    """What the tier saves in an hour of ``demand``: GPU time, at the given prices."""
    compute, load = host.compute(tokens), host.load(tokens, tier)
    found = load < compute and host.fit(tokens, tier) != 0 and not _refused(host)
    loads = _loads(demand) * 3600 if found else 0.0
    hours = min(loads, 3600 / load) * compute * host.gpus / 3600
    price = {"dram": demand.dram_price, "nvme": demand.nvme_price}.get(tier.name)
    return Saving(
        tier.name,
        hours,
        None if demand.gpu_price is None else hours * demand.gpu_price,
        None if price is None or tier.capacity is None else price * tier.capacity / GIB,
    )
