"""A tier that answers when it is told to, and a store that uses it: for tests in which the moment counts.

Nothing here runs by itself: reads and writes wait in ``reads`` and ``writes`` until the test lets them go, in
whatever order and with whatever result it likes. The bytes are kept for real, so readers can check them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvtide import Store, config
from kvtide.block import BlockKey
from kvtide.plan import admit
from kvtide.store.partition import Partition
from kvtide.tiers.base import NOWHERE, DropDone, Held, Miss, Read, ReadDone, TierStatistics, Write, WriteDone
from kvtide.transfer.cold_tier import ColdTier
from kvtide.transfer.lane import Lane
from tests.plan.small import Clock

__all__ = ["Gated", "GatedStore"]


@dataclass
class Gated:
    """Keeps what it is given in a dict. Each batch waits for ``let_read`` or ``let_write``."""

    kept: dict[int, tuple[BlockKey, bytes]] = field(default_factory=dict)
    reads: list[tuple[Sequence[Read], ReadDone]] = field(default_factory=list)
    writes: list[tuple[Sequence[Write], WriteDone]] = field(default_factory=list)
    drops: list[tuple[Sequence[tuple[BlockKey, int]], DropDone]] = field(default_factory=list)
    inline: bool = False
    """Whether reads and writes are answered before the call returns."""
    open_drops: bool = True
    """Whether drops are."""
    journal: list[str] = field(default_factory=list)
    """What was started, in order."""
    syncs: list[tuple[Sequence[tuple[BlockKey, int]], DropDone]] = field(default_factory=list)
    open_syncs: bool = True
    """Whether syncs are answered before the call returns."""

    def read(self, batch: Sequence[Read], done: ReadDone) -> None:
        self.journal.append("read")
        self.reads.append((batch, done))
        if self.inline:
            self.let_read()

    def write(self, batch: Sequence[Write], done: WriteDone) -> None:
        self.journal.append("write")
        self.writes.append((batch, done))
        if self.inline:
            self.let_write()

    def drop(self, items: Sequence[tuple[BlockKey, int]], done: DropDone) -> None:
        self.journal.append("drop")
        self.drops.append((items, done))
        if self.open_drops:
            self.let_drop()

    def sync(self, items: Sequence[tuple[BlockKey, int]], done: DropDone) -> None:
        self.journal.append("sync")
        self.syncs.append((items, done))
        if self.open_syncs:
            self.let_sync()

    def evict(self, key: BlockKey, place: int) -> None:
        assert self.kept.pop(place)[0] == key

    def scan(self) -> Iterator[Held]:
        return iter(())

    def own(self, places: npt.NDArray[np.int64], owners: npt.NDArray[np.int64]) -> None:
        raise AssertionError("it never holds anything from before")

    def statistics(self) -> TierStatistics:
        return TierStatistics(len(self.kept), 0, 0, 0)

    def close(self) -> None:
        assert self.reads == [] == self.writes, "closed before everything was answered"

    # -- the gates ----------------------------------------------------------------------------------------

    def let_read(self, good: bool = True) -> None:
        """Answer the oldest batch of reads."""
        batch, done = self.reads.pop(0)
        results = []
        for item in batch:
            here = good and self.kept.get(item.place, (b"",))[0] == item.key
            if here:
                item.span[:] = self.kept[item.place][1]
            else:
                item.span[:] = b"\xee" * len(item.span)  # rubbish: nobody may see it
            results.append(here)
        done(results)

    def refuse_read(self) -> None:
        """Answer the oldest batch of reads: the blocks are not the asker's."""
        batch, done = self.reads.pop(0)
        done([Miss.REFUSED] * len(batch))

    def let_write(self, good: bool = True) -> None:
        """Answer the oldest batch of writes."""
        batch, done = self.writes.pop(0)
        places = []
        for item in batch:
            place = max(self.kept, default=0) + 1 if good else NOWHERE
            if good:
                self.kept[place] = (item.key, bytes(item.span))
            places.append(place)
        done(places)

    def let_drop(self, good: bool = True) -> None:
        """Answer the oldest batch of drops."""
        items, done = self.drops.pop(0)
        for key, place in items:
            if place != NOWHERE:
                assert self.kept.pop(place)[0] == key
        done([good] * len(items))

    def let_sync(self, good: bool = True) -> None:
        """Answer the oldest batch of syncs."""
        items, done = self.syncs.pop(0)
        done([good and self.kept.get(place, (b"",))[0] == key for key, place in items])

    def let_all(self) -> None:
        """Answer whatever waits now, and what that brings."""
        while self.reads or self.writes:
            if self.reads:
                self.let_read()
            if self.writes:
                self.let_write()


class GatedStore(Store):
    """A store whose colder tier is ``tier``; everything else is real."""

    def __init__(
        self,
        tier: Gated,
        *,
        mode: str = "through",
        queue: int = 1 << 30,
        depth: int = 4,
        durable: bool = True,
        clock: Clock | None = None,
        **settings: dict[str, Any],
    ) -> None:
        self._gated = tier
        tree: dict[str, Any] = {"dram": {"budget": "1MiB", "segment": "1MiB"}, "nvme": {"path": "/unused"}}
        for section, values in settings.items():
            tree.setdefault(section, {}).update(values)

        def gated(partition: Partition) -> ColdTier:
            partition._running.callback(tier.close)
            lane, sync = Lane(tier, partition.clock, queue, depth), tier.sync if durable else None
            return ColdTier(1, "nvme", tier, lane, admit.make(mode, partition.index, lambda: 0), None, sync=sync)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Partition, "_open_nvme", gated)
            super().__init__(config.read(env={}, **tree), clock=clock)

    def close(self) -> None:
        self._gated.inline = True
        self._gated.let_all()
        super().close()
