"""What copies pages into blocks and back: the contract, and the mover of each device."""

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
"""Bytes that stay near the processor while they are coded."""


class Move:
    """Copies under way."""

    at_once = True
    """Whether they were made by whoever asked for them."""

    def done(self) -> bool:
        """Whether the bytes are there. Raises what went wrong."""
        return True

    def wait(self) -> None:
        """Wait until the bytes are there and the blocks' memory is not used any more. Raises what went wrong."""

    def join(self) -> None:
        """What the caller's stream does next sees the pages of a load, and may change those of a store. The host waits
        for no copy."""


class Mover(Protocol):
    """Copies between pages and blocks. Safe from any thread."""

    def store(self, pages: Pages, copies: Sequence[Copy]) -> Move:
        """Pages into blocks. Both must stay as they are until the move is done."""

    def load(self, pages: Pages, copies: Sequence[Copy]) -> Move:
        """Blocks into pages. The blocks must stay until the move is done."""

    def warm(self, pages: Pages) -> None:
        """Do now what only the first move of pages needs, so that it takes no longer than the next. No page may be in
        use yet; page 0 is read, and written as it was."""

    def close(self) -> None:
        """Wait for all moves, and let go of all memory."""


class HostMover:
    """For tensors in host memory: copies in the calling thread, without the GIL, by as many threads as torch has."""

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
    """Blocks in a lossy form, as many of their layers at a time as stay near the processor while they are coded."""
    at_once = max(1, _NEAR // (2 * pages.heads * pages.each * pages.atom))
    for block, some, at in copies:
        numbers = torch.from_numpy(np.asarray(some, np.int64))
        for i, heads in enumerate(pages.coded(block).split(at_once)):
            yield numbers, range(i * at_once, i * at_once + len(heads)), heads, at
