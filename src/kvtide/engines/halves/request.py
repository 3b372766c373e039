"""A request, as an engine's connector tells of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtide.engines.halves.wishes import Wishes
from kvtide.index.keys import Extra, Tenant

__all__ = ["Cut", "Pages", "Prompt", "Source", "Work"]

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
    wishes: Wishes


@dataclass(frozen=True, slots=True)
class Work:
    """A request in a step."""

    id: str
    upto: int
    """Tokens whose KV is final when the step has been computed."""
    pages: Callable[[], Pages]


@dataclass(slots=True)
class Source:
    """Where the tokens of a request came from."""

    dram: int = 0
    disk: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """How an engine's pages make up blocks."""

    groups: Sequence[str]
    pages: Sequence[int]
    """The tokens of a page of each group."""
    block_tokens: int
    lasting: bool = True
    """Whether a request keeps its pages until it leaves; one with a window gives some back before."""

    def tokens(self, pages: Pages, start: int, stop: int) -> dict[str, list[int]]:
        """The pages of each group that hold tokens ``start`` to ``stop``, both at borders of pages."""
        cut = zip(self.groups, pages, self.pages, strict=True)
        return {group: list(some[start // page : stop // page]) for group, some, page in cut}

    def blocks(self, pages: Pages, start: int, stop: int) -> dict[str, list[int]]:
        """The same of blocks ``start`` to ``stop``."""
        return self.tokens(pages, start * self.block_tokens, stop * self.block_tokens)
