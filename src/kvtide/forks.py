"""Protects resources of a process from its forked children.

``os.fork`` copies memory and descriptors, but no thread other than the one that forks. So in the child every lock that
another thread held is held forever, no I/O thread responds, and every file, socket and lock still belongs to the
parent. Therefore nothing that was opened before a fork can be used in the child:

- its methods raise ForkedError, before they take any lock (``check``);
- ``close``, leaving a ``with`` block, and ``release`` or ``abort`` of a lease or reservation do nothing;
- its descriptors are closed, without a message to the other end. A file that stays open in a child would keep its
  parent's lock alive after the parent has died.

Every object with descriptors or public methods registers for forks (``tell``). Its ``forked`` runs in the child, on the
only thread there. It must take no lock and write nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from kvtide.errors import ForkedError

__all__ = ["LockFile", "Process", "check", "close", "here", "tell"]


class Process:
    """A process, from its start or the fork that made it. Compare it with ``here`` by ``is``: process ids are
    reused."""

    __slots__ = ("pid",)

    def __init__(self) -> None:
        self.pid = os.getpid()


here = Process()
"""This process. Read it as ``forks.here``: it changes with a fork."""


class ForkNotice(Protocol):
    """The interface of objects passed to ``tell``."""

    def forked(self) -> None:
        """Called in the child of a fork. Close descriptors; take no lock, because a thread that does not exist here may
        hold it."""


_told: weakref.WeakSet[ForkNotice] = weakref.WeakSet()
_opening = threading.RLock()
"""Held while a lock file is opened or closed. It delays forks meanwhile: the child would not know of the descriptor."""


def tell(thing: ForkNotice) -> None:
    """Call ``thing.forked`` in every process that is forked from now on, as long as ``thing`` exists."""
    _told.add(thing)


def check(origin: Process, what: str = "store") -> None:
    """Raise ForkedError unless this is still the process ``origin``."""
    if origin is not here:
        raise ForkedError(
            f"this {what} was opened in process {origin.pid}, and this is process {os.getpid()}, which was forked from "
            "it: open the store again here, or let both processes use a node (see kvtide node --help)"
        )


def close(descriptors: Iterable[int]) -> None:
    """Close a child's copies of descriptors."""
    for fd in descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)


def _before() -> None:
    _opening.acquire()


def _in_parent() -> None:
    _opening.release()


def _in_child() -> None:
    global here
    _opening.release()
    here = Process()
    for thing in list(_told):
        with contextlib.suppress(Exception):  # a failure must not keep the others' descriptors open
            thing.forked()


os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)


class LockFile:
    """A file that is locked by flock(2), for one process at a time.

    The owner unlocks it explicitly, because a forked child has a copy of the descriptor, and the lock lasts as long as
    any copy. The child closes its copy at once, without unlocking, because the lock is its parent's.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, or create it. Raises OSError."""
        self._fd = -1
        tell(self)
        with _opening:
            # The file must be ours alone: a link or a FIFO in its place would make us write elsewhere, or wait.
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._fd = os.open(path, flags, 0o600)
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                fd, self._fd = self._fd, -1
                os.close(fd)
                raise OSError(errno.EINVAL, "not a regular file: take it away", str(path))

    def take(self, *, wait: bool) -> None:
        """Take the lock. Raises BlockingIOError if another process has it and ``wait`` is False."""
        fcntl.flock(self._fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))

    def read(self) -> str:
        """The contents of the file."""
        return os.pread(self._fd, 64, 0).decode(errors="replace").strip()

    def write(self, text: str) -> None:
        """Replace the contents of the file."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text.encode(), 0)

    def close(self) -> None:
        """Release the lock, if it is held. A second call, or one in a child, does nothing."""
        with _opening:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                try:
                    fcntl.flock(fd, fcntl.LOCK_UN)
                finally:
                    os.close(fd)

    def forked(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close([fd])

    def __enter__(self) -> LockFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
