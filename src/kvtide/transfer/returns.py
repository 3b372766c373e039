"""Prompts that their callers expect back: what has left DRAM by then is brought back shortly before.

For each there is one moment to look: so long before its return as reading all of it takes, by the measured speed of the
slowest tier, twice that and half a second at least. What is in DRAM then needs nothing. Otherwise one load is begun, in
the background and only into room that there is, or that colder blocks give (``Pipeline.may_bring``); if there is none
nothing is said. A prompt that is used before, or whose session ends, is forgotten, and of blocks that were dropped
meanwhile nothing is found.

All of it is bounded: so many prompts, of so many blocks together (of the session that has most, the one that is due
last gives way), and few loads at a time; and while there is no room, it is looked for once a second, because that looks
at all of DRAM. The store's housekeeping thread does the work (store/housekeeping.py).
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
from kvtide.index.index import Index
from kvtide.plan.cost import Speed
from kvtide.transfer.transfer import Transfer

__all__ = ["PrefetchBackend", "Returns"]

_PROMPTS, _BLOCKS = 4096, 1 << 20
"""That are remembered, at most."""
_LEAST, _LONGEST = 0.5, 60.0
"""Seconds before its return at which a prompt is looked at, at least and at most."""
_AT_ONCE = 2
"""Loads under way."""
_PAUSE = 1.0
"""Seconds until room is looked for again, after there was none."""
_DIGEST = 32


class PrefetchBackend(Protocol):
    """Whoever expects a prompt, by the digests of its blocks."""

    def bring_back(self, joined: bytes, seconds: float) -> Transfer | None:
        """Begin to bring what has left DRAM of a prompt that is back in so many seconds; None if there is nothing to
        bring, or no room for it."""


@dataclass(slots=True, eq=False)
class _Expected:
    backend: PrefetchBackend
    joined: bytes
    back: float
    """When, on the monotonic clock."""
    place: tuple[float, int]
    """When to look, and a number of its own: its place among the others."""
    ended: bool = False
    """Whether its session has ended."""

    @property
    def blocks(self) -> int:
        return len(self.joined) // _DIGEST

    @property
    def last(self) -> bytes:
        """The digest of its last block, which names all of it."""
        return self.joined[-_DIGEST:]


class Returns:
    """Of one store. Safe from any thread; nobody waits for it."""

    def __init__(
        self, clock: Clock, index: Index, counts: Counter[str], speeds: Sequence[Speed], wake: Callable[[], None]
    ) -> None:
        """``speeds`` of the tiers below DRAM; ``wake`` whoever calls ``step`` when something is ``due``."""
        self._clock = clock
        self._index = index
        self._counts = counts
        self._speeds = speeds
        self._wake = wake
        self._lock = threading.Lock()
        """Whoever has it takes no other."""
        self._numbers = itertools.count()
        self._places: list[tuple[float, int]] = []
        self._waiting: dict[tuple[float, int], _Expected] = {}
        """Those to be looked at, by their place; and the places in order."""
        self._known: dict[PrefetchBackend, dict[int, dict[bytes, _Expected]]] = {}
        """Those, and the ones that were brought lately, by desk, number of blocks and last digest."""
        self._brought: deque[_Expected] = deque()
        self._under_way: dict[_Expected, Transfer | None] = {}
        self._blocks = 0
        self._next = 0.0
        """Before this there is no use in looking for room."""

    def __repr__(self) -> str:
        return f"<Returns {len(self._waiting)} expected, {len(self._under_way)} under way>"

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def wants_uses(self) -> bool:
        """Whether ``used`` has anything to do."""
        return bool(self._known)

    def expect(self, backend: PrefetchBackend, joined: bytes, nbytes: int, returns_in: float) -> None:
        """A prompt of so many bytes is expected back in so many seconds."""
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
        """Of the session that has most of them, the one that is due last. Under the lock."""
        count = Counter(expected.backend for expected in self._waiting.values())
        most = max(count.values())
        return next(
            expected for place in reversed(self._places) if count[(expected := self._waiting[place]).backend] == most
        )

    def used(self, backend: PrefetchBackend, blocks: int, parent: Callable[[int], bytes]) -> None:
        """A prompt was asked for; ``parent`` is the digest before a block. What it extends is back."""
        in_time = 0
        with self._lock:
            for length, some in list(self._known.get(backend, {}).items()):
                if length <= blocks and (found := some.get(parent(length))) is not None:
                    in_time += found in self._brought
                    self._strike(found)
        if in_time:
            with self._index.lock:
                self._counts["prompts brought back in time"] += in_time

    def forget(self, backend: PrefetchBackend) -> None:
        """Its session has ended."""
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
        """Forget a prompt. Under the lock."""
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
        """It is not to be looked at any more. Under the lock.

        Its place goes first, and comes last: whoever is interrupted leaves no place without a prompt.
        """
        at = bisect_left(self._places, found.place)
        if at < len(self._places) and self._places[at] == found.place:
            del self._places[at]
            self._blocks = self._blocks - found.blocks if self._places else 0
        self._waiting.pop(found.place, None)

    # -- for the housekeeping thread ----------------------------------------------------------------------

    def due(self) -> float:
        """In how many seconds there is something to do; infinity: not before it wakes somebody."""
        with self._lock:
            if not self._places or len(self._under_way) >= _AT_ONCE:
                return float("inf")
            return max(0.0, max(self._places[0][0], self._next) - self._clock.monotonic())

    def step(self) -> None:
        """Look at one prompt that is due, and begin to bring it."""
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
            if now < found.back:  # else whoever looks was late, and there is nothing to be in time for
                transfer = found.backend.bring_back(found.joined, found.back - now)
        finally:
            if transfer is None:
                self._ended(found, brought=False)
        if transfer is None:
            if now < found.back:
                self._next = now + _PAUSE
            return
        with self._index.lock:
            self._counts["prompts brought back"] += 1
        begun = transfer
        with self._lock:
            self._under_way[found] = begun
            over = found.ended
        transfer.on_end(lambda: self._ended(found, brought=not begun.failed))
        if over:  # its session has ended meanwhile
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
