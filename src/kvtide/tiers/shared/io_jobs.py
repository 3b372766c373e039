"""Work on storage that may hang: batches divided into jobs, I/O threads that run them, and deadlines that always hold.

A call into storage cannot be stopped. So no caller waits for one: a job that was not started by its deadline fails, and
one that was started and has not ended by then is *late*. If a late job uses no memory of the caller, it fails at once,
whatever its outcome. If it does, the storage may still read or fill that memory when it recovers: the caller is told
that the job is late, may stop waiting for the result, and gets the memory back when the job ends.

While a job is late all new jobs fail at once: one request detects that storage hangs, not all of them.

Work that no caller waits for, such as removing thousands of blocks at once, is done a little at a time (``Trickle``).
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar

from kvtide.clock import Clock

__all__ = ["MOST", "Batch", "Jobs", "Trickle"]

T = TypeVar("T")
R = TypeVar("R")
W = TypeVar("W")

MOST = 16
"""The maximum number of items of a job, unless ``submit`` is told another."""
_LOOKS = 8
"""How often a job is checked during its timeout."""
_QUIET = 16
"""So many times in a row there is no job before the watcher sleeps."""
_FEW = 64
"""Items of a trickle that are processed at a time."""


class Batch(Generic[T, R, W]):
    """Items, the function for some of them (``run``), the result of a failed one, and the callback for all results.

    ``late`` is called with all items when one hangs, since all results are reported together. None: the items use no
    memory of a caller, and those that hang simply fail.
    """

    def __init__(
        self,
        verb: str,
        items: Sequence[T],
        run: Callable[[Sequence[T], W], list[R]],
        failed: R,
        done: Callable[[list[R]], None],
        late: Callable[[Sequence[T]], None] | None = None,
        longer: float = 0.0,
    ) -> None:
        """It may take ``longer`` seconds more than other batches."""
        self.verb = verb
        self.items = items
        self.run = run
        self.failed = failed
        self.late = late
        self.longer = longer
        self._done = done
        self._results: list[list[R] | None] = []
        self._left = 0
        self._lock = threading.Lock()

    def cut(self, size: int, due: float) -> list[Job[T, R, W]]:
        """Divide into jobs of that many items."""
        jobs = [Job(self, n, self.items[i : i + size], due) for n, i in enumerate(range(0, len(self.items), size))]
        self._results, self._left = [None] * len(jobs), len(jobs)
        if not jobs:
            self._done([])
        return jobs

    def end(self, number: int, results: list[R]) -> bool:
        """A job ended. Only the first result counts: returns False for any other."""
        with self._lock:
            if self._results[number] is not None:
                return False
            self._results[number] = results
            self._left -= 1
            if self._left:
                return True
        self._done(list(chain.from_iterable(r for r in self._results if r is not None)))
        return True


class Job(Generic[T, R, W]):
    """Some items of a batch, processed together."""

    __slots__ = ("batch", "due", "items", "late", "number", "started", "worker")

    def __init__(self, batch: Batch[T, R, W], number: int, items: Sequence[T], due: float) -> None:
        self.batch = batch
        self.number = number
        self.items = items
        self.due = due
        self.started = self.late = False
        self.worker: W | None = None
        """Who runs it."""

    def fail(self) -> bool:
        return self.batch.end(self.number, [self.batch.failed] * len(self.items))


class Jobs(Generic[W]):
    """Runs jobs on threads, one for each of ``workers``, within ``timeout`` seconds each.

    ``refused`` is called with the verb and the number of items that failed because storage did not answer.
    """

    def __init__(
        self, name: str, workers: Sequence[W], timeout: float, refused: Callable[[str, int], None], clock: Clock
    ) -> None:
        self._timeout = timeout
        self._refused = refused
        self._clock = clock
        self._queue: queue.SimpleQueue[Job[Any, Any, W] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._open: set[Job[Any, Any, W]] = set()
        """Jobs that are queued or running."""
        self._late = 0
        self._idle = False
        """Whether the watcher sleeps until there is a job: after a while without any, because to wake it for each job
        would take longer than a short one."""
        self._rest = 0.0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, args=(w,), name=f"kvtide-{name}-{i}", daemon=True)
            for i, w in enumerate(workers)
        ]
        self._watcher = threading.Thread(target=self._watch, name=f"kvtide-{name}-watch", daemon=True)
        try:
            for thread in (*self._threads, self._watcher):
                thread.start()
        except BaseException:  # out of threads, for example
            self.close()
            raise

    @property
    def hangs(self) -> bool:
        """Whether storage does not answer at the moment."""
        return self._late > 0 or self._clock.monotonic() < self._rest

    def submit(self, batch: Batch[Any, Any, W], most: int = MOST) -> None:
        """Run a batch, in jobs of at most ``most`` items."""
        size = max(1, min(most, -(-len(batch.items) // len(self._threads))))
        jobs = batch.cut(size, self._clock.monotonic() + self._timeout + batch.longer)
        with self._changed:
            refused = self.hangs or self._closed
            if not refused:
                self._open.update(jobs)
                if self._idle:
                    self._changed.notify()
        for job in jobs:
            if refused:
                self._give_up(job)
            else:
                self._queue.put(job)

    def cut(self, items: Sequence[Any], stop: Callable[[W, Sequence[Any]], bool]) -> None:
        """End the batch with these very ``items`` before its time. Jobs that have not begun fail. For others ``stop``
        is called, with the worker and the job's items: it makes the job end soon, or returns True if the job does not
        use the items' memory any more, which makes it fail at once. It is called with a lock, perhaps repeatedly."""
        with self._changed:
            mine = [job for job in self._open if job.batch.items is items]
            free = [job for job in mine if job.worker is None or stop(job.worker, job.items)]
            self._open.difference_update(free)
            self._late -= sum(job.late for job in free)
            for job in free:
                job.late = False
        for job in free:
            job.fail()

    def rest(self) -> None:
        """Storage reported a timeout: do not use it for as long again."""
        self._rest = self._clock.monotonic() + self._timeout

    def _give_up(self, job: Job[Any, Any, W]) -> None:
        if job.fail():
            self._refused(job.batch.verb, len(job.items))

    def _work(self, worker: W) -> None:
        while (job := self._queue.get()) is not None:
            with self._changed:
                if job not in self._open:
                    continue  # it failed before it started
                job.worker = worker
                job.started, job.due = True, self._clock.monotonic() + self._timeout + job.batch.longer
            results = job.batch.run(job.items, worker)
            with self._changed:
                self._open.discard(job)
                self._late -= job.late
                if self._closed:
                    return  # there is no caller any more
            job.batch.end(job.number, results)
            del job  # else the spans of the last job stay alive until the next one

    def _watch(self) -> None:
        quiet = 0
        while True:
            with self._changed:
                self._idle = quiet >= _QUIET
                if self._idle:
                    self._changed.wait_for(lambda: self._open or self._closed)
                    self._idle = False
                if self._closed:
                    return
                self._changed.wait(self._timeout / _LOOKS)
                quiet = 0 if self._open else quiet + 1
                now = self._clock.monotonic()
                over = [job for job in self._open if job.due <= now and not job.late]
                hanging = [job for job in over if job.started]
                for job in hanging:
                    job.late = True
                self._late += len(hanging)
                lost = [job for job in self._open if not job.started and (self._late or job.due <= now)]
                self._open.difference_update(lost)
            for job in hanging:
                if job.batch.late is None:
                    self._give_up(job)
                else:
                    job.batch.late(job.batch.items)
            for job in lost:
                self._give_up(job)

    def close(self) -> None:
        """End when all submitted jobs are done, or late: those that hang then never get a result."""
        for _ in self._threads:
            self._queue.put(None)
        end = self._clock.monotonic() + 2 * self._timeout
        for thread in self._threads:
            if thread.ident is not None:  # else it could not be started
                thread.join(max(0.0, end - self._clock.monotonic()))
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._watcher.ident is not None:
            self._watcher.join()


