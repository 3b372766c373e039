"""vLLM's own tiers with ours below, called as its scheduler calls them. Without the model and the GPU: who drives this
writes the rows that a GPU would, and looks at those that it would read."""

from __future__ import annotations

import itertools
import uuid
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from kvtide.testing.blocks import content
from tests.node.serving import eventually

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch and vLLM warn of each other when they are imported
    from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    from kvtide.engines.vllm import tier

__all__ = ["ROW", "LookupResult", "ReqContext", "Scheduler", "configured", "keys", "tier"]

ROW = 256 << 10
ROWS = 16

_numbers = itertools.count()


def keys(count: int, first: int = 0) -> list[OffloadKey]:
    return [make_offload_key(b"%032d" % i, 0) for i in range(first, first + count)]


def configured(settings: dict[str, Any], **changes: Any) -> OffloadingConfig:
    """What vLLM makes of its configuration. ``changes`` are to any field, in whatever part."""
    parts: dict[type, dict[str, Any]] = {
        OffloadingGroupConfig: {"tokens_per_block": 16, "layer_names": ("0", "1"), "group_id": 0},
        OffloadingModelConfig: {"name": "model", "dtype": "bfloat16"},
        OffloadingCacheConfig: {"tokens_per_hash": 16, "blocks_per_chunk": 1},
        OffloadingParallelConfig: {
            "rank": 0,
            "world_size": 1,
            "tp_size": 1,
            "pp_size": 1,
            "pcp_size": 1,
            "dcp_size": 1,
            "data_parallel_index": 0,
            "data_parallel_size": 1,
            "data_parallel_rank_local": None,
            "is_parallelism_agnostic": False,
        },
        OffloadingConfig: {
            "worker_kv_bytes_per_block": ROW,
            "enable_kv_cache_events": False,
            "replicated_layout": False,
            "canonical_layout": False,
            "kv_cache_layout": "LBHNC",
        },
    }
    for field, value in changes.items():
        (part,) = [fields for fields in parts.values() if field in fields]
        part[field] = value
    top = parts.pop(OffloadingConfig)
    group, model, cache, parallel = (kind(**fields) for kind, fields in parts.items())
    mine = {"type": "KvtideTier", "module_path": tier.__name__, **settings}
    extra = {"cpu_bytes_to_use": ROWS * ROW, "secondary_tiers": [mine]}
    identity = f"kvtide-test-{uuid.uuid4()}"
    return OffloadingConfig(
        groups=(group,), model=model, cache=cache, parallel=parallel, extra_config=extra, engine_id=identity, **top
    )


class Scheduler:
    """The part of vLLM's scheduler that moves chunks between its CPU tier and ours."""

    def __init__(self, config: OffloadingConfig) -> None:
        self.manager: Any = TieringOffloadingSpec(config).get_manager()
        (self.tier,) = self.manager.secondary_tiers
        self._view = self.manager.primary_tier.get_kv_memoryview()

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def keep(self, chunks: Sequence[OffloadKey]) -> None:
        """Chunks are computed, come to the CPU tier, and are offered to ours."""
        request = self.begin()
        prepared = self.manager.prepare_store(chunks, request)
        rows = np.asarray(self._view).view(np.uint8)
        for key, row in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids, strict=True):
            rows[row] = content(key, ROW)
        self.manager.complete_store(prepared.keys_to_store, request)
        self.manager.on_request_finished(request)

    def settle(self) -> None:
        """Until nothing is under way."""

        def settled() -> bool:
            self.step()
            return not self.manager.has_pending_work()

        eventually(settled)

    def forget(self) -> None:
        """What the CPU tier has is gone; what ours has stays."""
        self.manager.reset_cache()

    def begin(self) -> ReqContext:
        request = ReqContext(f"request {next(_numbers)}")
        self.manager.on_new_request(request)
        return request

    def fetch(self, chunks: Sequence[OffloadKey]) -> list[bool]:
        """A request asks for chunks until it knows which it can have, and looks at these."""
        request, found = self.begin(), [LookupResult.RETRY]

        def decided() -> bool:
            found[:] = [self.manager.lookup(key, request) for key in chunks]
            self.step()
            return not {LookupResult.RETRY, LookupResult.HIT_PENDING}.intersection(found)

        eventually(decided)
        hits = [key for key, result in zip(chunks, found, strict=True) if result is LookupResult.HIT]
        held = self.manager.prepare_load(hits, request)
        rows = np.asarray(self._view).view(np.uint8)
        for key, row in zip(hits, held.chunk_ids, strict=True):
            assert (rows[row] == content(key, ROW)).all(), "wrong bytes"
        self.manager.complete_load(hits, request)
        self.manager.on_request_finished(request)
        return [result is LookupResult.HIT for result in found]

    def failures(self, of: str) -> int:
        """How many "promotion" or "cascade" jobs of ours failed since this was last asked."""
        self.step()
        told = self.manager.get_stats().data["data"].get(f"vllm:kv_offload_tiering_{of}_job_failures", {})
        return int(sum(told.values()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.manager.shutdown()
