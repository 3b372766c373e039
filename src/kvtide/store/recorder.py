"""Records the prompts requested from a store, so that ``kvtide replay`` can size a cache for them.

The file has JSON lines. The first has the block size::

    {"kvtide_trace": 1, "block_tokens": 256, "layout_bytes": 33554432}

and each other line is a request: milliseconds since the recording began, tokens of the prompt, and a number for each of
its full blocks, which identifies the block together with everything before it. ``tenant`` is omitted for the default
tenant::

    {"timestamp": 1503, "input_length": 700, "hash_ids": [81..., 17...], "tenant": "3f...", "have": 1}

``have`` is the number of blocks that the engine had in its own cache; it is omitted if there were none.

*Anonymous.* Block numbers and tenant names are keyed hashes. The key is made when the recording begins and is never
written: a reader of the file cannot test whether it has a known prompt, and two recordings have no number in common.
The file has no tokens, no model names and no time of day.

*Cheap for callers.* A caller appends a few values to a queue; a thread of the recorder hashes and writes them, and
checks the queue a few times a second. If the disk is too slow, the queue fills up, and requests are left out and
counted. A problem with the file ends the recording, and affects nothing else.

*Readable after any failure.* Lines are written whole, and the file is truncated to its last whole line if a write
fails. A process that is killed loses what was in the queue, a fraction of a second, and perhaps a part of its last
line. A gzip file is flushed as often, so that all but that can be read from it too.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import threading
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec
from blake3 import blake3

from kvtide import forks
from kvtide.clock import Clock
from kvtide.errors import ConfigError
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.index.work_slices import SLICE, rest
from kvtide.plan.prefill import PrefillCost

__all__ = ["REASONS", "RecordedShape", "Recorder", "RecorderStatistics"]

log = logging.getLogger("kvtide.recorder")

_PAUSE = 0.2
"""Seconds between two checks of the queue."""
_LONGEST = 5.0
"""Seconds that ``close`` waits for the disk."""
_WAITING = 1 << 18
"""Blocks of prompts that may wait to be written; 8 MiB of names."""
_REQUEST = 8
"""The size of a request in the queue, in addition to its blocks."""
_CHUNK = 1 << 18
"""Approximate number of bytes per write."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
_TRAILER = 64
"""Maximum size of the end of a gzip file, in bytes."""
REASONS = QUEUE_FULL, OTHER_SHAPE, ENDED = "queue full", "other block size", "recording has ended"
"""Why requests are left out."""


class RecordedShape(NamedTuple):
    """The block size, which all requests in a file share."""

    block_tokens: int
    nbytes: int
    """Bytes of a block in memory, all groups together."""


class _Request(NamedTuple):
    milliseconds: int
    tokens: int
    names: bytes
    """The concatenated digests of its full blocks."""
    domain: bytes
    tenant: bytes
    have: int = 0


@dataclass(frozen=True, slots=True)
class RecorderStatistics:
    """Statistics of the recording since the store was opened."""

    active: bool = False
    """Whether requests are still recorded: False after the limit was reached, or the file could not be written."""
    requests: int = 0
    """Requests in the file."""
    bytes_written: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    """Requests that are not in the file, by reason."""
    path: str = ""
    """The file. For administrators, and over HTTP for authenticated callers."""
    prefill: PrefillCost | None = None
    """The cost of computing that the caller of the last recorded request gave; None: none gave any."""
    ttl: float | None = None
    """Seconds that the last stored blocks may live, as their caller asked; None: no limit."""


