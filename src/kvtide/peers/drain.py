"""Writes the blocks that only this node has to shared storage, before the node is stopped for good.

Those in memory, the ones used last first, to each shared storage that is written to. Blocks that are on the node's disk
only are left there: they are the colder ones, and are found again if the node is started with that disk. Writes wait
for their turn in the storage's queue and are limited by its budget, so a storage that hangs ends the drain after
its patience, and a storage that is full takes the hottest blocks.

The node goes on serving meanwhile, so blocks come while others are written. They are written in further rounds, until a
round finds nothing new. A block that could not be written is not tried again by the same drain."""

from __future__ import annotations

import logging
import threading

from kvtide.block import BlockKey
from kvtide.store.node_statistics import DrainStatistics
from kvtide.store.partition import Partition
from kvtide.store.store import Store

__all__ = ["Drain"]

log = logging.getLogger("kvtide.peers")

_ROUNDS = 10
"""A node that is stored to without a pause would drain for ever."""


class Drain:
    """Is used once, and writes on a thread of its own. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._stop = threading.Event()
        self._blocks = self._written = 0
        self._failed = ""
        self.done = False
        """Whether it has ended, well or not."""
        self._thread = threading.Thread(target=self._run, name="kvtide-drain", daemon=True)

    def __repr__(self) -> str:
        return f"<Drain, {self._written} of {self._blocks} blocks written>"

    def statistics(self) -> DrainStatistics:
        done, written = self.done, self._written  # a block that came after it was counted may be written already
        return DrainStatistics(max(self._blocks, written), written, done, self._storages(), self._failed)

    def _storages(self) -> list[str]:
        return sorted({cold.name for p in self._store.partitions for cold, _ in p.shared_tiers})

    def start(self) -> None:
        """Begin, once."""
        self._thread.start()

    def fail(self, reason: str) -> None:
        """End it before it begins."""
        self._failed, self.done = reason, True

    def stop(self) -> None:
        """Begin no further writes. Does not wait."""
        self._stop.set()

    def join(self) -> None:
        """Wait until it has ended, if it was begun."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._count()
            if self._storages():
                self._write()
                self._count()
        except Exception as e:
            log.exception("draining failed; what was written until now is in shared storage")
            self._failed = str(e) or type(e).__name__
        finally:
            self.done = True

    def _partitions(self) -> list[Partition]:
        """Those that write to shared storage, which reserved shares do not; all, if none does."""
        return [p for p in self._store.partitions if p.shared_tiers] or list(self._store.partitions)

    def _count(self) -> None:
        self._blocks = self._written + sum(p.pipeline.count_unshared() for p in self._partitions())

    def _write(self) -> None:
        tried = [set[BlockKey]() for _ in self._partitions()]
        for _ in range(_ROUNDS):
            known = sum(map(len, tried))
            for partition, keys in zip(self._partitions(), tried, strict=True):
                before = self._written
                for written in partition.pipeline.write_to_shared(keys):
                    self._written = before + written
                    if self._stop.is_set():
                        return
            if sum(map(len, tried)) == known:
                return
            self._count()
