"""Slots of many sizes in a fixed number of bytes.

Memory and files are allocated in *segments*, each divided into slots of one size. Sizes come from a ladder whose steps
are at most 1/32, so that a compressed block really takes less space and two models side by side waste little. An empty
segment may be re-divided for another size. When a size has no slots left, the tier's owner empties the coldest segment
of another size (see ``kvtide.plan.evict``). So two models that take turns each get the whole budget.

Where a tier has several *trust domains*, a segment belongs to one. It is never re-divided for another, because clients
that have mapped it would see that domain's blocks. The *kind* of a slot is its size and its domain in one number: sizes
are whole pages, so their low bits are free for the domain.

The size of a segment is ``nominal`` as long as all slots are of one size. Where there are many sizes, as with
compression, each has a segment that is only partly in use. With few large segments, most of the budget is then free
slots of sizes that are not requested just now: with 60 sizes and segments of a quarter of the budget, a tier held 8 %
of it.

So in a tier that allows it (``least``) a segment has at most 1/4 of the share that each size would get if all had the
same. Then about 1/8 of the budget is free slots, whatever the number of sizes, and a tier with one model still has
large segments. A tier that compresses expects many ``sizes`` from the start, or the first few would get most of the
budget. A segment is a file with a length of its own, so segments of different lengths fit into the budget without gaps;
their number is limited.

This module is only the table: it moves no bytes, takes no lock and has no policy. The tier does all that.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvtide.block import ALIGN

__all__ = [
    "EMPTY",
    "KEPT",
    "OLD",
    "SOMEBODY",
    "Segment",
    "Segments",
    "by_segment",
    "domain_of",
    "ladder",
    "place_of",
    "segment_of",
    "size_of",
    "slot_of",
]

EMPTY = 0
"""The owner of a free slot: row 0, which is no block."""

_MOST = 512
"""The approximate limit on segments in a tier: each costs a file or one or two descriptors."""

_PER_SIZE = 4
"""Segments that each slot size could have if all sizes had the same share of the budget."""

SOMEBODY = -1
"""The owner of a slot in use whose owner was not set yet."""

KEPT = -2
"""The owner of a slot with a record of another version, which this version must not read, evict or overwrite."""

OLD = ALIGN - 1
"""The "domain" of segments in a file format that is no longer written. No block has their kind, so nothing is added to
them. They are emptied like segments of another size, when they are colder than current blocks."""


@lru_cache(maxsize=1024)
def ladder(nbytes: int) -> int:
    """The slot size for a block of ``nbytes``: the next step of the ladder, at most 1/32 above."""
    pages = -(-nbytes // ALIGN)
    step = 1 << max(0, pages.bit_length() - 6)
    return -(-pages // step) * step * ALIGN


def rung(nbytes: int) -> int:
    """The largest slot size that fits into ``nbytes``; 0 if none does."""
    pages = nbytes // ALIGN
    step = 1 << max(0, pages.bit_length() - 6)
    return pages // step * step * ALIGN


def size_of(kind: int) -> int:
    return kind & -ALIGN


def domain_of(kind: int) -> int:
    """The trust domain of slots of that kind."""
    return kind & (ALIGN - 1)


def place_of(segment: int, slot: int) -> int:
    return segment << 32 | slot


def segment_of(place: int) -> int:
    return place >> 32


def slot_of(place: int) -> int:
    return place & 0xFFFFFFFF


def by_segment(places: npt.NDArray[np.int64]) -> Iterator[tuple[int, npt.NDArray[np.int64] | slice]]:
    """Yield each segment's number and the positions of its slots in ``places``; sorts only once."""
    numbers = places >> 32
    if len(numbers) and (numbers == numbers[0]).all():
        # The usual case. Sorting or counting in NumPy releases the GIL, and other threads take it.
        yield int(numbers[0]), slice(None)
        return
    order = np.argsort(numbers, kind="stable")
    numbers = numbers[order]
    starts = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(places)]
    for start, stop in pairwise(starts):
        if start < stop:
            yield int(numbers[start]), order[start:stop]


