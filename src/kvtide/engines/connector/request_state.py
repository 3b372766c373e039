"""What the scheduler's half remembers of a request."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvtide.engines.connector.request import Prompt, TokenSource
from kvtide.engines.connector.sessions import SessionPool, TenantSessions
from kvtide.index.keys import Chain, Extra
from kvtide.store.match import Load, Match

__all__ = ["Offer", "RequestState"]


@dataclass(slots=True)
class Offer:
    """What the store has of a prompt; held."""

    match: Match
    crew: str
    ticket: str
    """What workers are told of it: the token of the crew, and the match's ticket."""
    load: Load | None
    """Under way to DRAM."""
    tokens: int
    cold: bool
    own: bool
    """Whether it is in the engine's own packing, and not to be converted."""
    deadline: float
    counted: Future[int] | None = None
    """When the load has ended: the tokens that have come. Blocks may be corrupt, or not come in time."""


@dataclass(slots=True)
class RequestState:
    """A request, from its arrival to its end."""

    prompt: Prompt
    chain: Chain | None = None
    """Grows on the thread that talks to the node."""
    extras: Sequence[Extra] = ()
    tenant_sessions: TenantSessions | None = None
    asked: Future[Offer | None] | None = None
    since: float = 0.0
    """When it was first asked for; 0: the answer is known, or nobody has."""
    heard: float = 0.0
    """When the thread that talks to the node turned to that question; 0: it is busy with others."""
    pending: bool = False
    """Whether the next block was just being written when it was last asked for."""
    matched: bool = False
    """Whether the node was asked for it before."""
    skip: int = 0
    """How often the engine may ask, until the node is asked again."""
    offer: Offer | None = None
    settled: bool = False
    """Whether nothing is to be loaded for it any more."""
    have: int = 0
    """Tokens that the engine had when it was last told a number."""
    reused: int = 0
    """Tokens that the engine had of others."""
    stored: int = 0
    """Blocks that were given to the store, or were not wanted there."""
    due: int = 0
    """Blocks that are whole after the last step that was planned, and are to be stored."""
    again: list[tuple[str, int, int]] = field(default_factory=list)
    """Of these groups from a block to another: the node had no memory for them yet."""
    loading: list[bytes] = field(default_factory=list)
    """The names of blocks on their way to its pages."""
    kept: range = range(0)
    """Blocks that came from the store as the engine has them: they need not go there again."""
    converted: int = 0
    """Blocks up to there came from the store in another packing. What follows is found only if they are there in this
    one too; if nothing follows, they need not be."""
    source: TokenSource = field(default_factory=TokenSource)
    life: int = 0
    """How often its pages were taken away."""
    failed: bool = False
    """Whether a load went wrong: it is not tried again."""
    over: bool = False

    def unnamed(self, stop: int | None = None) -> tuple[int, Sequence[int]]:
        """Tokens up to ``stop`` whose blocks have no name yet, and how many come before them."""
        known = 0 if self.chain is None else self.chain.tokens
        return known, self.prompt.tokens[known:stop]

    def named(self, session_pool: SessionPool, known: int, tokens: Sequence[int]) -> tuple[Chain, TenantSessions]:
        """The names of its blocks, with ``tokens`` after the first ``known``. On the thread that talks to the node."""
        if self.tenant_sessions is None or self.chain is None:
            self.extras = self.prompt.extras()
            self.tenant_sessions = session_pool.of(self.prompt.tenant)
            self.tenant_sessions.requests.add(self.prompt.id)
            self.chain = self.tenant_sessions.own.session.chain((), self.extras)
        before = self.chain.blocks
        self.chain.extend(tokens[self.chain.tokens - known :])
        if self.prompt.named is not None and self.chain.blocks > before:
            self.prompt.named(self.chain, before)
        return self.chain, self.tenant_sessions
