"""Compresses blocks for nodes that are at the end of a slow link, which ask for that.

While a block is sent, the next one is compressed, on a thread of its own: there are few of these, one for each eight
cores, and the system runs them after everything else. What is not ready when it could be sent is sent as it is. So
engines on this host lose little to other hosts, and the link does not wait for a processor. On a host without time for
such threads, whoever waits until a block is not used any more, to drop it say, must not wait for them: so what is not
needed any more is given up after the next section.

Blocks are compressed as they would be on disk (``tiers/format/codec.py``). Memory is bounded by who takes ``needed``
bytes for an answer before; it is freed with the block."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from kvtide.block import Geometry, Span
from kvtide.clock import Clock
from kvtide.peers.blocks import SentBlock
from kvtide.tiers.base import Write
from kvtide.tiers.format import codec
from kvtide.tiers.format.packer import Packed, header_of
from kvtide.tiers.format.scratch import Scratch

__all__ = ["BlockCompressor"]

log = logging.getLogger("kvtide.peers")

_CORES = 8
"""Cores for each thread."""
_NICE = 10
_MOMENT = 0.005
"""Seconds after which it is looked again whether the link has enough to do."""


class _Record(NamedTuple):
    """Header and payload of a record."""

    header: Span
    payload: Span


_NOTHING = _Record(memoryview(b""), memoryview(b""))


class _GivenUp(Exception):  # noqa: N818 - a finding
    """The block need not be compressed any more."""


class _Zstd(codec.Zstd):
    """Ends before the next section if the block need not be compressed any more."""

    def __init__(self) -> None:
        super().__init__()
        self.given_up: Callable[[], bool] = _never

    def compress(self, section: Span, itemsize: int) -> bytes:
        self._check()
        return super().compress(section, itemsize)

    def compress_into(self, out: Span, section: Span, itemsize: int) -> int:
        self._check()
        return super().compress_into(out, section, itemsize)

    def _check(self) -> None:
        if self.given_up():
            raise _GivenUp


class BlockCompressor:
    """Thread-safe."""

    def __init__(self, clock: Clock, threads: int = 0) -> None:
        """``threads``: 0 for as many as are sensible here."""
        self._clock = clock
        count = threads or max(1, len(os.sched_getaffinity(0)) // _CORES)
        self._pool = ThreadPoolExecutor(count, "kvtide-peers-compress", initializer=_after_others)
        self._free = threading.Semaphore(count)
        self._codecs = threading.local()

    @staticmethod
    def needed(geometry: Geometry, itemsize: int) -> int:
        """Bytes of memory that ``records`` takes for blocks of that geometry: one is sent, one is compressed. 0: they
        cannot be compressed, since an asker may say what it likes."""
        if geometry.section % itemsize:
            return 0
        return 2 * geometry.footprint + codec.work_of(geometry.section)

    def records(self, sent: Sequence[SentBlock], busy: Callable[[], bool]) -> Generator[_Record, None, None]:
        """A record for each block, compressed if there was time for it; empty where there is none. Each is valid until
        the next. ``busy``: whether the link has enough to do. Close the generator if it is not exhausted: then no block
        is used any more."""
        job: Future[_Record] | None = None
        ended = threading.Event()
        place = -1
        """Of the block that ``job`` compresses. It may be one that was sent before that was done."""
        try:
            for i, one in enumerate(sent):
                while one.whole is not None and not (job is not None and job.done() and place == i) and busy():
                    if job is not None and not job.done():
                        wait([job], _MOMENT)
                    elif one.withdrawn():
                        break
                    elif (job := self._begin(one, ended, _MOMENT)) is not None:
                        place = i
                record = None
                if job is not None and job.done():
                    if (error := job.exception()) is not None:
                        if not isinstance(error, _GivenUp):
                            log.error("a block could not be compressed: %r", error, exc_info=error)
                    elif place == i and len(job.result().payload) < len(one.payload):
                        record = job.result()  # else it would be taken for one that is not compressed
                    job = None
                if job is None and i + 1 < len(sent):
                    job, place = self._begin(sent[i + 1], ended, 0), i + 1
                yield _plain(one) if record is None else record
        finally:
            ended.set()
            if job is not None:
                wait([job])

    def _begin(self, one: SentBlock, ended: threading.Event, patience: float) -> Future[_Record] | None:
        """Compress a block, if there is a thread for that within so many seconds. It ends early when the answer has
        ``ended``."""
        if one.whole is None or not self._free.acquire(timeout=patience):
            return None
        try:
            job = self._pool.submit(self._compressed, one.whole, lambda: ended.is_set() or one.withdrawn())
        except RuntimeError:  # the system cannot start more threads
            self._free.release()
            ended.wait(patience)
            return None
        job.add_done_callback(lambda _: self._free.release())
        return job

    def _compressed(self, item: Write, given_up: Callable[[], bool]) -> _Record:
        """On a thread of the pool."""
        if (zstd := getattr(self._codecs, "zstd", None)) is None:
            zstd = self._codecs.zstd = _Zstd()
        identity, size = item.identity, header_of(item)
        zstd.given_up = given_up
        try:
            payload, table, kind = codec.encode(item.span, identity.geometry, identity.itemsize, size, zstd, Scratch())
        finally:
            zstd.given_up = _never  # the other would keep the answer's memory
            zstd.work.drop()
        header = memoryview(bytearray(size))
        Packed(item, size, payload, table, kind, None).name(header, 0, self._clock.time())
        return _Record(header, payload)

    def close(self) -> None:
        """Call it when no generator is left."""
        self._pool.shutdown()


def _never() -> bool:
    return False


def _plain(one: SentBlock) -> _Record:
    if not one.size:
        return _NOTHING
    return _Record(one.make() if one.known is None else one.known, one.payload)


def _after_others() -> None:
    """Let the system prefer other threads to this one."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
