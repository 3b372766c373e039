"""The memory of one segment of the arena."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os

import numpy as np

from kvtide import forks

__all__ = ["Memory"]

# Linux's; Python has no names for them.
_MAP_HUGETLB = 0x40000
_MAP_HUGE_2MB = 21 << 26


class Memory:
    """One segment's memory: our own pages or, if others are to map it, a sealed memfd (``fd``, else -1)."""

    __slots__ = ("__weakref__", "_map", "fd", "serial", "view")

    def __init__(self, serial: int, nbytes: int, huge_pages: str, shared: bool) -> None:
        self.serial = serial
        """Never given twice, unlike the number of a segment."""
        self.fd = -1
        if shared:
            forks.tell(self)
        try:
            self._map = self._shared(nbytes, huge_pages) if shared else self._private(nbytes, huge_pages)
        except BaseException:
            self._let_go()
            raise
        if huge_pages == "transparent":
            with contextlib.suppress(OSError):  # only advice
                self._map.madvise(mmap.MADV_HUGEPAGE)
        # Map every page now, by touching it: MAP_POPULATE would hold the GIL for 100 ms per segment, this does not.
        np.frombuffer(self._map, np.uint8)[:: mmap.PAGESIZE] = 0
        self.view = memoryview(self._map)

    def _shared(self, nbytes: int, huge_pages: str) -> mmap.mmap:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        if huge_pages == "2MiB":
            flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB
        self.fd = os.memfd_create(f"kvtide-{self.serial}", flags)
        os.fchmod(self.fd, 0o600)  # else whoever gets it to read could open it anew to write
        os.ftruncate(self.fd, nbytes)
        os.posix_fallocate(self.fd, 0, nbytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        return mmap.mmap(self.fd, nbytes, mmap.MAP_SHARED)

    @staticmethod
    def _private(nbytes: int, huge_pages: str) -> mmap.mmap:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        if huge_pages == "2MiB":
            flags |= _MAP_HUGETLB | _MAP_HUGE_2MB
        return mmap.mmap(-1, nbytes, flags)

    def empty(self) -> None:
        """Give the pages back to the system, though others may still have them mapped: nobody has a right to them."""
        if self.fd >= 0:
            self._map.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Give the memory back; a view that a caller still has keeps the mapping alive until it goes."""
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()
        self._let_go()

    def _let_go(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def forked(self) -> None:
        """The mapping stays: a caller may still look at a view."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            forks.close([fd])
