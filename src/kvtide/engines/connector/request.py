"""A request as the engine's connector describes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtide.engines.connector.request_options import RequestOptions
from kvtide.index.keys import Chain, Extra, Tenant

__all__ = ["PageGeometry", "Pages", "Prompt", "TokenSource", "Work"]

Pages = Sequence[Sequence[int]]
"""The pages of a request, for each group of the layout. Pages that were freed are negative."""


@dataclass(slots=True)
class Prompt:
    """The properties of a request that the store needs."""

    id: str
    tokens: Sequence[int]
    """Grows while the request generates tokens."""
    extras: Callable[[], Sequence[Extra]]
    """Called once, on a thread where it may take long."""
    tenant: Tenant
    options: RequestOptions
    named: Callable[[Chain, int], None] | None = None
    """Called with the chain and the number of the first new block when blocks of the request were hashed. Runs on the
    node thread."""
    slow_extras: bool = False
    """Whether ``extras`` may take long: then no other request waits for it."""


@dataclass(frozen=True, slots=True)
class Work:
    """A request's part of a step."""

    id: str
    upto: int
    """Number of tokens whose KV is final once the step has been computed."""
    pages: Callable[[], Pages]


@dataclass(slots=True)
class TokenSource:
    """Number of a request's tokens loaded from each kind of tier."""

    dram: int = 0
    disk: int = 0


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """How an engine's pages form blocks.

    A group with a sliding window frees the pages that the window has passed while the request is still running. Of a
    block only its last pages are needed then: a prefix ends at a block boundary, so the pages with the tokens visible
    to the next token suffice. A block with these pages is complete; its other pages will never be read.
    """

    groups: Sequence[str]
    pages: Sequence[int]
    """Tokens per page, for each group."""
    block_tokens: int
    windows: Sequence[int]
    """Window of each group in tokens, including the current token; 0: unlimited."""

    @property
    def lasting(self) -> bool:
        """Whether a request keeps all its pages until it leaves."""
        return not any(self.windows)

    def tokens(self, pages: Pages, start: int, stop: int) -> dict[str, list[int]]:
        """The pages of each group that hold tokens ``start`` to ``stop``; both must be page boundaries."""
        page_geometry = zip(self.groups, pages, self.pages, strict=True)
        return {group: list(some[start // page : stop // page]) for group, some, page in page_geometry}

    def blocks(self, pages: Pages, start: int, stop: int) -> dict[str, list[int]]:
        """The pages of each group that hold blocks ``start`` to ``stop``."""
        return self.tokens(pages, start * self.block_tokens, stop * self.block_tokens)

    def whole(self, pages: Pages, start: int, stop: int) -> dict[str, int]:
        """For each group, the first block from which on all blocks up to ``stop`` are complete; ``stop`` if none is."""
        found = {}
        for (group, some), page, window in zip(
            self.blocks(pages, start, stop).items(), self.pages, self.windows, strict=True
        ):
            each = self.block_tokens // page
            tail = min(each, max(1, -(-(window - 1) // page))) if window else each
            first = stop
            while first > start and min(some[(first - start) * each - tail : (first - start) * each], default=-1) >= 0:
                first -= 1
            found[group] = first
        return found
