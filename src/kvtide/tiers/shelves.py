"""The files of an NVMe tier: what lies in which slot, and what the disk may still say of blocks that are gone.

This is the book of the directory, on disk and in memory: segments, slots, sequence numbers, the journal. It finds
slots, adding and recutting segments, and erases blocks so that they do not come back. How the book is found when a
directory is opened stands in opening.py; how a block becomes a record, and who does it on which thread, in nvme.py.

A dropped block must not come back, whatever happens. So three things are remembered besides what is where: free slots
whose header still names a block (``_stale``), slots whose header is just being written (``coming``), and segments
that were written to since they were last synced (``_dirty``), because until then a power loss may bring back what was
overwritten.

Locks: ``lock`` guards the book and is held for microseconds, never during I/O, because callers of ``free`` hold the
index's lock. ``_journal_lock`` guards the journal and ``_grow_lock`` the cutting of segments; these are taken by the
tier's own threads alone. Order: ``_grow_lock``, ``_journal_lock``, ``lock``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from kvtide.block import ALIGN, BlockKey, Span
from kvtide.errors import ConfigError, TierError
from kvtide.tiers.base import NOWHERE, Held
from kvtide.tiers.codec import Scratch
from kvtide.tiers.directory import Directory, SegmentHeader
from kvtide.tiers.journal import FREED, PER_SLOT, RESERVE, Journal, entry
from kvtide.tiers.opening import ANY, Opening, current
from kvtide.tiers.record import Rejected
from kvtide.tiers.segments import Segment, Segments, segment_of, slot_of

__all__ = ["Location", "Shelves"]

log = logging.getLogger("kvtide.nvme")

Location = tuple[int, int, int, int]
"""Of a slot: its file (NOWHERE if it is not in use), its offset there, its size, and its record's sequence number."""

_BLANK = Scratch().get(ALIGN)
"""What is written over a header that must not be found any more."""
_BLANK[:] = bytes(ALIGN)


