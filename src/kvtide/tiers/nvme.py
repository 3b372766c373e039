"""Blocks on a local disk: preallocated segment files, direct I/O, a record in each slot.

The way of a write, on one of the tier's own threads: make the checksums (and compress), take a slot of the right size,
evicting if need be, then in this order: journal "slot freed" (for what was evicted) and "slot is being written",
payload, header, journal "slot holds key" (with the next record, at the latest when the batch ends). A crash at any
point leaves either a whole record, or one whose header or checksums do not agree, which is a miss. No fsync is needed
for that; ``durable`` adds one before a write is acknowledged, and ``drop`` always syncs, because a dropped block must
not come back.

The way of a read: header and payload in one system call, the payload straight into the caller's span, then key,
sequence, namespace, layout and every section's checksum are checked. Neighbours on the disk are read in one call, as a
*run*: after two megabytes have gone through the caches, every line of Python is slow, and so they share it.

What lies where, on disk and in memory, is kept in shelves.py.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby, repeat
from operator import itemgetter
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvtide.block import BlockKey, Span, padded
from kvtide.clock import Clock, SystemClock
from kvtide.tiers import codec
from kvtide.tiers.base import NOWHERE, Held, Read, ReadDone, TierStatistics, Write, WriteDone
from kvtide.tiers.disk import Disk
from kvtide.tiers.journal import HOLDS, WRITING, entry
from kvtide.tiers.record import Header, Rejected, check_table, header_bytes, parse, recognise, sound, verify
from kvtide.tiers.segments import Segments, ladder
from kvtide.tiers.shelves import Location, Shelves
from kvtide.tiers.workers import Batch, Wanted, Worker, runs_of, usual_header

__all__ = ["Nvme"]

log = logging.getLogger("kvtide.nvme")

T = TypeVar("T")

Slot = tuple[int, int, int, int]
"""Where a block is to be written: place, file, offset there, and its record's sequence number."""

_NO_SLOT: Slot = (NOWHERE, NOWHERE, NOWHERE, NOWHERE)


def _header_of(item: Write) -> int:
    """The size of the header of its record."""
    return header_bytes(item.identity.geometry.sections, len(item.tokens))


def _reason(verb: str, e: Exception) -> str:
    """Why a block could not be read or written, for the statistics."""
    if isinstance(e, Rejected):
        return str(e)
    if isinstance(e, OSError):
        return f"{verb}: {e.strerror}"
    if isinstance(e, MemoryError):
        return f"{verb}: out of memory"
    # A fault of ours. It costs this block, not the thread, and nobody who waits for the batch.
    log.error("could not %s a block", verb, exc_info=e)
    return f"{verb}: {type(e).__name__}"


