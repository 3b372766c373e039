"""How blocks are ranked for eviction: small classes, one per idea, all leaf first.

A *policy* only ranks: lower score, sooner out. It keeps its facts in the index's columns, which ``UsageTracker`` fills
in as blocks are used, so that a whole tier is ranked by a few array operations. One policy stands for one tier.

Leaf first is the rule that every policy keeps: a block scores above all its descendants, always, because a block
without its parents is of no use. A block is never used without its parents, so whatever only grows with use may be a
score; ``tests/plan/test_policy.py`` holds every policy to that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtide.index.index import Index, Rows
from kvtide.plan.history import Curves
from kvtide.plan.policy_lead import Lead
from kvtide.plan.recorded_uses import Kinds, Uses, falling
from kvtide.plan.shadow_cache import Shadow

__all__ = ["PRIORITY", "Duel", "Lru", "Policy", "Reuse", "Scores", "Terms", "make"]

Scores = npt.NDArray[np.int64]

PRIORITY = 48
"""A priority counts for this many bits of ticks."""


class Policy(Protocol):
    """Ranks the rows of one tier. ``score`` and ``used`` are called under the index's lock and must not block."""

    learns: bool
    """Whether it wants ``used`` and ``learn``."""

    version: int
    """Changes whenever unused blocks may rank in another order."""

    def score(self, rows: Rows) -> Scores:
        """How much each is worth keeping; the lowest leaves first."""

    def used(self, rows: Rows, kinds: Kinds | None, now: int) -> None:
        """These blocks of one chain, head first, are in use; ``kinds`` says what each is, once that is known."""

    def watch(self, uses: Uses) -> None:
        """Learn from uses that ``used`` has reported before, on the learning thread."""

    def learn(self, curves: Curves) -> None:
        """When and how often blocks of each kind come back, as far as it is known by now."""

    def room(self) -> int:
        """About how many blocks its tier holds when it is full; 0 if that is not known yet, or does not matter."""

    @property
    def in_charge(self) -> str:
        """The name of the idea that ranks now."""


class Lru:
    """Least recently used. A prompt's blocks are touched together, head newest, hence leaf first."""

    learns = False
    version = 0

    def __init__(self, index: Index) -> None:
        self._index = index

    def score(self, rows: Rows) -> Scores:
        return (self._index.priority[rows].astype(np.int64) << PRIORITY) + self._index.used[rows]

    def used(self, rows: Rows, kinds: Kinds | None, now: int) -> None: ...

    def watch(self, uses: Uses) -> None: ...

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


class Terms:
    """How long blocks of each kind should stay. A value: the thread that learns replaces it as a whole."""

    __slots__ = ("_bounded", "_stay", "longest")

    def __init__(self, bounded: bool = False, stay: Scores | None = None) -> None:
        self._bounded = bounded
        self._stay = np.zeros(0, np.int64) if stay is None else stay
        """By kind; nothing as long as nothing is known."""
        self.longest = _EVER if stay is None else int(stay.max())
        """The longest of them."""

    def of(self, kinds: Kinds, now: int | Scores) -> Scores:
        """Until when blocks of these kinds, used now, should stay."""
        return self._stay[kinds] + now if len(self._stay) else np.full(len(kinds), now)

    def learned(self, curves: Curves, room: int) -> Terms:
        """The terms for a tier of ``room`` blocks, by what is known now."""
        stay, _ = curves.stays(room, self._bounded)
        return Terms(self._bounded, stay)


