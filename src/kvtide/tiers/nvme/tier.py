"""Blocks on a local disk: preallocated segment files, direct I/O, a record in each slot.

writer.py explains how a write works, and why a crash at any point costs no more than the blocks being written.

A read takes header and payload in one system call, the payload directly into the caller's span. Then key, sequence,
namespace, layout and every section's checksum are checked; see packer.py. Neighbours on the disk are read in one call,
as a *run*: after two megabytes have passed through the CPU caches all Python code is slow, so a run shares it.

volume.py tracks what is stored where, on disk and in memory.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvtide.block import ALIGN, BlockKey, Span
from kvtide.clock import Clock, SystemClock
from kvtide.interrupts import again_if_interrupted
from kvtide.tiers.base import NOWHERE, DropDone, Held, Read, ReadDone, Renewal, TierStatistics, Write, WriteDone
from kvtide.tiers.counters import TierCounters, bytes_read, read_results, size_for
from kvtide.tiers.format.encryption import OPEN, Encryption
from kvtide.tiers.format.packer import Packer, usual_header
from kvtide.tiers.format.reason import Reason
from kvtide.tiers.format.record import OtherVersion, Rejected, mark_of
from kvtide.tiers.format.scratch import Pool, Scratch
from kvtide.tiers.nvme.directory import Directory
from kvtide.tiers.nvme.io_threads import SharedBatch, Wanted, join_all, runs_of
from kvtide.tiers.nvme.measure import Measured
from kvtide.tiers.nvme.volume import MakeRoom, Volume
from kvtide.tiers.nvme.writer import Run, Writer
from kvtide.tiers.segments import Segments
from kvtide.tiers.syscalls import VECTORS, Disk

__all__ = ["Nvme"]

T = TypeVar("T")

_SIZES = 16
"""Slot sizes that compressed blocks are expected to have, at least."""
_ASIDE = 8 << 20
"""Bytes of encrypted records that are read in one call: each thread may need as much memory to decrypt them."""


class Nvme:
    """A directory of blocks. Opening it locks it for this process.

    ``threads`` blocks are written to the disk at a time, and twice as many are read or prepared, so that the disk need
    not wait while checksums are computed.

    ``evict`` is called to make space when the tier is full (see ``volume.MakeRoom``): it calls ``Nvme.evict`` for at
    least one block and returns True, or returns False. Without it a full tier refuses writes.
    """

    def __init__(
        self,
        path: Path,
        budget: int,
        *,
        segment: int = 256 << 20,
        threads: int = 8,
        direct: bool = True,
        durable: bool = False,
        compression: str = "raw",
        evict: MakeRoom | None = None,
        disk: Disk | None = None,
        clock: Clock | None = None,
        encryption: Encryption = OPEN,
        scratch: Pool | None = None,
    ) -> None:
        """``scratch`` bounds the memory in which the threads compress, encrypt and decrypt blocks."""
        self._durable = durable
        self._encryption = encryption
        self._compressed = compression != "raw"
        self._copies = self._compressed or encryption.seals
        packers = [Packer(compression, encryption, scratch) for _ in range(2 * threads)]
        self._disk = disk or Disk()
        clock = clock or SystemClock()
        self._directory = directory = Directory(path, self._disk, encryption)
        sizes = _SIZES if self._compressed else 1
        self._volume = Volume(directory, budget, segment, threads, direct, clock, sizes)
        self._counters = TierCounters()
        self._writer = Writer(self._volume, evict, clock, self._counters)
        self._queue: queue.SimpleQueue[Callable[[Packer], None] | None] = queue.SimpleQueue()
        self._soon: deque[Callable[[], None]] = deque()
        """Calls that run before everything in the queue."""
        self._threads = [
            threading.Thread(target=self._work, args=(p,), name=f"kvtide-nvme-{i}", daemon=True)
            for i, p in enumerate(packers)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # out of threads, for example: then the directory must not stay locked
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<Nvme of {self._volume!r}>"

    @property
    def new(self) -> bool:
        """Whether the directory did not exist before this opened it."""
        return self._directory.new

    # -- the contract of a tier ---------------------------------------------------------------------------

    def read(self, batch: Sequence[Read], done: ReadDone) -> None:
        def finish(sizes: list[int]) -> None:
            if total := bytes_read(sizes):
                self._counters.count_bytes(read=total)
            done(read_results(sizes))

        if not batch:
            done([])
        found = self._volume.find([item.place for item in batch])
        most = len(batch) // len(self._threads)
        if self._encryption.seals:
            for one in {item.identity.geometry for item in batch}:
                most = min(most, _ASIDE // one.footprint, VECTORS // (1 + one.sections))
        runs = runs_of(list(zip(batch, found, strict=True)), most)
        self._share(SharedBatch(runs, finish), self._read_job, len(runs))

    def write(self, batch: Sequence[Write], done: WriteDone) -> None:
        def finish(places: list[int]) -> None:
            self._volume.note()
            if self._durable:
                self._volume.sync([item.key for item in batch], places)
            done(places)

        if not batch:
            done([])
        elif self._compressed:
            self._share(SharedBatch([[(item, None)] for item in batch], finish), self._write_job, len(batch))
        else:
            self._queue.put(lambda packer: self._write_raw(batch, finish, packer))

    def _share(self, batch: SharedBatch[T], several: Callable[[T, Packer], list[int]], count: int) -> None:
        for _ in range(min(count, len(self._threads))):
            self._queue.put(lambda packer: batch.work(several, packer))

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call a function on one of the I/O threads, before all work they have not begun: it submits reads that a
        caller waits for, and these are queued only then. It must not wait for another of these threads."""
        self._soon.append(call)
        self._queue.put(_look)

    def drop(self, items: Sequence[tuple[BlockKey, int]], done: DropDone) -> None:
        self._queue.put(lambda _: done(self._volume.drop(items)))

    def sync(self, items: Sequence[tuple[BlockKey, int]], done: DropDone) -> None:
        """See ``tiers.base.Sync``."""
        self._queue.put(lambda _: done(self._volume.make_durable([place for _, place in items])))

    def renew(self, items: Sequence[Renewal], done: DropDone) -> None:
        self._queue.put(lambda _: done(self._volume.renew(items)))

    def note(self, held: Held) -> None:
        self._volume.note_held(held)

    def evict(self, key: BlockKey, place: int) -> None:
        self._volume.free(key, place)

    def scan(self) -> Iterator[Held]:
        held, self._volume.held = self._volume.held, None
        if held is not None:
            yield held

    def own(self, places: npt.NDArray[np.int64], owners: npt.NDArray[np.int64]) -> None:
        with self._volume.lock:
            self._volume.segments.own(places, owners)

    def statistics(self) -> TierStatistics:
        volume, counters = self._volume, self._counters
        with counters.lock, volume.lock:
            return TierStatistics(
                blocks=sum(s.used for s in volume.segments),
                bytes_used=volume.segments.used,
                bytes_taken=volume.taken,
                budget=volume.budget,
                bytes_read=counters.read,
                bytes_written=counters.written,
                failed_reads=counters.failures["read"],
                failed_writes=counters.failures["write"],
                reasons=tuple(sorted((volume.reasons + counters.reasons).items())),
                errors_in_a_row=counters.errors,
            )

    def measure(self, write: Callable[[], bool], stop: Callable[[], bool]) -> Measured:
        """Measure the disk's speed, if it may be written to (``write``) or has blocks; ends early when ``stop`` says
        so.

        Takes half a second, on the caller's thread and others of its own. Raises OSError or Rejected.
        """
        return self._volume.measure(write, len(self._threads) // 2, stop)

    def close(self) -> None:
        again_if_interrupted(self._stop)

    def _stop(self) -> None:
        for _ in self._threads:
            self._queue.put(None)
        try:
            join_all(self._threads)
        finally:
            self._volume.close()

    def shred(self, mine: Callable[[Span], bool]) -> tuple[list[int], list[BlockKey]]:
        """Discard records whose first page is ``mine`` on the disk, as far as it can, before they are dropped.

        Returns the places in use, and the blocks that free slots still name. Reads a page of every slot that was ever
        used: do not call it on the threads that serve requests.
        """
        page, places, keys = Scratch().get(ALIGN), [], []
        volume = self._volume

        def is_mine(fd: int, offset: int) -> bool:
            return volume.read(fd, [page], offset) == ALIGN and mine(page)

        for place, key, (fd, offset, size, _) in volume.traces():
            gone = False
            with contextlib.suppress(OSError, Rejected):
                if not is_mine(fd, offset):
                    continue
                with volume.erasing():  # from here on the slot is not reassigned
                    with volume.lock:
                        coming = place in volume.coming
                    if gone := is_mine(fd, offset) and not coming:
                        self._disk.discard(fd, offset, size)
                    elif coming and mine(page):  # another block's payload may be there already, but not its header
                        page[:] = bytes(ALIGN)
                        volume.write(fd, [page], offset)
            if gone and key is None:
                places.append(place)
            elif gone and key is not None:
                keys.append(key)
        for place, (fd, offset, size, _) in volume.kept():  # of another version: the owner is at the same offset
            with contextlib.suppress(OSError), volume.erasing():
                if is_mine(fd, offset):
                    self._disk.discard(fd, offset, size)
                    volume.erased(place)
        return places, keys

    def owners(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The owners of slots; 0 for one that is free by now."""
        with self._volume.lock:
            segments = self._volume.segments
            found = [segments.owner(place) if segments.holds(place) else 0 for place in places.tolist()]
        return np.maximum(np.array(found, np.int64), 0)

    def marks(self) -> Iterator[tuple[int, bytes]]:
        """Places in use, and what identifies the owners of their records. Reads a page of each, as ``shred`` does."""
        page = Scratch().get(ALIGN)
        for place, key, (fd, offset, _, _) in self._volume.traces():
            with contextlib.suppress(OSError):
                if key is None and self._volume.read(fd, [page], offset) == ALIGN:
                    yield place, mark_of(page)

    # -- for the evictor ----------------------------------------------------------------------------------

    @property
    def segments(self) -> Segments:
        """The segment table. Read it under ``book_lock``."""
        return self._volume.segments

    @property
    def book_lock(self) -> threading.Lock:
        return self._volume.lock

    # -- the I/O threads ----------------------------------------------------------------------------------

    def _work(self, packer: Packer) -> None:
        while (task := self._queue.get()) is not None:
            while self._soon:
                try:
                    call = self._soon.popleft()
                except IndexError:  # another thread was faster
                    break
                call()
                del call
            task(packer)
            del task  # else the spans of the last task stay alive until the next one

    def _read_run(self, run: Sequence[Wanted], packer: Packer) -> list[int]:
        """Returns for each the bytes read and verified; if not all were, ``size_for`` the error."""
        try:
            starts, got = self._fill(run, packer)
        except Exception as e:  # noqa: BLE001 - see TierCounters
            # Not all of several need be bad: retry each alone.
            return [self._failed_read(e)] if len(run) == 1 else [self._read_run([one], packer)[0] for one in run]
        sizes = []
        come = [
            start[: max(0, got - i * place[2])] for i, (start, (_, place)) in enumerate(zip(starts, run, strict=True))
        ]
        with packer.together([item for item, _ in run], come):
            for i, ((item, (fd, offset, room, sequence)), start) in enumerate(zip(run, starts, strict=True)):
                fetch, number = partial(self._fetch, fd, offset), i if _whole(item, room) else None
                try:
                    sizes.append(packer.unpack(item, sequence, start, max(0, min(got, room)), room, fetch, number))
                except Exception as e:  # noqa: BLE001 - see TierCounters
                    sizes.append(self._failed_read(e))
                    if isinstance(e, OtherVersion):
                        self._volume.keep(item.key, item.place, sequence, e.newer)
                got -= room
        return sizes

    def _fill(self, run: Sequence[Wanted], packer: Packer) -> tuple[list[Span], int]:
        """Read the starts of a run's records, and its spans; returns the starts, and how many bytes were read."""
        fd, offset, room, _ = run[0][1]
        if fd == NOWHERE:
            raise Rejected(Reason.EVICTED)
        size = usual_header(run[0][0])
        pages = packer.header.get(size * len(run))
        starts = [pages[i : i + size] for i in range(0, len(pages), size)]
        into: list[Span] = []
        for i, ((item, _), start) in enumerate(zip(run, starts, strict=True)):
            into.append(start)
            if _whole(item, room):
                into += packer.into(item, i)
            elif item.sections is None:
                into.append(item.span[: max(0, room - size)])
        return starts, self._volume.read(fd, into, offset)

    def _fetch(self, fd: int, offset: int, into: Sequence[Span], at: int) -> int:
        return self._volume.read(fd, into, offset + at)

    def _failed_read(self, e: Exception) -> int:
        self._counters.failed("read", e)
        return size_for(e)

    def _write_raw(self, batch: Sequence[Write], finish: Callable[[list[int]], None], packer: Packer) -> None:
        try:
            runs = self._writer.runs(batch, copied=self._encryption.seals)
        except Exception as e:  # noqa: BLE001 - see TierCounters
            self._counters.failed("write", e, len(batch))
            finish([NOWHERE] * len(batch))
            return
        shared = SharedBatch(runs, finish)
        self._share(shared, self._write_job, len(runs) - 1)
        # The threads asked to help may be ending: ``close`` waits for this thread.
        shared.work(self._write_job, packer)

    def _write_job(self, run: Run, packer: Packer) -> list[int]:
        try:
            if self._copies:
                packer.workspace.begin(packer.to_write([item for item, _ in run]))
            return self._writer.write(run, packer)
        finally:
            packer.workspace.end()

    def _read_job(self, run: Sequence[Wanted], packer: Packer) -> list[int]:
        try:
            if self._encryption.seals:
                packer.workspace.begin(packer.to_read([item for item, _ in run]))
            return self._read_run(run, packer)
        finally:
            packer.workspace.end()


def _look(_: Packer) -> None:
    """Does nothing: it only wakes a thread."""


def _whole(item: Read, room: int) -> bool:
    """Whether all of a block is wanted from a record in a slot of that size, and the record is as long as the block."""
    return item.sections is None and room == usual_header(item) + len(item.span)
