"""Pages of a GPU to the arena and back, compared with the bus.

For the shape of a whole model the limit is large copies between the GPU and pinned memory. The two worst shapes cannot
reach that: a rank's heads are rows with the heads of other ranks between them, and small blocks make small pieces.
Their limit is the DMA alone: the same pieces of the same slots, looked up before, without pages to gather. The speeds
of the gather kernel alone, and of the host, which looks up the slots and queues each DMA, are reported too.

Meanwhile an engine copies the tokens of each step to the host. How long such a small copy takes while blocks are stored
is compared with the same beside large copies that are queued without pauses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

import kvtide
from kvtide.benchmarks.record import BenchRecord, Contestant, Sample, compare, figure, timed
from kvtide.benchmarks.settings import MIB, Settings, own_store
from kvtide.block import BLOCK_TOKENS, Slice
from kvtide.engines.paged.choose_mover import mover
from kvtide.engines.paged.pages import Copy, Pages

__all__ = ["PagedEngine", "PagesShape", "bus", "pages"]

_PAGE = 16
_BUFFER = 128 * MIB
"""Bytes that the mover copies at once."""


@dataclass(frozen=True)
class PagesShape:
    """A model, and how much of it."""

    name: str
    layers: int
    heads: int
    held: int
    """Heads that this process holds."""
    blocks: int
    bar: float
    """Target in GB/s, one way."""
    note: str
    both: float | None = None
    """Target in GB/s, both ways at once."""
    pieces: str = ""
    """What one DMA copies, if the limit is the DMA."""


_SHAPES = [
    PagesShape("llama-3-8b", 32, 8, 8, 64, 52, "Llama-3-8B: 32 layers of 8 heads of 128, in blocks of 32 MiB", both=80),
    PagesShape(
        "tp8",
        *(32, 8, 1, 256, 45),
        "Llama-3-8B at tensor parallelism 8: one head of each block of 32 MiB",
        pieces="rows of 64 KiB, 512 KiB apart",
    ),
    PagesShape(
        "small", *(2, 1, 1, 4096, 45), "2 layers with pages of 4 KiB: blocks of 256 KiB", pieces="128 to 512 blocks"
    ),
]


def pages(settings: Settings) -> Iterator[BenchRecord]:
    """Scattered pages to the arena and back."""
    for shape in _SHAPES:
        yield from _pages(settings, shape)


class _Piece(NamedTuple):
    """What one DMA copies: rows of ``width`` bytes, ``pitch`` apart in the arena."""

    host: int
    pitch: int
    width: int
    rows: int


class PagedEngine:
    """Pages as vLLM has them, in a random order, and blocks to store them in."""

    def __init__(self, shape: PagesShape, stack: ExitStack) -> None:
        device = torch.device("cuda")
        layout = kvtide.Layout.attention(layers=shape.layers, heads=shape.heads, head_dim=128)
        footprint = layout.geometry["full"].footprint
        budget = (2 * shape.blocks * footprint // (256 * MIB) + 2) * 256 * MIB
        store = own_store(dram={"budget": budget, "prefault": True})
        stack.callback(store.close)
        store.dram.wait_prefault()
        self._session = store.session(kvtide.Model(layout, "bench"))
        each = BLOCK_TOKENS // _PAGE
        count = shape.blocks * each * 2
        bits = torch.randint(-(2**15), 2**15, (2, count, _PAGE, shape.held, 128), dtype=torch.int16, device=device)
        caches = [(bits + i).view(torch.bfloat16) for i in range(shape.layers)]
        share = Slice(0, 0, shape.held)
        self._pages = Pages.of(layout, "full", caches, "k p t h d", share)
        order = np.random.default_rng(0).permutation(count).reshape(2 * shape.blocks, each)
        self._mover = mover(device)
        stack.callback(self._mover.close)
        self.nbytes = shape.blocks * layout.geometry["full"].nbytes * shape.held // shape.heads
        held = self._session.reserve(np.arange(2 * shape.blocks * BLOCK_TOKENS, dtype=np.uint32))
        stack.callback(held.abort)
        self._first = [Copy(v, p) for v, p in zip(held.views[: shape.blocks], order, strict=False)]
        self._second = [Copy(v, p) for v, p in zip(held.views[shape.blocks :], order[shape.blocks :], strict=True)]
        self._check()

    def _check(self) -> None:
        """Check that a store and a load restore the pages."""
        self._mover.store(self._pages, self._first + self._second).wait()
        before = [s.clone() for s in self._pages.sections]
        for section in self._pages.sections:
            section.zero_()
        self._mover.load(self._pages, self._first + self._second).wait()
        assert all(torch.equal(a, b) for a, b in zip(before, self._pages.sections, strict=True)), "a wrong byte"

    def out(self) -> None:
        self._mover.store(self._pages, self._first).wait()

    def back(self) -> None:
        self._mover.load(self._pages, self._first).wait()

    def both(self) -> None:
        """Store half of the blocks while the other half is loaded."""
        moves = [self._mover.store(self._pages, self._first), self._mover.load(self._pages, self._second)]
        for move in moves:
            move.wait()

    # -- the limit: the parts of a move, each alone

    def _pieces(self, copies: list[Copy]) -> list[_Piece]:
        from kvtide.engines.paged.gpu import AT_ONCE, by_address, neighbours, parts

        geometry, sections = self._pages.geometry, len(self._pages.sections)
        width = self._pages.heads * self._pages.each * self._pages.atom
        found = []
        for part in parts(len(copies), min(AT_ONCE, _BUFFER // (width * sections))):
            some, places, _ = by_address(copies[part.start : part.stop])
            for start, count in neighbours(some, places, geometry.footprint):
                found.append(_Piece(int(places[start]), geometry.stride, width, count * sections))
        return found

    def alone(self) -> Contestant:
        """The DMA of the same blocks, without their pages."""
        from kvtide.engines.paged import cuda

        ways = [(True, self._pieces(self._first)), (False, self._pieces(self._second))]
        memory = [torch.empty(_BUFFER, dtype=torch.uint8, device="cuda") for _ in ways]
        streams = [torch.cuda.Stream() for _ in ways]

        def go(*chosen: int) -> None:
            for i in range(max(len(ways[way][1]) for way in chosen)):
                for way in chosen:
                    to_host, pieces = ways[way]
                    if i < len(pieces):
                        host, pitch, width, rows = pieces[i]
                        if width == pitch:  # without gaps
                            width, pitch, rows = width * rows, pitch * rows, 1
                        here, stream = memory[way].data_ptr(), streams[way].cuda_stream
                        cuda.copy_rows(host, pitch, here, width, rows, stream, to_host=to_host)
            torch.cuda.synchronize()

        return lambda: {
            "out": timed(go, 0, nbytes=self.nbytes),
            "in": timed(go, 1, nbytes=self.nbytes),
            "both": timed(go, 0, 1, nbytes=2 * self.nbytes),
        }

    def beside(self, small_copy: Callable[[], None]) -> Mapping[str, Sample]:
        """A small copy to the host while blocks are stored."""
        move = self._mover.store(self._pages, self._first)
        move.join()  # all of it is queued
        sample = timed(small_copy)
        move.wait()
        return {"copy": sample}

    def gather(self) -> float:
        """GB/s of the kernel alone, with as many blocks as fit into a buffer."""
        from kvtide.engines.paged.gpu import AT_ONCE, launch, word_of

        pages, staging = self._pages, torch.empty(_BUFFER, dtype=torch.uint8, device="cuda")
        block = len(pages.sections) * pages.heads * pages.each * pages.atom
        some = self._first[: min(AT_ONCE, _BUFFER // block)]
        table = torch.from_numpy(np.concatenate([pages.bases, *(c.pages for c in some)])).cuda()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for turn in range(12):
            if turn == 2:
                start.record()
            launch(pages, table, staging, range(len(pages.sections)), pages.each, word_of(pages), gather=True)
        end.record()
        end.synchronize()
        seconds: float = start.elapsed_time(end) / 1e3
        return 10 * len(some) * block / seconds / 1e9

    def queue(self) -> float:
        """GB/s of the host alone: it checks all copies of a store, looks up their slots, and queues them."""
        seconds = []
        for _ in range(5):
            move = self._mover.store(self._pages, self._first)
            seconds.append(timed(move.join).seconds)
            move.wait()
        return self.nbytes / min(seconds) / 1e9


class _SmallCopy:
    """What an engine copies to the host at each step."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._there = torch.zeros(64, dtype=torch.int64, device="cuda")
        self._here = torch.zeros(64, dtype=torch.int64, pin_memory=True)

    def __call__(self) -> None:
        with torch.cuda.stream(self._stream):
            self._here.copy_(self._there, non_blocking=True)
        self._stream.synchronize()


