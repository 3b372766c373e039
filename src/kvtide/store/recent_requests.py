"""Remembers recent requests and why their blocks were missing: for ``explain`` of a past request, and for counts.

The caller's thread only appends to a queue, and only for a match that the engine gave a name, or that missed blocks. Of
those without a name a sample is enough: a few of each half second. A thread of its own finds out the reasons half a
second later, or a reader does so at once. Records of later events do not count, so that it need not hurry. All of it
takes a fixed amount of memory: the oldest requests are forgotten first.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

from kvtide.clock import Clock
from kvtide.index.work_slices import rest
from kvtide.store.explanation import Explanation

__all__ = ["RecentRequest", "RecentRequests", "RecentStatistics"]

log = logging.getLogger("kvtide.store")

_SOON = 0.5
"""Seconds after which the reasons are found out."""
_MINUTES = 10
"""Minutes for which misses are counted by reason."""
_REQUEST, _RANGE = 600, 400
"""Bytes that a request and a range of its blocks take, at most."""
_RANGES = 100
"""The most ranges of blocks that are kept of a request."""
_TOGETHER = 100
"""Requests of which the reasons are found out at a time."""
_SAMPLE = 10
"""Requests without a name that are taken in that time: finding out the reasons must not cost a part of a core."""
_QUEUE = 10_000
"""The most requests that wait for that."""


class RecentRequest(NamedTuple):
    """A match, as the caller's thread leaves it."""

    name: str
    """The engine's name of the request; empty if it gave none."""
    tenant: bytes
    who: Collection[int]
    """The fingerprints of the identities that may ask about it."""
    nbytes: int
    """Bytes of memory that it keeps until the reasons are known."""
    explain: Explaining


class Explaining(Protocol):
    """Finds out why the blocks of a past match were hits or misses."""

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


class _Past(NamedTuple):
    explanation: Explanation
    tenant: bytes
    who: Collection[int]
    nbytes: int


class RecentRequests:
    """Of a store. Thread-safe."""

    def __init__(self, limit: int, clock: Clock) -> None:
        """``limit``: the most bytes; 0 switches it off."""
        self.limit = limit
        self._clock = clock
        self._queue: deque[RecentRequest] = deque()
        self._waiting = 0
        """Bytes kept by the queue."""
        self._past: deque[_Past] = deque()
        self._nbytes = 0
        self._overlooked = 0
        self._misses: Counter[str] = Counter()
        self._minutes: deque[tuple[int, Counter[str]]] = deque(maxlen=_MINUTES)
        self._lock = threading.Lock()
        self._unnamed = _SAMPLE
        """Requests without a name that may still be taken before the thread has looked at those before."""
        self._wake: SimpleQueue[bool] = SimpleQueue()
        """Wakes the thread; False ends it. Not a ``threading.Event``: a caller that is interrupted while it sets one
        may leave it locked; this queue, written in C, it cannot."""
        self._awake = False
        """Whether the thread was woken, and has not looked since."""
        ended = self._wake
        mine = weakref.ref(self, lambda _: ended.put(False))  # it does not keep an otherwise unreferenced store alive
        self._thread = threading.Thread(target=_work, args=(mine, self._wake), name="kvtide-explain", daemon=True)
        if limit:
            self._thread.start()

    def takes(self, name: str) -> bool:
        """Whether ``put`` wants a match of that name."""
        if name or self._unnamed > 0:
            return self.limit > 0
        self._overlooked += 1
        return False

    def put(self, request: RecentRequest) -> None:
        """Remember a match, if ``takes`` says so. Does not wait."""
        if not request.name:
            self._unnamed -= 1
        queue = self._queue
        if self._waiting + request.nbytes > self.limit or len(queue) >= _QUEUE:
            self._overlooked += 1
            return
        self._waiting += request.nbytes  # may drift when threads compete; it is set to 0 whenever the queue is empty
        queue.append(request)
        if not self._awake:
            self._wake.put(True)  # first: if this is interrupted, the next caller wakes it
            self._awake = True

    def look(self) -> bool:
        """Find out the reasons of some requests; returns whether more are left. Called by the thread."""
        self._awake = False
        self._look(_TOGETHER)
        return bool(self._queue)

    def _look(self, most: int) -> None:
        for _ in range(most):
            with self._lock:
                try:
                    request = self._queue.popleft()
                except IndexError:
                    self._waiting, self._unnamed = 0, _SAMPLE
                    return
                self._waiting -= request.nbytes
                self._keep(replace(request.explain(), request=request.name), request)

    def _keep(self, explanation: Explanation, request: RecentRequest) -> None:
        if missed := explanation.by_reason():
            minute = int(explanation.now // 60)
            if not self._minutes or self._minutes[-1][0] != minute:
                self._minutes.append((minute, Counter()))
            self._minutes[-1][1].update(missed)
            self._misses.update(missed)
        explanation = replace(explanation, blocks=explanation.blocks[:_RANGES])
        nbytes = _REQUEST + _RANGE * len(explanation.blocks) + len(explanation.request)
        self._past.append(_Past(explanation, request.tenant, request.who, nbytes))
        self._nbytes += nbytes
        while self._past and self._nbytes > self.limit:
            self._nbytes -= self._past.popleft().nbytes

    def find(self, name: str, who: Collection[int]) -> Explanation | None:
        """The last request of that name, if a caller of these identities made it. An empty name: the last of all.

        An engine may continue the name that its user knows with a number of its own, after a hyphen.
        """
        mine = set(who)

        def wanted(known: str, whose: Collection[int]) -> bool:
            return (not name or known == name or known.startswith(f"{name}-")) and not mine.isdisjoint(whose)

        for request in reversed(list(self._queue)):
            if wanted(request.name, request.who):
                return replace(request.explain(), request=request.name)
        with self._lock:
            for past in reversed(self._past):
                if wanted(past.explanation.request, past.who):
                    return past.explanation
        return None

    def forget(self, tenant: bytes) -> None:
        """Forget a tenant's requests."""
        for request in list(self._queue):
            if request.tenant == tenant:
                with contextlib.suppress(ValueError):  # the thread has taken it meanwhile
                    self._queue.remove(request)
        with self._lock:
            kept = [past for past in self._past if past.tenant != tenant]
            self._past, self._nbytes = deque(kept), sum(past.nbytes for past in kept)

    def statistics(self) -> RecentStatistics:
        self._look(_TOGETHER)
        now = int(self._clock.time() // 60)
        with self._lock:
            lately: Counter[str] = Counter()
            for minute, counts in self._minutes:
                if now - minute < _MINUTES:
                    lately.update(counts)
            nbytes = self._nbytes + self._waiting
            return RecentStatistics(
                len(self._past), nbytes, self.limit, self._overlooked, dict(self._misses), dict(lately)
            )

    def close(self) -> None:
        """End its thread. May be repeated."""
        self._wake.put(False)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()


def _work(owner: weakref.ref[RecentRequests], wake: SimpleQueue[bool]) -> None:
    while wake.get():
        try:
            if not wake.get(timeout=_SOON):
                return
        except Empty:
            pass
        more = True
        while more:
            recent = owner()
            if recent is None:
                return
            try:
                more = recent.look()
            except Exception:  # one request, whose reasons stay unknown
                log.exception("the reasons for misses of a request could not be found out")
            del recent  # otherwise the thread would keep it alive while it sleeps
            rest()
