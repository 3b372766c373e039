"""Publishes the blocks that kvtide holds as vLLM KV events, for subscribers of vLLM's publisher such as a router.

The node reports blocks by kvtide's names. vLLM's events identify pages by vLLM's hashes, with their tokens. So when a
request of this engine names a block, its description in vLLM's terms is recorded; blocks that no request here ever
named are not published. A block that was stored before is published when it is loaded.

Nothing is published that cannot be withdrawn. A block is published as removed when the node reports that, when its
record is evicted here, and when the node was disconnected or its events were lost, so that its contents are unknown; it
is published again when it is next stored or loaded.

For each block its current places and its published places are kept. So changes between two steps of the engine, or
while it is idle, cost no memory, and those that cancel out are not published.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_kv_cache_block_sizes,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvtide import events
from kvtide.engines.vllm.layout import Layouts
from kvtide.index.keys import Chain

__all__ = ["EventPublisher"]

_KNOWN = 32768
"""Blocks that are remembered, some 2 KiB each."""

Place = tuple[int, str]
"""The number of a vLLM cache group, and a medium."""


@dataclass(slots=True)
class _Block:
    """A block in vLLM's terms."""

    hashes: Sequence[bytes]
    parent: bytes | None
    tokens: bytes
    lora: Any
    extras: Mapping[int, list[Any] | None]
    """By tokens per page: for each page what vLLM mixes into its hash besides the tokens."""
    now: set[Place] = field(default_factory=set)
    published: set[Place] = field(default_factory=set)


class EventPublisher:
    """Called by vLLM's scheduler thread, the node's event thread, and the connector's node thread."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, found: Layouts, most: int = _KNOWN) -> None:
        self._most = most
        self._hashed = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1]
        """Tokens between two of vLLM's hashes."""
        self._specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._pages = found.pages
        groups = [found.own.group(name) for name in found.groups]
        self._numbers = {group.suffix: i for i, group in enumerate(groups)}
        self._whole = [i for i, group in enumerate(groups) if not group.window]
        self._known: OrderedDict[bytes, _Block] = OrderedDict()
        """By kvtide's name of the block."""
        self._changed: dict[bytes, _Block] = {}
        """Blocks whose places may differ from the published ones."""
        self._lock = threading.Lock()

    def named(self, request: Any, chain: Chain, first: int) -> None:
        """Record the blocks of a request that were named, from number ``first`` on."""
        tokens, hashes = chain.block_tokens, request.block_hashes
        each = tokens // self._hashed
        with self._lock:
            for i in range(first, min(chain.blocks, len(hashes) // each)):
                name = chain.digests[i]
                if name not in self._known:
                    parent = hashes[i * each - 1] if i else None
                    extras = {page: _extras(request, i * tokens, tokens, page) for page in self._pages}
                    mine = hashes[i * each : (i + 1) * each]
                    block = _Block(mine, parent, chain.tokens_of(i), request.lora_request, extras)
                    # reuse a record whose removal is not published yet
                    self._known[name] = self._changed.get(name, block)
                self._known.move_to_end(name)
            while len(self._known) > self._most:
                self._forget(*self._known.popitem(last=False))

    def held(self, names: Iterable[bytes]) -> None:
        """These blocks are in DRAM. For groups with a window it is not known which of them are."""
        with self._lock:
            for name in names:
                for group in self._whole:
                    self._move(name, (group, MEDIUM_CPU), here=True)

    def happened(self, event: events.Event) -> None:
        """Handle an event of the node."""
        with self._lock:
            if isinstance(event, events.EventsLost):
                for name, block in self._known.items():
                    self._forget(name, block)
                return
            medium = MEDIUM_CPU if event.tier == "dram" else MEDIUM_STORAGE
            for key in event.keys:
                if (group := self._numbers.get(key[32:])) is not None:
                    self._move(key[:32], (group, medium), here=isinstance(event, events.BlockStored))

    def forget(self) -> None:
        """Forget all blocks: this engine can no longer use them."""
        with self._lock:
            while self._known:
                self._forget(*self._known.popitem())

    def _move(self, name: bytes, place: Place, *, here: bool) -> None:
        if (block := self._known.get(name)) is not None:
            (block.now.add if here else block.now.discard)(place)
            self._changed[name] = block

    def _forget(self, name: bytes, block: _Block) -> None:
        block.now.clear()
        if block.published:
            self._changed[name] = block
        else:
            self._changed.pop(name, None)

    def take(self) -> list[KVCacheEvent]:
        """The events for all changes since the last call."""
        if not self._changed:
            return []
        found: list[KVCacheEvent] = []
        with self._lock:
            changed, self._changed = self._changed, {}
            for block in changed.values():
                found += self._differences(block)
                block.published = set(block.now)
        return found

    def _differences(self, block: _Block) -> Iterator[KVCacheEvent]:
        for group, medium in sorted(block.now ^ block.published):
            page, spec = self._pages[group], self._specs[group]
            n = page // self._hashed
            hashes = [maybe_convert_block_hash(h) for h in block.hashes[n - 1 :: n]]
            about = {"medium": medium, "group_idx": group, "locality": "LOCAL", "ownership": "kvtide"}
            if (group, medium) in block.published:
                yield BlockRemoved(block_hashes=hashes, **about)
                continue
            yield BlockStored(
                block_hashes=hashes,
                parent_block_hash=maybe_convert_block_hash(block.parent) if block.parent is not None else None,
                token_ids=memoryview(block.tokens).cast("I").tolist(),
                block_size=page,
                lora_id=block.lora.adapter_id if block.lora is not None else None,
                lora_name=block.lora.name if block.lora is not None else None,
                extra_keys=to_event_extra_keys(block.extras[page]),
                kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
                kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(spec),
                **about,
            )


def _extras(request: Any, start: int, tokens: int, page: int) -> list[Any] | None:
    if request.lora_request is None and not request.mm_features and not request.cache_salt:
        return None
    pages = range(start, start + tokens, page)
    return [generate_block_hash_extra_keys(request, at, at + page, 0)[0] for at in pages]
