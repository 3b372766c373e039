"""Blobs in a Mooncake Store: memory that the clients of a Mooncake master have put together.

A blob is one object of Mooncake, whole or not there: an object is found only when its writer has ended it. Mooncake
itself evicts what does not fit into its segments, and what was evicted is a miss. So its size is the byte budget, and
there is none of kvtide's.

*Bytes* go between the caller's memory and the other client's segment, without a copy in between, and without the GIL.
Mooncake copies only whole objects into memory of exactly their size. So the size is asked for first; a part of an
object, such as the header of a record, is read in a *session*, which takes ranges.

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
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from operator import methodcaller
from typing import Any, NamedTuple

import numpy as np

from kvtide.block import Span
from kvtide.tiers.shared.blobs import Turn
from kvtide.tiers.shared.mooncake_client import ABSENT, EXISTS, LEASE_ENDED, MooncakeClient, parse_address

__all__ = ["Mooncake"]

_EMPTY = b"kvtide: an empty blob.\n"
"""The content of the object that stands for an empty blob."""
_NO_RANGES = -702
"""A session's answer for an object that is on a disk alone."""
_UNKNOWN_SESSION = -600
_BUSY = frozenset({-706, -714})
_OTHER_SIZE = frozenset({-600, -800})
_REMEMBERED = 1 << 16
_TRIES = 3
"""How often it is asked where an object is that was written just now."""
_TOGETHER = 64
"""Objects in one call, or whose sizes are asked for in one HTTP request."""
_LARGE = 8 << 20
_ROW = 16 << 20
"""A call takes no more objects once it has this many bytes."""


class _Part(NamedTuple):
    """Some bytes of a blob that is there, and where they go."""

    number: int
    """In the batch."""
    key: str
    spans: list[Span]
    offset: int


