"""Blobs as files on any POSIX filesystem: NFS, CephFS, Lustre, or a local one that several processes share.

A blob is written under a name of its own and then renamed, which a filesystem does at once or not at all: whoever
finds a blob finds it whole, whatever became of its writer, and writers need not know of each other. Two that write the
same blob both succeed, and one of the equal files stays. The folder of a blob follows from its name, so that no
folder gets too long, and nothing is ever listed for a request.

A filesystem that hangs cannot be interrupted: a call ends when the kernel lets it, and ``timeout`` is only looked at
between files. The tier does not wait for it; see shared.py.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from kvtide.block import ALIGN, Span
from kvtide.tiers.blobs import Turn
from kvtide.tiers.disk import Disk

__all__ = ["Files"]

T = TypeVar("T")

_SHARD = 2
"""Letters of a name that make the name of its folder: of digests, 256 folders."""
_NEW = ".new"
"""What ends the name of a file that is not whole yet."""
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


class Files:
    """The files under ``root``. Safe from any thread."""

    def __init__(self, root: Path, *, direct: bool = True, disk: Disk | None = None) -> None:
        self._root = str(root)
        self._direct = direct
        self._disk = disk or Disk()
        self._mine = secrets.token_hex(6)
        self._numbers = itertools.count()
        self._rooted = False
        """Whether the names of the folders above were synced."""

    def __repr__(self) -> str:
        return f"<Files {self._root}>"

    def read(self, batch: Sequence[tuple[str, Sequence[Span]]], timeout: float) -> list[int]:
        return [self._read(name, spans, 0) for name, spans in _within(timeout, batch)]

    def read_part(self, name: str, into: Span, offset: int, timeout: float) -> int:
        return self._read(name, [into], offset)

    def _read(self, name: str, spans: Sequence[Span], offset: int) -> int:
        aligned = not offset % ALIGN and not any(len(span) % ALIGN for span in spans)
        try:
            fd = self._open(self._path(name), direct=aligned, write=False)
        except FileNotFoundError:
            return -1
        try:
            return self._disk.read_all(fd, spans, offset)
        finally:
            self._disk.close(fd)

    def write(
        self, batch: Sequence[tuple[str, Sequence[Span]]], timeout: float, turn: Turn = contextlib.nullcontext
    ) -> list[bool]:
        left = _Time(timeout)
        for name, spans in batch:
            left.check()
            path = self._path(name)
            if not self._disk.exists(path):
                with self._new(path, spans, lambda: left.stopped(turn)) as new:
                    self._disk.rename(new, path, durable=False)
        return [True] * len(batch)

    def create(self, name: str, data: bytes, timeout: float) -> bool:
        path = self._path(name)
        with self._new(path, [memoryview(data)] if data else [], contextlib.nullcontext, direct=False) as new:
            try:
                self._disk.link(new, path)
            except FileExistsError:
                return False
            except OSError as e:
                if e.errno in _NO_LINKS:
                    raise OSError(
                        errno.ENOTSUP, "this filesystem has no hard links, by which one of many writers wins", path
                    ) from e
                raise
            finally:
                self._forsake(new)
        return True

    @contextlib.contextmanager
    def _new(self, path: str, data: Sequence[Span], turn: Turn, *, direct: bool = True) -> Iterator[str]:
        """A whole file that nobody finds, to be given its name; it is gone if that fails.

        The turn is for the bytes alone: finding, making and naming a file takes as long as writing 2 MiB when threads
        wait for the interpreter at each step, and the disk would have half of what it can do at a time. But what does
        not go around the page cache may be sent only when the file is closed.
        """
        new = f"{path}.{self._mine}{next(self._numbers):x}{_NEW}"
        aligned = direct and not any(len(part) % ALIGN for part in data)
        cached = not (aligned and self._direct)
        try:
            with turn() if cached else contextlib.nullcontext():
                fd = self._create(new, direct=aligned)
                try:
                    with contextlib.nullcontext() if cached else turn():
                        self._disk.write_all(fd, data, 0, direct=aligned and self._direct)
                finally:
                    self._disk.close(fd)
            yield new
        except BaseException:
            self._forsake(new)
            raise

    def _create(self, new: str, *, direct: bool) -> int:
        try:
            return self._open(new, direct=direct, write=True)
        except FileNotFoundError:
            self._disk.make_folder(Path(new).parent)
            return self._open(new, direct=direct, write=True)

    def _forsake(self, new: str) -> None:
        with contextlib.suppress(OSError):  # a full or dead disk: it is found later, by ``tidy``
            self._disk.delete(new)

    def _open(self, path: str, *, direct: bool, write: bool) -> int:
        def opened(direct: bool) -> int:
            if write:
                return self._disk.open(path, direct=direct, create=True)
            return self._disk.open_to_read(path, direct=direct)

        if direct and self._direct:
            try:
                return opened(direct=True)
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
                self._direct = False  # this filesystem has no direct I/O
        return opened(direct=False)

    def find(self, names: Sequence[str], timeout: float) -> list[bool]:
        return [self._disk.exists(self._path(name)) for name in _within(timeout, names)]

    def sync(self, names: Sequence[str], timeout: float) -> list[bool]:
        folders: dict[Path, None] = {}
        found = []
        for name in _within(timeout, names):
            path = self._path(name)
            try:
                fd = self._disk.open_to_read(path, direct=False)
            except FileNotFoundError:
                found.append(False)
                continue
            try:
                self._disk.sync(fd)
            finally:
                self._disk.close(fd)
            found.append(True)
            folders[Path(path).parent] = None
        # The name of a file is in its folder, and that of a folder, which may be new as well, in the one above it.
        root = Path(self._root)
        above = [root] if self._rooted else [root, *root.parents[:2]]
        for folder in [*folders, *(above if folders else ())]:
            self._disk.sync_folder(folder)
            self._rooted = self._rooted or folder == above[-1]
        return found

    def delete(self, names: Sequence[str], timeout: float) -> None:
        gone = [path for path in map(self._path, _within(timeout, names)) if self._disk.delete(path)]
        for folder in {Path(path).parent for path in gone}:
            self._disk.sync_folder(folder)

    def list(self, timeout: float, prefix: str = "") -> Iterator[tuple[str, int, float]]:
        for path, about in self._entries(timeout, prefix):
            if path.suffix != _NEW:
                yield path.name, about.st_size, about.st_mtime

    def tidy(self, age: float, timeout: float, alive: Callable[[], None]) -> tuple[int, int]:
        removed, left, now = 0, 0, time.time()
        for path, about in self._entries(timeout, ""):
            alive()
            if path.suffix == _NEW:
                if now - about.st_mtime > age:
                    removed += self._disk.delete(path)
                else:
                    left += about.st_size
        return removed, left

    def _entries(self, timeout: float, prefix: str) -> Iterator[tuple[Path, os.stat_result]]:
        root = Path(self._root)
        folders = [prefix[:_SHARD]] if len(prefix) >= _SHARD else self._disk.names(root)
        for folder in _within(timeout, folders):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                for name in self._disk.names(root / folder):
                    if name.startswith(prefix):
                        with contextlib.suppress(FileNotFoundError):  # it left meanwhile
                            path = root / folder / name
                            yield path, path.stat()

    def close(self) -> None:
        """There is nothing to let go of: no file stays open."""

    def _path(self, name: str) -> str:
        return f"{self._root}/{name[:_SHARD]}/{name}"


class _Time:
    """The seconds that a call may take."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._end = time.monotonic() + timeout

    def check(self) -> None:
        if time.monotonic() > self._end:
            raise TimeoutError(errno.ETIMEDOUT, f"the filesystem took longer than {self._timeout:g} s")

    @contextlib.contextmanager
    def stopped(self, turn: Turn) -> Iterator[None]:
        """A turn; waiting for it takes no time."""
        asked = time.monotonic()
        with turn():
            self._end += time.monotonic() - asked
            yield


def _within(timeout: float, items: Iterable[T]) -> Iterator[T]:
    """The items one by one, as long as there is time."""
    left = _Time(timeout)
    for item in items:
        left.check()
        yield item
