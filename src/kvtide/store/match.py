"""Results of a session's methods: how much of a prompt the store has, and what a load or a store did."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from kvtide import forks
from kvtide.block import Layout, Span
from kvtide.index.keys import Chain
from kvtide.interrupts import again_if_interrupted
from kvtide.store.backend import PersistRequest, PrefixLease
from kvtide.transfer.transfer import Transfer
from kvtide.transfer.write_results import Persisted

__all__ = ["Load", "Loaded", "Match", "Persist", "Stored"]


@dataclass(frozen=True, slots=True)
class Stored:
    """The outcome of the blocks given to ``Session.store``."""

    stored: int
    """Blocks that are new in the store."""
    present: int
    """Blocks that were present; nothing was copied."""
    dropped: int
    """Blocks that were not kept, because no space could be made without waiting."""
    pending: int = 0
    """Blocks that were not kept and are not present yet: two other writers are writing them. Store them again later if
    they must be kept."""


class Persist(Stored):
    """The outcome of ``Session.store(durable=True)``, whose blocks are being written to a durable tier.

    ``wait`` for it in a thread, or ``await`` it in asyncio. When it ends, each block of the prompt was written and
    synced in a tier that survives a restart, or the result says which were not, and why.
    """

    __slots__ = ("_persisting",)

    _persisting: PersistRequest

    def __init__(self, stored: Stored, persisting: PersistRequest) -> None:
        super().__init__(stored.stored, stored.present, stored.dropped, stored.pending)
        object.__setattr__(self, "_persisting", persisting)

    @property
    def transfer(self) -> Transfer:
        return self._persisting.transfer

    def wait(self, timeout: float | None = None) -> Persisted:
        """Wait until all blocks have ended, or ``timeout`` seconds have passed; returns which are durable. After a
        timeout the writes continue, and it may be waited for again."""
        self.transfer.wait(timeout)
        return self._result()

    def cancel(self) -> None:
        """Stop waiting. Writes under way are completed, but no more are made for this store."""
        self.transfer.cancel()

    def _result(self) -> Persisted:
        return self._persisting.result()

    def __await__(self) -> Generator[Any, None, Persisted]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> Persisted:
        await self.transfer
        return self._result()


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of a load: the first ``tokens`` tokens of the prompt need not be computed.

    ``views`` has, for each group, the requested blocks as read-only memory; the first of them is block
    ``first[group]``. They are valid until the match is released.
    """

    tokens: int
    first: dict[str, int]
    views: dict[str, list[Span]]

    @property
    def blocks(self) -> list[Span]:
        """The views of the only group."""
        (views,) = self.views.values()
        return views


class MatchOwner(Protocol):
    """The session that a match belongs to."""

    layout: Layout
    origin: forks.Process
    """The process that opened it."""

    def load(self, match: Match, *, deadline: float | None = None) -> Load:
        """Load a match's blocks into DRAM: see ``Session.load``."""

    def ended(self, right: Match) -> None:
        """Called when a match was released."""


class Match:
    """How much of a prompt the store has. Holds those blocks until it is released; use it in a ``with`` statement.

    ``tokens`` of the prompt are in the store, in any tier. ``held_tokens`` of them are in DRAM, verified and held for
    this match: only these may be promised to an engine. The number grows while a load brings the rest. ``ready`` says
    that both are equal. ``pending`` says that the next block is being written, or searched for in shared storage: a
    later match may find more.

    ``plan`` has the estimates that decided the length.
    """

    __slots__ = (
        "__weakref__",
        "_held",
        "blocks",
        "chain",
        "have",
        "holding",
        "pending",
        "plan",
        "session",
        "tokens",
    )

    def __init__(self, session: MatchOwner, chain: Chain, holding: PrefixLease) -> None:
        self.session = session
        self.chain = chain
        self.holding = holding
        self.plan = holding.plan
        self.blocks = holding.plan.blocks
        self.have = holding.have
        self.tokens = self.blocks * session.layout.block_tokens
        self.pending = holding.pending
        self._held = True

    def __repr__(self) -> str:
        where = ("in DRAM" if self.ready else f"{self.held_tokens} in DRAM") if self.held else "released"
        more = ", more may come" if self.pending else ""
        return f"<Match {self.tokens} of {self.chain.tokens} tokens, {where}{more}>"

    @property
    def held(self) -> bool:
        return self._held

    @property
    def held_tokens(self) -> int:
        """Tokens at the start of the prompt available now without a load; 0 after the release.

        They are in DRAM, verified and leased, or among the ``have`` tokens of the caller. The value is current when a
        ``load`` ends. A node's client returns what the node last reported, without a request: the node may have more by
        then, never fewer.
        """
        return self.holding.held * self.chain.block_tokens if self._held else 0

    @property
    def ready(self) -> bool:
        """Whether all ``tokens`` are held, so that nothing must be waited for."""
        return self.held_tokens == self.tokens and self._held

    @property
    def wanted(self) -> dict[str, range]:
        """The blocks of each group that a load brings, by their numbers in the prompt."""
        return {
            g.name: range(start, start + self.holding.counts[g.name])
            for g in self.session.layout.groups
            for start in [g.needs(self.blocks, self.chain.block_tokens, self.have).start]
        }

    def release(self) -> None:
        """Release the blocks. Views of them must not be used any more."""
        if self._held and self.session.origin is not forks.here:
            self._held = False  # the parent process releases the blocks
        elif self._held:
            # In this order: an interrupted release can be repeated.
            self.holding.release()
            self.session.ended(self)
            self._held = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        again_if_interrupted(self.release)


class Load:
    """A load in progress: ``wait`` for it in a thread, ``await`` it in asyncio, or ``cancel`` it."""

    __slots__ = ("_collect", "_into", "transfer")

    def __init__(self, transfer: Transfer, collect: Callable[[], Loaded], into: bool) -> None:
        self.transfer = transfer
        self._collect = collect
        self._into = into

    def wait(self, timeout: float | None = None) -> Loaded:
        """Wait until all blocks have arrived, or the deadline or ``timeout`` has passed; returns what has arrived,
        perhaps a shorter prefix."""
        if not self.transfer.wait(timeout):
            self.transfer.cancel()
        return self._collect()

    def cancel(self) -> None:
        self.transfer.cancel()

    def __await__(self) -> Generator[Any, None, Loaded]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> Loaded:
        try:
            await self.transfer
        except asyncio.CancelledError:
            self.cancel()
            raise
        if not self._into:
            return self._collect()
        # Copying gigabytes would block the event loop; making views does not.
        copying = asyncio.ensure_future(asyncio.to_thread(self._collect))
        try:
            return await asyncio.shield(copying)
        except asyncio.CancelledError:
            # The caller may use the buffers again only when no thread writes into them any more.
            while not copying.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([copying])
            copying.exception()
            raise
