"""The node's memory that a client has mapped, and when it was unmapped.

Views keep their mapping alive, even if the node dies. When the last view of a segment is freed, its mapping is removed,
and the node or its successor is told: until then it counts that memory as used by this client.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Callable

import numpy as np

from kvtide.block import Span
from kvtide.errors import TierError

__all__ = ["Mappings"]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_STRETCH = 16 << 20


class Mappings:
    """All memory that a client has mapped, of this node and of earlier ones."""

    def __init__(self, ended: Callable[[], None]) -> None:
        """``ended`` is called after memory was unmapped, on any thread and at any point of its code: it must take no
        lock."""
        self._names: set[str] = set()
        self._ended = ended
        self._touching: set[threading.Thread] = set()
        self._closed = threading.Event()

    def map(self, fd: int, name: str) -> Span:
        """Map the memory behind a descriptor, and close the descriptor. The memory cannot shrink: its file seals
        prevent that."""
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise TierError("the node sent memory that is not sealed")
            reading = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            rights = mmap.PROT_READ if reading else mmap.PROT_READ | mmap.PROT_WRITE
            memory = mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, rights)
        finally:
            os.close(fd)
        self._names.add(name)
        toucher = threading.Thread(target=self._touch, args=(memory,), name="kvtide-touch", daemon=True)
        self._touching.add(toucher)
        try:
            toucher.start()
        except RuntimeError:  # no more threads: then the first caller waits for it
            self._touching.discard(toucher)
        weakref.finalize(memory, self._unmapped, name).atexit = False
        return memoryview(memory)

    def _unmapped(self, name: str) -> None:
        self._names.discard(name)
        self._ended()

    def _touch(self, memory: mmap.mmap) -> None:
        """Enter every page into this process's page table. The node has allocated all pages, but the first access to
        each would still fault. Reading is enough, and does not disturb a thread that writes."""
        for start in range(0, len(memory), _STRETCH):
            if self._closed.is_set():
                break
            stretch = np.frombuffer(memory, np.uint8, min(_STRETCH, len(memory) - start), start)
            stretch[:: mmap.PAGESIZE].max()
        self._touching.discard(threading.current_thread())

    def close(self) -> None:
        """Stop touching pages: when this returns, all memory that callers do not use is unmapped."""
        self._closed.set()
        for toucher in list(self._touching):
            toucher.join()

    @property
    def names(self) -> list[str]:
        """Names of the memory that is mapped now."""
        return list(self._names)
