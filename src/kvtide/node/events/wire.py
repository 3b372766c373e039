"""The bytes of KV events, as vLLM's publisher sends them and routers expect them; docs/events.md specifies them.

A batch is ``[time, events, rank]`` in MessagePack. An event is a map whose ``type`` is its name (vLLM from 0.24 on), or
an array that begins with it (before, and SGLang). Consumers drop a whole batch with an event that they do not know, and
take a hash only as an unsigned number of 64 bits: so there are no other kinds of events and no other hashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvtide.node.events.described import NONE, BlockColumns, Change

__all__ = ["BATCH", "CPU", "DISK", "REMOTE", "BatchEncoder", "cuts"]

CPU: Final = 1
DISK: Final = 2
REMOTE: Final = 4
_NAMES = {CPU: ("CPU", "LOCAL"), DISK: ("STORAGE", "LOCAL"), REMOTE: ("STORAGE", "REMOTE")}
"""Medium and locality of each place. A locality is relative to the publisher."""
_CHANGED = [tuple(place for place in (CPU, DISK, REMOTE) if changed & place) for changed in range(8)]
"""The places of each set of bits."""
_COUNT = [len(places) for places in _CHANGED]
BATCH: Final = 192 << 10
"""Bytes of a batch, at most, unless one block has more."""
_MOST = 512
"""Blocks of one batch."""
_EVENT = 160
"""Bytes of an event besides hashes and token ids, about, and of a batch."""
_NIL = b"\xc0"
_encoded = msgspec.msgpack.encode
_STEP = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that the hashes of a block's pages differ."""


@dataclass(slots=True)
class _Run:
    """Consecutive blocks that are published for one place."""

    place: int
    stored: bool
    blocks: list[int]


class BatchEncoder:
    """Makes the bytes of batches. For one thread: its memory is used again for the next batch, because the pages of new
    memory cost more than the work.

    What is around hashes and tokens is the same in most events of a kind, so it is encoded once.
    """

    def __init__(self, *, maps: bool) -> None:
        self._maps = maps
        self._hashed = _Numbers(">u8", 0xCF)
        self._wide, self._narrow = _Numbers(">u4", 0xCE), _Numbers(">u2", 0xCD)
        self._cleared = self._begin("AllBlocksCleared", 1)
        hashes = self._field("block_hashes")
        self._stored = self._begin("BlockStored", 10 if maps else 8) + hashes
        self._salted = self._begin("BlockStored", 10 if maps else 9) + hashes
        self._removed = self._begin("BlockRemoved", 4 if maps else 3) + hashes
        self._parent, self._tokens, self._size = map(self._field, ("parent_block_hash", "token_ids", "block_size"))
        self._lora, self._lora_name = self._field("lora_id") + _NIL, self._field("lora_name") + _NIL
        self._extras = self._field("extra_keys")
        self._where = {place: self._place(place) for place in _NAMES}
        self.stored = self.removed = 0
        """Blocks in the last batch that were told as stored, and as removed; once for each place."""

    def _begin(self, kind: str, fields: int) -> bytes:
        """The beginning of an event that has so many fields, with its name."""
        return bytes([(0x80 if self._maps else 0x90) | fields]) + self._field("type") + _encoded(kind)

    def _field(self, name: str) -> bytes:
        return _encoded(name) if self._maps else b""

    def _place(self, place: int) -> tuple[bytes, bytes]:
        """The medium; and the locality, which arrays do not have."""
        medium, locality = _NAMES[place]
        return (
            self._field("medium") + _encoded(medium),
            self._field("locality") + _encoded(locality) if self._maps else b"",
        )

    def payload(self, time: float, columns: BlockColumns, changes: Sequence[Change], *, fresh: bool = False) -> bytes:
        """A batch of changes. ``fresh``: consumers first forget what they knew."""
        runs = _runs(columns, changes)
        self.stored = sum([len(run.blocks) for run in runs if run.stored])
        self.removed = sum([len(run.blocks) for run in runs]) - self.stored
        parts: list[bytes | memoryview] = [b"\x93", _encoded(time), _head(len(runs) + fresh)]
        if fresh:
            parts.append(self._cleared)
        if runs:
            self._hashed.encode(_hashes(columns, runs))
            ids = np.frombuffer(b"".join([some for run in runs if run.stored for some in _tokens(columns, run)]), "<u4")
            tokens = self._wide if len(ids) and int(ids.max()) > 0xFFFF else self._narrow
            tokens.encode(ids)
            for run in runs:
                if run.stored:
                    self._add_stored(parts, columns, run, tokens)
                else:
                    pages = len(run.blocks) * columns.sources[run.blocks[0]].pages
                    parts += (self._removed, *self._hashed.array(pages), *self._where[run.place])
        parts.append(b"\0")
        return b"".join(parts)

    def cleared(self, time: float) -> bytes:
        """A batch that says that nothing is stored any more."""
        return self.payload(time, BlockColumns(), (), fresh=True)

    def nothing(self, time: float) -> bytes:
        """A batch without events."""
        return self.payload(time, BlockColumns(), ())

    def _add_stored(self, parts: list[bytes | memoryview], columns: BlockColumns, run: _Run, tokens: _Numbers) -> None:
        first, count = run.blocks[0], len(run.blocks)
        source, above = columns.sources[first], columns.parents[first]
        pages, medium, locality = count * source.pages, *self._where[run.place]
        begin, extras = self._stored, self._extras + _NIL if self._maps else b""
        if source.salt and above == NONE:
            salt = [f"dynamo-cache-salt:{source.salt}"]
            begin, extras = self._salted, self._extras + _encoded([salt, *[None] * (pages - 1)])
        parts += (
            begin,
            *self._hashed.array(pages),
            self._parent,
            _NIL if above == NONE else b"\xcf" + columns.keys[above][:8],
            self._tokens,
            *tokens.array(count * source.block_tokens if columns.tokens[first] else 0),
            self._size,
            _encoded(source.page),
            self._lora,
            medium,
            self._lora_name,
            extras,
            locality,
        )


