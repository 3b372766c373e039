"""Copies between the ``DynamicCache`` of transformers and the blocks of a store.

A cache has, for each layer, keys and values [row, head, token, dim]. One row, from its first real token on, is viewed
as a sequence of pages without a copy; the mover copies these.

Layers with a window (Mistral, Gemma) need only their last tokens, but a prefix of any length shall be reusable. So all
layers keep all tokens here; the mask hides what is outside the window, as it does in a prefill.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from copy import copy
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvtide.block import Layout, Span
from kvtide.engines.identity import settings
from kvtide.engines.paged.mover import Move, Mover
from kvtide.engines.paged.pages import Copy, Pages
from kvtide.errors import LayoutError
from kvtide.index.keys import EXACT, Chain
from kvtide.store.match import Loaded
from kvtide.store.session import Session

__all__ = ["KvMemory", "fill", "layout_of", "sections_of", "store_row"]

_PAGE = 16
_FICKLE = {"dynamic", "longrope"}
"""Kinds of RoPE where the keys of a prompt's first tokens depend on the prompt's length."""


def layout_of(model: PreTrainedModel, block_tokens: int, fidelity: str = EXACT) -> Layout:
    """The block layout of a model's KV, from what the model actually caches for a token, and the fidelity.

    Raises LayoutError if later tokens need more than this KV, or if it can change after it was computed.
    """
    _check(model)
    cache = DynamicCache()
    with torch.no_grad():
        model(torch.zeros((1, 1), dtype=torch.long, device=model.device), past_key_values=cache, use_cache=True)
    kept = {(t.shape[1], t.shape[3], t.dtype, t.device) for t in sections_of(cache)}
    if len(kept) != 1:
        raise LayoutError(f"{type(model).__name__} keeps tensors of {len(kept)} kinds, which must be one: {kept}")
    ((heads, head_dim, dtype, _),) = kept
    return Layout.attention(
        layers=len(cache.layers),
        heads=heads,
        head_dim=head_dim,
        dtype=str(dtype).removeprefix("torch."),
        block_tokens=block_tokens,
        page=_PAGE,
        packing="plain" if fidelity == EXACT else fidelity,
    )


def _check(model: PreTrainedModel) -> None:
    name, config = type(model).__name__, model.config
    if config.is_encoder_decoder:
        raise LayoutError(f"{name} has an encoder: what its decoder keeps does not follow from the decoder's tokens")
    for number, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise LayoutError(f"layer {number} of {name} is a {layer}: it does not keep keys and values of every token")
    if fickle := _FICKLE & set(_rope_types(settings(config))):
        raise LayoutError(f"{name} has RoPE of type {fickle.pop()!r}: its keys change when the prompt grows")


def _rope_types(settings: Any) -> list[str]:
    if not isinstance(settings, dict):
        return []
    here = [value for name, value in settings.items() if name in ("rope_type", "type") and isinstance(value, str)]
    return here + [kind for value in settings.values() for kind in _rope_types(value)]


def sections_of(cache: DynamicCache) -> list[torch.Tensor]:
    """Keys and values of each layer."""
    layers: list[Any] = cache.layers
    return [tensor for layer in layers for tensor in (layer.keys, layer.values)]


def _pages(tokens: torch.Tensor, page: int) -> torch.Tensor:
    """Tokens ``[..., head, token, dim]`` as pages ``[..., page, head, token, dim]``."""
    pages: torch.Tensor = tokens.unflatten(-2, (-1, page))
    return pages.transpose(-4, -3)


def _copies(layout: Layout, numbered: Sequence[tuple[int, Span]], count: int) -> list[Copy]:
    """Which of ``count`` pages belong to each of these blocks of a prompt."""
    each = layout.block_tokens // layout.groups[0].page
    return [Copy(view, range(number * each, min((number + 1) * each, count))) for number, view in numbered]


def fill(
    mover: Mover, layout: Layout, device: torch.device, found: Sequence[Loaded], pads: Sequence[int], border: int
) -> tuple[DynamicCache, ExitStack]:
    """A cache with the first ``border`` tokens of every row: its padding, and the tokens of its blocks after that.

    Later operations on the caller's stream see them. When the stack has been closed, the copies have ended and the
    blocks are not used any more.
    """
    (group,) = layout.groups
    room = border + group.page - 1  # a row's last page may have tokens beyond the border
    shape = (2 * group.layers, len(found), group.heads, room, group.head_dim)
    memory = torch.empty(shape, dtype=getattr(torch, group.dtype), device=device)
    with ExitStack() as stack:  # wait for all copies even if one fails: source and target must stay until then
        moves = []
        for row, (loaded, pad) in enumerate(zip(found, pads, strict=True)):
            memory[:, row, :, : min(pad, border)] = 0
            if border > pad:
                count = -(-(border - pad) // group.page)
                wanted = list(enumerate(loaded.blocks))[: -(-(border - pad) // layout.block_tokens)]
                copies = _copies(layout, wanted, count)
                rows = _pages(memory[:, row, :, pad : pad + count * group.page], group.page)
                moves.append(mover.load(Pages(layout, group.name, rows.unbind()), copies))
                stack.callback(moves[-1].wait)
        cache = _cache(memory, border)
        for move in moves:
            move.join()
        return cache, stack.pop_all()


def _cache(memory: torch.Tensor, tokens: int) -> DynamicCache:
    """A cache with the first tokens of ``memory``, [section, row, head, token, dim]."""
    cache, first = DynamicCache(), DynamicLayer()
    first.lazy_initialization(memory, memory)  # once, because it allocates tensors
    sections = memory[:, :, :, :tokens].unbind()
    for keys, values in zip(sections[0::2], sections[1::2], strict=True):
        layer = copy(first)
        layer.keys, layer.values = keys, values
        cache.layers.append(layer)
    return cache


class _Growing(DynamicLayer):
    """A layer that writes new tokens into preallocated memory, where other layers would copy all tokens."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lazy_initialization(keys, values)
        self._room = keys, values
        self.grow(0)

    def grow(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Set the number of valid tokens, and return their keys and values."""
        keys, values = (room[:, :, :tokens] for room in self._room)
        self.keys, self.values = keys, values
        return keys, values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.get_seq_length()
        stop = start + key_states.shape[-2]
        for room, states in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, start:stop] = states
        return self.grow(stop)


class KvMemory:
    """Memory for the KV of a prompt's first ``blocks``, to be computed or loaded in any order, each block at its place.

    Nothing is moved when it is complete.
    """

    def __init__(self, layout: Layout, device: torch.device, blocks: int) -> None:
        (group,) = layout.groups
        self._layout = layout
        self._count = blocks * (layout.block_tokens // group.page)
        shape = (2 * group.layers, 1, group.heads, blocks * layout.block_tokens, group.head_dim)
        self.tensor = torch.empty(shape, dtype=getattr(torch, group.dtype), device=device)
        self.device = self.tensor.device

    def load(self, mover: Mover, numbered: Iterable[tuple[int, Span]]) -> Move:
        """Copy blocks to their places. The caller must hold their lease until the move is done."""
        (group,) = self._layout.groups
        pages = Pages(self._layout, group.name, _pages(self.tensor[:, 0], group.page).unbind())
        return mover.load(pages, _copies(self._layout, list(numbered), self._count))

    def growing(self) -> DynamicCache:
        """An empty cache for the model to compute into."""
        cache, sections = DynamicCache(), self.tensor.unbind()
        cache.layers.extend(_Growing(k, v) for k, v in zip(sections[0::2], sections[1::2], strict=True))
        return cache

    @staticmethod
    def grow(cache: DynamicCache, tokens: int) -> None:
        """Set the number of valid tokens of a growing ``cache``, although the model has not computed all of them."""
        for layer in cache.layers:
            assert isinstance(layer, _Growing)
            layer.grow(tokens)

    def cache(self, tokens: int) -> DynamicCache:
        """An ordinary cache with the first tokens."""
        return _cache(self.tensor, tokens)


def store_row(
    mover: Mover, session: Session, chain: Chain, sections: Sequence[torch.Tensor], row: int, pad: int
) -> tuple[int, int]:
    """Store the new blocks of one row. Returns how many were stored, and for how many there was no space."""
    if not chain.blocks:
        return 0, 0
    layout = session.layout
    (group,) = layout.groups
    count = chain.blocks * (layout.block_tokens // group.page)
    stop = pad + count * group.page
    pages = Pages(layout, group.name, [_pages(s[row, :, pad:stop], group.page) for s in sections])
    # In parts for which the store can make space, like ``Session.store``.
    step = max(1, session.backend.largest // layout.geometry[group.name].footprint)
    stored = refused = 0
    for start in range(0, chain.blocks, step):
        with session.reserve(chain, start=start, stop=min(start + step, chain.blocks)) as room:
            copies = _copies(layout, list(zip(room.depths, room.views, strict=True)), count)
            mover.store(pages, copies).wait()
            stored, refused = stored + len(room.keys), refused + room.refused
            room.seal()
    return stored, refused
