"""Finds out why each block of a prompt is a hit or a miss, from the index and its records. Changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvtide.block import Layout
from kvtide.index.absence_log import Absence, AbsenceCause, EvictedFor
from kvtide.index.index import DRAM, PENDING, Mask, Rows
from kvtide.plan.planner import Plan
from kvtide.store.explanation import ENGINE, ExplainedBlocks, ExplainedTotals, Explanation, Why
from kvtide.store.partition import Partition
from kvtide.store.recent_requests import RANGES, RecentRequest
from kvtide.tiers.base import Identity
from kvtide.transfer.write_results import BY_CODE

__all__ = ["Explainer", "explained"]

_WHYS = list(Why)
_STORED = np.array([why.stored for why in _WHYS])
_MOST = 2_000
"""The most ranges of an explanation: a node serves nobody else while it makes one."""
_CODE = {why: number for number, why in enumerate(_WHYS)}
_OF_ABSENCE = np.array([_CODE[Why(absence.value)] if absence.value else 0 for absence in Absence], np.uint8)
"""The code of a block's reason, by the code of its record."""
_WITH_TIER = np.array([absence in (Absence.EVICTED, Absence.LOAD_FAILED) for absence in Absence])
"""Whether the tier is of interest, by the code of a record."""
_CAUSES, _FOR_WHOM = list(AbsenceCause), list(EvictedFor)
_TICK = 0.0002
"""Seconds by which the times of records are inexact, at most."""
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

    def _starts(self) -> npt.NDArray[np.int64]:
        """The first block of each range of blocks that are equal."""
        changes = np.zeros(max(0, len(self.why) - 1), np.bool_)
        for column in (self.why, self.tier, self.cause, self.for_whom, self.unwritten, self.group):
            changes |= column[1:] != column[:-1]
        return np.concatenate([np.zeros(min(1, len(self.why)), np.int64), np.flatnonzero(changes) + 1])

    def ranges(
        self, tiers: Sequence[str], layout: Layout, now: float, most: int
    ) -> tuple[tuple[ExplainedBlocks, ...], ExplainedTotals | None]:
        """The explanations, merged where they are equal. A tier is a number, plus 1 if it says anything. If there are
        more than ``most`` ranges, the others are one, and there are totals."""
        starts, blocks = self._starts(), len(self.why)
        if not blocks:
            return (), None
        listed = starts if len(starts) <= most else starts[: most - 1]
        end = blocks if len(starts) <= most else int(starts[most - 1])
        last, first = (f.reduceat(self.when[:end], listed).tolist() for f in (np.maximum, np.minimum))
        begins = listed.tolist()
        codes = [
            column[listed].tolist()
            for column in (self.why, self.tier, self.cause, self.for_whom, self.unwritten, self.group)
        ]
        names = ["" if len(layout.groups) == 1 else group.name for group in layout.groups]
        found = tuple(
            ExplainedBlocks(
                begin,
                stop,
                _WHYS[why],
                tiers[tier],
                _CAUSES[cause],
                _FOR_WHOM[for_whom],
                BY_CODE.get(unwritten),
                None if latest != latest else (_ago(now, latest), _ago(now, earliest)),  # not a number: not known
                "" if _WHYS[why].stored else names[group],
            )
            for begin, stop, why, tier, cause, for_whom, unwritten, group, latest, earliest in zip(
                begins, [*begins[1:], end], *codes, last, first, strict=True
            )
        )
        if end == blocks:
            return found, None
        return (*found, ExplainedBlocks(end, blocks, Why.NOT_LISTED)), self._totals(tiers)

    def _totals(self, tiers: Sequence[str]) -> ExplainedTotals:
        absent = np.flatnonzero(~_STORED[self.why])
        by_tier, by_reason = Counter[str](), Counter[str]()
        counts = np.bincount(self.why.astype(np.int64) << 8 | self.tier)
        pairs = np.flatnonzero(counts)
        for pair, count in zip(pairs.tolist(), counts[pairs].tolist(), strict=True):
            some = ExplainedBlocks(0, 0, _WHYS[pair >> 8], tiers[pair & 255])
            if some.why is Why.HIT:
                by_tier[some.tier] += count
            else:
                by_reason[some.reason] += count
        stored = int(absent[0]) if len(absent) else len(self.why)
        return ExplainedTotals(stored, dict(by_tier), dict(by_reason))


