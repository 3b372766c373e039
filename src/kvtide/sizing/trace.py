"""How much cache a recorded trace needs for a wanted hit rate: replays at several sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kvtide import config
from kvtide.errors import ConfigError
from kvtide.replay.run import slot_of
from kvtide.replay.sweep import SweepRow, sweep
from kvtide.replay.trace import Trace, load
from kvtide.sizing.models import ModelShape

__all__ = ["NeededCapacity", "needed"]

_LEAST = 1 << 20
"""The smallest budget of DRAM, in bytes."""
_CLOSE = 0.05
"""The search ends when size and hit rate are known to this part."""


class NeededCapacity(msgspec.Struct, frozen=True):
    """The smallest cache, within 5 %, that finds the wanted part of a trace's blocks."""

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
    tried: dict[int, SweepRow] = {}
    unlimited = 0.0

    def rate(blocks: int) -> float:
        nonlocal unlimited
        if blocks not in tried:
            text = f"{blocks * slot} B"
            wanted: dict[str, Any] = {"nvme.path": "", "dram.policy": policy, "dram.budget": blocks * slot}
            swept = sweep(found, [(text, config.read(overrides=wanted))], block, warm, False, False, progress)
            unlimited = swept.unlimited
            tried[blocks] = swept.rows[0]
        return tried[blocks].hit_rates[policy]

    low, high = max(1, -(-_LEAST // slot)), max(1, -(-_LEAST // slot), found.unique)
    if rate(high) < hit_rate:
        raise ConfigError(
            f"{name}: a hit rate of {hit_rate:.1%} is wanted, and a cache from which nothing is ever evicted reaches "
            f"{unlimited:.2%}; the other blocks are new. Give at most that"
        )
    if rate(low) >= hit_rate:
        high = low
    while high > low * (1 + _CLOSE) and high - low > 1:
        middle = max(low + 1, min(high - 1, round((low * high) ** 0.5)))
        low, high = (low, middle) if rate(middle) >= hit_rate else (middle, high)
    return NeededCapacity(
        trace=name,
        requests=len(found.blocks),
        hit_rate=hit_rate,
        bytes=high * slot,
        reached=rate(high),
        policy=policy,
        unlimited=unlimited,
        block_bytes=block,
        block_tokens=tokens,
        tried=sorted((row.bytes, row.hit_rates[policy]) for row in tried.values()),
    )
