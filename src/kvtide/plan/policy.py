"""How blocks are ranked for eviction: small classes, one per idea, all leaf first.

A *policy* only ranks: lower score, sooner out. It keeps its facts in the index's columns, which ``Uses`` fills in as
blocks are used, so that a whole tier is ranked by a few array operations. One policy stands for one tier.

Leaf first is the law that every policy keeps: a block scores above all its descendants, always, because a block
without its parents is of no use. A block is never used without its parents, so whatever only grows with use may be a
score; ``tests/plan/test_policy.py`` holds every policy to that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtide.index.index import Index, Rows
from kvtide.plan.history import Curves, Kinds, Marks
from kvtide.plan.shadow import Shadow

__all__ = ["PRIORITY", "Duel", "Lru", "Policy", "Reuse", "Scores", "make"]

Scores = npt.NDArray[np.int64]

PRIORITY = 48
"""A priority counts for this many bits of ticks."""


class Policy(Protocol):
    """Ranks the rows of one tier. ``score`` and ``used`` are called under the index's lock and must not block."""

    learns: bool
    """Whether it wants ``used`` and ``learn``."""

    def score(self, rows: Rows) -> Scores:
        """How much each is worth keeping; the lowest leaves first."""

    def used(self, rows: Rows, kinds: Kinds | None, now: int) -> None:
        """These blocks of one chain, head first, are in use; ``kinds`` says what each is, once that is known."""

    def watch(self, marks: Marks, kinds: Kinds, counted: npt.NDArray[np.bool_], now: int) -> None:
        """The same, later and off the caller's path, for those that learn from it."""

    def learn(self, curves: Curves) -> None:
        """When and how often blocks of each kind come back, as far as it is known by now."""

    def room(self) -> int:
        """About how many blocks its tier holds when it is full; 0 if nobody knows yet, or it does not matter."""

    @property
    def in_charge(self) -> str:
        """The name of the idea that ranks now."""


class Lru:
    """Least recently used. A prompt's blocks are touched together, head newest, hence leaf first."""

    learns = False

    def __init__(self, index: Index) -> None:
        self._index = index

    def score(self, rows: Rows) -> Scores:
        return (self._index.priority[rows].astype(np.int64) << PRIORITY) + self._index.used[rows]

    def used(self, rows: Rows, kinds: Kinds | None, now: int) -> None: ...

    def watch(self, marks: Marks, kinds: Kinds, counted: npt.NDArray[np.bool_], now: int) -> None: ...

    def learn(self, curves: Curves) -> None: ...

    def room(self) -> int:
        return 0

    @property
    def in_charge(self) -> str:
        return "lru"


_STEPS = np.arange(1 << 16)


def _steps(count: int) -> Scores:
    """0, 1, 2, ...: how deep each block of a chain lies."""
    return _STEPS[:count] if count <= len(_STEPS) else np.arange(count)


def _falling(until: Scores, steps: Scores) -> Scores:
    """The least values that fall strictly from a chain's head to its tail and, ``steps`` added, are not below
    ``until``."""
    raised: Scores = np.maximum.accumulate(until[::-1])[::-1] - steps
    return raised


class Reuse:
    """Keeps each kind of block for as long as that kind, by experience, is worth its room.

    Room has a price: the hits that it could bring elsewhere. For each kind there is a time to stay that brings the
    most hits after paying for the room until then, and the price is the one at which all of that just fits into the
    tier. So a block has a term, until which it should stay, from the moment it is used; the first term to end is the
    lowest score. What was used without being worth anything has a term that ends at once, in order of use.

    A block's term is at least that of each of its descendants: hence leaf first.
    """

    learns = True

    def __init__(self, index: Index, tier: int, room: Callable[[], int]) -> None:
        self._index = index
        self._tier = tier
        index.until[tier] = np.zeros(len(index.used), np.int64)
        self.room = room
        self._stay = np.zeros(0, np.int64)
        """By kind. Replaced as a whole, by the thread that learns."""

    def score(self, rows: Rows) -> Scores:
        return (self._index.priority[rows].astype(np.int64) << PRIORITY) + self._index.until[self._tier][rows]

    def terms(self, kinds: Kinds, now: int) -> Scores:
        """Until when blocks of these kinds, used now, should stay."""
        stay = self._stay
        return stay[kinds] + now if len(stay) else np.full(len(kinds), now)

    def used(self, rows: Rows, kinds: Kinds | None, now: int) -> None:
        until, steps = self._index.until[self._tier], _steps(len(rows))
        term = now if kinds is None else self.terms(kinds, now)
        until[rows] = _falling(np.maximum(until[rows] + steps, term), steps)

    def watch(self, marks: Marks, kinds: Kinds, counted: npt.NDArray[np.bool_], now: int) -> None: ...

    def learn(self, curves: Curves) -> None:
        if room := self.room():
            self._stay, _ = curves.stays(room)

    @property
    def in_charge(self) -> str:
        return "reuse"


