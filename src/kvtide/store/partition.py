"""A part of a store with its own index, planner, pipeline and tiers.

A store has one partition for all tenants without a reserved share, and one more for each reserved share. What they have
in common is in ``StoreContext``: nothing that one tenant could fill so that another finds less.

A partition is closed in three steps, because the store closes other things in between: ``finish`` writes what should
outlive the process, ``close`` ends threads and closes tiers, and ``free`` releases the memory. The key ring is closed
before the last step: tiers need its keys until they are closed, and until it is closed it may report that a tenant lost
its key, whose blocks are then dropped from memory.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np

from kvtide.block import BlockKey
from kvtide.capacity import check_disk
from kvtide.clock import Clock
from kvtide.config import Config, Storage
from kvtide.errors import ClosedError, TierError
from kvtide.events import Event, Feed
from kvtide.index import work_slices
from kvtide.index.absence_log import Absence, AbsenceLog
from kvtide.index.index import ABSENT, DRAM, SEALED, Index, Mask, Rows
from kvtide.index.orphans import Orphans
from kvtide.index.tenant_usage import TenantUsage
from kvtide.index.work_slices import rest
from kvtide.interrupts import again_if_interrupted
from kvtide.plan import admit, policy
from kvtide.plan.admit import Never
from kvtide.plan.evict import Evictor, room
from kvtide.plan.learning_thread import LearningThread
from kvtide.plan.planner import Planner, Source
from kvtide.plan.quota import Quota, TenantQuotas
from kvtide.plan.ranking_cache import RankingCache
from kvtide.plan.usage_tracker import UsageTracker
from kvtide.plan.write_budget import WriteBudget
from kvtide.security.key_ring import KeyRing
from kvtide.serial_executor import SerialExecutor
from kvtide.store.housekeeping import Housekeeper
from kvtide.store.known_models import KnownModels
from kvtide.store.outgoing import OutgoingBlocks
from kvtide.store.recent_requests import RecentRequests
from kvtide.store.recorder import Recorder
from kvtide.store.restore import adopt, charge
from kvtide.store.statistics import ScratchStatistics, Statistics, TenantStatistics
from kvtide.tiers.dram.tier import Dram
from kvtide.tiers.format.encryption import Encryption
from kvtide.tiers.format.record import belongs
from kvtide.tiers.format.scratch import Pool
from kvtide.tiers.nvme.drop_positions import DropLogPositions
from kvtide.tiers.nvme.tier import Nvme
from kvtide.tiers.peers.cluster import directory_of, positions_of
from kvtide.tiers.peers.endings import Endings
from kvtide.tiers.peers.position import PeerPosition
from kvtide.tiers.peers.tier import PeerTier, connections_of
from kvtide.tiers.peers.trust import PeerTrust, addresses_of
from kvtide.tiers.shared.blobs import Blobs, LastingBlobs
from kvtide.tiers.shared.budget import BudgetCoordinator, CoordinationBlobs
from kvtide.tiers.shared.credits import BudgetThread, WriteCredits
from kvtide.tiers.shared.drop_log import DropLogReader, DropNotice
from kvtide.tiers.shared.open import storages
from kvtide.tiers.shared.tier import Shared
from kvtide.tiers.syscalls import Disk
from kvtide.transfer.cold_tier import ColdTier
from kvtide.transfer.lane import Lane
from kvtide.transfer.node_search import NodeSearch
from kvtide.transfer.pending_blocks import PendingBlocks
from kvtide.transfer.pipeline import Asker, Expiring, Pipeline
from kvtide.transfer.prefetch import Prefetcher
from kvtide.transfer.second_reads import SecondReads
from kvtide.transfer.write_results import Flushed

__all__ = ["NVME", "Partition", "StoreContext"]

NVME = 1
_SCRATCH, _PART = 64 << 20, 8
"""Scratch memory for the I/O threads of one tier: 1/``_PART`` of the DRAM budget, but at least ``_SCRATCH`` bytes."""
_LOG = 128
"""The drop log may take at most 1/``_LOG`` of a shared storage's budget."""