class Reuse:
    """Keeps each kind of block for as long as that kind, by experience, is worth its room.

    Room has a price: the hits that it could bring elsewhere. For each kind there is a time to stay that brings the
    most hits after paying for the room until then, and the price is the one at which all of that just fits into the
    tier. So a block has a term, until which it should stay, from the moment it is used; the first term to end is the
    lowest score. What was used without being worth anything has a term that ends at once, in order of use.

    Terms were given when room was perhaps cheaper than it is now. A block therefore scores as if it stayed, after its
    last use, no longer than the longest term that is given now.

    A block's term is at least that of each of its descendants, and it was used no earlier: hence leaf first.
    """

    learns = True

    def __init__(self, index: Index, tier: int, room: Callable[[], int]) -> None:
        self._index = index
        self._tier = tier
        index.until[tier] = np.zeros(len(index.used), np.int64)
        self.room = room
        self.version = 0
        self._terms = Terms()

    @property
    def terms(self) -> Terms:
        return self._terms

    @terms.setter
    def terms(self, terms: Terms) -> None:
        self._terms = terms
        self.version += 1

    def score(self, rows: Rows) -> Scores:
        until = np.minimum(self._index.until[self._tier][rows], self._index.since[rows] + self.terms.longest)
        return (self._index.priority[rows].astype(np.int64) << PRIORITY) + until

    def used(self, rows: Rows, kinds: Kinds | None, now: int) -> None:
        until, steps = self._index.until[self._tier], _steps(len(rows))
        term = now if kinds is None else self.terms.of(kinds, now)
        until[rows] = falling(np.maximum(until[rows] + steps, term), steps)

    def watch(self, uses: Uses) -> None: ...

    def learn(self, curves: Curves) -> None:
        if room := self.room():
            self.terms = self.terms.learned(curves, room)

    @property
    def in_charge(self) -> str:
        return "reuse"


