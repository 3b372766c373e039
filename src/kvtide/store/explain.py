"""Finds out why each block of a prompt is a hit or a miss, from the index and its records. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtide.block import Layout
from kvtide.index.absence_log import Absence, AbsenceCause, EvictedFor
from kvtide.index.index import DRAM, PENDING, Mask, Rows
from kvtide.plan.planner import Plan
from kvtide.store.explanation import ENGINE, ExplainedBlocks, Explanation, Why
from kvtide.store.partition import Partition
from kvtide.store.recent_requests import RecentRequest
from kvtide.tiers.base import Identity
from kvtide.transfer.write_results import BY_CODE

__all__ = ["Explainer", "explained"]

_WHYS = list(Why)
_MOST = 10_000
"""The most ranges of an explanation: it must fit into one answer of a node."""
_CODE = {why: number for number, why in enumerate(_WHYS)}
_OF_ABSENCE = np.array([_CODE[Why(absence.value)] if absence.value else 0 for absence in Absence], np.uint8)
"""The code of a block's reason, by the code of its record."""
_WITH_TIER = [code for code, absence in enumerate(Absence) if absence in (Absence.EVICTED, Absence.LOAD_FAILED)]
"""The codes of records whose tier is of interest."""
_CAUSES, _FOR_WHOM = list(AbsenceCause), list(EvictedFor)
_TICK = 0.02
"""Seconds by which the times of records are inexact."""
_MARK = np.uint64(1 << 63)
"""See ``index.marks``."""


def _marks_of(joined: bytes) -> npt.NDArray[np.uint64]:
    """The marks of a prompt's blocks, from their concatenated digests."""
    marks: npt.NDArray[np.uint64] = np.frombuffer(joined, np.uint64)[::4] | _MARK
    return marks


class _Columns:
    """The explanations of a prompt's blocks, one column per field."""

    def __init__(self, blocks: int) -> None:
        def column(kind: Any = np.uint8) -> npt.NDArray[Any]:
            return np.zeros(blocks, kind)

        self.why, self.tier, self.cause, self.for_whom = column(), column(), column(), column()
        self.unwritten, self.group, self.decided = column(), column(), column(np.bool_)
        self.when = np.full(blocks, np.nan)

    def runs(self, partition: Partition, layout: Layout, now: float) -> tuple[ExplainedBlocks, ...]:
        """The explanations, merged where they are equal. A tier is a number, plus 1 if it says anything."""
        names = ["", "dram", *(cold.name for cold in partition.colds), ENGINE]
        several = len(layout.groups) > 1
        columns = [self.why, self.tier, self.cause, self.for_whom, self.unwritten, self.group]
        changes = np.zeros(max(0, len(self.why) - 1), np.bool_)
        for column in columns:
            changes |= column[1:] != column[:-1]
        starts = [0, *(np.flatnonzero(changes) + 1).tolist()] if len(self.why) else []
        found = []
        for first, stop in zip(starts[:_MOST], [*starts[1:], len(self.why)], strict=False):
            why, tier, cause, for_whom, unwritten, group = (int(column[first]) for column in columns)
            when = self.when[first:stop]
            found.append(
                ExplainedBlocks(
                    first,
                    stop,
                    _WHYS[why],
                    names[tier],
                    _CAUSES[cause],
                    _FOR_WHOM[for_whom],
                    BY_CODE.get(unwritten),
                    None if np.isnan(when[0]) else (_ago(now, when.max()), _ago(now, when.min())),
                    layout.groups[group].name if several and not _WHYS[why].stored else "",
                )
            )
        return tuple(found)


def _ago(now: float, when: np.float64) -> float:
    return max(0.0, round(now - float(when), 2))


