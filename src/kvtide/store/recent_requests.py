"""Remembers recent requests and why their blocks were missing: for ``explain`` of a past request, and for counts.

The caller's thread only appends to a queue, and only for a match that the engine gave a name, or that missed blocks. Of
those without a name a sample is enough: ten of each half second. A thread of its own finds out the reasons half a
second later, in slices, and takes a fiftieth of a core at most; nobody else waits for it. Records of later events do
not count, so that it need not hurry. All of it takes a fixed amount of memory: the oldest requests are forgotten first.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

from kvtide.clock import Clock
from kvtide.store.explanation import Explanation

__all__ = ["RANGES", "RecentRequest", "RecentRequests", "RecentStatistics"]

log = logging.getLogger("kvtide.store")

RANGES = 100
"""The most ranges of blocks that are kept of a request."""
_SOON = 0.5
"""Seconds after which the reasons are found out."""
_MINUTES = 10
"""Minutes for which misses are counted by reason."""
_WAITING = 1500
"""Bytes that a request takes while its reasons are not known, besides what it keeps for them."""
_REQUEST, _RANGE = 600, 400
"""Bytes that a request and a range of its blocks take after that, at most."""
_SLICE = 0.005
"""Seconds of work after which the thread rests,"""
_RESTS = 49
"""and for how many times as long: many requests must not cost more than a part of a core,"""
_LONGEST = 2.0
"""but no longer: a process that stood still in a slice need not rest for as many times as long."""
_SAMPLE = 10
"""Requests without a name that are taken in each half second."""
_QUEUE = 10_000
"""The most requests that wait for that."""
_CHILD = re.compile(r"\d+_")
"""What vLLM puts before the name of a request of which it makes several outputs."""


class RecentRequest(NamedTuple):
    """A match, as the caller's thread leaves it."""

    name: str
    """The engine's name of the request; empty if it gave none."""
    tenant: bytes
    who: Collection[int]
    """Numbers of the callers that may ask about it."""
    nbytes: int
    """Bytes of memory that it keeps until the reasons are known."""
    explain: Explaining
    later: bool = False
    """Whether it is not the first match of this request: then it replaces the one before."""
    searched: bool = False
    """Whether blocks were still being searched for in shared storage: then it is not known that they are missing, and
    nothing is counted."""


class Explaining(Protocol):
    """Finds out why the blocks of a past match were hits or misses. The result has at most ``RANGES`` ranges."""

    def __call__(self) -> Explanation: ...


@dataclass(frozen=True, slots=True)
class RecentStatistics:
    """Recent requests, and why their blocks were missing."""

    requests: int = 0
    """Requests remembered now."""
    bytes: int = 0
    """Memory that they take, approximately."""
    limit: int = 0
    overlooked: int = 0
    """Requests that were not looked at, because too many came at a time."""
    misses: dict[str, int] = field(default_factory=dict)
    """Missed blocks by reason, since the store was opened, of the requests that were looked at."""
    lately: dict[str, int] = field(default_factory=dict)
    """The same of the last ten minutes."""
    waiting: int = 0
    """Those of ``requests`` that are not counted yet: their reasons are found out within a second or so."""


class _Entry:
    """A request that is remembered."""

    __slots__ = ("counted", "explanation", "nbytes", "request")

    def __init__(self, request: RecentRequest, nbytes: int, counted: bool) -> None:
        self.request: RecentRequest = request
        self.explanation: Explanation | None = None
        """None until its reasons are known."""
        self.nbytes = nbytes
        self.counted = counted
        """Whether its misses, or those of an earlier match of this request, were counted."""


