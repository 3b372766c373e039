"""Copies between an engine's pages and blocks whose bytes differ: in another packing, or in a lossy form."""

from __future__ import annotations

import torch
from torch import Tensor

from kvtide.engines.paged import packing
from kvtide.engines.paged.pages import Pages

__all__ = ["converted", "decode_pages", "encode_pages"]


def converted(pages: Pages, raw: torch.Tensor) -> torch.Tensor:
    """This process's heads of the block in ``raw`` bytes, converted to the engine's packing: ``[section, head, page,
    token, dim]``."""
    group, share = pages.group, pages.share
    size, dim = group.head_bytes(pages.layout.block_tokens), group.head_dim
    words = raw.view(pages.sections[0].dtype)
    atoms = words.as_strided(
        (len(pages.sections), pages.heads, pages.layout.block_tokens // group.page, group.page, dim),
        (pages.geometry.stride // pages.itemsize, size // pages.itemsize, group.page * dim, dim, 1),
        share.start * size // pages.itemsize,
    )
    found = torch.empty(len(atoms), pages.heads, pages.each, pages.tokens, dim, dtype=words.dtype, device=raw.device)
    for value in range(group.parts):
        plain = packing.unpack(atoms[value :: group.parts], group.packing, bool(value))
        mine = plain.reshape(-1, pages.heads, pages.each, pages.tokens, dim)
        found[value :: group.parts] = packing.pack(mine, pages.packing, bool(value))
    return found


def encode_pages(pages: Pages, numbers: Tensor, layers: range, heads: Tensor) -> None:
    """Encode all pages of a block, given by their numbers in the engine, into its heads ``[layer, head, byte]``."""
    assert pages.form is not None
    keys, values = (
        torch.stack([pages.sections[2 * layer + part].index_select(0, numbers) for layer in layers])
        .view(getattr(torch, pages.group.dtype))
        .transpose(1, 2)
        .flatten(2, 3)
        for part in range(2)
    )
    pages.form.encode(keys, values, heads)


def decode_pages(heads: Tensor, pages: Pages, numbers: Tensor, layers: range, at: int) -> None:
    """Decode heads ``[layer, head, byte]``, from page ``at`` of their block on, into an engine's pages."""
    assert pages.form is not None
    shape, dtype = (len(layers), pages.heads, len(numbers) * pages.tokens, pages.group.head_dim), pages.group.dtype
    keys, values = (torch.empty(shape, dtype=getattr(torch, dtype), device=heads.device) for _ in range(2))
    pages.form.decode(heads, keys, values, at * pages.tokens)
    for part, vectors in enumerate((keys, values)):
        atoms = vectors.view(pages.sections[0].dtype).unflatten(2, (len(numbers), pages.tokens)).transpose(1, 2)
        for layer, atom in zip(layers, atoms, strict=True):
            pages.sections[2 * layer + part].index_copy_(0, numbers, atom)
