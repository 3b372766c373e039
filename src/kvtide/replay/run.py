"""Replays a whole trace through the tiers of a configuration, and reports the result."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import msgspec

from kvtide.block import padded
from kvtide.config import Config
from kvtide.errors import ConfigError, TraceError
from kvtide.formatting import size
from kvtide.replay.optimum import optimum
from kvtide.replay.real_store import RealStoreReplay
from kvtide.replay.simulation import Simulation
from kvtide.replay.speeds import TierSpeeds
from kvtide.replay.trace import Trace
from kvtide.tiers.segments import ladder

__all__ = ["Compared", "ReplayReport", "TierReport", "led", "replay", "slot_of"]

_PARTS = 100


class TierReport(msgspec.Struct, frozen=True):
    """One tier, over the counted requests. ``held_before`` + written - ``evicted`` = ``held``, in blocks."""

    name: str
    blocks: int
    """How many it can hold."""
    policy: str
    hits: int
    """Blocks that were found here, as parts of whole prefixes."""
    hit_rate: float
    """Relative to all requested blocks."""
    bytes_read: int
    """All hits are read from DRAM in the end: those of a colder tier are loaded into it first."""
    bytes_written: int
    evicted: int
    held_before: int
    """Blocks in the tier when the first counted request arrived."""
    held: int
    """Blocks in the tier at the end."""


class Compared(msgspec.Struct, frozen=True):
    """Another policy for DRAM in the same tiers, over the same requests."""

    policy: str
    hits: int
    hit_rate: float


class ReplayReport(msgspec.Struct, frozen=True):
    """The result of a replay. Counts are of the requests after the warm-up."""

    requests: int
    warming: int
    """Requests before the first counted one."""
    blocks: int
    """Blocks requested by the counted requests: ``hits`` and ``misses``."""
    hits: int
    """The hits of all tiers."""
    misses: int
    unique: int
    """Different blocks in the whole trace."""
    block_bytes: int
    block_tokens: int | None
    """As the trace or the caller says."""
    hit_rate: float
    optimum: float | None
    """The hit rate of the best possible cache with the capacity of all tiers."""
    write_amplification: float
    """Bytes written to the colder tier for each byte that was computed and stored."""
    policy_us: float
    """Time of index, policy and pipeline on this machine, in microseconds per requested block."""
    learning_us: float
    seconds: dict[str, float]
    """Estimated duration of moving the bytes, if speeds were measured."""
    tiers: list[TierReport]
    over_time: list[list[float]]
    """For each of at most a hundred parts of the counted requests, in order: each tier's hit rate."""
    in_charge: list[tuple[int, str]]
    """The policy that ranked evictions from DRAM, and the request from which on; only ``auto`` ever changes."""
    compared: list[Compared] = []
    """The same tiers with each other policy for DRAM, if requested."""


def slot_of(block: int) -> int:
    """Bytes of a tier's budget that a block of ``block`` bytes takes."""
    return ladder(padded(block))


def led(report: ReplayReport) -> dict[str, int]:
    """For how many of the counted requests each policy was in charge of DRAM."""
    found: dict[str, int] = {}
    ends = [number for number, _ in report.in_charge[1:]] + [report.requests]
    for (start, name), end in zip(report.in_charge, ends, strict=True):
        if count := max(0, end - max(start, report.warming)):
            found[name] = found.get(name, 0) + count
    return found


def replay(
    trace: Trace,
    config: Config,
    block: int,
    warm: float = 0.4,
    best: bool = True,
    speeds: TierSpeeds | None = None,
    progress: Callable[[int], None] = lambda _: None,
    real: bool = False,
) -> ReplayReport:
    """Run ``trace`` through tiers of ``config`` with blocks of ``block`` bytes: without bytes, or with ``real`` ones.

    The first part of the requests, a fraction of ``warm``, fills the tiers and is not counted. ``progress`` gets each
    request's number.
    """
    if not trace.blocks:
        raise TraceError("there is no request with a full block in this trace")
    _check_room(config, block)
    world: Simulation | RealStoreReplay = RealStoreReplay(config, block) if real else Simulation(config, block)
    with contextlib.closing(world):
        return _replay(world, trace, config, block, warm, best, speeds, progress)


