"""What a node may write into shared storage: the credits that it has got of the steward; see steward.py.

It asks before it is in need, so that stores need not wait, it tells the steward what it has used, and it hears what the
steward has removed. All that talks to storage is in ``step``, on the thread of a ``Keeper``; a storage that hangs holds
up that thread and no other.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtide.clock import Clock, SystemClock
from kvtide.tiers.removals import Hearing, packed
from kvtide.tiers.steward import RESIGNED, Paper, Papers, Steward, StewardStatistics

__all__ = ["BudgetStatistics", "Keeper", "Purse"]

log = logging.getLogger("kvtide.steward")

_LEAST = 64 << 20
"""Bytes that are asked for at least."""
_REMEMBERED = 1 << 16
"""Blobs in use that are remembered until the steward is told."""


class Purse:
    """Credits. ``take`` and ``used`` from any thread, ``step`` from one.

    ``filled`` is called when some has come, and ``removed`` with the names of blocks that the steward has removed; with
    None if it cannot be said which.
    """

    def __init__(
        self,
        papers: Papers,
        filled: Callable[[], None] = lambda: None,
        removed: Callable[[list[str] | None], None] = lambda _: None,
        clock: Clock | None = None,
    ) -> None:
        self._papers = papers
        self._filled = filled
        self._removed = removed
        self._hearing = Hearing(papers.blobs, papers.timeout)
        self._clock = clock or SystemClock()
        self._me = secrets.token_hex(6)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._credits: list[list[float]] = []
        """Bytes left, and until when; the first to end first."""
        self._asked: dict[int, tuple[float, Paper]] = {}
        """What was asked for, and when it was looked who is steward."""
        self._spent = 0
        """Bytes since the last question."""
        self._most = sys.maxsize
        """Bytes that the steward gives at a time, if that is less than what it was asked for."""
        self._refused = False
        self._used: dict[str, None] = {}
        self._told = StewardStatistics()
        self._beat: tuple[int, int] = (0, 0)
        self._beat_at = self._clock.monotonic()
        self.low = threading.Event()
        """Set when it is time for a step."""

    def take(self, nbytes: int) -> float | None:
        # What is begun must be done before the credit ends.
        now = self._clock.monotonic() + self._papers.lifetime / 3
        with self._lock:
            self._spent += nbytes
            for credit in self._credits:
                if credit[1] > now and credit[0] >= nbytes:
                    credit[0] -= nbytes
                    return credit[1]
            self._refused = True
        if not self._asked:
            self.low.set()
        return None

    def used(self, names: Sequence[str]) -> None:
        with self._lock:
            if len(self._used) < _REMEMBERED:
                self._used.update(dict.fromkeys(names))

    def told(self) -> StewardStatistics:
        """What the steward, whoever it is, said last."""
        return self._told

    @property
    def silence(self) -> float:
        """Seconds since its last beat was seen."""
        return self._clock.monotonic() - self._beat_at

    @property
    def credit(self) -> int:
        """Bytes that may be written now."""
        now = self._clock.monotonic()
        with self._lock:
            return int(sum(nbytes for nbytes, until in self._credits if until > now))

    def step(self) -> None:
        """Ask for credit, take what was given, tell what was used, hear what is gone.

        Raises OSError where storage refuses.
        """
        looked = self._clock.monotonic()
        beats, pages = self._papers.beats_and_pages()
        removed = self._hearing.hear(pages)
        if removed != []:
            self._removed(removed)
        last = beats[-1] if beats else (0, 0)
        if last != self._beat:
            self._beat, self._beat_at = last, looked
            self._told = self._papers.told(*last) or self._told
        if not last[0] or last[1] == RESIGNED or looked - self._beat_at > self._papers.lease:
            return  # nobody would answer
        self._collect(last[0])
        self._tell()
        with self._lock:
            now = self._clock.monotonic()
            self._credits = [credit for credit in self._credits if credit[1] > now]
            left = sum(nbytes for nbytes, until in self._credits if until > now + self._papers.lifetime / 2)
            wanted = max(_LEAST, 2 * self._spent)
            if self._asked or left > min(wanted, self._most) // 2:
                return
            self._spent = 0
        number = next(self._numbers)
        self._asked[number] = looked, self._papers.say("ask", last[0], self._me, number, wanted)

    def _collect(self, term: int) -> None:
        if not self._asked:
            return
        came = False
        for grant in self._papers.find("grant", term, self._me):
            asked = self._asked.pop(grant.number, None)
            if asked is not None:
                self._most = grant.nbytes if grant.nbytes < asked[1].nbytes else sys.maxsize
                with self._lock:
                    self._credits.append([grant.nbytes, asked[0] + self._papers.lifetime])
                    came, self._refused = came or self._refused, False
            self._papers.burn([grant])
        over = self._clock.monotonic() - self._papers.lifetime / 2
        stale = [number for number, (when, paper) in self._asked.items() if when < over or paper.term != term]
        self._papers.burn([self._asked.pop(number)[1] for number in stale])
        if came:
            self._filled()

    def _tell(self) -> None:
        with self._lock:
            used, self._used = self._used, {}
        if used:
            name = f"used.{self._me}.{next(self._numbers):010d}"
            self._papers.blobs.create(name, packed(used), self._papers.timeout)


@dataclass(frozen=True, slots=True)
class BudgetStatistics:
    """The byte budget of a shared storage, as one process sees it."""

    steward: StewardStatistics
    """What whoever keeps it said with the last beat that was seen."""
    here: bool
    """Whether that is this process."""
    silence: float
    """Seconds since that beat was seen; if there was none, since this process began to look."""
    credit: int
    """Bytes that this process may write now."""


class Keeper:
    """The thread that lets a steward, and a purse where there is one, take their steps."""

    def __init__(self, papers: Papers, steward: Steward, purse: Purse | None = None) -> None:
        self._period = papers.lease / 6
        self.steward = steward
        self._purse = purse
        self._wake = purse.low if purse is not None else threading.Event()
        self._over = False
        self._failed = False
        self._thread = threading.Thread(target=self.run, name="kvtide-keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def statistics(self) -> BudgetStatistics:
        own, purse = self.steward.statistics(), self._purse
        if purse is None:
            return BudgetStatistics(own, bool(own.term), 0.0, 0)
        return BudgetStatistics(own if own.term else purse.told(), bool(own.term), purse.silence, purse.credit)

    def run(self) -> None:
        """Take steps until it is closed."""
        while not self._over:
            try:
                if self._purse is not None:
                    self._purse.step()
                self.steward.step()
                self._failed = False
            except Exception as e:  # noqa: BLE001 - somebody else's blob where our papers are, say; it must go on
                if not self._failed:
                    log.warning("the byte budget of shared storage cannot be kept: %s; nothing is stored until then", e)
                self._failed = True
            self._wake.wait(self._period)
            self._wake.clear()
        with contextlib.suppress(OSError):
            self.steward.resign()

    def close(self) -> None:
        """End, unless storage hangs: then it is left alone."""
        self._over = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(6 * self._period)