@dataclass(frozen=True, slots=True)
class StoreContext:
    """What the partitions of a store have in common."""

    clock: Clock
    feed: Feed
    serials: Iterator[int]
    """Numbers for segments of memory."""
    recorder: Recorder | None
    key_ring: KeyRing | None
    disk: Disk | None
    """None: the system's."""
    mapped: bool
    """Whether other processes will map the memory."""
    known_models: KnownModels
    recent_requests: RecentRequests
    name: bytes
    """A random name of the store, for other nodes."""


class Partition:
    """The blocks of the tenants that use it, in DRAM, on NVMe and in shared storage. Thread-safe."""

    def __init__(
        self,
        config: Config,
        context: StoreContext,
        quotas: TenantQuotas | None = None,
        already_mapped: int = 0,
    ) -> None:
        """``already_mapped`` bytes of its DRAM budget are already used by other processes."""
        self.config = config
        self.context = context
        self.clock = context.clock
        self.feed = context.feed
        self.recorder = context.recorder
        self._quotas = quotas = quotas or TenantQuotas()
        shared_storages = list(storages(config, context.disk))
        peers = addresses_of(config.peers)
        positions = positions_of(config.peers)
        self.index = Index(1 + bool(config.nvme.path) + len(shared_storages) + len(peers) + positions)
        self.index.absence_log = AbsenceLog(self.index, config.explain.memory, self.clock)
        self.began_empty = True
        """Whether no tier of its own had been used before this opened it: then its records cover its whole life."""
        self.colds: list[ColdTier] = []
        """Its tiers below DRAM."""
        self._budget_threads: dict[str, BudgetThread] = {}
        self._listeners: list[DropLogReader] = []
        self._scratch: list[Pool] = []
        self._tracers: list[threading.Thread] = []
        """Threads that zero the remaining data of tenants whose keys were destroyed."""
        self.outgoing = OutgoingBlocks()
        """What is being sent to other nodes."""
        self._closed = False
        self._running = contextlib.ExitStack()
        """Ends threads and closes tiers."""
        memory = config.dram
        # If any step fails, everything acquired before is released: memory, threads, files, the directory lock.
        with contextlib.ExitStack() as undo:
            self.dram = Dram(
                memory.budget,
                memory.segment,
                memory.huge_pages,
                memory.prefault,
                context.mapped,
                already_mapped,
                ahead=context.mapped,
                serials=context.serials,
            )
            undo.callback(self.free)
            undo.enter_context(self._running)
            self._uses = UsageTracker(self.index, self.clock)
            ranking = policy.make(memory.policy, self.index, DRAM, lambda: room(self.dram))
            self._uses.serve(ranking)
            self.nodes = self._open_tiers(peers, positions, shared_storages)
            """The search in other nodes that a directory lists; None if there is no directory."""
            self._orphans = Orphans(self.index)
            self._housekeeper = Housekeeper(self, self.clock)
            self._running.callback(again_if_interrupted, self._housekeeper.close)
            self.pipeline = Pipeline(
                self.index,
                self.dram,
                self.colds,
                ranking,
                self._uses,
                self.feed,
                memory.checksum,
                quotas,
            )
            speeds = [c.lane.read_speed for c in self.colds]
            self.prefetcher = Prefetcher(self.clock, self.index, self.pipeline.counts, speeds, self._housekeeper.wake)
            self.pending_blocks = PendingBlocks(
                self.index, self.colds, self.clock, self.feed, self.pipeline.counts, self.nodes
            )
            self._open_second_reads()
            self.planner = Planner(self.index, [_source(cold) for cold in self.colds])
            self._learning_thread = LearningThread(self._uses)
            self._running.callback(again_if_interrupted, self._learning_thread.close)
            self.index.on_earlier_expiry = self.index.absence_log.on_full = self._housekeeper.wake
            if context.key_ring is not None:
                context.key_ring.on_gone(self._key_gone)  # last: it cannot be taken back
            undo.pop_all()

    def start(self, drop_notice: Callable[[str], DropNotice]) -> None:
        """Begin the work in the background. Call it once, when all partitions are open.

        ``drop_notice`` returns the handlers for notices from other users of a shared storage, given its tier's name.
        """
        if self.index.mortal:
            self._housekeeper.wake()
        folder = self.config.nvme.path
        positions = DropLogPositions(Path(folder).expanduser()) if folder else None
        for cold, tier in self.shared_tiers:
            tier.drops.told, tier.drops.drop_positions = drop_notice(cold.name), positions
        for budget_thread in self._budget_threads.values():
            self._running.callback(again_if_interrupted, budget_thread.close)
            budget_thread.start()
        for listener in self._listeners:
            self._running.callback(listener.close, 0.0)
            listener.start()
        self.pipeline.enforce_quotas()

    def __repr__(self) -> str:
        return f"<Partition {len(self.index)} blocks>"

    # -- opening its tiers --------------------------------------------------------------------------------

    def _open_tiers(
        self, peers: Sequence[str], positions: int, shared: Sequence[tuple[str, Storage, Callable[[], Blobs]]]
    ) -> NodeSearch | None:
        if self.config.nvme.path:
            self.colds.append(self._open_nvme())
        self._open_peers(peers)  # before shared storage: their memory is faster
        nodes = self._open_positions(positions)
        for storage in shared:
            self.colds.append(self._open_shared(*storage))
        return nodes

    def _open_nvme(self) -> ColdTier:
        settings, security = self.config.nvme, self.config.security
        if self.context.disk is None:
            check_disk(Path(settings.path).expanduser(), settings.budget)
        tier = Nvme(
            Path(settings.path).expanduser(),
            settings.budget,
            segment=settings.segment,
            threads=settings.threads,
            direct=settings.direct,
            durable=settings.durable,
            compression=settings.codec,
            evict=lambda size, count, owner: self.pipeline.make_room(NVME, size, count, owner),
            disk=self.context.disk,
            clock=self.clock,
            encryption=Encryption(self.context.key_ring, seals=security.encrypt, accept_open=security.accept_open),
            scratch=self._pool(),
        )
        self._running.callback(again_if_interrupted, tier.close)
        self.began_empty = tier.new
        ranking = policy.make(settings.policy, self.index, NVME, lambda: room(tier))
        self._uses.serve(ranking)
        admission = admit.make(settings.store, self.index, lambda: room(tier))
        if admission.learns:
            self._uses.teach(admission.learn)
        evictor = Evictor(self.index, NVME, tier, ranking, self._uses, None, self._in_dram, takes_slots=False)
        quota = self._quota("nvme", NVME, evictor.ranked)
        adopt(tier, NVME, self.index, self._uses)
        if quota is not None:
            charge(tier, self.index, quota.account, self._quotas.tenants, self.config.security)
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

    def _quota(self, name: str, number: int, coldest: RankingCache) -> Quota | None:
        quotas = self._quotas.of(name)
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
                encryption=Encryption(self.context.key_ring, seals=self.config.security.encrypt),
                credit=write_credits,
                late=lambda keys: self.pipeline.fail_hung_reads(name, keys),
                clock=self.clock,
                scratch=self._pool(),
                log_bytes=settings.budget // _LOG or sys.maxsize,
                patience=2 * settings.lease,
            )
            undo.pop_all()
        self._running.callback(again_if_interrupted, tier.close)
        admission = admit.make(
            settings.store, self.index, lambda: room(self.dram) * settings.budget // self.config.dram.budget
        )
        lane = Lane(tier, self.clock, settings.queue, 4 * settings.threads, tier.call_soon)
        number = len(self.colds) + 1
        quota = self._quota(name, number, RankingCache(self.index, number, policy.Lru(self.index), self._uses))
        patience = 2 * settings.timeout
        sync = tier.sync if isinstance(blobs, LastingBlobs) else None
        self._listeners.append(DropLogReader(tier.drops, settings.lease / 6))
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

    def _open_peers(self, addresses: Sequence[str]) -> None:
        if addresses:
            trust = PeerTrust(self.config.peers, self.config.security)
            for address in addresses:
                self.colds.append(self._open_peer(address, trust))

    def _open_peer(self, address: str, trust: PeerTrust) -> ColdTier:
        tier = self._peer_tier(address, trust)
        return self._peer_cold(f"peer {address}", tier, tier.call_soon)

    def _peer_tier(self, address: str, trust: PeerTrust, named: bytes = b"") -> PeerTier:
        settings = self.config.peers
        return PeerTier(
            address,
            trust,
            connections=connections_of(settings),
            timeout=settings.timeout,
            encryption=Encryption(self.context.key_ring, seals=False),
            own=self.context.name,
            named=named,
            clock=self.clock,
        )

    def _peer_cold(
        self, name: str, tier: PeerTier | PeerPosition, call_soon: Callable[[Callable[[], None]], None]
    ) -> ColdTier:
        settings = self.config.peers
        tier.late = lambda keys: self.pipeline.fail_hung_reads(name, keys)
        tier.lost = lambda: self.pending_blocks.removed(name, None)
        self._running.callback(again_if_interrupted, tier.close)
        # Enough that each connection has a next request when one has ended. More would wait for a connection, and large
        # blocks would wait beyond their deadline.
        connections = connections_of(settings)
        lane = Lane(tier, self.clock, 0, max(8 * min(connections, 2), 4 * connections), call_soon)
        number, patience = len(self.colds) + 1, 2 * settings.timeout
        return ColdTier(number, name, tier, lane, Never(), None, shared=True, read_only=True, patience=patience)

    def _open_positions(self, count: int) -> NodeSearch | None:
        """Tiers for nodes that the directory lists."""
        if not count:
            return None
        settings = self.config.peers
        directory = directory_of(settings)
        trust = PeerTrust(settings, self.config.security)
        endings, positions = Endings(), list[tuple[ColdTier, PeerPosition]]()
        calls = SerialExecutor("kvtide-peer-start")
        self._running.callback(calls.close, 1.0)
        for number in range(1, count + 1):
            position = PeerPosition(lambda member: self._peer_tier(member.address, trust, member.name), endings)
            cold = self._peer_cold(f"peer {number}", position, calls.put)
            positions.append((cold, position))
            self.colds.append(cold)
        own, lease = self.context.name, settings.lease
        nodes = NodeSearch(positions, directory, endings, own, lease, settings.directory, self.clock)
        nodes.forget = lambda name: self.pending_blocks.removed(name, None)
        nodes.release = lambda name, promised: self.pending_blocks.release(name, promised=promised)
        self._running.callback(again_if_interrupted, nodes.close)
        return nodes

    def _open_second_reads(self) -> None:
        """Call it when the tiers are open."""
        others, settings = [cold for cold in self.colds if cold.read_only], self.config.peers
        if len(others) < 2:
            return
        counts = self.pipeline.counts
        second = SecondReads(self.index, others, settings.hedge, settings.timeout, self.clock, counts, self.nodes)
        second.enter = self.pending_blocks.enter
        self.pipeline.use_second_reads(second)
        self._running.callback(again_if_interrupted, second.close)

    def _write_credits(self, name: str, settings: Storage, blobs: Blobs) -> WriteCredits:
        coordination = CoordinationBlobs(blobs, settings.lease)
        write_credits = WriteCredits(
            coordination,
            settings.budget,
            lambda: self.pipeline.catch_up(name),
            lambda names: self.pending_blocks.removed(name, names),
            lambda: self.pipeline.waiting(name),
            self.clock,
        )
        self._budget_threads[name] = BudgetThread(
            coordination, BudgetCoordinator(coordination, settings.budget, self.clock), write_credits
        )
        return write_credits

    @property
    def nvme(self) -> ColdTier | None:
        """The tier on a local disk; None if there is none."""
        return next((cold for cold in self.colds if isinstance(cold.tier, Nvme)), None)

    @property
    def shared_tiers(self) -> list[tuple[ColdTier, Shared]]:
        """Tiers in storage shared with other processes or machines."""
        return [(cold, cold.tier) for cold in self.colds if isinstance(cold.tier, Shared)]

    # -- for sessions -------------------------------------------------------------------------------------

    def room_of(self, tenant: bytes) -> int:
        """Bytes of DRAM that a tenant may use."""
        quota = self._quotas.of("dram").get(self._quotas.tenants.get(tenant, 0))
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
        """Whether there are tiers below DRAM that blocks are written to."""
        return any(not cold.read_only for cold in self.colds)

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
        self.index.absence_log.write_full()
        now = self.clock.time()
        if now >= self.index.next_expiry:
            self._expire_some(now)
        elif not self._orphans.due():
            rows = self._orphans.by_depth()
            with self.index.lock:
                events = self.pipeline.expire(self._orphans.find(rows, work_slices.SLICE))
            self._orphans.let_go()
            self.feed.publish(events)
        else:
            self.prefetcher.step()
        return min(max(0.0, self.index.next_expiry - now), self._orphans.due(), self.prefetcher.due())

    def _expire_some(self, now: float) -> None:
        with self.index.lock:
            try:
                events = self.expire_rows(self.index.expired(now, work_slices.SLICE))
            except BaseException:  # expired rows may remain that would not be searched for again
                again_if_interrupted(self.index.look_again)
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
        self,
        keys: Sequence[BlockKey],
        timeout: float | None = None,
        *,
        who: Asker = None,
        notify_others: bool = True,
        absence: Absence = Absence.DROPPED,
    ) -> int:
        """Remove blocks from every tier permanently; see ``Session.drop``. If ``notify_others``, other users of the
        storage are notified. ``absence`` is recorded as what happened."""
        ended: SimpleQueue[int] = SimpleQueue()
        timeout = self._patience(timeout)
        found = self.pipeline.drop(keys, ended.put, who=who, notify_others=notify_others, absence=absence)
        if not self.outgoing.wait(self.outgoing.interrupt(keys)):
            raise TierError(f"some of {len(keys)} dropped blocks are still being sent to other nodes: drop them again")
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

    # -- dropping what others dropped, or lost the key of -------------------------------------------------

    def drop_here(self, keys: Sequence[BlockKey], absence: Absence = Absence.DROPPED) -> None:
        """Drop blocks without waiting, but leave shared storage alone. Raises ClosedError if the tiers are closed: then
        the blocks would be on the disk when it is opened again."""
        self._check_open()
        self._drop(keys, absence)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("blocks are not dropped: the store is closed")

    def _drop(self, keys: Sequence[BlockKey], absence: Absence) -> None:
        self.pipeline.drop(keys, lambda failed: None, shared=False, absence=absence)
        self.outgoing.interrupt(keys)

    def forget_here(self, tenant: bytes) -> None:
        """Drop a tenant's blocks without waiting, but leave shared storage alone."""
        self._check_open()
        with self.pipeline.forgetting(tenant), self.outgoing.forgetting(tenant):
            self.drop_here(self.shred(tenant, ()), Absence.FORGOTTEN)
            self._zero_traces_later(tenant)

    def drop_all_here(self) -> None:
        """Drop all blocks without waiting, but leave shared storage alone."""
        for some in work_slices.slices(np.arange(self.index.size)):
            with self.index.lock:
                there = np.zeros(len(some), np.bool_)
                for state in self.index.state:
                    there |= state[some] != ABSENT
                keys = self.index.keys(some[there])
            self.drop_here(keys)

    def _key_gone(self, tenant: bytes) -> None:
        """Drop a tenant's blocks after its key was destroyed: data read with the key must not stay in memory. Other
        stores may still have the key, so shared storage is left alone."""
        self._drop(self.pipeline.keys_of(tenant), Absence.FORGOTTEN)
        self._zero_traces_later(tenant)

    def shred(self, tenant: bytes, data_keys: Collection[bytes]) -> list[BlockKey]:
        """Erase the bytes of a tenant's blocks that the disk still lists. Returns their keys and those of the tenant's
        other blocks here.

        Not those in shared storage: the owner of a blob cannot be determined without a key, which is destroyed too.
        """
        index, keys = self.index, list[BlockKey]()
        for cold in self.colds:
            if not isinstance(tier := cold.tier, Nvme):
                continue
            places, names = tier.shred(lambda page: belongs(page, tenant, data_keys))
            keys += names
            for some in work_slices.slices(np.array(places, np.int64)):
                with index.lock:
                    rows = tier.owners(some)
                    here = (rows > 0) & (index.state[cold.number][rows] == SEALED)
                    keys += index.keys(rows[here & (index.place[cold.number][rows] == some)])
        return list(dict.fromkeys([*self.pipeline.keys_of(tenant), *keys]))

    def _zero_traces_later(self, tenant: bytes) -> None:
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

    # -- flushing, statistics, closing --------------------------------------------------------------------

    def wait_for_credit(self, end: float | None = None) -> None:
        """Wait until blocks are written that were refused only because write credit for them had to be requested first.

        Waits until ``end`` (on the system's monotonic clock) at most, for all tiers together.
        """
        for cold in self.colds:
            if (budget_thread := self._budget_threads.get(cold.name)) is not None:
                cold.lane.wait_idle(cold.patience if end is None else _seconds_left(end))
                budget_thread.wait_for_credit(_seconds_left(end))

    def flushed(self, end: float | None) -> Flushed:
        """Wait until the tiers below DRAM have written what they were given, until ``end`` at most; returns what is
        written."""
        # Wait for every tier in turn, even if an earlier one timed out.
        idle = [c.lane.wait_idle(_seconds_left(end)) for c in self.colds]
        return self.pipeline.report(timed_out=not all(idle))

    def statistics(self) -> Statistics:
        """Its part of a store's statistics."""
        with self.index.lock:
            index = self.index.statistics()
            planner = self.planner.statistics()
            counts = {str(name): n for name, n in sorted(self.pipeline.counts.items()) if n}
        # Positions for other nodes that were never needed are not worth a line.
        unused = {c.name for c in self.colds if isinstance(c.tier, PeerPosition) and not c.tier.used}
        colds = [c for c in self.colds if c.name not in unused]
        return Statistics(
            index.blocks,
            index.held,
            index.pinned,
            {"dram": self.dram.statistics(), **{c.name: c.tier.statistics() for c in colds}},
            {c.name: c.lane.statistics() for c in colds},
            counts,
            self.pipeline.statistics(),
            planner.without(unused),
            tenants=self._limited_tenants(),
            budgets={name: budget_thread.statistics() for name, budget_thread in self._budget_threads.items()},
            scratch=ScratchStatistics(
                sum(pool.taken for pool in self._scratch),
                sum(pool.most for pool in self._scratch),
                sum(pool.limit for pool in self._scratch),
            ),
            absences=self.index.absence_log.statistics(),
            cluster=self.nodes.statistics() if self.nodes is not None else None,
        )

    def _limited_tenants(self) -> dict[str, TenantStatistics]:
        names = ["dram", *(cold.name for cold in self.colds)]
        with self.index.lock:
            accounts = {names[number]: account for number, account in self.index.accounts.items()}
            return {tag.hex(): TenantStatistics.limited(n, accounts) for tag, n in self._quotas.tenants.items()}

    def finish(self) -> None:
        """Write what should outlive the process. Call it when all sessions are closed."""
        for listener, (cold, _) in zip(self._listeners, self.shared_tiers, strict=True):
            # first, so that dropped blocks are not written
            again_if_interrupted(functools.partial(listener.close, cold.patience or 0.0))
        with self.index.lock:
            self.pipeline.reclaim()
        self.pipeline.call_ready()
        self.pipeline.flush()
        self.wait_for_credit()
        for cold in self.colds:
            cold.lane.wait_idle(cold.patience)
        self.pipeline.note_expiries()

    def close(self) -> None:
        """End its threads and close its tiers. May be repeated."""
        self._closed = True
        with contextlib.ExitStack() as stack:
            stack.callback(again_if_interrupted, self.pipeline.persister.close)
            stack.enter_context(self._running)

    def free(self) -> None:
        """Release its memory. May be repeated."""
        try:
            self.dram.close()
        finally:
            self._join_tracers()

    def _join_tracers(self) -> None:
        for tracer in self._tracers:
            if tracer.ident is not None:
                tracer.join()


def _seconds_left(end: float | None) -> float | None:
    """Seconds left until ``end``; None means no limit."""
    return None if end is None else max(0.0, end - time.monotonic())


def _source(cold: ColdTier) -> Source:
    lane = cold.lane
    return Source(cold.number, cold.name, lane.read_speed, cold.read_only, lambda: lane.read_bytes)


def _wait_for(ended: SimpleQueue[int], timeout: float | None) -> int | None:
    """Return the value put into the queue, or None on timeout. Not a ``threading.Event``: an interrupted wait for that
    may raise a RuntimeError instead of the interrupt; this queue, written in C, does not."""
    try:
        return ended.get(timeout=timeout)
    except Empty:
        return None
