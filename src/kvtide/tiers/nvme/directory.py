"""A directory of segment files: its lock, its version, and the headers in it.

::

    kvtide.json    identifies the directory, with its format version
    lock           held by the process that has the directory open; contains its pid
    journal        a hint of what is where (see journal.py)
    speeds         measured speeds of the disk (see speeds.py)
    heard          the last applied pages of drop logs (see drop_positions.py)
    00000.segment  one page of segment header, then slots of one size, a record in each

A segment's header has the size of its slots and the sequence number at which it was divided into them. Records with a
lower one are left over from an earlier division and are not read.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_128_digest

from kvtide.block import ALIGN
from kvtide.errors import TierError, TierLockedError, TierVersionError
from kvtide.forks import LockFile
from kvtide.tiers.format.encryption import OPEN, Encryption
from kvtide.tiers.format.reason import Reason
from kvtide.tiers.format.record import FAR, Header, OtherVersion, Rejected, parse, recognise
from kvtide.tiers.format.scratch import Scratch
from kvtide.tiers.syscalls import Disk, read_whole

__all__ = ["FORMAT", "Directory", "SegmentHeader", "unreadable"]

FORMAT = 1

_SEGMENT = struct.Struct("<8sHHIQQ16s")
_MAGIC = b"KVTIDE\nS"
_ABOUT = 4096
"""The maximum size of a kvtide.json."""
_NUMBERS = 1 << 20
"""Segment files have lower numbers: the lowest free one is taken, and no process has so many files open."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """How a segment file is divided into slots."""

    size: int
    slots: int
    cut: int
    """The sequence number at which it was divided."""
    version: int = FORMAT
    """A segment of an older version is read, and never written to, until it is empty."""

    @property
    def nbytes(self) -> int:
        return ALIGN + self.size * self.slots

    @property
    def readable(self) -> bool:
        """Whether this kvtide can read segments of that version."""
        return self.version in _READERS

    def pack(self) -> bytes:
        body = _SEGMENT.pack(_MAGIC, FORMAT, 0, self.slots, self.size, self.cut, bytes(16))
        return body[:-16] + xxh3_128_digest(body) + bytes(ALIGN - len(body))

    @classmethod
    def parse(cls, page: bytes) -> SegmentHeader:
        """Raises Rejected if it is not a whole header, OtherVersion if this kvtide cannot read its version."""
        if len(page) < _SEGMENT.size:
            raise Rejected(Reason.TORN)
        magic, version, *_, check = _SEGMENT.unpack_from(page)
        if magic != _MAGIC:
            raise Rejected(Reason.NO_SEGMENT)
        body = page[: _SEGMENT.size - 16] + bytes(16)
        # The checksum has the same offset in every version: a flipped bit must not pass for a newer one.
        if check != xxh3_128_digest(body):
            raise Rejected(Reason.CORRUPT_HEADER)
        reader = _READERS.get(version)
        if reader is None:
            raise OtherVersion(f"version {version}", newer=version > FORMAT)
        return reader(page)


def _read_1(page: bytes) -> SegmentHeader:
    """A segment header of version 1, or of 0, which has the same fields."""
    _, version, _, slots, size, cut, _ = _SEGMENT.unpack_from(page)
    if not slots or not size or size % ALIGN or cut >= 2 * FAR - 1:
        raise Rejected(Reason.CORRUPT_HEADER)
    return SegmentHeader(size, slots, cut, version)


_READERS: dict[int, Callable[[bytes], SegmentHeader]] = {0: _read_1, 1: _read_1}
"""The reader of each version's segment headers. When a version is added, the reader of the previous one stays."""


