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

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import cast

import numpy as np

from kvtide.block import BlockKey
from kvtide.index.index import SEALED, Index
from kvtide.index.keys import ROOT
from kvtide.index.work_slices import rest

__all__ = ["NONE", "BlockColumns", "BlockSource", "Change", "DescribedBlocks"]

_AT_ONCE = 256
"""Blocks that are looked up under the index's lock at a time."""
_STEPS = 1024
"""Blocks that are gone through without a pause: those who need the interpreter wait for about a millisecond."""
_LEAST = 16384
"""Descriptions from which on those of absent blocks are looked for."""
_AGE = 120.0
"""Seconds that the description of an absent block is kept: twice the time after which clients repeat it."""
_ABSENT = 1 << 16
"""Descriptions of absent blocks that are kept, at most."""
NONE, UNKNOWN = -1, -2
"""Instead of the number of a block's parent: it has none, or one that is not described."""


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

    @property
    def pages(self) -> int:
        """Blocks in events for each of its blocks."""
        return self.block_tokens // self.page


Change = tuple[int, int, int]
"""A block, the bits of the places where it was published before, and of those where it is published now."""


class BlockColumns:
    """What blocks consist of, by their numbers. There may be a million of them: lists of numbers and of bytes cost a
    part of what objects would, and the garbage collector does not visit what is in them. Blocks are only added."""

    def __init__(self) -> None:
        self.keys: list[BlockKey] = []
        """In the first group; the digest comes first in it."""
        self.parents: list[int] = []
        """The number of the block before it, or ``NONE``, or ``UNKNOWN``. Blocks that are described together follow
        each other, so most have the number before their own here."""
        self.tokens: list[bytes] = []
        """As u32 little-endian: those of each block, and maybe of others; empty if the operator does not allow them."""
        self.offsets: list[int] = []
        """Where each block's own begin there."""
        self.sources: list[BlockSource] = []


