"""Quickly measures how fast this machine moves bytes, to estimate how long a replayed trace's bytes would take."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

__all__ = ["TierSpeeds", "measure"]

_PART = 4 << 20
_PARTS = 16


class TierSpeeds(msgspec.Struct, frozen=True):
    """Bytes per second."""

    memory: float
    disk_read: float
    disk_write: float


def measure(folder: Path | None = None) -> TierSpeeds:
    """Measure copies in memory, and direct I/O in ``folder`` (default: the temporary folder), one thread, 64 MiB."""
    source, target = np.ones(_PART * _PARTS, np.uint8), np.ones(_PART * _PARTS, np.uint8)
    began = time.perf_counter()
    np.copyto(target, source)
    memory = len(source) / (time.perf_counter() - began)
    read, write = _disk(folder or Path(tempfile.gettempdir()))
    return TierSpeeds(memory, read, write)


def _disk(folder: Path) -> tuple[float, float]:
    with mmap.mmap(-1, _PART) as buffer, tempfile.NamedTemporaryFile(dir=folder, prefix="kvtide-speed-") as file:
        try:
            descriptor = os.open(file.name, os.O_RDWR | os.O_DIRECT)
        except OSError:  # the filesystem does not support O_DIRECT
            descriptor = os.open(file.name, os.O_RDWR)
        try:
            os.posix_fallocate(descriptor, 0, _PART * _PARTS)
            seconds = []
            for move in (os.pwritev, os.preadv):
                began = time.perf_counter()
                for part in range(_PARTS):
                    move(descriptor, [buffer], part * _PART)
                seconds.append(time.perf_counter() - began)
        finally:
            os.close(descriptor)
    return _PART * _PARTS / seconds[1], _PART * _PARTS / seconds[0]
