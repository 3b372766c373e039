"""The arena: blocks in memory that, with ``shared``, other processes can map.

Memory is taken in segments. A shared one is a memfd whose pages are set aside before anybody sees it (no SIGBUS later,
and the bytes are charged to us) and which is sealed against shrinking and growing, so that a client may map it without
trusting us. One that is not shared is plain memory, because most systems give huge pages to that alone, and with them
the disk reads into it faster, at less CPU: ``kvtide bench store nvme`` says how much.

Callers copy straight into and out of slots; ``read`` and ``write`` of the tier contract do that for them, on the
calling thread, with a copy that releases the GIL.

Slots have no header: what a slot holds is in the index, and a slot's generation tells a late writer from the owner.

Memory is taken from the system by a thread of the arena's own, one segment at a time: it takes long, so callers that
wait for it are often interrupted there, and what is left half done then would be lost to everybody. With ``ahead`` the
thread takes it before anybody asks: a quarter of the budget at first, and then always as much again as is used, so that
an engine's first prompts find room. What was taken before it is known for which blocks is cut when the first one comes.
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
"""Bytes of free slots that are zeroed at a time: meanwhile nobody can have them."""
_MOMENT = 0.1
"""Seconds that are waited for slots which are being zeroed."""
_HELD = 1 << 20
"""Bytes that are zeroed in one hold of the lock."""
_FIRST = 4
"""What part of the budget is taken before anything is stored, with ``ahead``."""


def copy(target: Span, source: Span) -> None:
    """Copy bytes without holding the GIL (a memoryview assignment would)."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class _Growth:
    """Somebody waits for a free slot of a kind."""

    __slots__ = ("ended", "kind", "made")

    def __init__(self, kind: int) -> None:
        self.kind = kind
        self.made = False
        self.ended = threading.Lock()
        """Whoever waits takes it, when it was given back."""
        self.ended.acquire()


