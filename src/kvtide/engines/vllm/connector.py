"""``KvtideConnector``: implements vLLM's connector interface with the connector scheduler and worker.

vLLM creates one of these in its scheduler and one in each worker. Nothing is decided here: calls of vLLM are passed to
the connector scheduler or worker (``engines/connector``), and their results returned. An error inside is logged and
becomes a miss. A deployment whose KV cannot be handled correctly (``layout``) is served without kvtide; one line of the
log says so, and what to change.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from blake3 import blake3
from msgspec import structs
from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import kvtide
from kvtide import config as configuration
from kvtide.block import Layout
from kvtide.engines.connector.orders import Orders
from kvtide.engines.connector.request import PageGeometry, Prompt, Work
from kvtide.engines.connector.request_options import NOTHING, read_options
from kvtide.engines.connector.scheduler import Scheduler
from kvtide.engines.connector.sessions import SessionPool
from kvtide.engines.connector.worker import ConnectorWorker
from kvtide.engines.paged.choose_mover import mover
from kvtide.engines.paged.pages import Pages
from kvtide.engines.vllm.events import EventPublisher
from kvtide.engines.vllm.identity import identity
from kvtide.engines.vllm.layout import Layouts, layouts, pages
from kvtide.engines.vllm.metrics import KvtidePromMetrics, KvtideStats
from kvtide.errors import ConfigError, KvtideError, LayoutError
from kvtide.index.keys import DEFAULT_TENANT, Extra, Model, Tenant
from kvtide.index.weights_identity import identify
from kvtide.node.client.client import Client
from kvtide.node.client.launch import open_node

__all__ = ["KvtideConnector", "KvtideMetadata"]

log = logging.getLogger("kvtide.vllm")
logging.getLogger("kvtide").parent = logging.getLogger("vllm")  # write to vLLM's log, as vLLM configures it

_FREE = 10
"""At least one in this many of vLLM's pages must be free for finished requests to keep theirs."""

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass
class KvtideMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The orders of a step, sent from vLLM's scheduler to its workers."""

    orders: Orders


@dataclass
class KvtideReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What workers have done or cannot do, sent to vLLM's scheduler."""

    off: bool
    """Whether a worker cannot do anything."""
    lost: set[str]
    """Tickets of stores that some worker does not fill."""
    computed: int = 0
    """The number of the computed step, if it has one."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KvtideReport:
        return KvtideReport(self.off or other.off, self.lost | other.lost, max(self.computed, other.computed))


def _safely(otherwise: Any) -> Callable[[Method], Method]:
    """Decorate a method to return ``otherwise`` if it fails: an error here must not stop the engine."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def safe(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except Exception:
                log.exception("kvtide: %s failed; vLLM goes on without it", method.__name__)
                return otherwise

        return cast(Method, safe)

    return decorate


class KvtideConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See ``--kv-transfer-config`` in docs/vllm.md."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: Scheduler | None = None
        self._worker: ConnectorWorker | None = None
        self._publisher: EventPublisher | None = None
        self._layouts: Layouts | None = None
        self._requests: dict[str, Any] = {}
        self._kept: set[str] = set()
        """Requests whose pages vLLM keeps for this connector, although it is off."""
        self._refused: dict[str, str] = {}
        self._adapters: dict[tuple[int, str], str] = {}
        transfer = vllm_config.kv_transfer_config
        self._config = configuration.read(overrides=transfer.kv_connector_extra_config)
        if transfer.kv_load_failure_policy != "recompute":
            log.info("kvtide: kv_load_failure_policy is set to recompute: what cannot be loaded is computed")
            transfer.kv_load_failure_policy = "recompute"
        try:
            self._layouts = layouts(vllm_config, kv_cache_config)
            if role is KVConnectorRole.SCHEDULER:
                self._scheduler = self._decide(vllm_config, self._layouts)
        except KvtideError as e:
            self._layouts = None
            log.warning("kvtide is off for this model: %s", e)
        except Exception:
            self._layouts = None
            log.exception("kvtide is off: an unexpected error with this version of vLLM")

    def _dial(self) -> Client:
        address = self._config.engine.address
        return kvtide.connect(address) if address else open_node(self._config)

    def _follow(self) -> Client:
        client = self._dial()
        if self._publisher is not None:
            client.follow(self._publisher.happened)
        return client

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a dropped store is only a later miss

    # -- the scheduler ------------------------------------------------------------------------------------

    def _decide(self, vllm_config: VllmConfig, found: Layouts) -> Scheduler:
        who = identity(vllm_config, found, self._config.engine.weights_id or None, self._config.naming.weights_cache)
        models = [Model(layout, *who) for layout in (found.own, *found.others)]
        ranks = vllm_config.parallel_config.tensor_parallel_size
        tensors = self._kv_cache_config.kv_cache_tensors  # groups share memory: each tensor's size is the whole size
        pool = ranks * max((tensor.size for tensor in tensors), default=0)
        published = vllm_config.kv_events_config
        if published is not None and published.enable_kv_cache_events:
            self._publisher = EventPublisher(vllm_config, self._kv_cache_config, found)
        return Scheduler(
            SessionPool(self._follow, models, ranks),
            PageGeometry(found.groups, found.pages, found.own.block_tokens, [g.window for g in found.own.groups]),
            pool={"through": 0, "auto": pool, "second-touch": math.inf}[self._config.engine.store],
            pages=self._kv_cache_config.num_blocks,
            prefix_cache=bool(vllm_config.cache_config.enable_prefix_caching),
        )

    @_safely(None)
    def on_new_request(self, request: Any) -> None:
        if self._scheduler is None:
            return
        self._requests[request.request_id] = request
        try:
            options = read_options(request.kv_transfer_params)
            tenant = self._tenant(request.cache_salt, options.tenant)
            if request.prompt_embeds is not None:
                raise ConfigError("a prompt of embeddings has no token ids to name its blocks by")
            if request.resumable:
                raise ConfigError("a prompt that grows while it is computed is not supported yet")
            if request.skip_reading_prefix_cache:
                options = structs.replace(options, no_load=True)
        except ConfigError as e:
            options, tenant = NOTHING, DEFAULT_TENANT
            self._refused[request.request_id] = str(e)
            log.warning("kvtide neither loads nor stores for request %s: %s", request.request_id, e)
        tokens = request.all_token_ids
        extras = functools.partial(self._extras, request)
        named = functools.partial(self._publisher.named, request) if self._publisher is not None else None
        slow = request.lora_request is not None  # its adapter may have to be read
        self._scheduler.arrived(Prompt(request.request_id, tokens, extras, tenant, options, named, slow))

    def _extras(self, request: Any) -> list[Extra]:
        """What the KV of a request depends on besides its tokens."""
        found = []
        if (lora := request.lora_request) is not None:
            about = (Path(lora.lora_path) / "adapter_config.json").read_bytes()
            weights = identify(lora.lora_path, cache=self._config.naming.weights_cache)
            name = f"{weights} {blake3(about).hexdigest()}"
            if self._adapters.setdefault((lora.lora_int_id, lora.lora_path), name) != name:
                # vLLM may have the old or the new adapter in memory: the identity of this KV is unknown.
                raise LayoutError(f"the adapter in {lora.lora_path} was changed while the engine runs; restart it")
            found.append(Extra("lora", name))
        for feature in request.mm_features:
            place = feature.mm_position
            found.append(Extra("mm", feature.identifier, place.offset, place.offset + place.length))
        return found

    def _tenant(self, salt: str | None, name: str) -> Tenant:
        if name and not (self._config.engine.trust_tenants and salt):
            raise ConfigError(
                f"tenant {name!r} is refused: set engine.trust_tenants, and let the front end set a cache_salt"
            )
        if not salt:
            return DEFAULT_TENANT
        return Tenant(name, blake3(f"{len(name)} {name}{salt}".encode(), derive_key_context="kvtide 1 salt").digest())

    @_safely((0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        count = self._scheduler.matched(request.request_id, num_computed_tokens)
        return count, bool(count)

    @_safely(None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            held = self._scheduler.bind(request.request_id, _there(blocks.get_block_ids()), num_external_tokens)
            if self._publisher is not None:
                self._publisher.held(held)

    @_safely(KvtideMetadata(Orders()))
    def build_connector_meta(self, scheduler_output: Any) -> KvtideMetadata:
        if self._scheduler is None:
            kept, self._kept = self._kept, set()
            return KvtideMetadata(Orders(closing=kept))
        for request in scheduler_output.preempted_req_ids or ():
            self._scheduler.left(request)
        state, scheduled = scheduler_output.kv_connector_block_state, scheduler_output.num_scheduled_tokens
        cached = scheduler_output.scheduled_cached_reqs
        computed = [(new.req_id, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs]
        computed += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        work = []
        prompts = []
        quiet = self._scheduler.quiet
        for id_, done in computed:
            count = scheduled[id_]
            if count == 1 and done + 1 < quiet.get(id_, 0):
                continue
            if (request := self._requests.get(id_)) is not None:
                work.append(Work(id_, min(done + count, request.num_tokens), functools.partial(_resolve, state, id_)))
                if done < request.num_prompt_tokens:
                    prompts.append((done, done + count))
        return KvtideMetadata(self._scheduler.step(work, prompts))

    @_safely(None)
    def update_connector_output(self, connector_output: Any) -> None:
        half, report = self._scheduler, connector_output.kv_connector_worker_meta
        if half is None:
            return
        half.loaded(connector_output.finished_recving or (), connector_output.failed_recving or ())
        half.sent(connector_output.finished_sending or ())
        if report is not None and report.off:
            log.warning("kvtide is off: a worker cannot do its part, and says why")
            self._scheduler, self._kept = None, half.kept
            if self._publisher is not None:
                self._publisher.forget()
            threading.Thread(target=half.close, daemon=True).start()  # closing may wait for the node
        elif report is not None:
            half.lost(report.lost)
            half.computed(report.computed)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        if self._scheduler is None or not num_external_tokens:
            return {}
        cold = self._scheduler.source(request.request_id).disk
        return {CacheHitSource.DISK if cold else CacheHitSource.HOST: num_external_tokens}

    @_safely((False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is None or self._requests.pop(request.request_id, None) is None:
            return False, None
        source, refused = self._scheduler.source(request.request_id), self._refused.pop(request.request_id, None)
        params = None
        if request.kv_transfer_params:
            told: dict[str, Any] = {"dram_tokens": source.dram, "disk_tokens": source.disk}
            if refused:
                told["refused"] = refused
            if (explanation := self._scheduler.explanation(request.request_id)) is not None:
                told["explanation"] = explanation
            params = {"kvtide": told}
        pages = _there(block_ids) if self._has_room() else ()
        return self._scheduler.finished(request.request_id, pages), params

    def _has_room(self) -> bool:
        """Whether vLLM can spare a few pages: else it would preempt a running request and compute all of it again. An
        engine inside its user's process makes no step after its last request, and would keep the pages until the next:
        it could not be put to sleep, and its cache could not be reset."""
        pool = getattr(getattr(self, "_kv_cache_manager", None), "block_pool", None)
        if pool is None or not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
            return False
        return bool(pool.get_num_free_blocks() * _FREE >= self._kv_cache_config.num_blocks)

    @_safely(False)
    def reset_cache(self) -> bool:
        """Called when the weights have changed. The new weights are unknown, so nothing is shared from then on."""
        if self._scheduler is not None:
            self._scheduler.forget()
        if self._publisher is not None:
            self._publisher.forget()
        return True

    @_safely(())
    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._publisher.take() if self._publisher is not None else ()

    # -- a worker -----------------------------------------------------------------------------------------

    @_safely(None)
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._layouts is None:
            return
        rank = get_tensor_model_parallel_rank()
        try:
            own = pages(self._layouts, self._vllm_config, kv_caches, rank)
        except KvtideError as e:
            log.warning("kvtide is off for this worker: %s", e)
            return
        device = next(iter(own.values())).device
        tokens = dict(zip(self._layouts.groups, self._layouts.pages, strict=True))
        moves = mover(device)
        try:
            for mine in own.values():
                moves.warm(mine)  # before vLLM captures its graphs, when nothing else may use the GPU
        except Exception:
            log.exception("kvtide: the first load and store will take longer")
        self._worker = ConnectorWorker(self._dial, rank, functools.partial(_seen, own), tokens, moves)

    @_safely(None)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, KvtideMetadata)
        if self._worker is not None:
            self._worker.begin(kv_connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass  # done in wait_for_save: no forward pass of this step uses a load that is under way

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass  # whole blocks of all layers are stored at the end of the step

    @_safely(None)
    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.finish()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._worker is None:
            orders = getattr(self._connector_metadata, "orders", Orders())
            # from a scheduler that does not know yet that this worker is off
            asked = {load.request for load in orders.loads}
            return KVConnectorTransferResults(orders.closing, asked, asked)
        done, failed, sent = self._worker.results()
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=done, failed_recving=failed)

    @_safely(None)
    def build_connector_worker_meta(self) -> KvtideReport | None:
        orders = getattr(self._connector_metadata, "orders", Orders())
        if self._worker is None:  # report only to a scheduler that gives orders; others know it already
            return KvtideReport(off=True, lost=set()) if orders.loads or orders.stores else None
        lost = self._worker.lost()
        return KvtideReport(off=False, lost=lost, computed=orders.number) if lost or orders.number else None

    # -- both ---------------------------------------------------------------------------------------------

    @_safely(None)
    def get_kv_connector_stats(self) -> KvtideStats | None:
        return KvtideStats.of(self._worker.take()) if self._worker is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvtideStats:
        return KvtideStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KvtidePromMetrics:
        return KvtidePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @_safely(None)
    def shutdown(self) -> None:
        for half in (self._worker, self._scheduler):
            if half is not None:
                half.close()
        self._worker = self._scheduler = None


def _there(numbers: Sequence[Sequence[int]]) -> list[list[int]]:
    """Replace vLLM's page 0, which stands for a freed page, by -1."""
    return [[n or -1 for n in group] for group in numbers]


def _resolve(state: Any, request: str) -> list[list[int]]:
    return _there(state.get_block_ids(request))


def _seen(own: Mapping[str, Pages], layout: Layout) -> dict[str, Pages]:
    """A worker's tensors as pages of another layout, if it differs from their own."""
    return {
        name: p if p.layout == layout else Pages(layout, name, p.tensors, p.share, p.packing) for name, p in own.items()
    }
