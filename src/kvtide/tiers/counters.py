"""Counts the bytes that a tier with records has moved, and its failures."""

from __future__ import annotations

import logging
import threading
from collections import Counter

from kvtide.tiers.base import Miss, ReadResult
from kvtide.tiers.format.record import NotForAsker, Rejected

__all__ = ["TierCounters", "bytes_read", "read_results", "size_for"]

log = logging.getLogger("kvtide.nvme")


_REFUSED, _FAILED = -1, -2
"""Used in place of a byte count: why nothing was read. 0: the record is damaged or gone."""
_MISSES: dict[int, ReadResult] = {0: False, _REFUSED: Miss.REFUSED, _FAILED: Miss.FAILED}


def size_for(e: Exception) -> int:
    """The value that replaces a block's byte count when reading it failed; see ``read_results``."""
    if isinstance(e, NotForAsker):
        return _REFUSED
    return 0 if isinstance(e, Rejected) else _FAILED


def bytes_read(sizes: list[int]) -> int:
    """The sum of the byte counts of successful reads."""
    return sum(sizes) if min(sizes, default=0) > 0 else sum(size for size in sizes if size > 0)


def read_results(sizes: list[int]) -> list[ReadResult]:
    """The results of reads, given their byte counts or failure values."""
    if min(sizes, default=1) > 0:
        return [True] * len(sizes)
    return [True if size > 0 else _MISSES[size] for size in sizes]


class TierCounters:
    """Thread-safe counters. To read several consistently, take ``lock``."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.read = self.written = 0
        """Bytes."""
        self.failures: Counter[str] = Counter()
        """Blocks that could not be moved, by verb: "read", "write"."""
        self.reasons: Counter[str] = Counter()
        self.errors = 0
        """Consecutive I/O errors."""

    def count_bytes(self, read: int = 0, written: int = 0) -> None:
        """This many bytes were moved."""
        with self.lock:
            self.read += read
            self.written += written
            self.errors = 0

    def failed(self, verb: str, e: Exception, count: int = 1) -> None:
        """This many blocks could not be moved."""
        reason = _reason(verb, e)
        with self.lock:
            # A refused reader is no fault of the tier: it is counted as a reason, but not as a failure.
            self.failures[verb] += 0 if isinstance(e, NotForAsker) else count
            self.reasons[reason] += count
            self.errors += isinstance(e, OSError)


def _reason(verb: str, e: Exception) -> str:
    if isinstance(e, Rejected):
        return str(e)
    if isinstance(e, OSError):
        return f"{verb}: {e.strerror or e}"
    if isinstance(e, MemoryError):
        return f"{verb}: out of memory"
    # A bug. It costs this block, but neither the thread nor the rest of the batch.
    log.error("could not %s a block", verb, exc_info=e)
    return f"{verb}: {type(e).__name__}"
