"""Traces of requests: the blocks of each prompt, and the time of its arrival.

These formats are read, gzipped or not; docs/replay.md has the fields of each:

- recordings of ``kvtide node --record``: JSON lines, of which the first is a header with ``kvtide_trace``;
- Mooncake's JSON lines: ``timestamp`` (ms), ``input_length``, ``hash_ids``;
- Bailian's JSON lines: the same with ``chat_id``, and a ``timestamp`` in seconds;
- JSON lines of agents: ``app``, ``ts`` (us), ``hash_ids``. The times of all applications are shifted to begin together;
- KV events as vLLM and SGLang publish them, as JSON lines or msgpack: see ``kvtide.replay.events``.

A last block that is not full is left out, because engines never keep it. If more would have to be left out, that is an
error, because the trace then has another block size than assumed: see ``kvtide.replay.block_tokens``.

A block's number need only be unique under its parent; ``chains`` gives each block, with its tenant and its whole
prefix, a unique number.
"""

from __future__ import annotations

import io
import itertools
import logging
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvtide.errors import TraceError
from kvtide.replay.block_tokens import BlockTokenSizes, full_blocks
from kvtide.replay.events import Event, batch, batches, requests

__all__ = ["Reader", "Trace", "TraceRequest", "chains", "load", "read"]

log = logging.getLogger("kvtide.replay")

_VERSION = 1
"""Version of the traces that kvtide records."""
_MOONCAKE_TOKENS, _BAILIAN_TOKENS = 512, 16
_TURNS = ("", "tool", "end")


LARGEST = 1 << 34
"""Maximum bytes of a block: no model has larger ones."""


class TraceRequest(NamedTuple):
    """A prompt: when it arrived, in seconds, and its full blocks in order."""

    seconds: float
    blocks: tuple[int | str | bytes, ...]
    tenant: str = ""
    turn: str = ""
    """How the output ended: ``tool``, a tool call; ``end``, the end of a turn; empty: unknown."""
    returns_in: float | None = None
    """Seconds after which the prompt was expected to be used again; None: unknown."""
    have: int = 0
    """Blocks that the engine had in its own cache."""


class Trace(NamedTuple):
    """Requests in order of time; each block's number stands for its tenant and its whole prefix."""

    seconds: npt.NDArray[np.float64]
    blocks: list[npt.NDArray[np.int64]]
    unique: int
    tenants: list[str]
    turns: list[str]
    returns_in: list[float | None]
    block_tokens: int | None = None
    """Tokens per block, if the trace or the caller says so."""
    block_bytes: int | None = None
    """Bytes per block where the trace was recorded, if it says so."""
    have: Sequence[int] = ()
    """For each request, the blocks that its engine had in its own cache; empty: unknown."""

    @property
    def numbers(self) -> int:
        """All blocks have numbers below this."""
        return 1 + max((int(chain.max()) for chain in self.blocks if len(chain)), default=-1)

    def part(self, first: int) -> Trace:
        """The requests from number ``first`` on."""
        blocks = self.blocks[first:]
        return self._replace(
            seconds=self.seconds[first:],
            blocks=blocks,
            unique=len(np.unique(np.concatenate(blocks))) if blocks else 0,
            tenants=self.tenants[first:],
            turns=self.turns[first:],
            returns_in=self.returns_in[first:],
            have=self.have[first:],
        )


class _Line(msgspec.Struct):
    """A request of any JSON lines format, or a header; missing fields are None."""

    hash_ids: tuple[int | str, ...] | None = None
    timestamp: float | None = None
    input_length: int | None = None
    block_tokens: int | None = None
    chat_id: int | str | None = None
    app: str | None = None
    ts: float | None = None
    type: str | None = None
    events: Any = None
    kvtide_trace: int | str | None = None
    layout_bytes: int | None = None
    tenant: str | None = None
    turn: int | str | None = None
    """A number in Bailian's traces."""
    returns_in: float | None = None
    have: int | None = None


_Found = _Line | tuple[float, list[Event]]


class _Unpacked(io.RawIOBase):
    """Reads a gzip file as far as possible: a recording that was killed has no end marker.

    If the end marker is missing, EOFError is raised after all data that can be decompressed was returned.
    """

    def __init__(self, raw: io.BufferedReader) -> None:
        self._raw = raw
        self._unpacker = zlib.decompressobj(wbits=31)
        self._packed = b""

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        while True:
            if not self._packed:
                self._packed = self._raw.read(1 << 16)
            if self._unpacker.eof:  # another gzip member may follow
                if not self._packed:
                    return 0
                self._unpacker = zlib.decompressobj(wbits=31)
            elif not self._packed and not self._unpacker.unconsumed_tail:
                raise EOFError("it is gzip, but without an end; the file may be cut off")
            found = self._unpacker.decompress(self._packed, len(into))
            self._packed = self._unpacker.unused_data if self._unpacker.eof else self._unpacker.unconsumed_tail
            if found:
                into[: len(found)] = found
                return len(found)


