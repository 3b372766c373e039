"""Calls a tier as the store does, with blocks whose bytes follow from their keys, and checks every result."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvtide.block import BlockKey, Group, Kind, Layout
from kvtide.testing.blocks import Bytes, aligned, content, fill, holds, identity, keys
from kvtide.tiers.base import NOWHERE, Identity, Read, ReadResult, Tier, TierStatistics, Write

__all__ = ["GEOMETRIES", "Caller", "CallerAnswer", "shaped"]

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds after which a batch without a result is taken for lost."""


def shaped(sections: int, section: int) -> Identity:
    """The identity of blocks of ``sections`` sections of ``section`` bytes, bfloat16 if that is an even number."""
    dtype, tokens = ("uint8", section) if section % 2 else ("bfloat16", section // 2)
    group = Group("full", Kind.MLA, layers=sections, heads=1, head_dim=1, dtype=dtype, page=1)
    return identity(Layout((group,), block_tokens=tokens))


GEOMETRIES = {
    "one page": shaped(1, 4096),
    "one padded section": shaped(1, 5000),
    "one byte": shaped(1, 1),
    "padded sections": shaped(4, 4100),
    "pages without padding": shaped(8, 20480),
    "a header of two pages": shaped(130, 100),
}


class CallerAnswer(Generic[T]):
    """The ``done`` callback of one batch: waits for the call, and checks that there was exactly one."""

    def __init__(self, items: int) -> None:
        self._items = items
        self._calls: list[list[T]] = []
        self._event = threading.Event()

    def __call__(self, results: Sequence[T]) -> None:
        self._calls.append(list(results))
        self._event.set()

    def wait(self) -> list[T]:
        assert self._event.wait(PATIENCE), "a batch was never answered"
        return self._calls[0]

    def check(self) -> None:
        assert len(self._calls) == 1, f"done was called {len(self._calls)} times"
        assert len(self._calls[0]) == self._items, "one answer per item"


class Caller:
    """Calls a tier with blocks whose bytes follow from their keys, and checks the results.

    Every write has an owner of its own, as from an index. Thread-safe.
    """

    def __init__(
        self,
        tier: Tier,
        make_content: Callable[[bytes, int], Bytes] = content,
        exact: bool = True,
        counts: bool = True,
    ) -> None:
        self.tier = tier
        self._counts = counts
        self._content = make_content
        self._exact = exact
        self._owners = itertools.count(1)
        self._answers: list[CallerAnswer[bool] | CallerAnswer[int] | CallerAnswer[ReadResult]] = []
        self._closed = False

    def _answer(self, answer: CallerAnswer[T]) -> CallerAnswer[T]:
        self._answers.append(answer)  # type: ignore[arg-type]
        return answer

    # -- without waiting

    def start_write(self, batch: Sequence[Write]) -> CallerAnswer[int]:
        answer = self._answer(CallerAnswer[int](len(batch)))
        self.tier.write(batch, answer)
        return answer

    def start_read(self, batch: Sequence[Read]) -> CallerAnswer[ReadResult]:
        answer = self._answer(CallerAnswer[ReadResult](len(batch)))
        self.tier.read(batch, answer)
        return answer

    def start_drop(self, items: Sequence[tuple[BlockKey, int]]) -> CallerAnswer[bool]:
        answer = self._answer(CallerAnswer[bool](len(items)))
        self.tier.drop(items, answer)
        return answer

    # -- whole blocks

    def block(self, key: BlockKey, who: Identity, depth: int = 0) -> Write:
        """The write of a block."""
        span = aligned(who.geometry.footprint)
        if self._exact:
            fill(span, who.geometry, self._content(key, who.geometry.nbytes))
        return Write(key, who, span.toreadonly(), bytes(32), depth, next(self._owners))

    def write(self, names: Sequence[BlockKey], who: Identity) -> list[int]:
        """Write blocks as one batch; returns their places."""
        return self.start_write([self.block(k, who) for k in names]).wait()

    def read_item(self, key: BlockKey, who: Identity, place: int, sections: range | None = None) -> Read:
        """The read of a block, or of some sections."""
        count = who.geometry.sections if sections is None else len(sections)
        return Read(key, who, place, aligned(count * who.geometry.stride), sections)

    def read(self, batch: Sequence[Read]) -> list[bool]:
        """Read as one batch. All bytes that are found must be right."""
        return [bool(result) for result in self.results(batch)]

    def results(self, batch: Sequence[Read]) -> list[ReadResult]:
        """Like ``read``; for blocks that are not found it returns the reason, as far as the tier knows it."""
        results = self.start_read(batch).wait()
        for item, found in zip(batch, results, strict=True):
            if found and self._exact:
                geometry = item.identity.geometry
                data = self._content(item.key, geometry.nbytes)
                assert holds(item.span, geometry, data, item.sections), f"wrong bytes: {item.key.hex()}"
        return results

    def finds(self, names: Sequence[BlockKey], who: Identity, places: Sequence[int]) -> list[bool]:
        """Which blocks can be read, with all bytes checked."""
        return self.read([self.read_item(k, who, p) for k, p in zip(names, places, strict=True)])

    def drop(self, *items: tuple[BlockKey, int]) -> list[bool]:
        return self.start_drop(items).wait()

    def evict(self, names: Sequence[BlockKey], places: Sequence[int]) -> None:
        for key, place in zip(names, places, strict=True):
            self.tier.evict(key, place)

    def fill(self, who: Identity, start: int = 0, limit: int = 100_000) -> dict[BlockKey, int]:
        """Write new blocks until there is no space for one; returns those that were written."""
        found: dict[BlockKey, int] = {}
        for number in range(start, start + limit):
            (key,) = keys(1, start=number)
            (place,) = self.write([key], who)
            if place == NOWHERE:
                return found
            found[key] = place
            self.statistics()
        raise AssertionError(f"{limit} blocks and still not full")

    def statistics(self) -> TierStatistics:
        """The tier's statistics, with their invariants checked."""
        now = self.tier.statistics()
        assert 0 <= now.bytes_used <= now.bytes_taken <= now.budget
        return now

    def has(self, blocks: int) -> bool:
        """Whether the tier has that many blocks, if it counts them."""
        return self.statistics().blocks == blocks or not self._counts

    def close(self) -> None:
        """Close the tier. By then every batch must have been answered, once."""
        if not self._closed:
            self._closed = True
            self.tier.close()
            for answer in self._answers:
                answer.check()