class Segment:
    """Some bytes divided into slots of one size."""

    __slots__ = (
        "draining",
        "free",
        "generation",
        "kind",
        "nbytes",
        "number",
        "owner",
        "size",
        "slots",
        "unused",
        "withheld",
    )

    def __init__(self, number: int, nbytes: int, generation: int = 0) -> None:
        self.number = number
        self.nbytes = nbytes
        self.kind = 0
        self.size = 0
        self.slots = 0
        self.draining = False
        """Being emptied for another size: nothing new is added."""
        self.unused = False
        """Allocated before its kind was known: it has never held a block, so it may be divided for any domain."""
        self.free: array[int] = array("I")
        self.withheld: set[int] = set()
        """Empty slots that are not to be used for now: a write to them failed."""
        self.owner: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.generation: npt.NDArray[np.uint32] = np.full(1, generation, np.uint32)
        """Incremented each time a slot is freed, so that a late writer is recognised."""

    def __repr__(self) -> str:
        return f"<Segment {self.number}: {self.used}/{self.slots} slots of {self.size}>"

    @property
    def used(self) -> int:
        """Slots in use."""
        return self.slots - len(self.free) - len(self.withheld)

    @property
    def empty(self) -> bool:
        return len(self.free) + len(self.withheld) == self.slots

    def cut(self, kind: int, slots: int) -> None:
        """Divide the empty segment into slots. Generations keep counting, so that old places stay recognisable."""
        assert self.empty, self
        self.kind, self.size, self.slots, self.draining = kind, size_of(kind), slots, False
        self.free = array("I", range(slots - 1, -1, -1))
        self.withheld = set()
        self.owner = np.zeros(slots, np.int64)
        latest = self.generation.max(initial=0) + 1
        self.generation = np.full(slots, latest, np.uint32)


