"""The best hit rate that any cache of a size could have, knowing the future: Belady's MIN, over prefixes.

The resident block whose next use is furthest is evicted; of two with the same next use, the deeper one. A block that is
not used again is not kept. A parent is used no later than its child, so the resident blocks always form whole prefixes
and every one of them counts: for blocks of one size this is the true optimum.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from kvtide.replay.trace import Trace

__all__ = ["Optimum", "optimum"]


@dataclass(frozen=True, slots=True)
class Optimum:
    hits: int
    """Blocks found, in the counted requests."""
    kept: int
    """How often a block was inserted, in those requests, and found again before its eviction: useful writes."""


def optimum(trace: Trace, capacity: int, start: int = 0) -> Optimum:
    """The result of MIN with ``capacity`` blocks, from request ``start`` on; the requests before it warm the cache."""
    never = len(trace.blocks)
    lengths = [len(chain) for chain in trace.blocks]
    every = np.concatenate(trace.blocks) if trace.blocks else np.zeros(0, np.int64)
    when = np.repeat(np.arange(never), lengths)
    order = np.lexsort((when, every))
    following = np.full(len(every), never)
    same = every[order][1:] == every[order][:-1]
    following[order[:-1][same]] = when[order[1:][same]]
    resident: dict[int, int] = {}
    """Each block's next use."""
    entered: dict[int, int] = {}
    """When each block was inserted, until it is found."""
    heap: list[tuple[int, int, int]] = []
    hits = kept = at = 0
    for number, chain in enumerate(trace.blocks):
        blocks, nexts = chain.tolist(), following[at : at + len(chain)].tolist()
        at += len(chain)
        for depth, (block, later) in enumerate(zip(blocks, nexts, strict=True)):
            if block in resident:
                hits += number >= start
                kept += entered.pop(block, -1) >= start
            elif later < never:
                entered[block] = number
            if later == never:
                resident.pop(block, None)
            else:
                resident[block] = later
                heapq.heappush(heap, (-later, -depth, block))
        while len(resident) > capacity:
            later, _, block = heapq.heappop(heap)
            if resident.get(block) == -later:
                del resident[block]
                entered.pop(block, None)
    return Optimum(hits, kept)
