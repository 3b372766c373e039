"""Blocks on a local disk: preallocated segment files, direct I/O, a record in each slot.

The way of a write, on one of the tier's own threads: make the checksums (and compress), take a slot of the right size,
evicting if need be, then in this order: journal "slot freed" (for what was evicted), payload, header, journal "slot
holds key". A crash at any point leaves either a whole record, or one whose header or checksums do not agree, which is
a miss. No fsync is needed for that; ``durable`` adds one before a write is acknowledged. Only ``drop`` always
syncs, because a dropped block must not come back.

The way of a read: header and payload in one system call, the payload straight into the caller's span, then key,
sequence, namespace, layout and every section's checksum are checked.

Locks: ``_lock`` guards the book of segments and is held for microseconds, never during I/O, because callers of
``evict`` hold the index's lock. ``_journal_lock`` guards the journal and is taken by the tier's own threads alone.
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
from kvtide.errors import ConfigError, TierVersionError
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
    Journal,
    entry,
    latest,
    replay,
)
from kvtide.tiers.record import Header, Rejected, header_bytes, parse, recognise, verify
from kvtide.tiers.segments import Segment, Segments, ladder, place_of, segment_of, slot_of

__all__ = ["Nvme"]

log = logging.getLogger("kvtide.nvme")

_WIPED = bytes(ALIGN)


class _Worker:
    """What one I/O thread has for itself."""

    __slots__ = ("codec", "header", "payload")

    def __init__(self, name: str) -> None:
        self.header = codec.Scratch()
        self.payload = codec.Scratch()
        self.codec = codec.make(name)


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
        workers = [_Worker(compression) for _ in range(threads)]
        self._directory = Directory(path, self._disk)
        self._directory.create()
        self._directory.lock()
        self._files: dict[int, int] = {}
        self._sequences: dict[int, npt.NDArray[np.int64]] = {}
        self._cuts: dict[int, int] = {}
        """At which sequence number each segment that was found at opening had been cut."""
        self._stale: dict[int, BlockKey] = {}
        """Free slots whose header still names a block: where, and which."""
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
        ends = _Batch([0] * len(batch), lambda results: done([bool(r) for r in results]))
        for i, item in enumerate(batch):
            self._queue.put(lambda w, i=i, item=item: ends.end(i, self._read_one(item, w)))  # type: ignore[misc]

    def write(self, batch: Sequence[Write], done: WriteDone) -> None:
        def finish(places: list[int]) -> None:
            if self._durable:
                self._sync(batch, places)
            done(places)

        ends = _Batch([NOWHERE] * len(batch), finish)
        for i, item in enumerate(batch):
            self._queue.put(lambda w, i=i, item=item: ends.end(i, self._write_one(item, w)))  # type: ignore[misc]

    def drop(self, items: Sequence[tuple[BlockKey, int]], done: ReadDone) -> None:
        self._queue.put(lambda _: done(self._drop(items)))

    def evict(self, key: BlockKey, place: int) -> None:
        with self._lock:
            self._stale[place] = key
            self._freed.append(entry(FREED, place, key))
            self._segments.release(place)

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
        self._flush_freed()
        with self._journal_lock:
            self._journal.close()
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
        for number in numbers:
            self._open_segment(number)
        records, doubt = replay(self._directory.journal, self._journal._boot)
        if doubt:
            if numbers:
                log.warning("%s: the journal is %s; reading headers", self._directory.path, doubt)
            records = self._from_headers()
        else:
            records = latest(records)
        return self._adopt(records)

    def _open_segment(self, number: int) -> None:
        path = self._directory.segment(number)
        if not path.stat().st_size:  # emptied, and not needed since
            self._disk.unlink(path)
            return
        fd = self._disk.open(path, direct=self._direct)
        try:
            header = self._directory.segment_header(fd)
            room = self._segments.budget - self._segments.taken
            if header.nbytes + header.slots * PER_SLOT > room:
                raise Rejected("over budget")
            if os.fstat(fd).st_size != header.nbytes:
                self._disk.resize(fd, header.nbytes)
        except (Rejected, OSError) as e:
            self._disk.close(fd)
            if str(e).startswith("version") and int(str(e).split()[1]) > FORMAT:
                raise TierVersionError(
                    f"{path} has format {e}, newer than this kvtide's {FORMAT}. "
                    "Upgrade kvtide, or give another directory"
                ) from None
            log.warning("%s: %s; its blocks are lost and its bytes reclaimed", path, e)
            self._reasons[f"segment: {e}"] += 1
            self._disk.unlink(path)
            return
        self._files[number] = fd
        self._sequences[number] = np.zeros(header.slots, np.int64)
        self._segments.add(header.size, header.slots, number)
        self._sequence = max(self._sequence, header.cut + 1)
        self._cuts[number] = header.cut

    def _from_headers(self) -> npt.NDArray[np.void]:
        """Journal records made from what the slots' headers say."""
        parts: list[bytes] = []
        for segment in self._segments:
            header = SegmentHeader(segment.size, segment.slots, self._cuts[segment.number])
            for slot, found in self._directory.records(self._files[segment.number], header):
                if isinstance(found, str):
                    self._reasons[found] += 1
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

    def _adopt(self, records: npt.NDArray[np.void]) -> Held:
        """Take the records for true, as far as they fit the segments that are there."""
        places = records["place"].astype(np.int64)
        fits = np.zeros(len(records), np.bool_)
        numbers, slots = places >> 32, places & 0xFFFFFFFF
        for segment in self._segments:
            mine = (numbers == segment.number) & (slots < segment.slots)
            fits |= mine & (records["sequence"] >= self._cuts[segment.number])
            fits |= mine & (records["kind"] == FREED)
        records, places = records[fits], places[fits]
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
        records, places = records[live], places[live]
        if not live.all():
            keys = np.ascontiguousarray(records["key"]).view("S48").tolist()
        numbers, slots = places >> 32, places & 0xFFFFFFFF
        for segment in self._segments:
            mine = numbers == segment.number
            taken = slots[mine]
            self._sequences[segment.number][taken] = records["sequence"][mine]
            self._segments.claim(segment, taken)
        self._sequence = max(self._sequence, int(records["sequence"].max(initial=0)) + 1)
        stale = np.frombuffer(b"".join(entry(FREED, place, key) for place, key in self._stale.items()), RECORD)
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

    def _read_one(self, item: Read, worker: _Worker) -> int:
        try:
            nbytes = self._fill(item, worker)
        except (Rejected, OSError) as e:
            with self._lock:
                self._failed_reads += 1
                self._reasons[str(e) if isinstance(e, Rejected) else f"read: {e.strerror}"] += 1
            return 0
        with self._lock:
            self._read += nbytes
        return 1

    def _fill(self, item: Read, worker: _Worker) -> int:
        geometry = item.identity.geometry
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
        got = self._disk.read(fd, [start, span], offset)
        size = recognise(start[:got])
        if size > room:
            raise Rejected("corrupt header")
        if size != guess:
            start = worker.header.get(size)
            got = self._disk.read(fd, [start, item.span[: max(0, room - size)] if whole else span], offset)
        header = parse(start[:got])
        self._check(header, item, sequence)
        sections = range(geometry.sections) if item.sections is None else item.sections
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
            if self._disk.read(fd, [payload[:nbytes]], offset + first) < nbytes:
                raise Rejected("torn")
        verify(header, sections, payload)
        if header.codec != codec.RAW:
            known = worker.codec or codec.make("zstd")
            assert known is not None
            codec.decode(header, sections, payload, item.span, geometry, item.identity.itemsize, known)
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
        payload, table, kind = codec.encode(item.span, geometry, identity.itemsize, size, worker.codec, worker.payload)
        place = NOWHERE
        try:
            found = self._take(ladder(size + len(payload)), item.owner)
            if found is None:
                raise Rejected("full")
            place = found
            with self._lock:
                fd, offset = self._files[segment_of(place)], self._segments.offset(place)
                sequence = self._sequence
                self._sequence += 1
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
            self._flush_freed()
            self._put(fd, payload, offset + size)
            with self._lock:
                self._sequences[segment_of(place)][slot_of(place)] = sequence
                # From here on the slot may name this block, whatever becomes of the write.
                self._stale[place] = item.key
            self._put(fd, page, offset)
        except (Rejected, OSError) as e:
            with self._lock:
                if place != NOWHERE:
                    self._segments.release(place)
                self._failed_writes += 1
                self._reasons[str(e) if isinstance(e, Rejected) else f"write: {e.strerror}"] += 1
            return NOWHERE
        with self._lock:
            self._stale.pop(place, None)
            self._written += size + len(payload)
        holds = entry(HOLDS, place, item.key, sequence, item.parent, item.depth, item.expiry, item.priority)
        with self._journal_lock:
            self._journal.append(holds)
            if self._journal.full:
                self._journal.compact()
        return place

    def _put(self, fd: int, data: Span, offset: int) -> None:
        while data:
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
        if fd is None:
            fd = self._disk.open(self._directory.segment(segment.number), direct=self._direct, create=True)
            self._files[segment.number] = fd
        self._sequences[segment.number] = np.zeros(segment.slots, np.int64)
        self._disk.resize(fd, segment.nbytes)
        page = codec.Scratch().get(ALIGN)
        page[:] = SegmentHeader(segment.size, segment.slots, cut).pack()
        self._put(fd, page, 0)
        self._disk.sync(fd)

    def _forget(self, segment: Segment) -> None:
        """Take an empty segment out of the book."""
        self._segments.remove(segment)
        for place in [p for p in self._stale if segment_of(p) == segment.number]:
            del self._stale[place]

    def _drop(self, items: Sequence[tuple[BlockKey, int]]) -> list[bool]:
        keys = {key for key, _ in items}
        with self._lock:
            places = {place: key for place, key in self._stale.items() if key in keys}
            stale = set(places)
            places |= {place: key for key, place in items if place != NOWHERE}
            targets = [
                (key, place, self._files[segment_of(place)], self._segments.offset(place))
                for place, key in places.items()
            ]
        failed: set[BlockKey] = set()
        page = codec.Scratch().get(ALIGN)
        page[:] = _WIPED
        for key, _, fd, offset in targets:
            try:
                self._put(fd, page, offset)
            except (OSError, Rejected) as e:
                failed.add(key)
                log.warning("could not overwrite a dropped block: %s", e)
        for fd in {fd for _, _, fd, _ in targets}:
            try:
                self._disk.sync(fd)
            except OSError as e:
                failed |= {key for key, _, f, _ in targets if f == fd}
                log.warning("could not sync after dropping blocks: %s", e)
        with self._lock:
            for key, place, _, _ in targets:
                if key in failed:
                    self._stale[place] = key
                else:
                    self._stale.pop(place, None)
                if place not in stale:
                    self._freed.append(entry(FREED, place, key))
                    self._segments.release(place)
        self._flush_freed()
        return [key not in failed for key, _ in items]

    def _flush_freed(self) -> None:
        with self._journal_lock:
            with self._lock:
                freed, self._freed = self._freed, []
            if freed:
                self._journal.append(b"".join(freed))

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
                            self._stale[place] = batch[i].key
                            self._segments.release(place)
                            places[i] = NOWHERE
