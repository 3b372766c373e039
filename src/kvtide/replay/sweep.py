"""Hit rates over sizes of DRAM, to choose one: leaf-first LRU, the configured policy and the optimum."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvtide.config import Config
from kvtide.errors import TraceError
from kvtide.replay.compare import with_policy
from kvtide.replay.optimum import optimum
from kvtide.replay.run import replay
from kvtide.replay.trace import Trace

__all__ = ["Sweep", "SweepRow", "sweep"]


class SweepRow(msgspec.Struct, frozen=True):
    """One size of DRAM."""

    size: str
    """As given by the caller."""
    blocks: int
    """How many blocks fit."""
    bytes: int
    hit_rates: dict[str, float]
    """By policy, the configured one last."""
    optimum: float | None


class Sweep(msgspec.Struct, frozen=True):
    """Rates are of the requests after the warm-up."""

    requests: int
    warming: int
    blocks: int
    unique: int
    block_bytes: int
    block_tokens: int | None
    policy: str
    """The configured policy."""
    unlimited: float
    """The hit rate of a cache without evictions."""
    rows: list[SweepRow]


def sweep(
    trace: Trace,
    configs: Sequence[tuple[str, Config]],
    block: int,
    warm: float,
    lru: bool,
    best: bool,
    progress: Callable[[str], Callable[[int], None]],
) -> Sweep:
    """Replay ``trace``, without bytes, with each of ``configs``: the size as given, and a configuration with it.

    ``progress`` is called with the description of a replay when it begins, and returns a callback for request numbers.
    """
    if not trace.blocks:
        raise TraceError("there is no request with a full block in this trace")
    start = int(len(trace.blocks) * warm)
    asked = sum(len(blocks) for blocks in trace.blocks[start:])
    rows = []
    for name, config in configs:
        own = config.dram.policy
        rates, room = {}, 0
        for policy in dict.fromkeys((*(["lru"] if lru else []), own)):
            found = replay(
                trace, with_policy(config, policy), block, warm, False, progress=progress(f"{name} {policy}")
            )
            rates[policy], room = found.hit_rate, found.tiers[0].blocks
        most = optimum(trace, room, start).hits / asked if best else None
        rows.append(SweepRow(name, room, config.dram.budget, rates, most))
    return Sweep(
        requests=len(trace.blocks),
        warming=start,
        blocks=asked,
        unique=trace.unique,
        block_bytes=block,
        block_tokens=trace.block_tokens,
        policy=configs[0][1].dram.policy,
        unlimited=optimum(trace, trace.unique, start).hits / asked,
        rows=sorted(rows, key=lambda row: row.bytes),
    )
