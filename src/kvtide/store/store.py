"""The store: its partitions, and what they have in common: sessions, keys, events, the recorder, statistics."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from kvtide import arguments, forks
from kvtide.block import BlockKey
from kvtide.capacity import check_memory
from kvtide.clock import Clock, SystemClock
from kvtide.config import Config
from kvtide.events import Event, Feed
from kvtide.index.keys import Model, Tenant
from kvtide.index.weights_identity import WeightsId, identify
from kvtide.interrupts import again_if_interrupted
from kvtide.security.audit import audit_of
from kvtide.security.key_ring import open_ring
from kvtide.store.backend import Backend, LocalBackend
from kvtide.store.forget import Forgotten, forget
from kvtide.store.known_models import KnownModels, describe
from kvtide.store.partition import Partition, StoreContext
from kvtide.store.recent_requests import RecentRequests
from kvtide.store.recorder import Recorder
from kvtide.store.reserved_shares import divide
from kvtide.store.session import SessionHost
from kvtide.store.statistics import Statistics, TenantStatistics
from kvtide.tiers.dram.copy import Copier
from kvtide.tiers.nvme.tier import Nvme
from kvtide.tiers.shared.drop_log import DropNotice
from kvtide.tiers.syscalls import Disk
from kvtide.transfer.disk_measurement import Measuring
from kvtide.transfer.write_results import Flushed, Unwritten

__all__ = ["Statistics", "Store"]

log = logging.getLogger("kvtide.store")


class Store(SessionHost):
    """KV blocks in DRAM, on NVMe and in shared storage.

    Open it with ``kvtide.open``; close it, or use it in a ``with`` statement.
    """

    def __init__(
        self,
        config: Config,
        *,
        clock: Clock | None = None,
        disk: Disk | None = None,
        mapped: bool = False,
        already_mapped: int = 0,
    ) -> None:
        """``mapped``: other processes will map its memory. ``already_mapped``: bytes of its budget that
        processes have mapped since before."""
        super().__init__("open it again with kvtide.open(...)")
        check_memory(config.dram.budget, node=mapped)
        shares = divide(config)
        self.given = config
        """All settings; ``config`` has those of ``main``."""
        self.config = shares.rest
        self.clock = clock or SystemClock()
        self.feed = Feed()
        self.name = secrets.token_bytes(16)
        """A random name, by which a node recognises itself among other nodes."""
        self._reserved: dict[bytes, Partition] = {}
        """Reserved shares, by the tenant's tag."""
        self._lost: Counter[Unwritten] = Counter()
        """The value of ``lost`` at the last flush."""
        partitions: list[Partition] = []
        # If any step fails, everything acquired before is released, the last first.
        with contextlib.ExitStack() as undo:
            record = self.config.record
            self.recorder = Recorder(Path(record.path), record.limit, self.clock) if record.path else None
            if self.recorder is not None:
                undo.callback(self.recorder.close)
            undo.callback(_each, partitions, Partition.free)
            self.key_ring = open_ring(self.config.security, self.clock)
            if self.key_ring is not None:
                undo.callback(self.key_ring.close)
                self.key_ring.start()
            undo.callback(_each, partitions, Partition.close)
            self.known_models = KnownModels(config.explain.memory // 8)
            self.recent_requests = RecentRequests(config.explain.memory // 2, self.clock)
            undo.callback(self.recent_requests.close)
            context = StoreContext(
                self.clock,
                self.feed,
                itertools.count(),
                self.recorder,
                self.key_ring,
                disk,
                mapped=mapped,
                known_models=self.known_models,
                recent_requests=self.recent_requests,
                name=self.name,
            )

            self.main = Partition(self.config, context, shares.quotas, already_mapped)
            """The partition of all tenants without a reserved share."""
            partitions.append(self.main)
            # Those of ``main``, for benchmarks and tests: most stores have no other partition.
            self.index, self.dram, self.pipeline = self.main.index, self.main.dram, self.main.pipeline
            shares.clear()
            for tenant, settings in shares.reserved.items():
                share = self._reserved[tenant] = Partition(settings, context)
                # of an earlier run, with another division, it may have had blocks elsewhere
                share.began_empty &= self.main.began_empty
                partitions.append(self._reserved[tenant])
            self.copier = Copier(busy=lambda: any(c.lane.write_bytes for p in partitions for c in p.colds))
            undo.callback(self.copier.close)
            for partition in self.partitions:
                partition.start(self._drop_notice)
            self._measuring = self._measured_disk()
            if self._measuring is not None:
                undo.callback(self._measuring.close)
                self._measuring.start()
            if self.recorder is not None:
                self._report_recording(self.recorder.path.absolute())
            undo.pop_all()

    def _report_recording(self, path: Path) -> None:
        if (audit := audit_of(self.config.security, self.clock)) is not None:
            audit.record("record requests", "begun", file=str(path))
        log.warning(
            "requests of all tenants are recorded in %s: lengths, times and which blocks they share, but no content",
            path,
        )

    def _measured_disk(self) -> Measuring | None:
        """Measures the disk for all partitions, which use the same; None if there is no NVMe tier."""
        colds = self.main.colds
        if not colds or not isinstance(tier := colds[0].tier, Nvme):
            return None
        cold = colds[0]

        def may_write(nbytes: int) -> bool:
            with self.index.lock:  # the measurement must not cause blocks to be refused
                budget = cold.budget
                return budget is None or (budget.statistics().bytes_left >= nbytes and budget.take(nbytes))

        lanes = [c.lane for partition in self.partitions for c in partition.colds if c.name == "nvme"]
        settings = self.config.nvme
        return Measuring(tier, lanes, Path(settings.path).expanduser(), settings.budget, self.clock, may_write)

    def _drop_notice(self, name: str) -> DropNotice:
        """Handlers for notices that others dropped blocks, or forgot a tenant, in the storage of a tier of ``main``."""

        def dropped(keys: Sequence[BlockKey]) -> None:
            for partition in self.partitions:
                partition.drop_here(keys)

        def forgotten(tenant: bytes) -> None:
            for partition in self.partitions:
                partition.forget_here(tenant)

        def missed() -> None:
            for partition in self.partitions:
                partition.drop_all_here()

        return DropNotice(dropped, forgotten, missed, lambda: self.main.pipeline.catch_up(name))

    def _backend(self, model: Model, tenant: Tenant) -> Backend:
        namespace = model.namespace(tenant)
        partition, proof = self.partition_of(tenant.tag), tenant.proof
        backend = LocalBackend(partition, model.layout, namespace, tenant.tag, proof=proof)
        if self.config.explain.memory:
            backend.first_use = functools.partial(
                self.known_models.note, tenant.tag, b"", namespace, describe(model, tenant)
            )
        return backend

    def partition_of(self, tenant: bytes) -> Partition:
        """The partition that has the tenant's blocks."""
        return self._reserved.get(tenant, self.main)

    @property
    def partitions(self) -> list[Partition]:
        """``main``, and the reserved shares."""
        return [self.main, *self._reserved.values()]

    def forget(self, tenant: bytes, who: str = "") -> Forgotten:
        """Destroy a tenant's keys, then its blocks in every tier; returns how many there were.

        Its blocks in memory are zeroed, and so are the remains of evicted ones. A block that a caller still holds, with
        a match or for a transfer, is zeroed when it is released; the result counts these.

        Raises HeldError, and does nothing, under a legal hold; UnknownTenantError if the tenant has neither a key nor a
        block; TierError if some blocks could not be erased (these are unreadable if they were encrypted). Takes as long
        as reading a page of every slot on disk, and does not block other tenants. Until it returns, the tenant can
        neither store nor load blocks.
        """
        with self.guard:
            return forget(self.partitions, tenant, who)

    def weights(self, path: str | Path | None = None, weights_id: str | None = None) -> WeightsId:
        """The identity of weights, from their path or a name that the caller chooses, for ``Model(weights=...)``.

        Digests of files are cached in ``naming.weights_cache``.
        """
        return identify(path, weights_id, self.config.naming.weights_cache)

    def follow(self, follower: Callable[[Event], None]) -> Callable[[], None]:
        """Call ``follower`` for every block stored or removed. Call the returned function to stop.

        ``follower`` runs on the thread that moves the block. It must be quick, and must not close the store, which
        would wait for itself.
        """
        forks.check(self.origin)
        leave = self.feed.follow(follower)
        return lambda: leave() if self.origin is forks.here else None

    def flush(self, timeout: float | None = None) -> Flushed:
        """Wait until the tiers below DRAM have written what they were given, ``timeout`` seconds at most.

        It starts no further writes. The result says what is written, what is not and why; it is True if everything is
        written that should be. In a store without tiers below DRAM nothing should be, so the result is True and says
        that no block outlasts the process. Written is not yet durable: see ``Session.store(durable=True)``.
        """
        forks.check(self.origin)
        timeout = arguments.seconds(timeout, "timeout")
        end = None if timeout is None else time.monotonic() + timeout
        for partition in self.partitions:
            partition.wait_for_credit(end)
        first, *others = [partition.flushed(end) for partition in self.partitions]
        found = sum(others, first)
        with self._lock:
            before, self._lost = self._lost, self.lost
            return found if self._lost == before else found + Flushed(0, {}, self._lost - before)

    @property
    def lost(self) -> Counter[Unwritten]:
        """Counts, since the store was opened, blocks that left DRAM and reached no colder tier though one should have
        had them."""
        return sum((partition.pipeline.lost for partition in self.partitions), Counter[Unwritten]())

    def statistics(self) -> Statistics:
        forks.check(self.origin)
        found = self.main.statistics()
        reserved = {t.hex(): TenantStatistics.reserved(share.statistics()) for t, share in self._reserved.items()}
        tenants = found.tenants | reserved
        if (recorder := self.recorder) is not None:
            tenants = {
                tag: replace(one, recorded_as=recorder.tenant(bytes.fromhex(tag))) for tag, one in tenants.items()
            }
        return replace(
            found,
            feed=self.feed.statistics(),
            sessions=len(self._sessions),
            tenants=tenants,
            recorder=self.recorder.statistics() if self.recorder is not None else None,
            recent=self.recent_requests.statistics(),
            known_models=self.known_models.statistics(),
        )

    def __repr__(self) -> str:
        return f"<Store {len(self.index)} blocks{', closed' if self.closed else ''}>"

    def close(self) -> None:
        """End all sessions, persist what should outlive the process, and release everything."""
        if not self._end_sessions():
            return
        stack = contextlib.ExitStack()
        if self.recorder is not None:
            stack.callback(again_if_interrupted, self.recorder.close)
        stack.callback(again_if_interrupted, self.recent_requests.close)
        stack.callback(again_if_interrupted, self.copier.close)
        partitions = self.partitions
        stack.callback(_each, partitions, Partition.free)
        if self.key_ring is not None:
            stack.callback(again_if_interrupted, self.key_ring.close)
        stack.callback(_each, partitions, Partition.close)
        for partition in reversed(partitions):
            stack.callback(partition.finish)
        if self._measuring is not None:
            stack.callback(again_if_interrupted, self._measuring.close)
        # Nothing is released before everything is on the stack: if interrupted before that, the caller can close again.
        with stack:
            self._ended = True
            if self.recorder is not None:
                self.recorder.end()  # early: the remaining steps may outlast a node's shutdown time limit


def _each(partitions: Sequence[Partition], end: Callable[[Partition], None]) -> None:
    """Close or free all partitions, even if one fails: ``main`` first, because it applies to all of them what other
    users of shared storage have dropped."""
    with contextlib.ExitStack() as stack:
        for partition in reversed(partitions):
            stack.callback(again_if_interrupted, functools.partial(end, partition))
