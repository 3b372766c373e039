"""Memory for the index's columns."""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["column"]


def column(size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array of zeros in its own memory mapping: an outgrown column is returned to the system, which malloc would not
    do."""
    kind = np.dtype(dtype)
    memory = mmap.mmap(-1, size * kind.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # only advice: with huge pages, looking up a chain takes a fifth less time
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, kind)
