"""An engine's KV tensors as pages, and the copies between them and blocks.

Every engine keeps KV in pages of a few tokens, with its own order of axes. ``Pages`` views any of them, by strides and
without a copy, as one tensor ``[page, head, token, dim]`` for each section of a block (a layer's K, then its V). A
block has the canonical order ``[section][head][page][token][dim]``; so a page of one section is, for each head, one
*atom* of contiguous bytes in the block. A ``Mover`` copies pages into blocks and back.

Inside an atom the bytes may have an engine's own packing (see ``packing``). If reader and writer have the same packing,
atoms are copied unchanged; otherwise they are converted on load. A store never converts: it must not delay the engine.
The exception is a layout that asks for a lossy form (see ``lossy``): its blocks are encoded on the device that has the
pages.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvtide.block import DTYPES, Kind, Layout, Slice, Span
from kvtide.engines.paged import packing
from kvtide.engines.paged.lossy import FORMS
from kvtide.engines.paged.memory import memory
from kvtide.errors import LayoutError

__all__ = ["WORDS", "Copy", "Pages", "runs"]

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Copies move integers: so the bits stay the same even for NaNs."""


class Pages:
    """An engine's KV of one group. ``sections[2 * layer]`` is a layer's K and the next its V (MLA and states have only
    one), each a view ``[page, head, token, dim]`` of the engine's memory.

    ``share``: which of the model's heads this process holds (default: all). ``packing``: the engine's packing inside an
    atom (default: the layout's, or plain if that is a lossy form).
    """

    def __init__(
        self,
        layout: Layout,
        group: str,
        sections: Sequence[torch.Tensor],
        share: Slice | None = None,
        packing: str | None = None,
    ) -> None:
        self.layout = layout
        self.group = layout.group(group)
        self.geometry = layout.geometry[group]
        self.share = share or Slice(0, 0, self.group.heads)
        self.form = FORMS.get(self.group.packing)
        self.packing = packing or ("plain" if self.form else self.group.packing)
        self.itemsize = DTYPES[self.group.dtype]
        if len(sections) != (wanted := self.group.layers * self.group.parts):
            raise LayoutError(f"group {group!r} has {wanted} sections (for each layer K, then V), not {len(sections)}")
        first = sections[0]
        for s in sections:
            if s.dim() != 4 or (s.shape, s.stride(), s.device) != (first.shape, first.stride(), first.device):
                raise LayoutError(
                    f"all sections of group {group!r} must be [page, head, token, dim] with equal strides on one "
                    f"device: one is {tuple(s.shape)} {s.stride()}, the first {tuple(first.shape)} {first.stride()}"
                )
            if s.dtype != first.dtype or str(s.dtype) != f"torch.{self.group.dtype}":
                raise LayoutError(f"group {group!r} is of {self.group.dtype}, its tensors of {s.dtype}")
        self.count, heads, self.tokens, dim = first.shape
        whole = 1 if self.group.kind is Kind.STATE else layout.block_tokens
        if (heads, dim) != (self.share.stop - self.share.start, self.group.head_dim) or whole % self.tokens:
            raise LayoutError(
                f"pages of group {group!r} are [{heads} heads, {self.tokens} tokens, {dim}]; this process holds "
                f"{self.share.stop - self.share.start} heads of {self.group.head_dim}, and a block of {whole} tokens "
                "is made of whole pages"
            )
        packed = self.packing == self.group.packing != "plain" and not self.form
        if packed and self.tokens != self.group.page:
            raise LayoutError(
                f"a page of {self.tokens} tokens in packing {self.packing!r} is not made of pages of "
                f"{self.group.page}, as the layout of group {group!r} has them: give the layout the engine's page"
            )
        self.heads = heads
        self.each = whole // self.tokens
        """Pages per block."""
        self.atom = self.tokens * dim * self.itemsize
        """Bytes of one head of a page."""
        self.tensors = sections
        self.sections = [s.view(WORDS[self.itemsize]) for s in sections]
        self.device = first.device

    @classmethod
    def of(
        cls,
        layout: Layout,
        group: str,
        tensors: Sequence[torch.Tensor],
        axes: str,
        share: Slice | None = None,
        packing: str | None = None,
    ) -> Pages:
        """Create pages from tensors with named axes: ``Pages.of(layout, "full", caches, "k p t h d")``.

        The axes are ``l`` layer, ``k`` K or V, ``p`` page, ``h`` head, ``t`` token, ``d`` dim. Axes that an engine does
        not have are left out: ``"p t d"`` is the latent of MLA. The tensors are ordered by layer and, if K and V are
        separate, K before V.
        """
        names = axes.split()
        if "p" not in names or "d" not in names or len(set(names)) != len(names) or set(names) - set("lkphtd"):
            raise LayoutError(f"axes {axes!r}: use p and d, and of l k h t those that there are, each once")
        sections: list[torch.Tensor] = []
        for tensor in tensors:
            if tensor.dim() != len(names):
                raise LayoutError(f"axes {axes!r} do not fit a tensor of shape {tuple(tensor.shape)}")
            missing = [a for a in "lkht" if a not in names]
            order = names + missing
            whole = tensor[(..., *[None] * len(missing))].permute([order.index(a) for a in "lkphtd"])
            sections += [s for layer in whole.unbind(0) for s in layer.unbind(0)]
        return cls(layout, group, sections, share, packing)

    @functools.cached_property
    def bases(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Addresses of the sections in the engine's memory, for kernels."""
        return np.array([s.data_ptr() for s in self.sections], np.int64)

    def stretches(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Groups of sections at equal distances in one storage, each group as one tensor ``[section, page, head, token,
        dim]`` with the number of its first section: one call then copies the group."""
        start = 0
        while start < len(self.sections):
            first, stop = self.sections[start], start + 1
            step: int | torch.SymInt = 0
            while stop < len(self.sections):
                last, here = self.sections[stop - 1], self.sections[stop]
                apart = here.storage_offset() - last.storage_offset()
                same = here.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
                if not same or apart <= 0 or (step and apart != step):
                    break
                step, stop = apart, stop + 1
            shape, strides = (stop - start, *first.shape), (step, *first.stride())
            yield start, first.as_strided(shape, strides, first.storage_offset())
            start = stop

    def block(self, span: Span) -> torch.Tensor:
        """This process's heads of a block in memory: ``[section, head, page, token, dim]``."""
        words = memory(span, self.geometry.footprint).view(WORDS[self.itemsize])
        size, atom = self.group.head_bytes(self.layout.block_tokens) // self.itemsize, self.tokens * self.group.head_dim
        return words.as_strided(
            (len(self.sections), self.heads, self.each, self.tokens, self.group.head_dim),
            (self.geometry.stride // self.itemsize, size, atom, self.group.head_dim, 1),
            self.share.start * size,
        )

    def coded(self, span: Span) -> torch.Tensor:
        """This process's heads of a block in a lossy form: ``[layer, head, byte]``."""
        size = self.group.head_bytes(self.layout.block_tokens)
        return memory(span, self.geometry.footprint).as_strided(
            (self.group.layers, self.heads, size), (self.geometry.stride, size, 1), self.share.start * size
        )

    def check(self, copies: Sequence[Copy]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The pages of all copies, concatenated. Raises LayoutError for page numbers out of range."""
        if not copies:
            return np.empty(0, np.int64)
        blocks, some, starts = zip(*copies, strict=True)
        pages = np.concatenate(some)
        if len(pages) and (pages.min() < 0 or pages.max() >= self.count):
            raise LayoutError(
                f"pages {pages.min():g} to {pages.max():g} are not all among the {self.count} of this engine"
            )
        at, n = np.array(starts), np.array([*map(len, some)])
        if len(wrong := np.flatnonzero((at < 0) | (at > self.each - n))):
            raise LayoutError(f"{n[wrong[0]]} pages from page {at[wrong[0]]} on do not fit a block of {self.each}")
        if (least := min(map(len, blocks))) < self.geometry.footprint:
            raise LayoutError(f"a block has {self.geometry.footprint} bytes, not {least}")
        return pages.astype(np.int64, copy=False)

    def check_store(self, copies: Sequence[Copy]) -> None:
        """Raises LayoutError if these blocks cannot be written from these pages."""
        if self.form:
            self.check_load()
            if any(len(copy.pages) != self.each for copy in copies):
                raise LayoutError(f"a block in form {self.form.name!r} is stored whole: give all its {self.each} pages")
        elif self.packing != self.group.packing:
            raise LayoutError(
                f"an engine stores in its own packing {self.packing!r}, not as {self.group.packing!r}: give the layout "
                "that packing; readers convert"
            )

    def check_load(self) -> None:
        """Raises LayoutError if the blocks cannot be read into these pages."""
        if self.form:
            readable = self.packing == "plain"
        else:
            readable = self.packing == self.group.packing or packing.known(self.packing, self.group.packing)
        if not readable:
            raise LayoutError(
                f"blocks in packing {self.group.packing!r} cannot be read into pages of {self.packing!r}: treat them "
                "as a miss"
            )


class Copy(NamedTuple):
    """The pages of an engine, in order, that form one block or a part of it."""

    block: Span
    """A slot of the store."""
    pages: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]]
    at: int = 0
    """The page of the block at which they begin."""


def runs(copy: Copy) -> Iterator[tuple[int, int, int]]:
    """Runs of pages that are consecutive in the engine and in the block: the engine's first page and end, and the
    block's first page."""
    pages = np.asarray(copy.pages, np.int64)
    cuts = np.flatnonzero(np.diff(pages) != 1) + 1
    for start, stop in zip([0, *cuts], [*cuts, len(pages)], strict=True):
        if stop > start:
            yield int(pages[start]), int(pages[start]) + int(stop - start), copy.at + int(start)
