"""The I/O threads of a tier: what each has for itself, and how several share a batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvtide.errors import ConfigError
from kvtide.tiers import codec
from kvtide.tiers.base import NOWHERE
from kvtide.tiers.record import Rejected

__all__ = ["Batch", "Worker"]

T = TypeVar("T")


class Worker:
    """What one I/O thread has for itself."""

    __slots__ = ("_decoder", "codec", "header", "payload")

    def __init__(self, name: str) -> None:
        self.header = codec.Scratch()
        self.payload = codec.Scratch()
        self.codec = codec.make(name)
        self._decoder = self.codec

    @property
    def decoder(self) -> codec.Codec:
        """What reads compressed records, where raw ones are written too."""
        if self._decoder is None:
            try:
                self._decoder = codec.make("zstd")
            except ConfigError as e:
                raise Rejected("its codec is not installed") from e
            assert self._decoder is not None
        return self._decoder


class Batch(Generic[T]):
    """Items that several threads take in turn; ``finish`` runs on the thread that ends the last one.

    Each thread that helps tells once what it did, because a lock and a wake-up for every block would cost more than all
    else that Python does for it.
    """

    __slots__ = ("_finish", "_left", "_lock", "_results", "_turns")

    def __init__(self, items: Sequence[T], finish: Callable[[list[int]], None]) -> None:
        self._results = [NOWHERE] * len(items)
        self._finish = finish
        self._left = len(items)
        self._turns = enumerate(items)
        self._lock = threading.Lock()

    def work(self, one: Callable[[T, Worker], int], worker: Worker) -> None:
        """Do items until none is left."""
        count = 0
        for i, item in self._turns:
            self._results[i] = one(item, worker)
            count += 1
            del item
        with self._lock:
            self._left -= count
            if not count or self._left:
                return
        self._finish(self._results)
