"""The store: wires index, planner, pipeline and tiers together. The only place that knows them all."""

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
from kvtide.plan.budget import WriteBudget
from kvtide.plan.coldest import Coldest
from kvtide.plan.evict import Evictor, room
from kvtide.plan.learner import Learner
from kvtide.plan.planner import Planner, Source
from kvtide.plan.quota import Quota
from kvtide.plan.usage import UsageTracker
from kvtide.security.audit import audit_of
from kvtide.security.key_ring import KeyRing, open_ring
from kvtide.store.backend import Backend, LocalBackend
from kvtide.store.forget import Forgotten, forget, keys_of
from kvtide.store.housekeeping import Housekeeper
from kvtide.store.recorder import Recorder
from kvtide.store.restore import adopt, charge
from kvtide.store.session import SessionHost
from kvtide.store.shares import Shares, divide
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
from kvtide.transfer.lane import Lane
from kvtide.transfer.measuring import Measuring
from kvtide.transfer.pipeline import Asker, Expiring, Pipeline
from kvtide.transfer.returns import Returns
from kvtide.transfer.search import Search
from kvtide.transfer.written import Flushed, Unwritten

__all__ = ["Statistics", "Store"]

log = logging.getLogger("kvtide.store")

NVME = 1
_SCRATCH, _PART = 64 << 20, 8
"""Memory that the I/O threads of a tier may work in: a part of what blocks may take, but at least so many bytes."""
_LOG = 128
"""The log of drops may take one part in so many of a storage's budget."""