def _queued(nbytes: int, small_copy: Callable[[], None]) -> Contestant:
    """A small copy to the host while as many bytes in large copies are queued."""
    there = torch.empty(8, nbytes // 8, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(8, nbytes // 8, dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream()

    def contestant() -> Mapping[str, Sample]:
        with torch.cuda.stream(stream):
            for part in range(8):
                pinned[part].copy_(there[part], non_blocking=True)
        sample = timed(small_copy)
        torch.cuda.synchronize()
        return {"copy": sample}

    return contestant


def bus(nbytes: int) -> Contestant:
    """The limit: large copies between the GPU and pinned memory, on a stream for each direction."""
    there, here = (torch.empty(2, nbytes // 2, dtype=torch.uint8, device="cuda") for _ in range(2))
    pinned, other = (torch.empty(2, nbytes // 2, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    streams = torch.cuda.Stream(), torch.cuda.Stream()

    def go(out: bool, back: bool) -> None:
        for half in range(2):
            with torch.cuda.stream(streams[0]):
                if out:
                    pinned[half].copy_(there[half], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                if back:
                    here[half].copy_(other[half], non_blocking=True)
        torch.cuda.synchronize()

    def contestant() -> Mapping[str, Sample]:
        return {
            "out": timed(go, True, False, nbytes=nbytes),
            "in": timed(go, False, True, nbytes=nbytes),
            "both": timed(go, True, True, nbytes=2 * nbytes),
        }

    return contestant


def _pages(settings: Settings, shape: PagesShape) -> Iterator[BenchRecord]:
    with ExitStack() as stack:
        engine = PagedEngine(shape, stack)

        def ours() -> Mapping[str, Sample]:
            return {
                "out": timed(engine.out, nbytes=engine.nbytes),
                "in": timed(engine.back, nbytes=engine.nbytes),
                "both": timed(engine.both, nbytes=2 * engine.nbytes),
            }

        limit = engine.alone() if shape.pieces else bus(engine.nbytes)
        rounds = compare({"kvtide": ours, "limit": limit}, settings.rounds(15, 5), settings.progress)
        alone = f"the kernel alone gathers {engine.gather():,.0f} GB/s"
        if shape.pieces:
            alone += f", the host alone queues {engine.queue():,.0f} GB/s"
        else:
            small_copy = _SmallCopy()
            contestants = {
                "kvtide": lambda: engine.beside(small_copy),
                "queued": _queued(engine.nbytes, small_copy),
                "alone": lambda: {"copy": timed(small_copy)},
            }
            waits = compare(contestants, settings.rounds(15, 5), settings.progress, warm_up=3)
            yield _own_copy(settings, shape, {name: [s.seconds for s in one["copy"]] for name, one in waits.items()})
    named = f"the DMA alone, of {shape.pieces}" if shape.pieces else "large copies of pinned memory"
    for task in ("out", "in", "both"):
        yield figure(
            f"gpu-{task}-{shape.name}",
            "GB/s",
            [s.speed for s in rounds["kvtide"][task]],
            better="higher",
            limit=[s.speed for s in rounds["limit"][task]],
            bar=shape.bar if task != "both" else shape.both,
            command=settings.command,
            note=f"{shape.note}; pages of {_PAGE} tokens in a random order; {torch.cuda.get_device_name()}; limit: "
            f"{named}; {alone}",
        )


def _own_copy(settings: Settings, shape: PagesShape, seconds: Mapping[str, Sequence[float]]) -> BenchRecord:
    return figure(
        "gpu-own-copy",
        "ms",
        [1e3 * s for s in seconds["kvtide"]],
        better="lower",
        limit=[1e3 * s for s in seconds["alone"]],
        against="the same beside as many bytes in large copies",
        reference=[1e3 * s for s in seconds["queued"]],
        command=settings.command,
        note=f"a copy of 512 bytes to the host, as engines make at each step, while {shape.blocks} blocks are stored; "
        f"{shape.note}; {torch.cuda.get_device_name()}; limit: nothing else is copied",
    )
