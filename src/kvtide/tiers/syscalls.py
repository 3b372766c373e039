"""The system calls of tiers on files, in one place, so that tests can make each of them fail.

Other programs may be able to write to the folder of a tier. What they put there must cost no more than blocks. So a
file in it is opened without following a link and without waiting for the other end of a FIFO, must be a regular file
(else ``Irregular`` is raised), and is read up to a limit. The folder itself may be a link.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtide.block import ALIGN, Span
from kvtide.tiers.format.reason import Reason
from kvtide.tiers.format.record import Rejected

__all__ = ["VECTORS", "AnyPath", "Disk", "Irregular", "check_regular", "read_whole"]

AnyPath = str | Path
"""Strings where a path is made for every block: a Path costs ten times as much, at each step."""

VECTORS = 1024
"""The maximum number of buffers that one call reads into or writes from."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_INSIDE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""The flags for files in the folder of a tier. O_NONBLOCK has no effect on a regular file."""
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_FILE = {errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR, errno.ESPIPE}
"""Error numbers when a link, a socket, a device, a folder or a FIFO is opened or read as a file."""
_PUNCH = 3
"""Of fallocate(2): FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE."""


class Irregular(OSError):  # noqa: N818 - a verdict on what is there
    """There is something other than a regular file, or than a folder that is not a link."""

    def __init__(self, path: AnyPath, what: str = "not a regular file") -> None:
        super().__init__(errno.ELOOP, what, str(path))


def check_regular(fd: int, path: AnyPath) -> os.stat_result:
    """The fstat result of a regular file. Raises Irregular."""
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode):
        raise Irregular(path)
    return about


def read_whole(path: AnyPath, most: int | None = None) -> bytes:
    """The bytes of a file in a tier's folder. Raises Irregular, and OSError (EFBIG) if it has more than ``most``."""
    with _irregular(path):
        fd = os.open(path, os.O_RDONLY | _INSIDE)
    try:
        size = check_regular(fd, path).st_size
        if most is not None and size > most:
            raise OSError(errno.EFBIG, f"it has {size} bytes, and no such file has more than {most}", str(path))
        with open(fd, "rb", closefd=False) as file:
            return file.read(size)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _irregular(path: AnyPath) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        if e.errno in _NO_FILE:
            raise Irregular(path) from e
        raise