def explained(
    partition: Partition,
    layout: Layout,
    identities: Mapping[str, Identity],
    joined: bytes,
    rows: dict[str, Rows],
    whole: dict[str, Mask],
    usable: Mask,
    plan: Plan,
    now: float,
    tiers: Rows | None = None,
) -> Explanation:
    """``rows``, ``whole`` and ``usable`` are those of a match, which would follow ``plan``. Call with the index lock
    held.

    ``tiers`` are given for a match in the past, which was made at ``now``: the tier that each block came from.
    """
    blocks = len(joined) // 32
    columns = _Columns(blocks)
    if blocks:
        longest, end = int(np.flatnonzero(usable)[-1]), plan.blocks + plan.slower
        columns.why[: plan.blocks] = _CODE[Why.HIT]
        columns.why[plan.blocks : end] = _CODE[Why.QUICKER_TO_COMPUTE]
        columns.why[end:longest] = _CODE[Why.NO_ROOM]
        columns.why[longest:] = _CODE[Why.AFTER_A_MISS]
        columns.tier[:] = 1 + (_tiers(partition, layout, rows, plan.blocks) if tiers is None else tiers)
        records = _Records(partition, now, past=tiers is not None)
        _why_absent(records, layout, identities, joined, rows, whole, longest, columns)
        _failed_loads(records, layout, identities, joined, longest, columns)
    return Explanation(
        0,
        layout.block_tokens,
        columns.runs(partition, layout, now),
        now,
        partition.index.absence_log.since,
        plan.load_seconds,
        plan.compute_seconds,
        plan.slower_load,
        plan.slower_compute,
        shared=bool(partition.shared_tiers),
    )


def _tiers(partition: Partition, layout: Layout, rows: dict[str, Rows], hits: int) -> Rows:
    """The number of the coldest tier that each block must come from."""
    tiers: Rows = np.zeros(min(len(r) for r in rows.values()), np.int64)
    for group in layout.groups:
        if group.required:
            mine = partition.planner.tiers_of(rows[group.name])
            mine[: group.needs(hits, layout.block_tokens).start] = 0  # not needed for the hits
            np.maximum(tiers, mine, out=tiers)
    return tiers


class _Records(NamedTuple):
    """Whose records tell why blocks were absent, and when."""

    partition: Partition
    now: float
    past: bool
    """Whether that was before: then the index does not say any more, and later records do not count."""

    def expired(self, rows: Rows) -> Mask:
        """Mask of rows that have expired and are not removed."""
        index = self.partition.index
        if self.past or not index.mortal:
            return np.zeros(len(rows), np.bool_)
        over: Mask = (rows > 0) & (index.expiry[rows] <= self.now)
        return over

    def being_written(self, rows: Rows, known: Mask) -> Mask:
        """Mask of rows that are being written. In the past: that were there, incomplete, and have not expired."""
        if self.past:
            return (rows > 0) & ~known
        pending: Mask = self.partition.index.state[DRAM][rows] == PENDING
        return pending


