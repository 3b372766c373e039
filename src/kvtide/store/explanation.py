"""Why blocks of a prompt were found or not: the result of ``Session.explain``."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

from kvtide.formatting import moment
from kvtide.index.absence_log import AbsenceCause, EvictedFor
from kvtide.transfer.write_results import Unwritten

__all__ = ["ENGINE", "ExplainedBlocks", "ExplainedTotals", "Explanation", "Why", "reasons"]

_WIDTH = 80
ENGINE = "engine"
"""Used as the tier of blocks that the engine had itself when it asked."""


class Why(Enum):
    """Why a block is a hit or a miss. The values are part of the protocol."""

    HIT = "hit"
    QUICKER_TO_COMPUTE = "quicker to compute"
    NO_ROOM = "more than DRAM holds"
    """It is stored, but DRAM cannot hold that many blocks of one prompt at a time."""
    AFTER_A_MISS = "after a miss"
    """It is stored, but cannot be used, because a block before it is missing, or one that a window needs."""
    BEING_WRITTEN = "being written"
    EVICTED = "evicted"
    EXPIRED = "expired"
    DROPPED = "dropped"
    FORGOTTEN = "forgotten"
    LOAD_FAILED = "load failed"
    STORE_DROPPED = "store dropped"
    OTHER_NAMESPACE = "another namespace"
    """The same tokens are stored for another model of this tenant: see ``ExplainedBlocks.differs``."""
    SEARCHED = "being searched for"
    """Shared storage was still being searched for it: it is not known whether it is there."""
    NEVER_SEEN = "never seen"
    NOT_SEEN_HERE = "not seen here"
    """This store has not had it. Whether other users of its shared storage had it is not known."""
    UNKNOWN_SINCE_RESTART = "unknown since restart"
    """Nothing has happened to it since the store was opened, over blocks of an earlier run."""
    RECORD_OVERWRITTEN = "record overwritten"
    NOT_RECORDED = "not recorded"
    """``explain.memory`` is 0."""
    NO_NODE = "no node"
    """No node was available to ask."""
    NOT_LISTED = "not listed"
    """There were too many ranges of blocks to list them all: see ``Explanation.totals``."""
    UNKNOWN = "unknown"
    """A reason that this version does not know."""

    @classmethod
    def _missing_(cls, value: object) -> Why:
        return cls.UNKNOWN

    @property
    def stored(self) -> bool:
        """Whether the block is in the store."""
        return self in (Why.HIT, Why.QUICKER_TO_COMPUTE, Why.NO_ROOM, Why.AFTER_A_MISS)


_UNEXPLAINED = (
    Why.NEVER_SEEN,
    Why.NOT_SEEN_HERE,
    Why.UNKNOWN_SINCE_RESTART,
    Why.RECORD_OVERWRITTEN,
    Why.NOT_RECORDED,
)


@dataclass(frozen=True, slots=True)
class ExplainedBlocks:
    """Consecutive blocks of a prompt with the same explanation."""

    first: int
    stop: int
    why: Why
    tier: str = ""
    """Where they are, or what they left; empty if unknown or in no tier."""
    cause: AbsenceCause = AbsenceCause.NONE
    """Of hits: why a load of them failed."""
    for_whom: EvictedFor = EvictedFor.UNKNOWN
    unwritten: Unwritten | None = None
    """Why no colder tier had them when they were evicted from DRAM; None if there is none."""
    ago: tuple[float, float] | None = None
    """How many seconds ago it happened to the last and to the first of them; None if that is not known. Of records that
    may have been overwritten: since when nothing has happened."""
    group: str = ""
    """The group that lacks them; empty if the layout has only one."""
    differs: tuple[str, ...] = ()
    """In what the namespaces differ that have these tokens."""

    def __len__(self) -> int:
        return self.stop - self.first

    @property
    def reason(self) -> str:
        """The reason in a few words, one of a small number: for counts."""
        if self.tier and self.why is Why.EVICTED:
            return f"evicted from {self.tier}"
        if self.tier and self.why is Why.LOAD_FAILED:
            return f"load from {self.tier} failed"
        return self.why.value


def reasons(tiers: Iterable[str]) -> list[str]:
    """Every ``ExplainedBlocks.reason`` of a miss that there can be in a store with these tiers."""
    found = {ExplainedBlocks(0, 0, why, tier).reason for why in Why if why is not Why.HIT for tier in tiers}
    return sorted(found)


@dataclass(frozen=True, slots=True)
class ExplainedTotals:
    """Counts of all blocks of a prompt, if not all ranges of them are listed."""

    stored: int
    """See ``Explanation.stored``."""
    tiers: dict[str, int]
    """Number of hits in each tier."""
    reasons: dict[str, int]
    """Number of misses for each reason."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why each block of a prompt is a hit or a miss. ``str`` says it in words."""

    tokens: int
    """Tokens of the prompt, including those after its last full block."""
    block_tokens: int
    blocks: tuple[ExplainedBlocks, ...]
    now: float
    """When this was true, in seconds since 1970."""
    since: float = 0.0
    """When the records began."""
    load_seconds: float = 0.0
    """Estimated seconds to load the hits."""
    compute_seconds: float | None = None
    """Estimated seconds to compute the rest; None if the speed of the engine is not known."""
    slower_load: float = 0.0
    """Estimated seconds to load the blocks that are quicker to compute,"""
    slower_compute: float = 0.0
    """and to compute them."""
    request: str = ""
    """The engine's name of the request, if this explains a past one."""
    totals: ExplainedTotals | None = None
    """None if ``blocks`` has all blocks; else the last of them are ``Why.NOT_LISTED``."""
    shared: bool = False
    """Whether there is shared storage, in which another user may have stored again what left the store."""

    @property
    def hits(self) -> int:
        """Blocks at the start of the prompt that are taken from the store."""
        return sum(self.by_tier().values())

    @property
    def stored(self) -> int:
        """Blocks at the start of the prompt that are in the store, used or not."""
        if self.totals is not None:
            return self.totals.stored
        missing = (some.first for some in self.blocks if not some.why.stored)
        return next(missing, self.blocks[-1].stop if self.blocks else 0)

    @property
    def unexplained(self) -> bool:
        """Whether there are blocks of which nothing is known."""
        return any(some.why in _UNEXPLAINED for some in self.blocks)

    def after_restart(self) -> Explanation:
        """The same for a caller who knows that the store was restarted: of what it had before nothing is known."""
        never, unknown = Why.NEVER_SEEN, Why.UNKNOWN_SINCE_RESTART
        blocks = tuple(replace(some, why=unknown) if some.why is never else some for some in self.blocks)
        totals = self.totals
        if totals is not None and (count := totals.reasons.get(never.value, 0)):
            reasons = {why: number for why, number in totals.reasons.items() if why != never.value}
            reasons[unknown.value] = reasons.get(unknown.value, 0) + count
            totals = replace(totals, reasons=reasons)
        return replace(self, blocks=blocks, totals=totals)

    def with_others(self, others: Iterable[tuple[int, tuple[str, ...]]]) -> Explanation:
        """The same with blocks explained of which nothing was known: their tokens are stored for another model. For
        each of ``others`` there is how many of the first tokens are stored for it, and in what it differs."""
        blocks, moved = list(self.blocks), Counter[str]()
        for tokens, differs in sorted(others, key=lambda other: -other[0]):
            limit, split = tokens // self.block_tokens, list[ExplainedBlocks]()
            for some in blocks:
                if some.why not in _UNEXPLAINED or some.first >= limit:
                    split.append(some)
                    continue
                stop = min(some.stop, limit)
                moved[some.reason] += stop - some.first
                split.append(ExplainedBlocks(some.first, stop, Why.OTHER_NAMESPACE, differs=differs))
                if stop < some.stop:
                    split.append(replace(some, first=stop))
            blocks = split
        return replace(self, blocks=tuple(blocks), totals=self._moved(moved))

    def _moved(self, moved: Counter[str]) -> ExplainedTotals | None:
        """The totals after other namespaces were found to have so many blocks of each reason."""
        if self.totals is None or not moved:
            return self.totals
        reasons = Counter(self.totals.reasons)
        reasons.subtract(moved)
        reasons[Why.OTHER_NAMESPACE.value] += moved.total()
        return replace(self.totals, reasons={why: count for why, count in reasons.items() if count > 0})

    def by_tier(self) -> dict[str, int]:
        """Number of hits in each tier."""
        if self.totals is not None:
            return dict(self.totals.tiers)
        found: Counter[str] = Counter()
        for some in self.blocks:
            if some.why is Why.HIT:
                found[some.tier] += len(some)
        return dict(found)

    def by_reason(self) -> dict[str, int]:
        """Number of misses for each reason."""
        if self.totals is not None:
            return dict(self.totals.reasons)
        found: Counter[str] = Counter()
        for some in self.blocks:
            if some.why is not Why.HIT:
                found[some.reason] += len(some)
        return dict(found)

    def summary(self) -> dict[str, object]:
        """The explanation in a few plain values, for the response to a request."""
        return {
            "request": self.request,
            "tokens": self.tokens,
            "block_tokens": self.block_tokens,
            "hits": self.by_tier(),
            "misses": self.by_reason(),
            "load_seconds": self.load_seconds,
            "compute_seconds": self.compute_seconds,
        }

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """The explanation in words, at most 80 columns wide."""
        count = self.blocks[-1].stop if self.blocks else 0
        whole = f"{self.tokens:,} tokens: {count:,} blocks of {self.block_tokens:,}, {self.hits:,} from the store"
        yield f"request {self.request}: {whole}" if self.request else whole
        for some in self.blocks:
            yield from textwrap.wrap(
                f"{self._range(some)}: {self.said(some)}", _WIDTH, initial_indent="  ", subsequent_indent="      "
            )
        if advice := self.advice():
            yield from textwrap.wrap(advice, _WIDTH)

    def _range(self, some: ExplainedBlocks) -> str:
        first, last = some.first * self.block_tokens, some.stop * self.block_tokens - 1
        numbers = f"block {some.first:,}" if len(some) == 1 else f"blocks {some.first:,}-{some.stop - 1:,}"
        return f"{numbers} (tokens {first:,}-{last:,})"

    def said(self, some: ExplainedBlocks) -> str:
        """The explanation of some of the blocks, in words."""
        tier, since = _shown(some.tier), moment(self.since)
        failed = f", but a load{self._when(some)} failed{_because(some)}" if some.cause is not AbsenceCause.NONE else ""
        text = {
            Why.HIT: f"in {tier}{failed}",
            Why.QUICKER_TO_COMPUTE: f"in {tier}, but quicker to compute ({_seconds(self.slower_compute)}) than to load "
            f"({_seconds(self.slower_load)})",
            Why.NO_ROOM: f"in {tier}, but more than DRAM can hold at a time",
            Why.AFTER_A_MISS: f"in {tier}, but of no use without those that are missing",
            Why.BEING_WRITTEN: "being written now",
            Why.EVICTED: f"evicted from {tier}{self._when(some)}{_evicted_by(some)}",
            Why.EXPIRED: f"expired{self._when(some)}",
            Why.DROPPED: f"dropped{self._when(some)}",
            Why.FORGOTTEN: f"forgotten{self._when(some)}, with all of its tenant",
            Why.LOAD_FAILED: f"a load{f' from {tier}' if tier else ''} failed{self._when(some)}{_because(some)}",
            Why.STORE_DROPPED: f"not stored{self._when(some)}{_because(some)}",
            Why.OTHER_NAMESPACE: f"stored under another namespace: {'; '.join(some.differs)}",
            Why.SEARCHED: "being searched for in shared storage",
            Why.NEVER_SEEN: f"never seen since the store was opened, empty, at {since}",
            Why.NOT_SEEN_HERE: f"not seen here since {since}, nor found in shared storage so far",
            Why.UNKNOWN_SINCE_RESTART: f"unknown since restart: not seen since {since}, and nothing is known of before",
            Why.RECORD_OVERWRITTEN: "unknown: a record may have been overwritten by later ones"
            + (f"; nothing has happened to it since {moment(self.now - some.ago[0])}" if some.ago else ""),
            Why.NOT_RECORDED: "unknown: nothing is recorded",
            Why.NO_NODE: "unknown: no node is available",
            Why.NOT_LISTED: self._not_listed(),
            Why.UNKNOWN: "unknown to this version of kvtide",
        }[some.why]
        if self.shared and some.why in _LEFT:
            text += "; whether shared storage has it again is not known"
        return f"{text} (group {some.group})" if some.group else text

    def _not_listed(self) -> str:
        if self.totals is None:
            return "not listed"
        whole = ", ".join(f"{count:,} x {why}" for why, count in sorted(self.totals.reasons.items()))
        return (
            f"not listed one by one; of all blocks together {self.hits:,} are hits, and missing are {whole or 'none'}"
        )

    def _when(self, some: ExplainedBlocks) -> str:
        if some.ago is None:
            return ""
        last, first = (_span(seconds) for seconds in some.ago)
        return f" {last} ago" if last == first else f" {last} to {first} ago"

    def advice(self) -> str:
        """What could be done about the first missing blocks; empty if there is nothing."""
        missing = next((some for some in self.blocks if some.why is not Why.HIT), None)
        if self.tokens < self.block_tokens:
            return f"Only whole blocks of {self.block_tokens:,} tokens are stored: nothing of this prompt."
        return "" if missing is None else _advice(missing)


