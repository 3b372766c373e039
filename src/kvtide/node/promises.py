"""What one life of a node has promised to tell: the ends of loads, drops and flushes, by their numbers.

The notice of an end comes over another connection than the number, and may overtake it.
"""

from __future__ import annotations

import threading

from kvtide.node import protocol as p
from kvtide.transfer.transfer import Transfer

__all__ = ["Promise", "Promises"]

_EARLY = 1000
"""Ends to remember that nobody asked for: those of loads that were given up are never asked for."""


class Promise:
    """Something that the node will say has ended."""

    __slots__ = ("count", "event", "failure", "lost", "report")

    def __init__(self) -> None:
        self.event = threading.Event()
        self.count = 0
        self.failure = ""
        self.report: p.Ended | None = None
        """All that the node said."""
        self.lost = False
        """The node went away before."""


class Promises:
    """Those of one line. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, Transfer | Promise] = {}
        self._early: dict[int, p.Ended] = {}
        self._over = False

    def add(self, number: int, promise: Transfer | Promise) -> None:
        """The end with that number will be told to ``promise``."""
        with self._lock:
            ended = self._early.pop(number, None)
            if ended is None and not self._over:
                self._open[number] = promise
                return
        if ended is not None:
            _keep(promise, ended)
        else:
            _give_up(promise)

    def withdraw(self, number: int) -> bool:
        """Nobody waits for that end any more; False if it was told already."""
        with self._lock:
            return self._open.pop(number, None) is not None

    def ended(self, ended: p.Ended) -> None:
        """The node has told an end."""
        with self._lock:
            promise = self._open.pop(ended.number, None)
            if promise is None:
                self._early[ended.number] = ended
                while len(self._early) > _EARLY:
                    del self._early[next(iter(self._early))]
        if promise is not None:
            _keep(promise, ended)

    def give_up(self) -> None:
        """The node will tell nothing any more."""
        with self._lock:
            self._over = True
            given_up, self._open = self._open, {}
        for promise in given_up.values():
            _give_up(promise)


def _keep(promise: Transfer | Promise, ended: p.Ended) -> None:
    if isinstance(promise, Transfer):
        promise.report = ended
        promise.finish([0], [True])
    else:
        promise.count, promise.failure, promise.report = ended.count, ended.failure, ended
        promise.event.set()


def _give_up(promise: Transfer | Promise) -> None:
    if isinstance(promise, Transfer):
        promise.finish([0], [False])
    else:
        promise.lost = True
        promise.event.set()