class Disk:
    """The real disk. Methods raise OSError; offsets and lengths are in bytes.

    The methods for files of shared storage (``open_to_read``, ``exists``, ``delete``, ``entries``) do not follow a link
    in place of the file's folder, either.
    """

    def open(self, path: AnyPath, *, direct: bool, create: bool = False) -> int:
        """Callers that did not create the file must ``check_regular``."""
        flags = os.O_RDWR | _INSIDE | (os.O_CREAT if create else 0)
        try:
            return os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)
        except OSError as e:
            # EINVAL means that there is no direct I/O; but for a FIFO it says nothing about the filesystem.
            if e.errno in _NO_FILE or (e.errno == errno.EINVAL and direct and not _is_regular(path)):
                raise Irregular(path) from e
            raise

    def open_to_read(self, path: AnyPath, *, direct: bool) -> int:
        """Open for ``read``, which refuses anything but a regular file: so that check needs no extra call."""
        folder, name = _real_folder(path)
        try:
            return os.open(name, os.O_RDONLY | _INSIDE | (os.O_DIRECT if direct else 0), dir_fd=folder)
        except OSError as e:
            if e.errno in _NO_FILE or (e.errno == errno.EINVAL and direct and not _is_regular(name, folder)):
                raise Irregular(path) from e
            raise
        finally:
            os.close(folder)

    def close(self, fd: int) -> None:
        os.close(fd)

    def resize(self, fd: int, nbytes: int) -> None:
        """Make the file exactly that long, with its blocks allocated, so that no later write finds the disk full."""
        if os.fstat(fd).st_size > nbytes:
            os.ftruncate(fd, nbytes)
        if nbytes:
            os.posix_fallocate(fd, 0, nbytes)

    def discard(self, fd: int, offset: int, nbytes: int) -> None:
        """Discard a part of a file on the medium; it reads as zeros then. Its blocks are allocated again."""
        if _LIBC.fallocate(fd, _PUNCH, ctypes.c_int64(offset), ctypes.c_int64(nbytes)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        os.posix_fallocate(fd, offset, nbytes)

    def read(self, fd: int, into: Sequence[Span], offset: int) -> int:
        """Fill the buffers from ``offset``; returns how many bytes were read, which may be fewer."""
        try:
            return os.preadv(fd, into, offset)
        except OSError as e:
            if e.errno in _NO_FILE:
                raise Irregular(f"file descriptor {fd}") from e
            raise

    def read_all(self, fd: int, into: Sequence[Span], offset: int) -> int:
        """As ``read``, but returns fewer bytes only at the end of the file."""
        total, left = 0, list(into)
        while left and (count := self.read(fd, left, offset + total)) > 0:
            total += count
            _pass(left, count)
        return total

    def write(self, fd: int, data: Sequence[Span | bytes], offset: int) -> int:
        """Write the buffers at ``offset``; returns how many bytes were written, which may be fewer."""
        return os.pwritev(fd, data, offset)

    def write_all(self, fd: int, data: Sequence[Span], offset: int, direct: bool) -> None:
        """Write the buffers at ``offset``, all of them. Raises Rejected after a short write."""
        left = list(data)
        while left:
            count = self.write(fd, left, offset)
            if count <= 0 or (count % ALIGN and direct):
                raise Rejected(Reason.SHORT_WRITE)
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
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def rename(self, old: AnyPath, new: AnyPath, *, durable: bool = True) -> None:
        """Replace ``new`` by ``old`` atomically and, if ``durable``, make that survive a power loss."""
        os.replace(old, new)  # noqa: PTH105 - see AnyPath
        if durable:
            self.sync_folder(Path(new).parent)

    def unlink(self, path: Path) -> None:
        """Remove a file, if it exists, and make that survive a power loss: its content must not come back."""
        with contextlib.suppress(FileNotFoundError):  # not path.exists(), which is False for a dangling link
            path.unlink()
            self.sync_folder(path.parent)

    def link(self, old: AnyPath, new: AnyPath) -> None:
        """Give a file a second name. Raises FileExistsError if that name exists."""
        Path(new).hardlink_to(old)

    def exists(self, path: AnyPath) -> bool:
        """Whether there is a regular file. Raises Irregular if its folder is not one."""
        try:  # not os.path.exists, which reports a failing mount as empty
            folder, name = _real_folder(path)
        except FileNotFoundError:
            return False
        try:
            return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            return False
        finally:
            os.close(folder)

    def delete(self, path: AnyPath) -> bool:
        """Remove a file; returns whether it existed. A power loss may bring it back."""
        try:
            folder, name = _real_folder(path)
        except FileNotFoundError:
            return False
        try:
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            return False
        finally:
            os.close(folder)
        return True

    def entries(self, folder: AnyPath) -> Iterator[tuple[str, os.stat_result]]:
        """The regular files of a folder. Raises Irregular if it is not a folder."""
        here, _ = _real_folder(f"{folder}/.")
        try:
            listing = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=here)
        finally:
            os.close(here)
        try:
            for name in sorted(os.listdir(listing)):  # noqa: PTH208 - it is a descriptor
                with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                    about = os.stat(name, dir_fd=listing, follow_symlinks=False)
                    if stat.S_ISREG(about.st_mode):
                        yield name, about
        finally:
            os.close(listing)

    def make_folder(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def names(self, folder: Path) -> list[str]:
        return sorted(os.listdir(folder))  # noqa: PTH208 - names, not paths

    def boot_id(self) -> bytes:
        """An id of the current boot of this machine; empty where the system provides none."""
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        except OSError:
            return b""


def _real_folder(path: AnyPath) -> tuple[int, str]:
    """Open the folder that a file is in, to look the file up in it; also returns the file's name.

    Raises Irregular if it is a link, or not a folder. Others may replace it at any time: so it is opened, not just
    checked.
    """
    above, _, name = str(path).rpartition("/")
    try:
        return os.open(above, _FOLDER), name
    except OSError as e:
        if e.errno in (errno.ENOTDIR, errno.ELOOP):
            raise Irregular(above, "a link, or not a folder") from e
        raise


def _is_regular(path: AnyPath, folder: int | None = None) -> bool:
    try:
        return stat.S_ISREG(os.stat(path, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return True  # then the error had another cause


def _pass(left: list[Span], count: int) -> None:
    """Remove the first ``count`` bytes from the buffers."""
    while left and count >= len(left[0]):
        count -= len(left.pop(0))
    if count:
        left[0] = left[0][count:]