class Duel:
    """Follows whichever policy would have had more hits lately, on a sample of blocks: by default ``Lru``.

    Three are compared. ``lru``; ``reuse``; and ``bounded``, which is ``reuse`` with terms that are not much longer
    than the time for which everything could stay alike. ``bounded`` gains less than ``reuse`` where kinds differ for
    long, and loses little where they only seem to.

    Each has a shadow, a cache of names without blocks, of the tier's size times the sampled share. All rank leaf
    first, so a block that is in a shadow has its whole prefix there, and counting blocks is counting prefix hits.

    A policy takes over when its lead is larger than chance explains (see ``Lead``) and large enough to matter. ``lru``
    takes over on less evidence: it is what the others must not fall behind.
    """

    learns = True

    def __init__(self, index: Index, tier: int, room: Callable[[], int]) -> None:
        self.room = room
        self._lru, self._reuse = Lru(index), Reuse(index, tier, room)
        self._terms = {_BOUNDED: Terms(bounded=True), _REUSE: Terms()}
        self.version = 0
        self._leader = _LRU
        self._shadows = {name: Shadow() for name in _NAMES}
        self._leads = {(one, other): Lead(len(_SPANS)) for i, one in enumerate(_NAMES) for other in _NAMES[:i]}
        self._asked = [0.0] * len(_SPANS)
        """Blocks that were asked for within each span."""
        self._found = dict.fromkeys(_NAMES, 0)
        """Hits of the request under way."""
        self._wanted = 0
        """What it asked for."""
        self._size = 0
        """Of the tier, in blocks, when it was last asked."""

    @property
    def leader(self) -> str:
        """The policy that is followed."""
        return self._leader

    @leader.setter
    def leader(self, name: str) -> None:
        if name != self._leader:
            self._leader = name
            self.version += 1

    def score(self, rows: Rows) -> Scores:
        return self._lru.score(rows) if self.leader == _LRU else self._reuse.score(rows)

    def used(self, rows: Rows, kinds: Kinds | None, now: int) -> None:
        self._reuse.used(rows, kinds, now)

    def watch(self, uses: Uses) -> None:
        share = np.uint64(_share(self._size))
        here = np.flatnonzero((uses.marks >> _HIGH) % share == 0) if self._size else np.zeros(0, np.int64)
        names, asked = uses.marks[here].tolist(), uses.counted[here].tolist()
        since = (uses.times - uses.steps)[here].tolist()
        scores = {_LRU: since}
        for name, terms in self._terms.items():
            scores[name] = uses.falling(terms.of(uses.kinds, uses.times))[here].tolist()
        # A store after a request does not count the first block again: one that does begins a request.
        begins = uses.counted[uses.starts].tolist()
        borders = [*np.searchsorted(here, uses.starts).tolist(), len(here)]
        size = self._shadowed
        for first, last, begin in zip(borders[:-1], borders[1:], begins, strict=True):
            if begin:
                self._end()
            if first < last:
                part = slice(first, last)
                for name, shadow in self._shadows.items():
                    self._found[name] += shadow.use(names[part], scores[name][part], since[part], asked[part], size)
                self._wanted += sum(asked[part])

    @property
    def _shadowed(self) -> int:
        """How many blocks a shadow holds."""
        return max(1, self._size // _share(self._size))

    def _end(self) -> None:
        """A request is over."""
        if not self._wanted:
            return
        size = max(self._shadowed, _FEW)
        fades = [1 - min(1.0, self._wanted / (span * size)) for span in _SPANS]
        for (one, other), lead in self._leads.items():
            lead.add(self._found[one] - self._found[other], fades)
        self._asked = [asked * fade + self._wanted for asked, fade in zip(self._asked, fades, strict=True)]
        self._found = dict.fromkeys(_NAMES, 0)
        self._wanted = 0
        if self.leader != _LRU and self._ahead(_LRU, self.leader, _SHORT)[1] >= _DOUBT:
            self.leader = _LRU

    def learn(self, curves: Curves) -> None:
        self._size = room = self.room()
        if not room:
            return
        for name, terms in self._terms.items():
            self._terms[name] = terms = terms.learned(curves, room)
            self._shadows[name].bound(terms.longest)
        self.leader = self._best()
        # While ``lru`` leads, blocks get the terms of whichever is more likely to take over.
        ahead = _REUSE if self._ahead(_REUSE, _BOUNDED, _MIDDLE)[0] > 0 else _BOUNDED
        self._reuse.terms = self._terms[ahead if self.leader == _LRU else self.leader]
        self.version += self.leader != _LRU

    def _best(self) -> str:
        """The policy to follow from now on."""
        spans = range(len(_SPANS))
        leader = self.leader
        if leader != _LRU and any(self._ahead(_LRU, leader, span)[1] >= _DOUBT for span in spans):
            leader = _LRU
        proven = [name for name in (_BOUNDED, _REUSE) if self._proven(name)]
        if leader == _LRU:
            return max(proven, key=lambda name: self._ahead(name, _LRU, _LONG)[0], default=_LRU)
        for name in proven:
            leads = [self._ahead(name, leader, span)[1] for span in spans] if name != leader else [0.0]
            if max(leads) >= _DOUBT and leads[_SHORT] >= -_DOUBT:
                return name
        return leader

    def _proven(self, name: str) -> bool:
        """Whether it is better than ``lru``, by more than chance explains and by as much as matters."""
        leads = [self._ahead(name, _LRU, span) for span in range(len(_SPANS))]
        enough = (
            deviations >= _PROOF and hits >= _MARGIN * asked
            for (hits, deviations), asked in zip(leads, self._asked, strict=True)
        )
        return min(hits for hits, _ in leads) >= 0 and any(enough)

    def _ahead(self, one: str, other: str, span: int) -> tuple[float, float]:
        """By how much ``one`` leads: in hits, and in standard deviations."""
        if (one, other) in self._leads:
            lead = self._leads[one, other]
            return lead.hits(span), lead.deviations(span)
        lead = self._leads[other, one]
        return -lead.hits(span), -lead.deviations(span)

    @property
    def in_charge(self) -> str:
        return self.leader


_LRU, _BOUNDED, _REUSE = _NAMES = ("lru", "bounded", "reuse")

_EVER = 1 << PRIORITY - 2

_SPANS = (4, 16, 64)
"""Leads are kept over about this many times as many blocks as the tier holds."""
_SHORT, _MIDDLE, _LONG = range(len(_SPANS))

_PROOF = 1.75
"""In standard deviations: the lead over ``lru`` at which another policy may take over."""
_DOUBT = 1.0
"""In standard deviations: the lead at which ``lru`` takes over, or one that has proved itself from another."""
_MARGIN = 0.015
"""A lead matters when it is so much of what was asked for. A change of the leader costs hits in both directions,
because the tier holds what the one before has kept: in a tier of 17,700 blocks, 500 hits were lost after ``lru`` had
taken over again. With a third of this margin, leads of one percent came and went, and cost more than they brought."""

_FEW = 1000

_HIGH = np.uint64(40)
"""Which bits of a name decide whether it is watched: not those that give it its place in the history."""


def _share(blocks: int) -> int:
    """One of how many blocks is watched in a tier of that many: all of few, one in two of more, and of very many about
    ten thousand."""
    return 1 if blocks < 8 * _FEW else 2 << (blocks // (32 * _FEW)).bit_length()


def make(name: str, index: Index, tier: int, room: Callable[[], int]) -> Policy:
    """The policy of that name in the configuration, for a tier that holds about ``room()`` blocks."""
    match name:
        case "lru":
            return Lru(index)
        case "reuse":
            return Reuse(index, tier, room)
        case _:
            return Duel(index, tier, room)