class Store(SessionHost):
    """Blocks of KV in DRAM, on NVMe and in shared storage.

    Open it with ``kvtide.open``; close it, or use it in a ``with``.
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
        """``shared``: other processes will map its memory, and have ``aside`` bytes of its budget already.

        ``within``: it is a reserved share of that one.
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
        """As it was at the last flush."""
        memory = config.dram
        self._scratch: list[Pool] = []
        self._tracers: list[threading.Thread] = []
        """Those that zero what is left of tenants whose keys are gone."""
        # Whatever fails, whatever was taken or started before it is given back: memory, threads, files, the lock.
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
            self.returns = Returns(self.clock, self.index, self.pipeline.counts, speeds, self._housekeeper.wake)
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
            # Enough that another job waits while three are under way: jobs end all at once, and the disk must not idle.
            Lane(tier, self.clock, settings.queue, 6 * settings.threads, tier.call_soon),
            admission,
            evictor,
            settings.token_ids,
            WriteBudget.of(settings.write_limit, settings.drive_writes_per_day, settings.budget, self.clock),
            quota,
            sync=tier.sync,
        )

    def _measured_disk(self) -> Measuring | None:
        """For this store and its reserved shares, which lie on the same disk; None where there is none."""
        if not self.colds or not isinstance(self.colds[0].tier, Nvme):
            return None
        cold, tier = self.colds[0], self.colds[0].tier

        def may_write(nbytes: int) -> bool:
            with self.index.lock:  # blocks must not be refused because of it
                budget = cold.budget
                return budget is None or (budget.statistics().bytes_left >= nbytes and budget.take(nbytes))

        lanes = [c.lane for part in self.parts for c in part.colds if c.name == "nvme"]
        settings = self.config.nvme
        return Measuring(tier, lanes, Path(settings.path).expanduser(), settings.budget, self.clock, may_write)

    def _in_dram(self, rows: Rows) -> Mask:
        """Which rows of NVMe can be written again to other slots there: those that are whole in DRAM, if that can begin
        at once. Under the index's lock."""
        here: Mask = self.index.state[DRAM][rows] == SEALED
        cold = next(c for c in self.colds if c.number == NVME)
        nbytes = sum(map(self.dram.segments.size, self.index.place[DRAM][rows[here]].tolist()))
        writable = cold.budget is None or cold.budget.statistics().bytes_left > 0
        return here if writable and nbytes <= cold.lane.write_room else np.zeros(len(rows), np.bool_)

    def _pool(self) -> Pool:
        """For one tier: a storage that hangs keeps its memory, and others must not wait for it."""
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
        """Tiers in storage that others use too."""
        return [(cold, cold.tier) for cold in self.colds if isinstance(cold.tier, Shared)]

    def _told(self, name: str) -> DropNotice:
        """What is done here when others have dropped blocks, or forgotten a tenant, in a tier's storage."""

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
        """Where the tenant with that tag lives: in its reserved share, or here."""
        return self._reserved.get(tenant, self)

    @property
    def parts(self) -> list[Store]:
        """Itself, for all who have nothing reserved, and the reserved shares."""
        return [self, *self._reserved.values()]

    def room_of(self, tenant: bytes) -> int:
        """Bytes of DRAM that a tenant may have."""
        quota = self._shares.quotas.get("dram", {}).get(self._shares.tenants.get(tenant, 0))
        return self.config.dram.budget if quota is None else min(quota, self.config.dram.budget)

    @property
    def largest_part(self) -> int:
        """Bytes that one reservation should have at most, so that others can make room for it.

        Where blocks must be written down before they leave, room comes more slowly.
        """
        return self.config.dram.budget // (8 if self.has_colder else 4)

    @property
    def has_colder(self) -> bool:
        """Whether there are tiers below DRAM."""
        return bool(self.colds)

    @property
    def read_bytes_queued(self) -> list[int]:
        """By tier below DRAM."""
        return [c.lane.read_bytes for c in self.colds]

    def sweep(self) -> float:
        """Remove a slice of what has expired, if anything has; answers the time.

        The rest is done by the housekeeping thread. What has expired is not found, whether it is removed or not.
        """
        now = self.clock.time()
        if now >= self.index.next_expiry:
            self._expire_some(now)
            self._housekeeper.wake()  # for the rest
        return now

    def tidy(self) -> float:
        """One slice of housekeeping; answers in how many seconds the next is due. For the housekeeping thread."""
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
            except BaseException:  # some of what was found may still be there, and would not be looked for again
                to_the_end(self.index.look_again)
                raise
        self.feed.publish(events)

    def expire_rows(self, rows: Rows) -> list[Event]:
        """Remove distinct rows that have expired. Under the index's lock; answers what is to be published."""
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
        """Let blocks live until ``when``; see ``Session.expire``. ``heads`` come before them in their prompt."""
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
        """Remove blocks from every tier for good; see ``Session.drop``. Others who use the storage are ``told``."""
        forks.check(self.origin)
        ended: SimpleQueue[int] = SimpleQueue()
        timeout = self._patience(timeout)
        found = self.pipeline.drop(keys, ended.put, who=who, told=told)
        if (failed := _wait_for(ended, timeout)) is None:
            raise TierError(f"dropping {len(keys)} blocks took longer than {timeout} s; it goes on in the background")
        if failed:
            raise TierError(
                f"{failed} of {len(keys)} dropped blocks could not be erased from disk or shared storage, or others "
                "who use that could not be told. They are not served, but may be found again when the store is next "
                "opened, or by others: see the log and the statistics for the error, then drop them again"
            )
        return found

    def _patience(self, timeout: float | None) -> float | None:
        """Seconds to wait for the tiers: storage that others use too may hang for ever."""
        if timeout is not None:
            return timeout
        return max((cold.patience for cold in self.colds if cold.patience is not None), default=None)

    # -- for administrators -------------------------------------------------------------------------------

    def forget(self, tenant: bytes, who: str = "") -> Forgotten:
        """Destroy a tenant's keys, then its blocks in every tier; answers how many there were.

        In memory they are zeroed, and so is what evicted ones have left there. A block that somebody still holds, with
        a match or for a transfer, is zeroed when he lets go; the answer counts those.

        Raises HeldError, and does nothing, under a legal hold; UnknownTenantError if there is neither a key nor a block
        of it; TierError if blocks could not all be erased, which are
        then unreadable if they were sealed. Takes as long as reading a page of every slot on disk, and does not keep
        others waiting. Until it returns, the tenant can neither store nor load blocks.
        """
        with self.guard:
            return forget(self, tenant, who)

    def _drop_resident(self, tenant: bytes) -> None:
        """A tenant's key is gone, here at least: what was read with it must not stay in memory. Others may have it."""
        self.pipeline.drop(self.pipeline.keys_of(tenant), lambda failed: None, shared=False)
        self.zero_traces_later(tenant)

    def zero_traces_later(self, tenant: bytes) -> None:
        """``zero_traces``, in the background."""
        # On a thread of its own: it takes as long as zeroing does, and whoever tells of a tenant has more to tell.
        tracer = threading.Thread(target=self.zero_traces, args=(tenant,), name="kvtide-traces", daemon=True)
        self._tracers = [*(t for t in self._tracers if t.is_alive()), tracer]
        tracer.start()

    def zero_traces(self, tenant: bytes) -> int:
        """Zero what memory still has of a tenant's blocks, which were dropped; answers how many slots are zeroed later,
        because somebody holds them."""
        for pool in self._scratch:
            pool.empty()
        return self.pipeline.zero_traces(tenant)

    # -- for everybody ------------------------------------------------------------------------------------

    def weights(self, path: str | Path | None = None, weights_id: str | None = None) -> WeightsId:
        """The identity of weights by their path or a name of your own: what ``Model`` takes as ``weights``.

        Digests of files are remembered in ``naming.weights_cache``.
        """
        return identify(path, weights_id, self.config.naming.weights_cache)

    def follow(self, follower: Callable[[Event], None]) -> Callable[[], None]:
        """Call ``follower`` for every block stored or removed. The answer, called, ends that.

        It is called on the thread that moves the block: it must be quick, and must not close the store, which would
        wait for itself.
        """
        forks.check(self.origin)
        leave = self.feed.follow(follower)
        return lambda: leave() if self.origin is forks.here else None

    def flush(self, timeout: float | None = None) -> Flushed:
        """Wait until tiers below DRAM have written what they were given, ``timeout`` seconds at most.

        Nothing more is written because of it. The answer says what is written, what is not and why; it is True if
        everything is that should be. In a store without tiers below DRAM nothing should be, so it is True, and says
        that no block outlasts the process. Written is not yet durable: see ``Session.store(durable=True)``.
        """
        forks.check(self.origin)
        timeout = arguments.seconds(timeout, "timeout")
        end = None if timeout is None else time.monotonic() + timeout
        for part in self.parts:
            part._wait_for_credit(end)
        reports = []
        for part in self.parts:
            # Each in turn, whether or not the one before was in time.
            idle = [c.lane.wait_idle(_until(end)) for c in part.colds]
            reports.append(part.pipeline.report(timed_out=not all(idle)))
        first, *others = reports
        found = sum(others, first)
        with self._lock:
            before, self._lost = self._lost, self.lost
            return found if self._lost == before else found + Flushed(0, {}, self._lost - before)

    @property
    def lost(self) -> Counter[Unwritten]:
        """Blocks that left DRAM and are in no tier, though one was to have them; since the store was opened."""
        found = Counter[Unwritten]()
        for part in self.parts:
            found.update(part.pipeline.lost)
        return found

    def _wait_for_credit(self, end: float | None = None) -> None:
        """Let blocks be written that were refused only because the credit for them had to be asked for.

        Until ``end`` at most, on the system's monotonic clock, however many tiers there are.
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
        """End all sessions, write down what should outlive the process, and let go of everything."""
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
        # Nothing is let go of before all of it is on the stack: whoever is interrupted until then closes again.
        with stack:
            self._ended = True
            if self.recorder is not None and not self._within:
                self.recorder.end()  # early: what follows may take longer than a node may
            for listener, (cold, _) in zip(self._listeners, self.shared_tiers, strict=True):
                to_the_end(
                    functools.partial(listener.close, cold.patience or 0.0)
                )  # first: what was dropped is not written
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
    """Seconds that are left; None: as long as it takes."""
    return None if end is None else max(0.0, end - time.monotonic())


def _wait_for(ended: SimpleQueue[int], timeout: float | None) -> int | None:
    """What is put there; None if that takes longer. An interrupted wait for a ``threading.Event`` may raise a
    RuntimeError instead of the interrupt; one for this queue, which is written in C, does not."""
    try:
        return ended.get(timeout=timeout)
    except Empty:
        return None
