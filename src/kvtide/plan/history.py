"""What is remembered of blocks beyond their stay: how often they came back, and after how long.

A block that left a tier is forgotten by the index; a few bytes of it stay here, in a table of fixed size in which the
newer of two names that have the same place wins. From it comes what a policy cannot see in a tier: that a block
which is stored now was here before, and which kinds of blocks come back after which time. The table is bounded: of
a large tier it has a sample, one name in so many, and what is not in the sample is at least what a deeper block of
its chain is, because nothing comes back without its parents.

Time is counted in blocks used. For each *kind* (see ``Uses``) the table yields a life curve, as for machines of which
some have failed and some still run: a block that was used again is an event at its age; one that was not, yet, or
whose place in the table was taken, says only that it took longer. Of most kinds little is seen, and the blocks of one
prompt come back together: evidence is counted in prompts, not in blocks. A kind is taken at first for what its
traits, each by itself, make of the usual curve; what was seen of the kind itself corrects that as it grows. And of ages
that few blocks have reached it is assumed that they bring as many returns as the age before, for each doubling of time:
with nothing known of kinds, that makes the policy the same as least recently used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["MANY", "Curves", "History"]

Marks = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
Kinds = npt.NDArray[np.int16]
Counts = npt.NDArray[np.int16]
Numbers = npt.NDArray[np.int64]
Table = npt.NDArray[np.float64]

MANY = 250
"""Returns are counted up to here."""
_STEPS = 2
"""Ages are told apart in so many steps for each doubling."""
_AGES = 36 * _STEPS
_ENDS = np.concatenate([[0.0], 2.0 ** (np.arange(1, _AGES + 1) / _STEPS)])
"""Where each step of age begins; the last one's end."""
_WIDTHS = np.diff(_ENDS)
_THIN = 15.0
"""What is seen of a kind counts as much as what its traits say when it comes from this many prompts."""
_FEW = 2.0
"""The same for a trait beside no trait at all."""
_SMOOTH = 20.0
"""The same for an age beside the one before."""
_FIRST = 0.01
"""Of blocks that have just been used, how many come back at once, as long as nothing was seen."""
_ALIKE = 3.0
"""How many blocks of a kind a prompt has is taken from all kinds until it was seen in this many prompts."""
_LEAST = 1e-6
"""Against division by nothing."""
_PLACES = 1 << 14
_MOST = 1 << 19
"""Places of the table, at first and at most."""
_PART = 1 << 16
"""Places that are looked at together: what that takes of memory is little beside the table."""
_TIMES = 16
"""More is remembered than a tier holds, by this factor."""
_HIGH = np.uint64(20)
"""Which bits of a name decide whether it is in the sample: those above the ones that give it its place."""


@dataclass(frozen=True, slots=True)
class Curves:
    """For each kind and each time to stay: the hits that a block brings by then, and the time that it has stayed."""

    hits: Table
    """By kind and step of age, rising from 0."""
    time: Table
    rates: npt.NDArray[np.float64]
    """Blocks of each kind used in a unit of time, one block used."""

    def stays(self, capacity: int, bounded: bool = False) -> tuple[Numbers, npt.NDArray[np.float64]]:
        """How long each kind should stay so that a room of ``capacity`` blocks brings the most hits; and how many each
        block then brings. ``bounded``: none for much longer than all of them could stay alike."""
        kinds = np.arange(len(self.rates))
        most = _AGES
        if bounded:
            most = min(most, int(np.searchsorted(self.rates @ self.time, capacity)) + 1)
        hits, time = self.hits[:, : most + 1], self.time[:, : most + 1]
        seen = np.flatnonzero(self.rates)
        rates, seen_hits, seen_time, each = self.rates[seen], hits[seen], time[seen], np.arange(len(seen))
        low, high = -40.0, 4.0
        for _ in range(24):  # halving: the price of room, as a power of two
            price = (low + high) / 2
            best = np.argmax(seen_hits - 2.0**price * seen_time, axis=1)
            if rates @ seen_time[each, best] > capacity:
                low = price
            else:
                high = price
        best = np.argmax(hits - 2.0**high * time, axis=1)
        return _ENDS[best].astype(np.int64), hits[kinds, best]


