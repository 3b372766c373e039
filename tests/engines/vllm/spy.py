"""A connector that stores nothing and loads nothing: it writes the first block of each new request to a file.

With it a test sees a real engine's pages as kvtide sees them: the scheduler's half says what it takes the layout for,
and each worker's half copies the heads that it is to write.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from kvtide.engines.paged import Copy, HostMover
from kvtide.engines.vllm.layout import layouts, pages

__all__ = ["Spy"]


@dataclass
class Seen(KVConnectorMetadata):  # type: ignore[misc]
    """The pages of the first block of a new request."""

    first: list[int]


class Spy(KVConnectorBase_V1):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = vllm_config
        self._folder = Path(vllm_config.kv_transfer_config.kv_connector_extra_config["folder"])
        self._found = layouts(vllm_config, kv_cache_config)
        (self._folder / role.name.lower()).write_text(repr(self._found.own))

    # -- scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> Seen:
        each = self._found.own.block_tokens // self._found.pages[0]
        new = [request.block_ids[0][:each] for request in scheduler_output.scheduled_new_reqs]
        return Seen(new[0] if new and len(new[0]) == each else [])

    # -- worker

    def register_kv_caches(self, kv_caches: Any) -> None:
        self._rank = get_tensor_model_parallel_rank()
        self._pages = pages(self._found, self._config, kv_caches, self._rank)

    def wait_for_save(self) -> None:
        (mine,) = self._pages.values()
        first = self._get_connector_metadata().first
        if first and mine.share.rank == self._rank:
            block = bytearray(mine.geometry.footprint)
            HostMover().store(mine, [Copy(memoryview(block), first)])
            whole = self._folder / f"{self._rank}.part"
            whole.write_bytes(block)
            whole.rename(self._folder / f"{self._rank}.block")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass
