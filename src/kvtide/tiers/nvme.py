"""Blocks on a local disk: preallocated segment files, direct I/O, a record in each slot.

How a write goes, and why a crash at any point costs no more than the blocks under way, stands in writer.py.

The way of a read: header and payload in one system call, the payload straight into the caller's span, then key,
sequence, namespace, layout and every section's checksum are checked. Neighbours on the disk are read in one call, as a
*run*: after two megabytes have gone through the caches, every line of Python is slow, and so they share it.

What lies where, on disk and in memory, is kept in shelves.py.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvtide.block import BlockKey, Span, padded
from kvtide.clock import Clock, SystemClock
from kvtide.tiers import codec
from kvtide.tiers.base import NOWHERE, Held, Read, ReadDone, TierStatistics, Write, WriteDone
from kvtide.tiers.disk import Disk
from kvtide.tiers.record import Header, Rejected, check_table, parse, recognise, sound, verify
from kvtide.tiers.segments import Segments
from kvtide.tiers.shelves import Location, Shelves
from kvtide.tiers.tally import Tally
from kvtide.tiers.workers import Batch, Wanted, Worker, runs_of, usual_header
from kvtide.tiers.writer import Writer

__all__ = ["Nvme"]

T = TypeVar("T")


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
        self._durable = durable
        self._compressed = compression != "raw"
        workers = [Worker(compression) for _ in range(2 * threads)]
        self._shelves = Shelves(path, budget, segment, threads, direct, disk or Disk())
        self._tally = Tally()
        self._writer = Writer(self._shelves, evict, clock or SystemClock(), self._tally)
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
            if any(sizes):
                self._tally.moved(read=sum(sizes))
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
            self._share(Batch([[(item, None)] for item in batch], finish), self._writer.write, len(batch))
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
        shelves, tally = self._shelves, self._tally
        with tally.lock, shelves.lock:
            return TierStatistics(
                blocks=sum(s.slots - len(s.free) for s in shelves.segments),
                bytes_used=shelves.segments.used,
                bytes_taken=shelves.taken,
                budget=shelves.budget,
                bytes_read=tally.read,
                bytes_written=tally.written,
                failed_reads=tally.failures["read"],
                failed_writes=tally.failures["write"],
                reasons=tuple(sorted((shelves.reasons + tally.reasons).items())),
                errors_in_a_row=tally.errors,
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
        except Exception as e:  # noqa: BLE001 - see Tally
            # Of several, not all need be bad: each for itself.
            return [self._failed_read(e)] if len(run) == 1 else [self._read_run([one], worker)[0] for one in run]
        sizes = []
        for (item, location), start in zip(run, starts, strict=True):
            try:
                sizes.append(self._check(item, location, start, max(0, min(got, location[2])), worker))
            except Exception as e:  # noqa: BLE001 - see Tally
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
        self._tally.failed("read", e)
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
        try:
            runs = self._writer.runs(batch)
        except Exception as e:  # noqa: BLE001 - see Tally
            self._tally.failed("write", e, len(batch))
            finish([NOWHERE] * len(batch))
            return
        shared = Batch(runs, finish)
        self._share(shared, self._writer.write, len(runs) - 1)
        # Whoever is asked to help may be on the way out: ``close`` waits for this thread.
        shared.work(self._writer.write, worker)