def _shown(tier: str) -> str:
    return {"dram": "DRAM", ENGINE: "the engine's own cache"}.get(tier, tier)


def _seconds(value: float) -> str:
    return f"{value:.3g} s"


def _span(seconds: float) -> str:
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


_LEFT = {Why.EVICTED, Why.EXPIRED, Why.DROPPED, Why.FORGOTTEN, Why.LOAD_FAILED, Why.STORE_DROPPED}
_POLICIES = {AbsenceCause.LRU, AbsenceCause.BOUNDED, AbsenceCause.REUSE}


def _evicted_by(some: ExplainedBlocks) -> str:
    if some.cause in _POLICIES:
        said = f" by {some.cause.value}"
    elif some.cause is AbsenceCause.QUOTA:
        said = ", because its tenant's quota was used up"
    elif some.cause is AbsenceCause.BUDGET:
        said = ", because all users of that storage together had used up its budget"
    else:
        said = ""
    if some.for_whom is not EvictedFor.UNKNOWN:
        said += f", to make space for {some.for_whom.value}"
    if some.unwritten is not None:
        said += f"; no colder tier had it ({some.unwritten.value})"
    return said


def _because(some: ExplainedBlocks) -> str:
    return f": {some.cause.value}" if some.cause is not AbsenceCause.NONE else ""


