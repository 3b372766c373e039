"""Blobs in a Mooncake Store: memory that the clients of a Mooncake master have put together.

A blob is one object of Mooncake, whole or not there: an object is found only when its writer has ended it. Mooncake
itself evicts what does not fit into its segments, and what was evicted is a miss. So its size is the byte budget, and
there is none of kvtide's.

*Bytes* go between the caller's memory and the other client's segment, without a copy in between, and without the GIL,
in *sessions*: one is begun and ended for each object, and moves ranges of it in between. The library has calls for
whole objects too, but those poll until all bytes have come, on a core that the bytes need. It knows sessions by the key
of the object, so an object has one at a time here. They do not tell its size, which is asked for first.

*Creating.* Of many that begin to write an object Mooncake lets one; the session of the others is refused. Objects made
so are marked to be never evicted: what was dropped must not be forgotten because blocks need space. They go with the
client that has them, so Mooncake is asked for two copies, and makes them if it has two segments.

*An empty blob* is stored as a few bytes that no other blob has, because Mooncake has no empty objects.

*Listing* is not in the library. The master's HTTP server has a list of all keys.

A read of an object is protected by Mooncake's lease. A removal ignores leases, so a reader may see bytes of another
object then: what is read is verified by the tier.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from operator import methodcaller
from typing import Any, NamedTuple

import numpy as np

from kvtide.block import Span
from kvtide.tiers.shared.blobs import Turn
from kvtide.tiers.shared.mooncake_client import ABSENT, EXISTS, LEASE_ENDED, STALLED, MooncakeClient, parse_address

__all__ = ["Mooncake"]

_EMPTY = b"kvtide: an empty blob.\n"
"""The content of the object that stands for an empty blob."""
_NO_RANGES = -702
"""A session's answer for an object that is on a disk alone."""
_UNKNOWN_SESSION = -600
_FAILED = -800
_BUSY = frozenset({-706, -714})
_TRIES = 3
"""How often it is asked where an object is that was written just now."""
_TOGETHER = 64
"""Objects whose sessions are begun together, or whose sizes are asked for in one HTTP request."""
_ROW = 16 << 20
"""No more sessions are begun together once their objects have this many bytes."""
_FEW, _PIECE = 4, 8 << 20
"""Objects, and bytes, that are moved by one call: it moves them one after the other, and each may hang for a while."""


class _Part(NamedTuple):
    """Some bytes of a blob that is there, and where they go."""

    number: int
    """In the batch."""
    key: str
    spans: list[Span]
    offset: int


class _Keys:
    """Keys of objects that are in use. Thread-safe."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def alone(self, keys: Collection[str], timeout: float) -> Iterator[None]:
        """Use objects that nobody else uses meanwhile."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._used.isdisjoint(keys), max(0.0, timeout)):
                raise TimeoutError(errno.ETIMEDOUT, "another transfer of Mooncake does not end")
            self._used.update(keys)
        try:
            yield
        finally:
            with self._changed:
                self._used.difference_update(keys)
                self._changed.notify_all()


