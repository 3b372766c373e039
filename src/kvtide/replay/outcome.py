"""What each request of a trace finds in a store with these settings: reserved shares and quotas of tenants included.

A report of ``kvtide replay`` has totals. To say what a change brings, and how sure that is, two replays are compared
request by request.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec import structs

from kvtide.block import ALIGN
from kvtide.config import Config, MiB
from kvtide.replay.simulation import Conditions, Simulation
from kvtide.replay.trace import Trace
from kvtide.store.reserved_shares import divide
from kvtide.tiers.format.record import header_bytes

__all__ = ["Outcome", "outcome"]

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Outcome:
    dram: Counts
    """For each request, blocks of its prefix that were found in DRAM."""
    cold: Counts
    """The same for the colder tier."""
    evicted: int
    """Blocks that left a tier, in all requests."""
    written: int
    """Blocks written to the colder tier by the counted requests."""


def outcome(
    trace: Trace,
    config: Config,
    block: int,
    start: int,
    conditions: Conditions,
    tags: Mapping[str, bytes],
    goes_on: Callable[[int], bool] = lambda _: True,
) -> Outcome | None:
    """Replay ``trace`` with blocks of ``block`` bytes; the requests before number ``start`` fill the tiers.

    ``tags``: tags of tenants that the settings name, by their names in the trace. ``goes_on`` gets each request's
    number, and returns whether to go on; if not, the result is None.
    """
    shares = divide(_in_large_segments(config))
    dram, cold = np.zeros(len(trace.blocks), np.int64), np.zeros(len(trace.blocks), np.int64)
    with contextlib.ExitStack() as stack:
        conditions = conditions._replace(header=header_bytes(1))
        rest = conditions._replace(quotas=shares.quotas, tags=tags)
        main = Simulation(shares.rest, block, rest)
        stack.callback(main.close)
        reserved = {}
        for tag, settings in shares.reserved.items():
            reserved[tag] = Simulation(settings, block, conditions)
            stack.callback(reserved[tag].close)
        every = [main, *reserved.values()]
        by_tenant = {name: reserved.get(tag, main) for name, tag in tags.items()}
        before = 0
        for number, blocks in enumerate(trace.blocks):
            if not goes_on(number):
                return None
            if number == start:
                before = sum(world.totals()["nvme written"] for world in every)
            tenant = trace.tenants[number]
            world = by_tenant.get(tenant, main)
            world.clock.now = float(trace.seconds[number] - trace.seconds[0])
            found = world.request(blocks.tolist(), tenant, trace.turns[number], trace.returns_in[number])
            dram[number], cold[number] = found["dram"], found["nvme"]
        totals = [world.totals() for world in every]
    evicted = sum(one["dram evicted"] + one["nvme evicted"] for one in totals)
    return Outcome(dram, cold, evicted, sum(one["nvme written"] for one in totals) - before)


def _in_large_segments(config: Config) -> Config:
    """The same with one segment for each tier: blocks of one size fit as well, and there are fewer segments to look
    through."""
    changed = {
        name: structs.replace(tier, segment=max(MiB, tier.budget // ALIGN * ALIGN))
        for name, tier in (("dram", config.dram), ("nvme", config.nvme))
    }
    return structs.replace(config, **changed)
