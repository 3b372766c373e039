"""The system calls of a tier on files, in one place, so that tests can break each of them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from kvtide.block import ALIGN, Span
from kvtide.tiers.record import Rejected

__all__ = ["VECTORS", "AnyPath", "Disk"]

AnyPath = str | Path
"""Strings where a path is made for every block: a Path costs ten times as much, at each step."""

VECTORS = 1024
"""The most parts of memory that one call reads into or writes from."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_PUNCH = 3
"""Of fallocate(2): FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE."""


class Disk:
    """The real disk. Methods raise OSError; offsets and lengths are in bytes."""

    def open(self, path: AnyPath, *, direct: bool, create: bool = False) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)

    def open_to_read(self, path: AnyPath, *, direct: bool) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))

    def close(self, fd: int) -> None:
        os.close(fd)

    def resize(self, fd: int, nbytes: int) -> None:
        """Make the file exactly that long, with its blocks set aside, so that no later write finds the disk full."""
        if os.fstat(fd).st_size > nbytes:
            os.ftruncate(fd, nbytes)
        if nbytes:
            os.posix_fallocate(fd, 0, nbytes)

    def discard(self, fd: int, offset: int, nbytes: int) -> None:
        """Let the medium forget a part of a file, which reads as zeros then; its blocks are set aside anew."""
        if _LIBC.fallocate(fd, _PUNCH, ctypes.c_int64(offset), ctypes.c_int64(nbytes)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        os.posix_fallocate(fd, offset, nbytes)

    def read(self, fd: int, into: Sequence[Span], offset: int) -> int:
        """Fill the buffers from ``offset``; answers how many bytes came, which may be fewer."""
        return os.preadv(fd, into, offset)

    def read_all(self, fd: int, into: Sequence[Span], offset: int) -> int:
        """As ``read``, but fewer bytes come only where the file ends."""
        total, left = 0, list(into)
        while left and (count := self.read(fd, left, offset + total)) > 0:
            total += count
            _pass(left, count)
        return total

    def write(self, fd: int, data: Sequence[Span | bytes], offset: int) -> int:
        """Write the buffers at ``offset``; answers how many bytes went, which may be fewer."""
        return os.pwritev(fd, data, offset)

    def write_all(self, fd: int, data: Sequence[Span], offset: int, direct: bool) -> None:
        """Write the buffers at ``offset``, all of them. Raises Rejected where the disk does not go on."""
        left = list(data)
        while left:
            count = self.write(fd, left, offset)
            if count <= 0 or (count % ALIGN and direct):
                raise Rejected("short write")
            offset += count
            _pass(left, count)

    def append(self, fd: int, data: bytes) -> int:
        """Write at the end of a file that was opened for appending."""
        return os.write(fd, data)

    def sync(self, fd: int) -> None:
        """Return when everything written to this file will survive a power loss."""
        os.fdatasync(fd)

    def sync_folder(self, path: Path) -> None:
        """Return when the names in this folder will survive a power loss."""
        folder = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def rename(self, old: AnyPath, new: AnyPath, *, durable: bool = True) -> None:
        """Put ``old`` in the place of ``new`` at once and, if ``durable``, let that survive a power loss."""
        os.replace(old, new)  # noqa: PTH105 - see AnyPath
        if durable:
            self.sync_folder(Path(new).parent)

    def unlink(self, path: Path) -> None:
        """Remove a file, if it is there, and let that survive a power loss: what it held must not come back."""
        if path.exists():
            path.unlink(missing_ok=True)
            self.sync_folder(path.parent)

    def link(self, old: AnyPath, new: AnyPath) -> None:
        """Give a file a second name. Raises FileExistsError where there is one of that name."""
        Path(new).hardlink_to(old)

    def exists(self, path: AnyPath) -> bool:
        try:  # not os.path.exists, for which a mount that refuses is an empty one
            os.stat(path)  # noqa: PTH116 - see AnyPath
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def delete(self, path: AnyPath) -> bool:
        """Remove a file; whether it was there. A power loss may bring it back."""
        try:
            os.unlink(path)  # noqa: PTH108 - see AnyPath
        except FileNotFoundError:
            return False
        return True

    def make_folder(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def names(self, folder: Path) -> list[str]:
        return sorted(os.listdir(folder))  # noqa: PTH208 - names, not paths

    def boot_id(self) -> bytes:
        """What tells one boot of this machine from another; empty where the system does not say."""
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        except OSError:
            return b""


def _pass(left: list[Span], count: int) -> None:
    """The first ``count`` bytes of the buffers are done."""
    while left and count >= len(left[0]):
        count -= len(left.pop(0))
    if count:
        left[0] = left[0][count:]