class Segments:
    """The table of all segments of one tier.

    ``nominal`` is the usual size of a segment, ``header`` the bytes each segment needs besides its slots, and
    ``per_slot`` the bytes a slot costs elsewhere (in a journal). Segment sizes are a multiple of ``grain`` bytes. Where
    there are many slot sizes, segments may be as small as ``least``; 0: they always have the usual size. At least
    ``sizes`` slot sizes are expected.
    """

    def __init__(
        self,
        budget: int,
        nominal: int,
        header: int = 0,
        per_slot: int = 0,
        grain: int = ALIGN,
        least: int = 0,
        sizes: int = 1,
    ) -> None:
        self.budget = budget - budget % grain
        self.nominal = max(nominal, budget // _MOST)
        self.least = max(least, budget // _MOST) if least else 0
        self._sizes = sizes
        self.grain = grain
        self.header = header
        self.per_slot = per_slot
        self.taken = 0
        """Bytes of all segments."""
        self.aside = 0
        """Bytes of the budget that are unavailable now because something outside the tier has them."""
        self.lent = 0
        """Bytes of the budget that are lent briefly to something other than a segment."""
        self.frozen = False
        """Whether no segment can be re-divided now, so that none need be emptied for another kind."""
        self.used = 0
        """Bytes of all slots that are not free."""
        self.slots = 0
        """Slots of all segments together."""
        self._generation = 0
        """The highest generation of any removed segment: its number may be reused."""
        self._all: dict[int, Segment] = {}
        self._kinds: Counter[int] = Counter()
        """How many segments each kind has."""
        self._open: dict[int, list[Segment]] = {}
        """By kind: segments with a free slot."""

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._all.values())

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, number: int) -> Segment:
        return self._all[number]

    def get(self, number: int) -> Segment | None:
        return self._all.get(number)

    def holds(self, place: int) -> bool:
        """Whether ``place`` is a slot in use."""
        segment = self._all.get(segment_of(place))
        return segment is not None and slot_of(place) < segment.slots and bool(segment.owner[slot_of(place)] != EMPTY)

    def fit(self, kind: int) -> int:
        """The number of slots of a segment that could be added for ``kind`` now; 0 if there is no space."""
        if self.least and len(self._all) >= 2 * _MOST:
            return 0  # too many short segments, made of leftovers: the next empty one makes space
        size = size_of(kind)
        left = self.left
        room = (left - self.header) // (size + self.per_slot)
        slots = max(0, min(room, max(1, self._usual(kind) // size)))
        while slots and self.bytes_of(size, slots) + slots * self.per_slot > left:
            slots -= 1
        return slots

    def _usual(self, kind: int) -> int:
        """The size of a new segment of that kind, if there is space for it. See the module's docstring."""
        kinds = max(self._sizes, len(self._kinds) + (kind not in self._kinds))
        if not self.least or kinds == 1:
            return self.nominal
        return min(self.nominal, max(self.least, (self.budget - self.aside) // (_PER_SIZE * kinds)))

    @property
    def left(self) -> int:
        """Bytes of the budget that are not allocated."""
        return self.budget - self.taken - self.aside - self.lent

    def possible(self, kind: int) -> bool:
        """Whether a slot of that kind would fit into an empty tier."""
        return self._least(kind) <= self.budget

    def lacking(self, kind: int) -> int:
        """Bytes that must be freed, by emptying segments, before a segment with a slot of that kind can be added."""
        return max(0, self._least(kind) - self.left)

    def cost(self, segment: Segment) -> int:
        """Bytes of the budget that a segment takes."""
        return segment.nbytes + segment.slots * self.per_slot

    def _least(self, kind: int) -> int:
        """Bytes that a segment of one slot takes."""
        return self.bytes_of(size_of(kind), 1) + self.per_slot

    @staticmethod
    def divides(nbytes: int, kind: int) -> bool:
        """Whether ``nbytes`` can be divided for that kind with little waste."""
        size = size_of(kind)
        wasted = nbytes % size if nbytes >= size else nbytes
        return wasted * 16 <= nbytes

    @classmethod
    def suits(cls, segment: Segment, kind: int) -> bool:
        """Whether a segment, once empty, may be re-divided for that kind at its present size."""
        return cls.divides(segment.nbytes, kind) and (segment.unused or domain_of(segment.kind) == domain_of(kind))

    def scarce(self, kind: int) -> bool:
        """Whether less than half a segment of that kind is free, though another could be added."""
        some = self._open.get(kind, [])
        if len(some) > 1 or (some and 2 * len(some[0].free) >= some[0].slots):
            return False
        return self.fit(kind) > 0

    @property
    def blank(self) -> int:
        """The kind of a one-slot segment that can be added before its final kind is known; 0 if there is no space for
        one of the usual size. Where the whole budget is smaller than that, it is most of the budget."""
        if self.left <= 0 or (self.left < self.nominal and self._all):
            return 0
        kind = rung(min(self.nominal, self.left))
        return kind if kind and self.fit(kind) else 0

    def bytes_of(self, size: int, slots: int) -> int:
        """The size of a segment with that many slots."""
        return -(-(self.header + slots * size) // self.grain) * self.grain

    def add(self, kind: int, slots: int, number: int | None = None) -> Segment:
        """Add a segment, all free. The tier has checked that it fits (``fit``) and allocates its bytes."""
        if number is None:
            number = next(i for i in range(len(self._all) + 1) if i not in self._all)
        segment = Segment(number, self.bytes_of(size_of(kind), slots), self._generation)
        segment.cut(kind, slots)
        self._all[number] = segment
        self._open.setdefault(kind, []).append(segment)
        self._kinds[kind] += 1
        self._count(segment, 1)
        return segment

    def remove(self, segment: Segment) -> None:
        """Remove an empty segment whose bytes were returned to the system."""
        assert segment.empty, segment
        self._close(segment)
        self._uncount(segment)
        del self._all[segment.number]
        self._generation = max(self._generation, int(segment.generation.max()))
        self._count(segment, -1)

    def recut(self, segment: Segment, kind: int) -> None:
        """Re-divide an empty segment, at its present size."""
        assert segment.unused or domain_of(kind) == domain_of(segment.kind), segment
        segment.unused = False
        self._close(segment)
        self._uncount(segment)
        self._kinds[kind] += 1
        self._count(segment, -1)
        segment.cut(kind, (segment.nbytes - self.header) // size_of(kind))
        self._count(segment, 1)
        self._open.setdefault(kind, []).append(segment)

    def _count(self, segment: Segment, sign: int) -> None:
        self.taken += sign * self.cost(segment)
        self.slots += sign * segment.slots

    def _uncount(self, segment: Segment) -> None:
        self._kinds[segment.kind] -= 1
        if not self._kinds[segment.kind]:
            del self._kinds[segment.kind]

    def spare(self, kind: int, unless: Segment | None = None) -> Segment | None:
        """An empty segment of another kind, or one that was emptied for a kind which then found space elsewhere."""
        return next(self._spares(kind, unless), None)

    def suiting(self, kind: int, unless: Segment | None = None) -> Segment | None:
        """Like ``spare``, but only segments that can be re-divided for that kind."""
        return next((s for s in self._spares(kind, unless) if self.suits(s, kind)), None)

    def _spares(self, kind: int, unless: Segment | None) -> Iterator[Segment]:
        return (s for s in self._all.values() if s.empty and (s.kind != kind or s.draining) and s is not unless)

    def others(self, kind: int) -> list[Segment]:
        """Segments of other kinds that could be emptied."""
        if self.frozen or self._kinds.get(kind, 0) == len(self._all):
            return []
        return [s for s in self._all.values() if s.kind != kind and not s.draining and not s.empty]

    def drain(self, segment: Segment) -> None:
        """Add nothing new to ``segment``."""
        segment.draining = True
        self._close(segment)

    def undrain(self, segment: Segment) -> None:
        """``segment`` could not be emptied: its free slots may be used again."""
        segment.draining = False
        self.settle(segment)

    def free(self, kind: int) -> bool:
        """Whether a slot of that kind is free."""
        return bool(self._open.get(kind))

    def take(self, kind: int, owner: int) -> int | None:
        """Take a free slot of exactly that kind, or return None."""
        segments = self._open.get(kind)
        if not segments:
            return None
        segment = segments[-1]
        slot = segment.free.pop()
        if not segment.free:
            segments.pop()
        segment.owner[slot] = owner
        self.used += segment.size
        return place_of(segment.number, slot)

    def take_many(self, kind: int, count: int, owners: npt.NDArray[np.int64] | None = None) -> list[int]:
        """Take up to ``count`` free slots of exactly that kind. Without ``owners``, these are set later (``own``).

        Neighbouring slots come in order: blocks that are written together can then be read together.
        """
        if count == 1:
            place = self.take(kind, SOMEBODY if owners is None else int(owners[0]))
            return [] if place is None else [place]
        places: list[int] = []
        segments = self._open.get(kind, [])
        while segments and len(places) < count:
            segment = segments[-1]
            slots = np.array(sorted(segment.free[-(count - len(places)) :]), np.int64)
            del segment.free[-len(slots) :]
            if not segment.free:
                segments.pop()
            done = len(places)
            segment.owner[slots] = SOMEBODY if owners is None else owners[done : done + len(slots)]
            self.used += segment.size * len(slots)
            places += (slots | place_of(segment.number, 0)).tolist()
        return places

    def own(self, places: npt.NDArray[np.int64], owners: npt.NDArray[np.int64]) -> None:
        """Set the owners of slots that were taken without."""
        for number, mine in by_segment(places):
            self._all[number].owner[places[mine] & 0xFFFFFFFF] = owners[mine]

    def claim(self, segment: Segment, slots: npt.NDArray[np.int64], owner: int = SOMEBODY) -> None:
        """Take particular slots, when opening a tier that already holds blocks. Their owners are set later."""
        segment.owner[slots] = owner
        self.used += segment.size * len(slots)
        self.settle(segment)

    def settle(self, segment: Segment) -> None:
        """After ``claim``: recompute which slots are free."""
        self._close(segment)
        free = np.flatnonzero(segment.owner == EMPTY)[::-1].tolist()
        if segment.withheld:
            free = [slot for slot in free if slot not in segment.withheld]
        segment.free = array("I", free)
        if segment.free and not segment.draining:
            self._open.setdefault(segment.kind, []).append(segment)

    def keep(self, place: int) -> None:
        """Let a slot in use have no owner, until it is freed."""
        self._all[segment_of(place)].owner[slot_of(place)] = KEPT

    def release(self, place: int) -> None:
        segment = self._all[segment_of(place)]
        slot = slot_of(place)
        assert segment.owner[slot] != EMPTY, (segment, slot)
        segment.owner[slot] = EMPTY
        segment.generation[slot] += 1
        if not segment.free and not segment.draining:
            self._open.setdefault(segment.kind, []).append(segment)
        segment.free.append(slot)
        self.used -= segment.size

    def repair(self, places: npt.NDArray[np.int64], owners: npt.NDArray[np.int64]) -> None:
        """Rebuild the table: these slots are in use, by these owners, and no others."""
        self._open = {}
        self._kinds = Counter(s.kind for s in self)
        self.taken = self.slots = self.used = 0
        mine = dict(by_segment(places))
        for segment in self:
            self._count(segment, 1)
            before, generation = segment.owner, segment.generation
            if not len(before) == len(generation) == segment.slots:  # it was being re-divided, so it is empty
                before, generation = np.zeros(segment.slots, np.int64), np.full(1, generation.max() + 1, np.uint32)
            segment.owner = np.zeros(segment.slots, np.int64)
            if segment.number in mine:
                which = mine[segment.number]
                segment.owner[places[which] & 0xFFFFFFFF] = owners[which]
            given_back = (before != EMPTY) & (segment.owner == EMPTY)
            segment.generation = np.where(given_back, generation + 1, generation).astype(np.uint32)
            self.used += segment.size * int(np.count_nonzero(segment.owner))
            self.settle(segment)

    def withhold(self, place: int) -> None:
        """Free a slot, or take a free one, that is not to be used for now."""
        segment, slot = self._all[segment_of(place)], slot_of(place)
        if segment.owner[slot] != EMPTY:
            self.release(place)
        segment.withheld.add(slot)
        if slot in segment.free:
            segment.free.remove(slot)
        if not segment.free:
            self._close(segment)

    def restore(self) -> None:
        """Make all withheld slots usable again."""
        for segment in self:
            if segment.withheld:
                segment.withheld = set()
                if segment.draining:
                    segment.free = array("I", np.flatnonzero(segment.owner == EMPTY)[::-1].tolist())
                else:
                    self.settle(segment)

    def release_many(self, places: npt.NDArray[np.int64]) -> None:
        """Free distinct slots."""
        for number, mine in by_segment(places):
            segment = self._all[number]
            slots = places[mine] & 0xFFFFFFFF
            assert (segment.owner[slots] != EMPTY).all(), segment
            segment.owner[slots] = EMPTY
            segment.generation[slots] += 1
            if not segment.free and not segment.draining:
                self._open.setdefault(segment.kind, []).append(segment)
            segment.free.extend(slots.tolist())
            self.used -= segment.size * len(slots)

    def generation(self, place: int) -> int:
        return int(self._all[segment_of(place)].generation[slot_of(place)])

    def owner(self, place: int) -> int:
        return int(self._all[segment_of(place)].owner[slot_of(place)])

    def size(self, place: int) -> int:
        return self._all[segment_of(place)].size

    def offset(self, place: int) -> int:
        """The slot's offset in its segment's bytes."""
        return self.header + slot_of(place) * self._all[segment_of(place)].size

    def owners(self, kind: int) -> npt.NDArray[np.int64]:
        """The owners of slots of that kind that could be taken again once freed."""
        found = [s.owner for s in self._all.values() if s.kind == kind and not s.draining]
        owners = np.concatenate(found) if found else np.zeros(0, np.int64)
        taken: npt.NDArray[np.int64] = owners[owners != EMPTY]
        return taken

    def _close(self, segment: Segment) -> None:
        peers = self._open.get(segment.kind)
        if peers and segment in peers:
            peers.remove(segment)