class Mooncake:
    """The objects of the Mooncake Store at ``url`` whose keys begin with ``folder``; see ``parse_address``. At most
    ``transfers`` calls move them at a time.

    Raises ConfigError if Mooncake's client cannot be loaded. The master is reached when it can be. Thread-safe.
    """

    def __init__(self, url: str, *, folder: str = "kvtide", transfers: int = 2) -> None:
        self._prefix = f"{folder}:"
        self._client = MooncakeClient(parse_address(url))
        self._transfers = threading.Semaphore(transfers)
        """Held while bytes move."""
        self._reading, self._writing = _Keys(), _Keys()
        """Of which objects there are sessions."""

    def __repr__(self) -> str:
        return repr(self._client)

    def __str__(self) -> str:
        return str(self._client)

    # -- reading ------------------------------------------------------------------------------------------

    def read(self, batch: Sequence[tuple[str, Sequence[Span]]], timeout: float) -> list[int]:
        return self._read([(name, spans, 0) for name, spans in batch], timeout)

    def read_part(self, name: str, into: Span, offset: int, timeout: float) -> int:
        return self._read([(name, [into], offset)], timeout)[0]

    def _read(self, batch: Sequence[tuple[str, Sequence[Span], int]], timeout: float) -> list[int]:
        end = time.monotonic() + timeout
        keys = [self._prefix + name for name, _, _ in batch]
        sizes = self._sizes(list(dict.fromkeys(keys)), timeout)
        counts = [0] * len(batch)
        parts: list[_Part] = []
        for number, (key, (_, spans, offset)) in enumerate(zip(keys, batch, strict=True)):
            if key not in sizes:
                counts[number] = -1
                continue
            size = 0 if sizes[key] == len(_EMPTY) and self._is_empty(key, timeout) else sizes[key]
            taken = _first(spans, size - offset)
            counts[number] = sum(map(len, taken))
            if counts[number]:
                parts.append(_Part(number, key, taken, offset))
        for several in _apart(parts):
            for part, code in zip(several, self._get(several, end - time.monotonic()), strict=True):
                if code == LEASE_ENDED:  # this process was stopped for a while
                    (code,) = self._get([part], end - time.monotonic())
                if code in ABSENT:
                    counts[part.number] = -1  # evicted meanwhile
                else:
                    self._client.check(code)
        return counts

    def _sizes(self, keys: Sequence[str], timeout: float) -> dict[str, int]:
        """The sizes of those objects that are there."""
        end, sizes = time.monotonic() + timeout, dict[str, int]()
        for _ in range(_TRIES):
            asked = [key for key in keys if key not in sizes]
            if not asked:
                break
            with self._client.use(max(0.0, end - time.monotonic())) as opened:
                for key, copies in opened.store.batch_get_replica_desc(asked).items():
                    sizes[key] = self._size(opened.store, key, copies)
            # Whether the others are missing, or the master did not answer, is not said.
            if time.monotonic() > end:
                raise TimeoutError(errno.ETIMEDOUT, "the Mooncake master did not answer in time")
            if not any(self._exist([key for key in asked if key not in sizes], end - time.monotonic())):
                break
        else:
            raise OSError(errno.EAGAIN, "Mooncake does not say where an object is that it has")
        return sizes

    def _size(self, store: Any, key: str, copies: Sequence[Any]) -> int:
        for copy in copies:
            if copy.is_memory_replica():
                memory = copy.get_memory_descriptor().buffer_descriptor
                self._client.met([memory.transport_endpoint])
                return int(memory.size)
        return int(store.get_size(key))

    def _exist(self, keys: Sequence[str], timeout: float) -> list[bool]:
        if not keys:
            return []
        codes = self._call(timeout, lambda store: store.batch_is_exist(list(keys)))
        for code in codes:
            self._client.check(code)
        return [code == 1 for code in codes]

    def _is_empty(self, key: str, timeout: float) -> bool:
        memory = memoryview(bytearray(len(_EMPTY)))
        (code,) = self._get([_Part(0, key, [memory], 0)], timeout)
        if code not in ABSENT:
            self._client.check(code)
        return memory == _EMPTY

    def _get(self, parts: Sequence[_Part], timeout: float) -> list[int]:
        """Read parts of objects; each object is there once. Returns an answer of the library for each."""
        end = time.monotonic() + timeout
        return [code for row in _rows(parts) for code in self._get_row(row, end - time.monotonic())]

    def _get_row(self, parts: Sequence[_Part], timeout: float) -> list[int]:
        keys = [part.key for part in parts]
        with self._reading.alone(keys, timeout):
            began = self._call(timeout, lambda store: store.batch_get_session_start(keys))
            codes = dict(zip(keys, began, strict=True))
            try:
                ready = [part for part in parts if codes[part.key] == 0]
                codes |= self._moved("batch_get_into_multi_buffer_ranges", ready, timeout)
            finally:
                # The master is not asked. What stays is replaced by the next session.
                with contextlib.suppress(OSError), self._client.use(0.0) as opened:
                    opened.store.batch_get_session_end(keys)
        return [
            self._get_from_disk(part, timeout) if codes[part.key] == _NO_RANGES else codes[part.key] for part in parts
        ]

    def _get_from_disk(self, part: _Part, timeout: float) -> int:
        """Read an object that is on a disk of Mooncake: it has no ranges there, and is read whole."""
        size = self._sizes([part.key], timeout).get(part.key)
        if size is None:
            return next(iter(ABSENT))
        whole = part.spans
        if part.offset or sum(map(len, whole)) != size:
            whole = [np.empty(size, np.uint8).data]
        places, sizes = [list(map(_address, whole))], [list(map(len, whole))]
        (code,) = self._call(timeout, lambda store: store.batch_get_into_multi_buffers([part.key], places, sizes))
        if code >= 0 and whole is not part.spans:
            data = np.frombuffer(whole[0], np.uint8)
            for span, start in zip(part.spans, _offsets(part.spans, part.offset), strict=True):
                np.copyto(np.frombuffer(span, np.uint8), data[start : start + len(span)])
        return code

    def find(self, names: Sequence[str], timeout: float) -> list[bool]:
        return self._exist([self._prefix + name for name in names], timeout)

    # -- writing ------------------------------------------------------------------------------------------

    def write(
        self, batch: Sequence[tuple[str, Sequence[Span]]], timeout: float, turn: Turn = nullcontext
    ) -> list[bool]:
        with turn():
            end = time.monotonic() + timeout
            wanted = {self._prefix + name: [span for span in spans if span] or [_marker()] for name, spans in batch}
            for row in _rows([_Part(0, key, spans, 0) for key, spans in wanted.items()]):
                for code in self._put(row, end - time.monotonic(), self._client.replication()):
                    if code != EXISTS:
                        self._client.check(code)
        return [True] * len(batch)

    def create(self, name: str, data: bytes, timeout: float) -> bool:
        kept = self._client.replication()
        kept.with_hard_pin, kept.replica_num = True, 2
        part = _Part(0, self._prefix + name, [memoryview(data or _EMPTY)], 0)
        (code,) = self._put([part], timeout, kept)
        if code != EXISTS:
            self._client.check(code)
        return code != EXISTS

    def _put(self, parts: Sequence[_Part], timeout: float, kept: Any) -> list[int]:
        """Write objects, to be kept so. Returns an answer of the library for each."""
        sizes = {part.key: sum(map(len, part.spans)) for part in parts}
        keys = list(sizes)

        def start(some: Sequence[str]) -> dict[str, int]:
            nbytes = [sizes[key] for key in some]
            found = self._call(timeout, lambda store: store.batch_put_session_start(some, nbytes, kept))
            return dict(zip(some, found, strict=True))

        with self._writing.alone(keys, timeout):
            codes = start(keys)
            if left := [key for key in keys if codes[key] == _UNKNOWN_SESSION]:  # of one that could not be ended
                self._revoke(left, timeout)
                codes |= start(left)
            ready = [part for part in parts if codes[part.key] == 0]
            written: list[str] = []
            try:
                codes |= self._moved("batch_put_from_multi_buffer_ranges", ready, timeout)
                if moved := [part.key for part in ready if codes[part.key] >= 0]:
                    ended = self._call(timeout, lambda store: store.batch_put_session_end(moved))
                    codes |= zip(moved, ended, strict=True)
                    written = [key for key in moved if codes[key] >= 0]
            finally:
                if failed := [part.key for part in ready if part.key not in written]:
                    with contextlib.suppress(OSError):
                        self._revoke(failed, timeout)
        return [codes[key] for key in keys]

    def _revoke(self, keys: Sequence[str], timeout: float) -> None:
        self._call(timeout, lambda store: store.batch_put_session_revoke(keys))

    def delete(self, names: Sequence[str], timeout: float) -> None:
        keys = [self._prefix + name for name in names]
        if keys:
            for code in self._call(timeout, lambda store: store.batch_remove(keys, True)):
                if code in _BUSY:
                    raise OSError(errno.EBUSY, "Mooncake moves or copies an object that is to be removed")
                if code not in ABSENT:
                    self._client.check(code)

    def tidy(self, age: float, timeout: float, alive: Callable[[], None]) -> tuple[int, int]:
        """There is nothing unfinished to remove: Mooncake itself discards what a dead writer began."""
        return 0, 0

    def close(self) -> None:
        self._client.close()

    # -- calls --------------------------------------------------------------------------------------------

    def _call(self, timeout: float, do: Callable[[Any], Sequence[int]]) -> list[int]:
        """The answers of the library to a call. Returns, or raises, when its memory is not in use any more."""
        began = time.monotonic()
        with self._client.use(max(0.0, timeout)) as opened:
            codes = list(do(opened.store))
        self._client.judge(opened, codes, time.monotonic() - began)
        return codes

    def _moved(self, method: str, parts: Sequence[_Part], timeout: float) -> dict[str, int]:
        """Move parts of objects that have sessions, by that method of the library; returns its answers by key. Raises
        TimeoutError if another client does not answer."""
        end = time.monotonic() + timeout
        found: dict[str, int] = {}
        for some in _pieces(parts):
            keys = [part.key for part in some]
            places = [[_address(span) for span in part.spans] for part in some]
            sizes = [[len(span) for span in part.spans] for part in some]
            offsets = [_offsets(part.spans, part.offset) for part in some]
            with self._turn(end - time.monotonic()):
                began = time.monotonic()
                codes = self._call(end - began, methodcaller(method, keys, places, sizes, offsets))
            if _FAILED in codes and time.monotonic() - began >= STALLED:
                # The others may be there too, and would take as long.
                raise TimeoutError(errno.ETIMEDOUT, "a Mooncake client that has bytes, or is to get them, hangs")
            found |= zip(keys, codes, strict=True)
        return found

    @contextlib.contextmanager
    def _turn(self, timeout: float) -> Iterator[None]:
        if not self._transfers.acquire(timeout=max(0.0, timeout)):
            raise TimeoutError(errno.ETIMEDOUT, "another transfer of Mooncake does not end")
        try:
            yield
        finally:
            self._transfers.release()

    # -- listing ------------------------------------------------------------------------------------------

    def list(self, timeout: float, prefix: str = "") -> Iterator[tuple[str, int, float]]:
        """As in ``Blobs``, but the time when a blob was written is not known: 0.

        The master sends all its keys, also those of others.
        """
        end = time.monotonic() + timeout
        # Others may have keys that cannot be in a URL, or are no text.
        wanted = re.compile(re.escape(self._prefix + prefix).encode() + rb"[\w.-]*")
        lines = self._client.lines("/get_all_keys", timeout)
        keys = [line.decode() for line in lines if wanted.fullmatch(line)]
        for i in range(0, len(keys), _TOGETHER):
            some = keys[i : i + _TOGETHER]
            text = self._client.fetch(f"/batch_query_keys?keys={','.join(some)}", max(0.1, end - time.monotonic()))
            try:
                found = json.loads(text)["data"]
                sizes = {key: _listed_size(found[key]) for key in some}
            except (ValueError, LookupError, TypeError, AttributeError) as e:
                raise OSError(errno.EIO, "the HTTP server of the Mooncake master does not answer as expected") from e
            for key, nbytes in sizes.items():
                if nbytes is not None:
                    empty = nbytes == len(_EMPTY) and self._is_empty(key, timeout)
                    yield key[len(self._prefix) :], 0 if empty else nbytes, 0.0


