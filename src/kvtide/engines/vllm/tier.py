"""A kvtide store as a secondary tier of vLLM's ``OffloadingConnector``: bounded, verified storage under its CPU tier.

::

    "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 34359738368,
        "secondary_tiers": [{"type": "KvtideTier", "module_path": "kvtide.engines.vllm.tier",
                             "nvme": {"path": "/nvme/kv", "budget": "500GiB"}}]
    }

vLLM copies chunks of KV between the GPU and a region of host memory, and offers each to its secondary tiers. It calls
all methods here in its scheduler, between two steps of the model, so none of them waits: one thread makes lookups, a
second loads and a third stores; the results are returned when vLLM polls for them.

*No delays.* A lookup that a hung node has not answered after ``_PATIENCE`` is a miss, so is a late load, and a store
fails when too many wait. Without a node everything is a miss at once, until there is one again.

*No wrong bytes.* vLLM's hash covers tokens, salts and the names of adapters, but neither the weights nor the layout of
their KV in a row. So the namespace includes everything that vLLM tells a tier about these, vLLM's version, and the
identity of the weights.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import vllm
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvtide import canonical, connect
from kvtide import config as configuration
from kvtide.config import Config
from kvtide.engines.bounded_executor import BoundedExecutor
from kvtide.engines.chunks import Chunks, Row, model_of
from kvtide.errors import ConfigError, KvtideError
from kvtide.index.weights_identity import identify
from kvtide.node.client.client import Client
from kvtide.node.client.launch import open_node

__all__ = ["KvtideTier"]

log = logging.getLogger("kvtide.vllm")

_PATIENCE = 0.5
"""Seconds that a request waits for a lookup."""
_DEADLINE = 5.0
"""Seconds that a load may take, from vLLM's request on, unless ``plan.deadline_seconds`` is set."""
_OPENING = 30.0
"""Seconds that the start waits for the node; also the interval between attempts to reach it."""
_CLOSING = 5.0
"""Seconds that shutdown waits for an attempt to reach the node."""
_WAITING = 256
"""Maximum loads, and stores, that may wait. They keep rows of vLLM's region occupied."""

_Move = Callable[[Chunks, Sequence[bytes], Sequence[Row]], list[bool]]


class KvtideTier(SecondaryTierManager):  # type: ignore[misc]
    """The tier as vLLM calls it, always in its scheduler's thread."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        *,
        locality: str | None = None,
        **sections: object,
    ) -> None:
        """``sections``: settings of kvtide that override its file and the environment."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        self._store = _Store(configuration.read(overrides=sections), offloading_spec.config, self.block_size_bytes)
        self._rows: Row = np.asarray(primary_kv_view).view(np.uint8)
        self._finished: queue.SimpleQueue[JobResult] = queue.SimpleQueue()
        self._loading: dict[int, Sequence[OffloadKey]] = {}
        """The keys of loads under way, by job number."""
        self._loader = BoundedExecutor("kvtide-vllm-load", _WAITING)
        self._storer = BoundedExecutor("kvtide-vllm-store", _WAITING)
        self._lookup_manager = _Lookups(self._store, tier_type)

    # -- lookups ------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = self._lookup_manager.lookup(key, req_context)
        if found is None and not self._lookup_manager.hangs:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookup_manager.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookup_manager.cleanup(req_context.req_id)

    # -- transfers ----------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(self._storer, job_metadata, Chunks.store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._loading[job_metadata.job_id] = list(job_metadata.keys)
        self._submit(self._loader, job_metadata, partial(Chunks.load, since=job_metadata.submit_time))

    def _submit(self, thread: BoundedExecutor, job: TransferJob, move: _Move) -> None:
        if thread.put(partial(self._run, job, move)) is None:
            self._tell(job, [], 0.0)

    def _run(self, job: TransferJob, move: _Move) -> None:
        """Runs in the background. vLLM always gets a result: otherwise it could not reuse the rows."""
        began, moved = time.monotonic(), list[bool]()
        try:
            if (chunks := self._store.chunks) is not None:
                moved = move(chunks, list(job.keys), [self._rows[i] for i in job.chunk_ids])
        except KvtideError as e:
            log.warning("%d chunks could not be moved: %s", len(job.keys), e)
        finally:
            self._tell(job, moved, time.monotonic() - began)

    def _tell(self, job: TransferJob, moved: Sequence[bool], seconds: float) -> None:
        came = [key for key, whole in zip(job.keys, moved, strict=False) if whole]
        nbytes = len(came) * self.block_size_bytes
        self._finished.put(JobResult(job.job_id, len(came) == len(job.keys), tuple(came) or None, seconds, nbytes))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        while not self._finished.empty():
            result = self._finished.get()
            keys = self._loading.pop(result.job_id, ())
            # Otherwise the same request would find them, and fail to load them, for ever.
            self._lookup_manager.mark_miss(set(keys).difference(result.successful_keys or ()))
            results.append(result)
        return results

    def drain_jobs(self) -> None:
        self._loader.flush()
        self._storer.flush()

    def shutdown(self) -> None:
        """Fail waiting jobs, finish those under way, and release vLLM's memory. The node and its blocks remain."""
        self._store.leave()
        self._loader.close()
        self._storer.close()
        self._lookup_manager.shutdown()
        self._store.close()
        self._rows = self._rows[:0].copy()


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """Looks up the keys of each step on its own thread, and remembers the results for vLLM's requests."""

    def __init__(self, store: _Store, tier_type: str) -> None:
        self._store = store
        self._asked: float | None = None
        super().__init__(tier_type)

    @property
    def hangs(self) -> bool:
        """Whether a lookup has been overdue for longer than ``_PATIENCE``."""
        return (asked := self._asked) is not None and time.monotonic() - asked > _PATIENCE

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        if (chunks := self._store.chunks) is None:
            return [False] * len(keys)
        self._asked = time.monotonic()
        try:
            return chunks.find(keys)
        finally:
            self._asked = None


