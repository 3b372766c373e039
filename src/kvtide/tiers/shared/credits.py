"""What a node may write into shared storage: the credits that the budget coordinator granted it; see budget.py.

*A node asks for what it wants to write.* Storage may be full, and then every byte that is asked for evicts another
block. So a node asks only when a block found no credit, and for the bytes of such blocks that could still be written.
While it writes it asks for a little more, at most what it wrote between two steps and a small part of the budget, so
that not every block has to be tried twice.

*A node gives back what it does not use.* When nothing was written for a third of a lease, or a credit is too old to
begin a write with, the rest is given back by a coordination blob (``back.``) as soon as the last write under it has
ended. The coordinator then knows what was used, and grants the rest to others. A credit under which a write failed is
never given back: a part of the block may be in storage, or still arrive. It counts as used until its lifetime has
passed. While much was lost in this way the node asks for no more; otherwise a node whose writes all fail would cause
all blocks of the others to be removed.

A node also tells the coordinator which blobs it has used, and reads which blobs the coordinator has removed. All access
to storage is in ``step``, on the thread of a ``BudgetThread``; storage that hangs blocks only that thread.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvtide.clock import Clock, SystemClock
from kvtide.tiers.shared.blobs import reason_of
from kvtide.tiers.shared.budget import (
    LOGS,
    RESIGNED,
    BudgetCoordinator,
    BudgetCoordinatorStatistics,
    CoordinationBlob,
    CoordinationBlobs,
    coordination_reserve,
    largest_block,
    largest_credit,
)
from kvtide.tiers.shared.eviction_log import EvictionLogReader, packed
from kvtide.tiers.shared.tier import Permit

__all__ = ["BudgetStatistics", "BudgetThread", "WriteCredits"]

log = logging.getLogger("kvtide.steward")

_AHEAD = 64
"""A node that is writing asks for at most this fraction (1/n) of the budget before a block needs it."""
_REMEMBERED = 1 << 16
"""Used blobs that are remembered until the coordinator is told, and blocks that wait for credit."""
_PATIENCE = 3.0
"""Seconds that the end of a store waits for credit at most."""
_FEWEST = 64
"""Used blobs that are reported at a time even where the budget is small."""
_NAME = 32
"""Bytes of a blob's name in a usage report."""


@dataclass(slots=True, eq=False)
class _Credit:
    term: int
    number: int
    left: int
    until: float
    writing: int = 0
    """Writes under it that have not ended."""
    closing: bool = False
    """No write begins under it any more."""
    in_doubt: bool = False
    """A write under it failed: some of its bytes may be in storage, or still arrive."""


@dataclass(frozen=True, slots=True)
class _Taken(Permit):
    credits: tuple[_Credit, ...] = field(default=(), compare=False)