class Duel:
    """Follows whichever of two policies would have had more hits lately, on a sample of blocks: by default ``Lru``.

    Each has a shadow, a cache of names without blocks, of the tier's size times the sampled share. Both rank leaf
    first, so a block that is in a shadow has its whole prefix there, and counting blocks is counting prefix hits.
    """

    learns = True

    def __init__(self, index: Index, tier: int, room: Callable[[], int]) -> None:
        self.room = room
        self.lru, self.reuse = Lru(index), Reuse(index, tier, room)
        self.leader: Lru | Reuse = self.lru
        self._shadows = (Shadow(), Shadow())
        self._lead = 0.0
        """By how many sampled hits ``reuse`` was ahead, older ones counting less."""
        self._asked = 0.0
        self._size = 0
        """Of the tier, in blocks, when it was last asked."""

    def score(self, rows: Rows) -> Scores:
        return self.leader.score(rows)

    def used(self, rows: Rows, kinds: Kinds | None, now: int) -> None:
        self.reuse.used(rows, kinds, now)

    def watch(self, marks: Marks, kinds: Kinds, counted: npt.NDArray[np.bool_], now: int) -> None:
        share = _share(self._size)
        here = (marks >> _HIGH) % np.uint64(share) == 0
        if not self._size or not here.any():
            return
        steps = _steps(len(marks))
        order, terms = now - steps, _falling(self.reuse.terms(kinds, now), steps)
        names, asked = marks[here].tolist(), counted[here].tolist()
        size = max(1, self._size // share)
        lru, reuse = (
            shadow.use(names, scores[here].tolist(), asked, size)
            for shadow, scores in zip(self._shadows, (order, terms), strict=True)
        )
        fade = 1 - sum(asked) / (_MEMORY * max(size, _FEW))
        self._lead = self._lead * fade + reuse - lru
        self._asked = self._asked * fade + sum(asked)

    def learn(self, curves: Curves) -> None:
        self._size = self.room()
        self.reuse.learn(curves)
        # Ahead by chance is not ahead: half a percent of what was asked for, to change over; nothing, to stay.
        margin = 0.005 * self._asked if self.leader is self.lru else 0.0
        self.leader = self.reuse if self._lead > margin else self.lru

    @property
    def in_charge(self) -> str:
        return self.leader.in_charge


_MEMORY = 4
"""A duel forgets within about this many times as many blocks as the tier holds."""

_FEW = 1000

_HIGH = np.uint64(40)
"""Which bits of a name decide whether it is watched: not those that give it its place in the history."""


def _share(blocks: int) -> int:
    """One of how many blocks is watched in a tier of that many: all of few, one in eight of many, and of very many
    as few as still tell."""
    return 1 if blocks < 8 * _FEW else 8 << max(0, (blocks // (64 * _FEW)).bit_length() - 1)


def make(name: str, index: Index, tier: int, room: Callable[[], int]) -> Policy:
    """The policy of that name in the configuration, for a tier that holds about ``room()`` blocks."""
    match name:
        case "lru":
            return Lru(index)
        case "reuse":
            return Reuse(index, tier, room)
        case _:
            return Duel(index, tier, room)
