"""Blocks on a local disk: preallocated segment files, direct I/O, a record in each slot.

The way of a write, on one of the tier's own threads: make the checksums (and compress), take a slot of the right size,
evicting if need be, then in this order: journal "slot freed" (for what was evicted) and "slot is being written",
payload, header, journal "slot holds key". A crash at any point leaves either a whole record, or one whose header or
checksums do not agree, which is a miss. No fsync is needed for that; ``durable`` adds one before a write is
acknowledged.

Only ``drop`` always syncs, because a dropped block must not come back. It overwrites every header that may still name
the block (``_stale``, ``_coming``), and makes sure of those that were overwritten by other blocks before: until a
segment is synced (``_dirty``), a power loss may undo that.

The way of a read: header and payload in one system call, the payload straight into the caller's span, then key,
sequence, namespace, layout and every section's checksum are checked.

Locks: ``_lock`` guards the book of segments and is held for microseconds, never during I/O, because callers of
``evict`` hold the index's lock. ``_journal_lock`` guards the journal and ``_grow_lock`` the cutting of segments; these
are taken by the tier's own threads alone. Order: ``_grow_lock``, ``_journal_lock``, ``_lock``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtide.block import ALIGN, BlockKey, Span, padded
from kvtide.clock import Clock, SystemClock
from kvtide.errors import ConfigError, TierError, TierVersionError
from kvtide.tiers import codec
from kvtide.tiers.base import NOWHERE, Held, Read, ReadDone, TierStatistics, Write, WriteDone
from kvtide.tiers.directory import FORMAT, Directory, SegmentHeader
from kvtide.tiers.disk import Disk
from kvtide.tiers.journal import (
    FREED,
    HOLDS,
    PER_SLOT,
    RECORD,
    RESERVE,
    WRITING,
    Journal,
    entry,
    latest,
    replay,
)
from kvtide.tiers.record import Header, Rejected, check_table, header_bytes, parse, recognise, verify
from kvtide.tiers.segments import Segment, Segments, by_segment, ladder, place_of, segment_of, slot_of

__all__ = ["Nvme"]

log = logging.getLogger("kvtide.nvme")

_WIPED = bytes(ALIGN)
_ANY = BlockKey(b"")
"""What a header that could not be read may name: every drop overwrites it."""


def _reason(verb: str, e: Rejected | OSError | MemoryError) -> str:
    if isinstance(e, Rejected):
        return str(e)
    return f"{verb}: {e.strerror if isinstance(e, OSError) else 'out of memory'}"


def _unread(reason: str) -> bool:
    """Whether a header may be whole, though it could not be read this time."""
    return reason == "torn" or reason.startswith("unreadable")


class _Worker:
    """What one I/O thread has for itself."""

    __slots__ = ("_decoder", "codec", "header", "payload")

    def __init__(self, name: str) -> None:
        self.header = codec.Scratch()
        self.payload = codec.Scratch()
        self.codec = codec.make(name)
        self._decoder = self.codec

    @property
    def decoder(self) -> codec.Codec:
        """What reads compressed records, where raw ones are written too."""
        if self._decoder is None:
            try:
                self._decoder = codec.make("zstd")
            except ConfigError as e:
                raise Rejected("its codec is not installed") from e
            assert self._decoder is not None
        return self._decoder


class _Batch:
    """Counts the items of a batch down; ``finish`` runs on the thread that ends the last one."""

    __slots__ = ("_left", "_lock", "finish", "results")

    def __init__(self, results: list[int], finish: Callable[[list[int]], None]) -> None:
        self.results = results
        self.finish = finish
        self._left = len(results)
        self._lock = threading.Lock()

    def end(self, item: int, result: int) -> None:
        self.results[item] = result
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self.finish(self.results)


class Nvme:
    """A directory of blocks. Opening it takes it for this process alone.

    ``threads`` blocks are in flight to and from the disk at a time; twice as many threads see to it that the disk need
    not wait while checksums are made or checked.

    ``evict`` is asked, with a slot size, to make room when the tier is full: it calls ``Nvme.evict`` for at least one
    block and answers True, or answers False. Without it a full tier refuses.
    """

    def __init__(
        self,
        path: Path,
        budget: int,
        *,
        segment: int = 256 << 20,
        threads: int = 4,
        direct: bool = True,
        durable: bool = False,
        compression: str = "raw",
        evict: Callable[[int], bool] | None = None,
        disk: Disk | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._disk = disk or Disk()
        self._clock = clock or SystemClock()
        self._durable = durable
        self.make_room = evict
        if budget < 4 * RESERVE:
            raise ConfigError(f"an NVMe budget of {budget} bytes is too small; give {4 * RESERVE} or more")
        workers = [_Worker(compression) for _ in range(2 * threads)]
        self._in_flight = threading.Semaphore(threads)
        self._directory = Directory(path, self._disk)
        self._directory.create()
        self._directory.lock()
        self._files: dict[int, int] = {}
        self._sequences: dict[int, npt.NDArray[np.int64]] = {}
        self._cuts: dict[int, int] = {}
        """At which sequence number each segment was cut."""
        self._stale: dict[int, BlockKey] = {}
        """Slots that hold nothing but whose header still names a block: where, and which."""
        self._coming: dict[int, BlockKey] = {}
        """Slots that are being written, or whose writing failed: which block the header may name by now."""
        self._dirty: set[int] = set()
        """Segments that were written to since they were last synced."""
        self._freed: list[bytes] = []
        """Journal records of evictions that are not written yet."""
        self._lock = threading.Lock()
        self._grow_lock = threading.Lock()
        self._journal_lock = threading.Lock()
        self._segments = Segments(budget - RESERVE, segment, header=ALIGN, per_slot=PER_SLOT)
        self._budget = budget
        self._read = self._written = self._failed_reads = self._failed_writes = 0
        self._reasons: Counter[str] = Counter()
        try:
            self._direct = direct and self._directory.direct_works()
            if direct and not self._direct:
                log.warning("%s has no direct I/O: the page cache is used, at more CPU", path)
            self._sequence = 1
            self._journal = Journal(self._directory.journal, self._disk, self._disk.boot_id())
            self._held = self._open()
        except OSError as e:
            self._let_go()
            raise TierError(f"cannot open {path}: {e.strerror or e}. Mend that, or give another directory") from e
        except BaseException:
            self._let_go()
            raise
        self._queue: queue.SimpleQueue[Callable[[_Worker], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(w,), name=f"kvtide-nvme-{i}", daemon=True)
            for i, w in enumerate(workers)
        ]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        return f"<Nvme {self._directory.path}: {self._segments.used} of {self._budget} bytes>"

    # -- the contract -------------------------------------------------------------------------------------

    def read(self, batch: Sequence[Read], done: ReadDone) -> None:
        if not batch:
            done([])
        ends = _Batch([0] * len(batch), lambda results: done([bool(r) for r in results]))
        for i, item in enumerate(batch):
            self._queue.put(lambda w, i=i, item=item: ends.end(i, self._read_one(item, w)))  # type: ignore[misc]

    def write(self, batch: Sequence[Write], done: WriteDone) -> None:
        def finish(places: list[int]) -> None:
            if self._durable:
                self._sync(batch, places)
            done(places)

        if not batch:
            done([])
        ends = _Batch([NOWHERE] * len(batch), finish)
        for i, item in enumerate(batch):
            self._queue.put(lambda w, i=i, item=item: ends.end(i, self._write_one(item, w)))  # type: ignore[misc]

    def drop(self, items: Sequence[tuple[BlockKey, int]], done: ReadDone) -> None:
        self._queue.put(lambda _: done(self._drop(items)))

    def evict(self, key: BlockKey, place: int) -> None:
        with self._lock:
            self._free(key, place)

    def scan(self) -> Iterator[Held]:
        held, self._held = self._held, None
        if held is not None:
            yield held

    def own(self, places: npt.NDArray[np.int64], owners: npt.NDArray[np.int64]) -> None:
        with self._lock:
            self._segments.own(places, owners)

    def statistics(self) -> TierStatistics:
        with self._lock:
            return TierStatistics(
                blocks=sum(s.slots - len(s.free) for s in self._segments),
                bytes_used=self._segments.used,
                bytes_taken=self._segments.taken + RESERVE,
                budget=self._budget,
                bytes_read=self._read,
                bytes_written=self._written,
                failed_reads=self._failed_reads,
                failed_writes=self._failed_writes,
                reasons=tuple(sorted(self._reasons.items())),
            )

    def close(self) -> None:
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._note()
        with self._lock:
            dirty, self._dirty = self._dirty, set()
        with self._journal_lock:
            self._journal.close(synced=not self._sync_all(dirty))
        self._let_go()

    # -- for the evictor ----------------------------------------------------------------------------------

    @property
    def segments(self) -> Segments:
        """The book. Read it under ``book_lock``."""
        return self._segments

    @property
    def book_lock(self) -> threading.Lock:
        return self._lock

    # -- opening ------------------------------------------------------------------------------------------

    def _open(self) -> Held | None:
        numbers = list(self._directory.segments())
        # First look at all of them: if one is newer, nothing may be touched.
        headers = {number: self._look(number) for number in numbers}
        for number, header in headers.items():
            self._open_segment(number, header)
        # What a predecessor wrote may not be on the medium yet.
        self._dirty = set(self._files)
        records, doubt = replay(self._directory.journal, self._journal.boot)
        if doubt:
            if numbers:
                log.warning("%s: the journal is %s; reading headers", self._directory.path, doubt)
            records = self._from_headers()
        else:
            records = self._finish_writing(latest(records))
        return self._adopt(records)

    def _look(self, number: int) -> SegmentHeader | str:
        """Open a segment file; answers how it is cut, or why that cannot be said."""
        path = self._directory.segment(number)
        fd = self._files[number] = self._disk.open(path, direct=self._direct)
        if not os.fstat(fd).st_size:
            return ""  # emptied, and not needed since
        try:
            return self._directory.segment_header(fd)
        except OSError as e:
            return e.strerror or str(e)
        except Rejected as e:
            kind, _, version = str(e).partition(" ")
            if kind == "version" and int(version) > FORMAT:
                raise TierVersionError(
                    f"{path} has format {version}, newer than this kvtide's {FORMAT}; nothing was touched. "
                    "Upgrade kvtide, or give another directory"
                ) from None
            return str(e)

    def _open_segment(self, number: int, header: SegmentHeader | str) -> None:
        """Take a segment into the book, or its bytes back."""
        path, fd = self._directory.segment(number), self._files[number]
        problem = header
        if isinstance(header, SegmentHeader):
            problem = ""
            if header.nbytes + header.slots * PER_SLOT > self._segments.budget - self._segments.taken:
                problem = "over budget"
            elif os.fstat(fd).st_size != header.nbytes:
                try:
                    self._disk.resize(fd, header.nbytes)
                except OSError as e:
                    problem = e.strerror or str(e)
            if not problem:
                self._sequences[number] = np.zeros(header.slots, np.int64)
                self._segments.add(header.size, header.slots, number)
                self._sequence = max(self._sequence, header.cut + 1)
                self._cuts[number] = header.cut
                return
        if problem:
            log.warning("%s: %s; its blocks are lost and its bytes reclaimed", path, problem)
            self._reasons[f"segment: {problem}"] += 1
        self._disk.close(self._files.pop(number))
        self._disk.unlink(path)

    def _from_headers(self) -> npt.NDArray[np.void]:
        """Journal records made from what the slots' headers say."""
        parts: list[bytes] = []
        for segment in self._segments:
            for slot, found in self._records(segment):
                if isinstance(found, str):
                    self._reasons[found] += 1
                    if _unread(found):
                        parts.append(entry(FREED, place_of(segment.number, slot), _ANY, self._cuts[segment.number]))
                    continue
                parts.append(
                    entry(
                        HOLDS,
                        place_of(segment.number, slot),
                        found.key,
                        found.sequence,
                        found.parent,
                        found.depth,
                        found.expiry,
                        found.priority,
                    )
                )
        return np.frombuffer(b"".join(parts), RECORD)

    def _records(self, segment: Segment, slots: range | None = None) -> Iterator[tuple[int, Header | str]]:
        header = SegmentHeader(segment.size, segment.slots, self._cuts[segment.number])
        return self._directory.records(self._files[segment.number], header, slots)

    def _finish_writing(self, records: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        """Slots whose writer was killed, or failed, hold nothing; but which block do their headers name?"""
        records = records[self._current(records)]
        for i in np.flatnonzero(records["kind"] == WRITING).tolist():
            place = int(records["place"][i])
            slot = slot_of(place)
            records["kind"][i] = FREED
            for _, found in self._records(self._segments[segment_of(place)], range(slot, slot + 1)):
                if isinstance(found, Header):
                    records["key"][i] = found.key
                elif _unread(found):
                    records["key"][i] = _ANY
        return records

    def _current(self, records: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        """Which records speak of slots as they are cut now."""
        with self._lock:
            count = max((s.number for s in self._segments), default=-1) + 1
            slots, cuts = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
            for s in self._segments:
                slots[s.number], cuts[s.number] = s.slots, self._cuts[s.number]
        places = records["place"].astype(np.int64)
        numbers = np.where((places >= 0) & (places >> 32 < count), places >> 32, count)
        current: npt.NDArray[np.bool_] = places & 0xFFFFFFFF < slots[numbers]
        return current & (records["sequence"] >= cuts[numbers])

    def _adopt(self, records: npt.NDArray[np.void]) -> Held:
        """Take the records for true, as far as they fit the segments that are there."""
        records = records[self._current(records)]
        places = records["place"].astype(np.int64)
        self._sequence = max(self._sequence, int(records["sequence"].max(initial=0)) + 1)
        keys: list[BlockKey] = np.ascontiguousarray(records["key"]).view("S48").tolist()
        live = records["kind"] == HOLDS
        if np.count_nonzero(live) != len(set(keys)):
            newest: dict[BlockKey, int] = {}
            for i in np.argsort(records["sequence"]).tolist():
                if live[i]:
                    if keys[i] in newest:
                        live[newest[keys[i]]] = False
                    newest[keys[i]] = i
        self._stale = {int(places[i]): keys[i] for i in np.flatnonzero(~live).tolist()}
        stale = records[~live]
        stale["kind"] = FREED
        records, places = records[live], places[live]
        if not live.all():
            keys = np.ascontiguousarray(records["key"]).view("S48").tolist()
        for number, mine in by_segment(places):
            taken = places[mine] & 0xFFFFFFFF
            self._sequences[number][taken] = records["sequence"][mine]
            self._segments.claim(self._segments[number], taken)
        self._journal.rewrite(np.concatenate([records, stale]))
        return Held(
            keys=keys,
            parents=np.ascontiguousarray(records["parent"]),
            places=places,
            depths=records["depth"].astype(np.int64),
            expiries=records["expiry"].astype(np.float64),
            priorities=records["priority"].astype(np.int8),
            sequences=records["sequence"].astype(np.int64),
        )

    def _let_go(self) -> None:
        for fd in self._files.values():
            self._disk.close(fd)
        self._files.clear()
        self._directory.unlock()

    # -- the I/O threads ----------------------------------------------------------------------------------

    def _work(self, worker: _Worker) -> None:
        while (task := self._queue.get()) is not None:
            task(worker)
            del task  # else the spans of the last one live on until the next comes

    def _read_one(self, item: Read, worker: _Worker) -> int:
        try:
            nbytes = self._fill(item, worker)
        except (Rejected, OSError, MemoryError) as e:
            with self._lock:
                self._failed_reads += 1
                self._reasons[_reason("read", e)] += 1
            return 0
        with self._lock:
            self._read += nbytes
        return 1

    def _fill(self, item: Read, worker: _Worker) -> int:
        geometry, sections = item.identity.geometry, item.wanted
        if not sections:
            raise Rejected("no such sections")
        with self._lock:
            if not self._segments.holds(item.place):
                raise Rejected("evicted")
            number = segment_of(item.place)
            fd, offset = self._files[number], self._segments.offset(item.place)
            room = self._segments[number].size
            sequence = int(self._sequences[number][slot_of(item.place)])
        guess = header_bytes(geometry.sections)
        start = worker.header.get(guess)
        whole = item.sections is None
        span = item.span[: max(0, room - guess)] if whole else item.span[:0]
        got = self._get(fd, [start, span], offset)
        size = recognise(start[:got])
        if size > room:
            raise Rejected("corrupt header")
        if size != guess:
            start = worker.header.get(size)
            got = self._get(fd, [start, item.span[: max(0, room - size)] if whole else span], offset)
        header = parse(start[:got])
        self._check(header, item, sequence)
        check_table(header, size, geometry.stride, room)
        if header.codec == codec.RAW:
            payload = item.span
            nbytes = len(sections) * geometry.stride
        else:
            table = header.sections[sections.start : sections.stop]
            nbytes = int(table["offset"][-1]) + padded(int(table["stored"][-1])) - int(table["offset"][0])
            payload = worker.payload.get(nbytes)
        if whole and header.codec == codec.RAW:
            if got < size + nbytes:
                raise Rejected("torn")
        else:
            first = int(header.sections["offset"][sections.start])
            if self._get(fd, [payload[:nbytes]], offset + first) < nbytes:
                raise Rejected("torn")
        verify(header, sections, payload)
        if header.codec != codec.RAW:
            codec.decode(header, sections, payload, item.span, geometry, item.identity.itemsize, worker.decoder)
        return nbytes

    @staticmethod
    def _check(header: Header, item: Read, sequence: int) -> None:
        identity, geometry = item.identity, item.identity.geometry
        if header.key != item.key or header.sequence != sequence:
            raise Rejected("another block")
        if (header.namespace, header.tenant, header.layout) != (
            identity.namespace,
            identity.tenant,
            identity.layout,
        ):
            raise Rejected("another model or tenant")
        if len(header.sections) != geometry.sections or (header.sections["raw"] != geometry.section).any():
            raise Rejected("another layout")

    def _write_one(self, item: Write, worker: _Worker) -> int:
        identity, geometry = item.identity, item.identity.geometry
        size = header_bytes(geometry.sections, len(item.tokens))
        place = NOWHERE
        try:
            payload, table, kind = codec.encode(
                item.span, geometry, identity.itemsize, size, worker.codec, worker.payload
            )
            found = self._take(ladder(size + len(payload)), item.owner)
            if found is None:
                raise Rejected("full")
            place = found
            with self._lock:
                fd, offset = self._files[segment_of(place)], self._segments.offset(place)
                sequence = self._sequence
                self._sequence += 1
                self._coming[place] = item.key
            header = Header(
                item.key,
                item.parent,
                identity.namespace,
                identity.tenant,
                identity.layout,
                sequence,
                item.depth,
                identity.block_tokens,
                kind,
                geometry.nbytes,
                table,
                self._clock.time(),
                item.expiry,
                item.priority,
                item.tokens,
            )
            page = worker.header.get(size)
            header.pack_into(page)
            self._note(entry(WRITING, place, item.key, sequence))
            self._put(fd, payload, offset + size)
            with self._lock:
                self._sequences[segment_of(place)][slot_of(place)] = sequence
            self._put(fd, page, offset)
        except (Rejected, OSError, MemoryError) as e:
            with self._lock:
                if place != NOWHERE:
                    # Its header names what it named before, or this block: both stay known.
                    self._segments.release(place)
                self._failed_writes += 1
                self._reasons[_reason("write", e)] += 1
            return NOWHERE
        with self._lock:
            self._stale.pop(place, None)
            self._coming.pop(place, None)
            self._dirty.add(segment_of(place))
            self._written += size + len(payload)
        self._note(entry(HOLDS, place, item.key, sequence, item.parent, item.depth, item.expiry, item.priority))
        return place

    def _get(self, fd: int, into: Sequence[Span], offset: int) -> int:
        with self._in_flight:
            return self._disk.read(fd, into, offset)

    def _put(self, fd: int, data: Span, offset: int) -> None:
        while data:
            with self._in_flight:
                count = self._disk.write(fd, [data], offset)
            if count <= 0 or (count % ALIGN and self._direct):
                raise Rejected("short write")
            data, offset = data[count:], offset + count

    def _take(self, size: int, owner: int) -> int | None:
        """A slot, by growing or evicting if need be."""
        for _ in range(1000):
            with self._lock:
                place = self._segments.take(size, owner)
            if place is not None:
                return place
            if not self._grow(size) and not (self.make_room and self.make_room(size)):
                return None
        return None

    def _grow(self, size: int) -> bool:
        """Add a segment for slots of ``size``, or recut an empty one; False if there is neither room nor such."""
        with self._grow_lock:
            number = None
            with self._lock:
                if self._segments.free(size):
                    return True
                if not self._segments.fit(size):
                    spare = self._segments.spare(size)
                    if spare is None:
                        return False
                    number = spare.number
                    self._forget(spare)
                slots = self._segments.fit(size)
                segment = self._segments.add(size, slots, number) if slots else None
                if segment is not None:
                    self._segments.drain(segment)
                cut = self._sequence
                self._sequence += 1
                if segment is not None:
                    self._cuts[segment.number] = cut
            self._trim_journal()
            try:
                if segment is None:
                    # Too small for one slot: its bytes join those that the next empty segment will free.
                    assert number is not None
                    self._disk.resize(self._files[number], 0)
                    return True
                self._make(segment, cut)
            except OSError as e:
                return self._not_grown(segment, e)
            with self._lock:
                segment.draining = False
                self._segments.settle(segment)
            return True

    def _not_grown(self, segment: Segment | None, e: OSError) -> bool:
        log.warning("%s cannot take a segment: %s", self._directory.path, e.strerror)
        with self._lock:
            self._reasons[f"segment: {e.strerror}"] += 1
            if segment is not None:
                self._forget(segment)
        if segment is not None and segment.number in self._files:
            with contextlib.suppress(OSError):
                self._disk.resize(self._files[segment.number], 0)
        return False

    def _make(self, segment: Segment, cut: int) -> None:
        """The file of a new segment, at its full size, with a header that survives a power loss."""
        fd = self._files.get(segment.number)
        fresh = fd is None
        if fd is None:
            fd = self._disk.open(self._directory.segment(segment.number), direct=self._direct, create=True)
            self._files[segment.number] = fd
        self._sequences[segment.number] = np.zeros(segment.slots, np.int64)
        self._disk.resize(fd, segment.nbytes)
        page = codec.Scratch().get(ALIGN)
        page[:] = SegmentHeader(segment.size, segment.slots, cut).pack()
        self._put(fd, page, 0)
        self._disk.sync(fd)
        if fresh:
            self._disk.sync_folder(self._directory.path)

    def _forget(self, segment: Segment) -> None:
        """Take an empty segment out of the book."""
        self._segments.remove(segment)
        for names in (self._stale, self._coming):
            for place in [p for p in names if segment_of(p) == segment.number]:
                del names[place]

    def _drop(self, items: Sequence[tuple[BlockKey, int]]) -> list[bool]:
        # While a segment is cut anew, it can be said neither what its headers name nor where they lie.
        with self._grow_lock:
            failed = self._overwrite(items)
            self._note()
        return [key not in failed for key, _ in items]

    def _overwrite(self, items: Sequence[tuple[BlockKey, int]]) -> set[BlockKey]:
        """Overwrite all headers that name dropped blocks, and free their slots; answers those that may come back."""
        keys = {key for key, _ in items}
        with self._lock:
            wanted = keys | {_ANY}
            named = [(k, p) for names in (self._stale, self._coming) for p, k in names.items() if k in wanted]
            live = [(k, p) for k, p in dict.fromkeys(items) if self._segments.holds(p)]
            generations = [self._segments.generation(p) for _, p in live]
            targets = [(k, p, self._files[segment_of(p)], self._segments.offset(p)) for k, p in named + live]
            dirty, self._dirty = self._dirty | {segment_of(p) for _, p in named + live}, set()
        failed: set[BlockKey] = set()
        page = codec.Scratch().get(ALIGN)
        page[:] = _WIPED
        for key, _, fd, offset in targets:
            try:
                self._put(fd, page, offset)
            except (OSError, Rejected) as e:
                failed.add(key)
                log.warning("could not overwrite a dropped block: %s", e)
        if (unsynced := self._sync_all(dirty)) or _ANY in failed:
            failed |= keys
        with self._lock:
            self._dirty |= unsynced
            for key, place in named:
                if key not in failed and self._stale.get(place) == key:
                    del self._stale[place]
            for (key, place), generation in zip(live, generations, strict=True):
                if self._segments.holds(place) and self._segments.generation(place) == generation:
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
        return failed

    def _free(self, key: BlockKey, place: int) -> None:
        """Give back a slot whose header names ``key``. Under the lock."""
        self._segments.release(place)
        self._stale[place] = key
        self._freed.append(entry(FREED, place, key, int(self._sequences[segment_of(place)][slot_of(place)])))

    def _note(self, record: bytes = b"") -> None:
        """Tell the journal which slots were freed and, after that, what ``record`` says."""
        with self._journal_lock:
            with self._lock:
                freed, self._freed = self._freed, []
                slots = self._segments.slots
            body = b"".join(freed) + record
            if body:
                if self._journal.full(slots, len(body)):
                    self._journal.compact(self._current)
                self._journal.append(body)

    def _trim_journal(self) -> None:
        """The journal's share of the budget goes by the number of slots: keep it when there are fewer."""
        with self._journal_lock:
            with self._lock:
                slots = self._segments.slots
            if self._journal.full(slots):
                self._journal.compact(self._current)

    def _sync(self, batch: Sequence[Write], places: list[int]) -> None:
        """Make a batch durable; what cannot be is taken back."""
        for number in {segment_of(p) for p in places if p != NOWHERE}:
            try:
                self._disk.sync(self._files[number])
            except OSError as e:
                log.warning("could not sync segment %d: %s", number, e)
                with self._lock:
                    self._reasons[f"sync: {e.strerror}"] += 1
                    for i, place in enumerate(places):
                        if place != NOWHERE and segment_of(place) == number:
                            self._free(batch[i].key, place)
                            places[i] = NOWHERE
