"""Writes the blocks that only this node has to shared storage, before the node is stopped for good.

Those in memory, the ones used last first, to each shared storage that is written to. Blocks that are on the node's disk
only are left there: they are the colder ones, and are found again if the node is started with that disk. Writes wait
for their turn in the storage's queue and are limited by its budget, so a storage that hangs ends the drain after
its patience, and a storage that is full takes the hottest blocks."""

from __future__ import annotations

import logging
import threading

from kvtide.store.node_statistics import DrainStatistics
from kvtide.store.store import Store

__all__ = ["Drain"]

log = logging.getLogger("kvtide.peers")


class Drain:
    """Begins at once, on a thread of its own. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._stop = threading.Event()
        self._blocks = self._written = 0
        self._done = False
        self._thread = threading.Thread(target=self._run, name="kvtide-drain", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Drain, {self._written} of {self._blocks} blocks written>"

    def statistics(self) -> DrainStatistics:
        storages = [cold.name for p in self._store.partitions for cold, _ in p.shared_tiers]
        return DrainStatistics(self._blocks, self._written, self._done, sorted(set(storages)))

    def _run(self) -> None:
        try:
            for partition in self._store.partitions:
                self._blocks += partition.pipeline.count_unshared()
            before = 0
            for partition in self._store.partitions:
                for written in partition.pipeline.write_to_shared():
                    self._written = before + written
                    if self._stop.is_set():
                        return
                before = self._written
        except Exception:
            log.exception("draining failed; what was written until now is in shared storage")
        finally:
            self._done = not self._stop.is_set()

    def close(self) -> None:
        """End it. Writes that were begun are completed."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
