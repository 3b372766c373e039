"""A whole trace through the tiers of a configuration, and what came of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import msgspec

from kvtide.config import Config
from kvtide.errors import TraceError
from kvtide.replay.optimum import optimum
from kvtide.replay.real import RealWorld
from kvtide.replay.speeds import Speeds
from kvtide.replay.trace import Trace
from kvtide.replay.world import World

__all__ = ["Report", "TierReport", "replay"]

_PARTS = 100


class TierReport(msgspec.Struct, frozen=True):
    """One tier, over the requests that count."""

    name: str
    blocks: int
    """How many it can hold."""
    policy: str
    hits: int
    hit_rate: float
    """Of all blocks asked for, those that were found here, as parts of whole prefixes."""
    bytes_read: int
    bytes_written: int
    evicted: int


class Report(msgspec.Struct, frozen=True):
    """What a trace did to the tiers. Counts are of the requests after the warming ones."""

    requests: int
    warming: int
    """Requests before the first that counts."""
    blocks: int
    """Asked for by the requests that count."""
    unique: int
    """Different blocks in the whole trace."""
    block_bytes: int
    hit_rate: float
    optimum: float | None
    """The hit rate of the best possible cache with all the tiers' room."""
    write_amplification: float
    """Bytes written to the colder tier for each byte that was computed and stored."""
    policy_us: float
    """Index, policy and pipeline, in microseconds of this machine for each block asked for."""
    learning_us: float
    seconds: dict[str, float]
    """What moving the bytes would take at the speeds that were measured, if they were."""
    tiers: list[TierReport]
    over_time: list[list[float]]
    """For each of a hundred parts of the requests that count, in order: each tier's hit rate."""


def replay(
    trace: Trace,
    config: Config,
    block: int,
    warm: float = 0.4,
    best: bool = True,
    speeds: Speeds | None = None,
    progress: Callable[[int], None] = lambda _: None,
    real: bool = False,
) -> Report:
    """Run ``trace`` through tiers of ``config`` with blocks of ``block`` bytes: without bytes, or with ``real`` ones.

    The first ``warm`` of the requests fill the tiers and are not counted. ``progress`` gets each request's number.
    """
    if not trace.blocks:
        raise TraceError("there is no request with a full block in this trace")
    world: World | RealWorld = RealWorld(config, block) if real else World(config, block)
    with contextlib.closing(world):
        return _replay(world, trace, config, block, warm, best, speeds, progress)


def _replay(
    world: World | RealWorld,
    trace: Trace,
    config: Config,
    block: int,
    warm: float,
    best: bool,
    speeds: Speeds | None,
    progress: Callable[[int], None],
) -> Report:
    start = int(len(trace.blocks) * warm)
    asked = here = below = 0
    parts = [[0, 0, 0] for _ in range(_PARTS)]
    before: dict[str, int] = {}
    began = time.perf_counter()
    for number, blocks in enumerate(trace.blocks):
        if number == start:
            before = world.totals()
        progress(number)
        world.clock.now = float(trace.seconds[number])
        found = world.request(blocks.tolist())
        if number >= start:
            asked += len(blocks)
            here += found["dram"]
            below += found["nvme"]
            part = parts[(number - start) * _PARTS // (len(trace.blocks) - start)]
            for i, count in enumerate((found["dram"], found["nvme"], len(blocks))):
                part[i] += count
    seconds = time.perf_counter() - began - world.learning_seconds
    done = {name: count - before[name] for name, count in world.totals().items()}
    every = sum(len(b) for b in trace.blocks)
    rooms = {"dram": config.dram.budget // world.slot}
    rooms["nvme"] = config.nvme.budget // world.slot if config.nvme.path else 0
    policies = {"dram": config.dram.policy, "nvme": config.nvme.policy}
    tiers = [
        TierReport(
            name,
            rooms[name],
            policies[name],
            hits,
            hits / asked,
            done[f"{name} read"],
            done[f"{name} written"],
            done[f"{name} evicted"],
        )
        for name, hits in (("dram", here), ("nvme", below))
        if rooms[name]
    ]
    stored = done["dram written"] - done["nvme read"]
    return Report(
        len(trace.blocks),
        start,
        asked,
        trace.unique,
        block,
        (here + below) / asked,
        optimum(trace, sum(rooms.values()), start).hits / asked if best else None,
        done["nvme written"] / stored if stored else 0.0,
        1e6 * seconds / every,
        1e6 * world.learning_seconds / every,
        _seconds(done, speeds, world) if speeds else {},
        tiers,
        [[n / total for n in counts[: len(tiers)]] for *counts, total in parts if total],
    )


def _seconds(done: dict[str, int], speeds: Speeds, world: World | RealWorld) -> dict[str, float]:
    """What moving the bytes would take, one after another; and took, where they were moved."""
    found = {
        "in the store, all requests": world.moving_seconds if isinstance(world, RealWorld) else 0.0,
        "of copies out of DRAM": done["dram read"] / speeds.memory,
        "of copies into DRAM": done["dram written"] / speeds.memory,
        "of reads from the colder tier": done["nvme read"] / speeds.disk_read,
        "of writes to the colder tier": done["nvme written"] / speeds.disk_write,
    }
    return {name: seconds for name, seconds in found.items() if seconds}
