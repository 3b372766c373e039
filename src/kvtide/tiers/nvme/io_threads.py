"""How the I/O threads of a tier share a batch, and what one of them takes at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Generic, TypeVar

from kvtide.tiers.base import Read
from kvtide.tiers.format.packer import Packer, usual_header
from kvtide.tiers.nvme.volume import Location

__all__ = ["SharedBatch", "Wanted", "join_all", "runs_of"]

T = TypeVar("T")

Wanted = tuple[Read, Location]

_RUN = 16
"""The maximum number of blocks that are read in one call."""


class SharedBatch(Generic[T]):
    """Runs of items that several threads take in turn; ``finish`` runs on the thread that ends the last one.

    ``finish`` gets a result for each item, in order. Each thread reports only once, because a lock and a wake-up for
    every block would cost more than all other Python code for it.
    """

    __slots__ = ("_finish", "_left", "_lock", "_results", "_turns")

    def __init__(self, runs: Sequence[T], finish: Callable[[list[int]], None]) -> None:
        self._results: list[list[int]] = [[]] * len(runs)
        self._finish = finish
        self._left = len(runs)
        self._turns = enumerate(runs)
        self._lock = threading.Lock()

    def work(self, several: Callable[[T, Packer], list[int]], packer: Packer) -> None:
        """Process runs until none is left."""
        count = 0
        for i, run in self._turns:
            self._results[i] = several(run, packer)
            count += 1
            del run
        with self._lock:
            self._left -= count
            if not count or self._left:
                return
        self._finish(list(chain.from_iterable(self._results)))


def runs_of(batch: Sequence[Wanted], most: int) -> list[list[Wanted]]:
    """Divide a batch into runs of blocks that are wanted whole and are adjacent on disk."""
    runs: list[list[Wanted]] = []
    following: int | None = None
    for item, location in batch:
        fits = item.sections is None and location[2] == usual_header(item) + len(item.span)
        if (
            fits
            and item.place == following
            and item.identity is runs[-1][0][0].identity
            and len(runs[-1]) < min(most, _RUN)
        ):
            runs[-1].append((item, location))
        else:
            runs.append([(item, location)])
        following = item.place + 1 if fits else None
    return runs


def join_all(threads: Sequence[threading.Thread]) -> None:
    """Wait until all threads have ended, however often that is interrupted: they use resources that are freed next."""
    interrupted: BaseException | None = None
    for thread in threads:
        while thread.is_alive():
            try:
                thread.join()
            except BaseException as e:  # noqa: BLE001 - raised below
                interrupted = e
    if interrupted is not None:
        raise interrupted