_ADVICE = {
    Why.QUICKER_TO_COMPUTE: "Loading would have been slower: nothing is lost. If the estimate is wrong, check "
    "plan.prefill_tokens_per_second and the tier's speed in kvtide status.",
    Why.NO_ROOM: "Raise dram.budget, or the tenant's quota of it.",
    Why.BEING_WRITTEN: "Ask again in a moment.",
    Why.EXPIRED: "Give a longer ttl when it is stored, or none.",
    Why.OTHER_NAMESPACE: "If both should share blocks, make the fields named here equal.",
    Why.NEVER_SEEN: "If it should be there: was it stored after that time, were the tokens the same from the first "
    "one on, and does the engine store (engine.store)?",
    Why.NOT_RECORDED: "Set explain.memory to have reasons recorded.",
    Why.RECORD_OVERWRITTEN: "Raise explain.memory to have more records kept.",
}


def _advice(some: ExplainedBlocks) -> str:
    if some.why is Why.EVICTED:
        if some.cause is AbsenceCause.QUOTA:
            return f"Raise the tenant's quota of {some.tier} ({some.tier}.quotas)."
        if some.tier == "dram" and some.unwritten in (None, Unwritten.NO_TIER):
            return "Raise dram.budget, or add a tier below DRAM (nvme.path)."
        if some.tier == "dram" and some.unwritten is Unwritten.NOT_ADMITTED:
            return 'Raise dram.budget, or let the tier below DRAM take more (nvme.store = "through").'
        if some.tier == "dram":
            return "Raise dram.budget, or see kvtide status for what the tier below DRAM refuses."
        return f"Raise {some.tier}.budget."
    if some.why is Why.LOAD_FAILED and some.cause in (AbsenceCause.NO_ROOM, AbsenceCause.QUOTA):
        return "Raise dram.budget, or the tenant's quota of it."
    if some.why is Why.LOAD_FAILED:
        return "See the node's log, and check the medium with: kvtide doctor."
    if some.why is Why.STORE_DROPPED:
        if some.cause is AbsenceCause.CLIENT_SHARE:
            return "Raise dram.budget or node.client_share."
        if some.cause is AbsenceCause.NO_MEMORY_YET:
            return "The node was still taking its memory from the system, as a new one does: ask again."
        if some.cause is AbsenceCause.GIVEN_UP:
            return "The engine began to store it and stopped: see its log."
        return "Raise dram.budget, or the tenant's quota of it."
    return _ADVICE.get(some.why, "")
