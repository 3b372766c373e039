"""Load or recompute: how much of a usable prefix is worth fetching.

Blocks in DRAM cost nothing worth counting. Those in a colder tier take (bytes queued before them + their own bytes)
/ the bandwidth measured there. A prefix must be taken from its start, so the only question is where to stop: the length
with the least (seconds to load it + seconds to compute the rest). A disk hit that is slower than computing is not made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.block import Layout
from kvtide.index.index import DRAM, SEALED, Index, Rows
from kvtide.plan.cost import Speed

__all__ = ["Plan", "Planner", "Source"]


@dataclass(frozen=True, slots=True)
class Plan:
    """How a prompt gets its prefix: ``blocks`` are taken from the store, the rest is computed.

    The seconds are the expectations that decided it; ``compute_seconds`` is None where the caller's prefill speed is
    not known, so that everything usable is loaded.
    """

    blocks: int
    load_seconds: float
    compute_seconds: float | None


@dataclass(frozen=True)
class Source:
    """A colder tier as the planner sees it."""

    number: int
    name: str
    speed: Speed


class Planner:
    """Decides what to load. Called under the index's lock."""

    def __init__(self, index: Index, sources: Sequence[Source]) -> None:
        self._index = index
        self._sources = sources

    def source(self, row: int) -> Source | None:
        """The fastest colder tier that has ``row`` whole."""
        return next((s for s in self._sources if self._index.state[s.number][row] == SEALED), None)

    def plan(
        self,
        layout: Layout,
        rows: dict[str, Rows],
        usable: npt.NDArray[np.bool_],
        have: int,
        prefill: float,
        queued: int,
        limit: int,
    ) -> Plan:
        """How many blocks to take, of the lengths that are ``usable``, when the caller has ``have`` blocks already.

        ``prefill`` is the caller's speed in tokens a second (0: unknown, so the longest prefix is taken), ``queued``
        the bytes that wait to be read before ours. At most ``limit`` bytes fit into DRAM.
        """
        size = sum(layout.geometry[g.name].footprint for g in layout.groups)
        lengths = np.flatnonzero(usable[: have + limit // size + 1])
        longest = int(lengths[-1])
        if longest <= have or all((self._index.state[DRAM][r[have:longest]] == SEALED).all() for r in rows.values()):
            return Plan(longest, 0.0, None)
        cold = self._cold_bytes(layout, rows, have)
        waiting = np.where(cold > 0, cold + queued, 0.0)
        load = np.zeros(len(cold))
        if self._sources and waiting[longest]:
            load = waiting * self._sources[0].speed.seconds(1)
        blocks, compute = longest, None
        if prefill > 0:
            rest = (len(cold) - 1 - np.arange(len(cold))) * layout.block_tokens / prefill
            # Of equally quick lengths the longest: it leaves the processor free.
            lengths = lengths[lengths >= have] if have else lengths
            total = (load + rest)[lengths]
            blocks = int(lengths[len(total) - 1 - np.argmin(total[::-1])])
            compute = float(rest[blocks])
        return Plan(blocks, float(load[blocks]), compute)

    def _cold_bytes(self, layout: Layout, rows: dict[str, Rows], have: int) -> npt.NDArray[np.float64]:
        """For each length, the bytes that must come from a colder tier."""
        total = np.zeros(min(len(r) for r in rows.values()) + 1)
        for group in layout.groups:
            mine = rows[group.name][: len(total) - 1]
            cold = np.zeros(len(total))
            away = self._index.state[DRAM][mine] != SEALED
            away &= self._somewhere(mine)
            np.cumsum(away * layout.geometry[group.name].footprint, out=cold[1:])
            needs = [group.needs(n, layout.block_tokens).start for n in (0, len(mine))]
            reach = len(mine) - needs[1]
            first = np.maximum(0, np.arange(len(total)) - reach)
            total += cold - cold[np.minimum(np.maximum(first, have), np.arange(len(total)))]
        return total

    def _somewhere(self, rows: Rows) -> npt.NDArray[np.bool_]:
        found = np.zeros(len(rows), np.bool_)
        for source in self._sources:
            found |= self._index.state[source.number][rows] == SEALED
        return found