class RecentRequests:
    """Of a store. Thread-safe."""

    def __init__(self, limit: int, clock: Clock) -> None:
        """``limit``: the most bytes; 0 switches it off."""
        self.limit = limit
        self._clock = clock
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        """By a number that grows: the oldest first."""
        self._queue: deque[int] = deque()
        """The numbers of those of which the reasons are not known yet, and of some that were forgotten."""
        self._named: dict[tuple[str, Collection[int]], int] = {}
        """The last one of each name and caller."""
        self._number = 0
        self._waiting = 0
        self._nbytes = 0
        self._overlooked = 0
        self._misses: Counter[str] = Counter()
        self._minutes: dict[int, Counter[str]] = {}
        self._lock = threading.Lock()
        """Never held while reasons are found out: callers have the index lock."""
        self._due: float | None = None
        """When the thread has work to do; None if nothing waits."""
        self._rests_until = 0.0
        self._unnamed = _SAMPLE
        """Requests without a name that may still be taken before the thread has looked at those before, or has worked
        for half a second on others."""
        self._sampled = 0.0
        """When so many were allowed last, while others waited."""
        self._wake: SimpleQueue[bool] = SimpleQueue()
        """Wakes the thread; False ends it. Not a ``threading.Event``: a caller that is interrupted while it sets one
        may leave it locked; this queue, written in C, it cannot."""
        self._woken = -_SOON
        """When it was woken last. Not whether it has looked since: it may look before its waker has noted that."""
        ended = self._wake
        mine = weakref.ref(self, lambda _: ended.put(False))  # it does not keep an otherwise unreferenced store alive
        self._thread = threading.Thread(target=_work, args=(mine, self._wake), name="kvtide-explain", daemon=True)
        if limit:
            self._thread.start()

    def __len__(self) -> int:
        return len(self._entries)

    def takes(self, name: str) -> bool:
        """Whether ``put`` wants a match of that name."""
        if name or self._unnamed > 0:
            return self.limit > 0
        self._overlooked += 1
        return False

    def put(self, request: RecentRequest) -> None:
        """Remember a match, if ``takes`` says so. Does not wait; may be called with the index lock held."""
        nbytes = _WAITING + 4 * len(request.name) + request.nbytes
        with self._lock:
            if not request.name:
                self._unnamed -= 1
            earlier = self._named.get((request.name, request.who)) if request.later else None
            counted = earlier is not None and self._entries[earlier].counted
            if earlier is not None:
                self._remove(earlier)
            while self._nbytes + nbytes > self.limit and (first := self._oldest_known()) is not None:
                self._remove(first)
            if self._nbytes + nbytes > self.limit or self._waiting >= _QUEUE:
                self._overlooked += 1
                return
            self._number += 1
            self._entries[self._number] = _Entry(request, nbytes, counted)
            self._nbytes += nbytes
            self._waiting += 1
            if request.name:
                self._named[request.name, request.who] = self._number
            self._queue.append(self._number)
            now = self._clock.monotonic()
            wake = self._due is None
            if self._due is None:
                self._due = now + _SOON
            elif self._due < now:  # overdue: it rests, or a caller was interrupted before it woke it
                wake = self._woken <= now - _SOON
        if wake:
            self._wake.put(True)  # first: if this is interrupted, the next caller wakes it
            self._woken = now

    def _oldest_known(self) -> int | None:
        """The oldest request, unless its reasons are not known yet. Call with the lock held."""
        number = next(iter(self._entries), None)
        return number if number is not None and self._entries[number].explanation is not None else None

    def _remove(self, number: int) -> None:
        """Forget a request. Call with the lock held."""
        entry = self._entries.pop(number)
        self._nbytes -= entry.nbytes
        self._waiting -= entry.explanation is None
        key = entry.request.name, entry.request.who
        if self._named.get(key) == number:
            del self._named[key]

    def tidy(self) -> float:
        """Find out the reasons of some requests; returns the seconds until the next are due. Called by the thread."""
        if (due := self._due) is None:
            return float("inf")
        if (left := due - self._clock.monotonic()) > 0:
            return left
        if (left := self._rests_until - (began := time.monotonic())) > 0:
            return left
        while (spent := time.monotonic() - began) < _SLICE:
            with self._lock:
                number = next(self._waiting_numbers(), None)
                if number is None:
                    self._due, self._unnamed = None, _SAMPLE
                    return float("inf")
                entry = self._entries[number]
            try:
                self._look(number, entry)
            except BaseException:
                self._forget(number, entry)
                raise
        now = time.monotonic()
        if now >= self._sampled + _SOON:
            self._unnamed, self._sampled = _SAMPLE, now
        rest = min(_RESTS * spent, _LONGEST)
        self._rests_until = now + rest
        return rest

    def _waiting_numbers(self) -> Iterator[int]:
        """Take from the queue those that are still to be looked at. Call with the lock held."""
        while self._queue:
            number = self._queue.popleft()
            entry = self._entries.get(number)
            if entry is not None and entry.explanation is None:
                yield number

    def _look(self, number: int, entry: _Entry) -> Explanation:
        """Find out the reasons of a request, and keep them. Call without the lock."""
        explanation = replace(entry.request.explain(), request=entry.request.name)
        with self._lock:
            if self._entries.get(number) is not entry or entry.explanation is not None:
                return explanation  # it was forgotten or replaced meanwhile, or another thread was quicker
            entry.explanation = explanation
            self._waiting -= 1
            if not entry.counted and not entry.request.searched:
                entry.counted = True
                self._count(explanation)
            nbytes = _REQUEST + _RANGE * len(explanation.blocks) + 4 * len(explanation.request)
            self._nbytes += nbytes - entry.nbytes
            entry.nbytes = nbytes
            entry.request = entry.request._replace(explain=_found_out)  # frees what it kept for the reasons
            while self._nbytes > self.limit and (first := self._oldest_known()) is not None:
                self._remove(first)
        return explanation

    def _forget(self, number: int, entry: _Entry) -> None:
        """Forget a request whose reasons cannot be found out: what waits is not forgotten for others."""
        with self._lock:
            if self._entries.get(number) is entry and entry.explanation is None:
                self._remove(number)

    def _count(self, explanation: Explanation) -> None:
        if missed := explanation.by_reason():
            minute = int(explanation.now // 60)
            self._minutes.setdefault(minute, Counter()).update(missed)
            for past in sorted(self._minutes)[:-_MINUTES]:
                del self._minutes[past]
            self._misses.update(missed)

    def find(self, name: str, who: Collection[int]) -> Explanation | None:
        """The last request of that name, if a caller with these numbers made it. An empty name: the last of all.

        An engine may continue the name that its user knows with a number of its own, after a hyphen, or begin it with
        one. A request that has the very name goes first.
        """
        mine = set(who)
        with self._lock:
            near = None
            for number, entry in reversed(self._entries.items()):
                if mine.isdisjoint(entry.request.who):
                    continue
                known = entry.request.name
                if not name or known == name:
                    break
                if near is None and _continues(known, name):
                    near = number, entry
            else:
                if near is None:
                    return None
                number, entry = near
        return entry.explanation or self._look(number, entry)

    def forget(self, tenant: bytes) -> None:
        """Forget a tenant's requests."""
        with self._lock:
            for number in [n for n, entry in self._entries.items() if entry.request.tenant == tenant]:
                self._remove(number)

    def statistics(self) -> RecentStatistics:
        now = int(self._clock.time() // 60)
        with self._lock:
            lately: Counter[str] = Counter()
            for minute, counts in self._minutes.items():
                if now - minute < _MINUTES:
                    lately.update(counts)
            return RecentStatistics(
                len(self._entries),
                self._nbytes,
                self.limit,
                self._overlooked,
                dict(self._misses),
                dict(lately),
                self._waiting,
            )

    def close(self) -> None:
        """End its thread. May be repeated."""
        self._wake.put(False)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()


def _work(owner: weakref.ref[RecentRequests], wake: SimpleQueue[bool]) -> None:
    seconds = float("inf")
    while True:
        try:
            if not wake.get(timeout=None if seconds == float("inf") else seconds):
                return
        except Empty:
            pass
        recent = owner()
        if recent is None:
            return
        try:
            seconds = recent.tidy()
        except Exception:  # one request, whose reasons stay unknown
            log.exception("the reasons for misses of a request could not be found out")
            seconds = 0.0
        del recent  # otherwise the thread would keep it alive while it sleeps


def _found_out() -> Explanation:
    raise AssertionError("the reasons of this request are known")


def _continues(known: str, name: str) -> bool:
    """Whether an engine made a request's name of the one that its user knows."""
    child = _CHILD.match(known)
    own = known[child.end() :] if child else known
    return own == name or known.startswith(f"{name}-") or own.startswith(f"{name}-")
