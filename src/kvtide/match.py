"""What the store answers: how much of a prompt it has, and what a load or a store brought."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kvtide.block import Span
from kvtide.desk import Holding
from kvtide.index.keys import Chain
from kvtide.transfer.transfer import Transfer

if TYPE_CHECKING:
    from kvtide.session import Session

__all__ = ["Load", "Loaded", "Match", "Stored"]


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of the blocks given to ``Session.store``."""

    stored: int
    """New in the store."""
    present: int
    """There before; nothing was copied."""
    dropped: int
    """Not kept: no room could be made without waiting."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load brought: the first ``tokens`` tokens of the prompt need not be computed.

    ``views`` has, for each group, the blocks that were asked for as read-only memory, the first of them for block
    ``first[group]``. They hold until the match is released.
    """

    tokens: int
    first: dict[str, int]
    views: dict[str, list[Span]]

    @property
    def blocks(self) -> list[Span]:
        """The views of the only group."""
        (views,) = self.views.values()
        return views


class Match:
    """How much of a prompt the store has. Holds those blocks until it is released; use it in a ``with``.

    ``tokens`` of the prompt are in the store, in whatever tier; ``ready`` says that all of them are in DRAM, so that
    ``load`` ends at once. ``pending`` says that the next block is just being written, or looked for in storage that
    others write to as well: ask again and perhaps get more.
    ``plan`` has the expectations that decided the length.
    """

    __slots__ = ("_held", "blocks", "chain", "have", "holding", "pending", "plan", "ready", "session", "tokens")

    def __init__(self, session: Session, chain: Chain, holding: Holding) -> None:
        self.session = session
        self.chain = chain
        self.holding = holding
        self.plan = holding.plan
        self.blocks = holding.plan.blocks
        self.have = holding.have
        self.tokens = self.blocks * session.layout.block_tokens
        self.ready = holding.ready
        self.pending = holding.pending
        self._held = True

    def __repr__(self) -> str:
        where = "in DRAM" if self.ready else "partly colder"
        more = ", more may come" if self.pending else ""
        return f"<Match {self.tokens} of {self.chain.tokens} tokens, {where}{more}{'' if self.held else ', released'}>"

    @property
    def held(self) -> bool:
        return self._held

    @property
    def wanted(self) -> dict[str, range]:
        """The blocks of each group that a load brings, by their numbers in the prompt."""
        return {
            g.name: range(start, start + self.holding.counts[g.name])
            for g in self.session.layout.groups
            for start in [g.needs(self.blocks, self.chain.block_tokens, self.have).start]
        }

    def release(self) -> None:
        """Let the blocks go. Views of them must not be used any more."""
        held, self._held = self._held, False
        if held:
            self.session.ended(self)
            self.holding.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class Load:
    """A load under way: ``wait`` for it in a thread, ``await`` it in asyncio, or ``cancel`` it."""

    __slots__ = ("_collect", "_into", "transfer")

    def __init__(self, transfer: Transfer, collect: Callable[[], Loaded], into: bool) -> None:
        self.transfer = transfer
        self._collect = collect
        self._into = into

    def wait(self, timeout: float | None = None) -> Loaded:
        """What has come when all is here, or the deadline or ``timeout`` has passed: perhaps a shorter prefix."""
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
        # Copying gigabytes would stop the loop; making views does not.
        copying = asyncio.ensure_future(asyncio.to_thread(self._collect))
        try:
            return await asyncio.shield(copying)
        except asyncio.CancelledError:
            # The buffers are the caller's own again only when nobody writes into them any more.
            while not copying.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([copying])
            copying.exception()
            raise
