"""Replays a trace against the store's own index, pipeline, policies and admission, over tiers without bytes.

No decision is made here. A request does what an engine does with the store: match and lease its prompt's prefix, load
what is not in DRAM, compute and store the rest, and release the lease.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
from blake3 import blake3

from kvtide.block import BlockKey, Geometry
from kvtide.config import Config
from kvtide.counts import Count, TierCount
from kvtide.events import Feed
from kvtide.index.index import DRAM, SEALED, Index, Rows
from kvtide.plan import admit, policy
from kvtide.plan.evict import Evictor, room
from kvtide.plan.usage_tracker import TURNS, UsageTracker
from kvtide.plan.write_budget import WriteBudget
from kvtide.replay.simulated_tier import SimulatedDram, SimulatedTier
from kvtide.tiers.base import Identity
from kvtide.tiers.segments import ladder
from kvtide.transfer.cold_tier import ColdTier
from kvtide.transfer.lane import Lane
from kvtide.transfer.pipeline import Pipeline, WriteRequest
from kvtide.transfer.transfer import Transfer

__all__ = ["Simulation", "TraceClock"]

COLD = 1
_PART = 64
_ROOT = bytes(32)


class TraceClock:
    """The time of the trace."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class Simulation:
    """DRAM and, if the configuration has a path for it, a colder tier; blocks of ``block`` bytes each."""

    def __init__(self, config: Config, block: int) -> None:
        self.clock = TraceClock()
        self.index = Index(tiers=2)
        self.uses = UsageTracker(self.index, self.clock)
        self.learning_seconds = 0.0
        self._hits = 0
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
            tier = self.cold = SimulatedTier(
                disk.budget, disk.segment, lambda size, count: self.pipeline.make_room(COLD, size, count)
            )
            ranking = policy.make(disk.policy, self.index, COLD, lambda: room(tier))
            self.uses.serve(ranking)
            admission = admit.make(disk.store, self.index, lambda: room(tier))
            if admission.learns:
                self.uses.teach(admission.learn)
            colds.append(
                ColdTier(
                    COLD,
                    "nvme",
                    tier,
                    Lane(tier, self.clock, 1 << 62, max_under_way=1 << 30),
                    admission,
                    Evictor(self.index, COLD, tier, ranking, self.uses),
                    budget=WriteBudget.of(disk.write_limit, disk.drive_writes_per_day, disk.budget, self.clock),
                )
            )
        self.pipeline = Pipeline(self.index, self.dram, colds, self.policy, self.uses, Feed())

    def _identity(self, tenant: str) -> Identity:
        found = self._identities.get(tenant)
        if found is None:
            tag = blake3(tenant.encode()).digest()[:16]
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
        self._store(keys, len(found), identity)
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

    def _load(self, rows: Rows, identity: Identity) -> None:
        with self.index.lock:
            lease = self.pipeline.lease(rows)
        with lease:
            self.pipeline.load([(rows, identity)], Transfer(self.clock, None))

    def _store(self, keys: Sequence[BlockKey], start: int, identity: Identity) -> None:
        """Store blocks like ``Session.store``: in parts, with a lease on the prompt's prefix until all are stored."""
        index, line, parents = self.index, self.pipeline, [_ROOT, *keys]
        if start == len(keys):
            return
        with index.lock:
            rows = index.rows(keys[:start])
            lease = line.hold_parents(rows)
        for first in range(start, len(keys), self._part):
            stop = min(first + self._part, len(keys))
            write_request = WriteRequest(identity, keys[first:stop], parents[first:stop], range(first, stop))
            with line.reserve([write_request]) as reservation:
                rows = np.concatenate([rows, reservation.rows])
                with index.lock:
                    before, lease = lease, line.hold_parents(rows)
                before.release()
                reservation.seal()
        with index.lock:
            stored = index.rows(keys)
            line.stored(stored[stored > 0])
        lease.release()

    def close(self) -> None:
        """Stop the threads of the simulated DRAM tier: a comparison creates many of these, one after another."""
        self.dram.close()