def _ago(now: float, when: float) -> float:
    return max(0.0, round(now - when, 2))


class _Past(NamedTuple):
    """What the index said at a match in the past."""

    tiers: Rows
    """The tier that each block came from, as a number."""
    written: dict[str, Mask]
    """The blocks that were being written, by group; without a group of which none was."""
    expires: dict[str, npt.NDArray[np.float64]]
    """When the blocks expire, by group; without a group if no block expires."""
    records: int
    """How many records of absences there were."""
    searched: bool
    """Whether shared storage was still being searched for blocks."""


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
    past: _Past | None = None,
) -> Callable[[], Explanation]:
    """Find out why the blocks of a prompt are hits or misses. ``rows``, ``whole`` and ``usable`` are those of a match,
    which would follow ``plan``. Call with the index lock held, and call the result without it.

    ``past`` is given for a match in the past, which was made at ``now``.
    """
    blocks = len(joined) // 32
    columns = _Columns(blocks)
    if blocks:
        longest, end = int(np.flatnonzero(usable)[-1]), plan.blocks + plan.slower
        columns.why[: plan.blocks] = _CODE[Why.HIT]
        columns.why[plan.blocks : end] = _CODE[Why.QUICKER_TO_COMPUTE]
        columns.why[end:longest] = _CODE[Why.NO_ROOM]
        columns.why[longest:] = _CODE[Why.AFTER_A_MISS]
        columns.tier[:] = 1 + (_tiers(partition, layout, rows, plan.blocks) if past is None else past.tiers)
        records = _Records(partition, now, past)
        _why_absent(records, layout, identities, joined, rows, whole, longest, columns)
        _failed_loads(records, layout, identities, joined, longest, columns)
    tiers = ["", "dram", *(cold.name for cold in partition.colds), ENGINE]
    since, shared = partition.index.absence_log.since, bool(partition.shared_tiers)

    def build() -> Explanation:
        found, totals = columns.ranges(tiers, layout, now, _MOST if past is None else RANGES)
        times = plan.load_seconds, plan.compute_seconds, plan.slower_load, plan.slower_compute
        return Explanation(0, layout.block_tokens, found, now, since, *times, totals=totals, shared=shared)

    return build


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
    past: _Past | None
    """What the index said then, if that was before: it does not say it any more, and later records do not count."""

    def expiry(self, group: str, some: Rows, rows: Rows) -> npt.NDArray[np.float64] | None:
        """When the blocks with the numbers ``some`` and these ``rows`` expire; None if no block does."""
        if self.past is not None:
            times = self.past.expires.get(group)
            return None if times is None else times[some]
        index = self.partition.index
        return index.expiry[rows] if index.mortal else None

    def being_written(self, group: str, some: Rows, rows: Rows) -> Mask:
        """Mask of blocks that are being written."""
        if self.past is not None:
            written = self.past.written.get(group)
            return np.zeros(len(some), np.bool_) if written is None else written[some]
        pending: Mask = self.partition.index.state[DRAM][rows] == PENDING
        return pending

    def later(self, times: npt.NDArray[np.float64]) -> tuple[Mask, Mask]:
        """Masks of records made after the match, and of those of which that is not known: they are of the same
        moment."""
        if self.past is None or self.past.records == self.partition.index.absence_log.statistics().records:
            never = np.zeros(len(times), np.bool_)
            return never, never
        after: Mask = times > self.now
        same: Mask = ~after & (times > self.now - _TICK)
        return after, same


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
    log = source.partition.index.absence_log
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
        after, same = source.later(records.times)
        doubtful, known = records.doubtful | known & (after | same), known & ~(after | same)
        why[~known] = _CODE[_unknown(source.partition)]
        why[~known & doubtful] = _CODE[Why.RECORD_OVERWRITTEN if log.on else Why.NOT_RECORDED]
        if source.past is not None and source.past.searched:
            why[:] = _CODE[Why.SEARCHED]
        when = np.where(known | records.doubtful, records.times, np.nan)
        tier = np.where(known & _WITH_TIER[records.codes], 1 + records.tiers, 0)
        if (expiry := source.expiry(group.name, mine, here)) is not None:
            expired = (here > 0) & (expiry <= source.now)
            why[expired], when[expired], tier[expired] = _CODE[Why.EXPIRED], expiry[expired], 0
        other = source.being_written(group.name, mine, here)
        why[other] = _CODE[Why.BEING_WRITTEN]
        other |= why == _CODE[Why.SEARCHED]
        when[other], tier[other] = np.nan, 0
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


