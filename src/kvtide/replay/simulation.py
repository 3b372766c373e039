"""Replays a trace against the store's own index, pipeline, policies and admission, over tiers without bytes.

No decision is made here. A request does what an engine does with the store: match and lease its prompt's prefix, load
what is not in DRAM, compute and store the rest, and release the lease.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from blake3 import blake3

from kvtide.block import BlockKey, Geometry
from kvtide.config import Config
from kvtide.counts import Count, TierCount
from kvtide.events import Feed
from kvtide.index.index import DRAM, SEALED, Index, Rows
from kvtide.index.tenant_usage import TenantUsage
from kvtide.index.work_slices import SLICE
from kvtide.plan import admit, policy
from kvtide.plan.evict import Evictor, room
from kvtide.plan.quota import Quota, TenantQuotas
from kvtide.plan.usage_tracker import TURNS, UsageTracker
from kvtide.plan.write_budget import WriteBudget
from kvtide.replay.simulated_tier import SimulatedDram, SimulatedTier
from kvtide.tiers.base import Identity
from kvtide.tiers.segments import ladder
from kvtide.transfer.cold_tier import ColdTier
from kvtide.transfer.lane import Lane
from kvtide.transfer.pipeline import Pipeline, WriteRequest
from kvtide.transfer.transfer import Transfer

__all__ = ["Conditions", "Simulation", "TraceClock"]

COLD = 1
_PART = 64
_ROOT = bytes(32)
_GOLDEN = 0.6180339887498949
"""Multiples of it are spread evenly between whole numbers."""


class _Lane(Lane):
    """A lane without a limit that may refuse all writes for a while."""

    refusing = False

    def reserve_write(self, nbytes: int, ignore_limit: bool = False) -> bool:
        return not self.refusing and super().reserve_write(nbytes, ignore_limit)


class TraceClock:
    """The time of the trace."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class Conditions(NamedTuple):
    """What happens to blocks besides what the configuration says."""

    ttl: float | None = None
    """Seconds that a prompt's blocks may live after it was last stored; None: no limit."""
    refused: float = 0.0
    """The share of the requests whose blocks are not written to the colder tier, because its queue is full."""
    second_touch: bool = False
    """Whether engines store only blocks of prompts that were requested before."""
    header: int = 0
    """Bytes that a block takes in the colder tier in addition, for the header of its record."""
    quotas: TenantQuotas = TenantQuotas()
    tags: Mapping[str, bytes] = {}
    """The tags by which ``quotas`` names tenants, by their names in the trace."""


