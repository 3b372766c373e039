"""Zeroes slots of the DRAM tier whose bytes must not be readable any more.

A freed slot keeps the bytes of its last block until another block is written over them. For a block that was evicted or
has expired this is acceptable, and costs nothing. A block that was dropped, and every block of a tenant that is
forgotten, must not stay in memory: its slot is zeroed before it is freed.

*Which tenant's bytes are where.* The index knows the tenant of every block that is stored. For a slot that is free, or
was allocated and not yet filled, a ``Residue`` knows it: it remembers for each slot the tenant that last wrote to it,
also after eviction. Two things leave bytes of other tenants behind: a block that is shorter than the one before it in
the same slot, and a segment that is re-divided into slots of another size. A residue records this (``mixed``); then all
bytes of the segment that are not part of a block are zeroed when any tenant is forgotten.

*No caller waits.* Zeroing takes the lock only to choose slots and to free them. It runs on its own thread, because the
last reference to a slot is often released in a time-critical thread: an engine's step. Its bandwidth is limited, to
leave memory bandwidth to threads that move blocks. Meanwhile a slot is in use without an owner: it cannot be allocated,
and no segment with such a slot is re-divided.

*Waiters are always called.* Whatever fails on that thread, waiting callers are called back: a slot that could not be
zeroed is not freed. It stays in use without an owner, is counted (``Zeroing.failed``), and is retried when a caller
next waits.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvtide.block import Span
from kvtide.tiers.segments import segment_of

__all__ = ["SEVERAL", "Residue", "Tenants", "Zeroing", "zero"]

log = logging.getLogger("kvtide.dram")

SEVERAL = 0xFFFFFFFF
"""In place of a tenant's number: it is not known whose bytes are in a slot."""

_BATCH = 4 << 20
"""Bytes that are zeroed between two pauses, and freed together."""
_BANDWIDTH = 4 << 30
"""Maximum bytes per second."""
_TENANTS = 4096
"""With at least this many tenants it is worth checking which of them have left no bytes."""


def zero(span: Span) -> None:
    """Zero a span without holding the GIL."""
    np.frombuffer(span, np.uint8)[:] = 0


class Residue:
    """Which tenants' bytes are in one segment's slots. Changed under the tier's lock."""

    __slots__ = ("_last", "extent", "mixed", "slots", "sole")

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.sole = 0
        """The number of the only tenant that ever wrote here; 0: none has, SEVERAL: see ``left_by``."""
        self.extent = 0
        """Bytes of a block that was written here; all others had the same length, unless ``mixed``."""
        self.mixed = False
        """Whether bytes that are not part of a block may be of any tenant."""
        self._last: npt.NDArray[np.uint32] = np.empty(0, np.uint32)
        """If there are several tenants, by slot: the number of the tenant whose block is or was in it; 0: all bytes are
        zero.

        Most segments do not need this, and then stores do not pay for it.
        """

    def enter(self, slots: npt.NDArray[np.int64], tenant: int, extent: int) -> bool:
        """Blocks of ``extent`` bytes are about to be written; returns whether the slots may hold bytes of other
        tenants."""
        self.mixed |= self.extent not in (0, extent)
        self.extent = extent
        if self.sole in (0, tenant):
            self.sole = tenant
            return False
        last = self.last
        before = last[slots]
        others = before != 0
        others &= before != tenant
        last[slots] = np.where(others, SEVERAL, tenant)
        return bool(others.any())

    @property
    def last(self) -> npt.NDArray[np.uint32]:
        """The tenant of each slot; tracked for each slot from now on."""
        if self.sole != SEVERAL:
            self._last = np.full(self.slots, self.sole, np.uint32)
            self.sole = SEVERAL
        return self._last

    def cut(self, slots: int) -> None:
        """The segment was re-divided."""
        written = self.mixed or self.sole != 0
        self.mixed, self.slots, self.sole = written, slots, SEVERAL if written else 0
        self._last = np.full(slots if written else 0, SEVERAL, np.uint32)

    def zeroed(self, slots: npt.NDArray[np.int64]) -> None:
        """All bytes of these slots are zero. Not recorded while there is only one tenant: a drop must not make later
        stores slower."""
        if self.sole == SEVERAL:
            self._last[slots] = 0
            if not self._last.any():
                self.sole = 0

    def tenants(self) -> set[int]:
        """The tenants whose bytes may be here."""
        return {self.sole} if self.sole != SEVERAL else set(np.unique(self._last).tolist())

    def left_by(self, tenant: int) -> npt.NDArray[np.bool_]:
        """Which slots, if they are free, may have bytes of a tenant."""
        if self.sole not in (tenant, SEVERAL) and not self.mixed:
            return np.zeros(self.slots, np.bool_)
        last = self.last
        found: npt.NDArray[np.bool_] = last != 0 if self.mixed else (last == tenant) | (last == SEVERAL)
        return found


class Tenants:
    """Numbers for tenants, from 1 on, as long as slots have bytes of theirs."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._next = itertools.count(1)
        self._most = _TENANTS

    def number(self, tenant: bytes, residues: Callable[[], Iterator[Residue]]) -> int:
        """A tenant's number; a new one, if it has none."""
        found = self._numbers.get(tenant)
        if found is None:
            if len(self._numbers) >= self._most:
                here = {number for residue in residues() for number in residue.tenants()}
                self._numbers = {t: number for t, number in self._numbers.items() if number in here}
                self._most = max(_TENANTS, 2 * len(self._numbers))
            found = self._numbers[tenant] = next(self._next)
        return found

    def known(self, tenant: bytes) -> int:
        """A tenant's number; SEVERAL if no slot is known to have its bytes."""
        return self._numbers.get(tenant, SEVERAL)