class DescribedBlocks:
    """For one thread."""

    def __init__(self) -> None:
        self.columns = BlockColumns()
        """Replaced when blocks are forgotten, which then get other numbers."""
        self._known: dict[BlockKey, int] = {}
        """The numbers of blocks, by their keys in the first group."""
        self._here = bytearray()
        """Of each block, the bits of the places where it is."""
        self._published = bytearray()
        """Of each block, the bits of the places where consumers believe it to be."""
        self._born: list[float] = []
        """When each was described last."""
        self._children: dict[int, list[int]] = {}
        """Of each block, those after it, besides one that has the next number."""
        self._waiting: dict[bytes, list[int]] = {}
        """Children of parents that are not described, by the parent's digest."""
        self._looked_at: dict[int, None] = {}
        """In the order of descriptions, so that blocks that follow each other are looked at together."""
        self._next: deque[int] = deque()
        """Those whose turn it is, before those of ``_looked_at``."""
        self._all = range(0)
        """Those to look at because anything may have happened, before the others. Not a list of them: the node's loop
        would wait while one of a million is made."""
        self._unsettled: list[int] = []
        """Blocks that were looked up, and descendants of those that have come or gone: the next one is the last."""
        self._clean_at = _LEAST

    def __len__(self) -> int:
        return len(self._known)

    def describe(
        self, source: BlockSource, parent: bytes, digests: Sequence[bytes], tokens: bytes, now: float = 0.0
    ) -> None:
        """Consecutive blocks, the first of them after ``parent``. ``now``: in seconds, as for ``clean``."""
        known, size = self._known, 4 * source.block_tokens if tokens else 0
        ending = source.groups[0][0]
        keys = cast("list[BlockKey]", [digest + ending for digest in digests])
        if known.keys().isdisjoint(keys) and len({parent, *digests}) == len(digests) + 1:
            self._add(source, parent, keys, tokens, size, now)
            return
        for i, (key, digest) in enumerate(zip(keys, digests, strict=True)):
            number = known.get(key)
            if number is not None:
                self._born[number] = now
            elif digest != parent:  # no block is its own parent, whatever a client says
                self._add(source, parent, [key], tokens[i * size : i * size + size], size, now)
            parent = digest

    def _add(
        self, source: BlockSource, parent: bytes, keys: Sequence[BlockKey], tokens: bytes, size: int, now: float
    ) -> None:
        """Blocks that are not known."""
        columns, first, count = self.columns, len(self.columns.keys), len(keys)
        numbers = range(first, first + count)
        above = NONE
        if parent != ROOT:
            above = self._known.get(BlockKey(parent + source.groups[0][0]), UNKNOWN)
        if above == UNKNOWN:
            self._waiting.setdefault(parent, []).append(first)
        elif above not in (NONE, first - 1):
            self._children.setdefault(above, []).append(first)
        self._known.update(zip(keys, numbers, strict=True))
        columns.keys += keys
        columns.parents.append(above)
        columns.parents += numbers[:-1]
        columns.tokens += [tokens] * count
        columns.offsets += range(0, size * count, size) if size else [0] * count
        columns.sources += [source] * count
        self._here += bytes(count)
        self._published += bytes(count)
        self._born += [now] * count
        self._looked_at.update(dict.fromkeys(numbers))
        if self._waiting:
            for number, key in zip(numbers, keys, strict=True):
                for child in self._waiting.pop(key[:32], ()):
                    columns.parents[child] = number
                    self._children.setdefault(number, []).append(child)

    def look_at(self, keys: Sequence[BlockKey]) -> None:
        """Something happened to these blocks, in any group."""
        if self.columns.sources and len(groups := self.columns.sources[0].groups) > 1:
            ending = groups[0][0]
            keys = [BlockKey(key[:32] + ending) for key in keys]
        numbers: dict[int | None, None] = dict.fromkeys(map(self._known.get, keys))
        numbers.pop(None, None)
        self._looked_at.update(cast("dict[int, None]", numbers))

    def look_at_all(self) -> None:
        """Anything may have happened."""
        self._next.clear()
        self._looked_at = {}
        self._all = range(len(self._known))

    def unpublish(self) -> None:
        """Consumers believe nothing any more. Where blocks are is forgotten, too: it may be old by the time that it is
        told, and all descendants of a block would be published with it in one go."""
        self._here, self._published = bytearray(len(self._known)), bytearray(len(self._known))
        self._all = range(0)
        self._unsettled = []

    @property
    def waiting(self) -> bool:
        """Whether there are blocks to look at."""
        return bool(self._unsettled or self._all or self._next or self._looked_at)

    @property
    def unsettled(self) -> bool:
        """Whether descendants of a block are still to be published or withdrawn with it."""
        return bool(self._unsettled)

    def changes(self, now: float) -> list[Change]:
        """What is to be published for some of the blocks to look at. ``now``: the time, to leave out blocks that have
        expired. Each block is in it once: a consumer may apply parts of it in another order."""
        if not self._unsettled:
            if self._all:
                blocks, self._all = [*self._all[:_AT_ONCE]], self._all[_AT_ONCE:]
            else:
                if not self._next:
                    self._next, self._looked_at = deque(self._looked_at), {}
                take = self._next.popleft
                blocks = [take() for _ in range(min(_AT_ONCE, len(self._next)))]
            self._locate(blocks, now)
            blocks.reverse()
            self._unsettled = blocks
        return self._settled()

    def _locate(self, blocks: Sequence[int], now: float) -> None:
        """Ask the index where blocks are."""
        keys, sources, here = self.columns.keys, self.columns.sources, self._here
        of = {*map(sources.__getitem__, blocks)}
        for source in of:
            some = blocks if len(of) == 1 else [one for one in blocks if sources[one] is source]
            for one, places in zip(some, _places(source, [keys[one] for one in some], now), strict=True):
                here[one] = places

    def _settled(self) -> list[Change]:
        """Publish some blocks as what they are, and their descendants if this decides whether they can be."""
        blocks = self._unsettled
        parents, children, end = self.columns.parents, self._children, len(self._known) - 1
        here, published, found = self._here, self._published, dict[int, Change]()
        while blocks and len(found) < _AT_ONCE:
            one = blocks.pop()
            now, before = here[one], published[one]
            if now:
                above = parents[one]
                if above == UNKNOWN or (above != NONE and not published[above]):
                    now = 0
            if now == before:
                continue
            published[one] = now
            if not now or not before:
                if one in children:
                    blocks += children[one]
                after = one + 1
                if one < end and parents[after] == one and (not blocks or blocks[-1] != after):
                    blocks.append(after)
            if (earlier := found.pop(one, None)) is not None:
                before = earlier[1]
            if now != before:
                found[one] = one, before, now
        return [*found.values()]

    def published(self) -> tuple[array[int], bytes]:
        """All published blocks, parents before children, and the places of each. Not while some are ``unsettled``."""
        parents, children, published, end = self.columns.parents, self._children, self._published, len(self._known) - 1
        found, steps = array("l"), 0
        for first in [number for number, above in enumerate(parents) if above == NONE]:
            blocks = [first]
            while blocks:
                steps += 1
                if not steps % _STEPS:
                    rest()
                one = blocks.pop()
                if published[one]:
                    found.append(one)
                    if one in children:
                        blocks += children[one]
                    if one < end and parents[one + 1] == one:
                        blocks.append(one + 1)
        return found, bytes(map(published.__getitem__, found))

    def clean(self, time_now: float, now: float) -> None:
        """Forget blocks that are in no tier, if there are many descriptions. One that was described lately is kept: it
        may be stored in a moment, or again, and its client would not describe it again."""
        if len(self._known) < self._clean_at or self._unsettled:
            return
        absent = [one for one, places in enumerate(self._published) if not places and one not in self._all]
        absent.sort(key=self._born.__getitem__)
        absent = absent[: max(len(absent) - _ABSENT, bisect_left(absent, now - _AGE, key=self._born.__getitem__))]
        for start in range(0, len(absent), _AT_ONCE):
            if start:
                rest()
            self._locate(absent[start : start + _AT_ONCE], time_now)
        looked_at = [*self._next, *self._looked_at, *[one for one in absent if self._here[one]]]
        keep = [True] * len(self._known)
        for one in absent:
            keep[one] = bool(self._here[one])
        if not all(keep):
            self._forget(keep, looked_at)
        else:
            self._looked_at = dict.fromkeys(looked_at)
            self._next.clear()
        self._clean_at = max(_LEAST, len(self._known) + len(self._known) // 2)

    def _forget(self, keep: Sequence[bool], looked_at: Iterable[int]) -> None:
        """Keep some blocks only, under new numbers, and some of them to look at."""
        old, new = self.columns, BlockColumns()
        new.keys, new.sources = [*compress(old.keys, keep)], [*compress(old.sources, keep)]
        numbers = (np.cumsum(keep) - 1).tolist()
        # Tokens of forgotten blocks are not kept for the sake of others that were described with them.
        whole = {id(tokens) for tokens in old.tokens} - {
            id(t) for t, kept in zip(old.tokens, keep, strict=True) if not kept
        }
        for tokens, offset, source in compress(zip(old.tokens, old.offsets, old.sources, strict=True), keep):
            if tokens and id(tokens) not in whole:
                tokens, offset = tokens[offset : offset + 4 * source.block_tokens], 0
            new.tokens.append(tokens)
            new.offsets.append(offset)
        self._known = dict(zip(new.keys, range(len(new.keys)), strict=True))
        self._children, waiting, self._waiting = {}, self._waiting, {}
        of = {child: digest for digest, some in waiting.items() for child in some}
        for number, above in compress(enumerate(old.parents), keep):
            mine = numbers[number]
            if above >= 0 and not keep[above]:
                of[number], above = old.keys[above][:32], UNKNOWN
            if above == UNKNOWN:
                self._waiting.setdefault(of[number], []).append(mine)
            elif above != NONE:
                above = numbers[above]
                if above != mine - 1:
                    self._children.setdefault(above, []).append(mine)
            new.parents.append(above)
        self._here, self._published = bytearray(compress(self._here, keep)), bytearray(compress(self._published, keep))
        self._born = [*compress(self._born, keep)]
        self._next.clear()
        self._looked_at = {numbers[one]: None for one in looked_at if keep[one]}
        if self._all:
            self._all = range(sum(keep[: self._all.start]), len(new.keys))
        self.columns = new


def _places(source: BlockSource, first: Sequence[BlockKey], now: float) -> list[int]:
    """Where blocks are; ``first``: their keys in the first group."""
    index = source.index
    here = np.full(len(first), 0xFF, np.uint8)
    for ending, identity in source.groups:
        keys = first if ending is source.groups[0][0] else [BlockKey(key[:32] + ending) for key in first]
        with index.lock:
            rows = index.own_rows(keys, identity)
            states = [index.state[tier][rows] for tier, _ in source.places]
            expiry = index.expiry[rows] if index.mortal else None
        of_group = np.zeros(len(keys), np.uint8)
        for state, (_, place) in zip(states, source.places, strict=True):
            of_group |= (state == SEALED).view(np.uint8) * np.uint8(place)
        if expiry is not None:
            of_group[expiry <= now] = 0
        here &= of_group
    places: list[int] = here.tolist()
    return places