class Reader:
    """The requests of a trace in order of time. Read once; raises ``TraceError``.

    ``progress`` gets the bytes of the file read so far. ``block_tokens``: tokens per block; otherwise the trace must
    say it. ``growing``: a process may still be writing the file, so an incomplete end is normal. ``most``: read only
    the last requests, those that together have so many blocks.
    """

    def __init__(
        self,
        path: Path,
        progress: Callable[[int], None],
        block_tokens: int | None,
        growing: bool = False,
        most: int | None = None,
    ) -> None:
        self.block_tokens = block_tokens
        """Known after all was read, if at all."""
        self.block_bytes: int | None = None
        self.passed_over = 0
        """Requests that were not returned because of ``most``."""
        self._level = logging.DEBUG if growing else logging.WARNING
        self._most = most
        self._path = path
        self._progress = progress
        self._source = "--block-tokens" if block_tokens else ""
        """Where ``block_tokens`` was found."""

    def __iter__(self) -> Iterator[TraceRequest]:
        try:
            with self._path.open("rb") as raw:
                packed = raw.read(2) == b"\x1f\x8b"
                raw.seek(0)
                stream: io.BufferedReader[Any] = io.BufferedReader(_Unpacked(raw)) if packed else raw
                found = self._last(self._read(stream, lambda: self._progress(raw.tell())))
        except (OSError, EOFError, zlib.error) as error:
            reason = (isinstance(error, OSError) and error.strerror) or error
            raise TraceError(f"{self._path} cannot be read: {reason}") from error
        yield from sorted(found, key=lambda request: request.seconds)

    def _last(self, requests: Iterator[TraceRequest]) -> list[TraceRequest]:
        if self._most is None:
            return list(requests)
        kept: deque[TraceRequest] = deque()
        blocks = 0
        for request in requests:
            kept.append(request)
            blocks += len(request.blocks)
            while blocks > self._most and len(kept) > 1:
                blocks -= len(kept.popleft().blocks)
                self.passed_over += 1
        return list(kept)

    def _where(self, number: int) -> str:
        return f"{self._path}, line {number}"

    def _say(self, where: str, block_tokens: int, source: str) -> None:
        """Set the tokens per block found in the trace at ``where``."""
        if block_tokens <= 0:
            raise TraceError(f"{where}: block_tokens is {block_tokens}; it must be at least 1")
        if self.block_tokens not in (None, block_tokens):
            raise TraceError(
                f"{where}: blocks of {block_tokens} tokens, but {self._source} says {self.block_tokens}: a trace must "
                f"have one size of block" + ("; leave --block-tokens out" if self._source == "--block-tokens" else "")
            )
        if self.block_tokens is None:
            self.block_tokens, self._source = block_tokens, source

    # -- detecting the format -----------------------------------------------------------------------------

    def _read(self, stream: io.BufferedReader[Any], tell: Callable[[], None]) -> Iterator[TraceRequest]:
        start = stream.peek(64)[:64]
        if not start:
            raise TraceError(f"{self._path} is empty")
        if start.lstrip()[:1] not in (b"{", b"["):
            if start.startswith(b"TIMESTAMP,"):
                raise TraceError(
                    f"{self._path} has arrivals and lengths only: without the blocks of each prompt nothing can hit"
                )
            yield from self._events(batches(self._path, stream, tell))
            return
        lines = self._lines(stream, tell)
        number, first = next(lines, (0, None))
        if first is None:
            raise TraceError(f"{self._path} has no request")
        if not isinstance(first, _Line):
            yield from self._events(self._only_events(itertools.chain([(number, first)], lines)))
            return
        if first.kvtide_trace is not None:
            self._header(self._where(number), first)
            yield from self._recorded(self._only_requests(lines))
            return
        rest = self._only_requests(itertools.chain([(number, first)], lines))
        if first.app:
            yield from self._agents(rest)
        elif first.chat_id is not None:
            yield from self._prompts(rest, _BAILIAN_TOKENS, 1.0, lambda line: line.chat_id is not None, "chat_id")
        else:
            yield from self._prompts(rest, _MOONCAKE_TOKENS, 1e-3, lambda line: line.chat_id is None, "no chat_id")

    def _lines(self, stream: io.BufferedReader[Any], tell: Callable[[], None]) -> Iterator[tuple[int, _Found]]:
        decode = msgspec.json.Decoder(_Line).decode
        recorded = False

        def whole() -> Iterator[bytes]:
            """The lines; of a gzip recording that was killed, and so has no end marker, those that can be read."""
            try:
                # not ``yield from stream``: a consumer that stops early would close it
                yield from iter(stream.readline, b"")
            except EOFError:
                if not recorded:
                    raise
                log.log(
                    self._level,
                    "%s: it has no end, as when the recording is killed; it is read up to there",
                    self._path,
                )

        for number, line in enumerate(whole(), 1):
            if not number % 1000:
                tell()
            if not line.strip():
                continue
            try:
                if line.lstrip()[:1] == b"[":
                    yield number, batch(msgspec.json.decode(line))
                    continue
                found = decode(line)
                recorded = recorded or found.kvtide_trace is not None
                # Bailian's requests have a type too: that of the request.
                if found.events is not None or (found.type is not None and found.hash_ids is None):
                    yield number, batch(msgspec.json.decode(line))
                    continue
            except (msgspec.DecodeError, ValueError, TypeError) as error:
                if recorded and not line.endswith(b"\n"):
                    log.log(
                        self._level,
                        "%s: the last line is cut off, as when the recording is killed; it is left out",
                        self._where(number),
                    )
                    break
                raise TraceError(f"{self._where(number)}: {error}") from error
            yield number, found
        tell()

    def _only_requests(self, lines: Iterator[tuple[int, _Found]]) -> Iterator[tuple[str, _Line]]:
        for number, line in lines:
            where = self._where(number)
            if not isinstance(line, _Line):
                raise TraceError(f"{where}: KV events among requests; a trace must be of one kind")
            if line.kvtide_trace is not None:
                raise TraceError(f"{where}: the header of another recording; replay each on its own")
            if line.hash_ids is None:
                raise TraceError(f"{where}: a request without hash_ids; see docs/replay.md for what is read")
            if line.input_length is not None and line.input_length < 0:
                raise TraceError(f"{where}: a prompt of {line.input_length} tokens")
            yield where, line

    def _only_events(self, lines: Iterator[tuple[int, _Found]]) -> Iterator[tuple[float, list[Event]]]:
        for number, line in lines:
            if isinstance(line, _Line):
                raise TraceError(f"{self._where(number)}: no KV event among KV events; a trace must be of one kind")
            yield line

    # -- formats ------------------------------------------------------------------------------------------

    def _events(self, found: Iterator[tuple[float, list[Event]]]) -> Iterator[TraceRequest]:
        tokens: set[int] = set()

        def seen() -> Iterator[tuple[float, list[Event]]]:
            for seconds, events in found:
                tokens.update(event.tokens for event in events if event.tokens)
                yield seconds, events

        yield from (TraceRequest(seconds, blocks) for seconds, blocks in requests(seen()))
        if self.block_tokens is not None and tokens and self.block_tokens not in tokens:
            raise TraceError(
                f"{self._path}: events of blocks of {', '.join(map(str, sorted(tokens)))} tokens, but --block-tokens "
                f"says {self.block_tokens}; leave it out"
            )
        if len(tokens) == 1:  # a model with several kinds of layers may have blocks of several sizes
            self._say(f"{self._path}", tokens.pop(), "the trace")

    def _prompts(
        self,
        lines: Iterator[tuple[str, _Line]],
        usual: int,
        unit: float,
        alike: Callable[[_Line], bool],
        wanted: str,
    ) -> Iterator[TraceRequest]:
        """Requests with a time, and usually a length. ``unit``: seconds per unit of time."""
        held: list[tuple[str, _Line]] = []
        sizes = BlockTokenSizes()
        for where, line in lines:
            if line.timestamp is None:
                raise TraceError(f"{where}: a request needs timestamp and hash_ids")
            if not alike(line):
                raise TraceError(f"{where}: the first request has {wanted}, this one does not: two kinds of traces")
            if line.block_tokens is not None:
                self._say(where, line.block_tokens, where)
            if line.input_length is not None and self.block_tokens is None:
                sizes.see(where, line.input_length, len(line.hash_ids or ()))
            held.append((where, line))
        if self.block_tokens is None and any(line.input_length is not None for _, line in held):
            self.block_tokens = sizes.choose(f"{self._path}", usual)
        for where, line in held:
            blocks = self._full(where, line)
            if blocks and line.timestamp is not None:
                yield TraceRequest(line.timestamp * unit, blocks)

    def _full(self, where: str, line: _Line) -> tuple[int | str, ...]:
        """The full blocks of a request."""
        named, tokens, size = line.hash_ids or (), line.input_length, self.block_tokens
        if tokens is None or size is None:
            return named
        full = full_blocks(tokens, len(named), size)
        if full is None:
            fitting = BlockTokenSizes()
            fitting.see(where, tokens, len(named))
            raise TraceError(
                f"{where}: input_length {tokens} is {tokens // size} full blocks of {size} tokens, but there are "
                f"{len(named)} hash_ids, as for blocks of {fitting}; give another --block-tokens, or leave it out "
                f"to have it found"
            )
        return named[:full]

    def _header(self, where: str, line: _Line) -> None:
        if line.kvtide_trace != _VERSION:
            raise TraceError(
                f"{where}: a trace of version {line.kvtide_trace!r}; this kvtide reads version {_VERSION}: "
                "replay it with the kvtide that recorded it"
            )
        if line.block_tokens is None:
            raise TraceError(f"{where}: the header has no block_tokens")
        if line.layout_bytes is not None and not 0 < line.layout_bytes <= LARGEST:
            raise TraceError(
                f"{where}: layout_bytes is {line.layout_bytes}; it must be at least 1, and at most {LARGEST}"
            )
        self._say(where, line.block_tokens, "the header")
        self.block_bytes = line.layout_bytes

    def _recorded(self, lines: Iterator[tuple[str, _Line]]) -> Iterator[TraceRequest]:
        for where, line in lines:
            if line.timestamp is None or line.input_length is None:
                raise TraceError(f"{where}: a recorded request needs timestamp, input_length and hash_ids")
            if line.block_tokens is not None:
                self._say(where, line.block_tokens, where)
            turn = line.turn or ""
            if not isinstance(turn, str) or turn not in _TURNS:
                raise TraceError(f"{where}: turn is {line.turn!r}; it must be 'tool', 'end' or absent")
            if line.returns_in is not None and not line.returns_in > 0:
                raise TraceError(f"{where}: returns_in is {line.returns_in:g}; it must be more than 0")
            have = line.have or 0
            if not 0 <= have <= len(line.hash_ids or ()):
                raise TraceError(f"{where}: have is {have}; it must be a number of the request's blocks")
            if blocks := self._full(where, line):
                yield TraceRequest(
                    line.timestamp / 1000, blocks, line.tenant or "", turn, line.returns_in, min(have, len(blocks))
                )

    def _agents(self, lines: Iterator[tuple[str, _Line]]) -> Iterator[TraceRequest]:
        found: list[tuple[str, float, tuple[int | str, ...]]] = []
        first: dict[str, float] = {}
        for where, line in lines:
            if not line.app or line.hash_ids is None or line.ts is None:
                raise TraceError(f"{where}: a request of an agent needs app, ts and hash_ids")
            first[line.app] = min(first.get(line.app, line.ts), line.ts)
            found.append((line.app, line.ts, line.hash_ids))
        # By whole microseconds: seconds would round some to the same time.
        found.sort(key=lambda r: r[1] - first[r[0]])
        yield from (TraceRequest((ts - first[app]) / 1e6, blocks) for app, ts, blocks in found if blocks)


