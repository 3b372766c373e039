"""A client's view of a node's memory: what it has mapped, and when it has let go.

Views keep their mapping alive, whatever became of the node. When the last view of a segment is gone so is the mapping,
and the node, or its successor, is told: until then it counts the memory as ours.
"""

from __future__ import annotations

import contextlib
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


class Mappings:
    """All memory that a client has mapped, of this node and of earlier ones."""

    def __init__(self, ended: Callable[[], None]) -> None:
        """``ended`` is called when some is not mapped any more, on any thread and at any point: it takes no lock."""
        self._names: set[str] = set()
        self._ended = ended

    def map(self, fd: int, name: str) -> Span:
        """The memory behind a descriptor, which is closed. It cannot shrink under us: that was sealed."""
        try:
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise TierError("the node sent memory that is not sealed")
            reading = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            rights = mmap.PROT_READ if reading else mmap.PROT_READ | mmap.PROT_WRITE
            memory = mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED, rights)
        finally:
            os.close(fd)
        self._names.add(name)
        with contextlib.suppress(RuntimeError):  # no more threads: then whoever comes first pays
            threading.Thread(target=_touch, args=(memory,), name="kvtide-touch", daemon=True).start()
        weakref.finalize(memory, self._unmapped, name).atexit = False
        return memoryview(memory)

    def _unmapped(self, name: str) -> None:
        self._names.discard(name)
        self._ended()

    @property
    def names(self) -> list[str]:
        """What is mapped now."""
        return list(self._names)


def _touch(memory: mmap.mmap) -> None:
    """Enter every page into our page table. The node has them all, but the first to use one would wait for that, and a
    copy would take half as long again. Reading does it, and disturbs nobody who writes."""
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE].max()
