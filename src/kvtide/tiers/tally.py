"""What a tier on a disk has moved, and what went wrong meanwhile."""

from __future__ import annotations

import logging
import threading
from collections import Counter

from kvtide.tiers.record import Rejected

__all__ = ["Tally"]

log = logging.getLogger("kvtide.nvme")


class Tally:
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
            self.failures[verb] += count
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
