"""Traces of requests: which blocks each prompt had, and when.

Read as they are, gzipped or not:

- Mooncake's JSON lines: ``timestamp`` (ms), ``input_length``, ``hash_ids``. A last block that is not full is left out,
  as engines never keep it.
- JSON lines of agents: ``app``, ``ts`` (us), ``hash_ids``. Applications that ran at different times are laid side by
  side.
- KV events as vLLM and SGLang publish them, as JSON lines or msgpack: see ``kvtide.replay.events``.

A block's number need only be unique under its parent; ``chains`` gives each block, with its whole prefix, a number of
its own.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvtide.errors import TraceError
from kvtide.replay.events import Event, batch, batches, requests

__all__ = ["Request", "Trace", "chains", "read"]

_MOONCAKE_TOKENS = 512


class Request(NamedTuple):
    """A prompt: when it came, in seconds, and its full blocks in order."""

    seconds: float
    blocks: tuple[int | str | bytes, ...]


class Trace(NamedTuple):
    """Requests in order of time; each block's number stands for its whole prefix."""

    seconds: npt.NDArray[np.float64]
    blocks: list[npt.NDArray[np.int64]]
    unique: int


class _Line(msgspec.Struct):
    """A request of either kind of JSON lines; what is not there is None."""

    hash_ids: tuple[int | str, ...] | None = None
    timestamp: float | None = None
    input_length: int | None = None
    app: str = ""
    ts: float | None = None
    type: str | None = None
    events: Any = None


def read(path: Path, progress: Callable[[int], None] = lambda _: None) -> Iterator[Request]:
    """The requests of a trace; those of agents and events in order of time, others as they come.

    ``progress`` gets the bytes of the file that were read so far. Raises ``TraceError``.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            stream: io.BufferedReader[Any] = io.BufferedReader(gzip.GzipFile(fileobj=raw)) if packed else raw
            yield from _read(path, stream, lambda: progress(raw.tell()))
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error


def _read(path: Path, stream: io.BufferedReader[Any], tell: Callable[[], None]) -> Iterator[Request]:
    start = stream.peek(64)[:64]
    if not start:
        raise TraceError(f"{path} is empty")
    if start.lstrip()[:1] not in (b"{", b"["):
        if start.startswith(b"TIMESTAMP,"):
            raise TraceError(f"{path} has arrivals and lengths only: without the blocks of each prompt nothing can hit")
        yield from _in_order(Request(*r) for r in requests(batches(path, stream, tell)))
        return
    lines = _lines(path, stream, tell)
    first = next(lines)
    lines = _chain(first, lines)
    if isinstance(first[1], _Line) and first[1].app:
        yield from _agents(path, lines)
    elif isinstance(first[1], _Line):
        for number, line in lines:
            yield from _mooncake(path, number, line)
    else:
        yield from _in_order(Request(*r) for r in requests(line for _, line in lines if not isinstance(line, _Line)))


def _chain(first: tuple[int, Any], rest: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    yield first
    yield from rest


def _in_order(found: Iterable[Request]) -> Iterator[Request]:
    yield from sorted(found, key=lambda request: request.seconds)


def _lines(
    path: Path, stream: io.BufferedReader[Any], tell: Callable[[], None]
) -> Iterator[tuple[int, _Line | tuple[float, list[Event]]]]:
    decode = msgspec.json.Decoder(_Line).decode
    for number, line in enumerate(stream, 1):
        if not number % 1000:
            tell()
        if not line.strip():
            continue
        try:
            if line.lstrip()[:1] == b"[":
                yield number, batch(msgspec.json.decode(line))
                continue
            found = decode(line)
            if found.events is not None or found.type is not None:
                yield number, batch(msgspec.json.decode(line))
                continue
        except (msgspec.DecodeError, ValueError, TypeError) as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
        if found.hash_ids is None:
            raise TraceError(f"{path}, line {number}: a request without hash_ids; see docs/replay.md for what is read")
        yield number, found
    tell()


def _mooncake(path: Path, number: int, line: Any) -> Iterator[Request]:
    if not isinstance(line, _Line) or line.hash_ids is None or line.timestamp is None:
        raise TraceError(f"{path}, line {number}: a request needs timestamp and hash_ids")
    if line.input_length is not None and line.input_length < 0:
        raise TraceError(f"{path}, line {number}: a prompt of {line.input_length} tokens")
    full = len(line.hash_ids) if line.input_length is None else line.input_length // _MOONCAKE_TOKENS
    if blocks := line.hash_ids[:full]:
        yield Request(line.timestamp / 1000, blocks)


def _agents(path: Path, lines: Iterator[tuple[int, Any]]) -> Iterator[Request]:
    found: list[tuple[str, float, tuple[int | str, ...]]] = []
    first: dict[str, float] = {}
    for number, line in lines:
        if not isinstance(line, _Line) or line.hash_ids is None or line.ts is None:
            raise TraceError(f"{path}, line {number}: a request of an agent needs app, ts and hash_ids")
        first[line.app] = min(first.get(line.app, line.ts), line.ts)
        found.append((line.app, line.ts, line.hash_ids))
    # By whole microseconds: seconds would round some to the same moment.
    found.sort(key=lambda r: r[1] - first[r[0]])
    yield from (Request((ts - first[app]) / 1e6, blocks) for app, ts, blocks in found if blocks)


def chains(found: Iterable[Request]) -> Trace:
    """All requests of a trace, their blocks as numbers that stand for whole prefixes."""
    names: dict[tuple[int, int | str | bytes], int] = {}
    seconds, blocks = [], []
    for request in found:
        parent, chain = -1, []
        for block in request.blocks:
            parent = names.setdefault((parent, block), len(names))
            chain.append(parent)
        seconds.append(request.seconds)
        blocks.append(np.array(chain, np.int64))
    return Trace(np.array(seconds), blocks, len(names))