class _Numbers:
    """Numbers as MessagePack has them, each after a byte that says how long it is. All of a batch are encoded together,
    and taken from here in the order in which they were: that takes a tenth of the time."""

    def __init__(self, kind: str, head: int) -> None:
        self._kind, self._head = np.dtype([("head", "u1"), ("number", kind)]), head
        self._made = np.empty(0, self._kind)
        self._bytes = memoryview(b"")
        self._at = 0

    def encode(self, numbers: npt.NDArray[Any]) -> None:
        if len(numbers) > len(self._made):
            self._made = np.empty(2 * len(numbers), self._kind)
            self._made["head"] = self._head
            self._bytes = self._made.view(np.uint8).data
        self._made["number"][: len(numbers)] = numbers
        self._at = 0

    def array(self, count: int) -> tuple[bytes, memoryview]:
        """The next ``count`` of them, as an array; until others are encoded."""
        start, self._at = self._at, self._at + count * self._kind.itemsize
        return _head(count), self._bytes[start : self._at]


def _head(count: int) -> bytes:
    """The beginning of an array."""
    return b"\xdd" + count.to_bytes(4, "big") if count > 0xFFFF else b"\xdc" + count.to_bytes(2, "big")


def cuts(columns: BlockColumns, changes: Sequence[Change], least: int = 1) -> list[int]:
    """Where to cut changes into portions for one batch each: the end of each. ``least``: of the size that a batch has
    otherwise, how many it may have."""
    if not changes:
        return []
    first = changes[0][0]
    source = columns.sources[first]  # all that is published has blocks and pages of the same size
    sizes = _sizes(source.pages, source.block_tokens if columns.tokens[first] else 0)
    each = [sizes[before << 3 | now] for _, before, now in changes]
    if len(each) <= _MOST and sum(each) <= BATCH:
        return [len(each)]
    ends: list[int] = []
    start = size = 0
    for at, more in enumerate(each):
        if at > start and (size + more > BATCH * least or at - start >= _MOST * least):
            ends.append(at)
            start, size = at, 0
        size += more
    return [*ends, len(changes)]


@lru_cache
def _sizes(pages: int, tokens: int) -> list[int]:
    """Bytes of a block's change, by the places where it was and is."""
    return [
        _COUNT[before ^ now] * (9 * pages + _EVENT) + _COUNT[now & ~before] * 5 * tokens
        for before in range(8)
        for now in range(8)
    ]


def _runs(columns: BlockColumns, changes: Sequence[Change]) -> list[_Run]:
    """Events that may have several blocks: stored ones each after the other. All that is removed comes last: a block
    that moves must be somewhere when one after it is stored."""
    parents, stored, removed = columns.parents, list[_Run](), dict[int, list[int]]()
    growing: dict[int, list[int]] = {}
    for block, before, now in changes:
        if before and (left := before & ~now):
            for place in _CHANGED[left]:
                if place in removed:
                    removed[place].append(block)
                else:
                    removed[place] = [block]
        if now and (reached := now & ~before):
            for place in _CHANGED[reached]:
                if place in growing and parents[block] == growing[place][-1]:
                    growing[place].append(block)
                else:
                    growing[place] = [block]
                    stored.append(_Run(place, True, growing[place]))
    return [*stored, *[_Run(place, False, blocks) for place, blocks in removed.items()]]


def _hashes(columns: BlockColumns, runs: Sequence[_Run]) -> npt.NDArray[np.uint64]:
    """The hashes of the pages of blocks. They follow from a block's name, so they are the same on every node; the last
    one is the block's own, which its children name as their parent."""
    keys, pages = columns.keys, columns.sources[runs[0].blocks[0]].pages
    names = b"".join([keys[block][:8] for run in runs for block in run.blocks])
    own = np.frombuffer(names, ">u8")
    return own if pages == 1 else (own.astype(np.uint64)[:, None] + _differences(pages)).ravel()


@lru_cache
def _differences(pages: int) -> npt.NDArray[np.uint64]:
    """What the hash of each page of a block has more than the block's own."""
    found = np.arange(1, pages + 1, dtype=np.uint64) * _STEP
    found[-1] = 0
    return found


def _tokens(columns: BlockColumns, run: _Run) -> list[memoryview]:
    """The tokens of a run, in pieces."""
    blocks, tokens, offsets = run.blocks, columns.tokens, columns.offsets
    first, last, size = blocks[0], blocks[-1], 4 * columns.sources[blocks[0]].block_tokens
    if last - first == len(blocks) - 1 and tokens[first] is tokens[last]:  # they were described together
        return [memoryview(tokens[first])[offsets[first] : offsets[last] + size]]
    return [memoryview(tokens[block])[offsets[block] : offsets[block] + size] for block in blocks]
