"""The queue before a tier: reads before writes, bounded, measured.

A tier takes whatever it is given; the lane decides what that is. It keeps only a little under way, so that a read that
comes now is not behind a gigabyte of writes. Writes beyond ``limit`` bytes are refused at once: the block stays where
it is, and nobody waits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtide.clock import Clock
from kvtide.plan.cost import Speed, SpeedStatistics
from kvtide.tiers.base import NOWHERE, Read, Tier, Write

__all__ = ["Lane", "LaneStatistics"]


@dataclass(frozen=True, slots=True)
class LaneStatistics:
    reads_waiting: int
    writes_waiting: int
    read_bytes_waiting: int
    write_bytes_waiting: int
    writes_refused: int
    reads_cancelled: int
    read_speed: SpeedStatistics
    write_speed: SpeedStatistics


_STRETCH = 0.002


@dataclass(slots=True)
class _Stretch:
    """Work in one direction, pauses left out: for how long, until when, and how much was done."""

    busy: float = 0.0
    last: float = 0.0
    nbytes: int = 0
    items: int = 0


@dataclass(slots=True)
class _Job:
    nbytes: int
    items: Sequence[Read] | Sequence[Write]
    run: Callable[[], None]
    give_up: Callable[[], bool]
    started: float = 0.0


class Lane:
    """One per tier. Safe from any thread; calls the tier outside its own lock."""

    def __init__(self, tier: Tier, clock: Clock, limit: int, depth: int) -> None:
        self._tier = tier
        self._clock = clock
        self._limit = limit
        self._depth = depth
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._reads: deque[_Job] = deque()
        self._writes: deque[_Job] = deque()
        self._read_bytes = self._write_bytes = 0
        self._items_under_way = 0
        self._pumping = False
        self._refused = self._cancelled = 0
        self._reading = _Stretch()
        self._writing = _Stretch()
        self.read_speed = Speed()
        self.write_speed = Speed()

    def __repr__(self) -> str:
        waiting = f"{len(self._reads)} reads, {len(self._writes)} writes waiting"
        return f"<Lane {waiting}, {self._items_under_way} blocks under way>"

    @property
    def read_bytes(self) -> int:
        """Bytes that a new read would wait for."""
        return self._read_bytes

    def room(self, nbytes: int) -> bool:
        """Whether a write of ``nbytes`` would be taken; counts a refusal if not."""
        with self._lock:
            # An empty queue takes a block of any size.
            if self._write_bytes + nbytes <= self._limit or not self._write_bytes:
                self._write_bytes += nbytes
                return True
            self._refused += 1
            return False

    def read(
        self,
        items: Sequence[Read],
        done: Callable[[Sequence[bool]], None],
        cancel: Callable[[], bool],
    ) -> None:
        """Read ``items``. If that must wait, ``cancel`` is asked just before; if it answers True, nothing is read."""
        nbytes = sum([len(i.span) for i in items])

        def finish(results: Sequence[bool]) -> None:
            self._measure(self._reading, self.read_speed, job)
            done(results)
            self._end(job, read=True)

        job = _Job(nbytes, items, lambda: self._tier.read(items, finish), cancel)
        with self._lock:
            self._read_bytes += nbytes
            at_once = not self._reads and self._items_under_way < self._depth
            if at_once:
                self._items_under_way += len(items)
            else:
                self._reads.append(job)
        if at_once:
            job.started = self._clock.monotonic()
            job.run()
        else:
            self._pump()

    def write(self, items: Sequence[Write], done: Callable[[Sequence[int]], None]) -> None:
        """Write ``items``, for which ``room`` was found before."""
        nbytes = sum([len(i.span) for i in items])

        def finish(places: Sequence[int]) -> None:
            if NOWHERE not in places:
                self._measure(self._writing, self.write_speed, job)
            done(places)
            self._end(job, read=False)

        job = _Job(nbytes, items, lambda: self._tier.write(items, finish), lambda: False)
        with self._lock:
            self._writes.append(job)
        self._pump()

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until nothing waits or is under way."""
        with self._lock:
            return self._idle.wait_for(lambda: not (self._reads or self._writes or self._items_under_way), timeout)

    def _pump(self) -> None:
        # One thread at a time starts jobs, in a loop: a tier may call back before it returns.
        with self._lock:
            if self._pumping:
                return
            self._pumping = True
        while (job := self._next()) is not None:
            if job.give_up():
                with self._lock:
                    self._cancelled += 1
                self._end(job, read=True)
                continue
            job.started = self._clock.monotonic()
            job.run()

    def _next(self) -> _Job | None:
        with self._lock:
            queue = self._reads or self._writes
            if not queue or self._items_under_way >= self._depth:
                self._pumping = False
                return None
            job = queue.popleft()
            self._items_under_way += len(job.items)
            return job

    def _measure(self, stretch: _Stretch, speed: Speed, job: _Job) -> None:
        """Jobs overlap and end in clumps, so one job's time says little: bytes are counted over a stretch of work."""
        with self._lock:
            now = self._clock.monotonic()
            stretch.busy += now - max(job.started, stretch.last)
            stretch.last = now
            stretch.nbytes += job.nbytes
            stretch.items += len(job.items)
            more = self._items_under_way > len(job.items) and stretch.items < 8 * self._depth
            if stretch.busy < _STRETCH or more:
                return
            nbytes, seconds = stretch.nbytes, stretch.busy
            stretch.busy, stretch.nbytes, stretch.items = 0.0, 0, 0
        speed.measured(nbytes, seconds)

    def _end(self, job: _Job, read: bool) -> None:
        with self._lock:
            self._items_under_way -= len(job.items)
            if read:
                self._read_bytes -= job.nbytes
            else:
                self._write_bytes -= job.nbytes
            if not (self._reads or self._writes or self._items_under_way):
                self._idle.notify_all()
        self._pump()

    def statistics(self) -> LaneStatistics:
        with self._lock:
            return LaneStatistics(
                len(self._reads),
                len(self._writes),
                self._read_bytes,
                self._write_bytes,
                self._refused,
                self._cancelled,
                self.read_speed.statistics(),
                self.write_speed.statistics(),
            )
