"""What a tier on a disk has moved, and what went wrong meanwhile."""

from __future__ import annotations

import logging
import threading
from collections import Counter

from kvtide.tiers.base import Miss, ReadResult
from kvtide.tiers.format.record import NotForAsker, Rejected

__all__ = ["TierCounters", "bytes_read", "read_results", "size_for"]

log = logging.getLogger("kvtide.nvme")


_REFUSED, _FAILED = -1, -2
"""In place of the bytes that were read: why there are none. 0: the record is damaged or gone."""
_MISSES: dict[int, ReadResult] = {0: False, _REFUSED: Miss.REFUSED, _FAILED: Miss.FAILED}


def size_for(e: Exception) -> int:
    """What stands in place of a block's bytes when reading it failed; see ``read_results``."""
    if isinstance(e, NotForAsker):
        return _REFUSED
    return 0 if isinstance(e, Rejected) else _FAILED


def bytes_read(sizes: list[int]) -> int:
    """How many bytes such reads brought together."""
    return sum(sizes) if min(sizes, default=0) > 0 else sum(size for size in sizes if size > 0)


def read_results(sizes: list[int]) -> list[ReadResult]:
    """The answers to reads that brought so many bytes each, or failed."""
    if min(sizes, default=1) > 0:
        return [True] * len(sizes)
    return [True if size > 0 else _MISSES[size] for size in sizes]


class TierCounters:
    """Counts. Safe from any thread; to read several that agree, take ``lock``."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.read = self.written = 0
        """Bytes."""
        self.failures: Counter[str] = Counter()
        """Blocks that could not be moved, by verb: "read", "write"."""
        self.reasons: Counter[str] = Counter()
        self.errors = 0
        """Of the disk, in a row."""

    def moved(self, read: int = 0, written: int = 0) -> None:
        """So many bytes went well."""
        with self.lock:
            self.read += read
            self.written += written
            self.errors = 0

    def failed(self, verb: str, e: Exception, count: int = 1) -> None:
        """So many blocks could not be moved."""
        reason = _reason(verb, e)
        with self.lock:
            # An asker who is refused says nothing of the tier: it has a reason of its own, but is no failure.
            self.failures[verb] += 0 if isinstance(e, NotForAsker) else count
            self.reasons[reason] += count
            self.errors += isinstance(e, OSError)


def _reason(verb: str, e: Exception) -> str:
    if isinstance(e, Rejected):
        return str(e)
    if isinstance(e, OSError):
        return f"{verb}: {e.strerror}"
    if isinstance(e, MemoryError):
        return f"{verb}: out of memory"
    # A fault of ours. It costs this block, not the thread, and nobody who waits for the batch.
    log.error("could not %s a block", verb, exc_info=e)
    return f"{verb}: {type(e).__name__}"
