"""Replays a trace through a store with real bytes: each block's content follows from its number, and is verified.

This shows how long moving the bytes takes on this machine, and whether replays without bytes are accurate. Use small
blocks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvtide.block import Layout
from kvtide.config import Config
from kvtide.counts import Count, TierCount
from kvtide.errors import ConfigError
from kvtide.index.keys import DEFAULT_TENANT, Model, Tenant
from kvtide.plan.usage_tracker import TURNS
from kvtide.replay.simulation import TraceClock
from kvtide.store.session import Session
from kvtide.store.store import Store
from kvtide.tiers.segments import ladder

__all__ = ["RealStoreReplay"]

_TOKENS = 16


class RealStoreReplay:
    """A store like that of ``kvtide.open``, with a session for each tenant. Its NVMe tier is at
    ``config.nvme.path``."""

    def __init__(self, config: Config, block: int) -> None:
        if block % 8192:
            raise ConfigError(f"blocks of {block} bytes; for a replay with real bytes give a multiple of 8 KiB")
        layout = Layout.attention(
            layers=1, heads=1, head_dim=block // (2 * _TOKENS), dtype="int8", block_tokens=_TOKENS
        )
        self.clock = TraceClock()
        self.slot = ladder(layout.geometry["full"].footprint)
        self.learning_seconds = 0.0  # the store learns in a thread
        self.moving_seconds = 0.0
        self._block = block
        self._model = Model(layout, "replay")
        self._store = Store(config)
        self._sessions: dict[str, Session] = {}
        self._hits = 0

    def _session(self, tenant: str) -> Session:
        if tenant not in self._sessions:
            whose = Tenant(tenant, blake3(tenant.encode()).digest()) if tenant else DEFAULT_TENANT
            self._sessions[tenant] = self._store.session(self._model, whose)
        return self._sessions[tenant]

    def _content(self, number: int) -> npt.NDArray[np.uint8]:
        return np.full(self._block // 8, number, np.uint64).view(np.uint8)

    def request(
        self, blocks: Sequence[int], tenant: str = "", turn: str = "", returns_in: float | None = None
    ) -> Counter[str]:
        """Replay a request. Returns how many blocks of its prefix were found in DRAM and in the colder tier.

        ``turn`` and ``returns_in``: the caller's hints at its end, see ``Session.expect``.
        """
        session = self._session(tenant)
        chain = session.chain(np.repeat(np.array(blocks, np.uint32), _TOKENS))
        began = time.perf_counter()
        before = self._store.statistics().counts.get(TierCount.BLOCKS_READ.of("nvme"), 0)
        with session.match(chain) as match:
            loaded = session.load(match).wait()
            found = loaded.tokens // _TOKENS
            for number, view in zip(blocks, loaded.blocks, strict=False):
                assert np.array_equal(np.frombuffer(view, np.uint8), self._content(number)), "a wrong byte"
            session.store(chain, [self._content(n) for n in blocks[found:]], start=found)
        if turn in TURNS or returns_in is not None:
            session.expect(chain, turn=TURNS.get(turn), returns_in=returns_in)
        self._store.flush()
        self.moving_seconds += time.perf_counter() - began
        below = self._store.statistics().counts.get(TierCount.BLOCKS_READ.of("nvme"), 0) - before
        self._hits += found
        return Counter(dram=found - below, nvme=below)

    def totals(self) -> dict[str, int]:
        """Blocks written to, read and evicted from each tier since the beginning, and the number that each holds
        now."""
        known = self._store.statistics()
        counts = Counter(known.counts)
        return {
            "dram written": counts[Count.BLOCKS_STORED] + counts[TierCount.BLOCKS_READ.of("nvme")],
            "dram read": self._hits,
            "dram evicted": counts[TierCount.BLOCKS_EVICTED.of("dram")],
            "dram held": known.tiers["dram"].blocks,
            "nvme written": counts[TierCount.BLOCKS_WRITTEN.of("nvme")],
            "nvme read": counts[TierCount.BLOCKS_READ.of("nvme")],
            "nvme evicted": counts[TierCount.BLOCKS_EVICTED.of("nvme")],
            "nvme held": known.tiers["nvme"].blocks if "nvme" in known.tiers else 0,
        }

    @property
    def in_charge(self) -> str:
        """The policy that ranks evictions from DRAM now."""
        return self._store.statistics().pipeline.evictors["dram"].policy

    def close(self) -> None:
        self._store.close()
