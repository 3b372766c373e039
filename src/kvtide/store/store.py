"""The store: connects index, planner, pipeline and tiers. The only module that knows all of them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np

from kvtide import arguments, forks
from kvtide.block import BlockKey
from kvtide.capacity import check_disk, check_memory
from kvtide.clock import Clock, SystemClock
from kvtide.config import Config, Storage
from kvtide.errors import TierError
from kvtide.events import Event, Feed
from kvtide.index import slices
from kvtide.index.index import ABSENT, DRAM, SEALED, Index, Mask, Rows
from kvtide.index.keys import Model, Tenant
from kvtide.index.orphans import Orphans
from kvtide.index.slices import rest
from kvtide.index.tenant_usage import TenantUsage
from kvtide.index.weights import WeightsId, identify
from kvtide.interrupts import to_the_end
from kvtide.plan import admit, policy
from kvtide.plan.coldest import Coldest
from kvtide.plan.evict import Evictor, room
from kvtide.plan.learner import Learner
from kvtide.plan.planner import Planner, Source
from kvtide.plan.quota import Quota
from kvtide.plan.usage import UsageTracker
from kvtide.plan.write_budget import WriteBudget
from kvtide.security.audit import audit_of
from kvtide.security.key_ring import KeyRing, open_ring
from kvtide.store.backend import Backend, LocalBackend
from kvtide.store.forget import Forgotten, forget, keys_of
from kvtide.store.housekeeping import Housekeeper
from kvtide.store.recorder import Recorder
from kvtide.store.reserved_shares import Shares, divide
from kvtide.store.restore import adopt, charge
from kvtide.store.session import SessionHost
from kvtide.store.statistics import ScratchStatistics, Statistics, TenantStatistics
from kvtide.tiers.disk import Disk
from kvtide.tiers.dram.copy import Copier
from kvtide.tiers.dram.tier import Dram
from kvtide.tiers.format.encryption import Encryption
from kvtide.tiers.format.scratch import Pool
from kvtide.tiers.nvme.drop_positions import DropLogPositions
from kvtide.tiers.nvme.tier import Nvme
from kvtide.tiers.shared.blobs import Blobs, LastingBlobs
from kvtide.tiers.shared.budget import BudgetCoordinator, CoordinationBlobs
from kvtide.tiers.shared.credits import BudgetThread, WriteCredits
from kvtide.tiers.shared.drop_log import DropLogReader, DropNotice
from kvtide.tiers.shared.open import storages
from kvtide.tiers.shared.tier import Shared
from kvtide.transfer.cold_tier import ColdTier
from kvtide.transfer.disk_measurement import Measuring
from kvtide.transfer.lane import Lane
from kvtide.transfer.pipeline import Asker, Expiring, Pipeline
from kvtide.transfer.prefetch import Prefetcher
from kvtide.transfer.search import Search
from kvtide.transfer.write_results import Flushed, Unwritten

__all__ = ["Statistics", "Store"]

log = logging.getLogger("kvtide.store")

NVME = 1
_SCRATCH, _PART = 64 << 20, 8
"""Scratch memory for the I/O threads of one tier: 1/``_PART`` of the DRAM budget, but at least ``_SCRATCH`` bytes."""
_LOG = 128
"""The drop log may take at most 1/``_LOG`` of a shared storage's budget."""


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
        shared: bool = False,
        aside: int = 0,
        within: Store | None = None,
    ) -> None:
        """``shared``: other processes will map its memory; ``aside`` bytes of its budget are already theirs.

        ``within``: this store is a reserved share of that one.
        """
        super().__init__("open it again with kvtide.open(...)")
        if within is None:
            check_memory(config.dram.budget, node=shared)
        shares = divide(config)
        self.config = config = shares.rest
        self._shares = shares
        self.clock = clock or SystemClock()
        shared_ones = list(storages(config, disk))
        self.index = Index(1 + bool(config.nvme.path) + len(shared_ones))
        self.feed: Feed = within.feed if within else Feed()
        self._serials: Iterator[int] = within._serials if within else itertools.count()
        self._within = within
        self.colds: list[ColdTier] = []
        """Tiers below DRAM."""
        self._keepers: dict[str, BudgetThread] = {}
        self._listeners: list[DropLogReader] = []
        self._reserved: dict[bytes, Store] = {}
        self._lost: Counter[Unwritten] = Counter()
        """The value of ``lost`` at the last flush."""
        memory = config.dram
        self._scratch: list[Pool] = []
        self._tracers: list[threading.Thread] = []
        """Threads that zero the remaining data of tenants whose keys were destroyed."""
        # If any step fails, everything acquired before is released: memory, threads, files, the directory lock.
        with contextlib.ExitStack() as undo:
            self.copier = Copier(busy=lambda: any(c.lane.write_bytes for c in self.colds))
            undo.callback(self.copier.close)
            self.dram = Dram(
                memory.budget,
                memory.segment,
                memory.huge_pages,
                memory.prefault,
                shared,
                aside,
                ahead=shared,
                serials=self._serials,
            )
            undo.callback(self.dram.close)
            self._uses = UsageTracker(self.index, self.clock)
            ranking = policy.make(memory.policy, self.index, DRAM, lambda: room(self.dram))
            self._uses.serve(ranking)
            self.recorder: Recorder | None = within.recorder if within else self._open_recorder()
            if self.recorder is not None and not within:
                undo.callback(self.recorder.close)
            self._orphans = Orphans(self.index)
            self._housekeeper = Housekeeper(self, self.clock)
            undo.callback(self._housekeeper.close)
            self.key_ring: KeyRing | None = within.key_ring if within else open_ring(config.security, self.clock)
            if self.key_ring is not None and not within:
                undo.callback(self.key_ring.close)
                self.key_ring.start()
            undo.callback(self._close_colds)
            if config.nvme.path:
                self.colds.append(self._open_nvme(disk))
            for storage in shared_ones:
                self.colds.append(self._open_shared(*storage))
            self._open_reserved(shares, disk, shared, undo)
            self.pipeline = Pipeline(
                self.index,
                self.dram,
                self.colds,
                ranking,
                self._uses,
                self.feed,
                config.dram.checksum,
                shares.tenants,
                shares.quotas.get("dram", {}),
            )
            speeds = [c.lane.read_speed for c in self.colds]
            self.returns = Prefetcher(self.clock, self.index, self.pipeline.counts, speeds, self._housekeeper.wake)
            self.search = Search(self.index, self.colds, self.clock, self.feed, self.pipeline.counts)
            self.planner = Planner(self.index, [Source(c.number, c.name, c.lane.read_speed) for c in self.colds])
            if self.key_ring is not None:
                self.key_ring.on_gone(self._drop_resident)
            self._learner = Learner(self._uses)
            undo.callback(self._learner.close)
            self.index.on_earlier_expiry = self._housekeeper.wake
            if self.index.mortal:
                self._housekeeper.wake()
            for budget_thread in self._keepers.values():
                undo.callback(budget_thread.close)
                budget_thread.start()
            marks = DropLogPositions(Path(self.config.nvme.path).expanduser()) if self.config.nvme.path else None
            for cold, tier in self.shared_tiers:
                tier.drops.told, tier.drops.drop_positions = self._told(cold.name), marks
            for listener in self._listeners:
                undo.callback(listener.close, 0.0)
                listener.start()
            self._measuring = self._measured_disk() if within is None else None
            if self._measuring is not None:
                undo.callback(self._measuring.close)
                self._measuring.start()
            self.pipeline.bring_down()
            undo.pop_all()

    def _open_recorder(self) -> Recorder | None:
        settings = self.config.record
        if not settings.path:
            return None
        recorder = Recorder(Path(settings.path), settings.limit, self.clock)
        try:
            if (audit := audit_of(self.config.security, self.clock)) is not None:
                audit.record("record requests", "begun", file=str(recorder.path.absolute()))
        except BaseException:
            recorder.close()
            raise
        log.warning(
            "requests of all tenants are recorded in %s: lengths, times and which blocks they share, but no content",
            recorder.path.absolute(),
        )
        return recorder

    def _open_nvme(self, disk: Disk | None) -> ColdTier:
        settings, security = self.config.nvme, self.config.security
        if disk is None:
            check_disk(Path(settings.path).expanduser(), settings.budget)
        tier = Nvme(
            Path(settings.path).expanduser(),
            settings.budget,
            segment=settings.segment,
            threads=settings.threads,
            direct=settings.direct,
            durable=settings.durable,
            compression=settings.codec,
            evict=lambda size, count: self.pipeline.make_room(NVME, size, count),
            disk=disk,
            clock=self.clock,
            encryption=Encryption(self.key_ring, seals=security.encrypt, accept_open=security.accept_open),
            scratch=self._pool(),
        )
        with contextlib.ExitStack() as undo:
            undo.callback(tier.close)
            cold = self._nvme(tier)
            undo.pop_all()
        return cold

    def _nvme(self, tier: Nvme) -> ColdTier:
        settings = self.config.nvme
        ranking = policy.make(settings.policy, self.index, NVME, lambda: room(tier))
        self._uses.serve(ranking)
        admission = admit.make(settings.store, self.index, lambda: room(tier))
        if admission.learns:
            self._uses.teach(admission.learn)
        evictor = Evictor(self.index, NVME, tier, ranking, self._uses, None, self._in_dram, takes_slots=False)
        quota = self._quota("nvme", NVME, evictor.ranked)
        adopt(tier, NVME, self.index, self._uses)
        if quota is not None:
            charge(tier, self.index, quota.account, self._shares.tenants, self.config.security)
        return ColdTier(
            NVME,
            "nvme",
            tier,
            # Enough that another job waits while three are under way: jobs end in bursts, and the disk must not idle.
            Lane(tier, self.clock, settings.queue, 6 * settings.threads, tier.call_soon),
            admission,
            evictor,
            settings.token_ids,
            WriteBudget.of(settings.write_limit, settings.drive_writes_per_day, settings.budget, self.clock),
            quota,
            sync=tier.sync,
        )

    def _measured_disk(self) -> Measuring | None:
        """Measures the disk for this store and its reserved shares, which use the same disk; None if there is no NVMe
        tier."""
        if not self.colds or not isinstance(self.colds[0].tier, Nvme):
            return None
        cold, tier = self.colds[0], self.colds[0].tier

        def may_write(nbytes: int) -> bool:
            with self.index.lock:  # the measurement must not cause blocks to be refused
                budget = cold.budget
                return budget is None or (budget.statistics().bytes_left >= nbytes and budget.take(nbytes))

        lanes = [c.lane for part in self.parts for c in part.colds if c.name == "nvme"]
        settings = self.config.nvme
        return Measuring(tier, lanes, Path(settings.path).expanduser(), settings.budget, self.clock, may_write)

    def _in_dram(self, rows: Rows) -> Mask:
        """Mask of NVMe rows that can be rewritten to other slots there: those complete in DRAM, if the write can begin
        at once. Call with the index lock held."""
        here: Mask = self.index.state[DRAM][rows] == SEALED
        cold = next(c for c in self.colds if c.number == NVME)
        nbytes = sum(map(self.dram.segments.size, self.index.place[DRAM][rows[here]].tolist()))
        writable = cold.budget is None or cold.budget.statistics().bytes_left > 0
        return here if writable and nbytes <= cold.lane.write_room else np.zeros(len(rows), np.bool_)

    def _pool(self) -> Pool:
        """Scratch memory for one tier. Not shared between tiers: a storage that hangs keeps its memory, and others must
        not wait for it."""
        pool = Pool(max(_SCRATCH, self.config.dram.budget // _PART))
        self._scratch.append(pool)
        return pool

    def _quota(self, name: str, number: int, coldest: Coldest) -> Quota | None:
        quotas = self._shares.quotas.get(name)
        return Quota(self.index, number, name, TenantUsage(self.index, quotas), coldest) if quotas else None

    def _open_shared(self, name: str, settings: Storage, opened: Callable[[], Blobs]) -> ColdTier:
        blobs = opened()
        with contextlib.ExitStack() as undo:
            undo.callback(blobs.close)
            write_credits = self._write_credits(name, settings, blobs) if settings.budget else None
            tier = Shared(
                blobs,
                threads=settings.threads,
                timeout=settings.timeout,
                compression=settings.codec,
                encryption=Encryption(self.key_ring, seals=self.config.security.encrypt),
                credit=write_credits,
                late=lambda keys: self.pipeline.late(name, keys),
                clock=self.clock,
                scratch=self._pool(),
                log_bytes=settings.budget // _LOG or sys.maxsize,
                patience=2 * settings.lease,
            )
            undo.callback(tier.close)
            admission = admit.make(
                settings.store, self.index, lambda: room(self.dram) * settings.budget // self.config.dram.budget
            )
            lane = Lane(tier, self.clock, settings.queue, 4 * settings.threads, tier.call_soon)
            number = len(self.colds) + 1
            quota = self._quota(name, number, Coldest(self.index, number, policy.Lru(self.index), self._uses))
            patience = 2 * settings.timeout
            sync = tier.sync if isinstance(blobs, LastingBlobs) else None
            self._listeners.append(DropLogReader(tier.drops, settings.lease / 6))
            undo.pop_all()
        return ColdTier(
            number,
            name,
            tier,
            lane,
            admission,
            None,
            quota=quota,
            shared=True,
            patience=patience,
            sync=sync,
            withdraw=tier.withdraw,
            heard=lambda: tier.drops.number,
        )

    @property
    def shared_tiers(self) -> list[tuple[ColdTier, Shared]]:
        """Tiers in storage shared with other processes or machines."""
        return [(cold, cold.tier) for cold in self.colds if isinstance(cold.tier, Shared)]

    def _told(self, name: str) -> DropNotice:
        """Handlers for notices that others dropped blocks, or forgot a tenant, in a tier's storage."""

        def drop(part: Store, keys: Sequence[BlockKey]) -> None:
            part.pipeline.drop(keys, lambda failed: None, shared=False)

        def dropped(keys: Sequence[BlockKey]) -> None:
            for part in self.parts:
                drop(part, keys)

        def forgotten(tenant: bytes) -> None:
            for part in self.parts:
                with part.pipeline.forgetting(tenant):
                    drop(part, keys_of(part, tenant, ()))
                    part.zero_traces_later(tenant)

        def missed() -> None:
            for part in self.parts:
                for some in slices.slices(np.arange(part.index.size)):
                    with part.index.lock:
                        there = np.zeros(len(some), np.bool_)
                        for state in part.index.state:
                            there |= state[some] != ABSENT
                        keys = part.index.keys(some[there])
                    drop(part, keys)

        return DropNotice(dropped, forgotten, missed, lambda: self.pipeline.catch_up(name))

    def _write_credits(self, name: str, settings: Storage, blobs: Blobs) -> WriteCredits:
        coordination = CoordinationBlobs(blobs, settings.lease)
        write_credits = WriteCredits(
            coordination,
            settings.budget,
            lambda: self.pipeline.catch_up(name),
            lambda names: self.search.removed(name, names),
            lambda: self.pipeline.waiting(name),
            self.clock,
        )
        self._keepers[name] = BudgetThread(
            coordination, BudgetCoordinator(coordination, settings.budget, self.clock), write_credits
        )
        return write_credits

    def _open_reserved(self, shares: Shares, disk: Disk | None, shared: bool, undo: contextlib.ExitStack) -> None:
        shares.clear()
        for tenant, config in shares.reserved.items():
            self._reserved[tenant] = share = Store(config, clock=self.clock, disk=disk, shared=shared, within=self)
            undo.callback(share.close)

    # -- for sessions -------------------------------------------------------------------------------------

    def _backend(self, model: Model, tenant: Tenant) -> Backend:
        return LocalBackend(self.of(tenant.tag), model.layout, model.namespace(tenant), tenant.tag)

    def of(self, tenant: bytes) -> Store:
        """The store that has the tenant's blocks: its reserved share, or this one."""
        return self._reserved.get(tenant, self)

    @property
    def parts(self) -> list[Store]:
        """This store, for all tenants without a reserved share, and the reserved shares."""
        return [self, *self._reserved.values()]

    def room_of(self, tenant: bytes) -> int:
        """Bytes of DRAM that a tenant may use."""
        quota = self._shares.quotas.get("dram", {}).get(self._shares.tenants.get(tenant, 0))
        return self.config.dram.budget if quota is None else min(quota, self.config.dram.budget)

    @property
    def largest_part(self) -> int:
        """The most bytes that one reservation should take, so that eviction can make space for it.

        Smaller where blocks must be written to a colder tier before they leave DRAM, because space is freed more
        slowly.
        """
        return self.config.dram.budget // (8 if self.has_colder else 4)

    @property
    def has_colder(self) -> bool:
        """Whether there are tiers below DRAM."""
        return bool(self.colds)

    @property
    def read_bytes_queued(self) -> list[int]:
        """Bytes waiting to be read, by tier below DRAM."""
        return [c.lane.read_bytes for c in self.colds]

    def sweep(self) -> float:
        """Remove one slice of expired blocks, if there are any; returns the current time.

        The housekeeping thread removes the rest. Lookups never find an expired block, removed or not.
        """
        now = self.clock.time()
        if now >= self.index.next_expiry:
            self._expire_some(now)
            self._housekeeper.wake()  # it removes the rest
        return now

    def tidy(self) -> float:
        """Do one slice of housekeeping; returns the seconds until the next is due. Called by the housekeeping
        thread."""
        now = self.clock.time()
        if now >= self.index.next_expiry:
            self._expire_some(now)
        elif not self._orphans.due():
            rows = self._orphans.by_depth()
            with self.index.lock:
                events = self.pipeline.expire(self._orphans.find(rows, slices.SLICE))
            self._orphans.let_go()
            self.feed.publish(events)
        else:
            self.returns.step()
        return min(max(0.0, self.index.next_expiry - now), self._orphans.due(), self.returns.due())

    def _expire_some(self, now: float) -> None:
        with self.index.lock:
            try:
                events = self.expire_rows(self.index.expired(now, slices.SLICE))
            except BaseException:  # expired rows may remain that would not be searched for again
                to_the_end(self.index.look_again)
                raise
        self.feed.publish(events)

    def expire_rows(self, rows: Rows) -> list[Event]:
        """Remove distinct expired rows; returns the events to publish. Call with the index lock held."""
        if not len(rows):
            return []
        self._orphans.note(self.index.keys(rows))
        return self.pipeline.expire(rows)

    def expire(
        self,
        keys: Sequence[BlockKey],
        heads: Sequence[BlockKey],
        when: float,
        timeout: float | None,
        who: Asker = None,
    ) -> int:
        """Set the expiry of blocks to ``when``; see ``Session.expire``. ``heads`` are the blocks before them in their
        prompt."""
        forks.check(self.origin)
        ended: SimpleQueue[int] = SimpleQueue()
        expiring = Expiring(self.pipeline, keys, heads, when, self.sweep(), ended.put, who)
        while expiring.step():
            rest()
        if (failed := _wait_for(ended, self._patience(timeout))) is None:
            raise TierError(f"changing the expiry of {len(keys)} blocks took too long; it goes on in the background")
        if failed:
            raise TierError(
                f"the copies on disk of {failed} of {len(keys)} blocks still say that they live longer. They expire as "
                "asked while this store is open: see the log for the disk's error, then call expire again"
            )
        return expiring.found

    def drop(
        self, keys: Sequence[BlockKey], timeout: float | None = None, *, who: Asker = None, told: bool = True
    ) -> int:
        """Remove blocks from every tier permanently; see ``Session.drop``. If ``told``, other users of the storage are
        notified."""
        forks.check(self.origin)
        ended: SimpleQueue[int] = SimpleQueue()
        timeout = self._patience(timeout)
        found = self.pipeline.drop(keys, ended.put, who=who, told=told)
        if (failed := _wait_for(ended, timeout)) is None:
            raise TierError(f"dropping {len(keys)} blocks took longer than {timeout} s; it goes on in the background")
        if failed:
            raise TierError(
                f"{failed} of {len(keys)} dropped blocks could not be erased from disk or shared storage, or other "
                "users of that storage could not be notified. The blocks are not served, but may be found again when "
                "the store is next opened, or by those users: see the log and the statistics for the error, then drop "
                "them again"
            )
        return found

    def _patience(self, timeout: float | None) -> float | None:
        """Seconds to wait for the tiers. There is a limit by default because shared storage may hang forever."""
        if timeout is not None:
            return timeout
        return max((cold.patience for cold in self.colds if cold.patience is not None), default=None)

    # -- for administrators -------------------------------------------------------------------------------

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
            return forget(self, tenant, who)

    def _drop_resident(self, tenant: bytes) -> None:
        """Drop a tenant's blocks from this store after its key was destroyed here: data read with the key must not stay
        in memory. Other stores may still have the key, so shared storage is left alone."""
        self.pipeline.drop(self.pipeline.keys_of(tenant), lambda failed: None, shared=False)
        self.zero_traces_later(tenant)

    def zero_traces_later(self, tenant: bytes) -> None:
        """Run ``zero_traces`` in the background."""
        # On its own thread: it lasts as long as the zeroing, and the thread that reports the tenant has more to report.
        tracer = threading.Thread(target=self.zero_traces, args=(tenant,), name="kvtide-traces", daemon=True)
        self._tracers = [*(t for t in self._tracers if t.is_alive()), tracer]
        tracer.start()

    def zero_traces(self, tenant: bytes) -> int:
        """Zero what memory still contains of a tenant's dropped blocks. Returns the number of slots that are zeroed
        later because a caller holds them."""
        for pool in self._scratch:
            pool.empty()
        return self.pipeline.zero_traces(tenant)

    # -- for all callers ----------------------------------------------------------------------------------

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
        for part in self.parts:
            part._wait_for_credit(end)
        reports = []
        for part in self.parts:
            # Wait for every tier in turn, even if an earlier one timed out.
            idle = [c.lane.wait_idle(_until(end)) for c in part.colds]
            reports.append(part.pipeline.report(timed_out=not all(idle)))
        first, *others = reports
        found = sum(others, first)
        with self._lock:
            before, self._lost = self._lost, self.lost
            return found if self._lost == before else found + Flushed(0, {}, self._lost - before)

    @property
    def lost(self) -> Counter[Unwritten]:
        """Counts, since the store was opened, blocks that left DRAM and reached no colder tier though one should have
        had them."""
        found = Counter[Unwritten]()
        for part in self.parts:
            found.update(part.pipeline.lost)
        return found

    def _wait_for_credit(self, end: float | None = None) -> None:
        """Wait until blocks are written that were refused only because write credit for them had to be requested first.

        Waits until ``end`` (on the system's monotonic clock) at most, for all tiers together.
        """
        for cold in self.colds:
            if (budget_thread := self._keepers.get(cold.name)) is not None:
                cold.lane.wait_idle(cold.patience if end is None else _until(end))
                budget_thread.wait_for_credit(_until(end))

    def statistics(self) -> Statistics:
        forks.check(self.origin)
        with self.index.lock:
            index = self.index.statistics()
            planner = self.planner.statistics()
            counts = {k: v for k, v in sorted(self.pipeline.counts.items()) if v}
        return Statistics(
            index.blocks,
            index.held,
            index.pinned,
            {"dram": self.dram.statistics(), **{c.name: c.tier.statistics() for c in self.colds}},
            {c.name: c.lane.statistics() for c in self.colds},
            counts,
            self.pipeline.statistics(),
            planner,
            self.feed.statistics(),
            len(self._sessions),
            self._tenants(),
            {name: budget_thread.statistics() for name, budget_thread in self._keepers.items()},
            ScratchStatistics(
                sum(pool.taken for pool in self._scratch),
                sum(pool.most for pool in self._scratch),
                sum(pool.limit for pool in self._scratch),
            ),
            self.recorder.statistics() if self.recorder is not None and not self._within else None,
        )

    def _tenants(self) -> dict[str, TenantStatistics]:
        names = ["dram", *(cold.name for cold in self.colds)]
        with self.index.lock:
            accounts = {names[number]: account for number, account in self.index.accounts.items()}
            found = {tag.hex(): TenantStatistics.limited(n, accounts) for tag, n in self._shares.tenants.items()}
        return found | {tag.hex(): TenantStatistics.reserved(s.statistics()) for tag, s in self._reserved.items()}

    def __repr__(self) -> str:
        return f"<Store {len(self.index)} blocks{', closed' if self.closed else ''}>"

    def close(self) -> None:
        """End all sessions, persist what should outlive the process, and release everything."""
        if not self._end_sessions():
            return
        stack = contextlib.ExitStack()
        stack.callback(to_the_end, self._join_tracers)
        if self.recorder is not None and not self._within:
            stack.callback(to_the_end, self.recorder.close)
        stack.callback(to_the_end, self.copier.close)
        stack.callback(to_the_end, self.dram.close)
        if self.key_ring is not None and not self._within:
            stack.callback(to_the_end, self.key_ring.close)
        stack.callback(to_the_end, self.pipeline.persister.close)
        stack.callback(self._close_colds)
        for share in self._reserved.values():
            stack.callback(to_the_end, share.close)
        for budget_thread in self._keepers.values():
            stack.callback(to_the_end, budget_thread.close)
        stack.callback(to_the_end, self._learner.close)
        stack.callback(to_the_end, self._housekeeper.close)
        # Nothing is released before everything is on the stack: if interrupted before that, the caller can close again.
        with stack:
            self._ended = True
            if self.recorder is not None and not self._within:
                self.recorder.end()  # early: the remaining steps may outlast a node's shutdown time limit
            for listener, (cold, _) in zip(self._listeners, self.shared_tiers, strict=True):
                to_the_end(
                    functools.partial(listener.close, cold.patience or 0.0)
                )  # first, so that dropped blocks are not written
            with self.index.lock:
                self.pipeline.reclaim()
            self.pipeline.call_ready()
            self.pipeline.flush()
            self._wait_for_credit()
            for cold in self.colds:
                cold.lane.wait_idle(cold.patience)
            if self._measuring is not None:
                to_the_end(self._measuring.close)
            self.pipeline.note_expiries()

    def _join_tracers(self) -> None:
        for tracer in self._tracers:
            if tracer.ident is not None:
                tracer.join()

    def _close_colds(self) -> None:
        with contextlib.ExitStack() as stack:
            for cold in self.colds:
                stack.callback(to_the_end, cold.tier.close)


def _until(end: float | None) -> float | None:
    """Seconds left until ``end``; None means no limit."""
    return None if end is None else max(0.0, end - time.monotonic())


def _wait_for(ended: SimpleQueue[int], timeout: float | None) -> int | None:
    """Return the value put into the queue, or None on timeout. Not a ``threading.Event``: an interrupted wait for that
    may raise a RuntimeError instead of the interrupt; this queue, written in C, does not."""
    try:
        return ended.get(timeout=timeout)
    except Empty:
        return None