class Dram:
    """Blocks in memory, at most ``budget`` bytes of it.

    Segments are taken when they are needed, or in the background: all at once with ``prefault``, or with ``ahead``
    before they are needed. Pages cost about as much to get as to fill. Everything is safe from any thread.
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
        """``serials`` number memory, where several of these must not give a number twice."""
        self._huge_pages = huge_pages
        self._shared = shared
        self._closed = False
        self._segments = Segments(budget, segment, grain=HUGE if huge_pages == "2MiB" else ALIGN)
        self._memory: dict[int, Memory] = {}
        self._residues: dict[int, Residue] = {}
        """Whose bytes are in the slots of segments that have memory."""
        self._tenants = Tenants()
        self._segments.aside = aside
        self._serials = serials or itertools.count()
        self.removed: Callable[[int], None] = lambda serial: None
        """Called when memory was given back to the system; must not wait."""
        self.removals = 0
        """How often memory was given back to the system."""
        self._lock = threading.Lock()
        self._new: Segment | None = None  # it is in the book, but has no memory yet
        self._read = self._written = self._failed_reads = self._failed_writes = 0
        self._ahead = ahead and not prefault
        self._wanted: queue.SimpleQueue[_Growth | int | None] = queue.SimpleQueue()
        """Kinds of slots: that somebody waits for, or of which there will soon be none. None: that was the last."""
        self._asked: set[int] = set()
        self._denied = False
        """Whether the system had no memory for us when it was last asked."""
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
        """A slot for a block of that footprint, or None: then ``grow``, or evict."""
        with self._lock:
            kind = ladder(nbytes) | domain
            place = self._segments.take(kind, owner)
            self._look_ahead(kind)
            return place

    def take_many(
        self, nbytes: int, count: int, owners: npt.NDArray[np.int64] | None = None, domain: int = 0
    ) -> list[int]:
        """Up to ``count`` slots for blocks of that footprint; without ``owners``, tell them with ``own``."""
        kind = ladder(nbytes) | domain
        with self._lock:
            places = self._segments.take_many(kind, count, owners)
            self._look_ahead(kind)
            return places

    def _look_ahead(self, kind: int) -> None:
        if self._ahead and kind not in self._asked and self._short(kind):
            self._ask(kind)

    def _ask(self, kind: int) -> None:
        """Let the thread take memory for that kind. Under the lock."""
        self._asked.add(kind)
        self._wanted.put(kind)

    def _short(self, kind: int) -> bool:
        """Whether more memory is to be taken ahead of need, before slots of that kind are asked for. Under the lock."""
        segments = self._segments
        if kind and segments.scarce(kind):
            return True
        free = segments.taken - segments.used
        return free < max(segments.budget // _FIRST, segments.used) and segments.left >= segments.nominal

    def _grow_all(self, prefault: bool) -> None:
        """The thread that takes memory."""
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
        """Serve those who wait for a slot before the rest of what is queued."""
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
        """Take memory until there is enough, for slots of that kind; 0: for any."""
        while not self._closed:
            self._answer_waiting()
            with self._lock:
                self._cut_ahead(kind)
                first = not self._memory and bool(self._segments.blank)
                segment = self._next(kind) if first or self._short(kind) else None
            if segment is None or not self._fill(segment):
                break
            if not self._wanted.empty():  # others want some too
                self._wanted.put(kind)
                return
        with self._lock:
            self._asked.discard(kind)

    def _cut_ahead(self, kind: int) -> None:
        """Where slots of a kind are scarce, cut memory for it that was taken for any. Under the lock."""
        segments = self._segments
        if kind and segments.scarce(kind):
            spare = next((s for s in segments if s.unused and s is not self._new and segments.suits(s, kind)), None)
            if spare is not None:
                self._recut(spare, kind)

    def _recut(self, segment: Segment, kind: int) -> None:
        self._segments.recut(segment, kind)
        self._residues[segment.number].cut(segment.slots)

    def _next(self, kind: int) -> Segment | None:
        """A segment to be taken ahead of need, for that kind or for any; None if there is no room. Under the lock."""
        blank = self._segments.blank
        if blank and (not kind or self._segments.divides(self._segments.bytes_of(blank, 1), kind)):
            segment = self._add(blank, 1)
            segment.unused = True
            return segment
        slots = self._segments.fit(kind) if kind else 0
        return self._add(kind, slots) if slots else None

    def growable(self, nbytes: int, domain: int = 0) -> bool:
        """Whether ``grow`` could make room for a block of that footprint."""
        kind = ladder(nbytes) | domain
        with self._lock:
            if self._segments.fit(kind) or self._segments.spare(kind, self._new) is not None or self._is_coming():
                return True
            return self._fits_when_zeroed(kind)

    def grow(self, nbytes: int, domain: int = 0, *, wait: bool = True) -> bool | None:
        """Take or recut a segment so that a block of that footprint fits. May take a while: hold no lock.

        Whoever does not ``wait`` for memory that must be taken from the system, or zeroed, is told None while it is on
        its way: ask again.
        """
        kind = ladder(nbytes) | domain
        with self._lock:
            if self._make_do(kind):
                return True  # without waiting for memory that is just being taken from the system
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
        """Whether memory that suits any block is just being taken. Under the lock."""
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
        """Make room with the memory that there is: recut an empty segment or, if it does not suit, give it back."""
        if self._segments.free(kind):
            return True
        if (spare := self._segments.suiting(kind, self._new)) is not None:
            self._recut(spare, kind)
            return True
        if self._segments.fit(kind):
            return False  # there is room for more: what is there may suit others
        spare = self._segments.spare(kind, self._new)
        if spare is not None:
            self._remove(spare)
        return spare is not None

    def _add(self, kind: int, slots: int) -> Segment:
        """A segment that has no memory yet."""
        segment = self._new = self._segments.add(kind, slots)
        self._segments.drain(segment)
        return segment

    def _remove(self, segment: Segment) -> None:
        """Give an empty segment's memory back."""
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
        """Whether so many bytes of slots or of memory that is not cut yet are free, or no more can be taken."""
        with self._lock:
            free = self._segments.taken - self._segments.used - (self._new.nbytes if self._new is not None else 0)
            most = min(nbytes, self._segments.budget // _FIRST)
            return free >= most or self._denied or (self._new is None and self._segments.left < self._segments.nominal)

    def set_aside(self, nbytes: int) -> None:
        """Leave so many bytes of the budget alone: memory of an earlier life that others still have."""
        with self._lock:
            self._segments.aside = nbytes

    def wait_prefault(self) -> None:
        """Wait until the whole budget is taken, if that was asked for."""
        self._prefaulted.wait()

    def _prefault(self) -> None:
        """Take segments until the budget is used up. They are cut when their first block comes."""
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
        except Exception as e:  # noqa: BLE001 - whatever it is, nobody gets memory when this thread ends
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
            if not segment.unused:  # nothing goes in before it is cut
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
        """Make the book anew after a change of it was left half done: these slots are in use and no others but those
        that are zeroed, and ``drained`` are being emptied. The caller lets nobody take a slot meanwhile.

        ``leaving`` were to be zeroed, and may have been already: those that are not in use are zeroed now."""
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
                if residue is not None and residue.slots != segment.slots:  # it was just being cut anew
                    residue.cut(segment.slots)
            self._zeroing.repair()
            known = {segment.number for segment in self._segments}
            for number in [number for number in self._memory if number not in known]:
                self._discard(number)
            for segment in [s for s in self._segments if s.number not in self._memory and s is not self._new]:
                self._segments.remove(segment)

    def _is_slot(self, place: int) -> bool:
        """Whether there is such a slot, with memory: its segment may have been cut anew, or given back."""
        segment = self._segments.get(segment_of(place))
        return segment is not None and segment.number in self._memory and slot_of(place) < segment.slots

    def settle(self, drained: Sequence[Segment]) -> bool:
        """Segments were to be emptied: use those again that are not empty now. Answers whether one is."""
        with self._lock:
            for segment in drained:
                if segment.draining and not segment.empty:
                    self._segments.undrain(segment)
            return any(segment.draining and segment.empty for segment in drained)

    def release(self, place: int) -> None:
        """Give a slot back."""
        with self._lock:
            self._segments.release(place)

    def release_many(self, places: npt.NDArray[np.int64]) -> None:
        """Give distinct slots back."""
        with self._lock:
            self._segments.release_many(places)

    # -- whose bytes are where ----------------------------------------------------------------------------

    def written_by(self, places: Sequence[int], tenant: bytes, nbytes: int) -> bool:
        """Blocks of a tenant are about to be written to these slots, of so many bytes each.

        Answers whether there are bytes of others below: then say with ``filled`` that they have been overwritten.
        """
        number, others = self._tenants.known(tenant), False
        for segment in {place >> 32 for place in places}:  # a few, and no lock: none of them is cut anew meanwhile
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
        """A slot has nothing but the block of a tenant now."""
        with self._lock:
            self._residues[segment_of(place)].last[slot_of(place)] = self._tenants.known(tenant)

    def unfilled(self, place: int) -> None:
        """Whoever was to write to a slot gave up: it may have bytes of anybody."""
        with self._lock:
            self._residues[segment_of(place)].last[slot_of(place)] = SEVERAL

    def zero(self, places: npt.NDArray[np.int64]) -> None:
        """Give distinct slots back, when they have been zeroed: in the background."""
        with self._lock:
            self._segments.own(places, np.full(len(places), SOMEBODY, np.int64))
            self._zeroing.add(places.tolist())
        self._zeroing.wake()

    def when_zeroed(self, call: Callable[[], None]) -> None:
        """Call when all slots that were to be zeroed by now are: at once, or on a thread of the arena's."""
        self._zeroing.when_done(call)

    def wait_zeroed(self) -> None:
        """Wait until all slots that were to be zeroed by now are. Hold no lock."""
        # No Event: whoever is interrupted while he waits may leave its lock taken, and who sets it would hang.
        zeroed: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.when_zeroed(lambda: zeroed.put(None))
        zeroed.get()

    @property
    def unzeroed(self) -> int:
        """Slots that were to be zeroed and could not be: nobody gets them, and they are tried again."""
        return self._zeroing.failed

    def _wait_for_zeroed(self, kind: int) -> bool:
        """Wait a moment for a slot that is being zeroed, rather than let other blocks leave; answers whether there is
        room now. Under the lock, which others have meanwhile."""
        end = time.monotonic() + _MOMENT
        while self._fits_when_zeroed(kind) and (left := end - time.monotonic()) > 0:
            self._zeroing.given_back.wait(left)
            if self._make_do(kind):
                return True
        return False

    def _fits_when_zeroed(self, kind: int) -> bool:
        """Whether slots are zeroed of that kind, or of a segment that can then be cut for it. Under the lock."""
        for number, count in self._zeroing.segments.items():
            segment = self._segments[number]
            if (segment.kind == kind and not segment.draining) or (
                segment.used == count and domain_of(segment.kind) == domain_of(kind)
            ):
                return True
        return False

    def zero_free(self, tenant: bytes) -> None:
        """Zero the free slots that may have bytes of a tenant. Takes as long as that does: hold no lock."""
        for number in list(self._residues):
            while True:
                with self._lock:
                    places = [] if self._closed else self._claim(number, self._tenants.known(tenant))
                    self._zeroing.add(places)
                if not places:
                    break
                self.wait_zeroed()

    def _claim(self, number: int, tenant: int) -> list[int]:
        """Take free slots of a segment that may have bytes of a tenant: some at a time. Under the lock."""
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
        """Segments in which bytes that are not part of a block may be anybody's."""
        with self._lock:
            return [s for s in self._segments if (residue := self._residues.get(s.number)) and residue.mixed]

    def is_mixed(self, place: int) -> bool:
        """Whether a slot is in such a segment."""
        residue = self._residues.get(segment_of(place))
        return residue is not None and residue.mixed

    def zero_tail(self, place: int, nbytes: int) -> None:
        """Zero what is behind the first ``nbytes`` of a slot. Whoever calls sees to it that it is nobody else's."""
        with self._lock:
            size = self._segments.size(place)
        zero(self.span(place, size)[nbytes:])

    def zero_rest(self, segment: Segment) -> None:
        """Zero what is behind the last slot of a segment, if it is there still: some at a time."""
        start = 0
        while start < segment.nbytes:
            with self._lock:  # each time anew: it may be cut for other slots in between
                memory = self._memory.get(segment.number)
                if memory is None or self._segments.get(segment.number) is not segment:
                    return
                start = max(start, self._segments.header + segment.slots * segment.size)
                zero(memory.view[start : min(start + _HELD, segment.nbytes)])
            start += _HELD

    def _whole(self, places: Sequence[int]) -> list[Span]:
        """All bytes of slots. Under the lock."""
        return [self.span(place, self._segments.size(place)) for place in places]

    def _zeroed(self, places: npt.NDArray[np.int64]) -> None:
        """Slots were zeroed. Under the lock."""
        for number, mine in by_segment(places):
            self._residues[number].zeroed(places[mine] & 0xFFFFFFFF)
        self._segments.release_many(places)

    def generation(self, place: int) -> int:
        return self._segments.generation(place)

    def span(self, place: int, nbytes: int) -> Span:
        """The bytes of a slot. Whoever has it must hold the right to it."""
        start = self._segments.offset(place)
        return self._memory[segment_of(place)].view[start : start + nbytes]

    def spans(self, places: Sequence[int], nbytes: int) -> list[Span]:
        """The bytes of many slots."""
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
        """Slots as a process that has mapped the memory finds them: its serial number, then 40 bits of offset.

        And the serial numbers of all the memory that they are in.
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
        """The memory that there is now."""
        with self._lock:
            return {memory.serial for memory in self._memory.values()}

    def moved(self, read: int = 0, written: int = 0) -> None:
        """So many bytes of slots were handed out to be read, and filled, without ``read`` and ``write``."""
        with self._lock:
            self._read += read
            self._written += written

    @property
    def blocks(self) -> int:
        """Slots in use. Those that are being zeroed are not."""
        return sum(s.slots - len(s.free) for s in self._segments) - len(self._zeroing.places)

    @property
    def segments(self) -> Segments:
        """The book. Read it under ``book_lock``."""
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
            # There is no checksum: what tells whether the slot changed hands meanwhile is its generation.
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
