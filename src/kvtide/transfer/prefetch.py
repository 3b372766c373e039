"""Prefetches prompts that their callers expect back: blocks that have left DRAM are loaded shortly before the return.

Each prompt is checked once. The lead time is twice the time to read all of it at the measured speed of the slowest
tier, but at least half a second. Blocks that are in DRAM then need nothing. Otherwise one load begins, in the
background, and only into space that is free or that colder blocks release (``Pipeline.has_space_for_expected``); if
there is none, nothing is loaded and no error is reported. A prompt that is used earlier, or whose session ends, is
forgotten. Blocks that were dropped meanwhile are not found.

All of it is bounded: the number of prompts, their total blocks (the session with the most prompts loses the one due
last), and the loads under way. When there is no space, the next check waits a second, because it scans all of DRAM. The
store's housekeeping thread does the work (store/housekeeping.py).
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtide.clock import Clock
from kvtide.counts import Count
from kvtide.index.index import Index
from kvtide.plan.tier_speed import Speed
from kvtide.transfer.transfer import Transfer

__all__ = ["PrefetchBackend", "Prefetcher"]

_PROMPTS, _BLOCKS = 4096, 1 << 20
"""The most prompts, and blocks of all prompts together, that are remembered."""
_LEAST, _LONGEST = 0.5, 60.0
"""Minimum and maximum lead time, in seconds before the return, at which a prompt is checked."""
_AT_ONCE = 2
"""Maximum number of loads under way."""
_PAUSE = 1.0
"""Seconds until the next check after there was no space."""
_DIGEST = 32


class PrefetchBackend(Protocol):
    """The interface to a session's backend, which loads a prompt by the digests of its blocks."""

    def bring_back(self, joined: bytes, seconds: float) -> Transfer | None:
        """Begin to load the blocks that have left DRAM of a prompt that returns in ``seconds``; None if nothing is
        missing, or there is no space for it."""


@dataclass(slots=True, eq=False)
class _Expected:
    backend: PrefetchBackend
    joined: bytes
    back: float
    """Expected time of the return, on the monotonic clock."""
    place: tuple[float, int]
    """Time of the check and a unique number: the sort key."""
    ended: bool = False

    @property
    def blocks(self) -> int:
        return len(self.joined) // _DIGEST

    @property
    def last(self) -> bytes:
        """The digest of the last block, which identifies the whole prompt."""
        return self.joined[-_DIGEST:]


