"""The memory of one segment of the DRAM tier.

Direct I/O into pages of 4 KiB takes more CPU than into huge ones, and is slower where the disk is fast: ``kvtide bench
store nvme`` measures how much.

Private memory gets huge pages from the kernel by advice alone. Memory that other processes map is a file in memory
(memfd), to which most systems give none (``/sys/kernel/mm/transparent_hugepage/shmem_enabled`` is ``never``). There the
kernel makes them when it is asked to collapse small pages into huge ones (``MADV_COLLAPSE``, since Linux 6.1; no
privilege is needed). It does so only for a mapping with the alignment of huge pages, which Python's ``mmap`` does not
guarantee, so this module calls mmap itself.

One small page in each huge one is touched before: the kernel collapses nothing that is not allocated. Only afterwards
the rest is allocated with ``fallocate``, which would make small pages of everything where advice suffices. Whatever the
kernel refuses stays in small pages, and works.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
import weakref

import numpy as np

from kvtide import forks
from kvtide.block import Span

__all__ = ["HUGE", "Memory"]

HUGE = 2 << 20
"""Bytes of a huge page."""

# Linux constants; Python has no names for them.
_MAP_HUGETLB = 0x40000
_MAP_HUGE_2MB = 21 << 26
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_COLLAPSE = 25
_FAILED = ctypes.c_void_p(-1).value

_TOGETHER, _PROCESSORS = 4, 4
"""Maximum number of threads that allocate memory together, and the number of processors required for each."""

_libc = ctypes.CDLL(None, use_errno=True)  # unlike Python's mmap it releases the GIL
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Memory:
    """One segment's memory: private pages or, if other processes are to map it, a sealed memfd (``fd``, else -1)."""

    __slots__ = ("__weakref__", "_map", "fd", "huge", "serial", "view")

    def __init__(self, serial: int, nbytes: int, huge_pages: str, shared: bool) -> None:
        self.serial = serial
        """Never reused, unlike the number of a segment."""
        self.fd = -1
        self.huge = nbytes if huge_pages == "2MiB" else 0
        """Bytes in huge pages, as far as known: for private memory the kernel reports it only in its log."""
        self._map: mmap.mmap | None = None
        if shared:
            forks.tell(self)
        try:
            self.view = self._shared(nbytes, huge_pages) if shared else self._private(nbytes, huge_pages)
        except BaseException:
            self._let_go()
            raise
        # Map every page now, by touching it: MAP_POPULATE would hold the GIL for 100 ms per segment, this does not.
        np.frombuffer(self.view, np.uint8)[:: mmap.PAGESIZE] = 0

    def _shared(self, nbytes: int, huge_pages: str) -> Span:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        if huge_pages == "2MiB":
            flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB
        self.fd = os.memfd_create(f"kvtide-{self.serial}", flags)
        os.fchmod(self.fd, 0o600)  # else a process that receives it for reading could reopen it for writing
        os.ftruncate(self.fd, nbytes)
        view = _map_aligned(self.fd, nbytes)
        if huge_pages == "transparent":
            self.huge = _collapse(self.fd, view)
        os.posix_fallocate(self.fd, 0, nbytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        return view

    def _private(self, nbytes: int, huge_pages: str) -> Span:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        if huge_pages == "2MiB":
            flags |= _MAP_HUGETLB | _MAP_HUGE_2MB
        self._map = mmap.mmap(-1, nbytes, flags)
        if huge_pages == "transparent":
            with contextlib.suppress(OSError):  # only advice
                self._map.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(self._map)

    def empty(self) -> None:
        """Return the pages to the system, though clients may still have them mapped: no client may use them any
        more."""
        if self.fd >= 0:
            _libc.madvise(_address(self.view), len(self.view), mmap.MADV_REMOVE)

    def close(self) -> None:
        """Free the memory; a view that a caller still has keeps the mapping alive until it is freed."""
        with contextlib.suppress(BufferError):
            self.view.release()
            if self._map is not None:
                self._map.close()
        self._let_go()

    def _let_go(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def forked(self) -> None:
        """The mapping stays: a caller may still use a view."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            forks.close([fd])


def _map_aligned(fd: int, nbytes: int) -> Span:
    """Map a file in memory at the alignment of a huge page. The mapping is removed with its last view."""
    room = nbytes + HUGE
    start = _mmap(None, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    address = -(-start // HUGE) * HUGE
    end = address + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        _mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    finally:
        # The parts before and after it were only reserved. The part between is mapped now or, if that failed, unmapped:
        # another thread may use that range already.
        for left, right in ((start, address), (end, start + room)):
            if left < right:
                _libc.munmap(left, right - left)
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, nbytes).atexit = False
    return np.ctypeslib.as_array(memory).data


def _mmap(address: int | None, nbytes: int, rights: int, flags: int, fd: int) -> int:
    found: int = _libc.mmap(address, nbytes, rights, flags, fd, 0)
    if found == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot map {nbytes} bytes of memory: {os.strerror(error)}")
    return found


def _collapse(fd: int, view: Span) -> int:
    """Collapse the pages of a mapping into huge ones, one by one; returns how many bytes are in huge pages.

    The kernel clears them all, at a few gigabytes a second. Where there are many processors several threads do it
    together, because an engine may fill memory faster than one of them allocates it.
    """
    _libc.madvise(_address(view), len(view), mmap.MADV_HUGEPAGE)  # for systems that use huge pages only on advice
    starts = range(0, len(view) - HUGE + 1, HUGE)
    count = max(1, min(_TOGETHER, len(os.sched_getaffinity(0)) // _PROCESSORS))
    huge = [0] * count

    def some(number: int) -> None:
        with contextlib.suppress(OSError):  # no memory: allocating the rest reports it
            huge[number] = _collapse_some(fd, view, starts[number::count])

    others = [threading.Thread(target=some, args=(i,), name="kvtide-pages", daemon=True) for i in range(1, count)]
    begun = []
    for other in others:
        with contextlib.suppress(RuntimeError):  # out of threads: its part stays in small pages
            other.start()
            begun.append(other)
    some(0)
    for other in begun:
        other.join()
    return sum(huge)


def _collapse_some(fd: int, view: Span, starts: range) -> int:
    address, bytes_, huge = _address(view), np.frombuffer(view, np.uint8), 0
    for start in starts:
        os.posix_fallocate(fd, start, mmap.PAGESIZE)  # else the next line is a SIGBUS if there is no memory
        bytes_[start] = 0
        if _libc.madvise(address + start, HUGE, _MADV_COLLAPSE):
            if not huge and ctypes.get_errno() == errno.EINVAL:
                break  # this kernel does not support it
        else:
            huge += HUGE
    return huge


def _address(view: Span) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