class Mooncake:
    """The objects of the Mooncake Store at ``url`` whose keys begin with ``folder``; see ``parse_address``. At most
    ``transfers`` of them move at a time, one for each two cores of this process, and one large one.

    Raises ConfigError if Mooncake's client cannot be loaded. The master is reached when it can be. Thread-safe.
    """

    def __init__(self, url: str, *, folder: str = "kvtide", transfers: int = 2) -> None:
        self._prefix = f"{folder}:"
        self._client = MooncakeClient(parse_address(url))
        self._transfers = threading.Semaphore(max(1, min(transfers, len(os.sched_getaffinity(0)) // 2)))
        """Held while bytes move: the library polls meanwhile, and calls that wait beside each other on all cores are
        slower together than one after the other, because the thread that moves the bytes gets none."""
        self._large = threading.Lock()
        """Held instead while a large object moves: two of these are slower together."""
        self._known: dict[str, int] = {}
        """Sizes of objects that were there. A read into memory of another size than the object's fails."""
        self._sessions = threading.Lock()
        """Held while a session is open: the library knows sessions by the key of the object."""

    def __repr__(self) -> str:
        return repr(self._client)

    # -- reading ------------------------------------------------------------------------------------------

    def read(self, batch: Sequence[tuple[str, Sequence[Span]]], timeout: float) -> list[int]:
        return self._read([(name, spans, 0) for name, spans in batch], timeout)

    def read_part(self, name: str, into: Span, offset: int, timeout: float) -> int:
        return self._read([(name, [into], offset)], timeout)[0]

    def _read(self, batch: Sequence[tuple[str, Sequence[Span], int]], timeout: float) -> list[int]:
        end = time.monotonic() + timeout
        keys = [self._prefix + name for name, _, _ in batch]
        likely = self._likely_sizes(keys, [(0 if offset else sum(map(len, spans))) for _, spans, offset in batch])
        sizes = likely | self._sizes([key for key in dict.fromkeys(keys) if key not in likely], timeout)
        counts = [0] * len(batch)
        whole: list[_Part] = []
        some: list[_Part] = []
        for number, (key, (_, spans, offset)) in enumerate(zip(keys, batch, strict=True)):
            if key not in sizes:
                counts[number] = -1
                continue
            size = 0 if sizes[key] == len(_EMPTY) and self._is_empty(key, timeout) else sizes[key]
            taken = _first(spans, size - offset)
            counts[number] = sum(map(len, taken))
            if counts[number]:
                part = _Part(number, key, taken, offset)
                (whole if counts[number] == size else some).append(part)
        for several, call in ((whole, self._get_whole), (some, self._get_some)):
            for parts in _apart(several):
                codes = call(parts, end - time.monotonic())
                for part, code in zip(parts, codes, strict=True):
                    if code in _OTHER_SIZE and part.key in likely:
                        # It may have been removed and stored again: ask for its size. Nothing was read.
                        self._known.pop(part.key, None)
                        name, spans, offset = batch[part.number]
                        counts[part.number] = self._read([(name, spans, offset)], end - time.monotonic())[0]
                        continue
                    if code == LEASE_ENDED:  # this process was stopped for a while
                        (code,) = call([part], end - time.monotonic())
                    if code in ABSENT:
                        self._known.pop(part.key, None)
                        counts[part.number] = -1  # evicted meanwhile
                    else:
                        self._client.check(code)
        return counts

    def _likely_sizes(self, keys: Sequence[str], rooms: Sequence[int]) -> dict[str, int]:
        """The sizes that objects had which are to be read whole: a size costs a question. A wrong one makes a read of
        the whole object fail."""
        sizes = {key: self._known.get(key, 0) for key in keys}
        wanted = {key: min(room for other, room in zip(keys, rooms, strict=True) if other == key) for key in sizes}
        return {key: size for key, size in sizes.items() if 0 < size <= wanted[key]}

    def _sizes(self, keys: Sequence[str], timeout: float) -> dict[str, int]:
        """The sizes of those objects that are there."""
        end, sizes = time.monotonic() + timeout, dict[str, int]()
        for _ in range(_TRIES):
            asked = [key for key in keys if key not in sizes]
            if not asked:
                break
            with self._client.use(max(0.0, end - time.monotonic())) as opened:
                for key, copies in opened.store.batch_get_replica_desc(asked).items():
                    sizes[key] = _size(opened.store, key, copies)
            # Whether the others are missing, or the master did not answer, is not said.
            if time.monotonic() > end:
                raise TimeoutError(errno.ETIMEDOUT, "the Mooncake master did not answer in time")
            if not any(self._exist([key for key in asked if key not in sizes], end - time.monotonic())):
                break
        else:
            raise OSError(errno.EAGAIN, "Mooncake does not say where an object is that it has")
        self._remember(sizes)
        return sizes

    def _remember(self, sizes: Mapping[str, int]) -> None:
        if len(self._known) > _REMEMBERED:
            self._known.clear()
        self._known.update(sizes)

    def _exist(self, keys: Sequence[str], timeout: float) -> list[bool]:
        if not keys:
            return []
        codes = self._call(timeout, lambda store: store.batch_is_exist(list(keys)))
        for code in codes:
            self._client.check(code)
        return [code == 1 for code in codes]

    def _is_empty(self, key: str, timeout: float) -> bool:
        memory = memoryview(bytearray(len(_EMPTY)))
        (code,) = self._get_whole([_Part(0, key, [memory], 0)], timeout)
        if code not in ABSENT:
            self._client.check(code)
        return memory == _EMPTY

    def _get_whole(self, parts: Sequence[_Part], timeout: float) -> list[int]:
        return [code for codes in self._moved("batch_get_into_multi_buffers", parts, timeout) for code in codes]

    def _get_some(self, parts: Sequence[_Part], timeout: float) -> list[int]:
        """Read ranges of objects; each object is there once."""
        with self._turn(self._sessions, timeout):
            codes = dict(zip([part.key for part in parts], self._begin(parts, timeout), strict=True))
            ready = [part for part in parts if codes[part.key] == 0]
            try:
                if ready:
                    codes.update(zip([part.key for part in ready], self._ranges(ready, timeout), strict=True))
            finally:
                # The master is not asked. What stays is replaced by the next session.
                with contextlib.suppress(OSError), self._client.use(0.0) as opened:
                    opened.store.batch_get_session_end([part.key for part in parts])
        return [
            self._get_by_copy(part, timeout) if codes[part.key] == _NO_RANGES else codes[part.key] for part in parts
        ]

    def _begin(self, parts: Sequence[_Part], timeout: float) -> list[int]:
        return self._call(timeout, lambda store: store.batch_get_session_start([part.key for part in parts]))

    def _ranges(self, parts: Sequence[_Part], timeout: float) -> list[int]:
        keys = [part.key for part in parts]
        places = [[_address(span) for span in part.spans] for part in parts]
        sizes = [[len(span) for span in part.spans] for part in parts]
        offsets = [_offsets(part.spans, part.offset) for part in parts]
        return self._call(timeout, lambda store: store.batch_get_into_multi_buffer_ranges(keys, places, sizes, offsets))

    def _get_by_copy(self, part: _Part, timeout: float) -> int:
        """Read an object that is on a disk of Mooncake, where it has no ranges."""
        size = self._sizes([part.key], timeout).get(part.key)
        if size is None:
            return next(iter(ABSENT))
        data = np.empty(size, np.uint8)
        (code,) = self._get_whole([part._replace(spans=[data.data])], timeout)
        if code >= 0:
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
            wanted = {self._prefix + name: [span for span in spans if span] or [_marker()] for name, spans in batch}
            parts = [_Part(0, key, spans, 0) for key, spans in wanted.items()]
            for codes in self._moved("batch_put_from_multi_buffers", parts, timeout):
                for code in codes:
                    if code != EXISTS:
                        self._client.check(code)
        return [True] * len(batch)

    def create(self, name: str, data: bytes, timeout: float) -> bool:
        key, content = self._prefix + name, memoryview(data or _EMPTY)
        part = _Part(0, key, [content], 0)
        with self._turn(self._sessions, timeout):
            (code,) = self._start(key, len(content), timeout)
            if code == _UNKNOWN_SESSION:  # one that could not be ended
                self._call(timeout, lambda store: store.batch_put_session_revoke([key]))
                (code,) = self._start(key, len(content), timeout)
            if code == EXISTS:
                return False
            self._client.check(code)
            try:
                (code,) = self._put_ranges(part, timeout)
                self._client.check(code)
                (code,) = self._call(timeout, lambda store: store.batch_put_session_end([key]))
                self._client.check(code)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._call(timeout, lambda store: store.batch_put_session_revoke([key]))
                raise
        return True

    def _start(self, key: str, nbytes: int, timeout: float) -> list[int]:
        kept = self._client.replication()
        kept.with_hard_pin, kept.replica_num = True, 2
        return self._call(timeout, lambda store: store.batch_put_session_start([key], [nbytes], kept))

    def _put_ranges(self, part: _Part, timeout: float) -> list[int]:
        places, sizes = [_address(span) for span in part.spans], [len(span) for span in part.spans]
        offsets = _offsets(part.spans, part.offset)
        return self._call(
            timeout,
            lambda store: store.batch_put_from_multi_buffer_ranges([part.key], [places], [sizes], [offsets]),
        )

    def delete(self, names: Sequence[str], timeout: float) -> None:
        keys = [self._prefix + name for name in names]
        if keys:
            for code in self._call(timeout, lambda store: store.batch_remove(keys, True)):
                if code in _BUSY:
                    raise OSError(errno.EBUSY, "Mooncake moves or copies an object that is to be removed")
                if code not in ABSENT:
                    self._client.check(code)
            for key in keys:
                self._known.pop(key, None)

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

    def _moved(self, method: str, parts: Sequence[_Part], timeout: float) -> Iterator[list[int]]:
        """Move whole objects by that method of the library; yields its answers, a list for each call."""
        end = time.monotonic() + timeout
        for some in _rows(parts):
            keys = [part.key for part in some]
            places = [[_address(span) for span in part.spans] for part in some]
            sizes = [[len(span) for span in part.spans] for part in some]
            with self._turn(self._among(sizes), end - time.monotonic()):
                codes = self._call(end - time.monotonic(), methodcaller(method, keys, places, sizes))
            yield codes

    def _among(self, sizes: Sequence[Sequence[int]]) -> threading.Lock | threading.Semaphore:
        """What is held while bytes of these sizes move."""
        return self._large if sum(map(sum, sizes)) >= _LARGE else self._transfers

    @contextlib.contextmanager
    def _turn(self, among: threading.Lock | threading.Semaphore, timeout: float) -> Iterator[None]:
        if not among.acquire(timeout=max(0.0, timeout)):
            raise TimeoutError(errno.ETIMEDOUT, "another transfer of Mooncake does not end")
        try:
            yield
        finally:
            among.release()

    # -- listing ------------------------------------------------------------------------------------------

    def list(self, timeout: float, prefix: str = "") -> Iterator[tuple[str, int, float]]:
        """As in ``Blobs``, but the time when a blob was written is not known: 0.

        The master sends all its keys, also those of others.
        """
        end = time.monotonic() + timeout
        # Others may have keys that cannot be in a URL, or are no text.
        wanted = re.compile(re.escape(self._prefix + prefix).encode() + rb"[\w.-]*")
        lines = self._client.fetch("/get_all_keys", timeout).split(b"\n")
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
    """Several objects for each call of the library, or one large one."""
    row: list[_Part] = []
    nbytes = 0
    for part in parts:
        row.append(part)
        nbytes += sum(map(len, part.spans))
        if nbytes >= _ROW or len(row) >= _TOGETHER:
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


def _size(store: Any, key: str, copies: Sequence[Any]) -> int:
    for copy in copies:
        if copy.is_memory_replica():
            return int(copy.get_memory_descriptor().buffer_descriptor.size)
    return int(store.get_size(key))


def _listed_size(about: Mapping[str, Any]) -> int | None:
    """The size of an object in the master's answer; None: it is not there, or not complete."""
    if about.get("ok"):
        for copies, size in (("values", "size_"), ("disk_values", "object_size"), ("local_disk_values", "object_size")):
            for copy in about.get(copies) or ():
                return int(copy[size])
    return None
