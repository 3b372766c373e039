"""Working memory of I/O threads, besides the memory of blocks: where a block is compressed, encrypted or decrypted.

A thread needs as much as its block, and there are many threads. So the threads of a tier share a ``Pool`` that limits
their memory together. A thread requests what its job needs before it begins (``Workspace.begin``), and waits if that is
not available. It keeps the memory for its next job, but an idle thread's memory is taken away when another thread needs
it. If a single job needs more than the whole pool, it gets that when no other job is running.

A thread that was granted memory never requests more, and holds no lock while it requests, so there is no deadlock.
Headers, a few pages for each thread, are not counted; but with token ids they reveal as much as a block does, so they
are freed when the pool is emptied.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from typing import Protocol

import numpy as np

from kvtide.block import Span, padded

__all__ = ["Pool", "Scratch", "Workspace"]

_HUGE = 2 << 20
"""A huge page. Direct I/O pins memory page by page: an encrypted block of 2 MiB takes 3 to 6 % less time with one."""


class Scratch:
    """A page-aligned buffer that grows to the largest request; one per thread. Any thread may ``drop`` it."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer: Span = memoryview(b"")

    def __len__(self) -> int:
        return len(self._buffer)

    def get(self, nbytes: int) -> Span:
        buffer = self._buffer
        if len(buffer) < nbytes:
            del buffer
            self.drop()  # before allocating another: a thread never has both
            huge = nbytes // _HUGE * _HUGE
            room = padded(nbytes) + (_HUGE if huge else 0)
            memory = mmap.mmap(-1, room, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            start = -np.frombuffer(memory, np.uint8).ctypes.data % _HUGE if huge else 0
            if huge:
                with contextlib.suppress(OSError):  # only advice; the remainder would take a whole huge page
                    memory.madvise(mmap.MADV_HUGEPAGE, start, huge)
            self._buffer = buffer = memoryview(memory)[start : start + padded(nbytes)]
        return buffer[:nbytes]

    def drop(self) -> None:
        """Free the memory, as soon as no view of it is left."""
        self._buffer = memoryview(b"")


class Kept(Protocol):
    """Memory that a thread keeps from job to job."""

    def __len__(self) -> int: ...

    def drop(self) -> None: ...


class Pool:
    """At most ``limit`` bytes for all workspaces, or what a single job needs. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Condition()
        self._next = threading.Lock()
        """Held by the waiting thread, so that small requests do not always overtake a large one."""
        self._taken = 0
        self._most = 0
        self._idle: dict[Workspace, None] = {}
        """Workspaces with memory that is not in use."""
        self._emptied = 0
        """How often ``empty`` was called."""
        self._headers: list[Scratch] = []
        """Header memory of all threads."""

    @property
    def taken(self) -> int:
        """Bytes that threads have, or may allocate."""
        return self._taken

    @property
    def most(self) -> int:
        """The maximum of ``taken`` so far."""
        return self._most

    def grant(self, who: Workspace, nbytes: int) -> None:
        with self._lock:
            self._idle.pop(who, None)
            who.emptied = self._emptied
            if nbytes <= who.charge:
                return
            # If the last job needed as much, the kept memory is sufficient. Allocating again would cost a fault per
            # page.
            if nbytes == who.granted and not self._next.locked() and self._fits(who, nbytes):
                self._charge(who, nbytes)
                return
            who.granted = nbytes
            who.drop()  # a waiting thread must hold nothing that another may wait for
            self._charge(who, 0)
            self._lock.notify_all()
        with self._next, self._lock:
            self._lock.wait_for(lambda: self._fits(who, nbytes))
            self._charge(who, nbytes)

    def _fits(self, who: Workspace, nbytes: int) -> bool:
        while (others := self._taken - who.charge) + nbytes > self.limit and self._idle:
            idle, _ = self._idle.popitem()
            idle.drop()
            self._charge(idle, 0)
        return others == 0 or others + nbytes <= self.limit

    def _charge(self, who: Workspace, nbytes: int) -> None:
        self._taken += nbytes - who.charge
        self._most = max(self._most, self._taken)
        who.charge = nbytes

    def end(self, who: Workspace) -> None:
        with self._lock:
            held = who.held
            if self._taken - who.charge + held > self.limit or self._next.locked() or who.emptied != self._emptied:
                who.drop()
                held = 0
            self._charge(who, held)
            if held:
                self._idle[who] = None
            self._lock.notify_all()

    def hold_header(self, memory: Scratch) -> None:
        """``memory`` is not counted, but is freed by ``empty``."""
        self._headers.append(memory)

    def empty(self) -> None:
        """Return all memory to the system, with its contents; the memory of a running job when that ends."""
        with self._lock:
            self._emptied += 1
            for header in self._headers:
                header.drop()
            for idle in self._idle:
                idle.drop()
                self._charge(idle, 0)
            self._idle.clear()
            self._lock.notify_all()


class Workspace:
    """One thread's share of a pool; without a pool, unlimited."""

    __slots__ = ("_kept", "_pool", "_working", "charge", "emptied", "granted")

    def __init__(self, pool: Pool | None = None) -> None:
        self._pool = pool
        self._kept: list[Kept] = []
        self._working = False
        self.charge = 0
        """Bytes that the pool counts for this workspace. Changed by the pool."""
        self.granted = 0
        """The size of the last request that had to wait. Changed by the pool."""
        self.emptied = 0
        """The pool's count of ``empty`` calls when the job began. Changed by the pool."""

    def keep(self, memory: Kept) -> None:
        """``memory`` belongs to the thread, and is used only in jobs."""
        self._kept.append(memory)

    @property
    def held(self) -> int:
        return sum(map(len, self._kept))

    def drop(self) -> None:
        for memory in self._kept:
            memory.drop()

    def begin(self, nbytes: int) -> None:
        """Take that much for a job, until its ``end``. Does nothing if the job has taken memory already."""
        if nbytes and self._pool is not None and not self._working:
            self._pool.grant(self, nbytes)
            self._working = True

    @property
    def working(self) -> bool:
        """Whether the job has taken memory, or need not."""
        return self._working or self._pool is None

    def end(self) -> None:
        """The job is over."""
        if self._working and self._pool is not None:
            self._working = False
            self._pool.end(self)
