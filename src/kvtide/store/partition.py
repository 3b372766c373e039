"""A part of a store with its own index, planner, pipeline and tiers.

A store is one partition for everybody who has nothing reserved, and has one more for each reserved share. ``Partition``
is what a backend needs of it, and what is needed to forget a tenant.
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
from kvtide.transfer.returns import Returns
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
    returns: Returns
    recorder: Recorder | None
    feed: Feed
    key_ring: KeyRing | None

    @property
    def parts(self) -> Sequence[Partition]:
        """All partitions of the store that this one stands for."""

    @property
    def shared_tiers(self) -> Sequence[tuple[ColdTier, Shared]]:
        """Its tiers that other hosts use too."""

    @property
    def largest_part(self) -> int:
        """Bytes that one reservation should have at most."""

    @property
    def has_colder(self) -> bool:
        """Whether there are tiers below DRAM."""

    @property
    def read_bytes_queued(self) -> list[int]:
        """Bytes that wait to be read, by tier below DRAM."""

    def room_of(self, tenant: bytes) -> int:
        """Bytes of DRAM that a tenant may have."""

    def sweep(self) -> float:
        """Remove some of what has expired; answers the time."""

    def expire_rows(self, rows: Rows) -> list[Event]:
        """Remove these rows, which have expired. Under the index's lock."""

    def expire(
        self,
        keys: Sequence[BlockKey],
        heads: Sequence[BlockKey],
        when: float,
        timeout: float | None,
        who: Asker = None,
    ) -> int:
        """Let blocks expire at a time; answers how many there were."""

    def drop(
        self, keys: Sequence[BlockKey], timeout: float | None = None, *, who: Asker = None, told: bool = True
    ) -> int:
        """Drop blocks from every tier; answers how many there were."""

    def zero_traces(self, tenant: bytes) -> int:
        """Zero what memory still has of a tenant's blocks, which were dropped; answers how many slots are zeroed later,
        because somebody holds them."""
