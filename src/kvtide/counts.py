"""The names of what a store counts: ``Statistics.counts``, metrics and ``kvtide status`` have them.

The names are part of the interface and never change. What a counter means is in ``docs/glossary.md``. Code asks for a
counter's ``kind``, and does not look into its name.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, StrEnum
from typing import Self

__all__ = ["Count", "CountKind", "TierCount", "count_names"]


class CountKind(Enum):
    """Why a counter is of interest."""

    NORMAL = "normal"
    DROP = "drop"
    """Stores or loads that were not made."""
    DAMAGE = "damage"
    """Blocks that were damaged."""


_DROP, _DAMAGE = CountKind.DROP, CountKind.DAMAGE


class Count(StrEnum):
    """Counters of a store, or of a reserved share."""

    kind: CountKind

    def __new__(cls, name: str, kind: CountKind = CountKind.NORMAL) -> Self:
        member = str.__new__(cls, name)
        member._value_ = name
        member.kind = kind
        return member

    BLOCKS_STORED = "blocks stored"
    BLOCKS_WRITTEN_TWICE = "blocks written twice"
    BLOCKS_DROPPED = "blocks dropped"
    BLOCKS_EXPIRED = "blocks expired"
    BLOCKS_MOVED = "blocks moved in dram"
    BLOCKS_CHANGED = "blocks changed in DRAM after they were sealed", _DAMAGE
    INTERRUPTED_CALLS = "interrupted calls"
    HINT_TOOL = "hints: the turn ended in a tool"
    HINT_END = "hints: the turn ended"
    HINT_EXPECTED_BACK = "hints: expected back"
    BROUGHT_BACK = "prompts brought back"
    BROUGHT_BACK_IN_TIME = "prompts brought back in time"
    READS_HEDGED = "reads hedged"
    HEDGES_WON = "reads hedged and supplied by a second node"
    READS_MOVED = "failed reads moved to a second node"
    READS_MOVED_WON = "failed reads supplied by a second node"
    STORE_NO_ROOM = "stores dropped: no room in DRAM", _DROP
    STORE_FORGOTTEN = "stores dropped: their tenant is being forgotten", _DROP
    STORE_NO_MEMORY_YET = "stores dropped: memory was not taken in time", _DROP
    STORE_NODE_LATE = "stores dropped: the node answered an engine too late", _DROP
    STORE_ENGINE_PAGES = "stores dropped: too many pages of an engine waited", _DROP
    LOAD_NO_ROOM = "loads dropped: no room in DRAM", _DROP
    LOAD_FORGOTTEN = "loads dropped: their tenant is being forgotten", _DROP


class TierCount(Enum):
    """Counters of one tier: ``of`` puts the tier's name in. No strings, so that none is used as a name without it."""

    kind: CountKind

    def __new__(cls, name: str, kind: CountKind = CountKind.NORMAL) -> Self:
        member = object.__new__(cls)
        member._value_ = name
        member.kind = kind
        return member

    BLOCKS_EVICTED = "blocks evicted from {}"
    BLOCKS_WRITTEN = "blocks written to {}"
    BLOCKS_READ = "blocks read from {}"
    BLOCKS_FOUND = "blocks found in {}"
    BLOCKS_LATE = "blocks late from {}"
    BLOCKS_NOT_SYNCED = "blocks not synced in {}"
    BLOCKS_UNREADABLE = "blocks unreadable in {}", _DAMAGE
    STORE_QUEUE_FULL = "stores dropped: the queue of {} is full", _DROP
    STORE_WRITE_BUDGET = "stores dropped: the write budget of {} is used up", _DROP
    STORE_NOT_ADMITTED = "stores dropped: the admission to {} refused", _DROP
    STORE_QUOTA = "stores dropped: a tenant's quota of {} is used up", _DROP
    LOAD_QUOTA = "loads dropped: a tenant's quota of {} is used up", _DROP
    LOAD_FAILED = "loads dropped: a read from {} failed", _DROP
    LOAD_OTHERS_BLOCK = "loads dropped: the block in {} is not the asker's", _DROP

    def of(self, tier: str) -> str:
        """The counter's name for a tier."""
        return str(self.value).format(tier)


def count_names(tiers: Collection[str], *kinds: CountKind) -> set[str]:
    """The names of all counters of these kinds in a store with these tiers."""
    found = {count.of(tier) for count in TierCount if count.kind in kinds for tier in tiers}
    return found.union(str(count) for count in Count if count.kind in kinds)
