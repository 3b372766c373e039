"""The queue in front of a tier: reads before writes, bounded, measured.

A tier accepts everything it is given; the lane decides what to give it. It keeps only a little under way, so that a new
read is not queued behind a gigabyte of writes. Writes beyond ``limit`` bytes are refused at once: the block stays where
it is, and no caller waits.

Callers only put jobs into the queue; threads of the tier take them out (``call_soon``). A caller may be interrupted
anywhere (Ctrl-C, a signal handler that raises), and a job that was half submitted to a tier could be neither trusted
nor repeated: its memory might be filled long after it was given to another block.
"""

from __future__ import annotations

import operator
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress

from kvtide.clock import Clock
from kvtide.plan.tier_speed import Speed, SpeedStatistics
from kvtide.tiers.base import NOWHERE, Miss, Read, ReadDone, ReadResult, Tier, Write

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
    blocks_under_way: int = 0
    read_seconds: float = 0.0
    """Time during which at least one read was under way."""
    write_seconds: float = 0.0


_SHORTEST = 0.002
"""Seconds of work that are measured together at least."""
_LONG = 0.25
"""Seconds after which a read that failed says something about the speed: it ended by a deadline."""
_SPAN = operator.attrgetter("span")


@dataclass(slots=True)
class _BusyPeriod:
    """Work in one direction, without pauses: its duration, its end and its amount."""

    busy: float = 0.0
    last: float = 0.0
    nbytes: int = 0
    items: int = 0
    total: float = 0.0
    """Sum of ``busy`` since the start."""


class _ReadJob:
    """A batch to be read. Nothing it refers to refers back to it, so that its spans are released when it ends and not
    by the garbage collector: they keep memory alive that its tier may have freed."""

    __slots__ = ("cancellable", "done", "give_up", "items", "lane", "nbytes", "started")

    def __init__(self, lane: Lane, items: Sequence[Read], done: ReadDone, give_up: Callable[[], bool]) -> None:
        self.lane = lane
        self.items = items
        self.done = done
        self.give_up = give_up
        self.nbytes = sum(map(len, map(_SPAN, items)))
        self.started = 0.0
        self.cancellable = True
        """Whether it had to wait for other jobs: only then may it be cancelled before it begins."""

    def run(self) -> None:
        self.started = self.lane._clock.monotonic()
        self.lane._tier.read(self.items, self._finish)

    def _finish(self, results: Sequence[ReadResult]) -> None:
        # Missing blocks are detected at once, and say nothing about the speed of the others.
        came = self.nbytes if all(results) else sum(map(len, map(_SPAN, compress(self.items, results))))
        if not came and self.lane._clock.monotonic() - self.started >= _LONG and Miss.FAILED in results:
            came = 1  # as good as nothing: a medium too slow for its deadline must not look fast for ever
        if came:
            self.lane._measure(self.lane._reading, self.lane.read_speed, self, came)
        self.done(results)
        self.lane._end(self)


class _WriteJob:
    __slots__ = ("done", "items", "lane", "nbytes", "started")

    cancellable = False

    def __init__(self, lane: Lane, items: Sequence[Write], done: Callable[[Sequence[int]], None]) -> None:
        self.lane = lane
        self.items = items
        self.done = done
        self.nbytes = sum(map(len, map(_SPAN, items)))
        self.started = 0.0

    def give_up(self) -> bool:
        return False

    def run(self) -> None:
        self.started = self.lane._clock.monotonic()
        self.lane._tier.write(self.items, self._finish)

    def _finish(self, places: Sequence[int]) -> None:
        if NOWHERE not in places:
            self.lane._measure(self.lane._writing, self.lane.write_speed, self, self.nbytes)
        self.done(places)
        self.lane._end(self)


_Job = _ReadJob | _WriteJob


