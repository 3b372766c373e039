"""The arena: blocks in memory that, with ``shared``, other processes can map.

Memory is taken in segments. A shared one is a memfd whose pages are set aside before anybody sees it (no SIGBUS later,
and the bytes are charged to us) and which is sealed against shrinking and growing, so that a client may map it without
trusting us. One that is not shared is plain memory, because most systems give huge pages to that alone, and with them
the disk reads into it faster, at less CPU: ``kvtide bench store nvme`` says how much.

Callers copy straight into and out of slots; ``read`` and ``write`` of the tier contract do that for them, on the
calling thread, with a copy that releases the GIL.

Slots have no header: what a slot holds is in the index, and a slot's generation tells a late writer from the owner.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvtide.block import ALIGN, BlockKey, Span
from kvtide.tiers.base import NOWHERE, Held, Read, ReadDone, TierStatistics, Write, WriteDone
from kvtide.tiers.memory import Memory
from kvtide.tiers.segments import Segment, Segments, domain_of, ladder, segment_of, size_of

__all__ = ["Dram", "copy"]

log = logging.getLogger("kvtide.dram")

_TWO_MIB = 2 << 20


def copy(target: Span, source: Span) -> None:
    """Copy bytes without holding the GIL (a memoryview assignment would)."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class Dram:
    """Blocks in memory, at most ``budget`` bytes of it.

    Segments are taken when they are needed, or in the background: all at once with ``prefault``, or with ``ahead`` each
    a little before it is needed. Pages cost about as much to get as to fill. Everything is safe from any thread.
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
        self._segments = Segments(budget, segment, grain=_TWO_MIB if huge_pages == "2MiB" else ALIGN)
        self._memory: dict[int, Memory] = {}
        self._segments.aside = aside
        self._serials = serials or itertools.count()
        self.removed: Callable[[int], None] = lambda serial: None
        """Called when memory was given back to the system; must not wait."""
        self.removals = 0
        """How often memory was given back to the system."""
        self._lock = threading.Lock()
        self._next = threading.Lock()
        self._growing = threading.Lock()
        self._new: Segment | None = None  # it is in the book, but has no memory yet
        self._read = self._written = self._failed_reads = self._failed_writes = 0
        self._ahead = ahead and not prefault
        self._scarce: queue.SimpleQueue[int] = queue.SimpleQueue()
        """Sizes of slots of which there will soon be none; 0: that was the last."""
        self._asked: set[int] = set()
        self._grower = threading.Thread(
            target=self._prefault if prefault else self._stay_ahead, name="kvtide-dram", daemon=True
        )
        if prefault or ahead:
            self._grower.start()

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
        if self._ahead and kind not in self._asked and self._segments.scarce(kind):
            self._asked.add(kind)
            self._scarce.put(kind)

    def _stay_ahead(self) -> None:
        while kind := self._scarce.get():
            with self._turn():
                with self._lock:
                    slots = self._segments.fit(kind) if self._segments.scarce(kind) else 0
                    segment = self._add(kind, slots) if slots else None
                if segment is not None:
                    self._fill(segment)
            self._asked.discard(kind)

    def growable(self, nbytes: int, domain: int = 0) -> bool:
        """Whether ``grow`` could make room for a block of that footprint."""
        kind = ladder(nbytes) | domain
        with self._lock:
            return bool(self._segments.fit(kind)) or self._segments.spare(kind, self._new) is not None

    def grow(self, nbytes: int, domain: int = 0) -> bool:
        """Take or recut a segment so that a block of that footprint fits. May take a while: hold no lock."""
        kind = ladder(nbytes) | domain
        with self._lock:
            if self._make_do(kind):
                return True  # and whoever takes memory from the system just now need not be waited for
        with self._turn():
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
        spare = self._segments.spare(kind, self._new)
        if spare is None:
            return False
        size = size_of(kind)
        wasted = spare.nbytes % size if spare.nbytes >= size else spare.nbytes
        if wasted * 16 <= spare.nbytes and domain_of(spare.kind) == domain_of(kind):
            self._segments.recut(spare, kind)
        else:
            self._remove(spare)
        return True

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """To take memory from the system, one after another, and each in turn: a plain lock would go to the thread that
        takes the whole budget again and again, and a node that waits for it answers nobody."""
        with self._next:
            self._growing.acquire()
        try:
            yield
        finally:
            self._growing.release()

    def _add(self, kind: int, slots: int) -> Segment:
        """A segment that has no memory yet."""
        segment = self._new = self._segments.add(kind, slots)
        self._segments.drain(segment)
        return segment

    def _remove(self, segment: Segment) -> None:
        """Give an empty segment's memory back."""
        self._segments.remove(segment)
        memory = self._memory.pop(segment.number)
        memory.empty()
        memory.close()
        self.removals += 1
        self.removed(memory.serial)

    def set_aside(self, nbytes: int) -> None:
        """Leave so many bytes of the budget alone: memory of an earlier life that others still have."""
        with self._lock:
            self._segments.aside = nbytes

    def wait_prefault(self) -> None:
        """Wait until the whole budget is taken, if that was asked for."""
        if self._grower.ident is not None and not self._ahead:
            self._grower.join()

    def _prefault(self) -> None:
        """Take segments until the budget is used up. They are cut when their first block comes."""
        while not self._closed:
            with self._turn():
                with self._lock:
                    if not self._segments.fit(ladder(self._segments.nominal)):
                        return
                    segment = self._add(ladder(self._segments.nominal), 1)
                if not self._fill(segment):
                    return

    def _fill(self, segment: Segment) -> bool:
        nbytes = segment.nbytes
        try:
            memory = self._allocate(nbytes)
        except OSError as e:
            log.warning("cannot take %d bytes of memory: %s", nbytes, e.strerror)
            with self._lock:
                self._new = None
                self._segments.remove(segment)
            return False
        with self._lock:
            self._new = None
            self._memory[segment.number] = memory
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
                    self._segments.budget // _TWO_MIB,
                )
                self._huge_pages = "transparent"
        return Memory(serial, nbytes, self._huge_pages, self._shared)

    def release(self, place: int) -> None:
        """Give a slot back."""
        with self._lock:
            self._segments.release(place)

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
        """Slots in use."""
        return sum(s.slots - len(s.free) for s in self._segments)

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
            copy(self.span(place, size), item.span)
        with self._lock:
            if place is None:
                self._failed_writes += 1
                return NOWHERE
            self._written += size
        return place

    def drop(self, items: Sequence[tuple[BlockKey, int]], done: ReadDone) -> None:
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
                bytes_used=self._segments.used,
                bytes_taken=self._segments.taken,
                budget=self._segments.budget,
                bytes_read=self._read,
                bytes_written=self._written,
                failed_reads=self._failed_reads,
                failed_writes=self._failed_writes,
            )

    def close(self) -> None:
        self._closed = True
        self._scarce.put(0)
        if self._grower.is_alive():
            self._grower.join()
        with self._lock:
            for memory in self._memory.values():
                memory.close()
            self._memory.clear()
