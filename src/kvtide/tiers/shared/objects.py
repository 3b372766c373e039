"""Blobs as objects in S3, Google Cloud Storage or Azure, through obstore.

obstore makes the requests, on its own threads that do not hold the GIL. An event loop starts them, because only there a
running request can be cancelled. The calling thread waits for the bytes, with its own deadline, and copies them to
their place, in one copy without the GIL. A long blob is read in pieces, several at a time: one connection to such a
storage is slow, many together are not. It is written in one request, directly from the caller's memory, since only a
single request can carry the condition "if no object of that name exists". An object becomes visible when it is whole.

A cancelled request may still be in a socket and refer to the caller's memory. Views of that memory are therefore made
for each request, and a write has ended when the last of its views was freed.

The folder of a blob is derived from its name, as on a filesystem: this allows listing a few blobs without the others.
"""

from __future__ import annotations

import asyncio
import atexit
import errno
import queue
import re
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import obstore
from obstore.store import from_url

from kvtide import forks
from kvtide.block import Span
from kvtide.errors import ConfigError
from kvtide.tiers.shared.blobs import Turn

if TYPE_CHECKING:
    from obstore.store import ObjectStore

__all__ = ["Objects"]

PIECE = 8 << 20
"""Bytes of one read request."""
_REMOTE = ("s3", "gs", "az")
_TRIED = "kvtide-tried"
"""An object that shows whether the storage supports conditional writes. It is in no folder, and so no blob."""
_SHARD = 2
_PATIENCE = 5.0
"""Seconds to wait for obstore's threads at most."""
_CLOSED = "the object store was closed"
_STATUS = re.compile(r"status code: (\d+ [A-Za-z ]+)")
_RETRIES: Any = {
    "max_retries": 3,
    "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1), "base": 2},
}
"""With jitter, in every request, within its deadline."""

Request = Callable[[], Awaitable[Any]]
Outcome = tuple[int, Any]
"""The number of a request in its batch, and its result or the error that it ended with."""


