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
_STEP = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that the hashes of a block's pages differ."""


class _Stored(msgspec.Struct, tag="BlockStored", tag_field="type"):
    block_hashes: msgspec.Raw
    parent_block_hash: int | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: None
    medium: str
    lora_name: None
    extra_keys: list[list[str] | None] | None
    locality: str


class _Removed(msgspec.Struct, tag="BlockRemoved", tag_field="type"):
    block_hashes: msgspec.Raw
    medium: str
    locality: str


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type"):
    pass


@dataclass(slots=True)
class _Run:
    """Consecutive blocks that are published for one place."""

    place: int
    stored: bool
    blocks: list[int]


class BatchEncoder:
    """Makes the bytes of batches. For one thread: its memory is used again for the next batch, because the pages of new
    memory cost more than the work."""

    def __init__(self, *, maps: bool) -> None:
        self._maps = maps
        self._hashed = _Numbers(">u8", 0xCF)
        self._wide, self._narrow = _Numbers(">u4", 0xCE), _Numbers(">u2", 0xCD)
        self._into = msgspec.msgpack.Encoder().encode_into
        self._encoded = bytearray(BATCH)
        self.stored = self.removed = 0
        """Blocks in the last batch that were told as stored, and as removed; once for each place."""

    def payload(self, time: float, columns: BlockColumns, changes: Sequence[Change], *, fresh: bool = False) -> bytes:
        """A batch of changes. ``fresh``: consumers first forget what they knew."""
        events: list[Any] = [_Cleared()] if fresh else []
        runs = _runs(columns, changes)
        self.stored = sum([len(run.blocks) for run in runs if run.stored])
        self.removed = sum([len(run.blocks) for run in runs]) - self.stored
        if runs:
            self._hashed.encode(_hashes(columns, runs))
            ids = np.frombuffer(b"".join([some for run in runs if run.stored for some in _tokens(columns, run)]), "<u4")
            tokens = self._wide if len(ids) and int(ids.max()) > 0xFFFF else self._narrow
            tokens.encode(ids)
            events += [
                (self._stored(columns, run, tokens) if run.stored else self._removed(columns, run)) for run in runs
            ]
        self._into([time, events if self._maps else [_array(event) for event in events], 0], self._encoded)
        return bytes(self._encoded)

    def cleared(self, time: float) -> bytes:
        """A batch that says that nothing is stored any more."""
        return self.payload(time, BlockColumns(), (), fresh=True)

    def nothing(self, time: float) -> bytes:
        """A batch without events."""
        return self.payload(time, BlockColumns(), ())

    def _stored(self, columns: BlockColumns, run: _Run, tokens: _Numbers) -> _Stored:
        first, count = run.blocks[0], len(run.blocks)
        source, above = columns.sources[first], columns.parents[first]
        pages = count * source.pages
        medium, locality = _NAMES[run.place]
        extras: list[list[str] | None] | None = None
        if source.salt and above == NONE:
            extras = [[f"dynamo-cache-salt:{source.salt}"], *[None] * (pages - 1)]
        parent = None if above == NONE else int.from_bytes(columns.keys[above][:8], "big")
        ids = tokens.array(count * source.block_tokens if columns.tokens[first] else 0)
        return _Stored(self._hashed.array(pages), parent, ids, source.page, None, medium, None, extras, locality)

    def _removed(self, columns: BlockColumns, run: _Run) -> _Removed:
        pages = len(run.blocks) * columns.sources[run.blocks[0]].pages
        return _Removed(self._hashed.array(pages), *_NAMES[run.place])


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

    def array(self, count: int) -> msgspec.Raw:
        """The next ``count`` of them, as an array."""
        head = b"\xdd" + count.to_bytes(4, "big") if count > 0xFFFF else b"\xdc" + count.to_bytes(2, "big")
        start, self._at = self._at, self._at + count * self._kind.itemsize
        return msgspec.Raw(b"".join((head, self._bytes[start : self._at])))


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
        for place in _CHANGED[before & ~now]:
            if place in removed:
                removed[place].append(block)
            else:
                removed[place] = [block]
        for place in _CHANGED[now & ~before]:
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


def _array(event: Any) -> list[Any]:
    match event:
        case _Stored():
            common = [event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size, None]
            more = [event.extra_keys] if event.extra_keys is not None else []
            return ["BlockStored", *common, event.medium, None, *more]
        case _Removed():
            return ["BlockRemoved", event.block_hashes, event.medium]
        case _:
            return ["AllBlocksCleared"]
