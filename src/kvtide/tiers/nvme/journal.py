"""The journal: a hint of what a directory holds, so that a full terabyte opens in seconds.

The journal is a file of *frames*: a small head (magic, length, checksum), then records of fixed size that say "this
slot holds this block", "this slot was freed", "this slot is being written" or "this slot has a record of another
version, and is kept". Frames are appended without fsync, so after a power loss the end may be missing or torn. That is
harmless, because headers are authoritative: every read checks key, sequence and checksums. Recovery therefore decides
by the end of the journal:

- closed properly, or the last writer was killed on a machine that is still up (same boot id): the page cache has all of
  it, so it is trusted;
- anything else (torn, missing, another boot without a proper close): the slots' headers are read instead.

Freed slots stay in the journal with the key that their stale header still names, so that a later ``drop`` of that key
finds and overwrites the header: a dropped block must not come back when one day only the headers are left. For the same
reason a slot is announced before it is written: if its writer is killed, recovery checks which block the header names
by then.

In a directory whose records are encrypted the journal is encrypted too: keys of blocks are digests, but an attacker who
can guess a tenant's naming secret (there is a tenant that has none) could look for a prompt in it. Its second frame
then names the store's own data key and a salt, and the records of every later frame are encrypted with a key derived
from both; the nonce is the frame's offset in the file.

A record of a slot's content also names the owner, by the fingerprint of its identity. Older versions of kvtide wrote
zeros there: then the owner is not known until the block is read.

The file is rewritten by atomic rename when it has grown past twice what it needs.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvtide import forks
from kvtide.security.key_ring import OWN
from kvtide.tiers.format.encryption import OPEN, Encryption, FileCipher
from kvtide.tiers.format.record import FAR, Rejected
from kvtide.tiers.syscalls import Disk, read_whole

__all__ = [
    "FREED",
    "HOLDS",
    "KEEPS",
    "PER_SLOT",
    "RECORD",
    "RESERVE",
    "WRITING",
    "Journal",
    "boot_id",
    "entry",
    "latest",
    "longest",
    "replay",
]

RECORD = np.dtype(
    [
        ("place", "<i8"),
        ("sequence", "<i8"),
        ("expiry", "<f8"),
        ("key", "V48"),
        ("parent", "V32"),
        ("depth", "<u4"),
        ("priority", "i1"),
        ("kind", "u1"),
        ("identity", "<i8"),
        ("zeros", "V10"),
    ]
)
assert RECORD.itemsize == 128

Records = npt.NDArray[np.void]

HOLDS, FREED, WRITING, KEEPS = 1, 2, 3, 4

_FRAME = struct.Struct("<4sIQ")
_RECORDS, _OPENED, _CLOSED, _SEALED = b"KVJr", b"KVJo", b"KVJc", b"KVJs"
_SLACK = 1 << 17

PER_SLOT = 3 * RECORD.itemsize + 16
RESERVE = 2 * _SLACK
"""The journal of a directory may take PER_SLOT bytes for each slot, plus RESERVE. At worst the old file has grown to
twice what it needs, and its successor exists beside it."""


def boot_id() -> bytes:
    """An id of the current boot of this machine; empty where the system provides none."""
    return Disk().boot_id()


def _frame(kind: bytes, body: bytes) -> bytes:
    return _FRAME.pack(kind, len(body), xxh3_64_intdigest(body)) + body


_ENTRY = struct.Struct("<qqd48s32sIbBq10x")
assert _ENTRY.size == RECORD.itemsize


def entry(
    kind: int,
    place: int,
    key: bytes,
    sequence: int = 0,
    parent: bytes = b"",
    depth: int = 0,
    expiry: float = math.inf,
    priority: int = 0,
    identity: int = 0,
) -> bytes:
    """One record, as its bytes."""
    return _ENTRY.pack(place, sequence, expiry, key, parent, depth, priority, kind, identity)


def longest(slots: int) -> int:
    """The maximum size of the journal of a directory with that many slots."""
    return PER_SLOT * slots + RESERVE


def replay(path: Path, boot: bytes, encryption: Encryption = OPEN, most: int | None = None) -> tuple[Records, str]:
    """All records in order, and why they cannot be trusted ("" if they can).

    A journal has more than ``most`` bytes only if something else wrote to it: it is not read, since it may be larger
    than memory. A journal with sequence numbers that no writer can have reached is not trusted either.
    """
    try:
        data = read_whole(path, most)
    except FileNotFoundError:
        return np.zeros(0, RECORD), "missing"
    except OSError as e:
        return np.zeros(0, RECORD), "too long" if e.errno == errno.EFBIG else f"unreadable: {e.strerror}"
    parts: list[Records] = []
    closed, writer, at = False, b"", 0
    cipher: FileCipher | None = None
    view = memoryview(data)
    while at < len(data):
        if at + _FRAME.size > len(data):
            return np.zeros(0, RECORD), "torn"
        kind, size, check = _FRAME.unpack_from(data, at)
        body = view[at + _FRAME.size : at + _FRAME.size + size]
        if len(body) != size or xxh3_64_intdigest(body) != check:
            return np.zeros(0, RECORD), "torn"
        closed = kind == _CLOSED
        if kind == _OPENED:
            writer = bytes(body)
        elif kind == _SEALED and size == 48:
            try:
                cipher = encryption.old(bytes(body[:16]), bytes(body[16:])).file_cipher()
            except Rejected as e:
                return np.zeros(0, RECORD), f"sealed, and {e}"
        elif kind == _RECORDS:
            if cipher is None and not encryption.accepts_open:
                return np.zeros(0, RECORD), "not sealed"
            try:
                plain = body if cipher is None else cipher.open(at, body)
                parts.append(np.frombuffer(plain, RECORD))
            except ValueError:
                return np.zeros(0, RECORD), "foreign"
        elif kind != _CLOSED:
            return np.zeros(0, RECORD), "foreign"
        at += _FRAME.size + size
    if not data:
        return np.zeros(0, RECORD), "empty"
    if not closed and (not boot or writer != boot):
        return np.zeros(0, RECORD), "from before a power loss"
    records = np.concatenate(parts) if parts else np.zeros(0, RECORD)
    if int(records["sequence"].max(initial=0)) >= FAR:
        return np.zeros(0, RECORD), "foreign"
    return records, ""


def latest(records: Records) -> Records:
    """The last record of each slot."""
    places = records["place"][::-1]
    _, first = np.unique(places, return_index=True)
    last: Records = records[::-1][first]
    return last


class Journal:
    """The open journal. The caller serialises the calls.

    After a failure to append, the file is removed and nothing more is written: the next opening then reads the headers.
    The journal is only a hint.
    """

    def __init__(self, path: Path, disk: Disk, boot: bytes, encryption: Encryption = OPEN) -> None:
        self._path = path
        self._encryption = encryption
        self._cipher: FileCipher | None = None
        """The cipher for the records of the current file."""
        self._disk = disk
        self.boot = boot
        self._fd = -1
        self._size = 0
        self.failed = ""
        forks.tell(self)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._size

    def full(self, slots: int, more: int = 0) -> bool:
        """Whether to ``compact`` before ``more`` bytes are added, in a directory with that many slots."""
        return self._size + more > 2 * RECORD.itemsize * slots + _SLACK

    def compact(self, current: Callable[[Records], npt.NDArray[np.bool_]]) -> None:
        """Keep only the last record of each slot, of those that are ``current``."""
        if self.failed:
            return
        records, doubt = replay(self._path, self.boot, self._encryption, self._size)
        if doubt:
            self._fail(OSError(f"the journal is {doubt}"))
        else:
            records = latest(records)
            # Whatever a power loss leaves, old or new file, is not trusted: this process has not closed it.
            self.rewrite(records[current(records)], durable=False)

    def rewrite(self, records: Records, *, durable: bool = True) -> None:
        """Start over with ``records`` alone; if ``durable``, the previous content does not come back."""
        if self.failed:
            return
        step = 1 << 16
        fresh = self._path.with_suffix(".new")
        try:
            self._shut()
            self._disk.unlink(fresh)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(fresh, flags, 0o600)
            self._size = 0
            self._put(_OPENED, self.boot)
            seal = self._encryption.new(OWN)
            self._cipher = None if seal is None else seal.file_cipher()
            if seal is not None:
                self._put(_SEALED, seal.name)
            for i in range(0, len(records), step):
                self._put(_RECORDS, records[i : i + step].tobytes())
            if durable:
                self._disk.sync(self._fd)
            self._disk.rename(fresh, self._path, durable=durable)
        except (OSError, Rejected) as e:
            self._fail(e)

    def append(self, records: bytes) -> None:
        """Add records, given as their bytes."""
        self._append(_RECORDS, records)

    def close(self, synced: bool = True) -> None:
        """Record that nothing more follows and, if ``synced``, that everything written survives a power loss."""
        if synced:
            self._append(_CLOSED, b"")
        self._shut()

    def _append(self, kind: bytes, body: bytes) -> None:
        if self.failed or self._fd < 0:
            return
        try:
            self._put(kind, body)
        except OSError as e:
            self._fail(e)

    def _put(self, kind: bytes, body: bytes) -> None:
        if kind == _RECORDS and self._cipher is not None:
            body = self._cipher.close(self._size, body)
        frame = _frame(kind, body)
        if self._disk.append(self._fd, frame) != len(frame):
            raise OSError("short write")
        self._size += len(frame)

    def _fail(self, e: OSError | Rejected) -> None:
        self.failed = str(e)
        self._shut()
        for path in (self._path, self._path.with_suffix(".new")):
            # If even removing fails, recovery is warned by the torn end, or by the boot id.
            with contextlib.suppress(OSError):
                self._disk.unlink(path)
        self._size = 0

    def abandon(self) -> None:
        """Close the file without a closing frame: the next opening decides whether to trust it."""
        self._shut()

    def forked(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            forks.close([fd])

    def _shut(self) -> None:
        # first: a fork in between must not close a number that belongs to another file by then
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._disk.close(fd)