class WriteCredits:
    """Write credits. Call ``take``, ``end`` and ``used`` from any thread, ``step`` and ``close`` from one.

    ``filled`` is called when credit has arrived that blocks wait for, and ``removed`` with the names of blocks that the
    coordinator has removed, or with None if it is unknown which. ``waiting`` returns how many bytes of refused blocks
    could still be written. ``budget`` is that of this process; if the coordinator has another one, that counts.
    """

    def __init__(
        self,
        coordination: CoordinationBlobs,
        budget: int,
        filled: Callable[[], None] = lambda: None,
        removed: Callable[[list[str] | None], None] = lambda _: None,
        waiting: Callable[[], int] = lambda: sys.maxsize,
        clock: Clock | None = None,
    ) -> None:
        self._coordination = coordination
        self._budget = budget
        self._filled = filled
        self._removed = removed
        self._waiting = waiting
        self._eviction_log = EvictionLogReader(coordination.blobs, coordination.timeout)
        self._clock = clock or SystemClock()
        self._me = secrets.token_hex(6)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._credits: list[_Credit] = []
        """Sorted by expiry, the earliest first."""
        self._asked: dict[int, tuple[float, CoordinationBlob]] = {}
        """What was asked for, and when the coordinator was looked up."""
        self._given_back: list[tuple[float, CoordinationBlob]] = []
        """What was given back, and when."""
        self._wanted: dict[str, int] = {}
        """Bytes of blocks that found no credit, by name; may include blocks that have left memory since."""
        self._spent = 0
        """Bytes that were taken since the last step."""
        self._active = self._clock.monotonic()
        """When credit was last taken, or arrived."""
        self._lost: list[tuple[float, int]] = []
        """Bytes of writes that failed, and until when they count."""
        self._looked = self._served = False
        """``_served``: whether there was a coordinator at the last step."""
        self._alive = False
        """Whether the coordinator has written a beat since this process started: the first beat found may be of one
        that died."""
        self._used: dict[str, None] = {}
        self._coordinator_statistics = BudgetCoordinatorStatistics()
        self._beat: tuple[int, int] = (0, 0)
        self._beat_at = self._clock.monotonic()
        self.low = threading.Event()
        """Set when it is time for a step."""

    @property
    def largest(self) -> int:
        """The largest block in bytes."""
        return largest_block(self._coordinator_statistics.budget or self._budget)

    def take(self, name: str, nbytes: int) -> Permit | None:
        # A write must end before its credit does.
        now = self._clock.monotonic()
        least = now + self._coordination.lifetime / 3
        with self._lock:
            usable = [credit for credit in self._credits if credit.left and credit.until > least and not credit.closing]
            if sum(credit.left for credit in usable) >= nbytes:
                return self._take(name, nbytes, usable, now)
            if nbytes <= self.largest and len(self._wanted) < _REMEMBERED:
                self._wanted[name] = nbytes
        if self._served and not self._asked:
            self.low.set()
        return None

    def _take(self, name: str, nbytes: int, usable: Sequence[_Credit], now: float) -> Permit:
        from_these, short = [], nbytes
        for credit in usable:
            part = min(short, credit.left)
            credit.left -= part
            credit.writing += 1
            short -= part
            from_these.append(credit)
            if not short:
                break
        self._wanted.pop(name, None)
        self._spent += nbytes
        self._active = now
        return _Taken(min(credit.until for credit in from_these), nbytes, tuple(from_these))

    def end(self, permit: Permit, *, failed: bool) -> None:
        assert isinstance(permit, _Taken)
        with self._lock:
            for credit in permit.credits:
                credit.writing -= 1
                credit.in_doubt |= failed
            if failed:
                # The coordinator made the grant at most half a lifetime after this node's lookup, from which ``until``
                # counts.
                self._lost.append((permit.until + self._coordination.lifetime / 2, permit.nbytes))

    def used(self, names: Sequence[str]) -> None:
        most = min(_REMEMBERED, max(_FEWEST, coordination_reserve(self._budget) // LOGS // _NAME))
        with self._lock:
            if len(self._used) < most:
                self._used.update(dict.fromkeys(names))

    def coordinator_statistics(self) -> BudgetCoordinatorStatistics:
        """The latest statistics of the current coordinator."""
        return self._coordinator_statistics

    @property
    def silence(self) -> float:
        """Seconds since the coordinator's last beat was seen."""
        return self._clock.monotonic() - self._beat_at

    @property
    def credit(self) -> int:
        """Bytes that may be written now."""
        now = self._clock.monotonic()
        with self._lock:
            return sum(credit.left for credit in self._credits if credit.until > now and not credit.closing)

    @property
    def asks(self) -> bool:
        """Whether blocks wait for credit and there is a coordinator that may grant it."""
        return self._served and self._alive and bool(self._wanted or self._asked)

    def step(self) -> None:
        """Ask for credit, collect grants, give back unused credit, report used blobs, read which were removed.

        Raises OSError if storage fails.
        """
        looked = self._clock.monotonic()
        beats, pages = self._coordination.beats_and_pages()
        removed = self._eviction_log.read_new(pages)
        if removed != []:
            self._removed(removed)
        last = beats[-1] if beats else (0, 0)
        if last != self._beat:
            self._alive = self._looked
            self._beat, self._beat_at = last, looked
            self._coordinator_statistics = self._coordination.read_statistics(*last) or self._coordinator_statistics
        self._looked = True
        self._served = bool(last[0]) and last[1] != RESIGNED and looked - self._beat_at <= self._coordination.lease
        if not self._served:
            return  # there is no coordinator to answer
        self._collect(last[0])
        self._report_used()
        self._give_back(last[0])
        self._ask(last[0], looked)

    def close(self) -> None:
        """Give everything back: nothing is written any more. Raises OSError if storage fails."""
        asked, self._asked = self._asked, {}
        self._coordination.delete([blob for _, blob in asked.values()])
        with self._lock:
            self._wanted.clear()
            for credit in self._credits:
                credit.closing = True
        if self._served:
            self._give_back(self._beat[0])

    def _collect(self, term: int) -> None:
        if not self._asked:
            return
        for grant in self._coordination.find("grant", term, self._me):
            asked = self._asked.pop(grant.number, None)
            if asked is not None:
                with self._lock:
                    until = asked[0] + self._coordination.lifetime
                    self._credits.append(_Credit(term, grant.number, grant.nbytes, until))
                    self._credits.sort(key=lambda credit: credit.until)
                    self._active = self._clock.monotonic()
            self._coordination.delete([grant])
        over = self._clock.monotonic() - self._coordination.lifetime / 2
        stale = [number for number, (when, blob) in self._asked.items() if when < over or blob.term != term]
        self._coordination.delete([self._asked.pop(number)[1] for number in stale])

    def _report_used(self) -> None:
        with self._lock:
            used, self._used = self._used, {}
        if used:
            name = f"used.{self._me}.{next(self._numbers):010d}"
            self._coordination.blobs.create(name, packed(used), self._coordination.timeout)

    def _give_back(self, term: int) -> None:
        now = self._clock.monotonic()
        ended: list[_Credit] = []
        with self._lock:
            idle = not self._wanted and now - self._active >= self._coordination.lease / 3
            kept = []
            for credit in self._credits:
                credit.closing |= idle or not credit.left or credit.until <= now + self._coordination.lifetime / 3
                if credit.until <= now:
                    continue  # the coordinator knows that anyway
                if not credit.closing or credit.writing or credit.in_doubt:
                    kept.append(credit)
                elif credit.term == term:
                    ended.append(credit)
            self._credits = kept
        for credit in ended:
            self._given_back.append(
                (now, self._coordination.create("back", term, self._me, credit.number, credit.left))
            )
        # A coordinator of an earlier version does not read these blobs, and leaves them.
        old = [blob for when, blob in self._given_back if when < now - self._coordination.lifetime]
        self._coordination.delete(old)
        del self._given_back[: len(old)]

    def _ask(self, term: int, looked: float) -> None:
        now = self._clock.monotonic()
        with self._lock:
            spent, self._spent = self._spent, 0
            wanted = dict(self._wanted)
            least = now + self._coordination.lifetime / 3
            left = sum(credit.left for credit in self._credits if credit.until > least and not credit.closing)
            self._lost = [(until, nbytes) for until, nbytes in self._lost if until > now]
            lost = sum(nbytes for _, nbytes in self._lost)
            quiet = now - self._active
        need = min(sum(wanted.values()), self._waiting()) if wanted else 0
        if not need:  # the refused blocks are not in memory any more
            self._forget(wanted)
        elif min(wanted.values()) <= left:
            if quiet < self._coordination.lease:
                # At each step: a block is known to wait only when its whole batch has ended.
                self._filled()
            else:  # they have left memory, though others are still there
                self._forget(name for name, nbytes in wanted.items() if nbytes <= left)
        if self._asked:
            if not need and quiet >= self._coordination.lease / 3:
                asked, self._asked = self._asked, {}
                self._coordination.delete([blob for _, blob in asked.values()])
            return
        budget = self._coordinator_statistics.budget or self._budget
        ahead = min(spent, budget // _AHEAD)
        if lost > budget // _AHEAD or (need <= left and left >= ahead / 2):
            return
        most = largest_credit(budget)
        large = max((nbytes for nbytes in wanted.values() if most < nbytes <= need), default=0)
        nbytes = max(large, min(need + ahead, most)) - left
        if nbytes > 0:
            number = next(self._numbers)
            self._asked[number] = looked, self._coordination.create("ask", term, self._me, number, nbytes)

    def _forget(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                self._wanted.pop(name, None)


@dataclass(frozen=True, slots=True)
class BudgetStatistics:
    """The byte budget of a shared storage, as one process sees it."""

    steward: BudgetCoordinatorStatistics
    """The coordinator's statistics in the last beat that was seen."""
    here: bool
    """Whether this process is the coordinator."""
    silence: float
    """Seconds since that beat was seen; if there was none, since this process started."""
    credit: int
    """Bytes that this process may write now."""


class BudgetThread:
    """The thread that runs the steps of a budget coordinator and, where there are some, of write credits."""

    def __init__(
        self, coordination: CoordinationBlobs, coordinator: BudgetCoordinator, write_credits: WriteCredits | None = None
    ) -> None:
        self._period = coordination.lease / 6
        self._storage = str(coordination.blobs)
        self.coordinator = coordinator
        self._write_credits = write_credits
        self._wake = write_credits.low if write_credits is not None else threading.Event()
        self._stepped = threading.Condition()
        self._over = False
        self._failed = False
        self._thread = threading.Thread(target=self.run, name="kvtide-budget", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def statistics(self) -> BudgetStatistics:
        own, write_credits = self.coordinator.statistics(), self._write_credits
        if write_credits is None:
            return BudgetStatistics(own, bool(own.term), 0.0, 0)
        return BudgetStatistics(
            own if own.term else write_credits.coordinator_statistics(),
            bool(own.term),
            write_credits.silence,
            write_credits.credit,
        )

    def run(self) -> None:
        """Run steps until closed."""
        while not self._over:
            try:
                if self._write_credits is not None:
                    self._write_credits.step()
                self.coordinator.step()
                self._failed = False
            except Exception as e:  # noqa: BLE001 - a foreign blob among ours, for example; the thread must go on
                if not self._failed:
                    log.warning(
                        "the byte budget of %s cannot be kept: %s; nothing is stored there until it can. Check that "
                        "this node may list, read, write and remove there",
                        self._storage,
                        reason_of(e),
                    )
                self._failed = True
            with self._stepped:
                self._stepped.notify_all()
            # Blocks wait in memory for the answer to an ask: look for it sooner.
            self._wake.wait(
                self._period / 4 if self._write_credits is not None and self._write_credits.asks else self._period
            )
            self._wake.clear()
        if self._write_credits is not None:
            with contextlib.suppress(OSError):
                self._write_credits.close()
        with contextlib.suppress(OSError):
            self.coordinator.resign()

    def wait_for_credit(self, timeout: float | None = None) -> None:
        """Wait while blocks wait for credit that may come: half a lease, in which a coordinator answers, or 3
        seconds."""
        write_credits = self._write_credits
        if write_credits is None or not self._thread.is_alive():
            return
        most = min(3 * self._period, _PATIENCE, *() if timeout is None else (timeout,))
        with self._stepped:
            self._stepped.wait_for(lambda: not write_credits.asks, most)

    def close(self) -> None:
        """End; if storage hangs, the thread is left behind."""
        self._over = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(6 * self._period)
