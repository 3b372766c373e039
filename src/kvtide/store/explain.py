"""Finds out why each block of a prompt is a hit or a miss, from the index and its records. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtide.block import Layout
from kvtide.index.absence_log import Absence, AbsenceCause, EvictedFor
from kvtide.index.index import DRAM, PENDING, Mask, Rows
from kvtide.plan.planner import Plan
from kvtide.store.explanation import ExplainedBlocks, Explanation, Why
from kvtide.store.partition import Partition
from kvtide.tiers.base import Identity
from kvtide.transfer.write_results import BY_CODE

__all__ = ["explained"]

_WHYS = list(Why)
MOST = 10_000
"""The most ranges of an explanation: it must fit into one answer of a node."""
_CODE = {why: number for number, why in enumerate(_WHYS)}
_OF_ABSENCE = np.array([_CODE[Why(absence.value)] if absence.value else 0 for absence in Absence], np.uint8)
"""The code of a block's reason, by the code of its record."""
_WITH_TIER = [code for code, absence in enumerate(Absence) if absence in (Absence.EVICTED, Absence.LOAD_FAILED)]
"""The codes of records whose tier is of interest."""
_CAUSES, _FOR_WHOM = list(AbsenceCause), list(EvictedFor)
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
        names = ["", "dram", *(cold.name for cold in partition.colds)]
        several = len(layout.groups) > 1
        columns = [self.why, self.tier, self.cause, self.for_whom, self.unwritten, self.group]
        changes = np.zeros(max(0, len(self.why) - 1), np.bool_)
        for column in columns:
            changes |= column[1:] != column[:-1]
        starts = [0, *(np.flatnonzero(changes) + 1).tolist()] if len(self.why) else []
        found = []
        for first, stop in zip(starts[:MOST], [*starts[1:], len(self.why)], strict=False):
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
) -> Explanation:
    """``rows``, ``whole`` and ``usable`` are those of a match, which would follow ``plan``. Call with the index lock
    held."""
    blocks = len(joined) // 32
    columns = _Columns(blocks)
    if blocks:
        longest, end = int(np.flatnonzero(usable)[-1]), plan.blocks + plan.slower
        columns.why[: plan.blocks] = _CODE[Why.HIT]
        columns.why[plan.blocks : end] = _CODE[Why.QUICKER_TO_COMPUTE]
        columns.why[end:longest] = _CODE[Why.NO_ROOM]
        columns.why[longest:] = _CODE[Why.AFTER_A_MISS]
        columns.tier[:] = 1 + _tiers(partition, layout, rows, plan.blocks)
        _why_absent(partition, layout, identities, joined, rows, whole, longest, now, columns)
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


def _why_absent(
    partition: Partition,
    layout: Layout,
    identities: Mapping[str, Identity],
    joined: bytes,
    rows: dict[str, Rows],
    whole: dict[str, Mask],
    longest: int,
    now: float,
    columns: _Columns,
) -> None:
    """Fill in the reasons of the blocks from ``longest`` on that a required group lacks."""
    index, log = partition.index, partition.index.absence_log
    marks = _marks_of(joined)
    for number, group in enumerate(layout.groups):
        if not group.required:
            continue
        mine = longest + np.flatnonzero(~whole[group.name][longest:])
        mine = mine[~columns.decided[mine]]
        if not len(mine):
            continue
        here, records = rows[group.name][mine], log.find(marks[mine], identities[group.name].fingerprint)
        why = _OF_ABSENCE[records.codes]
        known = records.codes > 0
        why[~known] = _CODE[_unknown(partition)]
        why[~known & records.doubtful] = _CODE[Why.RECORD_OVERWRITTEN if log.on else Why.NOT_RECORDED]
        when = np.where(known, records.times, np.nan)
        tier = np.where(np.isin(records.codes, _WITH_TIER), 1 + records.tiers, 0)
        if index.mortal:
            expired = (here > 0) & (index.expiry[here] <= now)
            why[expired], when[expired], tier[expired] = _CODE[Why.EXPIRED], index.expiry[here][expired], 0
        written = index.state[DRAM][here] == PENDING
        why[written], when[written], tier[written] = _CODE[Why.BEING_WRITTEN], np.nan, 0
        columns.why[mine], columns.when[mine], columns.tier[mine] = why, when, tier
        told = known & (why == _OF_ABSENCE[records.codes])
        columns.cause[mine], columns.for_whom[mine] = records.causes * told, records.for_whom * told
        columns.unwritten[mine], columns.group[mine], columns.decided[mine] = records.unwritten * told, number, True


def _unknown(partition: Partition) -> Why:
    """The explanation of a block of which there was never a record."""
    if not partition.began_empty:
        return Why.UNKNOWN_SINCE_RESTART
    return Why.NOT_SEEN_HERE if partition.shared_tiers else Why.NEVER_SEEN