class Simulation:
    """DRAM and, if the configuration has a path for it, a colder tier; blocks of ``block`` bytes each."""

    def __init__(self, config: Config, block: int, conditions: Conditions | None = None) -> None:
        self._conditions = conditions = conditions or Conditions()
        self._requested: set[BlockKey] = set()
        """All blocks requested so far, if ``second_touch``."""
        self.clock = TraceClock()
        self.index = Index(tiers=2)
        self.uses = UsageTracker(self.index, self.clock)
        self.learning_seconds = 0.0
        self._hits = self._number = 0
        self._names: dict[tuple[str, int], BlockKey] = {}
        self._geometry = Geometry(1, block)
        self._identities: dict[str, Identity] = {}
        self._part = max(1, min(_PART, config.dram.budget // self.slot // 4))
        """Blocks moved at a time. Not bytes: hit rates and speed shall not depend on the block size."""
        memory, disk = config.dram, config.nvme
        self.dram = SimulatedDram(memory.budget, memory.segment, self._geometry.footprint)
        self.policy = policy.make(memory.policy, self.index, DRAM, lambda: room(self.dram))
        self.uses.serve(self.policy)
        self.cold: SimulatedTier | None = None
        colds = []
        if disk.path:
            budget = disk.budget * self.slot // (self.slot + conditions.header)
            tier = self.cold = SimulatedTier(
                budget, disk.segment, lambda size, count: self.pipeline.make_room(COLD, size, count)
            )
            ranking = policy.make(disk.policy, self.index, COLD, lambda: room(tier))
            self.uses.serve(ranking)
            admission = admit.make(disk.store, self.index, lambda: room(tier))
            if admission.learns:
                self.uses.teach(admission.learn)
            self._lane = _Lane(tier, self.clock, 1 << 62, max_under_way=1 << 30)
            evictor = Evictor(self.index, COLD, tier, ranking, self.uses)
            limits = conditions.quotas.of("nvme")
            colds.append(
                ColdTier(
                    COLD,
                    "nvme",
                    tier,
                    self._lane,
                    admission,
                    evictor,
                    budget=WriteBudget.of(disk.write_limit, disk.drive_writes_per_day, disk.budget, self.clock),
                    quota=Quota(self.index, COLD, "nvme", TenantUsage(self.index, limits), evictor.ranked)
                    if limits
                    else None,
                )
            )
        self.pipeline = Pipeline(self.index, self.dram, colds, self.policy, self.uses, Feed(), quotas=conditions.quotas)

    def _identity(self, tenant: str) -> Identity:
        found = self._identities.get(tenant)
        if found is None:
            tag = self._conditions.tags.get(tenant) or blake3(tenant.encode()).digest()[:16]
            found = Identity(bytes(32), tag, bytes(32), b"", 1, self._geometry, 1)
            self._identities[tenant] = found
        return found

    @property
    def slot(self) -> int:
        """Bytes of a tier's budget that a block takes."""
        return ladder(self._geometry.footprint)

    def totals(self) -> dict[str, int]:
        """Blocks written to, read and evicted from each tier since the beginning, and the number that each holds
        now."""
        counts = self.pipeline.counts
        return {
            "dram written": counts[Count.BLOCKS_STORED] + counts[TierCount.BLOCKS_READ.of("nvme")],
            "dram read": self._hits,
            "dram evicted": counts[TierCount.BLOCKS_EVICTED.of("dram")],
            "dram held": int(np.count_nonzero(self.index.state[DRAM] == SEALED)),
            "nvme written": counts[TierCount.BLOCKS_WRITTEN.of("nvme")],
            "nvme read": counts[TierCount.BLOCKS_READ.of("nvme")],
            "nvme evicted": counts[TierCount.BLOCKS_EVICTED.of("nvme")],
            "nvme held": int(np.count_nonzero(self.index.state[COLD] == SEALED)),
        }

    @property
    def in_charge(self) -> str:
        """The policy that ranks evictions from DRAM now."""
        return self.policy.in_charge

    def _name(self, number: int, tenant: str) -> BlockKey:
        found = self._names.get((tenant, number))
        if found is None:
            found = self._names[tenant, number] = BlockKey(blake3(f"{number} {tenant}".encode()).digest())
        return found

    def request(
        self, blocks: Sequence[int], tenant: str = "", turn: str = "", returns_in: float | None = None
    ) -> Counter[str]:
        """Replay a request. Returns how many blocks of its prefix were found in DRAM and in the colder tier.

        A block's number stands for its whole prefix. ``turn`` and ``returns_in``: the caller's hints at its end, see
        ``Session.expect``.
        """
        index, line, identity = self.index, self.pipeline, self._identity(tenant)
        keys = [self._name(number, tenant) for number in blocks]
        if self._conditions.ttl is not None:
            self._expire()
        if self.cold is not None:
            self._lane.refusing = self._drawn() < self._conditions.refused
        with index.lock:
            rows = index.rows(keys)
            whole = index.usable(rows, self.clock.now)
            found = rows[: len(whole) if whole.all() else int(np.argmin(whole))]
            here = index.state[DRAM][found] == SEALED
            line.record_request(found, len(keys))
            away = found[~here]
            lease = line.hold_parents(found) if len(away) else None
        for first in range(0, len(away), self._part):
            self._load(away[first : first + self._part], identity)
        if lease is not None:
            lease.release()
        self._store(keys[: self._stored(keys)], len(found), identity)
        if turn in TURNS or returns_in is not None:
            with index.lock:
                rows = index.rows(keys)
                line.expect([rows[rows > 0]], TURNS.get(turn), returns_in)
        if self.uses.due.is_set():
            began = time.perf_counter()
            self.uses.catch_up()
            self.learning_seconds += time.perf_counter() - began
        self._hits += len(found)
        count = int(np.count_nonzero(here))
        return Counter(dram=count, nvme=len(found) - count)

    def _drawn(self) -> float:
        """A number from 0 to 1 for this request, the same in every replay."""
        self._number += 1
        return self._number * _GOLDEN % 1

    def _stored(self, keys: Sequence[BlockKey]) -> int:
        """How many blocks of a prompt its engine stores."""
        if not self._conditions.second_touch:
            return len(keys)
        known = next((i for i, key in enumerate(keys) if key not in self._requested), len(keys))
        self._requested.update(keys[known:])
        return known

    def _expire(self) -> None:
        """Remove expired blocks, as a store's housekeeping does."""
        with self.index.lock:
            while self.clock.now >= self.index.next_expiry:
                self.pipeline.expire(self.index.expired(self.clock.now, SLICE))
        self.pipeline.call_ready()

    def _load(self, rows: Rows, identity: Identity) -> None:
        with self.index.lock:
            lease = self.pipeline.lease(rows)
        with lease:
            self.pipeline.load([(rows, identity)], Transfer(self.clock, None))

    def _store(self, keys: Sequence[BlockKey], start: int, identity: Identity) -> None:
        """Store blocks like ``Session.store``: in parts, with a lease on the prompt's prefix until all are stored."""
        index, line, parents = self.index, self.pipeline, [_ROOT, *keys]
        ttl = self._conditions.ttl
        expiry = float("inf") if ttl is None else self.clock.now + ttl
        if start >= len(keys):
            return
        with index.lock:
            rows = index.rows(keys[:start])
            lease = line.hold_parents(rows)
        for first in range(start, len(keys), self._part):
            stop = min(first + self._part, len(keys))
            numbers = range(first, stop)
            write_request = WriteRequest(identity, keys[first:stop], parents[first:stop], numbers, expiry)
            with line.reserve([write_request]) as reservation:
                rows = np.concatenate([rows, reservation.rows])
                with index.lock:
                    before, lease = lease, line.hold_parents(rows)
                before.release()
                reservation.seal()
        with index.lock:
            stored = index.rows(keys)
            stored = stored[stored > 0]
            if ttl is not None:
                line.extend(stored, expiry)
            line.stored(stored)
        lease.release()

    def close(self) -> None:
        """Stop the threads of the simulated DRAM tier: a comparison creates many of these, one after another."""
        self.dram.close()