class Nvme:
    """A directory of blocks. Opening it takes it for this process alone.

    ``threads`` blocks are written to the disk at a time, and twice as many are read or prepared: the disk need not wait
    while checksums are made or checked.

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
        self._clock = clock or SystemClock()
        self._durable = durable
        self._compressed = compression != "raw"
        self._make_room = evict
        workers = [Worker(compression) for _ in range(2 * threads)]
        self._shelves = Shelves(path, budget, segment, threads, direct, disk or Disk())
        self._lock = threading.Lock()
        self._read = self._written = self._failed_reads = self._failed_writes = self._errors = 0
        self._queue: queue.SimpleQueue[Callable[[Worker], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(w,), name=f"kvtide-nvme-{i}", daemon=True)
            for i, w in enumerate(workers)
        ]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        return f"<Nvme of {self._shelves!r}>"

    # -- the contract -------------------------------------------------------------------------------------

    def read(self, batch: Sequence[Read], done: ReadDone) -> None:
        def finish(sizes: list[int]) -> None:
            with self._lock:
                self._read += sum(sizes)
                if any(sizes):
                    self._errors = 0
            done([size > 0 for size in sizes])

        if not batch:
            done([])
        found = self._shelves.find([item.place for item in batch])
        runs = runs_of(list(zip(batch, found, strict=True)), len(batch) // len(self._threads))
        self._share(Batch(runs, finish), self._read_run, len(runs))

    def write(self, batch: Sequence[Write], done: WriteDone) -> None:
        def finish(places: list[int]) -> None:
            self._shelves.note()
            if self._durable:
                self._shelves.sync([item.key for item in batch], places)
            done(places)

        if not batch:
            done([])
        elif self._compressed:
            self._share(Batch([(item, None) for item in batch], finish), self._write_one, len(batch))
        else:
            self._queue.put(lambda worker: self._write_raw(batch, finish, worker))

    def _share(self, batch: Batch[T], several: Callable[[T, Worker], list[int]], count: int) -> None:
        for _ in range(min(count, len(self._threads))):
            self._queue.put(lambda worker: batch.work(several, worker))

    def drop(self, items: Sequence[tuple[BlockKey, int]], done: ReadDone) -> None:
        self._queue.put(lambda _: done(self._shelves.drop(items)))

    def evict(self, key: BlockKey, place: int) -> None:
        self._shelves.free(key, place)

    def scan(self) -> Iterator[Held]:
        held, self._shelves.held = self._shelves.held, None
        if held is not None:
            yield held

    def own(self, places: npt.NDArray[np.int64], owners: npt.NDArray[np.int64]) -> None:
        with self._shelves.lock:
            self._shelves.segments.own(places, owners)

    def statistics(self) -> TierStatistics:
        shelves = self._shelves
        with self._lock, shelves.lock:
            return TierStatistics(
                blocks=sum(s.slots - len(s.free) for s in shelves.segments),
                bytes_used=shelves.segments.used,
                bytes_taken=shelves.taken,
                budget=shelves.budget,
                bytes_read=self._read,
                bytes_written=self._written,
                failed_reads=self._failed_reads,
                failed_writes=self._failed_writes,
                reasons=tuple(sorted(shelves.reasons.items())),
                errors_in_a_row=self._errors,
            )

    def close(self) -> None:
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._shelves.close()

    # -- for the evictor ----------------------------------------------------------------------------------

    @property
    def segments(self) -> Segments:
        """The book. Read it under ``book_lock``."""
        return self._shelves.segments

    @property
    def book_lock(self) -> threading.Lock:
        return self._shelves.lock

    # -- the I/O threads ----------------------------------------------------------------------------------

    def _work(self, worker: Worker) -> None:
        while (task := self._queue.get()) is not None:
            task(worker)
            del task  # else the spans of the last one live on until the next comes

    def _read_run(self, run: Sequence[Wanted], worker: Worker) -> list[int]:
        """Of each, how many bytes were read and verified; 0 if not all was."""
        try:
            starts, got = self._fill(run, worker)
        except Exception as e:  # noqa: BLE001 - see _reason
            # Of several, not all need be bad: each for itself.
            return [self._failed_read(e)] if len(run) == 1 else [self._read_run([one], worker)[0] for one in run]
        sizes = []
        for (item, location), start in zip(run, starts, strict=True):
            try:
                sizes.append(self._check(item, location, start, max(0, min(got, location[2])), worker))
            except Exception as e:  # noqa: BLE001 - see _reason
                sizes.append(self._failed_read(e))
            got -= location[2]
        return sizes

    def _fill(self, run: Sequence[Wanted], worker: Worker) -> tuple[list[Span], int]:
        """Read the starts of a run's records, and its spans; answers the starts, and how many bytes came."""
        fd, offset, room, _ = run[0][1]
        if fd == NOWHERE:
            raise Rejected("evicted")
        size = usual_header(run[0][0])
        pages = worker.header.get(size * len(run))
        starts = [pages[i : i + size] for i in range(0, len(pages), size)]
        into: list[Span] = []
        for (item, _), start in zip(run, starts, strict=True):
            into += start, item.span[: max(0, room - size) if item.sections is None else 0]
        return starts, self._shelves.read(fd, into, offset)

    def _failed_read(self, e: Exception) -> int:
        with self._lock, self._shelves.lock:
            self._failed_reads += 1
            self._errors += isinstance(e, OSError)
            self._shelves.reasons[_reason("read", e)] += 1
        return 0

    def _check(self, item: Read, location: Location, start: Span, got: int, worker: Worker) -> int:
        """How many bytes of a block were read and are sound, after the first ``got`` of its record were read.

        ``start`` is as much as its header usually takes; the payload, if all is wanted, is in its span.
        """
        fd, offset, room, sequence = location
        names, geometry = item.identity, item.identity.geometry
        guess, whole = len(start), item.sections is None
        expected = sequence, item.key, names.namespace, names.tenant, names.layout
        if whole and got == guess + geometry.footprint and sound(start, item.span, geometry, expected):
            return geometry.footprint
        sections = item.wanted
        if not sections:
            raise Rejected("no such sections")
        size = recognise(start[:got])
        if size > room:
            raise Rejected("corrupt header")
        if size != guess:
            start = worker.payload.get(size)  # its neighbours' headers are still needed
            got = self._shelves.read(fd, [start, item.span[: max(0, room - size) if whole else 0]], offset)
        header = parse(start[:got])
        self._check_names(header, item, sequence)
        check_table(header, size, geometry, room)
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
            if self._shelves.read(fd, [payload[:nbytes]], offset + first) < nbytes:
                raise Rejected("torn")
        verify(header, sections, payload, geometry if header.codec == codec.RAW else None)
        if header.codec != codec.RAW:
            codec.decode(header, sections, payload, item.span, geometry, item.identity.itemsize, worker.decoder)
        return nbytes

    @staticmethod
    def _check_names(header: Header, item: Read, sequence: int) -> None:
        identity = item.identity
        if header.key != item.key or header.sequence != sequence:
            raise Rejected("another block")
        if (header.namespace, header.tenant, header.layout) != (
            identity.namespace,
            identity.tenant,
            identity.layout,
        ):
            raise Rejected("another model or tenant")

    def _write_raw(self, batch: Sequence[Write], finish: Callable[[list[int]], None], worker: Worker) -> None:
        """Write blocks as they are: how large their records will be is known, so they get their slots in one go.

        All of a layout are of one size, so their slots fit exactly: a ladder would leave gaps, and a disk that is read
        and written without gaps is quicker.
        """
        try:
            slots = self._slots([(item, _header_of(item) + item.identity.geometry.footprint) for item in batch])
        except Exception as e:  # noqa: BLE001 - see _reason
            self._count_failed(len(batch), e)
            finish([NOWHERE] * len(batch))
        else:
            shared = Batch(list(zip(batch, slots, strict=True)), finish)
            self._share(shared, self._write_one, len(batch) // 2)
            # Whoever is asked to help may be on the way out: ``close`` waits for this thread.
            shared.work(self._write_one, worker)

    def _slots(self, wanted: Sequence[tuple[Write, int]]) -> list[Slot]:
        """Slots of the sizes that blocks need, announced in the journal."""
        slots: list[Slot] = []
        try:
            for size, alike in groupby(wanted, key=itemgetter(1)):
                items = [item for item, _ in alike]
                taken = self._shelves.take(size, [item.owner for item in items], self._make_room)
                for item, place in zip(items, chain(taken, repeat(NOWHERE)), strict=False):
                    slots.append(_NO_SLOT if place == NOWHERE else (place, *self._shelves.begin(item.key, place)))
            self._shelves.note(
                b"".join(
                    [
                        entry(WRITING, place, item.key, sequence)
                        for (place, _, _, sequence), (item, _) in zip(slots, wanted, strict=True)
                        if place != NOWHERE
                    ]
                )
            )
        except BaseException:
            for place, *_ in slots:
                if place != NOWHERE:
                    self._shelves.failed(place)
            raise
        return slots

    def _count_failed(self, count: int, e: Exception) -> None:
        with self._lock, self._shelves.lock:
            self._failed_writes += count
            self._errors += isinstance(e, OSError)
            self._shelves.reasons[_reason("write", e)] += count

    def _write_one(self, wanted: tuple[Write, Slot | None], worker: Worker) -> list[int]:
        item, slot = wanted
        identity, geometry = item.identity, item.identity.geometry
        size = _header_of(item)
        try:
            payload, table, kind = codec.encode(
                item.span, geometry, identity.itemsize, size, worker.codec, worker.payload
            )
            slot = slot or self._slots([(item, ladder(size + len(payload)))])[0]
            place, fd, offset, sequence = slot
            if place == NOWHERE:
                code = self._shelves.refused
                raise OSError(code, os.strerror(code)) if code else Rejected("full")
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
            self._shelves.write(fd, payload, offset + size)
            self._shelves.name(
                place,
                page,
                sequence,
                entry(HOLDS, place, item.key, sequence, item.parent, item.depth, item.expiry, item.priority),
            )
        except Exception as e:  # noqa: BLE001 - see _reason
            if slot and slot != _NO_SLOT:
                self._shelves.failed(slot[0])
            self._count_failed(1, e)
            return [NOWHERE]
        with self._lock:
            self._errors = 0
            self._written += size + len(payload)
        return [place]
