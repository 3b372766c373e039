"""CUDA driver calls that torch does not offer: strided (2D) copies, and registration of host memory.

Registered memory is copied by DMA at the speed of the bus and without blocking the host; other memory is not.
Registering takes some milliseconds per segment, once; a segment is unregistered when it is unmapped.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
import weakref
from collections.abc import Sequence

import numpy as np
import torch

from kvtide.block import Span
from kvtide.engines.paged.memory import address
from kvtide.errors import TierError

__all__ = ["REGISTRY", "Registry", "copy", "copy_rows"]

_HOST, _DEVICE = 1, 2
_KNOWN = 712
"""The driver's error code for memory that is already registered."""
_PORTABLE, _READ_ONLY = 0x01, 0x08


class _Rows(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = [
        *((f"src_{name}", kind) for name, kind in (("x", ctypes.c_size_t), ("y", ctypes.c_size_t))),
        ("src_type", ctypes.c_int),
        ("src_host", ctypes.c_void_p),
        ("src_device", ctypes.c_void_p),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        *((f"dst_{name}", kind) for name, kind in (("x", ctypes.c_size_t), ("y", ctypes.c_size_t))),
        ("dst_type", ctypes.c_int),
        ("dst_host", ctypes.c_void_p),
        ("dst_device", ctypes.c_void_p),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise TierError(f"{what} failed: the CUDA driver says {(text.value or b'?').decode()} ({code})")


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copy between host and device, in either direction, on a stream."""
    pointer = ctypes.c_void_p
    _check(
        _driver().cuMemcpyAsync(pointer(target), pointer(source), ctypes.c_size_t(nbytes), pointer(stream)),
        f"a copy of {nbytes} bytes",
    )


def copy_rows(host: int, pitch: int, device: int, width: int, rows: int, stream: int, *, to_host: bool) -> None:
    """Copy rows that are ``pitch`` bytes apart in host memory and contiguous in device memory."""
    job = _Rows(width=width, height=rows)
    here, there = ("dst", "src") if to_host else ("src", "dst")
    setattr(job, f"{here}_type", _HOST)
    setattr(job, f"{here}_host", host)
    setattr(job, f"{here}_pitch", pitch)
    setattr(job, f"{there}_type", _DEVICE)
    setattr(job, f"{there}_device", device)
    setattr(job, f"{there}_pitch", width)
    _check(
        _driver().cuMemcpy2DAsync_v2(ctypes.byref(job), ctypes.c_void_p(stream)), f"a copy of {rows} rows of {width}"
    )


class Registry:
    """Host memory registered with the driver. One per process, like the driver's own registration. Thread-safe.

    A mapping's memory is unmapped before its finalizer runs, and another mapping may already be at the same address. So
    an address that the driver still knows is registered again, and a late finalizer does not unregister the new owner.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a mapping may be finalized at any point, also in here
        self._known: set[int] = set()
        """Ids of the registered segments."""
        self._owner: dict[int, int] = {}
        """The id of the segment registered at each address."""

    def find(self, spans: Sequence[Span]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The addresses of ``spans``. Registers the segments that they belong to, for as long as these are mapped."""
        for name, segment in {id(span.obj): span.obj for span in spans}.items():
            if name not in self._known and isinstance(segment, mmap.mmap):
                with self._lock:
                    if name not in self._known:
                        self._register(segment)
        return np.array([address(span) for span in spans], np.int64)

    def _register(self, segment: mmap.mmap) -> None:
        whole = memoryview(segment)
        start, flags = address(whole), _PORTABLE | (_READ_ONLY if whole.readonly else 0)
        runtime = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(start, len(whole), flags))
        if code == _KNOWN:
            runtime.cudaHostUnregister(start)
            code = int(runtime.cudaHostRegister(start, len(whole), flags))
        if code:
            raise TierError(
                f"the GPU cannot use {len(whole)} bytes of host memory (cudaHostRegister: error {code}); "
                "raise the limit of locked memory (ulimit -l), or make the DRAM tier smaller"
            )
        weakref.finalize(segment, self._forget, id(segment), start).atexit = False
        self._known.add(id(segment))
        self._owner[start] = id(segment)

    def _forget(self, name: int, start: int) -> None:
        with self._lock:
            self._known.discard(name)
            if self._owner.get(start) == name:
                del self._owner[start]
                torch.cuda.cudart().cudaHostUnregister(start)


REGISTRY = Registry()