class Prefetcher:
    """The expected prompts of one store. Thread-safe; no caller waits for it."""

    def __init__(
        self, clock: Clock, index: Index, counts: Counter[str], speeds: Sequence[Speed], wake: Callable[[], None]
    ) -> None:
        """``speeds``: of the tiers below DRAM; ``wake`` wakes the thread that calls ``step`` when a check is
        ``due``."""
        self._clock = clock
        self._index = index
        self._counts = counts
        self._speeds = speeds
        self._wake = wake
        self._lock = threading.Lock()
        """A thread that has this lock takes no other lock."""
        self._numbers = itertools.count()
        self._places: list[tuple[float, int]] = []
        self._waiting: dict[tuple[float, int], _Expected] = {}
        """Prompts to be checked, by sort key; ``_places`` has the sorted keys."""
        self._known: dict[PrefetchBackend, dict[int, dict[bytes, _Expected]]] = {}
        """Prompts to be checked and prompts loaded lately, by backend, number of blocks and last digest."""
        self._brought: deque[_Expected] = deque()
        self._under_way: dict[_Expected, Transfer | None] = {}
        self._blocks = 0
        self._next = 0.0
        """Time before which a search for space is useless."""

    def __repr__(self) -> str:
        return f"<Prefetcher {len(self._waiting)} expected, {len(self._under_way)} under way>"

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def wants_uses(self) -> bool:
        """Whether ``used`` has anything to do."""
        return bool(self._known)

    def expect(self, backend: PrefetchBackend, joined: bytes, nbytes: int, returns_in: float) -> None:
        """Record that a prompt of ``nbytes`` bytes is expected back in ``returns_in`` seconds."""
        if not self._speeds:
            return
        now = self._clock.monotonic()
        lead = max(2 * max(speed.seconds(nbytes) for speed in self._speeds), _LEAST)
        due = max(now, now + returns_in - min(lead, _LONGEST))
        with self._lock:
            found = _Expected(backend, joined, now + returns_in, (due, next(self._numbers)))
            before = self._known.get(backend, {}).get(found.blocks, {}).get(found.last)
            if before is not None:
                self._strike(before)
            self._known.setdefault(backend, {}).setdefault(found.blocks, {})[found.last] = found
            self._waiting[found.place] = found
            self._blocks += found.blocks
            insort(self._places, found.place)
            while len(self._places) > _PROMPTS or self._blocks > _BLOCKS:
                self._strike(self._one_too_many())
        self._wake()

    def _one_too_many(self) -> _Expected:
        """The prompt due last among those of the session with the most. Call with the lock held."""
        count = Counter(expected.backend for expected in self._waiting.values())
        most = max(count.values())
        return next(
            expected for place in reversed(self._places) if count[(expected := self._waiting[place]).backend] == most
        )

    def used(self, backend: PrefetchBackend, blocks: int, parent: Callable[[int], bytes]) -> None:
        """Record that a prompt was requested; ``parent`` returns the digest before a block. Expected prompts that it
        extends have returned."""
        in_time = 0
        with self._lock:
            for length, some in list(self._known.get(backend, {}).items()):
                if length <= blocks and (found := some.get(parent(length))) is not None:
                    in_time += found in self._brought
                    self._strike(found)
        if in_time:
            with self._index.lock:
                self._counts[Count.BROUGHT_BACK_IN_TIME] += in_time

    def forget(self, backend: PrefetchBackend) -> None:
        """Forget the prompts of a session that has ended."""
        with self._lock:
            for some in list(self._known.get(backend, {}).values()):
                for found in list(some.values()):
                    self._strike(found)
            self._known.pop(backend, None)
            for expected in self._under_way:
                expected.ended = expected.ended or expected.backend is backend
            left = [t for e, t in self._under_way.items() if e.backend is backend and t is not None]
        for transfer in left:
            transfer.cancel()

    def _strike(self, found: _Expected) -> None:
        """Forget a prompt. Call with the lock held."""
        self._take(found)
        if found in self._brought:
            self._brought.remove(found)
        lengths = self._known.get(found.backend, {})
        some = lengths.get(found.blocks, {})
        some.pop(found.last, None)
        if not some:
            lengths.pop(found.blocks, None)
        if not lengths:
            self._known.pop(found.backend, None)

    def _take(self, found: _Expected) -> None:
        """Remove a prompt from those to be checked. Call with the lock held.

        Its sort key is removed first and added last, so that an interrupt leaves no key without a prompt.
        """
        at = bisect_left(self._places, found.place)
        if at < len(self._places) and self._places[at] == found.place:
            del self._places[at]
            self._blocks = self._blocks - found.blocks if self._places else 0
        self._waiting.pop(found.place, None)

    # -- for the housekeeping thread ----------------------------------------------------------------------

    def due(self) -> float:
        """Seconds until there is work; infinity: none until ``wake`` is called."""
        with self._lock:
            if not self._places or len(self._under_way) >= _AT_ONCE:
                return float("inf")
            return max(0.0, max(self._places[0][0], self._next) - self._clock.monotonic())

    def step(self) -> None:
        """Check one prompt that is due, and begin to load it."""
        with self._lock:
            now = self._clock.monotonic()
            if not self._places or len(self._under_way) >= _AT_ONCE:
                return
            if max(self._places[0][0], self._next) > now:
                return
            found = self._waiting[self._places[0]]
            self._take(found)
            self._under_way[found] = None
        transfer = None
        try:
            if now < found.back:  # otherwise the check came too late to be useful
                transfer = found.backend.bring_back(found.joined, found.back - now)
        finally:
            if transfer is None:
                self._ended(found, brought=False)
        if transfer is None:
            if now < found.back:
                self._next = now + _PAUSE
            return
        with self._index.lock:
            self._counts[Count.BROUGHT_BACK] += 1
        begun = transfer
        with self._lock:
            self._under_way[found] = begun
            over = found.ended
        transfer.on_end(lambda: self._ended(found, brought=not begun.failed))
        if over:  # the session has ended meanwhile
            transfer.cancel()

    def _ended(self, found: _Expected, *, brought: bool) -> None:
        with self._lock:
            self._under_way.pop(found, None)
            here = self._known.get(found.backend, {}).get(found.blocks, {}).get(found.last) is found
            if here and brought:
                self._brought.append(found)
                if len(self._brought) > _PROMPTS // 16:
                    self._strike(self._brought[0])
            elif here:
                self._strike(found)
        self._wake()
