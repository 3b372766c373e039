"""Copies between callers' buffers and the DRAM tier, at the speed of memory.

One core does not saturate the memory of a server: a second one nearly doubles a copy. So large batches are divided into
pieces that a few threads take in turn, the caller's own among them. But disk I/O needs a core too: copies on all cores
would stall the disk, which is slower than any copy. ``numpy.copyto`` releases the GIL; a memoryview assignment would
hold it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtide.block import Geometry, Span
from kvtide.errors import ArgumentError, LayoutError

__all__ = ["Copier", "bytes_of", "same_shape"]

Bytes = npt.NDArray[np.uint8]

_PIECE = 8 << 20
_WORTH_SHARING = 4 << 20


class Copier:
    """A few threads that copy. Thread-safe; a small batch is copied by the caller alone.

    ``busy`` tells whether other work needs a core now.
    """

    def __init__(self, threads: int = 0, busy: Callable[[], bool] = lambda: False) -> None:
        cores = os.cpu_count() or 1
        self._helpers = (threads or min(4, cores)) - 1
        self._helpers_when_busy = max(0, min(self._helpers, cores - 2))
        self._busy = busy
        self._pool = ThreadPoolExecutor(max(1, self._helpers), "kvtide-copy")

    def copy(self, pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
        """Copy each second array over its first; both of a pair have one shape. Returns when all is copied."""
        count = self._helpers_when_busy if self._busy() else self._helpers
        if not count or sum(target.nbytes for target, _ in pairs) < _WORTH_SHARING:
            for target, source in pairs:
                np.copyto(target, source)
            return
        pieces = _Pieces(pairs)
        try:
            with contextlib.suppress(RuntimeError):  # out of threads: the existing ones do it
                for _ in range(count):
                    self._pool.submit(pieces.help)
            pieces.work()
        finally:
            # An interrupted caller may free the slots now: no thread may write to them any more.
            pieces.stop()
        if pieces.failed is not None:
            raise pieces.failed

    def close(self) -> None:
        self._pool.shutdown()


class _Pieces:
    """Pieces of a batch, taken by whichever thread is free."""

    def __init__(self, pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
        self._pieces = iter(
            [
                (target[i : i + step], source[i : i + step])
                for target, source in pairs
                for step in [max(1, _PIECE * len(target) // target.nbytes)]
                for i in range(0, len(target), step)
            ]
        )
        self._lock = threading.Lock()
        self._helped = threading.Condition(self._lock)
        self._helpers = 0
        """Threads that copy, besides the caller's own."""
        self.failed: Exception | None = None
        """Why a helper could not copy its piece."""

    def stop(self) -> None:
        """Start no more pieces, and wait for the helpers, however often that is interrupted."""
        interrupted: BaseException | None = None
        while True:
            try:
                with self._lock:
                    self._pieces = iter(())
                    self._helped.wait_for(lambda: not self._helpers)
                break
            except BaseException as e:  # noqa: BLE001 - raised below
                interrupted = e
        if interrupted is not None:
            raise interrupted

    def help(self) -> None:
        """Copy on a thread of the pool."""
        with self._lock:
            self._helpers += 1
        try:
            self.work()
        except Exception as e:  # noqa: BLE001 - raised by the caller
            self.failed = e
        finally:
            with self._lock:
                self._helpers -= 1
                self._helped.notify_all()

    def work(self) -> None:
        while True:
            with self._lock:
                piece = next(self._pieces, None)
            if piece is None:
                return
            np.copyto(*piece)


def same_shape(geometry: Geometry, slot: Span, block: Span) -> tuple[Bytes, Bytes]:
    """A slot and a caller's block as arrays of one shape: flat, or by section where a slot has padding."""
    flat = np.frombuffer(block, np.uint8)
    if geometry.stride == geometry.section:
        return np.frombuffer(slot, np.uint8), flat
    by_section = np.frombuffer(slot, np.uint8).reshape(geometry.sections, geometry.stride)
    return by_section[:, : geometry.section], flat.reshape(geometry.sections, geometry.section)


def bytes_of(buffer: Any, size: int, group: str, number: int, writable: bool) -> Span:
    """The bytes of a caller's buffer for a block of ``size`` bytes, checked."""
    try:
        view = memoryview(buffer)
    except TypeError:
        what = type(buffer).__name__
        raise ArgumentError(f"buffer {number} of group {group!r} is a {what}, not a buffer such as an array") from None
    if not view.c_contiguous:
        raise LayoutError(f"buffer {number} of group {group!r} is not contiguous; copy it first")
    if view.nbytes != size:
        raise LayoutError(f"buffer {number} of group {group!r} has {view.nbytes} bytes; a block has {size}")
    if writable and view.readonly:
        raise LayoutError(f"buffer {number} of group {group!r} is read-only; a load must write into it")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")