class Lane:
    """One per tier. Thread-safe; calls the tier outside its own lock."""

    def __init__(
        self,
        tier: Tier,
        clock: Clock,
        limit: int,
        max_under_way: int,
        call_soon: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """``max_under_way``: blocks that the tier works on at a time. ``call_soon`` runs a function on a thread that
        belongs to no caller; without it, callers submit jobs to the tier."""
        self._tier = tier
        self._call_soon = call_soon
        self._clock = clock
        self._limit = limit
        self._max_under_way = max_under_way
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._awaited = 0
        """Number of threads waiting until the lane is idle."""
        self._reads: deque[_ReadJob] = deque()
        self._writes: deque[_WriteJob] = deque()
        self._read_bytes = self._write_bytes = 0
        self._items_under_way = self._reads_under_way = self._writes_under_way = 0
        self._under_way: set[_Job] = set()
        self._pumping = False
        self._refused = self._cancelled = 0
        self._reading = _BusyPeriod()
        self._writing = _BusyPeriod()
        self.read_speed = Speed(clock)
        self.write_speed = Speed(clock)

    def __repr__(self) -> str:
        waiting = f"{len(self._reads)} reads, {len(self._writes)} writes waiting"
        return f"<Lane {waiting}, {self._items_under_way} blocks under way>"

    @property
    def read_bytes(self) -> int:
        """Bytes that a new read would wait for."""
        return self._read_bytes

    @property
    def write_bytes(self) -> int:
        """Bytes waiting to be written or being written."""
        return self._write_bytes

    @property
    def write_room(self) -> int:
        """Bytes of writes that would be accepted now."""
        return self._limit - self._write_bytes

    def reserve_write(self, nbytes: int, ignore_limit: bool = False) -> bool:
        """Reserve space for a write of ``nbytes``; returns False and counts a refusal if it exceeds the limit. With
        ``ignore_limit`` it is always accepted."""
        with self._lock:
            # An empty queue accepts a block of any size.
            if ignore_limit or self._write_bytes + nbytes <= self._limit or not self._write_bytes:
                self._write_bytes += nbytes
                return True
            self._refused += 1
            return False

    def read(
        self,
        items: Sequence[Read],
        done: ReadDone,
        cancel: Callable[[], bool],
    ) -> None:
        """Read ``items``. If the read had to wait, ``cancel`` is called just before it starts; if that returns True,
        nothing is read."""
        job = _ReadJob(self, items, done, cancel)
        with self._lock:
            job.cancellable = bool(self._reads) or not self._ready(self._reads_under_way)
            self._reads.append(job)
            self._read_bytes += job.nbytes
            start = self._startable
        if start:
            self._start()

    def write(self, items: Sequence[Write], done: Callable[[Sequence[int]], None]) -> None:
        """Write ``items``, for which ``reserve_write`` returned True before."""
        job = _WriteJob(self, items, done)
        with self._lock:
            self._writes.append(job)
            start = self._startable
        if start:
            self._start()

    def _start(self) -> None:
        if self._call_soon is None:
            self._pump()
        else:
            self._call_soon(self._pump)

    def repair(self) -> None:
        """Recount the waiting bytes after a caller was interrupted, and start every job that can begin.

        The caller makes sure that no other thread is between ``reserve_write`` and ``write``.
        """
        with self._lock:
            jobs = [*self._reads, *self._writes, *self._under_way]
            self._read_bytes = sum(job.nbytes for job in jobs if isinstance(job, _ReadJob))
            self._write_bytes = sum(job.nbytes for job in jobs if isinstance(job, _WriteJob))
        self._start()

    def withdraw(self, items: Sequence[Read]) -> bool:
        """Take back the read of this same batch object, which has not begun: all its results are ``Miss.FAILED``. False
        if it has begun, or has ended."""
        with self._lock:
            job = next((job for job in self._reads if job.items is items), None)
            if job is None:
                return False
            self._reads.remove(job)
            self._begin(job)  # so that ``reading`` says so until its callback has returned
            self._cancelled += 1
        job.done([Miss.FAILED] * len(items))
        self._end(job)
        return True

    def writing(self) -> set[int]:
        """The owners of all blocks waiting to be written or being written."""
        with self._lock:
            jobs = (*self._writes, *self._under_way)
            return {item.owner for job in jobs if isinstance(job, _WriteJob) for item in job.items}

    def reading(self, items: Sequence[Read]) -> bool:
        """Whether this same batch object is waiting to be read or being read."""
        with self._lock:
            return any(job.items is items for job in (*self._reads, *self._under_way))

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until no job waits or is under way."""
        with self._lock:
            self._awaited += 1
            try:
                return self._idle.wait_for(lambda: not (self._reads or self._writes or self._items_under_way), timeout)
            finally:
                self._awaited -= 1

    def _pump(self) -> None:
        # One thread at a time starts jobs, in a loop: a tier may call back before it returns.
        with self._lock:
            if self._pumping:
                return
            self._pumping = True
        while (job := self._next()) is not None:
            if job.cancellable and job.give_up():
                with self._lock:
                    self._cancelled += 1
                self._end(job)
                continue
            job.run()

    @property
    def _startable(self) -> bool:
        """Whether a job may begin and no thread is already starting jobs."""
        if self._pumping:
            return False
        return self._ready(self._reads_under_way) if self._reads else self._ready(self._writes_under_way)

    def _next(self) -> _Job | None:
        with self._lock:
            job: _Job
            if self._reads and self._ready(self._reads_under_way):
                job = self._reads.popleft()
            elif self._writes and not self._reads and self._ready(self._writes_under_way):
                job = self._writes.popleft()
            else:
                self._pumping = False
                return None
            self._begin(job)
            return job

    def _ready(self, such: int) -> bool:
        """Whether one more job may begin when ``such`` of its kind are under way."""
        # A second job is always allowed, however large: otherwise the tier would idle while the last blocks of the
        # first are transferred.
        return self._items_under_way < self._max_under_way or such < 2

    def _begin(self, job: _Job) -> None:
        self._under_way.add(job)
        self._items_under_way += len(job.items)
        if isinstance(job, _ReadJob):
            self._reads_under_way += 1
        else:
            self._writes_under_way += 1

    def _measure(self, period: _BusyPeriod, speed: Speed, job: _Job, nbytes: int) -> None:
        """Measure bytes over a period of work: jobs overlap and end in bursts, so one job's duration says little."""
        with self._lock:
            now = self._clock.monotonic()
            seconds = now - max(job.started, period.last)
            period.busy += seconds
            period.total += seconds
            period.last = now
            period.nbytes += nbytes
            period.items += len(job.items)
            more = self._items_under_way > len(job.items) and period.items < 8 * self._max_under_way
            if period.busy < _SHORTEST or more:
                return
            nbytes, seconds = period.nbytes, period.busy
            period.busy, period.nbytes, period.items = 0.0, 0, 0
        speed.measured(nbytes, seconds)

    def _end(self, job: _Job) -> None:
        with self._lock:
            self._under_way.discard(job)
            self._items_under_way -= len(job.items)
            if isinstance(job, _ReadJob):
                self._read_bytes -= job.nbytes
                self._reads_under_way -= 1
            else:
                self._write_bytes -= job.nbytes
                self._writes_under_way -= 1
            more = bool(self._reads or self._writes)
            if self._awaited and not more and not self._items_under_way:
                self._idle.notify_all()
        if more:
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
                self._items_under_way,
                self._reading.total,
                self._writing.total,
            )
