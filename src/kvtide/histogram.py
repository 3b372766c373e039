"""Histograms with a few buckets, for ages and latencies."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Histogram", "HistogramStatistics"]


@dataclass(frozen=True, slots=True)
class HistogramStatistics:
    bounds: tuple[float, ...] = ()
    """The upper bound of each bucket but the last, which has none."""
    counts: tuple[int, ...] = (0,)
    total: float = 0.0
    """The sum of all values."""

    @property
    def count(self) -> int:
        return sum(self.counts)


class Histogram:
    """Counts values by bucket. Thread-safe."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._steps = tuple(bounds)
        self._bounds = np.array(bounds)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._total = 0.0
        self._lock = threading.Lock()

    def add(self, values: npt.NDArray[np.float64]) -> None:
        steps = np.bincount(self._bounds.searchsorted(values), minlength=len(self._counts))
        total = float(values.sum())
        with self._lock:
            self._counts += steps
            self._total += total

    def add_one(self, value: float) -> None:
        step = bisect_left(self._steps, value)
        with self._lock:
            self._counts[step] += 1
            self._total += value

    def statistics(self) -> HistogramStatistics:
        with self._lock:
            return HistogramStatistics(tuple(self._bounds.tolist()), tuple(self._counts.tolist()), self._total)
