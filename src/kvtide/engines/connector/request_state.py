"""The state that the connector scheduler keeps for a request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvtide.engines.connector.request import Prompt, TokenSource
from kvtide.engines.connector.sessions import SessionPool, TenantSessions
from kvtide.index.keys import Chain, Extra
from kvtide.store.match import Load, Match

__all__ = ["Offer", "RequestState", "SearchResult"]

log = logging.getLogger("kvtide.engines")


@dataclass(slots=True)
class Offer:
    """The leased prefix that the store has of a prompt."""

    match: Match
    group_token: str
    ticket: str
    """Sent to the workers: the token of the worker group and the ticket of the match."""
    load: Load | None
    """A load into DRAM that is under way."""
    tokens: int
    cold: bool
    own: bool
    """Whether the blocks have the engine's own packing and need no conversion."""
    deadline: float
    counted: Future[int] | None = None
    """Tokens that have arrived when the load has ended. Blocks may be corrupt, or be late."""


SearchResult = Mapping[str, Callable[[], None]]
"""The requests of which the store has nothing. The call lets the node count one of them as a miss."""


@dataclass(slots=True)
class RequestState:
    """A request, from its arrival to its end."""

    prompt: Prompt
    chain: Chain | None = None
    """Extended on the node thread."""
    extras: Sequence[Extra] = ()
    tenant_sessions: TenantSessions | None = None
    searched: Future[SearchResult] | None = None
    """The search for prompts that arrived together with this one."""
    searched_at: float = 0.0
    asked: Future[Offer | None] | None = None
    since: float = 0.0
    """When the request was first looked up; 0 if it was not, or if the result is known."""
    heard: float = 0.0
    """When the node thread began this lookup; 0 while it is busy with others."""
    pending: bool = False
    """Whether the next block was just being written at the last lookup."""
    matched: bool = False
    """Whether the node was asked about this request before."""
    skip: int = 0
    """How many calls of the engine are answered without asking the node again."""
    offer: Offer | None = None
    settled: bool = False
    """Whether nothing more is to be loaded for the request."""
    have: int = 0
    """Tokens that the engine had cached when it last got a number."""
    reused: int = 0
    """Tokens that the engine reused from other requests."""
    stored: int = 0
    """Blocks that were given to the store or that it did not want."""
    due: int = 0
    """Blocks that are complete after the last planned step and are to be stored."""
    again: list[tuple[str, int, int]] = field(default_factory=list)
    """(group, first block, end) of blocks for which the node had no memory yet."""
    loading: list[bytes] = field(default_factory=list)
    """Names of the blocks being loaded into the request's pages."""
    kept: range = range(0)
    """Blocks that were loaded from the store in the engine's own packing: they need not be stored again."""
    converted: int = 0
    """Blocks before this one were loaded in another packing. Blocks after them are only found if these are stored in
    the engine's packing too; if none follow, that is not necessary."""
    source: TokenSource = field(default_factory=TokenSource)
    life: int = 0
    """How often the engine took the request's pages away."""
    failed: bool = False
    """Whether a load failed: it is not tried again."""
    over: bool = False
    explanation: Mapping[str, object] | None = None
    """Why its blocks were hits or misses, if it asked for that and the node has answered."""
    explained: bool = True
    """Whether the node was asked for that after the last lookup."""

    def explain(self) -> None:
        """Ask the node why its blocks were hits or misses. Runs on the node thread, after the lookup; without an answer
        there is no explanation."""
        if self.tenant_sessions is None:
            return
        try:
            found = self.tenant_sessions.own.session.explain_request(self.prompt.id)
            self.explanation = None if found is None else found.summary()
        except Exception as e:  # noqa: BLE001 - for instance, a newer node sends what this version cannot read
            log.info("kvtide has no explanation for request %s: %s", self.prompt.id, e)

    def unnamed(self, stop: int | None = None) -> tuple[int, Sequence[int]]:
        """The number of tokens already hashed, and the tokens after them up to ``stop``."""
        known = 0 if self.chain is None else self.chain.tokens
        return known, self.prompt.tokens[known:stop]

    def named(self, session_pool: SessionPool, known: int, tokens: Sequence[int]) -> tuple[Chain, TenantSessions]:
        """Hash ``tokens``, which follow the first ``known``; return the chain and the tenant's sessions. Runs on the
        node thread."""
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
