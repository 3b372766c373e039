"""The blocks that are being sent to other nodes, so that a drop can stop that.

A block that is dropped leaves the index at once, but an answer that was begun before may still send it, under its lease
or from memory of its own. So whoever drops blocks interrupts the answers that hold one of them, and waits until these
hold nothing. While a tenant is being forgotten, no answer with its blocks begins.

Headers that were sent are remembered for a while, with the checksums of their blocks' sections: a block that one node
asks for is soon asked for by another. They are forgotten with their blocks when these are dropped."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import NamedTuple

from kvtide.block import BlockKey, Span

__all__ = ["Contents", "OutgoingAnswer", "OutgoingBlocks"]

_HEADERS = 16 << 20
"""Bytes of headers that are remembered."""

_PATIENCE = 10.0
"""Seconds until interrupted answers must have ended. They need a moment of processor time only."""


class OutgoingAnswer:
    """Blocks of one tenant that are being sent."""

    def __init__(self, tenant: bytes, keys: Collection[BlockKey], interrupt: Callable[[], None]) -> None:
        """``interrupt`` makes the answer end soon. It is called under a lock, and must neither wait nor fail."""
        self.tenant = tenant
        self.keys = frozenset(keys)
        self.interrupt = interrupt
        self.withdrawn = False
        """Whether one of the blocks was dropped: nothing of the answer may be sent any more."""


class Contents(NamedTuple):
    """What a block in DRAM is, as far as its header says: while a slot's generation is the same, so are its bytes."""

    place: int
    generation: int
    expiry: float
    priority: int


class OutgoingBlocks:
    """Thread-safe. Its lock may be taken under the index lock, and not the other way round."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._answers: set[OutgoingAnswer] = set()
        self._forgotten: Counter[bytes] = Counter()
        self._headers: dict[BlockKey, tuple[Contents, bytes]] = {}
        """The oldest first."""
        self._header_bytes = 0

    def begin(self, answer: OutgoingAnswer) -> bool:
        """Call it under the index lock under which the blocks were found; until ``end``, they may be sent. False: the
        tenant is being forgotten, and nothing may be sent."""
        with self._changed:
            if self._forgotten[answer.tenant]:
                return False
            self._answers.add(answer)
            return True

    def end(self, answer: OutgoingAnswer) -> None:
        """Nothing of the answer is sent any more. May be repeated."""
        with self._changed:
            self._answers.discard(answer)
            self._changed.notify_all()

    def header(self, key: BlockKey, contents: Contents) -> Span | None:
        """The header that was sent for these contents, if it is remembered."""
        known = self._headers.get(key)
        return memoryview(known[1]) if known is not None and known[0] == contents else None

    def remember(self, answer: OutgoingAnswer, key: BlockKey, contents: Contents, header: bytes) -> None:
        """Remember the header of a block in an answer."""
        with self._changed:
            if answer.withdrawn:
                return  # the block may have been dropped
            self._forget_header(key)
            self._headers[key] = contents, header
            self._header_bytes += len(header)
            while self._header_bytes > _HEADERS:
                self._forget_header(next(iter(self._headers)))

    def _forget_header(self, key: BlockKey) -> None:
        with suppress(KeyError):
            self._header_bytes -= len(self._headers.pop(key)[1])

    def refused(self, tenant: bytes) -> bool:
        """Whether the tenant is being forgotten."""
        return bool(self._forgotten and self._forgotten[tenant])

    def interrupt(self, keys: Collection[BlockKey]) -> Collection[OutgoingAnswer]:
        """Interrupt answers with one of these blocks, and return them. Call it when the blocks have left the index."""
        if not self._answers and not self._headers:
            return ()
        with self._changed:
            if self._headers:
                for key in keys:
                    self._forget_header(key)
            return self._interrupted([answer for answer in self._answers if not answer.keys.isdisjoint(keys)])

    def _interrupted(self, answers: Collection[OutgoingAnswer]) -> Collection[OutgoingAnswer]:
        for answer in answers:
            answer.withdrawn = True
            answer.interrupt()
        return answers

    def wait(self, answers: Collection[OutgoingAnswer]) -> bool:
        """Wait until interrupted answers have ended. Call it without the index lock. False: one has not."""
        if not answers:
            return True
        with self._changed:
            return self._changed.wait_for(lambda: self._answers.isdisjoint(answers), _PATIENCE)

    @contextlib.contextmanager
    def forgetting(self, tenant: bytes) -> Iterator[None]:
        """Meanwhile, send no block of a tenant; those that are being sent are interrupted. Enter without the index
        lock."""
        with self._changed:
            self._forgotten[tenant] += 1
            self._headers.clear()  # whose they are is not known
            self._header_bytes = 0
            answers = self._interrupted([answer for answer in self._answers if answer.tenant == tenant])
        try:
            self.wait(answers)
            yield
        finally:
            with self._changed:
                self._forgotten[tenant] -= 1
                if not self._forgotten[tenant]:
                    del self._forgotten[tenant]
