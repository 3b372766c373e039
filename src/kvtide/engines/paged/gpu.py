"""Copies between scattered GPU pages and blocks at the speed of the bus.

Copying page by page from Python reaches a tenth of the bus bandwidth. Instead a kernel gathers the pages of some blocks
into a small staging buffer in GPU memory, a hundred times faster than the bus, and one large DMA copies that buffer
into the arena. A load does the same in reverse.

Each direction is a *lane* with two streams, buffers and a thread of its own: while one buffer is on the bus, the next
is gathered. Buffers pass between the kernel stream and the DMA stream by device events. The host waits for nothing, and
the engine's stream only for the pages that it reads.

The GPU executes copies to the host in the order in which they become ready, whichever streams they are on. An engine
copies the tokens of each step to the host: without pauses that copy would wait for all blocks that are queued, 20 ms
per GiB. So a store pauses after every ``_UNINTERRUPTED`` bytes, until a kernel has run: by then the engine's copy goes
first. Copies to the GPU do not have this problem: small ones overtake large ones.

After the gather the engine may reuse its pages, although the move is not done. The thread exists because registering
memory with the driver takes milliseconds, which the engine should not wait for.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from kvtide.engines.paged import cuda
from kvtide.engines.paged.convert import converted, decode_pages, encode_pages
from kvtide.engines.paged.kernels import move_pages
from kvtide.engines.paged.mover import Move
from kvtide.engines.paged.pages import WORDS, Copy, Pages
from kvtide.errors import ClosedError

__all__ = ["GpuMover"]

_BUFFERS = 2
"""Buffers per lane: while one is on the bus, the other is gathered."""
_STAGING = 512 << 20
"""Bytes of all staging buffers. Larger ones need fewer calls: an engine that launches its kernels one by one waits for
the lane's thread at each."""
AT_ONCE = 512
"""Maximum blocks per buffer."""
_UNINTERRUPTED = 64 << 20
"""Bytes that a store copies between two pauses: 1.2 ms. With half as many, an engine's own copy takes 0.3 ms less, and
stores have 1 to 2 % less bandwidth."""
_AHEAD = 16
"""Maximum kernels queued on the device."""
_STEP = 512
"""Words that a kernel program moves per iteration."""

_Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]
_Table = np.ndarray[tuple[int, int], np.dtype[np.int64]]


class GpuMove(Move):
    """Copies made by a lane."""

    at_once = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.begun = threading.Event()
        """Set when all work is queued on its streams, or has failed."""
        self.free = torch.cuda.Event()
        """The engine may use the pages again: they were read, or written."""
        self.end = torch.cuda.Event(blocking=True)  # blocking: a thread waits for it while the engine computes
        self.error: BaseException | None = None

    # A move that failed may have copies under way: it ends when they do.

    def done(self) -> bool:
        if not self.begun.is_set() or not self.end.query():
            return False
        self._check()
        return True

    def wait(self) -> None:
        self.begun.wait()
        self.end.synchronize()
        self._check()

    def join(self) -> None:
        self.begun.wait()
        if self.error is not None:
            self.end.synchronize()
        self._check()
        torch.cuda.current_stream(self._device).wait_event(self.free)

    def _check(self) -> None:
        if self.error is not None:
            raise self.error


