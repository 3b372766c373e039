"""Reconstructs requests from an engine's KV events: the blocks that it computed, with their prefixes.

An engine reports when blocks are stored in its own memory, each with its parent. A prompt's new blocks are in one event
or in several, each beginning where the last one ended; together with their ancestors they form the request. Prompts
that the engine had completely in its own memory are not seen: they would not have reached kvtide either.

Events are maps (vLLM from 0.24 on) or arrays (before, and SGLang), in batches ``[time, events, rank]``, one per JSON
line or as consecutive msgpack objects. Media other than the engine's own memory are ignored; without any of that, as in
the events of a kvtide node, the first medium is read.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvtide.errors import TraceError

__all__ = ["Event", "batch", "batches", "requests"]

_GROWING = 60.0
"""Seconds without new blocks after which a chain is taken as a complete request."""
_OWN = "GPU"

Block = int | str | bytes


@dataclass(frozen=True, slots=True)
class Event:
    """Blocks that were stored after ``parent``. Empty for other kinds of events."""

    blocks: tuple[Block, ...] = ()
    parent: Block | None = None
    tokens: int = 0
    """Tokens per block; 0: unknown."""
    medium: str = _OWN


def batch(found: Any) -> tuple[float, list[Event]]:
    """A decoded batch of events, or a single event. Raises ``ValueError``."""
    if isinstance(found, Mapping):
        if "events" in found:
            return float(found.get("ts", 0.0)), [_event(e) for e in found["events"]]
        return float(found.get("ts", 0.0)), [_event(found)]
    if isinstance(found, Sequence) and len(found) >= 2 and isinstance(found[0], (int, float)):
        return float(found[0]), [_event(e) for e in found[1]]
    raise ValueError("this is no batch of KV events")


def _event(found: Any) -> Event:
    if isinstance(found, Mapping):
        kind, fields = found.get("type"), found
    elif isinstance(found, Sequence) and found and isinstance(found[0], str):
        names = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
        kind, fields = found[0], dict(zip(names, found[1:], strict=False))
    else:
        raise ValueError("an event is neither a map nor an array that begins with its name")
    if kind in ("BlockRemoved", "AllBlocksCleared"):
        return Event()
    if kind != "BlockStored":
        raise ValueError(f"an event of unknown kind {kind!r}")
    blocks = fields.get("block_hashes")
    if not isinstance(blocks, (list, tuple)) or not blocks:
        raise ValueError("BlockStored without block_hashes")
    parent = fields.get("parent_block_hash")
    if not all(isinstance(one, Block) for one in blocks) or not isinstance(parent, Block | None):
        raise ValueError("a hash is neither a number nor text nor bytes")
    tokens = fields.get("block_size") or 0
    if not isinstance(tokens, int) or tokens < 0:
        raise ValueError(f"block_size is {tokens!r}, no number of tokens")
    return Event(tuple(blocks), parent, tokens, str(fields.get("medium") or _OWN))


def batches(
    path: Path, stream: io.BufferedReader[Any], tell: Callable[[], None]
) -> Iterator[tuple[float, list[Event]]]:
    """Batches in consecutive msgpack objects."""
    data = stream.read()  # an object's end is only known by parsing it
    tell()
    at = number = 0
    while at < len(data):
        number += 1
        try:
            end = _end(data, at)
            yield batch(msgspec.msgpack.decode(memoryview(data)[at:end]))
        except (msgspec.DecodeError, ValueError, TypeError, IndexError) as error:
            raise TraceError(f"{path}, object {number} at byte {at}: {error}") from error
        at = end


_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8}
_FIXED |= {0xCC + i: 1 << i for i in range(4)} | {0xD0 + i: 1 << i for i in range(4)}
_FIXED |= {0xD4 + i: 1 + (1 << i) for i in range(5)}
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_MANY = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def _end(data: bytes, at: int) -> int:
    """The end of the msgpack object that begins at ``at``."""
    left = 1
    while left:
        left -= 1
        first = data[at]
        at += 1
        if first < 0x80 or first >= 0xE0:
            continue
        if first < 0xA0:
            left += (first & 15) * (2 if first < 0x90 else 1)
        elif first < 0xC0:
            at += first & 31
        elif first in _FIXED:
            at += _FIXED[first]
        elif first in _SIZED:
            width = _SIZED[first]
            at += width + int.from_bytes(data[at : at + width], "big")
        elif first in _MANY:
            width, each = _MANY[first]
            left += each * int.from_bytes(data[at : at + width], "big")
            at += width
        else:
            raise ValueError(f"byte {first:#x} begins nothing that an engine publishes")
    if at > len(data):
        raise ValueError("the file ends inside it")
    return at


def requests(found: Iterable[tuple[float, list[Event]]]) -> Iterator[tuple[float, tuple[Block, ...]]]:
    """Complete requests, each after a time without new blocks."""
    parents: dict[Block, Block | None] = {}
    growing: OrderedDict[Block, tuple[float, float]] = OrderedDict()
    """By last block: when the chain began and when it last grew; the longest unchanged first."""
    medium = ""
    for seconds, events in found:
        while growing:
            tail, (began, grew) = next(iter(growing.items()))
            if grew > seconds - _GROWING:
                break
            del growing[tail]
            yield began, _whole(tail, parents)
        for event in events:
            if not event.blocks:
                continue
            medium = event.medium if not medium or event.medium == _OWN else medium
            if event.medium != medium:
                continue
            parent = event.parent
            began, _ = growing.pop(parent, (seconds, seconds)) if parent is not None else (seconds, seconds)
            for block in event.blocks:
                parents[block], parent = parent, block
            growing[event.blocks[-1]] = began, seconds
    for tail, (began, _) in growing.items():
        yield began, _whole(tail, parents)


def _whole(tail: Block, parents: Mapping[Block, Block | None]) -> tuple[Block, ...]:
    chain: list[Block] = []
    block: Block | None = tail
    while block is not None and len(chain) <= len(parents):
        chain.append(block)
        block = parents.get(block)
    return tuple(reversed(chain))