class _Places:
    """The table, of one name in ``share``: when it was used last, as which kind, and how often it had come back."""

    __slots__ = ("_mask", "_others", "kinds", "names", "returns", "share", "times")

    def __init__(self, count: int, share: int) -> None:
        self._mask = np.uint64(count - 1)
        self.share = share
        self._others = np.uint64((share - 1) << int(_HIGH))
        self.names = np.zeros(count, np.uint64)
        self.times = np.zeros(count, np.int64)
        self.kinds = np.zeros(count, np.int16)
        self.returns = np.zeros(count, np.uint8)

    def at(self, marks: Marks) -> Marks:
        return marks & self._mask

    def sampled(self, marks: Marks) -> Mask:
        """Which names are in the sample."""
        mine: Mask = (marks & self._others) == 0
        return mine


class History:
    """See the module's text. ``returns`` is for any thread; the rest for one that learns."""

    def __init__(self, traits: tuple[int, ...], lasting: int) -> None:
        kinds = math.prod(traits)
        self._traits = traits
        """A kind's number is made up of that many traits, of so many values each."""
        self.lasting = lasting
        """After so much time something counts half."""
        self._places = _Places(_PLACES, 1)
        self._came = np.zeros((kinds, _AGES))
        self._lost = np.zeros((kinds, _AGES))
        self._used = np.zeros(kinds)
        self._prompts = np.zeros(kinds)
        """In how many prompts each kind was used."""
        self._span = 0.0
        """The time over which ``_used`` was counted, divided as the names are."""
        self._now = 0

    def returns(self, marks: Marks) -> Counts:
        """How often blocks of one chain, head first, that are stored now have come back: 0 for what was not here."""
        places = self._places
        at = places.at(marks)
        count: Counts = np.minimum(places.returns[at], MANY - 1) + np.int16(1)
        count *= places.names[at] == marks
        if places.share > 1:
            count = np.maximum.accumulate(count[::-1])[::-1]
        return count

    def fit(self, blocks: int) -> None:
        """Remember enough for a tier of ``blocks``."""
        old, count = self._places, len(self._places.names)
        while count < min(_TIMES * blocks, _MOST):
            count *= 2
        share = old.share
        while count * share < _TIMES * blocks:
            share *= 2
        if count > len(old.names) or share > old.share:
            new = _Places(count, share)
            full = np.flatnonzero(old.names)
            full = full[new.sampled(old.names[full])]
            at = new.at(old.names[full])
            for name in ("names", "times", "kinds", "returns"):
                getattr(new, name)[at] = getattr(old, name)[full]
            self._places = new
            self._count_less(old.share / share)

    def see(self, marks: Marks, kinds: Kinds, returns: Counts, counted: Mask, now: int) -> None:
        """Blocks of one chain are used. Those not ``counted`` were just before, and are only told apart better now."""
        places = self._places
        if places.share > 1:
            mine = places.sampled(marks)
            marks, kinds, returns, counted = marks[mine], kinds[mine], returns[mine], counted[mine]
        at = places.at(marks)
        before = places.names[at]
        same = before == marks
        was = places.kinds[at]
        ages = now - places.times[at]
        steps, weights = _steps(ages), self._weights(ages)
        came, lost = same & counted, ~same & (before != 0)
        np.add.at(self._came, (was[came], steps[came]), weights[came])
        np.add.at(self._lost, (was[lost], steps[lost]), weights[lost])
        np.add.at(self._used, kinds, 1)
        self._prompts[kinds] += 1  # numpy adds once for each different kind
        again = was[same & ~counted]
        if len(again):
            np.add.at(self._used, again, -1)
            self._prompts[again] -= 1
        places.names[at], places.times[at], places.kinds[at] = marks, now, kinds
        places.returns[at] = returns
        self._span += (now - self._now) / places.share
        self._now = now

    def _weights(self, ages: Numbers) -> npt.NDArray[np.float64]:
        """What blocks that were used so long ago count for."""
        weights: npt.NDArray[np.float64] = np.exp2(ages / -self.lasting)
        return weights

    def curves(self) -> Curves:
        """What is known by now."""
        kinds, waiting = len(self._used), self._lost + self._waiting()
        # Of those that reached an age, how many came back before the next? Who was lost on the way counts half.
        reached = np.cumsum((self._came + waiting)[:, ::-1], axis=1)[:, ::-1] - waiting / 2
        used, prompts = np.maximum(self._used, 0), np.maximum(self._prompts, 0)
        together = used.sum() / max(prompts.sum(), 1.0)
        usual = self._by_traits(self._came, reached, together)
        thin = _THIN * ((used + _ALIKE * together) / (prompts + _ALIKE))[:, np.newaxis]
        rate = (self._came + thin * usual) / np.maximum(reached + thin, _LEAST)
        left = np.cumprod(1 - np.minimum(rate, 1.0), axis=1)
        before = np.concatenate([np.ones((kinds, 1)), left[:, :-1]], axis=1)
        nothing = np.zeros((kinds, 1))
        return Curves(
            np.concatenate([nothing, 1 - left], axis=1),
            np.concatenate([nothing, np.cumsum((before + left) / 2 * _WIDTHS, axis=1)], axis=1),
            np.maximum(self._used, 0) / max(self._span, 1.0),
        )

    def _waiting(self) -> Table:
        """What is in the table, by kind and step of age."""
        places, cells = self._places, self._lost.size
        found = np.zeros(cells)
        for first in range(0, len(places.names), _PART):
            full = np.flatnonzero(places.names[first : first + _PART]) + first
            ages = self._now - places.times[full]
            at = places.kinds[full].astype(np.intp) * _AGES + _steps(ages)
            found += np.bincount(at, self._weights(ages), cells)
        return found.reshape(self._lost.shape)

    def _by_traits(self, came: Table, reached: Table, together: float) -> Table:
        """The rates of coming back that each kind would have if its traits worked alone: the first one's effect
        changes with age, the others' do not. ``together`` blocks of one kind are in a prompt, in the mean."""
        shape = (*self._traits, _AGES // 4, 4)
        traits = len(self._traits)
        came, reached = came.reshape(shape), reached.reshape(shape)
        kinds = tuple(range(traits))
        plain, before, weight = np.empty(_AGES), _FIRST, max(_SMOOTH * together, _LEAST)
        for age, (events, all_) in enumerate(zip(came.sum(kinds).flat, reached.sum(kinds).flat, strict=True)):
            plain[age] = before = (events + weight * before) / (all_ + weight)
        rate = np.broadcast_to(plain.reshape(shape[-2:]), shape).copy()
        few = max(_FEW * together, _LEAST)
        for _ in range(2):  # each trait explains what the others leave
            for trait in kinds:
                rest = tuple(i for i in range(traits + 2) if i != trait and (trait or i != traits))
                expected = (reached * rate).sum(rest, keepdims=True)
                rate *= (came.sum(rest, keepdims=True) + few) / (expected + few)
        flat: Table = np.minimum(rate, 1.0).reshape(len(self._used), _AGES)
        return flat

    def fade(self, time: int) -> None:
        """So much time has passed: let what was learned count less."""
        self._count_less(0.5 ** (time / self.lasting))

    def _count_less(self, share: float) -> None:
        self._came *= share
        self._lost *= share
        self._used *= share
        self._prompts *= share
        self._span *= share


def _steps(ages: Numbers) -> npt.NDArray[np.intp]:
    """Which step of age each is in."""
    found: npt.NDArray[np.intp] = np.minimum(_STEPS * np.log2(np.maximum(ages, 1)), _AGES - 1).astype(np.intp)
    return found