class GpuMover:
    """Moves pages of one GPU."""

    def __init__(self, device: torch.device, staging: int | None) -> None:
        device = torch.empty(0, device=device).device  # with its index
        if staging is None:
            staging = min(_STAGING, torch.cuda.get_device_properties(device).total_memory // 256)
        each = staging // (2 * _BUFFERS) // 4096 * 4096
        self._out = _Lane(device, each, to_host=True)
        self._in = _Lane(device, each, to_host=False)

    def warm(self, pages: Pages) -> None:
        for lane in (self._out, self._in):
            lane.put(pages, (), warm=True).wait()

    def store(self, pages: Pages, copies: Sequence[Copy]) -> GpuMove:
        pages.check_store(copies)
        return self._out.put(pages, copies)

    def load(self, pages: Pages, copies: Sequence[Copy]) -> GpuMove:
        pages.check_load()
        return self._in.put(pages, copies)

    def close(self) -> None:
        self._out.close()
        self._in.close()


class _Buffer:
    """Staging memory with two events: filled, and free again."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.filled = torch.cuda.Event()
        self.free = torch.cuda.Event()


class _Pauses:
    """Pauses of a stream of copies, in which copies of other streams are executed."""

    def __init__(self, copies: torch.cuda.Stream) -> None:
        self._copies = copies
        self._kernels = torch.cuda.Stream(copies.device, priority=-1)  # else it would wait for the engine's kernels
        self._word = torch.zeros(1, device=copies.device)
        self._copied, self._ran = torch.cuda.Event(), torch.cuda.Event()
        self._pause()  # loads the kernel, which takes longer than a pause
        self._since = 0

    def pause_if_due(self) -> int:
        """Returns the bytes that may be copied before the next pause."""
        if self._since >= _UNINTERRUPTED:
            self._pause()
            self._since = 0
        return _UNINTERRUPTED - self._since

    def copied(self, nbytes: int) -> None:
        """So many bytes were queued."""
        self._since += nbytes

    def _pause(self) -> None:
        """Let the copies that follow wait for a kernel that waits for those before. Events without a kernel between
        them are not enough: the copies follow each other as if there were no events."""
        self._copied.record(self._copies)
        with torch.cuda.stream(self._kernels):
            self._kernels.wait_event(self._copied)
            self._word.add_(1)
            self._ran.record(self._kernels)
        self._copies.wait_event(self._ran)


class _Tables:
    """Ring of tables with page numbers for kernels. The host may be up to ``_AHEAD`` kernels ahead of the device; with
    fewer, a caller that only joins a load would have to wait for it. By then the kernel that read a table has ended:
    its buffer was used again meanwhile."""

    def __init__(self, streams: Sequence[torch.cuda.Stream]) -> None:
        self._streams = streams
        self._read = [torch.cuda.Event(blocking=True) for _ in range(_AHEAD)]
        self._next = itertools.cycle(range(_AHEAD))
        self._make(AT_ONCE * 32)

    def _make(self, entries: int) -> None:
        """Rarely needed: pinning memory stalls the whole device."""
        for stream in self._streams:
            stream.synchronize()  # kernels may still read the tables before
        host = torch.empty(_AHEAD, entries, dtype=torch.int64, pin_memory=True)
        self._there = torch.empty(_AHEAD, entries, dtype=torch.int64, device=self._streams[0].device)
        self._host = host

    def put(self, numbers: _Numbers) -> torch.Tensor:
        """Copy the numbers to the device, on the first stream. A table of more than 64 KiB waits there for the large
        copies before it; on the kernel stream, the table of a load would wait for the kernel before, and then for the
        large copies that were queued meanwhile."""
        if len(numbers) > self._host.shape[1]:
            self._make(1 << (len(numbers) - 1).bit_length())
        i = next(self._next)
        self._read[i].synchronize()
        host, there = self._host[i, : len(numbers)], self._there[i, : len(numbers)]
        host.numpy()[:] = numbers
        with torch.cuda.stream(self._streams[0]):
            there.copy_(host, non_blocking=True)
            self._read[i].record()
        return there


class _Job(NamedTuple):
    pages: Pages
    copies: Sequence[Copy]
    after: torch.cuda.Event
    """Event on the caller's stream after which the pages may be read or written."""
    move: GpuMove
    warm: bool
    """Whether the job only warms up the lane."""


class _Lane:
    """One direction of copies."""

    def __init__(self, device: torch.device, nbytes: int, *, to_host: bool) -> None:
        self._device, self._nbytes, self._to_host = device, nbytes, to_host
        self._kernels, self._copies = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._streams = (self._kernels, self._copies) if to_host else (self._copies, self._kernels)
        """In the order in which the bytes pass through them."""
        self._buffers: Iterator[_Buffer] | None = None
        self._tables: _Tables | None = None
        self._pauses: _Pauses | None = None
        """For stores, once there are buffers."""
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        name = f"kvtide-gpu-{'store' if to_host else 'load'}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, pages: Pages, copies: Sequence[Copy], *, warm: bool = False) -> GpuMove:
        after = torch.cuda.Event()
        after.record(torch.cuda.current_stream(self._device))
        move = GpuMove(self._device)
        with self._lock:
            if self._closed:
                raise ClosedError("this mover is closed; make another")
            self._jobs.put(_Job(pages, copies, after, move, warm))
        return move

    def close(self) -> None:
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self._jobs.put(None)
            self._thread.join()
            self._kernels.synchronize()
            self._copies.synchronize()

    @torch.inference_mode()  # the engine's tensors may be inference tensors, which can only be written in this mode
    def _run(self) -> None:
        torch.cuda.set_stream(self._kernels)  # this thread's torch operations run on the kernel stream
        while (job := self._jobs.get()) is not None:
            try:
                try:
                    self._move(job)
                finally:
                    job.move.free.record(self._kernels)  # only kernels access pages
                    first, second = self._streams
                    second.wait_stream(first)
                    job.move.end.record(second)
            except Exception as e:  # noqa: BLE001 - reported to the caller that waits for the move
                job.move.error = e
            finally:
                job.move.begun.set()
            del job  # else the engine's tensors would be referenced until the next job

    def _move(self, job: _Job) -> None:
        self._kernels.wait_event(job.after)
        pages, copies = job.pages, job.copies
        if job.warm:
            self._warm(pages)
        elif pages.form:
            pages.check(copies)
            self._code(pages, copies)
        elif pages.packing != pages.group.packing:
            pages.check(copies)
            self._convert(pages, copies)
        else:
            section = pages.heads * pages.each * pages.atom
            self._make_buffers(section)
            # A part is checked and looked up while the one before it is copied.
            for part in parts(len(copies), max(1, min(AT_ONCE, self._nbytes // (section * len(pages.sections))))):
                self._move_part(pages, copies[part.start : part.stop])

    def _move_part(self, pages: Pages, copies: Sequence[Copy]) -> None:
        """Make copies of at most as many blocks as a buffer holds. Copies of whole blocks are batched; a copy of part
        of a block is made alone."""
        numbers = pages.check(copies)
        if len(numbers) == len(copies) * pages.each:  # no copy has more pages than a block
            self._move_equal(pages, copies, numbers.reshape(-1, pages.each))
            return
        done = 0
        for whole, same in itertools.groupby(copies, lambda c: len(c.pages) == pages.each):
            some = list(same)
            for together in [some] if whole else [[copy] for copy in some if len(copy.pages)]:
                count = sum(len(copy.pages) for copy in together)
                self._move_equal(pages, together, numbers[done : done + count].reshape(len(together), -1))
                done += count

    def _warm(self, pages: Pages) -> None:
        """Compile the kernel, allocate staging and pin its tables, which takes longer than a large move."""
        if pages.form or pages.packing != pages.group.packing:
            return
        n, word = pages.each, word_of(pages)
        self._make_buffers(pages.heads * n * pages.atom)
        table = self._table(np.concatenate([pages.bases, np.zeros(n, np.int64)]))
        with self._buffer() as buffer:
            self._kernels.wait_stream(self._streams[0])
            launch(pages, table, buffer.memory, range(1), n, word, gather=True)
            if not self._to_host:
                launch(pages, table, buffer.memory, range(1), n, word, gather=False)

    def _make_buffers(self, least: int) -> None:
        """Allocate staging on first use; it holds at least one section of a block."""
        if self._buffers is None or least > self._nbytes:
            self._kernels.synchronize()
            self._copies.synchronize()
            nbytes = max(self._nbytes, least)
            if self._to_host and self._pauses is None:
                self._pauses = _Pauses(self._copies)
            self._buffers = itertools.cycle([_Buffer(nbytes, self._device) for _ in range(_BUFFERS)])
            self._nbytes = nbytes

    def _table(self, numbers: _Numbers) -> torch.Tensor:
        if self._tables is None:
            self._tables = _Tables(self._streams)
        return self._tables.put(numbers)

    @contextmanager
    def _buffer(self) -> Iterator[_Buffer]:
        """The next buffer. The first of the two streams waits until it is free."""
        assert self._buffers is not None
        buffer = next(self._buffers)
        first, second = self._streams
        first.wait_event(buffer.free)
        try:
            yield buffer
        finally:
            buffer.free.record(second)

    def _pass(self, buffer: _Buffer) -> None:
        """Hand the buffer, filled by the first stream, to the second."""
        first, second = self._streams
        buffer.filled.record(first)
        second.wait_event(buffer.filled)

    def _move_equal(self, pages: Pages, copies: Sequence[Copy], numbers: _Table) -> None:
        """Make copies of equally many pages; ``numbers`` has a row for each copy. A buffer takes all of them, or as
        many sections of one block as fit."""
        sections, n = len(pages.sections), numbers.shape[1]
        at_once = max(1, min(sections, self._nbytes // (pages.heads * n * pages.atom)))
        word = word_of(pages)
        some, places, order = by_address(copies)
        table = self._table(np.concatenate([pages.bases, numbers[order].ravel()]))
        for first in range(0, sections, at_once):
            span = range(first, min(sections, first + at_once))
            with self._buffer() as buffer:
                if self._to_host:
                    launch(pages, table, buffer.memory, span, n, word, gather=True)
                    self._pass(buffer)
                self._dma(pages, some, places, buffer, span, n * pages.atom)
                if not self._to_host:
                    self._pass(buffer)
                    launch(pages, table, buffer.memory, span, n, word, gather=False)

    def _dma(
        self, pages: Pages, copies: Sequence[Copy], places: _Numbers, buffer: _Buffer, span: range, width: int
    ) -> None:
        """Copy between staging, where blocks are contiguous, and the slots."""
        stride, size = pages.geometry.stride, pages.group.head_bytes(pages.layout.block_tokens)
        stream, device = self._copies.cuda_stream, buffer.memory.data_ptr()
        row, sections = pages.heads * width, len(pages.sections)
        if width == size:
            # The rows of adjacent blocks have the same pitch as the rows within one block.
            alone = len(span) < sections or pages.geometry.footprint != sections * stride
            for start, count in (
                [(i, 1) for i in range(len(copies))] if alone else neighbours(copies, places, sections * stride)
            ):
                host = int(places[start]) + span.start * stride + pages.share.start * size
                here, rows = device + start * sections * row, count * len(span)
                for some in self._with_pauses(rows, row):
                    at = host + some.start * stride, here + some.start * row
                    if row == stride:
                        self._copy(*at, len(some) * row)
                    else:
                        cuda.copy_rows(at[0], stride, at[1], row, len(some), stream, to_host=self._to_host)
            return
        for i, (copy, place) in enumerate(zip(copies, places.tolist(), strict=True)):
            first = place + span.start * stride + pages.share.start * size + copy.at * pages.atom
            here = device + i * sections * row
            for s in itertools.chain.from_iterable(self._with_pauses(len(span), row)):
                parts = first + s * stride, size, here + s * row, width, pages.heads
                cuda.copy_rows(*parts, stream, to_host=self._to_host)

    def _with_pauses(self, rows: int, nbytes: int) -> Iterator[range]:
        """Split the rows of a copy, of ``nbytes`` bytes each, and pause between the parts where a store must."""
        if self._pauses is None:
            yield range(rows)
            return
        start = 0
        while start < rows:
            some = range(start, min(rows, start + max(1, self._pauses.pause_if_due() // nbytes)))
            yield some
            self._pauses.copied(len(some) * nbytes)
            start = some.stop

    def _copy(self, host: int, device: int, nbytes: int) -> None:
        target, source = (host, device) if self._to_host else (device, host)
        cuda.copy(target, source, nbytes, self._copies.cuda_stream)

    def _convert(self, pages: Pages, copies: Sequence[Copy]) -> None:
        """Load blocks in another packing: copy them unchanged to the GPU, and convert there with torch operations."""
        nbytes = pages.geometry.footprint
        for copy in copies:
            raw = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            cuda.copy(raw.data_ptr(), int(cuda.REGISTRY.find([copy.block])[0]), nbytes, self._kernels.cuda_stream)
            block = converted(pages, raw)[:, :, copy.at : copy.at + len(copy.pages)]
            numbers = torch.as_tensor(np.asarray(copy.pages)).to(self._device)
            for section, part in zip(pages.sections, block, strict=True):
                section.index_copy_(0, numbers, part.transpose(0, 1))

    def _code(self, pages: Pages, copies: Sequence[Copy]) -> None:
        """Move blocks in a lossy form: torch encodes and decodes on the GPU, some layers of a block at a time. Staging
        holds the encoded form. At most a quarter of a buffer of pages is encoded at a time, so that torch's
        intermediate results take no more memory than staging does."""
        stride, size = pages.geometry.stride, pages.group.head_bytes(pages.layout.block_tokens)
        row = pages.heads * size
        at_once = max(1, self._nbytes // (8 * pages.heads * pages.each * pages.atom))
        self._make_buffers(row)
        for copy in (c for c in copies if len(c.pages)):
            place = int(cuda.REGISTRY.find([copy.block])[0]) + pages.share.start * size
            numbers = self._table(np.asarray(copy.pages, np.int64))
            for first in range(0, pages.group.layers, at_once):
                layers = range(first, min(pages.group.layers, first + at_once))
                with self._buffer() as buffer:
                    heads = buffer.memory[: len(layers) * row].view(len(layers), pages.heads, size)
                    if self._to_host:
                        encode_pages(pages, numbers, layers, heads)
                        self._pass(buffer)
                    for some in self._with_pauses(len(layers), row):
                        at = place + (first + some.start) * stride, stride, heads[some.start].data_ptr()
                        cuda.copy_rows(*at, row, len(some), self._copies.cuda_stream, to_host=self._to_host)
                    if not self._to_host:
                        self._pass(buffer)
                        decode_pages(heads, pages, numbers, layers, copy.at)


def launch(
    pages: Pages, table: torch.Tensor, staging: torch.Tensor, span: range, n: int, word: int, *, gather: bool
) -> None:
    """Launch the kernel for some sections of blocks of ``n`` pages. ``table`` has the sections' addresses, then the
    page numbers."""
    *strides, dim = pages.sections[0].stride()
    page, head, token = (s * pages.itemsize // word for s in strides)
    atom, sections = pages.atom // word, len(pages.sections)
    move_pages[(len(table) - sections, len(span) * pages.heads)](
        table,
        table[sections:],
        staging.view(WORDS[word]),
        span.start,
        page,
        head,
        token,
        dim,
        n,
        sections * pages.heads * n * atom,
        pages.heads * n * atom,
        n * atom,
        HEADS=pages.heads,
        DIM=pages.group.head_dim * pages.itemsize // word,
        ATOM=atom,
        STEP=min(_STEP, 1 << (atom - 1).bit_length()),
        GATHER=gather,
    )


def word_of(pages: Pages) -> int:
    """The largest word size in bytes, at most 8, that divides all strides and addresses of the engine's memory."""
    *strides, dim = pages.sections[0].stride()
    if dim != 1:
        return pages.itemsize
    sizes = [s * pages.itemsize for s in strides] + [pages.group.head_dim * pages.itemsize]
    starts = [s.data_ptr() for s in pages.sections]
    return next(w for w in (8, 4, 2, 1) if not any(n % w for n in sizes + starts))


def parts(count: int, most: int) -> Iterator[range]:
    """Split ``count`` copies into parts: a quarter of ``most`` at first, because the bus is idle while these are looked
    up and gathered, then twice as many each time. Smaller ones would be copied before the next ones are looked up."""
    start, size = 0, max(1, most // 4)
    while start < count:
        stop = min(count, start + size)
        yield range(start, stop)
        start, size = stop, min(most, 2 * size)


def by_address(copies: Sequence[Copy]) -> tuple[Sequence[Copy], _Numbers, _Numbers]:
    """The copies in the order of their slots in memory, so that adjacent slots are copied together; the address of each
    slot; and the number that each copy had before."""
    places = cuda.REGISTRY.find([c.block for c in copies])
    order = np.argsort(places)
    return [copies[k] for k in order.tolist()], places[order], order


def neighbours(copies: Sequence[Copy], places: _Numbers, nbytes: int) -> Iterator[tuple[int, int]]:
    """Runs of slots that are adjacent in memory and in one segment: the first, and how many. Another segment may follow
    directly, but it is registered separately, and a DMA cannot span both."""
    apart = np.diff(places) != nbytes
    cuts = np.flatnonzero(apart | (np.diff([id(c.block.obj) for c in copies]) != 0)) + 1
    for start, stop in itertools.pairwise([0, *cuts.tolist(), len(copies)]):
        yield start, stop - start