def _why_absent(
    source: _Records,
    layout: Layout,
    identities: Mapping[str, Identity],
    joined: bytes,
    rows: dict[str, Rows],
    whole: dict[str, Mask],
    longest: int,
    columns: _Columns,
) -> None:
    """Fill in the reasons of the blocks from ``longest`` on that a required group lacks."""
    index, log = source.partition.index, source.partition.index.absence_log
    marks = _marks_of(joined)
    for number, group in enumerate(layout.groups):
        if not group.required:
            continue
        # of a window only what the whole prompt needs is told of
        start = max(longest, group.needs(len(joined) // 32, layout.block_tokens).start)
        mine = start + np.flatnonzero(~whole[group.name][start:])
        mine = mine[~columns.decided[mine]]
        if not len(mine):
            continue
        here, records = rows[group.name][mine], log.find(marks[mine], identities[group.name].fingerprint)
        why = _OF_ABSENCE[records.codes]
        known = records.codes > 0
        doubtful = records.doubtful
        if source.past:
            later = known & (records.times > source.now + _TICK)
            known, doubtful = known & ~later, doubtful | later
        why[~known] = _CODE[_unknown(source.partition)]
        why[~known & doubtful] = _CODE[Why.RECORD_OVERWRITTEN if log.on else Why.NOT_RECORDED]
        when = np.where(known | records.doubtful, records.times, np.nan)
        tier = np.where(known & np.isin(records.codes, _WITH_TIER), 1 + records.tiers, 0)
        expired = source.expired(here)
        why[expired], when[expired], tier[expired] = _CODE[Why.EXPIRED], index.expiry[here][expired], 0
        written = source.being_written(here, known)
        why[written], when[written], tier[written] = _CODE[Why.BEING_WRITTEN], np.nan, 0
        columns.why[mine], columns.when[mine], columns.tier[mine] = why, when, tier
        told = known & (why == _OF_ABSENCE[records.codes])
        columns.cause[mine], columns.for_whom[mine] = records.causes * told, records.for_whom * told
        columns.unwritten[mine], columns.group[mine], columns.decided[mine] = records.unwritten * told, number, True


def _failed_loads(
    source: _Records, layout: Layout, identities: Mapping[str, Identity], joined: bytes, longest: int, columns: _Columns
) -> None:
    """Fill in why loads of blocks before ``longest`` failed: these may stay in their tier. In the past: loads after the
    match."""
    cold = np.flatnonzero((columns.tier[:longest] > 1) & (columns.tier[:longest] <= 1 + len(source.partition.colds)))
    if not len(cold):
        return
    marks = _marks_of(joined)[cold]
    for group in layout.groups:
        records = source.partition.index.absence_log.find(marks, identities[group.name].fingerprint)
        failed = group.required & (records.codes == Absence.LOAD_FAILED.code)
        if source.past:
            failed &= records.times >= source.now - _TICK
        columns.cause[cold[failed]] = records.causes[failed]
        columns.when[cold[failed]] = np.nan if source.past else records.times[failed]


def _unknown(partition: Partition) -> Why:
    """The explanation of a block of which there was never a record."""
    if not partition.began_empty:
        return Why.UNKNOWN_SINCE_RESTART
    return Why.NOT_SEEN_HERE if partition.shared_tiers else Why.NEVER_SEEN


class Explainer:
    """Remembers the matches of one model and tenant, to be explained later."""

    def __init__(self, partition: Partition, layout: Layout, identities: Mapping[str, Identity], tenant: bytes) -> None:
        self._partition, self._layout, self._identities, self._tenant = partition, layout, identities, tenant
        self._who = frozenset(who.fingerprint for who in identities.values())
        self._recent = partition.context.recent_requests

    def past(self, request: str) -> Explanation | None:
        """A past request of this model and tenant, by its name; None if it is not remembered."""
        return self._recent.find(request, self._who)

    def remember(
        self,
        request: str,
        joined: bytes,
        tokens: int,
        rows: dict[str, Rows],
        whole: dict[str, Mask],
        usable: Mask,
        plan: Plan,
        now: float,
        ready: bool,
        have: int = 0,
    ) -> None:
        """Remember a match; the arguments are as for ``explained``. ``ready``: whether all hits are in DRAM; ``have``:
        the number of blocks that the engine has itself. Call with the index lock held."""
        if not self._recent.takes(request):
            return
        blocks = len(joined) // 32
        tiers = np.zeros(blocks, np.int64) if ready else _tiers(self._partition, self._layout, rows, plan.blocks)
        tiers[:have] = len(self._partition.colds) + 1
        self._put(request, blocks, now, partial(self._explain, joined, tokens, rows, whole, usable, plan, now, tiers))

    def remember_hits(self, request: str, blocks: int, tokens: int, now: float, have: int) -> None:
        """Remember a match that found in DRAM everything that the engine did not have itself."""
        if self._recent.takes(request):
            self._put(request, 0, now, partial(self._hits, blocks, tokens, now, min(have, blocks)))

    def remember_miss(self, request: str, joined: bytes, tokens: int) -> None:
        """Remember that nothing was found."""
        if self._recent.takes(request):
            blocks, now = len(joined) // 32, self._partition.clock.time()
            rows = {name: np.zeros(blocks, np.int64) for name in self._identities}
            whole = {name: np.zeros(blocks, np.bool_) for name in self._identities}
            self.remember(
                request, joined, tokens, rows, whole, np.arange(blocks + 1) == 0, Plan(0, 0.0, None), now, True
            )

    def _put(self, request: str, blocks: int, now: float, explain: Callable[[], Explanation]) -> None:
        # of each block its digest and its tier, and in each group a row and a mark
        nbytes = (40 + 16 * len(self._identities)) * blocks
        self._recent.put(RecentRequest(request, self._tenant, self._who, nbytes, explain))

    def _hits(self, blocks: int, tokens: int, now: float, have: int) -> Explanation:
        size, since = self._layout.block_tokens, self._partition.index.absence_log.since
        parts = (ExplainedBlocks(0, have, Why.HIT, ENGINE), ExplainedBlocks(have, blocks, Why.HIT, "dram"))
        found = tuple(some for some in parts if len(some))
        return Explanation(max(tokens, blocks * size), size, found, now, since)

    def _explain(
        self,
        joined: bytes,
        tokens: int,
        rows: dict[str, Rows],
        whole: dict[str, Mask],
        usable: Mask,
        plan: Plan,
        now: float,
        tiers: Rows,
    ) -> Explanation:
        partition, layout = self._partition, self._layout
        with partition.index.lock:
            found = explained(partition, layout, self._identities, joined, rows, whole, usable, plan, now, tiers)
        return replace(found, tokens=max(tokens, len(joined) // 32 * layout.block_tokens))
