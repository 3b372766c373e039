"""The store: wires index, planner, pipeline and tiers together. The only place that knows them all."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from kvtide.adoption import adopt, charge
from kvtide.block import BlockKey
from kvtide.clock import Clock, SystemClock
from kvtide.config import Config, Storage
from kvtide.desk import Desk, LocalDesk
from kvtide.errors import TierError
from kvtide.events import Event, Feed
from kvtide.forgetting import forget
from kvtide.index.account import Account
from kvtide.index.index import DRAM, Index
from kvtide.index.keys import Model, Tenant
from kvtide.index.weights import WeightsId, identify
from kvtide.plan import admit, policy
from kvtide.plan.budget import WriteBudget
from kvtide.plan.coldest import Coldest
from kvtide.plan.evict import Evictor, room
from kvtide.plan.learner import Learner
from kvtide.plan.planner import Planner, Source
from kvtide.plan.quota import Quota
from kvtide.plan.uses import Uses
from kvtide.security.ring import Ring, open_ring
from kvtide.session import Home
from kvtide.shares import Shares, divide
from kvtide.statistics import Statistics, TenantStatistics
from kvtide.storages import storages
from kvtide.tiers.blobs import Blobs
from kvtide.tiers.copier import Copier
from kvtide.tiers.disk import Disk
from kvtide.tiers.dram import Dram
from kvtide.tiers.nvme import Nvme
from kvtide.tiers.purse import Keeper, Purse
from kvtide.tiers.sealing import Sealing
from kvtide.tiers.shared import Shared
from kvtide.tiers.steward import Papers, Steward
from kvtide.transfer.cold import Cold
from kvtide.transfer.lane import Lane
from kvtide.transfer.pipeline import Pipeline
from kvtide.transfer.search import Search

__all__ = ["Statistics", "Store"]

NVME = 1


class Store(Home):
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
        shares = divide(config)
        self.config = config = shares.rest
        self._shares = shares
        self.clock = clock or SystemClock()
        shared_ones = list(storages(config, disk))
        self.index = Index(1 + bool(config.nvme.path) + len(shared_ones))
        self.feed: Feed = within.feed if within else Feed()
        self._serials: Iterator[int] = within._serials if within else itertools.count()
        self._within = within
        memory = config.dram
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
        self.copier = Copier(busy=lambda: any(c.lane.write_bytes for c in self.colds))
        self._uses = Uses(self.index, self.clock)
        ranking = policy.make(memory.policy, self.index, DRAM, lambda: room(self.dram))
        self._uses.serve(ranking)
        self._next_expiry = float("inf")
        self.colds: list[Cold] = []
        """Tiers below DRAM."""
        self._keepers: dict[str, Keeper] = {}
        self._reserved: dict[bytes, Store] = {}
        self.ring: Ring | None = within.ring if within else open_ring(config.security, self.clock)
        with contextlib.ExitStack() as undo:
            undo.callback(self.copier.close)
            undo.callback(self.dram.close)
            if self.ring is not None and not within:
                undo.callback(self.ring.close)
                self.ring.start()
            undo.callback(self._close_colds)
            if config.nvme.path:
                self.colds.append(self._open_nvme(disk))
            for storage in shared_ones:
                self.colds.append(self._open_shared(*storage))
            self._open_reserved(shares, disk, shared, undo)
            undo.pop_all()
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
        self.pipeline.bring_down()
        self.search = Search(self.index, self.colds, self.clock, self.feed, self.pipeline.counts, self.expect_expiry)
        if self.ring is not None:
            self.ring.on_gone(self._drop_resident)
        self._learner = Learner(self._uses)
        for keeper in self._keepers.values():
            keeper.start()
        self.planner = Planner(self.index, [Source(c.number, c.name, c.lane.read_speed) for c in self.colds])

    def _open_nvme(self, disk: Disk | None) -> Cold:
        settings, security = self.config.nvme, self.config.security
        tier = Nvme(
            Path(settings.path).expanduser(),
            settings.budget,
            segment=settings.segment,
            threads=settings.threads,
            direct=settings.direct,
            durable=settings.durable,
            compression=settings.codec,
            evict=lambda size: self.pipeline.make_room(NVME, size),
            disk=disk,
            clock=self.clock,
            sealing=Sealing(self.ring, seals=security.encrypt, accept_open=security.accept_open),
        )
        ranking = policy.make(settings.policy, self.index, NVME, lambda: room(tier))
        self._uses.serve(ranking)
        admission = admit.make(settings.store, self.index, lambda: room(tier))
        if admission.learns:
            self._uses.teach(admission.learn)
        evictor = Evictor(self.index, NVME, tier, ranking, self._uses)
        quota = self._quota("nvme", NVME, evictor.ranked)
        self._next_expiry = adopt(tier, NVME, self.index, self._uses)
        if quota is not None:
            charge(tier, self.index, quota.account, self._shares.tenants, self.config.security)
        return Cold(
            NVME,
            "nvme",
            tier,
            # Enough that another job waits while three are under way: jobs end all at once, and the disk must not idle.
            Lane(tier, self.clock, settings.queue, depth=6 * settings.threads),
            admission,
            evictor,
            settings.token_ids,
            WriteBudget.of(settings.write_limit, settings.drive_writes_per_day, settings.budget, self.clock),
            quota,
        )

    def _quota(self, name: str, number: int, coldest: Coldest) -> Quota | None:
        quotas = self._shares.quotas.get(name)
        return Quota(self.index, number, name, Account(self.index, quotas), coldest) if quotas else None

    def _open_shared(self, name: str, settings: Storage, opened: Callable[[], Blobs]) -> Cold:
        blobs, purse = opened(), None
        if settings.budget:
            papers = Papers(blobs, settings.lease)
            purse = Purse(
                papers,
                lambda: self.pipeline.catch_up(name),
                lambda names: self.search.removed(name, names),
                self.clock,
            )
            self._keepers[name] = Keeper(papers, Steward(papers, settings.budget, self.clock), purse)
        tier = Shared(
            blobs,
            threads=settings.threads,
            timeout=settings.timeout,
            compression=settings.codec,
            sealing=Sealing(self.ring, seals=self.config.security.encrypt),
            credit=purse,
            late=lambda keys: self.pipeline.late(name, keys),
            clock=self.clock,
        )
        admission = admit.make(
            settings.store, self.index, lambda: room(self.dram) * settings.budget // self.config.dram.budget
        )
        lane = Lane(tier, self.clock, settings.queue, depth=4 * settings.threads)
        number = len(self.colds) + 1
        quota = self._quota(name, number, Coldest(self.index, number, policy.Lru(self.index), self._uses))
        patience = 2 * settings.timeout
        return Cold(number, name, tier, lane, admission, None, quota=quota, shared=True, patience=patience)

    def _open_reserved(self, shares: Shares, disk: Disk | None, shared: bool, undo: contextlib.ExitStack) -> None:
        shares.clear()
        for tenant, config in shares.reserved.items():
            self._reserved[tenant] = share = Store(config, clock=self.clock, disk=disk, shared=shared, within=self)
            undo.callback(share.close)

    # -- for sessions -------------------------------------------------------------------------------------

    def _desk(self, model: Model, tenant: Tenant) -> Desk:
        return LocalDesk(self.of(tenant.tag), model.layout, model.namespace(tenant), tenant.tag)

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

    def expect_expiry(self, when: float) -> None:
        """Some block expires at ``when``."""
        with self.index.lock:
            self._next_expiry = min(self._next_expiry, when)

    def sweep(self) -> float:
        """Remove what has expired; answers the time."""
        now = self.clock.time()
        if now >= self._next_expiry:
            with self.index.lock:
                count = self.index.size
                expiry = self.index.expiry[:count]
                over = np.flatnonzero(expiry <= now)
                later = expiry[expiry > now]
                self._next_expiry = float(later.min(initial=np.inf))
                events = self.pipeline.expire(over)
            self.feed.publish(events)
        return now

    def drop(self, keys: Sequence[BlockKey], timeout: float | None = None) -> int:
        """Remove blocks from every tier for good; see ``Session.drop``."""
        ended = threading.Event()
        failed = 0
        if timeout is None:  # storage that others use too may hang for ever
            timeout = max((cold.patience for cold in self.colds if cold.patience is not None), default=None)

        def done(count: int) -> None:
            nonlocal failed
            failed = count
            ended.set()

        found = self.pipeline.drop(keys, done)
        if not ended.wait(timeout):
            raise TierError(f"dropping {len(keys)} blocks took longer than {timeout} s; it goes on in the background")
        if failed:
            raise TierError(
                f"{failed} of {len(keys)} dropped blocks could not be erased from disk. They are not served, but may "
                "be found again when the store is next opened: see the log for the disk's error, then drop them again"
            )
        return found

    # -- for administrators -------------------------------------------------------------------------------

    def forget(self, tenant: bytes, who: str = "") -> int:
        """Destroy a tenant's keys, then its blocks in every tier; answers how many there were.

        Raises HeldError, and does nothing, under a legal hold; TierError if blocks could not all be erased, which are
        then unreadable if they were sealed. Takes as long as reading a page of every slot on disk.
        """
        return forget(self, tenant, who)

    def _drop_resident(self, tenant: bytes) -> None:
        """A tenant's key is gone, here at least: what was read with it must not stay in memory. Others may have it."""
        with self.index.lock:
            keys = self.index.keys(self.pipeline.residents_of(tenant))
        self.pipeline.drop(keys, lambda failed: None, shared=False)

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
        return self.feed.follow(follower)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until colder tiers have what they were given. False if ``timeout`` seconds passed before."""
        return all(
            [c.lane.wait_idle(timeout) for c in self.colds] + [s.flush(timeout) for s in self._reserved.values()]
        )

    def statistics(self) -> Statistics:
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
            {name: keeper.statistics() for name, keeper in self._keepers.items()},
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
        self._learner.close()
        with contextlib.ExitStack() as stack:
            stack.callback(self.copier.close)
            stack.callback(self.dram.close)
            if self.ring is not None and not self._within:
                stack.callback(self.ring.close)
            stack.callback(self._close_colds)
            for share in self._reserved.values():
                stack.callback(share.close)
            for keeper in self._keepers.values():
                stack.callback(keeper.close)
            self.pipeline.flush()
            for cold in self.colds:
                cold.lane.wait_idle(cold.patience)

    def _close_colds(self) -> None:
        with contextlib.ExitStack() as stack:
            for cold in self.colds:
                stack.callback(cold.tier.close)