def _check_room(config: Config, block: int) -> None:
    slot = slot_of(block)
    for name, option, budget in (("dram", "--dram", config.dram.budget), ("nvme", "--nvme", config.nvme.budget)):
        if budget < slot and (name == "dram" or config.nvme.path):
            raise ConfigError(
                f"{name}.budget is {size(budget)}, less than one block, which takes {size(slot)}: "
                f"give {option} that much or more, or smaller blocks"
            )


def _replay(
    world: Simulation | RealStoreReplay,
    trace: Trace,
    config: Config,
    block: int,
    warm: float,
    best: bool,
    speeds: TierSpeeds | None,
    progress: Callable[[int], None],
) -> ReplayReport:
    start = int(len(trace.blocks) * warm)
    asked = here = below = 0
    parts = [[0, 0, 0] for _ in range(_PARTS)]
    before: dict[str, int] = {}
    in_charge: list[tuple[int, str]] = []
    began = time.perf_counter()
    for number, blocks in enumerate(trace.blocks):
        if number == start:
            before = world.totals()
        progress(number)
        leader = world.in_charge
        if not in_charge or leader != in_charge[-1][1]:
            in_charge.append((number, leader))
        world.clock.now = float(trace.seconds[number] - trace.seconds[0])
        found = world.request(blocks.tolist(), trace.tenants[number], trace.turns[number], trace.returns_in[number])
        if number >= start:
            asked += len(blocks)
            here += found["dram"]
            below += found["nvme"]
            part = parts[(number - start) * _PARTS // (len(trace.blocks) - start)]
            for i, count in enumerate((found["dram"], found["nvme"], len(blocks))):
                part[i] += count
    progress(len(trace.blocks))
    seconds = time.perf_counter() - began - world.learning_seconds
    after = world.totals()
    done = {name: count - before[name] for name, count in after.items()}
    every = sum(len(b) for b in trace.blocks)
    rooms = {"dram": config.dram.budget // world.slot}
    rooms["nvme"] = config.nvme.budget // world.slot if config.nvme.path else 0
    policies = {"dram": config.dram.policy, "nvme": config.nvme.policy}
    tiers = [
        TierReport(
            name=name,
            blocks=rooms[name],
            policy=policies[name],
            hits=hits,
            hit_rate=hits / asked,
            bytes_read=done[f"{name} read"] * block,
            bytes_written=done[f"{name} written"] * block,
            evicted=done[f"{name} evicted"],
            held_before=before[f"{name} held"],
            held=after[f"{name} held"],
        )
        for name, hits in (("dram", here), ("nvme", below))
        if rooms[name]
    ]
    stored = done["dram written"] - done["nvme read"]
    return ReplayReport(
        requests=len(trace.blocks),
        warming=start,
        blocks=asked,
        hits=here + below,
        misses=asked - here - below,
        unique=trace.unique,
        block_bytes=block,
        block_tokens=trace.block_tokens,
        hit_rate=(here + below) / asked,
        optimum=optimum(trace, sum(rooms.values()), start).hits / asked if best else None,
        write_amplification=done["nvme written"] / stored if stored else 0.0,
        policy_us=1e6 * seconds / every,
        learning_us=1e6 * world.learning_seconds / every,
        seconds=_seconds({name: count * block for name, count in done.items()}, speeds, world) if speeds else {},
        tiers=tiers,
        over_time=[[n / total for n in counts[: len(tiers)]] for *counts, total in parts if total],
        in_charge=in_charge,
    )


def _seconds(done: dict[str, int], speeds: TierSpeeds, world: Simulation | RealStoreReplay) -> dict[str, float]:
    """Estimated seconds of moving the bytes sequentially; also the measured time, if they were moved."""
    found = {
        "in the store, all requests": world.moving_seconds if isinstance(world, RealStoreReplay) else 0.0,
        "of copies out of DRAM": done["dram read"] / speeds.memory,
        "of copies into DRAM": done["dram written"] / speeds.memory,
        "of reads from the colder tier": done["nvme read"] / speeds.disk_read,
        "of writes to the colder tier": done["nvme written"] / speeds.disk_write,
    }
    return {name: seconds for name, seconds in found.items() if seconds}
