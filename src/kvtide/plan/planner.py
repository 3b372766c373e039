"""Decides whether to load or recompute: how much of a usable prefix is worth loading.

Blocks in DRAM cost nothing. Those in a colder tier take (bytes queued before them + their own bytes) / the bandwidth
measured there; several tiers are read in parallel. A prefix must be taken from its start, so the only question is where
to stop: at the length with the least (seconds to load it + seconds to compute the rest). Blocks on disk that load more
slowly than they are computed are not loaded. The cost of computing is in prefill.py: the last tokens of a long prompt
cost more than the first.

An estimate of a tier's speed that is too low would never be corrected, because nothing would be read. So a prompt makes
a *trial* if more would be loaded at the highest possible speed (``_FASTEST``), nothing is being read from the tier, and
its estimate is due (tier_speed.py). It loads ``_TRIAL`` bytes more, of what it would have computed. That load may take
as long as computing the same blocks would, whatever the caller's deadline; what has not arrived by then is computed. So
a trial costs its prompt no more than that once, and the next plan has a better estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from kvtide.block import Layout
from kvtide.index.index import DRAM, SEALED, Index, Mask, Rows, every
from kvtide.plan.prefill import PrefillCost
from kvtide.plan.reading_order import reading_order
from kvtide.plan.tier_speed import Speed

__all__ = ["Plan", "Planner", "PlannerStatistics", "Source"]

_TRIAL = 32 << 20
_FASTEST = 64e9
"""Bytes per second."""

Floats = npt.NDArray[np.float64]


class Plan(msgspec.Struct, frozen=True):
    """How a prompt gets its prefix: ``blocks`` are taken from the store, the rest is computed.

    The seconds are the estimates that decided it; ``compute_seconds`` is None if the caller's prefill speed is not
    known, so that everything usable is loaded.
    """

    blocks: int
    load_seconds: float
    compute_seconds: float | None
    slower: int = 0
    """Further blocks that are present, but faster to compute."""
    trial: float | None = None
    """If the load is a trial of a tier's speed: the most seconds that it may take. Otherwise None."""
    slower_load: float = 0.0
    """The estimates for the ``slower`` blocks: seconds to load them, in addition to ``load_seconds``,"""
    slower_compute: float = 0.0
    """and seconds to compute them."""


@dataclass(frozen=True)
class Source:
    """A colder tier as the planner sees it."""

    number: int
    name: str
    speed: Speed
    node: bool = False
    """Whether it is another node: of several that have a block, the fastest is read from."""
    queued: Callable[[], int] = lambda: 0
    """The bytes that wait to be read from it."""


@dataclass(frozen=True, slots=True)
class PlannerStatistics:
    """Where the blocks of requested prompts came from, without those that callers had already.

    A block is counted once for all its groups, under the coldest tier that one of them must come from.
    """

    prompts: int = 0
    blocks: dict[str, int] = field(default_factory=dict)
    """By the tier that has them; ``slower``: present, but faster to compute; ``missed``: not present."""
    tokens: dict[str, int] = field(default_factory=dict)
    """The same in tokens."""

    def without(self, tiers: Collection[str]) -> PlannerStatistics:
        """The same, but for these tiers."""
        blocks, tokens = ({k: n for k, n in some.items() if k not in tiers} for some in (self.blocks, self.tokens))
        return PlannerStatistics(self.prompts, blocks, tokens)


