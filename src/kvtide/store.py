"""The store: wires index, planner, pipeline and tiers together. The only place that knows them all."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvtide.block import BlockKey
from kvtide.clock import Clock, SystemClock
from kvtide.config import Config
from kvtide.desk import Desk, LocalDesk
from kvtide.errors import TierError
from kvtide.events import Event, Feed, FeedStatistics
from kvtide.index.index import DRAM, SEALED, Index
from kvtide.index.keys import Model, Tenant
from kvtide.index.weights import WeightsId, identify
from kvtide.plan import admit, policy
from kvtide.plan.budget import WriteBudget
from kvtide.plan.evict import Evictor, room
from kvtide.plan.learner import Learner
from kvtide.plan.planner import Planner, PlannerStatistics, Source
from kvtide.plan.uses import Uses
from kvtide.session import Home
from kvtide.tiers.base import Held, TierStatistics
from kvtide.tiers.copier import Copier
from kvtide.tiers.disk import Disk
from kvtide.tiers.dram import Dram
from kvtide.tiers.nvme import Nvme
from kvtide.transfer.cold import Cold
from kvtide.transfer.lane import Lane, LaneStatistics
from kvtide.transfer.pipeline import Pipeline, PipelineStatistics

__all__ = ["Statistics", "Store"]

NVME = 1


@dataclass(frozen=True, slots=True)
class Statistics:
    """What the store holds and has done since it was opened."""

    blocks: int
    """Known, in whatever tier."""
    held: int
    """Blocks that a match, a reservation or a move keeps from eviction."""
    pinned: int
    tiers: dict[str, TierStatistics]
    lanes: dict[str, LaneStatistics]
    counts: dict[str, int]
    """What happened to blocks, by name."""
    pipeline: PipelineStatistics = field(default_factory=PipelineStatistics)
    planner: PlannerStatistics = field(default_factory=PlannerStatistics)
    feed: FeedStatistics = field(default_factory=FeedStatistics)
    sessions: int = 0
    """Of this process."""


class Store(Home):
    """Blocks of KV in DRAM and on NVMe. Open it with ``kvtide.open``; close it, or use it in a ``with``."""

    def __init__(
        self,
        config: Config,
        *,
        clock: Clock | None = None,
        disk: Disk | None = None,
        shared: bool = False,
        aside: int = 0,
    ) -> None:
        """``shared``: other processes will map its memory, and have ``aside`` bytes of its budget already."""
        super().__init__("open it again with kvtide.open(...)")
        self.config = config
        self.clock = clock or SystemClock()
        self.index = Index(tiers=2 if config.nvme.path else 1)
        self.feed = Feed()
        memory = config.dram
        self.dram = Dram(memory.budget, memory.segment, memory.huge_pages, memory.prefault, shared, aside, ahead=shared)
        self.copier = Copier(busy=lambda: any(c.lane.write_bytes for c in self._colds))
        self._uses = Uses(self.index, self.clock)
        ranking = policy.make(memory.policy, self.index, DRAM, lambda: room(self.dram))
        self._uses.serve(ranking)
        self._next_expiry = float("inf")
        self._colds: list[Cold] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self.copier.close)
            undo.callback(self.dram.close)
            if config.nvme.path:
                self._colds.append(self._open_nvme(disk))
            undo.pop_all()
        self.pipeline = Pipeline(
            self.index, self.dram, self._colds, ranking, self._uses, self.feed, config.dram.checksum
        )
        self._learner = Learner(self._uses)
        self.planner = Planner(self.index, [Source(c.number, c.name, c.lane.read_speed) for c in self._colds])

    def _open_nvme(self, disk: Disk | None) -> Cold:
        settings = self.config.nvme
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
        )
        ranking = policy.make(settings.policy, self.index, NVME, lambda: room(tier))
        self._uses.serve(ranking)
        admission = admit.make(settings.store, self.index, lambda: room(tier))
        if admission.learns:
            self._uses.teach(admission.learn)
        for held in tier.scan():
            self._adopt(tier, held)
        return Cold(
            NVME,
            "nvme",
            tier,
            # Enough that a third job waits while two are under way: jobs end all at once, and the disk must not idle.
            Lane(tier, self.clock, settings.queue, depth=5 * settings.threads),
            admission,
            Evictor(self.index, NVME, tier, ranking, self._uses),
            settings.token_ids,
            WriteBudget.of(settings.write_limit, settings.drive_writes_per_day, settings.budget, self.clock),
        )

    def _adopt(self, tier: Nvme, held: Held) -> None:
        """Enter what a tier held before into the index."""
        index = self.index
        rows, parents = index.add_many(held.keys, held.parents, held.depths)
        index.state[NVME][rows] = SEALED
        index.place[NVME][rows] = held.places
        index.expire_at(rows, held.expiries)
        index.priority[rows] = held.priorities
        first = int(rows[0]) if len(rows) else 0
        self._uses.restore(rows, np.where(parents > 0, parents - first, -1), held.sequences)
        tier.own(held.places, rows)
        if len(rows):
            self._next_expiry = float(held.expiries.min())

    # -- for sessions -------------------------------------------------------------------------------------

    def _desk(self, model: Model, tenant: Tenant) -> Desk:
        return LocalDesk(self, model.layout, model.namespace(tenant), tenant.tag)

    @property
    def largest_part(self) -> int:
        """Bytes that one reservation should have at most, so that others can make room for it.

        Where blocks must be written down before they leave, room comes more slowly.
        """
        return self.config.dram.budget // (8 if self.has_colder else 4)

    @property
    def has_colder(self) -> bool:
        """Whether there are tiers below DRAM."""
        return bool(self._colds)

    @property
    def read_bytes_queued(self) -> int:
        return sum(c.lane.read_bytes for c in self._colds)

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
        return all(c.lane.wait_idle(timeout) for c in self._colds)

    def statistics(self) -> Statistics:
        with self.index.lock:
            index = self.index.statistics()
            planner = self.planner.statistics()
            counts = {k: v for k, v in sorted(self.pipeline.counts.items()) if v}
        return Statistics(
            index.blocks,
            index.held,
            index.pinned,
            {"dram": self.dram.statistics(), **{c.name: c.tier.statistics() for c in self._colds}},
            {c.name: c.lane.statistics() for c in self._colds},
            counts,
            self.pipeline.statistics(),
            planner,
            self.feed.statistics(),
            len(self._sessions),
        )

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
            for cold in self._colds:
                stack.callback(cold.tier.close)
            self.pipeline.flush()
            self.flush()