class Zeroing:
    """Slots that are to be zeroed and freed, and the thread that does it. Thread-safe."""

    def __init__(
        self,
        lock: threading.Lock,
        spans: Callable[[Sequence[int]], list[Span]],
        give_back: Callable[[npt.NDArray[np.int64]], None],
    ) -> None:
        """``spans`` returns the bytes of slots; ``give_back`` is called under ``lock``, the tier's."""
        self._lock = lock
        self._spans = spans
        self._give_back = give_back
        self._places: dict[int, None] = {}
        """In order of arrival. Slots that are not here any more were freed, or are in ``_failed``."""
        self._failed: dict[int, None] = {}
        """Slots that could not be zeroed."""
        self._done = 0
        """Slots that were freed, or failed, since the start."""
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        """Callbacks, each with the value of ``_done`` at which it is called."""
        self._over = False
        """Whether zeroing has ended. Under the lock."""
        self._logged = False
        self.given_back = threading.Condition(lock)
        """Notified when slots were freed."""
        self.segments: Counter[int] = Counter()
        """Number of slots that are about to be freed, by segment. Under the lock."""
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvtide-zeroing", daemon=True)
        self._thread.start()

    @property
    def places(self) -> Collection[int]:
        """Slots that are to be zeroed. Under the lock."""
        return self._places.keys() | self._failed.keys() if self._failed else self._places.keys()

    @property
    def failed(self) -> int:
        """How many slots could not be zeroed."""
        return len(self._failed)

    def add(self, places: Sequence[int]) -> None:
        """Zero slots that are in use without an owner, and free them. Under the lock; call ``wake`` inside or outside
        of it."""
        self._places.update(dict.fromkeys(places))
        self.segments.update(map(segment_of, places))

    def repair(self) -> None:
        """Recount, after a thread was interrupted while it added slots. Under the lock."""
        self.segments = Counter(map(segment_of, self._places))
        self.wake()

    def wake(self) -> None:
        """There is something to zero."""
        self._wake.put(True)

    def when_done(self, call: Callable[[], None]) -> None:
        """Call when all slots that were added by now are zeroed, or cannot be: at once, or on the zeroing thread."""
        with self._lock:
            if (self._places or self._failed) and not self._over:
                if self._failed:
                    self._places.update(self._failed)
                    self._failed.clear()
                    self.repair()
                self._waiting.append((self._done + len(self._places), call))
                self._wake.put(True)
                return
        call()

    def _run(self) -> None:
        try:
            while self._wake.get():
                while self._step():
                    pass
        finally:
            with self._lock:
                self._over = True
            self._answer()

    def _step(self) -> bool:
        """Zero some slots; returns whether there may be more."""
        with self._lock:
            some = list(itertools.islice(self._places, 64))
        if not some:
            return False
        began = time.monotonic()
        nbytes, done, failed = self._zero(some)
        with self._lock:
            for place in done if self._failed else ():  # an interrupted caller may have left it there
                self._failed.pop(place, None)
            self._failed.update(dict.fromkeys(failed))
            for place in (*done, *failed):
                del self._places[place]
                number = segment_of(place)
                self.segments[number] -= 1
                if self.segments[number] <= 0:
                    del self.segments[number]
            self._done += len(done) + len(failed)
            try:
                self._give_back(np.array(done, np.int64))
            except Exception as e:  # noqa: BLE001 - see _note; the slots cannot be allocated, which is safe
                self._note(e)
            self.given_back.notify_all()
        self._answer()
        time.sleep(max(0.0, nbytes / _BANDWIDTH - (time.monotonic() - began)))
        return True

    def _zero(self, some: Sequence[int]) -> tuple[int, list[int], list[int]]:
        """Zero the first of some slots: returns the byte count, the slots done, and the slots that failed."""
        try:
            with self._lock:
                spans = self._spans(some)
        except Exception as e:  # noqa: BLE001 - see _note
            self._note(e)
            return 0, [], list(some)
        nbytes, done, failed = 0, list[int](), list[int]()
        for place, span in zip(some, spans, strict=True):
            try:
                zero(span)
            except Exception as e:  # noqa: BLE001 - see _note
                self._note(e)
                failed.append(place)
                continue
            done.append(place)
            nbytes += len(span)
            if nbytes >= _BATCH:
                break
        return nbytes, done, failed

    def _note(self, e: Exception) -> None:
        """Log an unexpected failure; callers wait for this thread, so it continues."""
        if not self._logged:
            self._logged = True
            log.error("zeroing of memory failed, and those slots are not used until it succeeds: %r", e, exc_info=e)

    def _answer(self) -> None:
        """Call the callbacks whose slots are done, or all, if there will be no more."""
        while True:
            with self._lock:
                if not self._waiting or (self._places and not self._over and self._waiting[0][0] > self._done):
                    return
                _, call = self._waiting.popleft()
            try:
                call()
            except Exception as e:  # the other waiting callers must be called as well
                log.error("a callback that waited for zeroed memory failed: %r", e, exc_info=e)

    def close(self) -> None:
        """Zero what was added, and end. All waiting callers, also later ones, are called."""
        self._wake.put(True)
        self._wake.put(False)
        self._thread.join()
