"""Measures the speed of a local disk the way a tier uses it: pieces of a megabyte, with as many threads as the tier.

A temporary file is written and then read, if the budget has space for it besides what blocks may soon need, and the
disk has space too. Its bytes are borrowed from the budget meanwhile, so that segments and this file together never take
more. The file is unlinked right after it is opened: whatever happens to the process, the system frees its bytes. (If
the process is killed in between, the next opening of the directory removes the name.) Where there is no space, slots
that hold blocks are read instead, if that bypasses the page cache; then the write speed stays unknown.

This moves ``FILE`` bytes each way at most, and begins nothing more after ``_SECONDS`` each way.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvtide import forks
from kvtide.block import Span
from kvtide.clock import Clock
from kvtide.tiers.format.scratch import Scratch
from kvtide.tiers.syscalls import Disk, check_regular

__all__ = ["FILE", "Measured", "Piece", "measure_file", "measure_slots"]

FILE = 64 << 20
_PIECE = 1 << 20
_SECONDS = 0.25
_SPARE = 4
"""The disk must have this many times the file's size free."""


class Measured(NamedTuple):
    """Bytes and the seconds that they took; None: not measured."""

    read: tuple[int, float] | None = None
    written: tuple[int, float] | None = None


class Piece(NamedTuple):
    """A part of a file."""

    fd: int
    offset: int
    size: int


class _Nameless:
    """An unlinked file, for this process alone."""

    def __init__(self, path: Path, disk: Disk, direct: bool) -> None:
        self._disk = disk
        path.unlink(missing_ok=True)
        self.fd = disk.open(path, direct=direct, create=True)
        try:
            check_regular(self.fd, path)
            path.unlink()
        except BaseException:
            self.close()
            raise
        forks.tell(self)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self._disk.close(fd)

    def forked(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            forks.close([fd])


def measure_file(
    path: Path, disk: Disk, direct: bool, threads: int, clock: Clock, stop: Callable[[], bool]
) -> Measured:
    """Write and read a temporary file at ``path``. Raises OSError if the disk refuses it."""
    facts = os.statvfs(path.parent)
    if facts.f_bavail * facts.f_frsize < _SPARE * FILE:
        return Measured()
    with contextlib.closing(_Nameless(path, disk, direct)) as file:
        disk.resize(file.fd, FILE)
        data = Scratch().get(_PIECE)
        data[:] = os.urandom(_PIECE)  # a drive may compress its data
        pieces = [Piece(file.fd, offset, _PIECE) for offset in range(0, FILE, _PIECE)]

        def write(piece: Piece, _: Span) -> int:
            disk.write_all(piece.fd, [data], piece.offset, direct)
            return piece.size

        moved, seconds = _at_once(write, pieces, threads, clock, stop)
        written = pieces[: moved // _PIECE]
        if not direct:
            disk.sync(file.fd)
            os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)  # else memory would be measured
        return Measured(_reading(written, disk, threads, clock, stop), (moved, seconds) if moved else None)


def measure_slots(slots: Sequence[Piece], disk: Disk, threads: int, clock: Clock, stop: Callable[[], bool]) -> Measured:
    """Read the slots of a tier, without using the contents."""
    pieces = [
        Piece(fd, offset + start, min(size - start, _PIECE))
        for fd, offset, size in slots
        for start in range(0, size, _PIECE)
    ]
    return Measured(_reading(pieces[: FILE // _PIECE], disk, threads, clock, stop))


def _reading(
    pieces: Sequence[Piece], disk: Disk, threads: int, clock: Clock, stop: Callable[[], bool]
) -> tuple[int, float] | None:
    moved, seconds = _at_once(
        lambda piece, into: disk.read(piece.fd, [into[: piece.size]], piece.offset), pieces, 2 * threads, clock, stop
    )
    return (moved, seconds) if moved else None


def _at_once(
    move: Callable[[Piece, Span], int],
    pieces: Sequence[Piece],
    threads: int,
    clock: Clock,
    stop: Callable[[], bool],
) -> tuple[int, float]:
    """Move pieces, in order, with that many threads; returns bytes and seconds. Raises the first error."""
    turn, go, over = itertools.count(), threading.Event(), threading.Event()
    moved: list[int] = []
    errors: list[BaseException] = []
    began = 0.0

    def work() -> None:
        buffer = Scratch().get(_PIECE)
        buffer[:1] = b"\0"
        go.wait()
        try:
            while not (over.is_set() or stop() or clock.monotonic() - began > _SECONDS):
                if (number := next(turn)) >= len(pieces):
                    break
                moved.append(move(pieces[number], buffer))
        except BaseException as e:  # noqa: BLE001 - raised below
            errors.append(e)
            over.set()

    workers = [
        threading.Thread(target=work, name="kvtide-measure", daemon=True) for _ in range(min(threads, len(pieces)))
    ]
    started: list[threading.Thread] = []
    try:
        for worker in workers:
            worker.start()
            started.append(worker)
    except RuntimeError as e:  # out of threads
        errors.append(OSError(str(e)))
        over.set()
    finally:
        began = clock.monotonic()
        go.set()
        for worker in started:
            worker.join()
    seconds = clock.monotonic() - began
    if errors:
        raise errors[0]
    return sum(moved), seconds