class Trickle(Generic[T]):
    """Items that no caller waits for, passed to ``do`` so few at a time that other requests are not delayed either.

    ``do`` calls back with the results. If all failed, storage has other problems: the remaining items are ``given_up``.
    """

    def __init__(
        self,
        do: Callable[[list[T], Callable[[Sequence[bool]], None]], None],
        given_up: Callable[[list[T]], None],
    ) -> None:
        self._do = do
        self._given_up = given_up
        self._items: deque[T] = deque()
        self._runs = False
        self._changed = threading.Condition()

    def wait(self, timeout: float) -> None:
        """Wait until nothing is left, or for that many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._runs, timeout)

    def add(self, item: T) -> None:
        with self._changed:
            self._items.append(item)
            begins, self._runs = not self._runs, True
        if begins:
            self._go_on()

    def _go_on(self) -> None:
        some = self._take(_FEW)
        if some:
            self._do(some, self._done)

    def _done(self, results: Sequence[bool]) -> None:
        if not any(results):
            self._given_up(self._take(None))
        else:
            self._go_on()

    def _take(self, most: int | None) -> list[T]:
        """The next items; without a limit, all of them. Without a limit, or if there are none, the trickle ends."""
        with self._changed:
            count = len(self._items) if most is None else min(most, len(self._items))
            self._runs = most is not None and count > 0
            self._changed.notify_all()
            return [self._items.popleft() for _ in range(count)]
