"""The DRAM tier: blocks in memory that, with ``shared``, other processes can map.

Memory is allocated in segments. A shared segment is a memfd. Its pages are allocated before any client sees it, so that
there is no SIGBUS later and the bytes are charged to this process, and it is sealed against shrinking and growing, so
that a client can map it without trusting this process. A segment that is not shared is plain memory, because most
systems give huge pages only to that. With huge pages the disk reads into it faster and with less CPU: ``kvtide bench
store nvme`` measures how much.

Callers copy directly into and out of slots. ``read`` and ``write`` of the tier contract do that for them, on the
calling thread, with a copy that releases the GIL.

Slots have no header. The index records what a slot holds, and the slot's generation tells a late writer from the
current owner.

The tier's own thread allocates memory from the system, one segment at a time. Allocation is slow, so callers that wait
for it are often interrupted; if they allocated themselves, an interruption would leak a half-made segment. With
``ahead`` the thread allocates before memory is requested: a quarter of the budget at first, then always as much free
memory as is in use, so that an engine's first prompts find space. A segment allocated before the block size is known is
divided into slots when the first block arrives.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvtide.block import ALIGN, BlockKey, Span
from kvtide.tiers.base import NOWHERE, DropDone, Held, Read, ReadDone, TierStatistics, Write, WriteDone
from kvtide.tiers.dram.memory import HUGE, Memory
from kvtide.tiers.dram.zeroing import SEVERAL, Residue, Tenants, Zeroing, zero
from kvtide.tiers.segments import (
    SOMEBODY,
    Segment,
    Segments,
    by_segment,
    domain_of,
    ladder,
    place_of,
    segment_of,
    slot_of,
)

__all__ = ["Dram", "copy"]

log = logging.getLogger("kvtide.dram")

_CLAIM = 32 << 20
"""Bytes of free slots that are claimed for zeroing at a time; they cannot be allocated meanwhile."""
_MOMENT = 0.1
"""Seconds to wait for slots that are being zeroed."""
_HELD = 1 << 20
"""Bytes that are zeroed during one hold of the lock."""
_FIRST = 4
"""The fraction (1/n) of the budget that is allocated before anything is stored, with ``ahead``."""


def copy(target: Span, source: Span) -> None:
    """Copy bytes without holding the GIL (a memoryview assignment would)."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class _Growth:
    """A caller's request for a free slot of a kind."""

    __slots__ = ("ended", "kind", "made")

    def __init__(self, kind: int) -> None:
        self.kind = kind
        self.made = False
        self.ended = threading.Lock()
        """Held until the request is served; the waiting caller then acquires it."""
        self.ended.acquire()