class Planner:
    """Decides what to load. Call with the index lock held."""

    def __init__(self, index: Index, sources: Sequence[Source]) -> None:
        self._index = index
        self._sources = sources
        self._nodes = sum(source.node for source in sources)
        self._names = ("dram", *(s.name for s in sources), "slower", "missed")
        self._prompts = 0
        self._counts: dict[int, list[int]] = {}
        """By tokens per block: numbers of blocks, in the order of the names."""

    def statistics(self) -> PlannerStatistics:
        blocks, tokens = [0] * len(self._names), [0] * len(self._names)
        for size, counts in self._counts.items():
            blocks = [a + b for a, b in zip(blocks, counts, strict=True)]
            tokens = [a + b * size for a, b in zip(tokens, counts, strict=True)]
        by_name = (dict(zip(self._names, n, strict=True)) for n in (blocks, tokens))
        return PlannerStatistics(self._prompts, *by_name)

    def count(
        self, plan: Plan, blocks: int, have: int, tokens: int, needed: Sequence[tuple[int, Rows]] | None = None
    ) -> None:
        """Count a prompt of ``blocks`` blocks of ``tokens`` tokens each that was planned for a caller. ``needed`` has
        the rows to load, by group, with the number of the first block; None: all of them are in DRAM."""
        counts = self._counts.get(tokens)
        if counts is None:
            counts = self._counts[tokens] = [0] * len(self._names)
        have = min(have, plan.blocks)
        self._prompts += 1
        counts[-2] += plan.slower
        counts[-1] += blocks - plan.blocks - plan.slower
        if needed is None:
            counts[0] += plan.blocks - have
            return
        tiers = np.zeros(plan.blocks, np.int64)
        for start, rows in needed:
            part = tiers[start : start + len(rows)]
            np.maximum(part, self.tiers_of(rows), out=part)
        for i, n in enumerate(np.bincount(tiers[have:]).tolist()):
            counts[i] += n

    def tiers_of(self, rows: Rows) -> Rows:
        """The tier that each row must come from: 0 is DRAM, then the sources in their order; of several nodes the
        fastest."""
        tier = np.zeros(len(rows), np.int64)
        for i, source in reversed(self._order()):
            tier[self._index.state[source.number][rows] == SEALED] = i
        tier[self._index.state[DRAM][rows] == SEALED] = 0
        return tier

    def _order(self) -> list[tuple[int, Source]]:
        """The sources with their numbers, from 1 on, in the order in which a block is read from them."""
        order = [*enumerate(self._sources, 1)]
        if self._nodes < 2:
            return order
        return [
            *reading_order(
                order,
                lambda pair: pair[1].node,
                lambda pair, nbytes: pair[1].speed.seconds(pair[1].queued() + nbytes),
            )
        ]

    def plan(
        self,
        layout: Layout,
        rows: dict[str, Rows],
        usable: npt.NDArray[np.bool_],
        have: int,
        prefill: PrefillCost | None,
        queued: Sequence[int],
        limit: int,
        *,
        trials: bool = True,
    ) -> Plan:
        """Decide how many blocks to take, of the ``usable`` lengths, when the caller has ``have`` blocks already.

        ``prefill`` is the caller's cost of computing (None: unknown, so the longest prefix is taken), ``queued`` the
        bytes waiting to be read before ours, by source. At most ``limit`` bytes fit into DRAM. ``trials``: whether the
        load may be a trial of a tier's speed.
        """
        count = len(usable) - 1
        if have + limit // sum(layout.geometry[g.name].footprint for g in layout.groups) < count:
            all_blocks = {name: np.ones(count, np.bool_) for name in rows}
            usable = usable & (_needed_bytes(layout, all_blocks, have) <= limit)
        lengths = np.flatnonzero(usable)
        longest = int(lengths[-1])
        tokens = layout.block_tokens
        if longest <= have or all(every(self._index.state[DRAM][r[have:longest]] == SEALED) for r in rows.values()):
            rest = None if prefill is None else prefill.seconds(longest * tokens, count * tokens)
            return Plan(longest, 0.0, rest)
        tiers = {name: self.tiers_of(r) for name, r in rows.items()}
        cold = [
            _needed_bytes(layout, {name: tier == i for name, tier in tiers.items()}, have)
            for i in range(1, len(self._sources) + 1)
        ]
        speeds = [source.speed.seconds(1) for source in self._sources]
        load = np.maximum(np.zeros(count + 1), _load_seconds(cold, queued, speeds))
        if prefill is None:
            return Plan(longest, float(load[longest]), None)
        compute = prefill.seconds(np.arange(count + 1) * tokens, count * tokens)
        lengths = lengths[lengths >= have]
        blocks = _quickest(lengths, load + compute)
        trial = None
        if blocks < longest and trials:
            idle = [
                s if not waiting and s.speed.due else None for s, waiting in zip(self._sources, queued, strict=True)
            ]
            if any(idle) and (length := self._trial(lengths, blocks, cold, speeds, idle, compute, queued)) > blocks:
                blocks, trial = length, prefill.seconds(have * tokens, length * tokens)
        more = float(load[longest] - load[blocks]), float(compute[blocks] - compute[longest])
        return Plan(blocks, float(load[blocks]), float(compute[blocks]), longest - blocks, trial, *more)

    def _trial(
        self,
        lengths: Rows,
        blocks: int,
        cold: Sequence[Floats],
        speeds: Sequence[float],
        idle: Sequence[Source | None],
        compute: Floats,
        queued: Sequence[int],
    ) -> int:
        """Number of blocks to load to learn the speed of the sources that are ``idle``; ``blocks`` if nothing relevant
        can be learned."""
        at_best = [s if source is None else min(s, 1 / _FASTEST) for s, source in zip(speeds, idle, strict=True)]
        best = _quickest(lengths, _load_seconds(cold, queued, at_best) + compute)
        lengths = lengths[(lengths > blocks) & (lengths <= best)]
        more = {source: c[lengths] - c[blocks] for source, c in zip(idle, cold, strict=True) if source is not None}
        more = {source: nbytes for source, nbytes in more.items() if len(nbytes) and nbytes[-1] > 0}
        if not more:
            return blocks
        total = sum(more.values(), np.zeros(len(lengths)))
        length = int(lengths[np.argmax(total >= min(_TRIAL, total[-1]))])
        for source, nbytes in more.items():
            if nbytes[lengths <= length].max() > 0:
                source.speed.tried()
        return length


def _load_seconds(cold: Sequence[Floats], queued: Sequence[int], speeds: Sequence[float]) -> Floats:
    """For each length, the seconds to load it: given by source its bytes, the bytes waiting there, and the time per
    byte.

    All sources are read in parallel.
    """
    load = np.zeros(1)
    for nbytes, waiting, each in zip(cold, queued, speeds, strict=True):
        load = np.maximum(load, np.where(nbytes > 0, nbytes + waiting, 0.0) * each)
    return load


def _quickest(lengths: Rows, seconds: Floats) -> int:
    """The fastest length; of equally fast ones the longest, which leaves the processor free."""
    total = seconds[lengths]
    return int(lengths[len(total) - 1 - np.argmin(total[::-1])])


def _needed_bytes(layout: Layout, counted: dict[str, Mask], have: int) -> Floats:
    """For each length in blocks, 0 to all, the bytes of ``counted`` blocks that a prefix needs after ``have``."""
    lengths = np.arange(min(len(c) for c in counted.values()) + 1)
    total = np.zeros(len(lengths))
    for group in layout.groups:
        mine = counted[group.name][: len(lengths) - 1]
        before = np.zeros(len(lengths))
        np.cumsum(mine * layout.geometry[group.name].footprint, out=before[1:])
        reach = len(mine) - group.needs(len(mine), layout.block_tokens).start
        first = np.maximum(lengths - reach, have)
        total += before - before[np.minimum(first, lengths)]
    return total
