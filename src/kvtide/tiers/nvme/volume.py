"""The files of an NVMe tier: which slot holds which block, and which headers on disk still name removed blocks.

A ``Volume`` manages one directory, on disk and in memory: segments, slots, sequence numbers, the journal. It allocates
slots, adding and re-dividing segments, and erases blocks so that they do not come back. recovery.py restores this state
when a directory is opened. tier.py turns blocks into records and decides which thread does it.

A dropped block must never come back. So besides the contents of slots three things are tracked: free slots whose header
still names a block (``_stale``), slots whose header is being written (``coming``), and segments written to since their
last sync (``_dirty``), because until then a power loss may restore what was overwritten.

The disk may have less space than the budget. When it refuses a segment, the tier continues as if its budget ended
there: it takes a smaller segment if it can get one, then re-divides the segments it has and evicts to empty them. It
asks for more after ``_RETRY`` seconds, not at each write, and logs once when this begins and once when it ends. A slot
whose write failed is not used for ``_RETRY`` seconds, because the next writer would otherwise get the same one. If even
slots that were written before fail, or empty segments cannot be re-divided, nothing is evicted for them for that time:
blocks would be lost without making space.

Records of other versions of kvtide are *kept* (``_kept``; see recovery.py). The journal does not say which version
wrote a record. So the header of a slot that was in use when the directory was opened is read before it is overwritten
(``_unseen``).

Locks: ``lock`` guards the state in memory and is held for microseconds, never during I/O, because callers of ``free``
hold the index's lock. ``_journal_lock`` guards the journal and ``_grow_lock`` adding and re-dividing segments; only the
tier's own threads take these two. Order: ``_grow_lock``, ``_journal_lock``, ``lock``.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from kvtide import forks
from kvtide.block import ALIGN, BlockKey, Span
from kvtide.clock import Clock
from kvtide.errors import ConfigError, TierError
from kvtide.interrupts import again_if_interrupted
from kvtide.tiers.base import NOWHERE, Held, Renewal
from kvtide.tiers.format.reason import Reason
from kvtide.tiers.format.record import OtherVersion, Rejected, expire_at, parse, recognise
from kvtide.tiers.format.scratch import Scratch
from kvtide.tiers.nvme.directory import Directory, SegmentHeader
from kvtide.tiers.nvme.journal import FREED, HOLDS, KEEPS, PER_SLOT, RESERVE, Journal, entry
from kvtide.tiers.nvme.measure import FILE, Measured, Piece, measure_file, measure_slots
from kvtide.tiers.nvme.recovery import ANY, Recovery, current
from kvtide.tiers.segments import EMPTY, Segment, Segments, by_segment, place_of, segment_of, slot_of

__all__ = ["Location", "MakeRoom", "Volume"]

log = logging.getLogger("kvtide.nvme")

Location = tuple[int, int, int, int]
"""Of a slot: its file (NOWHERE if it is not in use), its offset there, its size, and its record's sequence number."""
MakeRoom = Callable[[int, int, int], bool]
"""Called with a slot size, a count and the owner of the first block that needs one: evicts so that up to that many
slots come free. False if nothing may be evicted."""