class _Store:
    """Access to the store, as soon as it can be reached."""

    def __init__(self, config: Config, deployment: OffloadingConfig, row: int) -> None:
        if not config.engine.weights_id and not Path(deployment.model.name).exists():
            raise ConfigError(
                f"vLLM does not say which weights {deployment.model.name!r} are: name them and their revision, "
                'for example with "engine": {"weights_id": "llama-8b@2026-05"} beside "type" in secondary_tiers'
            )
        self._config = config
        self._session_host: Client | None = None
        self._chunks: Chunks | None = None
        self._tried = threading.Event()
        self._leaving = threading.Event()
        opening = partial(self._open, deployment, row)
        self._opener = threading.Thread(target=opening, name="kvtide-vllm-open", daemon=True)
        self._opener.start()
        self._tried.wait(_OPENING)

    @property
    def chunks(self) -> Chunks | None:
        """The chunks of the store. None while it cannot be reached, and after ``leave``."""
        return None if self._leaving.is_set() else self._chunks

    def _open(self, deployment: OffloadingConfig, row: int) -> None:
        """Reach the node, or try again later: vLLM must start even without a node."""
        engine = self._config.engine
        while self._chunks is None and not self._leaving.is_set():
            try:
                # For a folder, all files are read the first time.
                weights = identify(deployment.model.name, engine.weights_id or None, self._config.naming.weights_cache)
                self._session_host = self._session_host or (
                    connect(engine.address) if engine.address else open_node(self._config)
                )
                session = self._session_host.session(model_of(row, weights, _facts(deployment)))
                self._chunks = Chunks(session, self._session_host.deadline or _DEADLINE)
            except (KvtideError, OSError) as e:
                log.warning("KV is neither stored nor found: %s. Trying again in %.0f seconds", e, _OPENING)
            self._tried.set()
            if self._chunks is None:
                self._leaving.wait(_OPENING)
        if self._leaving.is_set():
            self._hang_up()

    def leave(self) -> None:
        """Make everything a miss from now on."""
        self._leaving.set()

    def close(self) -> None:
        """Disconnect from the node, after the last use of ``chunks``."""
        self._opener.join(_CLOSING)
        self._hang_up()

    def _hang_up(self) -> None:
        if self._session_host is not None:
            self._session_host.close()


def _facts(config: OffloadingConfig) -> dict[str, canonical.Value]:
    """Everything that vLLM tells a tier about the bytes of a row."""
    p = config.parallel
    portable = p.is_parallelism_agnostic or config.replicated_layout
    return {
        "vllm": vllm.__version__,
        "model": config.model.name,
        "dtype": config.model.dtype,
        "groups": [[g.group_id, g.tokens_per_block, list(g.layer_names)] for g in config.groups],
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "layout": config.kv_cache_layout,
        "canonical": config.canonical_layout,
        "replicated": config.replicated_layout,
        "ranks": None
        if portable
        else [config.worker_kv_bytes_per_block, p.world_size, p.tp_size, p.pp_size, p.pcp_size, p.dcp_size],
    }
