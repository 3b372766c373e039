"""Blocks that clients have described, where each of them is, and what was published about them.

An event of the store names blocks by keys, from which nobody can tell tokens. So clients send what a block consists of,
and it is kept here by digest. Only descriptions of blocks that are stored are kept for long.

What is published is what the index says: an event of the store only tells that a block must be looked at again. So a
block is published after its bytes are verified and can be read, and the order in which events arrive does not matter.

**A block is published only while its parent is.** A consumer that learns of a block before its parent, or without it,
cannot place it. If a block has left all tiers, its descendants are withdrawn too, though they may be stored: a prefix
that needs them cannot be used. They are published again when the block is back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvtide.block import BlockKey
from kvtide.index.index import SEALED, Index
from kvtide.index.keys import ROOT
from kvtide.index.work_slices import rest

__all__ = ["BlockSource", "Change", "DescribedBlock", "DescribedBlocks"]

_AT_ONCE = 512
"""Blocks that are looked up under the index's lock at a time."""
_LEAST = 16384
"""Descriptions from which on those of absent blocks are looked for."""


@dataclass(frozen=True, eq=False, slots=True)
class BlockSource:
    """What the blocks of one session have in common."""

    index: Index
    groups: tuple[tuple[bytes, int], ...]
    """Of each group that a prefix needs all blocks of: the ending of its keys, and the fingerprint of its identity. A
    block is in a tier when all these groups are."""
    block_tokens: int
    page: int
    """Tokens of a block in events."""
    salt: str
    """What separates its blocks from others with the same tokens; empty: nothing."""
    places: tuple[tuple[int, int], ...]
    """The number of each tier, and the bit of the place that consumers know it as."""


@dataclass(eq=False, slots=True)
class DescribedBlock:
    """A block, by the digest in its keys."""

    digest: bytes
    parent: bytes
    tokens: bytes
    """As u32 little-endian; empty if the operator does not allow them."""
    source: BlockSource
    born: int
    """The round of cleaning in which it was described last."""
    here: int = 0
    """Bits of the places where it is."""
    published: int = 0
    """Bits of the places where consumers believe it to be."""
    children: dict[bytes, DescribedBlock] | None = None


Change = tuple[DescribedBlock, int, int]
"""A block, the places where it was published before, and those where it is published now."""


class DescribedBlocks:
    """For one thread."""

    def __init__(self) -> None:
        self._known: dict[bytes, DescribedBlock] = {}
        self._first: dict[bytes, DescribedBlock] = {}
        """Blocks without a parent."""
        self._waiting: dict[bytes, dict[bytes, DescribedBlock]] = {}
        """Children of parents that are not described, by the parent's digest."""
        self._looked_at: set[bytes] = set()
        self._round = 0
        self._clean_at = _LEAST

    def __len__(self) -> int:
        return len(self._known)

    def describe(self, source: BlockSource, parent: bytes, digests: Sequence[bytes], tokens: bytes) -> None:
        """Consecutive blocks, the first of them after ``parent``."""
        size = 4 * source.block_tokens if tokens else 0
        for i, digest in enumerate(digests):
            known = self._known.get(digest)
            if known is not None:
                known.born = self._round
            else:
                one = DescribedBlock(digest, parent, tokens[i * size : i * size + size], source, self._round)
                if self._waiting:
                    one.children = self._waiting.pop(digest, None)
                self._known[digest] = one
                self._siblings(parent)[digest] = one
                self._looked_at.add(digest)
            parent = digest

    def _siblings(self, parent: bytes) -> dict[bytes, DescribedBlock]:
        if parent == ROOT:
            return self._first
        above = self._known.get(parent)
        if above is None:
            return self._waiting.setdefault(parent, {})
        if above.children is None:
            above.children = {}
        return above.children

    def look_at(self, keys: Iterable[BlockKey]) -> None:
        """Something happened to these blocks."""
        self._looked_at.update([key[:32] for key in keys])

    def look_at_all(self) -> None:
        """Anything may have happened."""
        self._looked_at.update(self._known)

    def unpublish(self) -> None:
        """Consumers believe nothing any more."""
        for one in self._known.values():
            one.published = 0
        self._looked_at.update(self._known)

    @property
    def waiting(self) -> bool:
        """Whether there are blocks to look at."""
        return bool(self._looked_at)

    def changes(self, now: float) -> list[Change]:
        """What is to be published since the last call. ``now``: the time, to leave out blocks that have expired."""
        known = self._known
        blocks = [one for digest in self._looked_at if (one := known.get(digest)) is not None]
        self._looked_at = set()
        self._locate(blocks, now)
        found: list[Change] = []
        for one in blocks:
            self._settle(one, found)
        return found

    def _locate(self, blocks: Sequence[DescribedBlock], now: float) -> None:
        """Ask the index where blocks are."""
        by_source: dict[BlockSource, list[DescribedBlock]] = {}
        for one in blocks:
            by_source.setdefault(one.source, []).append(one)
        for source, some in by_source.items():
            for start in range(0, len(some), _AT_ONCE):
                if start:
                    rest()
                part = some[start : start + _AT_ONCE]
                for one, here in zip(part, _places(source, part, now), strict=True):
                    one.here = here

    def _settle(self, first: DescribedBlock, found: list[Change]) -> None:
        """Publish a block as what it is, and its descendants if this decides whether they can be."""
        blocks = [first]
        while blocks:
            one = blocks.pop()
            above = self._known.get(one.parent)
            now = one.here if one.parent == ROOT or (above is not None and above.published) else 0
            before, one.published = one.published, now
            if now == before:
                continue
            found.append((one, before, now))
            if one.children and (not now or not before):
                blocks.extend(one.children.values())

    def published(self) -> Iterator[Change]:
        """All published blocks, parents before children, as if they had just been published."""
        blocks = list(self._first.values())
        while blocks:
            one = blocks.pop()
            if one.published:
                yield one, 0, one.published
                if one.children:
                    blocks.extend(one.children.values())

    def clean(self, now: float) -> None:
        """Forget blocks that are in no tier, if there are many descriptions. One that was described lately is kept: it
        may be stored in a moment. Call it when there is nothing to look at."""
        if len(self._known) < self._clean_at:
            return
        self._locate(list(self._known.values()), now)
        for one in list(self._known.values()):
            if not one.here and not one.published and one.born < self._round:
                self._forget(one)
        self._round += 1
        self._clean_at = max(_LEAST, len(self._known) + len(self._known) // 2)
        self._looked_at = set(self._known)  # what was found out just now is not published yet

    def _forget(self, one: DescribedBlock) -> None:
        del self._known[one.digest]
        siblings = self._siblings(one.parent)
        del siblings[one.digest]
        if not siblings:
            self._waiting.pop(one.parent, None)
        if one.children:
            self._waiting[one.digest] = one.children


def _places(source: BlockSource, blocks: Sequence[DescribedBlock], now: float) -> list[int]:
    index = source.index
    here = np.full(len(blocks), 0xFF, np.uint8)
    with index.lock:
        for ending, identity in source.groups:
            rows = index.own_rows([BlockKey(one.digest + ending) for one in blocks], identity)
            of_group = np.zeros(len(blocks), np.uint8)
            for tier, place in source.places:
                of_group |= (index.state[tier][rows] == SEALED).view(np.uint8) * np.uint8(place)
            if index.mortal:
                of_group[index.expiry[rows] <= now] = 0
            here &= of_group
    return [int(places) for places in here.tolist()]