class Dram:
    """Blocks in memory, at most ``budget`` bytes.

    Segments are allocated when needed, or in the background: the whole budget with ``prefault``, or before they are
    needed with ``ahead``. Allocating pages costs about as much as filling them. All methods are thread-safe.
    """

    def __init__(
        self,
        budget: int,
        segment: int = 256 << 20,
        huge_pages: str = "transparent",
        prefault: bool = False,
        shared: bool = True,
        aside: int = 0,
        ahead: bool = False,
        serials: Iterator[int] | None = None,
    ) -> None:
        """``serials`` numbers the memory; instances that share one iterator never use a number twice."""
        self._huge_pages = huge_pages
        self._shared = shared
        self._closed = False
        self._segments = Segments(budget, segment, grain=HUGE if huge_pages == "2MiB" else ALIGN)
        self._memory: dict[int, Memory] = {}
        self._residues: dict[int, Residue] = {}
        """Per segment that has memory: which tenants' bytes are in its slots."""
        self._tenants = Tenants()
        self._segments.aside = aside
        self._serials = serials or itertools.count()
        self.removed: Callable[[int], None] = lambda serial: None
        """Called with the serial number after memory was returned to the system; must not block."""
        self.removals = 0
        """How often memory was returned to the system."""
        self._lock = threading.Lock()
        self._new: Segment | None = None  # in the segment table, but without memory yet
        self._read = self._written = self._failed_reads = self._failed_writes = 0
        self._ahead = ahead and not prefault
        self._wanted: queue.SimpleQueue[_Growth | int | None] = queue.SimpleQueue()
        """Kinds of slots to allocate: requests of waiting callers, and kinds that will soon run out. None ends the
        thread."""
        self._asked: set[int] = set()
        self._denied = False
        """Whether the system refused memory at the last attempt."""
        self._prefaulted = threading.Event()
        self._grower = threading.Thread(target=self._grow_all, args=(prefault,), name="kvtide-dram", daemon=True)
        self._zeroing = Zeroing(self._lock, self._whole, self._zeroed)
        try:
            self._grower.start()
        except BaseException:
            self._zeroing.close()
            raise

    def __repr__(self) -> str:
        return f"<Dram {self._segments.used} of {self._segments.budget} bytes>"

    # -- slots --------------------------------------------------------------------------------------------

    def take(self, nbytes: int, owner: int, domain: int = 0) -> int | None:
        """Take a slot for a block of that footprint, or None: then ``grow``, or evict."""
        with self._lock:
            kind = ladder(nbytes) | domain
            place = self._segments.take(kind, owner)
            self._look_ahead(kind)
            return place

    def take_many(
        self, nbytes: int, count: int, owners: npt.NDArray[np.int64] | None = None, domain: int = 0
    ) -> list[int]:
        """Take up to ``count`` slots for blocks of that footprint. Without ``owners``, set them later with ``own``."""
        kind = ladder(nbytes) | domain
        with self._lock:
            places = self._segments.take_many(kind, count, owners)
            self._look_ahead(kind)
            return places

    def _look_ahead(self, kind: int) -> None:
        if self._ahead and kind not in self._asked and self._short(kind):
            self._ask(kind)

    def _ask(self, kind: int) -> None:
        """Ask the allocation thread for memory of that kind. Under the lock."""
        self._asked.add(kind)
        self._wanted.put(kind)

    def _short(self, kind: int) -> bool:
        """Whether more memory should be allocated ahead of need for slots of that kind. Under the lock."""
        segments = self._segments
        if kind and segments.scarce(kind):
            return True
        free = segments.taken - segments.used
        return free < max(segments.budget // _FIRST, segments.used) and segments.left >= segments.nominal

    def _grow_all(self, prefault: bool) -> None:
        """The allocation thread."""
        if prefault:
            self._prefault()
        elif self._ahead:
            self._stay_ahead(0)
        self._prefaulted.set()
        while (wanted := self._wanted.get()) is not None:
            if isinstance(wanted, _Growth):
                self._answer(wanted)
            else:
                self._stay_ahead(wanted)
        self._answer_waiting()

    def _answer(self, growth: _Growth) -> None:
        try:
            growth.made = not self._closed and self._grow(growth.kind)
        finally:
            growth.ended.release()

    def _answer_waiting(self) -> None:
        """Serve callers that wait for a slot before the rest of the queue."""
        others: list[int | None] = []
        while not self._wanted.empty():
            wanted = self._wanted.get()
            if isinstance(wanted, _Growth):
                self._answer(wanted)
            else:
                others.append(wanted)
        for other in others:
            self._wanted.put(other)

    def _stay_ahead(self, kind: int) -> None:
        """Allocate memory until there is enough for slots of that kind; 0 means any kind."""
        while not self._closed:
            self._answer_waiting()
            with self._lock:
                self._cut_ahead(kind)
                first = not self._memory and bool(self._segments.blank)
                segment = self._next(kind) if first or self._short(kind) else None
            if segment is None or not self._fill(segment):
                break
            if not self._wanted.empty():  # other kinds are waiting too
                self._wanted.put(kind)
                return
        with self._lock:
            self._asked.discard(kind)

    def _cut_ahead(self, kind: int) -> None:
        """Where slots of a kind are scarce, divide an unassigned segment into them. Under the lock."""
        segments = self._segments
        if kind and segments.scarce(kind):
            spare = next((s for s in segments if s.unused and s is not self._new and segments.suits(s, kind)), None)
            if spare is not None:
                self._recut(spare, kind)

    def _recut(self, segment: Segment, kind: int) -> None:
        self._segments.recut(segment, kind)
        self._residues[segment.number].cut(segment.slots)

    def _next(self, kind: int) -> Segment | None:
        """Returns a segment to allocate ahead of need, for that kind or for any; None if the budget has no space. Under
        the lock."""
        blank = self._segments.blank
        if blank and (not kind or self._segments.divides(self._segments.bytes_of(blank, 1), kind)):
            segment = self._add(blank, 1)
            segment.unused = True
            return segment
        slots = self._segments.fit(kind) if kind else 0
        return self._add(kind, slots) if slots else None

    def growable(self, nbytes: int, domain: int = 0) -> bool:
        """Whether ``grow`` could make space for a block of that footprint."""
        kind = ladder(nbytes) | domain
        with self._lock:
            if self._segments.fit(kind) or self._segments.spare(kind, self._new) is not None or self._is_coming():
                return True
            return self._fits_when_zeroed(kind)

    def grow(self, nbytes: int, domain: int = 0, *, wait: bool = True) -> bool | None:
        """Allocate or re-divide a segment so that a block of that footprint fits. May take a while: hold no lock.

        With ``wait=False``, returns None while memory is still being allocated from the system, or zeroed: call again
        later.
        """
        kind = ladder(nbytes) | domain
        with self._lock:
            if self._make_do(kind):
                return True  # without waiting for memory that is being allocated
            if not self._segments.fit(kind) and not self._is_coming():
                if not wait and self._fits_when_zeroed(kind):
                    return None
                return self._wait_for_zeroed(kind)
            if not wait:
                if kind not in self._asked:
                    self._ask(kind)
                return False if self._denied else None
        growth = _Growth(kind)
        self._wanted.put(growth)
        with growth.ended:
            return growth.made

    def _is_coming(self) -> bool:
        """Whether a segment that suits any block is being allocated. Under the lock."""
        return self._new is not None and self._new.unused

    def _grow(self, kind: int) -> bool:
        with self._lock:
            if self._make_do(kind):
                return True
            slots = self._segments.fit(kind)
            if not slots:
                return False
            segment = self._add(kind, slots)
        return self._fill(segment)

    def _make_do(self, kind: int) -> bool:
        """Make space in the memory already allocated: re-divide an empty segment or, if it does not suit, free it."""
        if self._segments.free(kind):
            return True
        if (spare := self._segments.suiting(kind, self._new)) is not None:
            self._recut(spare, kind)
            return True
        if self._segments.fit(kind):
            return False  # the budget allows another segment, and the existing ones may suit other kinds
        spare = self._segments.spare(kind, self._new)
        if spare is not None:
            self._remove(spare)
        return spare is not None

    def _add(self, kind: int, slots: int) -> Segment:
        """Returns a segment that has no memory yet."""
        segment = self._new = self._segments.add(kind, slots)
        self._segments.drain(segment)
        return segment

    def _remove(self, segment: Segment) -> None:
        """Return an empty segment's memory to the system."""
        self._segments.remove(segment)
        self._discard(segment.number)

    def _discard(self, number: int) -> None:
        memory = self._memory.pop(number)
        self._residues.pop(number, None)
        memory.empty()
        memory.close()
        self.removals += 1
        self.removed(memory.serial)

    def in_hand(self, nbytes: int) -> bool:
        """Whether ``nbytes`` of slots or of undivided memory are free, or no more memory can be allocated."""
        with self._lock:
            free = self._segments.taken - self._segments.used - (self._new.nbytes if self._new is not None else 0)
            most = min(nbytes, self._segments.budget // _FIRST)
            return free >= most or self._denied or (self._new is None and self._segments.left < self._segments.nominal)

    def set_aside(self, nbytes: int) -> None:
        """Reserve ``nbytes`` of the budget: memory of an earlier run of this node that clients still map."""
        with self._lock:
            self._segments.aside = nbytes

    def wait_prefault(self) -> None:
        """Wait until the whole budget is allocated, if ``prefault`` was requested."""
        self._prefaulted.wait()

    def _prefault(self) -> None:
        """Allocate segments until the budget is used up. Each is divided into slots when its first block arrives."""
        while not self._closed:
            self._answer_waiting()
            with self._lock:
                segment = self._next(0)
            if segment is None or not self._fill(segment):
                return

    def _fill(self, segment: Segment) -> bool:
        nbytes = segment.nbytes
        try:
            memory = self._allocate(nbytes)
        except Exception as e:  # noqa: BLE001 - if this thread ended, no caller would ever get memory again
            if not self._denied:
                log.warning("cannot take %d bytes of memory: %s", nbytes, e)
            with self._lock:
                self._new = None
                self._denied = True
                self._segments.remove(segment)
            return False
        with self._lock:
            self._new = None
            self._denied = False
            self._residues[segment.number] = Residue(segment.slots)
            self._memory[segment.number] = memory
            if not segment.unused:  # blocks are stored only after it is divided into slots
                segment.draining = False
                self._segments.settle(segment)
        return True

    def _allocate(self, nbytes: int) -> Memory:
        serial = next(self._serials)
        if self._huge_pages == "2MiB":
            try:
                return Memory(serial, nbytes, self._huge_pages, self._shared)
            except OSError as e:
                log.warning(
                    "no huge pages (%s): using ordinary ones. Set vm.nr_hugepages to at least %d",
                    e.strerror,
                    self._segments.budget // HUGE,
                )
                self._huge_pages = "transparent"
        return Memory(serial, nbytes, self._huge_pages, self._shared)

    def repair(
        self,
        places: npt.NDArray[np.int64],
        owners: npt.NDArray[np.int64],
        drained: Sequence[Segment],
        leaving: npt.NDArray[np.int64],
    ) -> None:
        """Rebuild the segment table after an interrupted update. The slots ``places`` are in use, and no others except
        those being zeroed; ``drained`` are being emptied. The caller prevents allocation meanwhile.

        Slots in ``leaving`` were to be zeroed, and may have been already: those that are not in use are zeroed now."""
        with self._lock:
            self._zeroing.add([p for p in np.setdiff1d(leaving, places).tolist() if self._is_slot(p)])
            for segment in self._segments:
                segment.draining &= segment is self._new or segment in drained or segment.unused
            zeroed = np.array(list(self._zeroing.places), np.int64)
            self._segments.repair(
                np.append(places, zeroed), np.append(owners, np.full(len(zeroed), SOMEBODY, np.int64))
            )
            for segment in self._segments:
                residue = self._residues.get(segment.number)
                if residue is not None and residue.slots != segment.slots:  # it was being re-divided
                    residue.cut(segment.slots)
            self._zeroing.repair()
            known = {segment.number for segment in self._segments}
            for number in [number for number in self._memory if number not in known]:
                self._discard(number)
            for segment in [s for s in self._segments if s.number not in self._memory and s is not self._new]:
                self._segments.remove(segment)

    def _is_slot(self, place: int) -> bool:
        """Whether the slot exists and has memory: its segment may have been re-divided, or freed."""
        segment = self._segments.get(segment_of(place))
        return segment is not None and segment.number in self._memory and slot_of(place) < segment.slots

    def settle(self, drained: Sequence[Segment]) -> bool:
        """Stop draining those of these segments that are not empty. Returns whether one of them is empty."""
        with self._lock:
            for segment in drained:
                if segment.draining and not segment.empty:
                    self._segments.undrain(segment)
            return any(segment.draining and segment.empty for segment in drained)

    def release(self, place: int) -> None:
        with self._lock:
            self._segments.release(place)

    def release_many(self, places: npt.NDArray[np.int64]) -> None:
        """Free distinct slots."""
        with self._lock:
            self._segments.release_many(places)

    # -- zeroing and which tenant's bytes are where -------------------------------------------------------

    def written_by(self, places: Sequence[int], tenant: bytes, nbytes: int) -> bool:
        """Blocks of a tenant, ``nbytes`` each, are about to be written to these slots.

        Returns whether the slots may hold bytes of other tenants: then call ``filled`` when they have been overwritten.
        """
        number, others = self._tenants.known(tenant), False
        # few, and without the lock: none of them is re-divided meanwhile
        for segment in {place >> 32 for place in places}:
            residue = self._residues[segment]
            if residue.sole != number or residue.extent != nbytes or number == SEVERAL:
                break
        else:
            return False
        with self._lock:
            number = self._tenants.number(tenant, lambda: iter(self._residues.values()))
            found = np.array(places, np.int64)
            for segment, mine in by_segment(found):
                others |= self._residues[segment].enter(found[mine] & 0xFFFFFFFF, number, nbytes)
        return others

    def filled(self, place: int, tenant: bytes) -> None:
        """A slot now holds nothing but the block of this tenant."""
        with self._lock:
            self._residues[segment_of(place)].last[slot_of(place)] = self._tenants.known(tenant)

    def unfilled(self, place: int) -> None:
        """The writer of a slot gave up: the slot may hold bytes of any tenant."""
        with self._lock:
            self._residues[segment_of(place)].last[slot_of(place)] = SEVERAL

    def zero(self, places: npt.NDArray[np.int64]) -> None:
        """Zero distinct slots in the background, then free them."""
        with self._lock:
            self._segments.own(places, np.full(len(places), SOMEBODY, np.int64))
            self._zeroing.add(places.tolist())
        self._zeroing.wake()

    def when_zeroed(self, call: Callable[[], None]) -> None:
        """Call ``call`` once all slots queued for zeroing by now are zeroed: at once, or on a thread of the tier."""
        self._zeroing.when_done(call)

    def wait_zeroed(self) -> None:
        """Wait until all slots queued for zeroing by now are zeroed. Hold no lock."""
        # Not an Event: an interrupted waiter may leave the Event's lock held, and the thread that sets it would hang.
        zeroed: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.when_zeroed(lambda: zeroed.put(None))
        zeroed.get()

    @property
    def unzeroed(self) -> int:
        """Slots that could not be zeroed. They are not allocated, and zeroing is retried."""
        return self._zeroing.failed

    def _wait_for_zeroed(self, kind: int) -> bool:
        """Wait briefly for a slot that is being zeroed instead of evicting other blocks. Returns whether there is space
        now. Under the lock, which is released while waiting."""
        end = time.monotonic() + _MOMENT
        while self._fits_when_zeroed(kind) and (left := end - time.monotonic()) > 0:
            self._zeroing.given_back.wait(left)
            if self._make_do(kind):
                return True
        return False

    def _fits_when_zeroed(self, kind: int) -> bool:
        """Whether slots of that kind, or of a segment re-dividable for it, are being zeroed. Under the lock."""
        for number, count in self._zeroing.segments.items():
            segment = self._segments[number]
            if (segment.kind == kind and not segment.draining) or (
                segment.used == count and domain_of(segment.kind) == domain_of(kind)
            ):
                return True
        return False

    def zero_free(self, tenant: bytes) -> None:
        """Zero the free slots that may hold bytes of a tenant. Blocks until done: hold no lock."""
        for number in list(self._residues):
            while True:
                with self._lock:
                    places = [] if self._closed else self._claim(number, self._tenants.known(tenant))
                    self._zeroing.add(places)
                if not places:
                    break
                self.wait_zeroed()

    def _claim(self, number: int, tenant: int) -> list[int]:
        """Claim some of a segment's free slots that may hold bytes of a tenant. Under the lock."""
        residue, segment = self._residues.get(number), self._segments.get(number)
        if residue is None or segment is None or segment is self._new:
            return []
        free = np.array(segment.free, np.int64)
        slots = free[residue.left_by(tenant)[free]][: max(1, _CLAIM // segment.size)]
        if len(slots):
            self._segments.claim(segment, slots)
        places: list[int] = (slots | place_of(number, 0)).tolist()
        return places

    @property
    def mixed(self) -> list[Segment]:
        """Segments whose bytes outside of blocks may be of any tenant."""
        with self._lock:
            return [s for s in self._segments if (residue := self._residues.get(s.number)) and residue.mixed]

    def is_mixed(self, place: int) -> bool:
        """Whether a slot is in one of the segments of ``mixed``."""
        residue = self._residues.get(segment_of(place))
        return residue is not None and residue.mixed

    def zero_tail(self, place: int, nbytes: int) -> None:
        """Zero the bytes after the first ``nbytes`` of a slot. The caller makes sure that it owns them."""
        with self._lock:
            size = self._segments.size(place)
        zero(self.span(place, size)[nbytes:])

    def zero_rest(self, segment: Segment) -> None:
        """Zero the bytes after the last slot of a segment, if the segment still exists: some at a time."""
        start = 0
        while start < segment.nbytes:
            with self._lock:  # looked up each time: it may be re-divided in between
                memory = self._memory.get(segment.number)
                if memory is None or self._segments.get(segment.number) is not segment:
                    return
                start = max(start, self._segments.header + segment.slots * segment.size)
                zero(memory.view[start : min(start + _HELD, segment.nbytes)])
            start += _HELD

    def _whole(self, places: Sequence[int]) -> list[Span]:
        """The spans of whole slots. Under the lock."""
        return [self.span(place, self._segments.size(place)) for place in places]

    def _zeroed(self, places: npt.NDArray[np.int64]) -> None:
        for number, mine in by_segment(places):
            self._residues[number].zeroed(places[mine] & 0xFFFFFFFF)
        self._segments.release_many(places)

    def generation(self, place: int) -> int:
        return self._segments.generation(place)

    def span(self, place: int, nbytes: int) -> Span:
        """The bytes of a slot, which the caller must own."""
        start = self._segments.offset(place)
        return self._memory[segment_of(place)].view[start : start + nbytes]

    def spans(self, places: Sequence[int], nbytes: int) -> list[Span]:
        found = []
        number, view, size = -1, memoryview(b""), 0
        for place in places:
            if place >> 32 != number:
                number = place >> 32
                view, size = self._memory[number].view, self._segments[number].size
            start = (place & 0xFFFFFFFF) * size
            found.append(view[start : start + nbytes])
        return found

    def addresses(self, places: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], set[int]]:
        """The addresses of slots for a process that has mapped the memory: its serial number, then 40 bits of offset.

        Also returns the serial numbers of all the memory that the slots are in.
        """
        numbers, found = places >> 32, places & 0xFFFFFFFF
        serials = set()
        present = set(numbers.tolist())
        with self._lock:
            for number in present:
                serial, size = self._memory[number].serial, self._segments[number].size
                serials.add(serial)
                if len(present) == 1:
                    found *= size
                    found += serial << 40
                else:
                    mine = numbers == number
                    found[mine] = found[mine] * size + (serial << 40)
        return found, serials

    def descriptor(self, serial: int) -> int:
        """The memfd with that serial number, to be passed to a process that may map it."""
        with self._lock:
            return next(memory.fd for memory in self._memory.values() if memory.serial == serial)

    def nbytes(self, serial: int) -> int:
        """The size of the memory with that serial number."""
        with self._lock:
            return next(len(memory.view) for memory in self._memory.values() if memory.serial == serial)

    @property
    def serials(self) -> set[int]:
        """Serial numbers of all memory allocated now."""
        with self._lock:
            return {memory.serial for memory in self._memory.values()}

    def count_bytes(self, read: int = 0, written: int = 0) -> None:
        """Count bytes read from and written to slots directly, without ``read`` and ``write``."""
        with self._lock:
            self._read += read
            self._written += written

    @property
    def blocks(self) -> int:
        """Slots in use, not counting those being zeroed."""
        return sum(s.slots - len(s.free) for s in self._segments) - len(self._zeroing.places)

    @property
    def segments(self) -> Segments:
        """The segment table. Read it under ``book_lock``."""
        return self._segments

    @property
    def book_lock(self) -> threading.Lock:
        return self._lock

    # -- the contract of a tier ---------------------------------------------------------------------------

    def read(self, batch: Sequence[Read], done: ReadDone) -> None:
        done([self._read_one(item) for item in batch])

    def _read_one(self, item: Read) -> bool:
        sections, stride = item.wanted, item.identity.geometry.stride
        start, stop = sections.start * stride, sections.stop * stride
        with self._lock:
            if not sections or not self._segments.holds(item.place) or stop > self._segments.size(item.place):
                self._failed_reads += 1
                return False
            generation = self._segments.generation(item.place)
            source = self.span(item.place, stop)[start:]
        copy(item.span[: stop - start], source)
        with self._lock:
            # There is no checksum: the generation tells whether the slot was reassigned during the copy.
            if not self._segments.holds(item.place) or self._segments.generation(item.place) != generation:
                self._failed_reads += 1
                return False
            self._read += stop - start
        return True

    def write(self, batch: Sequence[Write], done: WriteDone) -> None:
        done([self._write_one(item) for item in batch])

    def _write_one(self, item: Write) -> int:
        size = item.identity.geometry.footprint
        place = self.take(size, item.owner)
        while place is None and self.grow(size):
            place = self.take(size, item.owner)
        if place is not None:
            self.written_by([place], item.identity.tenant, size)
            copy(self.span(place, size), item.span)
            self.filled(place, item.identity.tenant)
        with self._lock:
            if place is None:
                self._failed_writes += 1
                return NOWHERE
            self._written += size
        return place

    def drop(self, items: Sequence[tuple[BlockKey, int]], done: DropDone) -> None:
        with self._lock:
            for _, place in items:
                if self._segments.holds(place):
                    self._segments.release(place)
        done([True] * len(items))

    def evict(self, key: BlockKey, place: int) -> None:
        self.release(place)

    def scan(self) -> Iterator[Held]:
        return iter(())

    def own(self, places: npt.NDArray[np.int64], owners: npt.NDArray[np.int64]) -> None:
        with self._lock:
            self._segments.own(places, owners)

    def statistics(self) -> TierStatistics:
        with self._lock:
            return TierStatistics(
                blocks=self.blocks,
                bytes_used=self._segments.used - sum(map(self._segments.size, self._zeroing.places)),
                bytes_taken=self._segments.taken,
                budget=self._segments.budget,
                bytes_read=self._read,
                bytes_written=self._written,
                failed_reads=self._failed_reads,
                failed_writes=self._failed_writes,
                bytes_huge=sum(memory.huge for memory in self._memory.values()),
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._wanted.put(None)
        self._grower.join()
        self._zeroing.close()
        with self._lock:
            for memory in self._memory.values():
                memory.close()
            self._memory.clear()
