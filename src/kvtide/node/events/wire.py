"""The bytes of KV events, as vLLM's publisher sends them and routers expect them; docs/events.md specifies them.

A batch is ``[time, events, rank]`` in MessagePack. An event is a map whose ``type`` is its name (vLLM from 0.24 on), or
an array that begins with it (before, and SGLang). Consumers drop a whole batch with an event that they do not know, and
take a hash only as an unsigned number of 64 bits: so there are no other kinds of events and no other hashes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from kvtide.index.keys import ROOT
from kvtide.node.events.described import Change, DescribedBlock

__all__ = ["CPU", "DISK", "REMOTE", "cleared", "hashes", "nothing", "payload", "portions"]

CPU: Final = 1
DISK: Final = 2
REMOTE: Final = 4
_NAMES = {CPU: ("CPU", "LOCAL"), DISK: ("STORAGE", "LOCAL"), REMOTE: ("STORAGE", "REMOTE")}
"""Medium and locality of each place. A locality is relative to the publisher."""
_CHANGED = [tuple(place for place in (CPU, DISK, REMOTE) if changed & place) for changed in range(8)]
"""The places of each set of bits."""
_TOKENS = 32768
"""Tokens of the blocks of one batch, at most, unless one block has more."""
_MOST = 512
"""Blocks of one batch."""
_WORD = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
"""Odd, so that the hashes of a block's pages differ."""

_ENCODE = msgspec.msgpack.Encoder().encode


class _Stored(msgspec.Struct, tag="BlockStored", tag_field="type"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: msgspec.Raw
    block_size: int
    lora_id: None
    medium: str
    lora_name: None
    extra_keys: list[list[str] | None] | None
    locality: str


class _Removed(msgspec.Struct, tag="BlockRemoved", tag_field="type"):
    block_hashes: list[int]
    medium: str
    locality: str


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type"):
    pass


@dataclass(slots=True)
class _Run:
    """Consecutive blocks that are published for one place."""

    place: int
    stored: bool
    blocks: list[DescribedBlock]


def hashes(digest: bytes, pages: int) -> list[int]:
    """The hashes of a block's pages. They follow from its name, so they are the same on every node; the last one is
    the block's own, which its children name as their parent."""
    own = int.from_bytes(digest[:8], "big")
    if pages == 1:
        return [own]
    return [*((own + i * _STEP) & _WORD for i in range(1, pages)), own]


def portions(changes: Sequence[Change], least: int = 1) -> Iterator[Sequence[Change]]:
    """Changes in portions for one batch each. ``least``: of the size that a batch has otherwise, how many it may
    have."""
    start = tokens = 0
    for i, (block, _, _) in enumerate(changes):
        if i > start and (tokens >= _TOKENS * least or i - start >= _MOST * least):
            yield changes[start:i]
            start, tokens = i, 0
        tokens += len(block.tokens) // 4
    if start < len(changes):
        yield changes[start:]


def payload(time: float, changes: Sequence[Change], *, maps: bool, fresh: bool = False) -> bytes:
    """A batch of changes. ``fresh``: consumers first forget what they knew."""
    events: list[Any] = [_Cleared()] if fresh else []
    events += [(_stored(run) if run.stored else _removed(run)) for run in _runs(changes, maps=maps)]
    return _ENCODE([time, events if maps else [_array(event) for event in events], 0])


def cleared(time: float, *, maps: bool) -> bytes:
    """A batch that says that nothing is stored any more."""
    return payload(time, (), maps=maps, fresh=True)


def nothing(time: float) -> bytes:
    """A batch without events."""
    return _ENCODE([time, [], 0])


def _runs(changes: Sequence[Change], *, maps: bool) -> list[_Run]:
    found: list[_Run] = []
    growing: dict[tuple[int, bool], _Run] = {}
    for block, before, now in changes:
        for place in _CHANGED[before ^ now]:
            if place == REMOTE and not maps:  # an array has no field for the locality
                continue
            stored = bool(now & place)
            run = growing.get((place, stored))
            if run is not None and _continues(run.blocks[-1], block, stored):
                run.blocks.append(block)
                continue
            run = growing[place, stored] = _Run(place, stored, [block])
            found.append(run)
    return found


def _continues(last: DescribedBlock, block: DescribedBlock, stored: bool) -> bool:
    """Whether one event may have both blocks, one after the other."""
    return last.source is block.source and (not stored or last.digest == block.parent)


def _stored(run: _Run) -> _Stored:
    first = run.blocks[0]
    source = first.source
    pages = source.block_tokens // source.page
    medium, locality = _NAMES[run.place]
    named = [one for block in run.blocks for one in hashes(block.digest, pages)]
    extras: list[list[str] | None] | None = None
    if source.salt and first.parent == ROOT:
        extras = [[f"dynamo-cache-salt:{source.salt}"], *[None] * (len(named) - 1)]
    tokens = b"".join([block.tokens for block in run.blocks])
    parent = None if first.parent == ROOT else hashes(first.parent, 1)[0]
    return _Stored(named, parent, _numbers(tokens), source.page, None, medium, None, extras, locality)


def _removed(run: _Run) -> _Removed:
    source = run.blocks[0].source
    pages = source.block_tokens // source.page
    return _Removed([one for block in run.blocks for one in hashes(block.digest, pages)], *_NAMES[run.place])


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


def _numbers(tokens: bytes) -> msgspec.Raw:
    """Token ids as an array of MessagePack, each in the same number of bytes: 30 times as fast as one by one."""
    ids = np.frombuffer(tokens, "<u4")
    count = len(ids)
    wide = bool(count) and int(ids.max()) > 0xFFFF
    size = 4 if wide else 2
    made = np.empty((count, 1 + size), np.uint8)
    made[:, 0] = 0xCE if wide else 0xCD
    made[:, 1:] = ids.astype(">u4" if wide else ">u2").view(np.uint8).reshape(count, size)
    head = b"\xdd" + count.to_bytes(4, "big") if count > 0xFFFF else b"\xdc" + count.to_bytes(2, "big")
    return msgspec.Raw(head + made.tobytes())
