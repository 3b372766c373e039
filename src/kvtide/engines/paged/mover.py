"""Movers copy pages into blocks and back: the interface, and the mover for host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from kvtide.engines.paged.convert import converted, decode_pages, encode_pages
from kvtide.engines.paged.memory import memory
from kvtide.engines.paged.pages import Copy, Pages, runs

__all__ = ["HostMover", "Move", "Mover"]

_NEAR = 4 << 20
"""Bytes that stay in the processor's cache while they are encoded."""


class Move:
    """Copies under way."""

    at_once = True
    """Whether the calling thread has made the copies before it got this object."""

    def done(self) -> bool:
        """Whether the copies are complete. Raises the error if they failed."""
        return True

    def wait(self) -> None:
        """Wait until the copies are complete and the blocks' memory is not used any more. Raises the error if they
        failed."""

    def join(self) -> None:
        """Order the caller's stream after this move: its next operations see the pages of a load, and may change those
        of a store. The host does not wait for copies."""


class Mover(Protocol):
    """Copies between pages and blocks. Thread-safe. A page number out of range raises LayoutError, at the call or when
    the move is waited for; by then some blocks or pages may have been written."""

    def store(self, pages: Pages, copies: Sequence[Copy]) -> Move:
        """Copy pages into blocks. Both, and ``copies`` with the page numbers in them, must stay unchanged until the
        move is done."""

    def load(self, pages: Pages, copies: Sequence[Copy]) -> Move:
        """Copy blocks into pages. The blocks, and ``copies`` with the page numbers in them, must stay unchanged until
        the move is done."""

    def warm(self, pages: Pages) -> None:
        """Do the one-time work of the first move in advance, so that it takes no longer than later ones. No page may be
        in use yet; page 0 is read and written back unchanged."""

    def close(self) -> None:
        """Wait for all moves, and free all memory."""


class HostMover:
    """For tensors in host memory: copies in the calling thread, without the GIL, with torch's threads."""

    def warm(self, pages: Pages) -> None:
        pass

    def store(self, pages: Pages, copies: Sequence[Copy]) -> Move:
        pages.check(copies)
        pages.check_store(copies)
        if pages.form:
            for numbers, layers, heads, _ in _coded_layers(pages, copies):
                encode_pages(pages, numbers, layers, heads)
            return Move()
        stretches = list(pages.stretches())
        for copy in copies:
            block = pages.block(copy.block)
            for start, stop, at in runs(copy):
                for first, stretch in stretches:
                    into = block[first : first + len(stretch), :, at : at + stop - start]
                    into.copy_(stretch[:, start:stop].transpose(1, 2))
        return Move()

    def load(self, pages: Pages, copies: Sequence[Copy]) -> Move:
        pages.check(copies)
        pages.check_load()
        if pages.form:
            for numbers, layers, heads, at in _coded_layers(pages, copies):
                decode_pages(heads, pages, numbers, layers, at)
            return Move()
        stretches = list(pages.stretches())
        for copy in copies:
            if pages.packing == pages.group.packing:
                block = pages.block(copy.block)
            else:
                block = converted(pages, memory(copy.block, pages.geometry.footprint))
            for start, stop, at in runs(copy):
                for first, stretch in stretches:
                    part = block[first : first + len(stretch), :, at : at + stop - start]
                    stretch[:, start:stop].copy_(part.transpose(1, 2))
        return Move()

    def close(self) -> None:
        pass


def _coded_layers(pages: Pages, copies: Sequence[Copy]) -> Iterator[tuple[torch.Tensor, range, torch.Tensor, int]]:
    """Blocks in a lossy form, with as many layers at a time as fit into the processor's cache while they are
    encoded."""
    at_once = max(1, _NEAR // (2 * pages.heads * pages.each * pages.atom))
    for block, some, at in copies:
        numbers = torch.from_numpy(np.asarray(some, np.int64))
        for i, heads in enumerate(pages.coded(block).split(at_once)):
            yield numbers, range(i * at_once, i * at_once + len(heads)), heads, at
