"""What the scheduler's half tells the workers' halves in a step. It travels over the engine's own channel."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Loading", "Orders", "Storing"]


@dataclass(frozen=True, slots=True)
class Loading:
    """Blocks for the pages of a request that waits for them."""

    request: str
    crew: str
    """The token of the crew whose ticket it is."""
    ticket: str
    start: int
    """The first token that is wanted; its page's first."""
    stop: int
    pages: dict[str, list[int]]
    """Of each group, from the one with token ``start`` on. A negative one is not wanted."""
    seconds: float
    """After which the request had rather compute."""


@dataclass(frozen=True, slots=True)
class Storing:
    """Pages that are whole blocks when this step has been computed."""

    request: str
    crew: str
    ticket: str
    start: int
    """The first of these blocks."""
    pages: dict[str, list[int]]
    """Of each group that is stored, for all blocks from ``start`` on. A negative one is gone, and not needed."""
    lasting: bool
    """Whether they stay as they are until the request leaves. If not, they may be others' after this step."""


@dataclass(slots=True)
class Orders:
    """Everything of a step."""

    number: int = 0
    """Of a step whose time tells how fast the engine computes; the workers say it when they have computed it."""
    loads: list[Loading] = field(default_factory=list)
    stores: list[Storing] = field(default_factory=list)
    leaving: set[str] = field(default_factory=set)
    """Requests whose pages are the engine's again from this step on: what is still read from them is read first."""
    closing: set[str] = field(default_factory=set)
    """Requests that are over and whose pages the engine keeps for us: no further store of them comes, so that each
    worker says once when it is through with them."""