def _number(fingerprint: int, proof: bytes) -> int:
    """A number for an identity and a proof."""
    return int.from_bytes(blake3(fingerprint.to_bytes(8, "little", signed=True) + proof).digest(8))


class Explainer:
    """Remembers the matches of one model and tenant, to be explained later."""

    def __init__(
        self,
        partition: Partition,
        layout: Layout,
        identities: Mapping[str, Identity],
        tenant: bytes,
        proof: bytes,
    ) -> None:
        """``proof``: past requests are told to those who opened their session with the same bytes: an identity follows
        from the tenant's tag and the model, which others may know or guess."""
        self._partition, self._layout, self._identities, self._tenant = partition, layout, identities, tenant
        self._who = frozenset(_number(who.fingerprint, proof) for who in identities.values())
        self._recent = partition.context.recent_requests

    def past(self, request: str) -> Explanation | None:
        """A past request of this model and tenant, by its name; None if it is not remembered, or was another's."""
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
        later: bool = False,
        pending: bool = False,
    ) -> None:
        """Remember a match; the arguments are as for ``explained``. ``ready``: whether all hits are in DRAM; ``have``:
        the number of blocks that the engine has itself; ``later``: whether this request was matched before;
        ``pending``: whether there may be more soon. Call with the index lock held."""
        if not self._recent.takes(request):
            return
        index, blocks = self._partition.index, len(joined) // 32
        tiers = np.zeros(blocks, np.int64) if ready else _tiers(self._partition, self._layout, rows, plan.blocks)
        tiers[:have] = len(self._partition.colds) + 1
        written = {name: mask for name, r in rows.items() if (mask := index.state[DRAM][r] == PENDING).any()}
        expires = {name: index.expiry[r] for name, r in rows.items()} if index.mortal else {}
        searched = pending and bool(self._partition.shared_tiers)
        past = _Past(tiers, written, expires, index.absence_log.statistics().records, searched)
        # of each block its digest and its tier, and in each group a row and three marks at most
        nbytes = (40 + (16 + 8 * bool(expires)) * len(rows)) * blocks
        explain = partial(self._explain, joined, tokens, rows, whole, usable, plan, now, past)
        self._put(request, nbytes, explain, later, searched)

    def remember_hits(self, request: str, blocks: int, tokens: int, now: float, have: int, later: bool = False) -> None:
        """Remember a match that found in DRAM everything that the engine did not have itself."""
        if self._recent.takes(request):
            self._put(request, 0, partial(self._hits, blocks, tokens, now, min(have, blocks)), later)

    def remember_miss(self, request: str, joined: bytes, tokens: int) -> None:
        """Remember that nothing was found. Call with the index lock held."""
        if self._recent.takes(request):
            blocks, now = len(joined) // 32, self._partition.clock.time()
            rows = {name: np.zeros(blocks, np.int64) for name in self._identities}
            whole = {name: np.zeros(blocks, np.bool_) for name in self._identities}
            self.remember(
                request, joined, tokens, rows, whole, np.arange(blocks + 1) == 0, Plan(0, 0.0, None), now, True
            )

    def _put(
        self,
        request: str,
        nbytes: int,
        explain: Callable[[], Explanation],
        later: bool,
        searched: bool = False,
    ) -> None:
        self._recent.put(RecentRequest(request, self._tenant, self._who, nbytes, explain, later, searched))

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
        past: _Past,
    ) -> Explanation:
        partition, layout = self._partition, self._layout
        with partition.index.lock:
            build = explained(partition, layout, self._identities, joined, rows, whole, usable, plan, now, past)
        return replace(build(), tokens=max(tokens, len(joined) // 32 * layout.block_tokens))