class Objects:
    """The objects under ``url``: ``s3://bucket/folder``, ``gs://``, ``az://``, or ``file:///``.

    Credentials are found where the storage's own tools look: environment, web identity, container, instance.
    ``endpoint`` is a server other than the default of the url's scheme, ``certificate`` a file with the authority to
    trust for it. At most ``requests`` run at a time. Thread-safe.
    """

    copies = True

    def __init__(
        self, url: str, *, endpoint: str = "", region: str = "", certificate: str = "", requests: int = 32
    ) -> None:
        self._url = url
        self._store = _open(url, endpoint, region, certificate)
        self._requests = _Requests(requests)
        self._conditions: bool | None = None
        """Whether the storage supports conditional writes; None: not tried yet."""

    def __repr__(self) -> str:
        return f"<Objects {self._url}>"

    def __str__(self) -> str:
        return f"the objects in {self._url}"

    # -- reading ------------------------------------------------------------------------------------------

    def read(self, batch: Sequence[tuple[str, Sequence[Span]]], timeout: float) -> list[int]:
        return self._read([(name, spans, 0) for name, spans in batch], timeout)

    def read_part(self, name: str, into: Span, offset: int, timeout: float) -> int:
        return self._read([(name, [into], offset)], timeout)[0]

    def _read(self, batch: Sequence[tuple[str, Sequence[Span], int]], timeout: float) -> list[int]:
        end = time.monotonic() + timeout
        pieces = [
            (number, start, min(PIECE, total - start))
            for number, (_, spans, _) in enumerate(batch)
            for total in [sum(map(len, spans))]
            for start in range(0, total, PIECE)
        ]
        requests = [
            partial(obstore.get_range_async, self._store, _path(batch[n][0]), start=batch[n][2] + at, length=size)
            for n, at, size in pieces
        ]
        came: list[Any] = [None] * len(pieces)
        for i, outcome in self._requests.run(requests, end):
            number, start, _ = pieces[i]
            came[i] = outcome if isinstance(outcome, Exception) else _scatter(outcome, batch[number][1], start)
        counts = [0] * len(batch)
        for (number, start, _), count in zip(pieces, came, strict=True):
            if _is_missing(count):
                counts[number] = -1
            elif counts[number] == start:  # nothing was missing before it
                name, _, offset = batch[number]
                failed = isinstance(count, Exception)
                counts[number] += self._beyond(name, offset + start, count, end) if failed else count
        return counts

    def _beyond(self, name: str, start: int, error: Exception, end: float) -> int:
        """Returns 0 if a piece could not be read because the blob ends before it. Raises if it does not."""
        if isinstance(error, obstore.exceptions.GenericError):
            (about,) = self._all([partial(obstore.head_async, self._store, _path(name))], end)
            if not isinstance(about, Exception) and about["size"] <= start:
                return 0
        raise _refusal(error) from error

    def find(self, names: Sequence[str], timeout: float) -> list[bool]:
        heads = [partial(obstore.head_async, self._store, _path(name)) for name in names]
        outcomes = self._all(heads, time.monotonic() + timeout)
        for outcome in outcomes:
            _check(outcome, FileNotFoundError)
        return [not isinstance(outcome, Exception) for outcome in outcomes]

    # -- writing ------------------------------------------------------------------------------------------

    def write(
        self, batch: Sequence[tuple[str, Sequence[Span]]], timeout: float, turn: Turn = nullcontext
    ) -> list[bool]:
        with turn():
            end = time.monotonic() + timeout
            wanted = [(_path(name), spans) for name, spans in batch]
            if not self._keeps_conditions(end):
                there = self.find([name for name, _ in batch], timeout)
                wanted = [item for item, found in zip(wanted, there, strict=True) if not found]
            for outcome in self._put(wanted, end):
                _check(outcome, obstore.exceptions.AlreadyExistsError)
        return [True] * len(batch)

    def create(self, name: str, data: bytes, timeout: float) -> bool:
        end = time.monotonic() + timeout
        if not self._keeps_conditions(end):
            raise OSError(
                errno.ENOTSUP,
                "this object store keeps no conditions, by which one of many writers wins",
            )
        (outcome,) = self._put([(_path(name), [memoryview(data)])], end)
        _check(outcome, obstore.exceptions.AlreadyExistsError)
        return not isinstance(outcome, Exception)

    def _keeps_conditions(self, end: float) -> bool:
        """Whether a second object of one name is refused. Storage that does not know the condition may ignore it."""
        if self._conditions is None:
            known, conditions = obstore.exceptions, False
            for _ in range(2):
                (outcome,) = self._put([(_TRIED, [memoryview(b"kvtide")])], end)
                if isinstance(outcome, known.NotSupportedError) or "501 Not Implemented" in str(outcome):
                    break
                _check(outcome, known.AlreadyExistsError)
                conditions = isinstance(outcome, known.AlreadyExistsError)
            self._conditions = conditions
        return self._conditions

    def _put(self, batch: Sequence[tuple[str, Sequence[Span]]], end: float) -> list[Any]:
        """Returns the outcomes once the spans are no longer in use."""
        dead: queue.SimpleQueue[object] = queue.SimpleQueue()
        views = [[memoryview(span) for span in spans] for _, spans in batch]
        watched = [weakref.ref(view, dead.put) for several in views for view in several]
        put = partial(
            obstore.put_async,
            self._store,
            mode="overwrite" if self._conditions is False else "create",
            use_multipart=False,
        )
        requests = [partial(put, path, several) for (path, _), several in zip(batch, views, strict=True)]
        del views
        try:
            return self._all(requests, end)
        finally:
            requests.clear()
            for _ in watched:
                dead.get()

    def sync(self, names: Sequence[str], timeout: float) -> list[bool]:
        """An object store has made durable what it has acknowledged, so it suffices to check that the object exists."""
        return self.find(names, timeout)

    def delete(self, names: Sequence[str], timeout: float) -> None:
        requests = [partial(obstore.delete_async, self._store, _path(name)) for name in names]
        for outcome in self._all(requests, time.monotonic() + timeout):
            _check(outcome, FileNotFoundError)

    def tidy(self, age: float, timeout: float, alive: Callable[[], None]) -> tuple[int, int]:
        """There is nothing unfinished: an object is one request."""
        return 0, 0

    def close(self) -> None:
        self._requests.close()

    def _all(self, requests: Sequence[Request], end: float) -> list[Any]:
        """The outcomes of requests, in their order."""
        outcomes: list[Any] = [None] * len(requests)
        for i, outcome in self._requests.run(requests, end):
            outcomes[i] = outcome
        return outcomes

    def list(self, timeout: float, prefix: str = "") -> Iterator[tuple[str, int, float]]:
        folder = prefix[:_SHARD] if len(prefix) >= _SHARD else None
        stream = obstore.list(self._store, folder, chunk_size=1000)
        end = time.monotonic() + timeout
        while True:
            (chunk,) = self._all([stream.__anext__], end)
            if isinstance(chunk, StopAsyncIteration):
                return
            _check(chunk)
            for about in chunk:
                folder, _, name = about["path"].rpartition("/")
                if folder and name.startswith(prefix):
                    yield name, about["size"], about["last_modified"].timestamp()