class Directory:
    """One directory, not necessarily locked."""

    def __init__(self, path: Path, disk: Disk, encryption: Encryption = OPEN) -> None:
        self.path = path
        self.encryption = encryption
        self.disk = disk
        self._lock: LockFile | None = None
        self.new = False
        """Whether ``create`` made it."""

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def measuring(self) -> Path:
        """A temporary file: see measure.py."""
        return self.path / "measuring"

    def segment(self, number: int) -> Path:
        return self.path / f"{number:05}.segment"

    def create(self) -> None:
        """Create the directory, or check that an existing one is kvtide's and of a known version."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.disk.sync_folder(self.path.parent)
        except OSError as e:
            raise TierError(f"cannot make the directory {self.path}: {e.strerror}") from e
        try:
            self.check()
        except FileNotFoundError:
            foreign = [p.name for p in self.path.iterdir() if p.name not in ("lock", "kvtide.json.new")]
            if foreign:
                raise TierError(
                    f"{self.path} is not empty and not kvtide's (it has {foreign[0]!r}): give an empty directory"
                ) from None
            self._name()
            self.new = True

    def _name(self) -> None:
        fresh = self.path / "kvtide.json.new"
        fresh.unlink(missing_ok=True)  # if it is a link, its target must not be written to
        with fresh.open("x") as f:
            f.write(json.dumps({"format": "kvtide nvme", "version": FORMAT}) + "\n")
            f.flush()
            self.disk.sync(f.fileno())  # else a power loss may leave the name with no content
        self.disk.rename(fresh, self.path / "kvtide.json")

    def upgrade(self) -> None:
        """Mark an older directory with the current version, before anything of that version is written into it."""
        if self.check() < FORMAT:
            self._name()

    def check(self) -> int:
        """The version of the directory. Raises unless it is kvtide's, and not newer than this kvtide."""
        name = self.path / "kvtide.json"
        try:
            about = json.loads(read_whole(name, _ABOUT))
            version = about["version"]
            ours = about["format"] == "kvtide nvme" and isinstance(version, int)
        except (ValueError, KeyError, TypeError, RecursionError):
            ours, version = False, 0
        except OSError as e:
            if isinstance(e, FileNotFoundError):
                raise
            raise TierError(f"cannot read {name}: {e.strerror}") from e
        if not ours:
            raise TierError(
                f"{name} is damaged or not kvtide's. If you are sure that {self.path} is kvtide's, "
                f'write {{"format": "kvtide nvme", "version": {FORMAT}}} into it; else give another directory'
            )
        if version > FORMAT:
            raise TierVersionError(
                f"{self.path} has format {version}, newer than this kvtide's {FORMAT}; nothing was touched. "
                "Upgrade kvtide, or give another directory"
            )
        return int(version)

    def lock(self) -> None:
        """Lock the directory for this process."""
        lock = None
        try:
            lock = LockFile(self.path / "lock")
            lock.take(wait=False)
            # only for the error message of another process: a full disk must open too
            with contextlib.suppress(OSError):
                lock.write(f"{os.getpid()}\n")
        except BlockingIOError:
            assert lock is not None
            holder = lock.read() or "unknown"
            lock.close()
            raise TierLockedError(
                f"{self.path} is open in another process (pid {holder}). "
                "Stop that one, or give this one a directory of its own"
            ) from None
        except BaseException as e:
            if lock is not None:
                lock.close()
            if isinstance(e, OSError):
                raise TierError(f"cannot lock {self.path}: {e.strerror}") from e
            raise
        self._lock = lock

    def unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.close()

    def segments(self) -> Iterator[int]:
        """The numbers of the existing segment files."""
        for name in sorted(self.path.glob("*.segment")):
            # Only names that kvtide gives: other files must not be touched.
            known = len(name.stem) < 8 and name.stem.isdecimal() and int(name.stem) < _NUMBERS
            if known and name == self.segment(int(name.stem)):
                yield int(name.stem)

    def direct_works(self) -> bool:
        """Whether the filesystem can do direct I/O."""
        probe = self.path / "probe"
        fd = -1
        try:
            probe.unlink(missing_ok=True)  # a foreign file of that name says nothing about the filesystem
            fd = self.disk.open(probe, direct=True, create=True)
            self.disk.write(fd, [Scratch().get(ALIGN)], 0)
        except OSError as e:
            # A full disk that opened the file is no evidence against direct I/O.
            return fd >= 0 and e.errno in (errno.ENOSPC, errno.EDQUOT)
        finally:
            if fd >= 0:
                self.disk.close(fd)
            with contextlib.suppress(OSError):
                probe.unlink(missing_ok=True)
        return True

    def segment_header(self, fd: int) -> SegmentHeader:
        """Raises Rejected or OSError."""
        page = Scratch().get(ALIGN)
        count = self.disk.read(fd, [page], 0)
        return SegmentHeader.parse(bytes(page[:count]))

    def records(
        self, fd: int, segment: SegmentHeader, slots: range | None = None
    ) -> Iterator[tuple[int, Header | Rejected]]:
        """Slot number and header, or the reason why it was rejected, of every slot that was ever written.

        Of all ``slots``, or of those given.
        """
        slots = range(segment.slots) if slots is None else slots
        # Small slots: read many at once. Large ones: read the headers alone.
        window = max(1, (1 << 22) // segment.size) if segment.size <= 1 << 17 else 1
        scratch = Scratch()
        for first in range(slots.start, slots.stop, window):
            count = min(window, slots.stop - first)
            length = count * segment.size if window > 1 else min(segment.size, 4 * ALIGN)
            data = scratch.get(length)
            try:
                got = self.disk.read(fd, [data], ALIGN + first * segment.size)
            except OSError as e:
                yield from ((first + i, unreadable(e)) for i in range(count))
                continue
            for i in range(count):
                found = data[i * segment.size : min(got, (i + 1) * segment.size)]
                try:
                    size = recognise(found)
                    if size > len(found) and size <= segment.size:
                        found = self._more(fd, ALIGN + (first + i) * segment.size, size)
                    header = parse(found, self.encryption.open_header)
                    self.encryption.check(found)
                except Rejected as e:
                    if e.reason is not Reason.NO_RECORD:
                        yield first + i, e
                    continue
                if header.sequence >= segment.cut:
                    yield first + i, header

    def _more(self, fd: int, offset: int, size: int) -> memoryview:
        data = Scratch().get(size)
        try:
            return data[: self.disk.read(fd, [data], offset)]
        except OSError as e:
            raise unreadable(e) from e


def unreadable(e: OSError) -> Rejected:
    """The verdict on a record that the disk failed to read."""
    return Rejected(Reason.UNREADABLE, f"unreadable: {e.strerror}")
