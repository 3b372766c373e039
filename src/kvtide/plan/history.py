"""What is remembered of blocks after they leave a tier: how often they returned, and after how long.

The index forgets a block that left all tiers. A few bytes of it stay here, in a table of fixed size; when two names
collide, the newer one replaces the older. The table provides what a policy cannot see in a tier: that a block being
stored now was present before, and after what time each kind of block returns. For a large tier the table has only a
sample of the names. A block outside the sample has at least as many returns as a deeper block of its chain, because no
block returns without its parents.

Time is counted in blocks used. For each *kind* (see ``UsageTracker``) the table yields a survival curve. A block that
was used again is an event at its age. A block that was not used again yet, or that was replaced in the table, shows
only that it took longer (a censored observation).

Most kinds are seen rarely, and the blocks of one prompt return together, so evidence is counted in prompts, not in
blocks. The prior for a kind is the usual curve, adjusted by the effect of each trait by itself; observations of the
kind correct it as they accumulate. Ages that few blocks have reached are assumed to bring as many returns as the age
before, for each doubling of time: if nothing is known of kinds, the policy is then equal to least recently used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtide.plan.recorded_uses import Counts, Marks, Mask, Numbers, Uses

__all__ = ["MANY", "Curves", "History"]

Table = npt.NDArray[np.float64]

MANY = 250
"""Returns are counted up to this number."""
_STEPS = 2
"""Number of age steps for each doubling."""
_AGES = 36 * _STEPS
_ENDS = np.concatenate([[0.0], 2.0 ** (np.arange(1, _AGES + 1) / _STEPS)])
"""The start of each age step, and the end of the last."""
_WIDTHS = np.diff(_ENDS)
_THIN = 15.0
"""Observations of a kind weigh as much as its traits when they come from this many prompts."""
_FEW = 2.0
"""Observations of a trait weigh as much as the usual curve when they come from this many prompts."""
_SMOOTH = 20.0
"""Observations of an age weigh as much as the age before when they come from this many prompts."""
_FIRST = 0.01
"""The share of just used blocks that return at once, as long as nothing was seen."""
_ALIKE = 3.0
"""The number of blocks of a kind in a prompt is taken from all kinds until the kind was seen in this many prompts."""
_LEAST = 1e-6
"""Avoids division by zero."""
_PLACES = 1 << 14
_MOST = 1 << 19
"""Initial and maximum number of entries in the table."""
_PART = 1 << 16
"""Entries processed together: this takes little memory compared to the table."""
_TIMES = 16
"""The table remembers this many times the blocks that a tier holds."""
_HIGH = np.uint64(20)
"""The bits of a name that decide whether it is in the sample: those above the bits that select its entry."""


@dataclass(frozen=True, slots=True)
class Curves:
    """For each kind and each duration in the tier: the hits that a block brings by then, and the time that it has
    stayed."""

    hits: Table
    """By kind and age step, rising from 0."""
    time: Table
    rates: npt.NDArray[np.float64]
    """Blocks of each kind used per unit of time, which is one block used."""

    def stays(self, capacity: int, bounded: bool = False) -> tuple[Numbers, npt.NDArray[np.float64]]:
        """How long each kind should stay so that a tier of ``capacity`` blocks brings the most hits, and the hits per
        block. ``bounded``: no kind stays much longer than all could stay equally."""
        kinds = np.arange(len(self.rates))
        most = _AGES
        if bounded:
            most = min(most, int(np.searchsorted(self.rates @ self.time, capacity)) + 1)
        hits, time = self.hits[:, : most + 1], self.time[:, : most + 1]
        seen = np.flatnonzero(self.rates)
        rates, seen_hits, seen_time, each = self.rates[seen], hits[seen], time[seen], np.arange(len(seen))
        low, high = -40.0, 4.0
        for _ in range(24):  # bisection of the price of space, as a power of two
            price = (low + high) / 2
            best = np.argmax(seen_hits - 2.0**price * seen_time, axis=1)
            if rates @ seen_time[each, best] > capacity:
                low = price
            else:
                high = price
        best = np.argmax(hits - 2.0**high * time, axis=1)
        return _ENDS[best].astype(np.int64), hits[kinds, best]


class _Places:
    """The table, of one name in ``share``: the last use, its kind, and the number of returns."""

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
        """Mask of names in the sample."""
        mine: Mask = (marks & self._others) == 0
        return mine


class History:
    """See the module docstring. ``returns`` is thread-safe; the rest is for the learning thread."""

    def __init__(self, traits: tuple[int, ...], lasting: int) -> None:
        kinds = math.prod(traits)
        self._traits = traits
        """Number of values of each trait; a kind's number is composed of its traits."""
        self.lasting = lasting
        """The time after which an observation counts half."""
        self._places = _Places(_PLACES, 1)
        self._came = np.zeros((kinds, _AGES))
        self._lost = np.zeros((kinds, _AGES))
        self._used = np.zeros(kinds)
        self._prompts = np.zeros(kinds)
        """Number of prompts in which each kind was used."""
        self._span = 0.0
        """The time over which ``_used`` was counted, divided by the sampling factor."""
        self._now = 0

    def returns(self, marks: Marks) -> Counts:
        """How often blocks of one chain, first block first, that are being stored returned before; 0 for unknown
        blocks."""
        places = self._places
        at = places.at(marks)
        count: Counts = np.minimum(places.returns[at], MANY - 1) + np.int16(1)
        count *= places.names[at] == marks
        if places.share > 1:
            count = np.maximum.accumulate(count[::-1])[::-1]
        return count

    def fit(self, blocks: int) -> None:
        """Enlarge the table for a tier of ``blocks``."""
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

    def see(self, uses: Uses) -> None:
        """Record uses of blocks."""
        places = self._places
        at = places.at(uses.marks)
        chosen = places.sampled(uses.marks) & uses.noted
        # Where two uses have the same entry, the second one finds what the first one wrote.
        position, written = uses.before(at, chosen)
        names = np.where(written, uses.marks[position], places.names[at])
        times = np.where(written, uses.times[position], places.times[at])
        was = np.where(written, uses.kinds[position], places.kinds[at])
        same = names == uses.marks
        ages = uses.times - times
        steps, weights = _steps(ages), self._weights(ages)
        came = same & uses.ended & chosen
        lost = ~same & (names != 0) & chosen
        again = same & ~uses.ended & chosen
        np.add.at(self._came, (was[came], steps[came]), weights[came])
        np.add.at(self._lost, (was[lost], steps[lost]), weights[lost])
        np.add.at(self._used, uses.kinds[chosen], 1)
        np.add.at(self._prompts, uses.once_in_each(uses.kinds, chosen), 1)
        np.add.at(self._used, was[again], -1)
        np.add.at(self._prompts, uses.once_in_each(was, again), -1)
        at = at[chosen]
        places.names[at], places.times[at] = uses.marks[chosen], uses.times[chosen]
        places.kinds[at], places.returns[at] = uses.kinds[chosen], uses.returns[chosen]
        now = int(uses.times[-1])
        self._span += (now - self._now) / places.share
        self._now = now

    def _weights(self, ages: Numbers) -> npt.NDArray[np.float64]:
        """The weights of observations of blocks, by the time since their last use."""
        weights: npt.NDArray[np.float64] = np.exp2(ages / -self.lasting)
        return weights

    def curves(self) -> Curves:
        """The curves from everything observed by now."""
        kinds, waiting = len(self._used), self._lost + self._waiting()
        # Of the blocks that reached an age, how many returned before the next? Those lost in between count half.
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
        """The entries of the table, by kind and age step."""
        places, cells = self._places, self._lost.size
        found = np.zeros(cells)
        for first in range(0, len(places.names), _PART):
            full = np.flatnonzero(places.names[first : first + _PART]) + first
            ages = self._now - places.times[full]
            at = places.kinds[full].astype(np.intp) * _AGES + _steps(ages)
            found += np.bincount(at, self._weights(ages), cells)
        return found.reshape(self._lost.shape)

    def _by_traits(self, came: Table, reached: Table, together: float) -> Table:
        """The return rates that each kind would have if its traits acted independently: the first one's effect varies
        with age, the others' effects do not. A prompt has ``together`` blocks of one kind on average."""
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
        """Reduce the weight of what was learned, after ``time`` has passed."""
        self._count_less(0.5 ** (time / self.lasting))

    def _count_less(self, share: float) -> None:
        self._came *= share
        self._lost *= share
        self._used *= share
        self._prompts *= share
        self._span *= share


def _steps(ages: Numbers) -> npt.NDArray[np.intp]:
    """The age step of each age."""
    found: npt.NDArray[np.intp] = np.minimum(_STEPS * np.log2(np.maximum(ages, 1)), _AGES - 1).astype(np.intp)
    return found