def _address(span: Span) -> int:
    if not span.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(span))
    found: int = np.frombuffer(span, np.uint8).__array_interface__["data"][0]  # six times slower
    return found


def _marker() -> Span:
    return memoryview(_EMPTY)


def _first(spans: Sequence[Span], nbytes: int) -> list[Span]:
    """The first bytes of spans, without those that are empty."""
    taken: list[Span] = []
    for span in spans:
        if nbytes > 0 and span:
            taken.append(span[:nbytes])
        nbytes -= len(span)
    return taken


def _offsets(spans: Sequence[Span], start: int) -> list[int]:
    """Where in an object the bytes of each span begin."""
    found = []
    for span in spans:
        found.append(start)
        start += len(span)
    return found


def _rows(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Parts whose sessions are begun together."""
    return _cut(parts, _TOGETHER, _ROW)


def _pieces(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Parts that are moved by one call."""
    return _cut(parts, _FEW, _PIECE)


def _cut(parts: Sequence[_Part], most: int, enough: int) -> Iterator[list[_Part]]:
    """At most so many together, and no more once they have enough bytes."""
    row: list[_Part] = []
    nbytes = 0
    for part in parts:
        row.append(part)
        nbytes += sum(map(len, part.spans))
        if nbytes >= enough or len(row) >= most:
            yield row
            row, nbytes = [], 0
    if row:
        yield row


def _apart(parts: Sequence[_Part]) -> list[list[_Part]]:
    """Lists in which each object is there once: the library takes a key for one destination."""
    lists: list[list[_Part]] = []
    for part in parts:
        for several in lists:
            if all(part.key != other.key for other in several):
                several.append(part)
                break
        else:
            lists.append([part])
    return lists


def _listed_size(about: Mapping[str, Any]) -> int | None:
    """The size of an object in the master's answer; None: it is not there, or not complete."""
    if about.get("ok"):
        for copies, size in (("values", "size_"), ("disk_values", "object_size"), ("local_disk_values", "object_size")):
            for copy in about.get(copies) or ():
                return int(copy[size])
    return None