class Shelves:
    """An open directory. ``writes`` payloads are written at a time. See the module's text for the locks."""

    def __init__(self, directory: Directory, budget: int, segment: int, writes: int, direct: bool) -> None:
        if budget < 4 * RESERVE:
            raise ConfigError(f"an NVMe budget of {budget} bytes is too small; give {4 * RESERVE} or more")
        self._disk = directory.disk
        self._turns: SimpleQueue[None] = SimpleQueue()  # a semaphore without a line of Python in it
        for _ in range(writes):
            self._turns.put(None)
        self._directory = directory
        self._directory.create()
        self._directory.lock()
        self._files: dict[int, int] = {}
        self.coming: dict[int, BlockKey] = {}
        """Slots that are, or will be, written: which block the header may name by now."""
        self._dirty: set[int] = set()
        """Segments that were written to since they were last synced."""
        self._nameless: set[int] = set()
        """Segments whose file may vanish with a power loss: the folder could not be synced since it was made."""
        self._unnoted: list[bytes] = []
        """Journal records that are not written yet."""
        self.lock = threading.Lock()
        self._headers = threading.Condition(self.lock)
        self._naming = 0
        """Threads that are writing a header."""
        self._erasing = False
        """Whether a thread is erasing headers; never while others write some."""
        self._grow_lock = threading.Lock()
        self._journal_lock = threading.Lock()
        self.segments = Segments(budget - RESERVE, segment, header=ALIGN, per_slot=PER_SLOT)
        self.budget = budget
        self.refused = 0
        """The system's error, where the disk did not give the last segment that was wanted."""
        try:
            self._direct = direct and self._directory.direct_works()
            if direct and not self._direct:
                log.warning("%s has no direct I/O: the page cache is used, at more CPU", directory.path)
            self._journal = Journal(directory.journal, self._disk, self._disk.boot_id(), directory.sealing)
            found = Opening(directory, self._direct, self.segments)
            self._files = found.files
            self.held: Held | None = found.run(self._journal)  # what was here before
        except OSError as e:
            self._let_go()
            raise TierError(f"cannot open {directory.path}: {e.strerror or e}. Mend it, or give another") from e
        except BaseException:
            self._let_go()
            raise
        self._sequences = found.sequences
        self._sequence = found.sequence
        self._cuts = found.cuts
        """At which sequence number each segment was cut."""
        self._stale = found.stale
        """Slots that hold nothing but whose header still names a block: where, and which."""
        self.reasons = found.reasons
        """Why blocks and segments were refused."""
        self._dirty.update(self._files)  # what a predecessor wrote may not be on the medium yet

    @property
    def taken(self) -> int:
        """Bytes of the disk that all of it takes at most."""
        return self.segments.taken + RESERVE

    def close(self) -> None:
        """Let go of the directory. Nothing may be under way."""
        self.note()
        with self.lock:
            dirty, self._dirty = self._dirty, set()
        with self._journal_lock:
            self._journal.close(synced=not self._sync_all(dirty))
        self._let_go()

    def _let_go(self) -> None:
        for fd in self._files.values():
            self._disk.close(fd)
        self._files.clear()
        self._directory.unlock()

    # -- slots --------------------------------------------------------------------------------------------

    def find(self, places: Sequence[int]) -> list[Location]:
        """Where slots are. What they hold may change at once: see the header."""
        with self.lock:
            return [self._location(place) if self.segments.holds(place) else (NOWHERE, 0, 0, 0) for place in places]

    def _location(self, place: int) -> Location:
        number, slot = segment_of(place), slot_of(place)
        size = self.segments[number].size
        return self._files[number], self.segments.header + slot * size, size, int(self._sequences[number][slot])

    def traces(self) -> list[tuple[int, BlockKey | None, Location]]:
        """Every slot whose header may name a block: its place, which block if the slot is free, and where it is."""
        with self.lock:
            named = [*((p, None) for p in self.segments.places()), *self._stale.items()]
            return [(p, key, self._location(p)) for p, key in named]

    def begin(self, keys: Sequence[BlockKey], places: Sequence[int]) -> list[tuple[int, int, int]]:
        """Blocks are about to be written to slots: of each its file, its offset, and the record's sequence number."""
        with self.lock:
            first = self._sequence
            self._sequence += len(keys)
            self.coming.update(zip(places, keys, strict=True))
            return [(self._files[segment_of(p)], self.segments.offset(p), first + i) for i, p in enumerate(places)]

    def name(self, place: int, page: Span, sequence: int, record: bytes, before: Span | None = None) -> None:
        """Write a record's header, its payload being written: if it goes well, the record is kept.

        ``record`` is then for the journal, which ``note`` tells. ``before`` is the payload of the slot before, which
        ends where this header begins. Not while headers are erased: a slot may be another's by now.
        """
        number = segment_of(place)
        with self.lock:
            if self._erasing:
                self._headers.wait_for(lambda: not self._erasing)
            self._naming += 1
            self._sequences[number][slot_of(place)] = sequence
            # What it named before, or the new block: until the write is over, nobody knows how far it came.
            self._stale[place] = ANY
        written = False
        try:
            fd, offset = self._files[number], self.segments.offset(place)
            if before is None:
                self._write(fd, [page], offset)
            else:
                self.write(fd, [before, page], offset - len(before))
            written = True
        finally:
            with self.lock:
                self._naming -= 1
                if self._erasing:
                    self._headers.notify_all()
                if written:
                    del self._stale[place], self.coming[place]
                    self._dirty.add(number)
                    self._unnoted.append(record)

    def failed(self, place: int) -> None:
        """The record could not be written."""
        with self.lock:
            self.coming.pop(place, None)
            self.segments.release(place)

    def free(self, key: BlockKey, place: int) -> None:
        """Give back a slot whose header names ``key``."""
        with self.lock:
            self._free(key, place)

    def read(self, fd: int, into: Sequence[Span], offset: int) -> int:
        return self._disk.read(fd, into, offset)

    def write(self, fd: int, data: Sequence[Span], offset: int) -> None:
        # A few fill the disk; more would be in the way of reads.
        self._turns.get()
        try:
            self._write(fd, data, offset)
        finally:
            self._turns.put(None)

    def _write(self, fd: int, data: Sequence[Span], offset: int) -> None:
        """Also for single pages, which need not wait for their turn."""
        self._disk.write_all(fd, data, offset, self._direct)

    def take(self, size: int, owners: Sequence[int], make_room: Callable[[int], bool] | None) -> Iterator[int]:
        """Slots of ``size``, by growing or, with ``make_room``, by evicting if need be; fewer if there is no room."""
        left = np.array(owners, np.int64)
        for _ in range(1000 * len(owners)):
            with self._headers:
                self._headers.wait_for(lambda: not self._erasing)
                places = self.segments.take_many(size, len(left), left)
                self.coming.update(dict.fromkeys(places, ANY))
            yield from places
            left = left[len(places) :]
            if not len(left) or not (self._grow(size) or (make_room and make_room(size))):
                return

    def _grow(self, size: int) -> bool:
        """Add a segment for slots of ``size``, or recut an empty one; False if there is neither room nor such."""
        with self._grow_lock:
            self.refused = 0
            with self.lock:
                if self.segments.free(size):
                    return True
                spare = None if self.segments.fit(size) else self.segments.spare(size)
                if spare is not None:
                    self.segments.drain(spare)
            segment = None
            try:
                if spare is not None:
                    self._give_up(spare)
                with self.lock:
                    if slots := self.segments.fit(size):
                        segment = self.segments.add(size, slots, spare.number if spare else None)
                        self.segments.drain(segment)
                        self._cuts[segment.number] = self._sequence
                        self._sequence += 1
                if segment is None:
                    if spare is not None:
                        # Too small for one slot: its bytes join those that the next empty segment will free.
                        self._disk.resize(self._files[spare.number], 0)
                    return spare is not None
                self.note()  # the journal's share of the budget goes by the number of slots
                self._make(segment)
            except (OSError, Rejected) as e:
                return self._not_grown(segment, e)
            with self.lock:
                segment.draining = False
                self.segments.settle(segment)
            return True

    def _not_grown(self, segment: Segment | None, e: OSError | Rejected) -> bool:
        reason, self.refused = (str(e), 0) if isinstance(e, Rejected) else (e.strerror or str(e), e.errno or 0)
        log.warning("%s cannot take a segment: %s", self._directory.path, reason)
        with self.lock:
            self.reasons[f"segment: {reason}"] += 1
        if segment is not None:
            # If not even this works it stays in the book, empty: a spare for the next who wants one.
            with contextlib.suppress(OSError, Rejected):
                self._give_up(segment)
                if segment.number in self._files:
                    self._disk.resize(self._files[segment.number], 0)
        return False

    def _make(self, segment: Segment) -> None:
        """The file of a new segment, at its full size, with a header that survives a power loss."""
        fd = self._files.get(segment.number)
        if fd is None:
            fd = self._disk.open(self._directory.segment(segment.number), direct=self._direct, create=True)
            self._files[segment.number] = fd
            self._nameless.add(segment.number)
        self._sequences[segment.number] = np.zeros(segment.slots, np.int64)
        self._disk.resize(fd, segment.nbytes)
        page = Scratch().get(ALIGN)
        page[:] = SegmentHeader(segment.size, segment.slots, self._cuts[segment.number]).pack()
        self._write(fd, [page], 0)
        self._disk.sync(fd)
        if segment.number in self._nameless:
            self._disk.sync_folder(self._directory.path)
            self._nameless.discard(segment.number)

    def _give_up(self, segment: Segment) -> None:
        """Take an empty segment out of the book, as soon as the medium has no header of it any more.

        Its bytes are then another's. If a power loss could bring it back, there would be more segments than the budget
        allows, and the next opener might do without one whose blocks were acknowledged.
        """
        fd = self._files.get(segment.number)
        if fd is not None and os.fstat(fd).st_size:
            self._write(fd, [_BLANK], 0)
            self._disk.sync(fd)
        with self.lock:
            self.segments.remove(segment)
            self._stale = {place: key for place, key in self._stale.items() if segment_of(place) != segment.number}

    # -- erasing ------------------------------------------------------------------------------------------

    def drop(self, items: Sequence[tuple[BlockKey, int]]) -> list[bool]:
        """Erase blocks, so that they do not come back; False for those that may."""
        with self.erasing():
            failed = self._overwrite(items)
            self.note()
        return [key not in failed for key, _ in items]

    @contextlib.contextmanager
    def erasing(self) -> Iterator[None]:
        """No header is written meanwhile, no slot given away, no segment cut: what headers name does not change."""
        with self._grow_lock:
            with self._headers:
                self._erasing = True
                self._headers.wait_for(lambda: not self._naming)
            try:
                yield
            finally:
                with self._headers:
                    self._erasing = False
                    self._headers.notify_all()

    def _overwrite(self, items: Sequence[tuple[BlockKey, int]]) -> set[BlockKey]:
        """Overwrite all headers that name dropped blocks, and free their slots; answers those that may come back."""
        keys = {key for key, _ in items}
        with self.lock:
            wanted = keys | {ANY}
            named = [(k, p) for names in (self._stale, self.coming) for p, k in names.items() if k in wanted]
            live = [(k, p) for k, p in dict.fromkeys(items) if self.segments.holds(p)]
            generations = [self.segments.generation(p) for _, p in live]
            targets = [(k, p, self._files[segment_of(p)], self.segments.offset(p)) for k, p in named + live]
            dirty, self._dirty = self._dirty | {segment_of(p) for _, p in named + live}, set()
        failed: set[BlockKey] = set()
        for key, _, fd, offset in targets:
            try:
                self._write(fd, [_BLANK], offset)
            except (OSError, Rejected) as e:
                failed.add(key)
                log.warning("could not overwrite a dropped block: %s", e)
        if (unsynced := self._sync_all(dirty)) or ANY in failed:
            failed |= keys
        with self.lock:
            self._dirty |= unsynced
            for key, place in named:
                if key not in failed and self._stale.get(place) == key:
                    del self._stale[place]
            for (key, place), generation in zip(live, generations, strict=True):
                if self.segments.holds(place) and self.segments.generation(place) == generation:
                    self._free(key, place)
                    if key not in failed:
                        del self._stale[place]
        return failed

    def _sync_all(self, numbers: set[int]) -> set[int]:
        """Sync segments; answers those that could not be."""
        failed = set()
        for number in numbers:
            try:
                self._disk.sync(self._files[number])
            except OSError as e:
                failed.add(number)
                log.warning("could not sync segment %d: %s", number, e)
                with self.lock:
                    self.reasons[f"sync: {e.strerror}"] += 1
        return failed

    def _free(self, key: BlockKey, place: int) -> None:
        """Give back a slot whose header names ``key``. Under the lock."""
        self.segments.release(place)
        self._stale[place] = key
        self._unnoted.append(entry(FREED, place, key, int(self._sequences[segment_of(place)][slot_of(place)])))

    def note(self, record: bytes = b"") -> None:
        """Tell the journal which slots were freed and named and, after that, what ``record`` says."""
        with self._journal_lock:
            with self.lock:
                unnoted, self._unnoted = self._unnoted, []
                slots = self.segments.slots
            body = b"".join(unnoted) + record
            if self._journal.full(slots, len(body)):
                self._journal.compact(self._current)
            if body:
                self._journal.append(body)

    def _current(self, records: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        with self.lock:
            return current(records, self.segments, self._cuts)

    def sync(self, keys: Sequence[BlockKey], places: list[int]) -> None:
        """Make a batch durable; what cannot be is taken back."""
        failed = self._sync_all({segment_of(p) for p in places if p != NOWHERE})
        with self.lock:
            for i, place in enumerate(places):
                if place != NOWHERE and segment_of(place) in failed:
                    self._free(keys[i], place)
                    places[i] = NOWHERE
