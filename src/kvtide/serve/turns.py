"""One generation at a time: requests take turns, in the order in which they came, and few may wait.

A model answers on a thread of its own; the event loop only listens. A turn whose client has left gives its place in the
queue back at once, or ends at the next token if it is being answered.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from functools import partial

from kvtide.engines.background import Background
from kvtide.serve.generation import Answered, Ask, Engine
from kvtide.serve.protocol import ApiError

__all__ = ["Turn", "Turns"]

log = logging.getLogger("kvtide.serve")

Said = tuple[int, str | Answered]
"""A piece of the answer to the ask of that number, or its end."""


class Turn:
    """The asks of one request: iterate to hear the answers. Used in the event loop."""

    def __init__(self, asks: Sequence[Ask]) -> None:
        self._asks = asks
        self._loop = asyncio.get_running_loop()
        self._said: asyncio.Queue[Said | ApiError | None] = asyncio.Queue()
        self._left = threading.Event()
        self.job: Future[None] | None = None

    @property
    def left(self) -> bool:
        return self._left.is_set()

    def leave(self) -> None:
        """Nobody listens any more."""
        self._left.set()
        self._said.put_nowait(None)
        if self.job is not None:
            self.job.cancel()

    async def __aiter__(self) -> AsyncIterator[Said]:
        """Ends when all is said, or after ``leave``. Raises ApiError."""
        while (said := await self._said.get()) is not None:
            if isinstance(said, ApiError):
                raise said
            yield said

    def run(self, engine: Engine) -> None:
        """Answer, on the model's thread."""
        try:
            for number, ask in enumerate(self._asks):
                if not self.left:
                    self._tell((number, engine.answer(ask, partial(self._piece, number), self._left.is_set)))
            self._tell(None)
        except Exception as error:
            log.exception("the model could not answer")
            self._tell(ApiError(500, f"{type(error).__name__} while the model answered; the server's log says more"))

    def _piece(self, number: int, text: str) -> None:
        self._tell((number, text))

    def _tell(self, said: Said | ApiError | None) -> None:
        if not self.left:  # then there may be no loop either
            self._loop.call_soon_threadsafe(self._said.put_nowait, said)


class Turns:
    """The queue before a model."""

    def __init__(self, engine: Engine, waiting: int) -> None:
        """``waiting`` requests may wait while one is answered."""
        self._engine = engine
        self._thread = Background("kvtide-serve", waiting + 1)

    def take(self, asks: Sequence[Ask]) -> Turn | None:
        """A turn, soon. None if too many wait."""
        turn = Turn(asks)
        turn.job = self._thread.put(partial(turn.run, self._engine))
        return turn if turn.job is not None else None

    def close(self) -> None:
        """Wait for those who have a turn, and give none any more."""
        self._thread.close()
