"""Zeroes slots of the arena whose bytes nobody may see any more.

A slot that is given back keeps the bytes of its last block until another block is written over them. That is all right
for a block that was evicted or has expired, and costs nothing. A block that was dropped, and every block of a tenant
that is forgotten, must not stay in memory: its slot is zeroed first, and given back then.

*Whose bytes are where.* The index knows whose a block is that is here. Of a slot that is free, or has a new owner who
has not filled it yet, a ``Residue`` knows it: it remembers for each slot the tenant who last wrote to it, also after
eviction. Two things leave bytes of others behind: a block that is shorter than the one before it in the same slot, and
a segment that is cut anew for slots of another size. A residue says so (``mixed``); then all of the segment that is not
part of a block is zeroed when any tenant is forgotten.

*Nobody waits.* Zeroing takes no lock but to choose slots and to give them back. It is done on a thread of the arena's
own, because the last right to a slot often ends in a thread that is in a hurry: an engine's step. Its bandwidth is
limited, so that it leaves the memory's to those who move blocks. Meanwhile a slot is in use, by nobody: it cannot be
taken, and no segment with such a slot is cut anew.

*Nobody waits for ever.* Whatever goes wrong on that thread, those who wait are called: a slot that could not be zeroed
is not given back. It stays in use by nobody, is counted (``Zeroing.failed``), and tried again when next somebody waits.
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
"""Instead of a tenant's number: nobody knows whose bytes are in a slot."""

_BATCH = 4 << 20
"""Bytes that are zeroed from one rest to the next, and given back together."""
_BANDWIDTH = 4 << 30
"""Bytes in a second, at most."""
_TENANTS = 4096
"""Tenants after which it is worth a look which of them have left no bytes, at least."""


def zero(span: Span) -> None:
    """Without holding the GIL."""
    np.frombuffer(span, np.uint8)[:] = 0


class Residue:
    """Whose bytes are in one segment's slots. Changed under the arena's lock."""

    __slots__ = ("_last", "extent", "mixed", "slots", "sole")

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.sole = 0
        """The number of the only tenant who ever wrote here; 0: nobody has, SEVERAL: see ``left_by``."""
        self.extent = 0
        """Bytes of a block that was written here; all others were as long, or it is ``mixed``."""
        self.mixed = False
        """Whether bytes that are not part of a block may be anybody's."""
        self._last: npt.NDArray[np.uint32] = np.empty(0, np.uint32)
        """Where there are several: the number of the tenant whose block a slot has or had; 0: all its bytes are zero.

        Most segments need none, and whoever stores should not pay for it.
        """

    def enter(self, slots: npt.NDArray[np.int64], tenant: int, extent: int) -> bool:
        """Blocks of so many bytes are about to be written; answers whether there may be bytes of others below."""
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
        """Of each slot, from now on."""
        if self.sole != SEVERAL:
            self._last = np.full(self.slots, self.sole, np.uint32)
            self.sole = SEVERAL
        return self._last

    def cut(self, slots: int) -> None:
        """The segment was cut anew."""
        written = self.mixed or self.sole != 0
        self.mixed, self.slots, self.sole = written, slots, SEVERAL if written else 0
        self._last = np.full(slots if written else 0, SEVERAL, np.uint32)

    def zeroed(self, slots: npt.NDArray[np.int64]) -> None:
        """All bytes of these slots are zero. It is not remembered where there is but one tenant: a drop is no reason to
        make the next stores dearer."""
        if self.sole == SEVERAL:
            self._last[slots] = 0
            if not self._last.any():
                self.sole = 0

    def tenants(self) -> set[int]:
        """Those whose bytes there may be."""
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
    """Slots that are to be zeroed and given back, and the thread that does it. Everything is safe from any thread."""

    def __init__(
        self,
        lock: threading.Lock,
        spans: Callable[[Sequence[int]], list[Span]],
        give_back: Callable[[npt.NDArray[np.int64]], None],
    ) -> None:
        """``spans`` are the bytes of slots; ``give_back`` is called under ``lock``, the arena's."""
        self._lock = lock
        self._spans = spans
        self._give_back = give_back
        self._places: dict[int, None] = {}
        """In the order in which they came. What is not here any more was given back, or is in ``_failed``."""
        self._failed: dict[int, None] = {}
        """Those that could not be zeroed."""
        self._done = 0
        """Slots that were ever given back, or were tried in vain."""
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        """Who waits until so many slots were done."""
        self._over = False
        """Whether nothing is zeroed any more. Under the lock."""
        self._logged = False
        self.given_back = threading.Condition(lock)
        """Notified when slots were."""
        self.segments: Counter[int] = Counter()
        """In which segments the slots are that are about to be given back, and how many. Under the lock."""
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
        """Zero slots that are in use by nobody, and give them back. Under the lock; ``wake`` outside of it or in it."""
        self._places.update(dict.fromkeys(places))
        self.segments.update(map(segment_of, places))

    def repair(self) -> None:
        """Count anew, after somebody was interrupted while he added slots. Under the lock."""
        self.segments = Counter(map(segment_of, self._places))
        self.wake()

    def wake(self) -> None:
        """There is something to zero."""
        self._wake.put(True)

    def when_done(self, call: Callable[[], None]) -> None:
        """Call when all slots that were added by now are zeroed, or cannot be: at once, or on the thread for it."""
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
        """Zero some slots; answers whether there may be more."""
        with self._lock:
            some = list(itertools.islice(self._places, 64))
        if not some:
            return False
        began = time.monotonic()
        nbytes, done, failed = self._zero(some)
        with self._lock:
            for place in done if self._failed else ():  # whoever was interrupted may have left it there
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
            except Exception as e:  # noqa: BLE001 - see _note; nobody can have them, which is safe
                self._note(e)
            self.given_back.notify_all()
        self._answer()
        time.sleep(max(0.0, nbytes / _BANDWIDTH - (time.monotonic() - began)))
        return True

    def _zero(self, some: Sequence[int]) -> tuple[int, list[int], list[int]]:
        """Zero the first of some slots: how many bytes, in which of them, and in which that failed."""
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
        """Something failed that never should: others wait for this thread, so it goes on."""
        if not self._logged:
            self._logged = True
            log.error("zeroing of memory failed, and those slots are not used until it succeeds: %r", e, exc_info=e)

    def _answer(self) -> None:
        """Call those whose slots are done, or all, if there will be no more."""
        while True:
            with self._lock:
                if not self._waiting or (self._places and not self._over and self._waiting[0][0] > self._done):
                    return
                _, call = self._waiting.popleft()
            try:
                call()
            except Exception as e:  # the others who wait must be called as well
                log.error("who waited for memory to be zeroed failed: %r", e, exc_info=e)

    def close(self) -> None:
        """Zero what was added, and end. Who waits, or comes to wait, is called."""
        self._wake.put(True)
        self._wake.put(False)
        self._thread.join()