class _Requests:
    """Requests of many threads, a limited number at a time, on one event loop.

    obstore's threads pass a result to the interpreter, and abort the whole process if the interpreter is shutting down
    meanwhile. So before shutdown, even if the storage was not closed, all requests end, and their futures with them:
    those threads release a future last.
    """

    def __init__(self, most: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(most)
        self._futures: weakref.WeakSet[Any] = weakref.WeakSet()
        self._origin = forks.here
        atexit.register(self.close)
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvtide-objects", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            atexit.unregister(self.close)
            self._loop.close()
            raise

    def run(self, requests: Sequence[Request], end: float) -> Iterator[Outcome]:
        """Yield outcomes as they arrive. Raises TimeoutError at ``end``; requests still running then are cancelled."""
        outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        tasks: list[asyncio.Task[None]] = []
        left = len(requests)
        if self._loop.is_closed():
            raise OSError(errno.ECANCELED, _CLOSED)
        if left:
            self._loop.call_soon_threadsafe(self._start, list(requests), outcomes, tasks)
        try:
            while left:
                try:
                    outcome = outcomes.get(timeout=max(0.0, end - time.monotonic()))
                except queue.Empty:
                    raise TimeoutError(errno.ETIMEDOUT, "the object store did not answer in time") from None
                left -= 1
                yield outcome
        finally:
            if left and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])

    def _start(
        self, requests: Sequence[Request], outcomes: queue.SimpleQueue[Outcome], tasks: list[asyncio.Task[None]]
    ) -> None:
        tasks += [self._loop.create_task(self._one(i, r, outcomes)) for i, r in enumerate(requests)]

    async def _one(self, number: int, request: Request, outcomes: queue.SimpleQueue[Outcome]) -> None:
        async with self._slots:
            try:
                under_way = request()
                self._futures.add(under_way)
                try:
                    del request  # an error that is kept would keep the memory of a write with it
                    outcomes.put((number, await under_way))
                finally:
                    del under_way
            except asyncio.CancelledError:
                outcomes.put((number, OSError(errno.ECANCELED, _CLOSED)))
                raise
            except Exception as e:  # noqa: BLE001 - for the thread that waits
                outcomes.put((number, e))

    def close(self) -> None:
        """Cancel running requests."""

        async def give_up() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            others.clear()
            while self._futures and time.monotonic() < end:
                await asyncio.sleep(0.001)

        atexit.unregister(self.close)
        if self._origin is not forks.here:
            return  # the loop and its requests belong to the parent process
        end = time.monotonic() + _PATIENCE
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(give_up(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


def _open(url: str, endpoint: str, region: str, certificate: str) -> ObjectStore:
    scheme, mark, _ = url.partition("://")
    if not mark or scheme not in (*_REMOTE, "file"):
        raise ConfigError(
            f"objects.url is {url!r}; it must be s3://BUCKET/FOLDER, gs://... or az://ACCOUNT/CONTAINER/..."
        )
    options: Any = {}
    if scheme == "file":
        options = {"mkdir": True}
    elif scheme in _REMOTE:
        # Deadlines and checksums are handled by kvtide: a signed digest of every byte would cost more than both.
        client: dict[str, Any] = {"timeout": timedelta(hours=1), "connect_timeout": timedelta(seconds=5)}
        client["allow_http"] = endpoint.startswith("http://")
        if certificate:
            client["root_certificate"] = _authority(certificate)
        options = {"client_options": client, "retry_config": _RETRIES}
        own = {"endpoint": endpoint, "region": region, "unsigned_payload": scheme == "s3"}
        options |= {name: value for name, value in own.items() if value}
    try:
        return from_url(url, **options)
    except (obstore.exceptions.BaseError, OSError, ValueError) as e:
        raise ConfigError(f"objects.url is {url!r}, which cannot be used: {str(e).splitlines()[0]}") from e


def _authority(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise ConfigError(
            f"objects.certificate is {path!r}, which cannot be read: {e.strerror or e}. Give a file with the "
            "certificate of an authority, as PEM"
        ) from e


def _path(name: str) -> str:
    return f"{name[:_SHARD]}/{name}"


def _scatter(data: Any, spans: Sequence[Span], start: int) -> int:
    """Copy ``data`` to offset ``start`` of the concatenated spans; returns its length."""
    source, at = np.frombuffer(data, np.uint8), start
    for span in spans:
        if at < len(span) and len(source):
            part = source[: len(span) - at]
            np.copyto(np.frombuffer(span, np.uint8, len(part), at), part)
            source = source[len(part) :]
        at = max(0, at - len(span))
    return len(data)


def _is_missing(outcome: Any) -> bool:
    return isinstance(outcome, FileNotFoundError) and "NoSuchBucket" not in str(outcome)


def _check(outcome: Any, *expected: type[Exception]) -> None:
    """Raise an unexpected outcome, as an error with a readable message."""
    if isinstance(outcome, Exception) and not isinstance(outcome, expected):
        raise _refusal(outcome) from outcome


def _refusal(error: Exception) -> Exception:
    """Map an error to one of few messages, since they are counted by message."""
    known, text = obstore.exceptions, str(error)
    if isinstance(error, FileNotFoundError) or "NoSuchBucket" in text:
        return OSError(errno.ENOENT, "the object store has no such bucket: make it, or mend objects.url")
    status = _STATUS.search(text)
    denied = status is not None and status[1].startswith(("401", "403"))
    if denied or isinstance(error, (known.PermissionDeniedError, known.UnauthenticatedError)):
        return OSError(errno.EACCES, "the object store does not accept these credentials for that")
    if status is not None:
        return OSError(errno.EIO, f"the object store answered {status[1].strip()}")
    if isinstance(error, known.BaseError):
        return OSError(errno.EIO, "the object store cannot be reached, or broke off")
    return error
