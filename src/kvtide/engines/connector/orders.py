"""The orders that the connector scheduler sends to the workers for each step, over the engine's own channel."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Loading", "Orders", "Storing"]


@dataclass(frozen=True, slots=True)
class Loading:
    """Load blocks into the pages of a request that waits for them."""

    request: str
    group_token: str
    """Token of the worker group that the ticket belongs to."""
    ticket: str
    start: int
    """First token to load; the first token of its page."""
    stop: int
    pages: dict[str, list[int]]
    """Pages of each group, beginning with the page of token ``start``. A negative page is not to be loaded."""
    seconds: float
    """Seconds after which the request is computed instead."""


@dataclass(frozen=True, slots=True)
class Storing:
    """Store pages that form complete blocks once this step has been computed."""

    request: str
    group_token: str
    ticket: str
    start: int
    """Number of the first of these blocks."""
    pages: dict[str, list[int]]
    """Pages of each group to be stored, for all blocks from ``start`` on. A negative page was freed and is not
    needed."""
    lasting: bool
    """Whether the pages stay unchanged until the request leaves. If not, they may be reassigned after this step."""


@dataclass(slots=True)
class Orders:
    """All orders of one step."""

    number: int = 0
    """Number of a step whose duration is used to measure the engine's speed; the workers report it when it is computed.
    0 for other steps."""
    loads: list[Loading] = field(default_factory=list)
    stores: list[Storing] = field(default_factory=list)
    leaving: set[str] = field(default_factory=set)
    """Requests whose pages return to the engine with this step: pending reads of these pages finish first."""
    closing: set[str] = field(default_factory=set)
    """Finished requests whose pages the engine keeps for the connector. No further store of them follows; each worker
    reports once when it no longer needs the pages."""
