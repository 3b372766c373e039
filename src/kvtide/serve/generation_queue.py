"""The request queue: one generation at a time, in the order of arrival, with a bounded number waiting.

A request takes its place in the queue before anything is done for it, and its prompts are tokenised while it has that
place: by one thread, one request after the other. So memory and concurrent work are bounded by the length of the queue,
however many clients there are.

The model generates on a thread of its own; the event loop only receives the results. If a client leaves, its turn gives
its place in the queue back at once, or ends at the next token if it is being generated.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from kvtide.engines.bounded_executor import BoundedExecutor
from kvtide.serve.generation import Answered, Ask, GenerationEngine
from kvtide.serve.openai_api import ApiError

__all__ = ["GenerationQueue", "Turn"]

log = logging.getLogger("kvtide.serve")

Said = tuple[int, str | Answered]
"""A piece of the output of the ask with that number, or its end."""


class Turn:
    """The asks of one request: iterate over it for the outputs. Used in the event loop."""

    def __init__(self, turns: GenerationQueue) -> None:
        self._turns = turns
        self._asks: Sequence[Ask] = ()
        self._loop = asyncio.get_running_loop()
        self._said: asyncio.Queue[Said | ApiError | None] = asyncio.Queue()
        self._left = threading.Event()
        self._job: Future[None] | None = None

    @property
    def left(self) -> bool:
        return self._left.is_set()

    def leave(self) -> None:
        """The client has left."""
        if self.left:
            return
        self._left.set()
        self._said.put_nowait(None)
        if self._job is None:
            self._turns.give_back()
        else:
            self._job.cancel()

    async def prepare(self, asks: Callable[[], Sequence[Ask]]) -> None:
        """Prepare the asks on the preparing thread, and queue for the model. Raises ApiError, or what ``asks`` raises;
        then the place is given back."""
        try:
            self._asks = await self._loop.run_in_executor(self._turns.preparing, asks)
            self._job = self._turns.put(self)
        except BaseException:
            self.leave()
            raise

    async def __aiter__(self) -> AsyncIterator[Said]:
        """Ends when all outputs are complete, or after ``leave``. Raises ApiError."""
        while (said := await self._said.get()) is not None:
            if isinstance(said, ApiError):
                raise said
            yield said

    def run(self, engine: GenerationEngine) -> None:
        """Generate, on the model's thread."""
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
        if not self.left:  # otherwise the event loop may already be closed
            self._loop.call_soon_threadsafe(self._said.put_nowait, said)


class GenerationQueue:
    """The queue of requests for a model."""

    def __init__(self, engine: GenerationEngine, waiting: int) -> None:
        """``waiting`` requests may wait while one is generated."""
        self._engine = engine
        self._thread = BoundedExecutor("kvtide-serve", waiting + 1)
        self.preparing = ThreadPoolExecutor(1, "kvtide-prepare")
        self._lock = threading.Lock()
        self._free = waiting + 1

    def take(self) -> Turn | None:
        """Take a place in the queue. Returns None if too many wait."""
        with self._lock:
            if not self._free:
                return None
            self._free -= 1
        return Turn(self)

    def put(self, turn: Turn) -> Future[None]:
        """Queue a turn for the model. Raises ApiError if the server is stopping."""
        job = self._thread.put(partial(turn.run, self._engine))
        if job is None:
            raise ApiError(503, "the server is being stopped", code="overloaded")
        job.add_done_callback(self.give_back)
        return job

    def give_back(self, _: object = None) -> None:
        """Free a place. Called once for each that was taken, from any thread."""
        with self._lock:
            self._free += 1

    def close(self) -> None:
        """Wait for the requests in the queue, and accept no more."""
        self.preparing.shutdown(cancel_futures=True)
        self._thread.close()
