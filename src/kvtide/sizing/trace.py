"""How much cache a recorded trace needs for a wanted hit rate.

Two curves are known without a replay. No policy needs less than the best possible cache, which knows the future. And
leaf-first LRU is computed for all sizes at once; other policies find a little more or less than it does. So the search
begins at the size that LRU needs, and after each replay goes to the size that LRU would need for what is missing, or
to one that is as close as the result has to be. Two to five replays are usual.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvtide import config
from kvtide.errors import ConfigError
from kvtide.formatting import size
from kvtide.replay.lru_curve import LruCurve, lru_curve
from kvtide.replay.optimum import optimum
from kvtide.replay.run import replay, slot_of
from kvtide.replay.trace import Trace, load
from kvtide.sizing.models import ModelShape

__all__ = ["NeededCapacity", "needed"]

_LEAST = 1 << 20
"""The smallest budget of DRAM, in bytes."""
_GUESSES = 4
"""Sizes that are tried because LRU suggests them; then the interval is divided."""
_CLOSE = 1.1
"""The search ends when the smallest size that suffices is at most this many times one that does not."""


class NeededCapacity(msgspec.Struct, frozen=True):
    """The smallest cache, within 10 %, that finds the wanted part of a trace's blocks."""

    trace: str
    requests: int
    hit_rate: float
    """What was wanted."""
    bytes: int
    reached: float
    """The hit rate at that size."""
    policy: str
    unlimited: float
    """The hit rate of a cache without evictions."""
    block_bytes: int
    block_tokens: int
    tried: list[tuple[int, float]]
    """Every size that was replayed, with its hit rate."""


def needed(
    trace: Path | Trace,
    shape: ModelShape,
    hit_rate: float,
    policy: str = "auto",
    block_tokens: int | None = None,
    warm: float = 0.4,
    progress: Callable[[str], Callable[[int], None]] = lambda _: lambda _: None,
) -> NeededCapacity:
    """Replay ``trace`` with blocks of this model, over sizes of DRAM, until the wanted hit rate is bracketed.

    Raises ConfigError if no size reaches it, TraceError if the trace cannot be replayed.
    """
    name = trace.name if isinstance(trace, Path) else "the trace"
    found = load(trace, block_tokens=block_tokens) if isinstance(trace, Path) else trace
    tokens = block_tokens or found.block_tokens
    if tokens is None:
        raise ConfigError(f"{name} does not say how many tokens a block has: give --block-tokens")
    if not 0 < hit_rate < 1:
        raise ConfigError(f"a hit rate of {hit_rate:g} is wanted: give a part above 0 and below 1; 0.6, say")
    block = sum(group.geometry(tokens).nbytes for group in shape.layout.groups)
    slot = slot_of(block)
    start = int(len(found.blocks) * warm)
    asked = sum(len(chain) for chain in found.blocks[start:])

    def best(blocks: int) -> float:
        return optimum(found, blocks, start).hits / asked if asked else 0.0

    most, unlimited = found.unique, best(found.unique)
    if unlimited < hit_rate:
        raise ConfigError(
            f"{name}: a hit rate of {hit_rate:.1%} is wanted, and a cache from which nothing is ever evicted reaches "
            f"{unlimited:.2%}; the other blocks are new. Give at most that"
        )
    tried: dict[int, float] = {}

    def hits(blocks: int) -> int:
        settings = config.read(
            overrides={
                "nvme.path": "",
                "dram.policy": policy,
                "dram.budget": blocks * slot,
                "dram.segment": blocks * slot,  # with blocks of one size only the time depends on it
            }
        )
        started = progress(f"with {size(blocks * slot)}")
        result = replay(found, settings, block, warm, best=False, progress=started)
        tried[blocks] = result.hit_rate
        return result.hits

    least = -(-_LEAST // slot)
    most = max(most, least)
    curve = lru_curve(found, start, progress("sizes for LRU"))
    wanted = math.ceil(hit_rate * asked)
    top = min(most, max(least, curve.size(wanted)))
    low, high = least - 1, top
    while high - low > 1:  # the size of the best possible cache
        middle = (low + high) // 2
        low, high = (low, middle) if best(middle) >= hit_rate else (middle, high)
    reached = _search(hits, curve, wanted, low, top, least, most)
    if reached is None:
        raise ConfigError(f"{name}: {policy} reaches {tried[most]:.2%} with room for all blocks; give at most that")
    high = reached
    return NeededCapacity(
        trace=name,
        requests=len(found.blocks),
        hit_rate=hit_rate,
        bytes=high * slot,
        reached=tried[high],
        policy=policy,
        unlimited=unlimited,
        block_bytes=block,
        block_tokens=tokens,
        tried=sorted((blocks * slot, rate) for blocks, rate in tried.items()),
    )


def _search(
    hits: Callable[[int], int], curve: LruCurve, wanted: int, low: int, first: int, least: int, most: int
) -> int | None:
    """The smallest size, within ``_CLOSE``, at which a policy finds ``wanted`` blocks; None if ``most`` does not.

    ``low`` is known not to suffice; ``first`` is tried first.
    """
    high, size = 0, first
    for tries in itertools.count(1):
        found = hits(size)
        if found >= wanted:
            high = size
        elif size == most:
            return None
        else:
            low = size
        if high and (high - low <= 1 or low < least or high <= low * _CLOSE):
            return high
        # As much more as LRU has there than here, the policy is expected to have too.
        expected = curve.size(wanted - found + curve.hits(size))
        if found >= wanted:
            size = max(low + 1, min(expected, math.ceil(high / _CLOSE)))
        else:
            size = min(high - 1 if high else most, max(expected, low + 1, int(low * _CLOSE)))
        if high and low >= least and tries >= _GUESSES:
            size = max(low + 1, min(high - 1, round((low * high) ** 0.5)))
    raise AssertionError("it never ends otherwise")