def read(
    path: Path,
    progress: Callable[[int], None] = lambda _: None,
    block_tokens: int | None = None,
    *,
    growing: bool = False,
    most: int | None = None,
) -> Reader:
    """The requests of a trace in order of time, one by one. See ``Reader``."""
    return Reader(path, progress, block_tokens, growing, most)


def chains(found: Iterable[TraceRequest]) -> Trace:
    """All requests of a trace, with their blocks as numbers that stand for whole prefixes."""
    names: dict[tuple[int, int | str | bytes], int] = {}
    roots: dict[str, int] = {}
    """Negative numbers, one per tenant: tenants share no blocks, even with equal numbers."""
    trace = Trace(np.zeros(0), [], 0, [], [], [])
    seconds, have = list[float](), list[int]()
    for request in found:
        parent, chain = roots.setdefault(request.tenant, -1 - len(roots)), []
        for block in request.blocks:
            parent = names.setdefault((parent, block), len(names))
            chain.append(parent)
        seconds.append(request.seconds)
        trace.blocks.append(np.array(chain, np.int64))
        trace.tenants.append(request.tenant)
        trace.turns.append(request.turn)
        trace.returns_in.append(request.returns_in)
        have.append(request.have)
    return trace._replace(seconds=np.array(seconds), unique=len(names), have=have)


def load(path: Path, progress: Callable[[int], None] = lambda _: None, block_tokens: int | None = None) -> Trace:
    """A whole trace, with its block size if known."""
    reader = read(path, progress, block_tokens)
    return chains(reader)._replace(block_tokens=reader.block_tokens, block_bytes=reader.block_bytes)
