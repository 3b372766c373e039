"""Blobs as files on any POSIX filesystem: NFS, CephFS, Lustre, or a local one that several processes share.

A blob is written to a temporary name and then renamed, which is atomic: a reader always finds a blob whole, whatever
happened to its writer, and writers need no coordination. Two that write the same blob both succeed, and one of the
equal files stays. The folder of a blob is derived from its name, so that no folder gets too long, and no request needs
a listing.

Other programs may be able to write here too. A name of a blob that is not a regular file is not a blob: it is not
found, and storing that blob replaces it. Where a folder of blobs is a link, its blobs are neither found nor written:
kvtide must not read or remove what the link points to.

A filesystem that hangs cannot be interrupted: a call ends when the kernel returns, and ``timeout`` is only checked
between files. The tier does not wait for it; see tier.py.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from kvtide.block import ALIGN, Span
from kvtide.tiers.format.reason import Reason
from kvtide.tiers.format.record import Rejected
from kvtide.tiers.shared.blobs import Turn
from kvtide.tiers.syscalls import Disk, Irregular, check_regular

__all__ = ["Files"]

log = logging.getLogger("kvtide.files")

T = TypeVar("T")

_SHARD = 2
"""Characters of a name that make the name of its folder: for digests, 256 folders."""
_NEW = ".new"
"""The suffix of a file that is not complete yet."""
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


class Files:
    """The files under ``root``. Thread-safe."""

    def __init__(self, root: Path, *, direct: bool = True, disk: Disk | None = None) -> None:
        self._root = str(root)
        self._direct = direct
        self._disk = disk or Disk()
        self._mine = secrets.token_hex(6)
        self._numbers = itertools.count()
        self._rooted = False
        """Whether the names of the parent folders were synced."""
        self._warned = False

    def __repr__(self) -> str:
        return f"<Files {self._root}>"

    def __str__(self) -> str:
        return f"the files in {self._root}"

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
        except Irregular as e:
            self._warn(e, name)
            return -1
        try:
            return self._disk.read_all(fd, spans, offset)
        except Irregular as e:
            self._warn(e, name)
            return -1
        finally:
            self._disk.close(fd)

    def _warn(self, e: Irregular, name: str) -> None:
        """Warn about a foreign entry, only once: otherwise its creator could fill the log."""
        if not self._warned:
            self._warned = True
            log.warning(
                "%s: %s is %s, so it is not used; there may be more of them. Something else writes to this folder: "
                "check its permissions, and remove what is not kvtide's",
                self._root,
                e.filename if "/" in str(e.filename) else self._path(name),
                e.strerror,
            )

    def write(
        self, batch: Sequence[tuple[str, Sequence[Span]]], timeout: float, turn: Turn = contextlib.nullcontext
    ) -> list[bool]:
        left = _Time(timeout)
        for name, spans in batch:
            left.check()
            path = self._path(name)
            if not self._there(name, path):
                with self._new(path, spans, lambda: left.stopped(turn)) as new:
                    try:
                        self._disk.rename(new, path, durable=False)
                    except (IsADirectoryError, NotADirectoryError) as e:
                        raise Rejected(Reason.NAME_IS_A_FOLDER) from e
        return [True] * len(batch)

    def _there(self, name: str, path: str) -> bool:
        """Whether there is such a blob. Raises Rejected if there cannot be one, because its folder is a link.

        An attacker who creates a link there after this check gets one of kvtide's files elsewhere, under a name that
        the attacker cannot choose. No existing file is read, replaced or removed by that.
        """
        try:
            return self._disk.exists(path)
        except Irregular as e:
            self._warn(e, name)
            raise Rejected(Reason.FOLDER_IS_NO_FOLDER) from e

    def create(self, name: str, data: bytes, timeout: float) -> bool:
        path = self._path(name)
        try:
            if self._there(name, path):
                return False
        except Rejected as e:
            raise OSError(errno.ENOTDIR, str(e), path) from e
        with self._new(path, [memoryview(data)] if data else [], contextlib.nullcontext, direct=False) as new:
            try:
                self._disk.link(new, path)
            except FileExistsError:
                if self._disk.exists(path) or not self._remove(path):
                    return False
                self._disk.link(new, path)  # a FIFO, for example, had its name: then no other writer could win either
            except OSError as e:
                if e.errno in _NO_LINKS:
                    raise OSError(
                        errno.ENOTSUP,
                        "this filesystem has no hard links, by which one of many writers wins",
                        path,
                    ) from e
                raise
            finally:
                self._forsake(new)
        return True

    @contextlib.contextmanager
    def _new(self, path: str, data: Sequence[Span], turn: Turn, *, direct: bool = True) -> Iterator[str]:
        """Write a complete file under a temporary name, for the caller to rename or link; it is removed if that fails.

        The turn covers the bytes alone: looking up, creating and naming a file takes as long as writing 2 MiB when
        threads wait for the GIL at each step, and the disk would get half of the concurrency it can use. But what goes
        through the page cache may be sent only when the file is closed.
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
        with contextlib.suppress(OSError):  # a full or dead disk: ``tidy`` finds it later
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
        return [self._found(name) for name in _within(timeout, names)]

    def _found(self, name: str) -> bool:
        with contextlib.suppress(Rejected):
            return self._there(name, self._path(name))
        return False

    def sync(self, names: Sequence[str], timeout: float) -> list[bool]:
        folders: dict[Path, None] = {}
        found = []
        for name in _within(timeout, names):
            path = self._path(name)
            try:
                fd = self._disk.open_to_read(path, direct=False)
            except (FileNotFoundError, Irregular):
                found.append(False)
                continue
            try:
                check_regular(fd, path)
                self._disk.sync(fd)
            except Irregular:
                found.append(False)
                continue
            finally:
                self._disk.close(fd)
            found.append(True)
            folders[Path(path).parent] = None
        # The name of a file is in its folder, and that of a folder, which may be new as well, in its parent.
        root = Path(self._root)
        above = [root] if self._rooted else [root, *root.parents[:2]]
        for folder in [*folders, *(above if folders else ())]:
            self._disk.sync_folder(folder)
            self._rooted = self._rooted or folder == above[-1]
        return found

    def delete(self, names: Sequence[str], timeout: float) -> None:
        gone = [path for path in map(self._path, _within(timeout, names)) if self._remove(path)]
        for folder in {Path(path).parent for path in gone}:
            self._disk.sync_folder(folder)

    def _remove(self, path: str) -> bool:
        """Remove a file; False if there is none, also if a folder has its name, or its own folder is a link."""
        try:
            return self._disk.delete(path)
        except (Irregular, IsADirectoryError):
            return False

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
                    removed += self._remove(str(path))
                else:
                    left += about.st_size
        return removed, left

    def _entries(self, timeout: float, prefix: str) -> Iterator[tuple[Path, os.stat_result]]:
        root = Path(self._root)
        folders = [prefix[:_SHARD]] if len(prefix) >= _SHARD else self._disk.names(root)
        for folder in _within(timeout, folders):
            try:
                for name, about in self._disk.entries(root / folder):
                    # A file in another folder than its name says is not kvtide's, and could not be found to be removed.
                    if name.startswith(prefix) and name[:_SHARD] == folder:
                        yield root / folder / name, about
            except FileNotFoundError:
                continue
            except Irregular as e:
                self._warn(e, folder)

    def close(self) -> None:
        """Nothing to close: no file stays open."""

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
        """A turn; waiting for it does not count."""
        asked = time.monotonic()
        with turn():
            self._end += time.monotonic() - asked
            yield


def _within(timeout: float, items: Iterable[T]) -> Iterator[T]:
    """Yield the items one by one, as long as there is time."""
    left = _Time(timeout)
    for item in items:
        left.check()
        yield item