class Recorder:
    """Records requests from any thread into its own file, until it is closed or the file has ``limit`` bytes."""

    def __init__(self, path: Path, limit: int, clock: Clock) -> None:
        """``path``: a file that does not exist yet; gzip if its name ends in .gz. Or a folder, in which each recording
        creates its own file. Raises ConfigError."""
        self._limit = limit
        self._clock = clock
        self._began = clock.monotonic()
        self._key = secrets.token_bytes(32)
        self._shape: RecordedShape | None = None
        self._queue: deque[_Request] = deque()
        self._waiting = 0
        self._lock = threading.RLock()
        """Guards the queue and the counts. No thread writes to the file under it. Reentrant, because a signal handler
        may match while its own thread has it."""
        self._wake = threading.Event()
        self._closing = False
        self._ended = False
        self._taken = self._requests = self._written = 0
        self._dropped: Counter[str] = Counter()
        self._prefill: PrefillCost | None = None
        self.ttl: float | None = None
        """See ``RecorderStatistics.ttl``."""
        self._fd = -1
        forks.tell(self)
        self._fd, self.path = _create(path)
        self._packer = zlib.compressobj(wbits=31) if self.path.suffix == ".gz" else None
        self._tenants: dict[bytes, str] = {DEFAULT_TENANT.tag: ""}
        self._thread = threading.Thread(target=self._run, name="kvtide-recorder", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._close_file()
            raise
        this = weakref.ref(self)

        def at_exit() -> None:
            """Write the queue of a store that was not closed."""
            if (found := this()) is not None and found._fd >= 0:
                found.close()

        self._at_exit = at_exit
        atexit.register(at_exit)

    def request(
        self,
        names: bytes,
        tokens: int,
        shape: RecordedShape,
        tenant: bytes,
        domain: bytes = b"",
        have: int = 0,
        prefill: PrefillCost | None = None,
    ) -> None:
        """Record a prompt: the concatenated digests of its full blocks, its number of tokens, and how many of the
        blocks its engine ``have`` already.

        ``domain`` distinguishes equal blocks of two trust domains. ``prefill``, the cost of computing, is not written,
        only reported in the statistics. Waits only for other callers.
        """
        size = len(names) // 32 + _REQUEST
        with self._lock:
            if self._ended:
                self._dropped[ENDED] += 1
                return
            if self._shape is None:
                self._shape = shape
            if shape != self._shape:
                self._dropped[OTHER_SHAPE] += 1
                first = self._dropped[OTHER_SHAPE] == 1
            elif self._queue and self._waiting + size > _WAITING:
                self._dropped[QUEUE_FULL] += 1
                return
            else:
                milliseconds = int(1000 * (self._clock.monotonic() - self._began))
                self._queue.append(_Request(milliseconds, tokens, names, domain, tenant, have))
                self._prefill = prefill or self._prefill
                self._waiting += size
                self._taken += 1
                if self._waiting > _WAITING // 4:
                    self._wake.set()
                return
        if first:
            log.warning(
                "requests with blocks of %d tokens and %d bytes are not recorded in %s: it has those with blocks of %d "
                "tokens and %d bytes, which came first",
                *(*shape, self.path, *self._shape),
            )

    def statistics(self) -> RecorderStatistics:
        with self._lock:
            return RecorderStatistics(
                not self._ended,
                self._requests,
                self._written,
                dict(self._dropped),
                str(self.path.absolute()),
                self._prefill,
                self.ttl,
            )

    def end(self) -> None:
        """Stop recording and write the queue. ``close`` waits for it."""
        self._closing = True
        self._wake.set()

    def close(self) -> None:
        """Write the queue and end. A recording without any request leaves no file.

        If the disk hangs, the file is abandoned: it must not stop anything else from closing.
        """
        atexit.unregister(self._at_exit)
        self.end()
        if self._thread is threading.current_thread():
            return
        self._thread.join(_LONGEST)
        if self._thread.is_alive():
            log.warning("%s is incomplete: its disk has not responded for %g s", self.path, _LONGEST)

    def forked(self) -> None:
        fd, self._fd, self._ended = self._fd, -1, True
        if fd >= 0:
            forks.close([fd])

    # -- the recorder's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        closing = False
        try:
            while not closing and not self._ended:
                self._wake.wait(_PAUSE)
                closing = self._closing  # read before the queue, so that everything queued until then is written
                self._wake.clear()
                self._write_queue()
        except OSError as e:
            log.warning(
                "recording has ended, because %s cannot be written: %s. The requests recorded so far can be used",
                self.path,
                e.strerror,
            )
        except Exception:
            log.exception("recording to %s has ended, because of a fault in kvtide", self.path)
        finally:
            self._end()
            self._close_file()

    def _write_queue(self) -> None:
        lines: list[bytes] = []
        size = 0
        while not self._ended:
            with self._lock:
                if not self._queue:
                    break
                request = self._queue.popleft()
                self._waiting -= len(request.names) // 32 + _REQUEST
            lines.append(self._line(request))
            size += len(lines[-1])
            if size >= _CHUNK:
                self._write(lines)
                lines, size = [], 0
        if lines and not self._ended:
            self._write(lines)

    def _line(self, request: _Request) -> bytes:
        hasher = blake3(key=self._key)  # one for all blocks: making one costs more than hashing a block
        reset, update, digest = hasher.reset, hasher.update, hasher.digest
        names, domain, numbers = request.names, request.domain, list[int]()
        for at in range(0, len(names), 32):
            if at and not at % (32 * SLICE):
                rest()  # threads that serve engines in this process need the interpreter too
            reset()
            update(names[at : at + 32] + domain)
            numbers.append(int.from_bytes(digest(7), "little") >> 3)  # below 2**53, the limit of some JSON readers
        line: dict[str, object] = {
            "timestamp": request.milliseconds,
            "input_length": request.tokens,
            "hash_ids": numbers,
        }
        if tenant := self.tenant(request.tenant):
            line["tenant"] = tenant
        if request.have:
            line["have"] = request.have
        return msgspec.json.encode(line) + b"\n"

    def tenant(self, tag: bytes) -> str:
        """The name that the tenant with that tag has in the file."""
        found = self._tenants.get(tag)
        if found is None:
            # The input is shorter than that of a block, so the two never collide.
            found = blake3(b"tenant" + tag, key=self._key).hexdigest(8)
            if len(self._tenants) < SLICE:
                self._tenants[tag] = found
        return found

    def _write(self, lines: Sequence[bytes]) -> None:
        """Write lines, or as many as the limit allows. Raises OSError, and then none of them is in the file."""
        data = b"".join(lines)
        if not self._written:
            assert self._shape is not None
            header = {"kvtide_trace": 1, "block_tokens": self._shape.block_tokens, "layout_bytes": self._shape.nbytes}
            data = msgspec.json.encode(header) + b"\n" + data
        packer, room = None, self._limit - self._written
        if self._packer is not None:
            packer, room = self._packer.copy(), room - _TRAILER
            data = packer.compress(data) + packer.flush(zlib.Z_SYNC_FLUSH)
        if len(data) <= room:
            _append(self._fd, data, self._written)
            self._packer = packer
            with self._lock:
                self._written += len(data)
                self._requests += len(lines)
        elif len(lines) > 1:
            self._write(lines[: len(lines) // 2])
            if not self._ended:
                self._write(lines[len(lines) // 2 :])
        else:
            log.warning(
                "recording has ended: %s has reached its limit of %d bytes (record.limit)", self.path, self._limit
            )
            self._end()

    def _end(self) -> None:
        """Stop recording, and count the requests that were not written."""
        with self._lock:
            self._ended = True
            self._queue.clear()
            self._waiting = 0
            if lost := self._taken - self._requests:
                self._dropped[ENDED] += lost
                self._taken = self._requests

    def _close_file(self) -> None:
        fd, self._fd = self._fd, -1
        with contextlib.suppress(OSError):
            if self._written and self._packer is not None:
                _append(fd, self._packer.flush(), self._written)
            if not self._written and os.path.samestat(os.fstat(fd), os.lstat(self.path)):
                self.path.unlink()
        os.close(fd)


def _create(path: Path) -> tuple[int, Path]:
    """Create a new file that only this user can read."""
    path = path.expanduser()
    try:
        files = (path / f"trace-{n:04}.jsonl" for n in count(1)) if path.is_dir() else iter([path])
        for file in files:
            with contextlib.suppress(FileExistsError):
                return os.open(file, _NEW, 0o600), file
    except OSError as e:
        raise ConfigError(
            f"requests cannot be recorded in {path}: {e.strerror}; give a file in an existing folder that you may "
            "write to"
        ) from e
    raise ConfigError(
        f"requests cannot be recorded in {path}: it exists already, and is not overwritten. Move it away, or give "
        "another name, or a folder, in which each recording creates its own file"
    )


def _append(fd: int, data: bytes, at: int) -> None:
    """Write ``data`` at the end of the file, at ``at``; all or nothing, as far as possible."""
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(fd, left) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, at)
        raise
