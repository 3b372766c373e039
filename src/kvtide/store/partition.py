"""A part of a store with its own index, planner, pipeline and tiers.

A store is one partition for all tenants without a reserved share, and has one more for each reserved share.
``Partition`` is the interface that a backend and forgetting a tenant need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtide.block import BlockKey
from kvtide.clock import Clock
from kvtide.config import Config
from kvtide.events import Event, Feed
from kvtide.index.index import Index, Rows
from kvtide.plan.planner import Planner
from kvtide.security.key_ring import KeyRing
from kvtide.store.recorder import Recorder
from kvtide.tiers.dram.tier import Dram
from kvtide.tiers.shared.tier import Shared
from kvtide.transfer.cold_tier import ColdTier
from kvtide.transfer.pipeline import Asker, Pipeline
from kvtide.transfer.prefetch import Prefetcher
from kvtide.transfer.search import Search

__all__ = ["Partition"]


class Partition(Protocol):
    """A store, or a share of it that is reserved for a tenant."""

    config: Config
    clock: Clock
    index: Index
    dram: Dram
    colds: list[ColdTier]
    """Its tiers below DRAM."""
    planner: Planner
    pipeline: Pipeline
    search: Search
    returns: Prefetcher
    recorder: Recorder | None
    feed: Feed
    key_ring: KeyRing | None

    @property
    def parts(self) -> Sequence[Partition]:
        """All partitions of the store."""

    @property
    def shared_tiers(self) -> Sequence[tuple[ColdTier, Shared]]:
        """Its tiers that other hosts use too."""

    @property
    def largest_part(self) -> int:
        """The most bytes that one reservation should take."""

    @property
    def has_colder(self) -> bool:
        """Whether there are tiers below DRAM."""

    @property
    def read_bytes_queued(self) -> list[int]:
        """Bytes waiting to be read, by tier below DRAM."""

    def room_of(self, tenant: bytes) -> int:
        """Bytes of DRAM that a tenant may use."""

    def sweep(self) -> float:
        """Remove one slice of expired blocks; returns the current time."""

    def expire_rows(self, rows: Rows) -> list[Event]:
        """Remove expired rows; returns the events to publish. Call with the index lock held."""

    def expire(
        self,
        keys: Sequence[BlockKey],
        heads: Sequence[BlockKey],
        when: float,
        timeout: float | None,
        who: Asker = None,
    ) -> int:
        """Set the expiry of blocks to ``when``; returns how many were found."""

    def drop(
        self, keys: Sequence[BlockKey], timeout: float | None = None, *, who: Asker = None, told: bool = True
    ) -> int:
        """Drop blocks from every tier; returns how many were found."""

    def zero_traces(self, tenant: bytes) -> int:
        """Zero what memory still contains of a tenant's dropped blocks. Returns the number of slots that are zeroed
        later because a caller holds them."""
