"""A request, as an engine's connector tells of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtide.engines.connector.request_options import RequestOptions
from kvtide.index.keys import Chain, Extra, Tenant

__all__ = ["PageGeometry", "Pages", "Prompt", "TokenSource", "Work"]

Pages = Sequence[Sequence[int]]
"""The pages of a request, for each group of the layout. Those that are gone are negative."""


@dataclass(slots=True)
class Prompt:
    """A request, as far as the store is concerned."""

    id: str
    tokens: Sequence[int]
    """Grows while the request is generated."""
    extras: Callable[[], Sequence[Extra]]
    """Called once, where it may take its time."""
    tenant: Tenant
    options: RequestOptions
    named: Callable[[Chain, int], None] | None = None
    """Told when its blocks have got their names, from that number on. On the thread that talks to the node."""


@dataclass(frozen=True, slots=True)
class Work:
    """A request in a step."""

    id: str
    upto: int
    """Tokens whose KV is final when the step has been computed."""
    pages: Callable[[], Pages]


@dataclass(slots=True)
class TokenSource:
    """Where the tokens of a request came from."""

    dram: int = 0
    disk: int = 0


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """How an engine's pages make up blocks.

    A group with a window gives back the pages that its window has passed over, while the request goes on. Of a block
    only the pages at its end are needed then, because a prefix ends where a block ends: so many that they hold what the
    next token sees. A block with these is whole; what else is gone nobody will ask for.
    """

    groups: Sequence[str]
    pages: Sequence[int]
    """The tokens of a page of each group."""
    block_tokens: int
    windows: Sequence[int]
    """How many tokens back a token of each group sees, itself among them; 0: all."""

    @property
    def lasting(self) -> bool:
        """Whether a request keeps all its pages until it leaves."""
        return not any(self.windows)

    def tokens(self, pages: Pages, start: int, stop: int) -> dict[str, list[int]]:
        """The pages of each group that hold tokens ``start`` to ``stop``, both at borders of pages."""
        page_geometry = zip(self.groups, pages, self.pages, strict=True)
        return {group: list(some[start // page : stop // page]) for group, some, page in page_geometry}

    def blocks(self, pages: Pages, start: int, stop: int) -> dict[str, list[int]]:
        """The same of blocks ``start`` to ``stop``."""
        return self.tokens(pages, start * self.block_tokens, stop * self.block_tokens)

    def whole(self, pages: Pages, start: int, stop: int) -> dict[str, int]:
        """For each group the first of these blocks from which on all are whole; ``stop`` if none is."""
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
