"""What the scheduler's half remembers of a request."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from kvtide.engines.halves.request import Prompt, Source
from kvtide.engines.halves.tenancy import Tenancies, Tenancy
from kvtide.index.keys import Chain, Extra
from kvtide.match import Load, Match
from kvtide.node.crew import Crew

__all__ = ["Offer", "State", "TokenArray", "array"]

TokenArray = np.ndarray[tuple[int], np.dtype[np.uint32]]


def array(tokens: Sequence[int]) -> TokenArray:
    return np.asarray(tokens, np.uint32)


@dataclass(slots=True)
class Offer:
    """What the store has of a prompt; held."""

    match: Match
    crew: Crew
    load: Load | None
    """Under way to DRAM."""
    tokens: int
    cold: bool
    deadline: float


@dataclass(slots=True)
class State:
    """A request, from its arrival to its end."""

    prompt: Prompt
    chain: Chain | None = None
    """Grows on the thread that talks to the node."""
    extras: Sequence[Extra] = ()
    tenancy: Tenancy | None = None
    asked: Future[Offer | None] | None = None
    since: float = 0.0
    offer: Offer | None = None
    settled: bool = False
    """Whether nothing is to be loaded for it any more."""
    have: int = 0
    """Tokens that the engine had when it was last told a number."""
    reused: int = 0
    """Tokens that the engine had of others."""
    stored: int = 0
    """Blocks that were given to the store, or were not wanted there."""
    loading: list[bytes] = field(default_factory=list)
    """The names of blocks on their way to its pages."""
    source: Source = field(default_factory=Source)
    life: int = 0
    """How often its pages were taken away."""
    failed: bool = False
    """Whether a load went wrong: it is not tried again."""
    over: bool = False

    def named(self, tenancies: Tenancies, tokens: TokenArray) -> tuple[Chain, Tenancy]:
        """The names of its blocks, as far as ``tokens`` go. On the thread that talks to the node."""
        if self.tenancy is None or self.chain is None:
            self.extras = self.prompt.extras()
            self.tenancy = tenancies.of(self.prompt.tenant)
            self.tenancy.requests.add(self.prompt.id)
            self.chain = self.tenancy.chain(tokens, self.extras)
        elif len(tokens) > self.chain.tokens:
            self.chain.extend(tokens[self.chain.tokens :])
        return self.chain, self.tenancy
