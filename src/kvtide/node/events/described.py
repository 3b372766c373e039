"""Blocks that clients have described, where each of them is, and what was published about them.

An event of the store names blocks by keys, from which nobody can tell tokens. So clients send what a block consists of,
and it is kept here by digest. Only descriptions of blocks that are stored are kept for long.

What is published is what the index says: an event of the store only tells that a block must be looked at again. So a
block is published after its bytes are verified and can be read, and the order in which events arrive does not matter.
Blocks are looked up a few at a time, so that whoever needs the index or the interpreter waits for a few only.

**A block is published only while its parent is.** A consumer that learns of a block before its parent, or without it,
cannot place it. If a block has left all tiers, its descendants are withdrawn too, though they may be stored: a prefix
that needs them cannot be used. They are published again when the block is back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec
import numpy as np

from kvtide.block import BlockKey
from kvtide.index.index import SEALED, Index
from kvtide.index.keys import ROOT
from kvtide.index.work_slices import rest

__all__ = ["BlockSource", "Change", "DescribedBlock", "DescribedBlocks"]

_AT_ONCE = 256
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


class DescribedBlock(msgspec.Struct, eq=False, gc=False):
    """A block, by the digest in its keys. There may be a million: the garbage collector must not visit them."""

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
        self._looked_at: dict[bytes, None] = {}
        """In the order of descriptions, so that blocks that follow each other are looked at together."""
        self._next: deque[bytes] = deque()
        """Those whose turn it is, before those of ``_looked_at``."""
        self._round = 0
        self._clean_at = _LEAST

    def __len__(self) -> int:
        return len(self._known)

    def describe(self, source: BlockSource, parent: bytes, digests: Sequence[bytes], tokens: bytes) -> None:
        """Consecutive blocks, the first of them after ``parent``."""
        size = 4 * source.block_tokens if tokens else 0
        above = self._known.get(parent)
        for i, digest in enumerate(digests):
            one = self._known.get(digest)
            if one is not None:
                one.born = self._round
            elif digest != parent:  # no block is its own parent, whatever a client says
                one = DescribedBlock(digest, parent, tokens[i * size : i * size + size], source, self._round)
                if self._waiting:
                    one.children = self._waiting.pop(digest, None)
                self._known[digest] = one
                self._children(above, parent)[digest] = one
                self._looked_at[digest] = None
            parent, above = digest, one

    def _children(self, above: DescribedBlock | None, parent: bytes) -> dict[bytes, DescribedBlock]:
        """The blocks after ``parent``, which is the block ``above``, or one that is not described."""
        if parent == ROOT:
            return self._first
        if above is None:
            return self._waiting.setdefault(parent, {})
        if above.children is None:
            above.children = {}
        return above.children

    def look_at(self, keys: Iterable[BlockKey]) -> None:
        """Something happened to these blocks."""
        self._looked_at.update(dict.fromkeys([key[:32] for key in keys]))

    def look_at_all(self) -> None:
        """Anything may have happened."""
        self._next.clear()
        self._looked_at = dict.fromkeys(self._known)

    def unpublish(self) -> None:
        """Consumers believe nothing any more."""
        for one in self._known.values():
            one.published = 0
        self.look_at_all()

    @property
    def waiting(self) -> bool:
        """Whether there are blocks to look at."""
        return bool(self._next or self._looked_at)

    def changes(self, now: float) -> list[Change]:
        """What is to be published for some of the blocks to look at. ``now``: the time, to leave out blocks that have
        expired. Each block is in it once: a consumer may apply parts of it in another order."""
        if not self._next:
            self._next, self._looked_at = deque(self._looked_at), {}
        known, take = self._known, self._next.popleft
        some = [take() for _ in range(min(_AT_ONCE, len(self._next)))]
        blocks = [one for digest in some if (one := known.get(digest)) is not None]
        self._locate(blocks, now)
        return self._settled(blocks)

    def _locate(self, blocks: Sequence[DescribedBlock], now: float) -> None:
        """Ask the index where blocks are."""
        by_source: dict[int, list[DescribedBlock]] = {}
        for one in blocks:
            by_source.setdefault(id(one.source), []).append(one)
        for some in by_source.values():
            for one, here in zip(some, _places(some[0].source, some, now), strict=True):
                one.here = here

    def _settled(self, blocks: list[DescribedBlock]) -> list[Change]:
        """Publish blocks as what they are, and their descendants if this decides whether they can be. Uses up
        ``blocks``."""
        known, found = self._known, dict[bytes, Change]()
        blocks.reverse()
        while blocks:
            one = blocks.pop()
            now, before = one.here, one.published
            if now and one.parent != ROOT:
                above = known.get(one.parent)
                now = now if above is not None and above.published else 0
            if now == before:
                continue
            one.published = now
            if one.children and (not now or not before):
                blocks.extend(one.children.values())
            if (earlier := found.pop(one.digest, None)) is not None:
                before = earlier[1]
            if now != before:
                found[one.digest] = one, before, now
        return [*found.values()]

    def published(self) -> Iterator[DescribedBlock]:
        """All published blocks, parents before children."""
        blocks = list(self._first.values())
        while blocks:
            one = blocks.pop()
            if one.published:
                yield one
                if one.children:
                    blocks.extend(one.children.values())

    def clean(self, now: float) -> None:
        """Forget blocks that are in no tier, if there are many descriptions. One that was described lately is kept: it
        may be stored in a moment."""
        if len(self._known) < self._clean_at:
            return
        absent = [one for one in self._known.values() if not one.published]
        for start in range(0, len(absent), _AT_ONCE):
            if start:
                rest()
            some = absent[start : start + _AT_ONCE]
            self._locate(some, now)
            for one in some:
                if one.here:
                    self._looked_at[one.digest] = None  # what was found out just now is not published yet
                elif one.born < self._round:
                    self._forget(one)
        self._round += 1
        self._clean_at = max(_LEAST, len(self._known) + len(self._known) // 2)

    def _forget(self, one: DescribedBlock) -> None:
        siblings = self._children(self._known.get(one.parent), one.parent)
        del siblings[one.digest], self._known[one.digest]
        self._looked_at.pop(one.digest, None)
        if not siblings:
            self._waiting.pop(one.parent, None)
        if one.children:
            self._waiting[one.digest] = one.children


def _places(source: BlockSource, blocks: Sequence[DescribedBlock], now: float) -> list[int]:
    index = source.index
    here = np.full(len(blocks), 0xFF, np.uint8)
    for ending, identity in source.groups:
        keys = cast("list[BlockKey]", [one.digest + ending for one in blocks])
        with index.lock:
            rows = index.own_rows(keys, identity)
            states = [index.state[tier][rows] for tier, _ in source.places]
            expiry = index.expiry[rows] if index.mortal else None
        of_group = np.zeros(len(blocks), np.uint8)
        for state, (_, place) in zip(states, source.places, strict=True):
            of_group |= (state == SEALED).view(np.uint8) * np.uint8(place)
        if expiry is not None:
            of_group[expiry <= now] = 0
        here &= of_group
    places: list[int] = here.tolist()
    return places
