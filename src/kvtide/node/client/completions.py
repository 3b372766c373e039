"""Operations whose end one run of a node will report: loads, drops and flushes, by their numbers.

The notice of an end comes over another connection than the number, and may arrive before it.
"""

from __future__ import annotations

import threading

from kvtide.node import protocol as p
from kvtide.transfer.transfer import Transfer

__all__ = ["Completion", "Completions"]

_EARLY = 1000
"""Number of early ends to remember: nothing will ask for those of loads that were given up."""


class Completion:
    """An operation whose end the node will report."""

    __slots__ = ("count", "event", "failure", "lost", "report")

    def __init__(self) -> None:
        self.event = threading.Event()
        self.count = 0
        self.failure = ""
        self.report: p.Ended | None = None
        """The node's whole report."""
        self.lost = False
        """Whether the link was lost before the end was reported."""


class Completions:
    """The completions of one link. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, Transfer | Completion] = {}
        self._early: dict[int, p.Ended] = {}
        self._over = False

    def add(self, number: int, completion: Transfer | Completion) -> None:
        """Report the end with that number to ``completion``."""
        with self._lock:
            ended = self._early.pop(number, None)
            if ended is None and not self._over:
                self._open[number] = completion
                return
        if ended is not None:
            _keep(completion, ended)
        else:
            _give_up(completion)

    def withdraw(self, number: int) -> bool:
        """Do not report that end any more; False if it was reported already."""
        with self._lock:
            return self._open.pop(number, None) is not None

    def ended(self, ended: p.Ended) -> None:
        """The node has reported an end."""
        with self._lock:
            completion = self._open.pop(ended.number, None)
            if completion is None:
                self._early[ended.number] = ended
                while len(self._early) > _EARLY:
                    del self._early[next(iter(self._early))]
        if completion is not None:
            _keep(completion, ended)

    def give_up(self) -> None:
        """The link is lost: no more ends will be reported."""
        with self._lock:
            self._over = True
            given_up, self._open = self._open, {}
        for completion in given_up.values():
            _give_up(completion)


def _keep(completion: Transfer | Completion, ended: p.Ended) -> None:
    if isinstance(completion, Transfer):
        completion.report = ended
        completion.finish([0], [True])
    else:
        completion.count, completion.failure, completion.report = ended.count, ended.failure, ended
        completion.event.set()


def _give_up(completion: Transfer | Completion) -> None:
    if isinstance(completion, Transfer):
        completion.finish([0], [False])
    else:
        completion.lost = True
        completion.event.set()