_RETRY = 10.0
"""Seconds until a disk that refused is asked again."""
_LEAST = 256 << 10
"""The smallest segment, if the budget allows it and its slots are not larger: its header then takes 1/64."""
_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers after which a smaller file might succeed."""
_ATTEMPTS = 2
"""After this many consecutive failed writes to slots that were written before, nothing more is evicted for a while."""
_LOOKED = 1024
"""Slots visited in one hold of the lock."""
_AT_ONCE = 16
"""Blocks evicted at a time, at most: the index is locked meanwhile."""
_BLANK = Scratch().get(ALIGN)
"""Written over a header that must not be found any more."""
_BLANK[:] = bytes(ALIGN)


class Volume:
    """An open directory. At most ``writes`` payloads are written at a time; ``sizes`` slot sizes or more are expected.

    For the locks see the module's docstring.
    """

    def __init__(
        self,
        directory: Directory,
        budget: int,
        segment: int,
        writes: int,
        direct: bool,
        clock: Clock,
        sizes: int = 1,
    ) -> None:
        if budget < 4 * RESERVE:
            raise ConfigError(f"an NVMe budget of {budget} bytes is too small; give {4 * RESERVE} or more")
        self._disk = directory.disk
        self._clock = clock
        # a semaphore implemented entirely in C
        self._turns: SimpleQueue[None] = SimpleQueue()
        for _ in range(writes):
            self._turns.put(None)
        self._directory = directory
        self._closed = False
        self._journal = Journal(directory.journal, self._disk, self._disk.boot_id(), directory.encryption)
        self._files: dict[int, int] = {}
        forks.tell(self)
        self.coming: dict[int, BlockKey] = {}
        """Slots that are, or will be, written: which block the header may name by now."""
        self._dirty: set[int] = set()
        """Segments written to since their last sync."""
        self._unsynced: dict[int, int] = {}
        """Segments of which a sync failed: records with smaller sequence numbers than this may be lost for good."""
        self._nameless: set[int] = set()
        """Segments whose file may vanish with a power loss: the directory could not be synced since it was created."""
        self._unnoted: list[bytes] = []
        """Journal records that are not written yet."""
        self.lock = threading.Lock()
        self._headers = threading.Condition(self.lock)
        self._naming = 0
        """Number of threads that are writing a header."""
        self._erasing = False
        """Whether a thread is erasing headers; never while others write headers."""
        self._grow_lock = threading.Lock()
        self._journal_lock = threading.Lock()
        self.segments = Segments(budget - RESERVE, segment, header=ALIGN, per_slot=PER_SLOT, least=_LEAST, sizes=sizes)
        self.budget = budget
        self.refused = 0
        """The system's error number, while the disk refuses segments."""
        self._refusing = False
        """Whether the disk refuses segments, and a warning was logged."""
        self._ask_again = 0.0
        """When the disk is asked again for a segment, after it refused."""
        self._withheld = 0
        """Number of slots withheld from use because their writes failed."""
        self._in_vain = 0
        """Consecutive failed writes to slots that were written before: these did not fail for lack of space."""
        self._write_again = 0.0
        """When withheld slots are used again."""
        try:
            self._directory.create()
            self._directory.lock()
        except OSError as e:
            raise TierError(
                f"cannot open {directory.path}: {e.strerror or e}. Repair it, or configure another directory"
            ) from e
        try:
            with contextlib.suppress(OSError):  # left over if a process was killed while it measured the disk
                self._directory.measuring.unlink(missing_ok=True)
            self._direct = direct and self._directory.direct_works()
            if direct and not self._direct:
                log.warning("%s has no direct I/O: the page cache is used, at more CPU", directory.path)
            found = Recovery(directory, self._direct, self.segments)
            self._files = found.files
            self.held: Held | None = found.run(self._journal)  # what the directory held before
        except OSError as e:
            self._let_go()
            raise TierError(
                f"cannot open {directory.path}: {e.strerror or e}. Repair it, or configure another directory"
            ) from e
        except BaseException:
            self._let_go()
            raise
        self._sequences = found.sequences
        self._sequence = found.sequence
        self._cuts = found.cuts
        """The sequence number at which each segment was divided into slots."""
        self._stale = found.stale
        """Free slots whose header still names a block, and which block."""
        self._kept = found.kept
        """Slots with records of other versions: which block each names, if that is known, and whether the version is
        newer."""
        self._unseen = found.unseen
        """By segment: slots that were in use when the directory was opened and whose headers were not read since."""
        self.reasons = found.reasons
        """Why blocks and segments were rejected, with counts."""
        self._dirty.update(self._files)  # what an earlier process wrote may not be on the medium yet

    @property
    def taken(self) -> int:
        """Bytes of disk in use, at most."""
        return self.segments.taken + self.segments.lent + RESERVE

    def close(self) -> None:
        """Close the directory. No operation may be in progress. May be repeated after an interruption."""
        if self._closed:
            return
        try:
            self.note()
            with self.lock:
                dirty = set(self._dirty)
            with self._journal_lock:
                self._journal.close(synced=not self._sync_all(dirty))
        finally:
            again_if_interrupted(self._let_go)

    def _let_go(self) -> None:
        self._closed = True
        try:
            self._journal.abandon()
            while self._files:  # one by one, so that a fork in between finds only open descriptors
                self._disk.close(self._files.popitem()[1])
        finally:
            self._directory.unlock()

    def forked(self) -> None:
        while self._files:
            forks.close([self._files.popitem()[1]])

    # -- measuring ----------------------------------------------------------------------------------------

    def measure(self, write: Callable[[], bool], threads: int, stop: Callable[[], bool]) -> Measured:
        """Measure the disk's speed: see measure.py. ``write`` is called, if there is space, to ask whether writing is
        allowed. Raises OSError or Rejected."""
        if self._lend(FILE):
            try:
                if write():
                    path = self._directory.measuring
                    return measure_file(path, self._disk, self._direct, threads, self._clock, stop)
            finally:
                with self.lock:
                    self.segments.lent -= FILE
        if not self._direct:
            return Measured()
        return measure_slots(self._some(FILE), self._disk, threads, self._clock, stop)

    def _lend(self, nbytes: int) -> bool:
        """Borrow bytes of the budget briefly, if blocks are unlikely to need them meanwhile."""
        with self.lock:
            if self._refusing or self.segments.left < nbytes + 2 * self.segments.nominal:
                return False
            self.segments.lent += nbytes
            return True

    def _some(self, nbytes: int) -> list[Piece]:
        """Returns slots in use, of ``nbytes`` together or slightly more."""
        found: list[Piece] = []
        with self.lock:
            numbers = [segment.number for segment in self.segments]
        for number in numbers:
            with self.lock:
                segment = self.segments.get(number)
                if segment is None or nbytes <= 0:
                    continue
                slots = np.flatnonzero(segment.owner != EMPTY)[: -(-nbytes // segment.size)].tolist()
                found += [Piece(*self._location(place_of(number, slot))[:3]) for slot in slots]
                nbytes -= len(slots) * segment.size
        return found

    # -- slots --------------------------------------------------------------------------------------------

    def find(self, places: Sequence[int]) -> list[Location]:
        """The locations of slots. Their contents may change at once: check the header."""
        with self.lock:
            return [self._location(place) if self.segments.holds(place) else (NOWHERE, 0, 0, 0) for place in places]

    def _location(self, place: int) -> Location:
        number, slot = segment_of(place), slot_of(place)
        size = self.segments[number].size
        return self._files[number], self.segments.header + slot * size, size, int(self._sequences[number][slot])

    def traces(self) -> Iterator[tuple[int, BlockKey | None, Location]]:
        """Every slot whose header may name a block: its place, which block if the slot is free, and its location.

        Takes the lock for some slots at a time. Records written meanwhile may be missing.
        """
        with self.lock:
            sizes = [(segment.number, segment.slots) for segment in self.segments]
        for number, slots in sizes:
            for start in range(0, slots, _LOOKED):
                with self.lock:
                    found = self._traces(number, range(start, min(start + _LOOKED, slots)))
                yield from found

    def _traces(self, number: int, slots: range) -> list[tuple[int, BlockKey | None, Location]]:
        places = [place_of(number, slot) for slot in slots]
        named = [(p, None) for p in places if self.segments.holds(p) and p not in self._kept]
        stale = [(p, key) for p in places if (key := self._stale.get(p)) is not None]
        return [(p, key, self._location(p)) for p, key in [*named, *stale]]

    # -- records of other versions ------------------------------------------------------------------------

    def kept(self) -> list[tuple[int, Location]]:
        """Slots with records of other versions, and their locations."""
        with self.lock:
            return [(place, self._location(place)) for place in self._kept]

    def keep(self, key: BlockKey, place: int, sequence: int, newer: bool) -> None:
        """A record turned out to be of another version: its slot stays as it is, though it could not be read."""
        with self.lock:
            known = not self.segments.holds(place) or place in self.coming or place in self._kept
            if not known and self._location(place)[3] == sequence:  # else the slot was reused
                self._keep(key, place, newer)

    def _keep(self, key: BlockKey, place: int, newer: bool) -> None:
        self.segments.keep(place)
        self._kept[place] = key, newer
        self._unnoted.append(entry(KEEPS, place, key, int(self._sequences[segment_of(place)][slot_of(place)])))

    def erased(self, place: int) -> None:
        """A record of another version was erased on request."""
        with self.lock:
            if self._kept.pop(place, None) is not None:
                self._free(ANY, place)
                del self._stale[place]

    def _look_at(self, places: list[int]) -> list[int]:
        """Returns those of some newly taken slots that may be overwritten. The others are kept as they are."""
        array = np.array(places, np.int64)
        newer: set[int] = set()
        for number, mine in by_segment(array):
            newer.update(self._newer(number, array[mine] & 0xFFFFFFFF))
        return [place for place in places if place not in newer] if newer else places

    def _newer(self, number: int, slots: npt.NDArray[np.int64]) -> list[int]:
        """Returns those of some slots of a segment, which no other thread may take now, that have records of a newer
        kvtide.

        These slots are kept from now on. Each slot is read once, neighbours together.
        """
        unseen = self._unseen.get(number)
        if unseen is None or not len(wanted := np.sort(slots[unseen[slots]])):
            return []
        with self.lock:
            segment = self.segments[number]
            header = SegmentHeader(segment.size, segment.slots, self._cuts[number])
        newer: dict[int, str] = {}
        for run in np.split(wanted, np.flatnonzero(np.diff(wanted) > 1) + 1):
            found = self._directory.records(self._files[number], header, range(int(run[0]), int(run[-1]) + 1))
            newer |= {slot: str(what) for slot, what in found if isinstance(what, OtherVersion) and what.newer}
        with self.lock:
            unseen[wanted] = False
            for slot, why in newer.items():
                place = place_of(number, slot)
                if not self.segments.holds(place):
                    self.segments.claim(segment, np.array([slot], np.int64))
                self.coming.pop(place, None)
                self.reasons[why] += 1
                self._keep(self._stale.pop(place, ANY), place, newer=True)
        return [place_of(number, slot) for slot in newer]

    def _holds_newer(self, segment: Segment) -> bool:
        """Whether an empty segment that is to be re-divided has records of a newer kvtide. Then it is not empty."""
        unseen = self._unseen.get(segment.number)
        if unseen is None or not self._newer(segment.number, np.flatnonzero(unseen)):
            return False
        with self.lock:
            self.segments.undrain(segment)
        return True

    def _give_up_old(self) -> bool:
        """Free the slots of one segment with records of an older kvtide, which this version cannot read; False if there
        are none."""
        with self.lock:
            old = [place for place, (_, newer) in self._kept.items() if not newer]
            for place in [p for p in old if segment_of(p) == segment_of(old[0])]:
                del self._kept[place]
                self._free(ANY, place)
        return bool(old)

    def begin(self, keys: Sequence[BlockKey], places: Sequence[int]) -> list[tuple[int, int, int]]:
        """Start writing blocks to slots. Returns for each its file, its offset, and the record's sequence number."""
        with self.lock:
            first = self._sequence
            self._sequence += len(keys)
            self.coming.update(zip(places, keys, strict=True))
            return [(self._files[segment_of(p)], self.segments.offset(p), first + i) for i, p in enumerate(places)]

    def name(self, place: int, page: Span, sequence: int, record: bytes, before: Span | None = None) -> None:
        """Write a record's header, after its payload. If that succeeds, the slot holds the record.

        ``record`` then goes into the journal with the next ``note``. ``before`` is the payload of the preceding slot,
        which ends where this header begins. Waits while headers are erased: a slot may be reused by then.
        """
        number = segment_of(place)
        with self.lock:
            if self._erasing:
                self._headers.wait_for(lambda: not self._erasing)
            self._naming += 1
            self._sequences[number][slot_of(place)] = sequence
            # The header names the previous block or the new one: until the write ends, it is unknown how far it got.
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
                    self._in_vain = 0
                    del self._stale[place], self.coming[place]
                    self._dirty.add(number)
                    self._unnoted.append(record)

    def failed(self, place: int, e: Exception | None = None) -> None:
        """The record could not be written. ``e`` is the reason, if the slot caused the failure or may have."""
        number, slot = segment_of(place), slot_of(place)
        with self.lock:
            self.coming.pop(place, None)
            if not isinstance(e, (OSError, Rejected)):
                self.segments.release(place)
                return
            slots = [slot]
            if self._untouched(place):
                if isinstance(e, OSError) and e.errno in _SPACE:
                    # A sparse file: the slots beside it cannot be written either.
                    slots += [s for s in self.segments[number].free if self._untouched(place_of(number, s))]
            else:
                self._in_vain += 1
            for one in slots:
                self.segments.withhold(place_of(number, one))
            self._withheld += len(slots)
            self._write_again = self._clock.monotonic() + _RETRY

    def _untouched(self, place: int) -> bool:
        """Whether nothing was written to a slot since its segment was divided into slots. Under the lock."""
        return not self._sequences[segment_of(place)][slot_of(place)] and place not in self._stale

    def free(self, key: BlockKey, place: int) -> None:
        """Free a slot whose header names ``key``."""
        with self.lock:
            self._free(key, place)

    def read(self, fd: int, into: Sequence[Span], offset: int) -> int:
        return self._disk.read(fd, into, offset)

    def write(self, fd: int, data: Sequence[Span], offset: int) -> None:
        # A few concurrent writes saturate the disk; more would slow down reads.
        self._turns.get()
        try:
            self._write(fd, data, offset)
        finally:
            self._turns.put(None)

    def _write(self, fd: int, data: Sequence[Span], offset: int) -> None:
        """Also used for single pages, which need not wait for their turn."""
        self._disk.write_all(fd, data, offset, self._direct)

    def take(self, size: int, owners: Sequence[int], make_room: MakeRoom | None) -> Iterator[int]:
        """Yield slots of ``size``, by growing or, with ``make_room``, by evicting if need be; fewer if there is no
        space."""
        left = np.array(owners, np.int64)
        if not self.segments.possible(size):
            return  # no eviction would make enough space for it
        for _ in range(1000 * len(owners)):
            with self._headers:
                self._headers.wait_for(lambda: not self._erasing)
                if self._withheld and self._clock.monotonic() >= self._write_again:
                    self.segments.restore()
                    self._withheld = 0
                places = self.segments.take_many(size, len(left), left)
                self.coming.update(dict.fromkeys(places, ANY))
            if self._unseen and len(fit := self._look_at(places)) < len(places):
                places = fit
                with self.lock:  # the slots are assigned to other blocks than when they were taken
                    self.segments.own(np.array(places, np.int64), left[: len(places)])
            yield from places
            left = left[len(places) :]
            if not len(left):
                return
            if not (self._grow(size) or self._give_up_old() or self._evict(size, left, make_room)):
                return

    def _evict(self, size: int, owners: npt.NDArray[np.int64], make_room: MakeRoom | None) -> bool:
        """Evict to make space for slots of ``size``, unless writes to them are likely to fail."""
        if make_room is None:
            return False
        if self._in_vain >= _ATTEMPTS and self._clock.monotonic() < self._write_again:
            return False
        return make_room(size, min(len(owners), _AT_ONCE), int(owners[0]))

    def _grow(self, size: int) -> bool:
        """Add a segment for slots of ``size``, or re-divide an empty one; False if neither is possible."""
        with self._grow_lock:
            if self._refusing and (not self.segments.used or self._clock.monotonic() >= self._ask_again):
                with self.lock:
                    self.segments.aside, self.segments.frozen = 0, False
            while True:
                with self.lock:
                    if self.segments.free(size):
                        return True
                    slots = self.segments.fit(size)
                    spare = None if slots else self.segments.spare(size)
                    if not slots and (spare is None or self.segments.frozen):
                        return False
                    if spare is not None:
                        self.segments.drain(spare)
                try:
                    if spare is not None:
                        if self._holds_newer(spare):
                            continue  # it is not empty after all
                        slots = self._reuse(spare, size)
                    if slots:
                        self._cut(size, slots, None if spare is None else spare.number)
                        return True
                except (OSError, Rejected) as e:
                    # Without a spare, the disk had no space for more. With one, the emptied segment could not be
                    # reused.
                    frozen = spare is not None or not (isinstance(e, OSError) and e.errno in _SPACE)
                    self._refuse(e, frozen)

    def _reuse(self, spare: Segment, size: int) -> int:
        """Remove an empty segment; returns how many slots of ``size`` fit into the space that is free then."""
        self._give_up(spare)
        with self.lock:
            slots = self.segments.fit(size)
        if not slots:
            # Too small for one slot: its bytes are added to those that the next empty segment frees.
            self._disk.resize(self._files[spare.number], 0)
        return slots

    def _cut(self, size: int, slots: int, number: int | None) -> None:
        """Add a segment of ``slots``, or fewer if the disk has no space for these. Raises if it has none at all.

        ``number`` is that of an existing file whose bytes may be reused.
        """
        refusal: OSError | None = None
        there = 0 if number is None or number not in self._files else os.fstat(self._files[number]).st_size
        while True:
            with self.lock:
                segment = self.segments.add(size, slots, number)
                self.segments.drain(segment)
                self._cuts[segment.number] = self._sequence
                self._sequence += 1
            try:
                self.note()  # the journal's share of the budget depends on the number of slots
                self._make(segment)
                break
            except (OSError, Rejected) as e:
                # If removing it fails too, it stays in the table, empty: a spare for the next request.
                self._give_up(segment)
                number = segment.number
                inside = (there - self.segments.header) // size
                slots = inside if 0 < inside < slots else slots // 2
                if not slots or not isinstance(e, OSError) or e.errno not in _SPACE:
                    if number in self._files:
                        with contextlib.suppress(OSError):
                            self._disk.resize(self._files[number], 0)
                    raise
                refusal = e
        with self.lock:
            segment.draining = False
            self.segments.settle(segment)
            again = self._refusing and not self.segments.aside and refusal is None
            if again:
                self._refusing, self.refused, self.segments.frozen = False, 0, False
        if refusal is not None:
            self._refuse(refusal, frozen=False)
        if again:
            log.warning("%s takes segments again", self._directory.path)

    def _refuse(self, e: OSError | Rejected, frozen: bool) -> None:
        """The disk refuses more: continue as if the budget ended here. ``frozen``: existing segments cannot be
        re-divided either."""
        reason, self.refused = (str(e), 0) if isinstance(e, Rejected) else (e.strerror or str(e), e.errno or 0)
        with self.lock:
            self.segments.aside = self.segments.budget - self.segments.taken
            self.segments.frozen = frozen
            self.reasons[f"segment: {reason}"] += 1
            said, self._refusing = self._refusing, True
            self._ask_again = self._clock.monotonic() + _RETRY
        if not said:
            log.warning(
                "%s cannot take a segment: %s. It continues with %d bytes of its budget of %d",
                self._directory.path,
                reason,
                self.taken,
                self.budget,
            )

    def _make(self, segment: Segment) -> None:
        """Create the file of a new segment, at its full size, with a header that survives a power loss."""
        fd = self._files.get(segment.number)
        if fd is None:
            path = self._directory.segment(segment.number)
            # a file of that name that is not in the table was not made by this tier; it may be a link
            self._disk.unlink(path)
            fd = self._disk.open(path, direct=self._direct, create=True)
            self._files[segment.number] = fd
            self._nameless.add(segment.number)
        self._sequences[segment.number] = np.zeros(segment.slots, np.int64)
        if segment.nbytes > os.fstat(fd).st_size:
            # The journal grows later. If the disk were full by then, the journal would be lost, so reserve its space
            # now.
            self._disk.resize(fd, segment.nbytes + self._journal_room())
        self._disk.resize(fd, segment.nbytes)
        page = Scratch().get(ALIGN)
        page[:] = SegmentHeader(segment.size, segment.slots, self._cuts[segment.number]).pack()
        self._write(fd, [page], 0)
        self._disk.sync(fd)
        if segment.number in self._nameless:
            self._disk.sync_folder(self._directory.path)
            self._nameless.discard(segment.number)

    def _journal_room(self) -> int:
        """Bytes by which the journal may still grow, including its successor during compaction."""
        with self.lock:
            most = RESERVE + self.segments.slots * PER_SLOT
        return max(0, most - self._journal.size) // ALIGN * ALIGN

    def _give_up(self, segment: Segment) -> None:
        """Remove an empty segment from the table, once the medium has no header of it any more.

        Its bytes are then used for something else. If a power loss could restore the segment, there would be more
        segments than the budget allows, and recovery might discard one whose blocks were acknowledged.
        """
        fd = self._files.get(segment.number)
        if fd is not None and os.fstat(fd).st_size:
            self._write(fd, [_BLANK], 0)
            self._disk.sync(fd)
        for start in range(0, segment.slots, _LOOKED):  # it is empty and draining, so no slot is added to them
            with self.lock:
                for slot in range(start, min(start + _LOOKED, segment.slots)):
                    self._stale.pop(place_of(segment.number, slot), None)
        with self.lock:
            self.segments.remove(segment)
            self._unseen.pop(segment.number, None)

    # -- erasing ------------------------------------------------------------------------------------------

    def drop(self, items: Sequence[tuple[BlockKey, int]]) -> list[bool]:
        """Erase blocks, so that they do not come back; False for those that may."""
        with self.erasing():
            failed = self._overwrite(items)
            self.note()
        return [key not in failed for key, _ in items]

    def renew(self, items: Sequence[Renewal]) -> list[bool]:
        """Change the expiry in the headers of blocks; False where that cannot be done.

        An encrypted header cannot be changed: it would have to be encrypted again, with a key that its sections use
        too.
        """
        failed: set[BlockKey] = set()
        with self.erasing():
            for key, place, when in items:
                if place == NOWHERE:
                    continue
                try:
                    self._renew(key, place, when)
                except (OSError, Rejected) as e:
                    log.debug("the expiry of a record stays as it is: %s", e)
                    failed.add(key)
            # Erase other headers that name these blocks, from before they were evicted; this also syncs everything.
            failed |= self._overwrite([(key, NOWHERE) for key, _, _ in items])
            self.note()
        return [key not in failed for key, _, _ in items]

    def _renew(self, key: BlockKey, place: int, when: float) -> None:
        with self.lock:
            if not self.segments.holds(place):
                raise Rejected(Reason.EVICTED)
            fd, offset, room, sequence = self._location(place)
        pages = Scratch().get(ALIGN)
        if self.read(fd, [pages], offset) < ALIGN:
            raise Rejected(Reason.TORN)
        if (size := recognise(pages)) > ALIGN:
            if size > room:
                raise Rejected(Reason.CORRUPT_HEADER)
            pages = Scratch().get(size)
            if self.read(fd, [pages], offset) < size:
                raise Rejected(Reason.TORN)
        header = parse(pages)
        if header.key != key or header.sequence != sequence:
            raise Rejected(Reason.ANOTHER_BLOCK)
        expire_at(pages, when)
        with self.lock:
            self._dirty.add(segment_of(place))
        self._write(fd, [pages], offset)
        with self.lock:
            if self.segments.holds(place):  # else it was evicted meanwhile, and the journal must not say otherwise
                facts = header.parent, header.depth, when, header.priority, header.identity
                self._unnoted.append(entry(HOLDS, place, key, sequence, *facts))

    def note_held(self, held: Held) -> None:
        """Record in the journal the expiry of blocks that live longer than their headers say."""
        with self.lock:
            for i, (key, place) in enumerate(zip(held.keys, held.places.tolist(), strict=True)):
                if self.segments.holds(place):
                    sequence = int(self._sequences[segment_of(place)][slot_of(place)])
                    lives = float(held.expiries[i]), int(held.priorities[i]), int(held.identities[i])
                    facts = held.parents[i].tobytes(), int(held.depths[i]), *lives
                    self._unnoted.append(entry(HOLDS, place, key, sequence, *facts))

    @contextlib.contextmanager
    def erasing(self) -> Iterator[None]:
        """While this is held no header is written, no slot allocated and no segment added, so what headers name is
        stable."""
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
        """Overwrite all headers that name dropped blocks, and free the slots. Returns the blocks that may come back."""
        keys = {key for key, _ in items}
        wanted = keys | {ANY}
        with self.lock:
            traces = [(names, names.copy()) for names in (self._stale, self.coming)]
        # There may be many, so they are searched without the lock. Blocks that the index has removed do not become
        # stale after this, and no header is being written.
        traced = [(names, k, p) for names, copied in traces for p, k in copied.items() if k in wanted]
        with self.lock:
            named = [(k, p) for names, k, p in traced if names.get(p) == k]
            live = [(k, p) for k, p in dict.fromkeys(items) if self.segments.holds(p) and p not in self._kept]
            if self._kept:
                live += self._kept_of(keys, {p for _, p in items})
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

    def _kept_of(self, keys: set[BlockKey], unless: set[int]) -> list[tuple[BlockKey, int]]:
        """Returns dropped blocks, and their slots, among the kept ones; under the lock.

        Slots in ``unless`` are excluded: their record merely could not be read, and then the pipeline drops it, not a
        user.
        """
        asked = [(key, p) for p, (key, _) in self._kept.items() if key in keys and p not in unless]
        for _, place in asked:
            del self._kept[place]
        return asked

    def _sync_all(self, numbers: set[int]) -> set[int]:
        """Sync segments; returns those that failed."""
        failed = set()
        for number in numbers:
            try:
                self._disk.sync(self._files[number])
            except OSError as e:
                failed.add(number)
                log.warning("could not sync segment %d: %s", number, e)
                with self.lock:
                    self._unsynced[number] = self._sequence
                    self.reasons[f"sync: {e.strerror}"] += 1
        return failed

    def _free(self, key: BlockKey, place: int) -> None:
        """Free a slot whose header names ``key``. Under the lock."""
        if place in self._kept:
            return
        self.segments.release(place)
        self._stale[place] = key
        self._unnoted.append(entry(FREED, place, key, int(self._sequences[segment_of(place)][slot_of(place)])))

    def note(self, record: bytes = b"") -> None:
        """Append to the journal which slots were freed and written and, after that, ``record``."""
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

    def make_durable(self, places: Sequence[int]) -> list[bool]:
        """Sync the records in slots; False for those that are not there, or may not be on the medium.

        A kernel that could not write a page reports it once and then forgets it, so that the next sync succeeds: what
        was written before a failed sync may be lost whatever later syncs report.
        """
        with self.lock:
            before = [self._written(place) for place in places]
        failed = self._sync_all({segment_of(p) for p, sequence in zip(places, before, strict=True) if sequence})
        with self.lock:
            return [
                sequence > 0
                and sequence == self._written(p)  # else the slot has another record by now, which was not synced
                and segment_of(p) not in failed
                and sequence >= self._unsynced.get(segment_of(p), 0)
                for p, sequence in zip(places, before, strict=True)
            ]

    def _written(self, place: int) -> int:
        """The sequence number of the record in a slot; 0 if it holds none. Under the lock."""
        return int(self._sequences[segment_of(place)][slot_of(place)]) if self.segments.holds(place) else 0

    def sync(self, keys: Sequence[BlockKey], places: list[int]) -> None:
        """Make a batch durable; blocks for which that fails are removed again."""
        failed = self._sync_all({segment_of(p) for p in places if p != NOWHERE})
        with self.lock:
            for i, place in enumerate(places):
                if place != NOWHERE and segment_of(place) in failed:
                    self._free(keys[i], place)
                    places[i] = NOWHERE
