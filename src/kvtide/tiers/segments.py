"""Slots of many sizes in a fixed number of bytes.

Memory and files are taken in *segments*, each cut into slots of one size. Sizes come from a ladder whose steps are
at most 1/32, so that a compressed block really takes less room and two models side by side waste little. When a
segment is empty it may be cut anew for another size; when a size starves, the owner of this book empties the coldest
segment of another size (see ``kvtide.plan.evict``). So two models that take turns each get the whole budget.

A segment belongs to one *trust domain*, where a tier has several: it is never cut anew for another, because whoever has
mapped it would see that one's blocks. The *kind* of a slot is its size and its domain in one number: sizes are whole
pages, so their low bits are free for it.

How large a segment is: ``nominal``, as long as all slots are of one size. Where there are many sizes, as compression
makes them, each has a segment that is only partly in use. With few large segments, most of the budget is then free
slots of sizes that nobody asks for just now: with 60 sizes and segments of a quarter of the budget, a tier held 8 % of
it. So in a tier that allows it (``least``) a segment has at most 1/4 of what each size would get if all had the same
share. Then about 1/8 of the budget is free slots, whatever the number of sizes, and a tier with one model still has
large segments. A tier that compresses expects many ``sizes`` from the start, or the first few would have most of the
budget. A segment is a file with a length of its own, so segments of different lengths fit into the budget
without gaps; how many there may be is limited.

This is only the book: it moves no bytes, takes no lock and knows no policy. The tier that keeps it does.
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
"""The owner of a slot that is free: row 0, which is no block."""

_MOST = 512
"""About how many segments a tier has at most: each costs a file or a descriptor or two."""

_PER_SIZE = 4
"""Segments that each slot size could have if all sizes had the same share of the budget."""

SOMEBODY = -1
"""The owner of a slot whose owner was not told yet."""

KEPT = -2
"""The owner of a slot with a record of another version, which is not ours to read, evict or overwrite."""

OLD = ALIGN - 1
"""The "domain" of segments in a file format that is not written any more. Their kind is nobody's, so nothing goes in,
and they are emptied, when they are colder than what is written now, as segments of another size are."""


@lru_cache(maxsize=1024)
def ladder(nbytes: int) -> int:
    """The slot size for a block of ``nbytes``: the next rung, at most 1/32 above."""
    pages = -(-nbytes // ALIGN)
    step = 1 << max(0, pages.bit_length() - 6)
    return -(-pages // step) * step * ALIGN


def rung(nbytes: int) -> int:
    """The largest slot size that ``nbytes`` hold; 0 if they hold none."""
    pages = nbytes // ALIGN
    step = 1 << max(0, pages.bit_length() - 6)
    return pages // step * step * ALIGN


def size_of(kind: int) -> int:
    """The size of slots of that kind."""
    return kind & -ALIGN


def domain_of(kind: int) -> int:
    """Their trust domain."""
    return kind & (ALIGN - 1)


def place_of(segment: int, slot: int) -> int:
    return segment << 32 | slot


def segment_of(place: int) -> int:
    return place >> 32


def slot_of(place: int) -> int:
    return place & 0xFFFFFFFF


def by_segment(places: npt.NDArray[np.int64]) -> Iterator[tuple[int, npt.NDArray[np.int64] | slice]]:
    """Each segment's number, and where in ``places`` its slots are; one sort, however many segments there are."""
    numbers = places >> 32
    if len(numbers) and (numbers == numbers[0]).all():
        # Most often so. To sort or to count, NumPy lets go of the interpreter's lock, and others take it.
        yield int(numbers[0]), slice(None)
        return
    order = np.argsort(numbers, kind="stable")
    numbers = numbers[order]
    starts = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(places)]
    for start, stop in pairwise(starts):
        if start < stop:
            yield int(numbers[start]), order[start:stop]


class Segment:
    """Some bytes cut into slots of one size."""

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
        """Being emptied for another size: nothing new goes in."""
        self.unused = False
        """Taken before it was known for what: it has never had a block, so that it may be cut for any domain."""
        self.free: array[int] = array("I")
        self.withheld: set[int] = set()
        """Slots that hold nothing, but are not to be used for now: the medium refused what was written to them."""
        self.owner: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.generation: npt.NDArray[np.uint32] = np.full(1, generation, np.uint32)
        """Grows each time a slot is given back: a late writer's slot is recognised by it."""

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
        """Cut the empty segment into slots. Generations go on counting, so that old places stay recognisable."""
        assert self.empty, self
        self.kind, self.size, self.slots, self.draining = kind, size_of(kind), slots, False
        self.free = array("I", range(slots - 1, -1, -1))
        self.withheld = set()
        self.owner = np.zeros(slots, np.int64)
        latest = self.generation.max(initial=0) + 1
        self.generation = np.full(slots, latest, np.uint32)


class Segments:
    """The book of all segments of one tier.

    ``nominal`` is the usual size of a segment, ``header`` what each one needs for itself besides its slots, and
    ``per_slot`` what a slot costs elsewhere (in a journal). Segments are a multiple of ``grain`` bytes. Where there are
    many slot sizes, segments may be as small as ``least``; 0: they are of the usual size whatever there is. At least so
    many ``sizes`` are expected.
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
        """Bytes of the budget that are not to be had now: somebody else has them."""
        self.lent = 0
        """Bytes of the budget that something else than a segment has for a moment."""
        self.frozen = False
        """Whether no segment can be cut now, so that none need be emptied for another kind."""
        self.used = 0
        """Bytes of all slots that are not free."""
        self.slots = 0
        """Of all segments together."""
        self._generation = 0
        """The highest of any segment that was removed: its number may be given to another."""
        self._all: dict[int, Segment] = {}
        self._kinds: Counter[int] = Counter()
        """How many segments there are."""
        self._open: dict[int, list[Segment]] = {}
        """Segments with a free slot."""

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

    def places(self) -> list[int]:
        """All slots in use."""
        return [place_of(s.number, i) for s in self for i in np.flatnonzero(s.owner != EMPTY).tolist()]

    def fit(self, kind: int) -> int:
        """How many slots a segment that could be added for ``kind`` now would have; 0 if there is no room."""
        if self.least and len(self._all) >= 2 * _MOST:
            return 0  # short segments, made of what others left over, are too many: the next empty one makes room
        size = size_of(kind)
        left = self.left
        room = (left - self.header) // (size + self.per_slot)
        slots = max(0, min(room, max(1, self._usual(kind) // size)))
        while slots and self.bytes_of(size, slots) + slots * self.per_slot > left:
            slots -= 1
        return slots

    def _usual(self, kind: int) -> int:
        """Bytes of a segment of that kind, if there is room for it. See the module's text."""
        kinds = max(self._sizes, len(self._kinds) + (kind not in self._kinds))
        if not self.least or kinds == 1:
            return self.nominal
        return min(self.nominal, max(self.least, (self.budget - self.aside) // (_PER_SIZE * kinds)))

    @property
    def left(self) -> int:
        """Bytes of the budget that no segment has."""
        return self.budget - self.taken - self.aside - self.lent

    def possible(self, kind: int) -> bool:
        """Whether a slot of that kind would fit if there were nothing else."""
        return self._least(kind) <= self.budget

    def lacking(self, kind: int) -> int:
        """Bytes that must come free, by emptying segments, until one with a slot of that kind can be added."""
        return max(0, self._least(kind) - self.left)

    def cost(self, segment: Segment) -> int:
        """Bytes of the budget that a segment takes."""
        return segment.nbytes + segment.slots * self.per_slot

    def _least(self, kind: int) -> int:
        """What a segment of one slot takes."""
        return self.bytes_of(size_of(kind), 1) + self.per_slot

    @staticmethod
    def divides(nbytes: int, kind: int) -> bool:
        """Whether so many bytes may be cut for that kind, and few of them wasted."""
        size = size_of(kind)
        wasted = nbytes % size if nbytes >= size else nbytes
        return wasted * 16 <= nbytes

    @classmethod
    def suits(cls, segment: Segment, kind: int) -> bool:
        """Whether a segment, once empty, may be cut anew for that kind in the bytes that it has."""
        return cls.divides(segment.nbytes, kind) and (segment.unused or domain_of(segment.kind) == domain_of(kind))

    def scarce(self, kind: int) -> bool:
        """Whether less than half a segment of that kind is free, though there is room for more."""
        some = self._open.get(kind, [])
        if len(some) > 1 or (some and 2 * len(some[0].free) >= some[0].slots):
            return False
        return self.fit(kind) > 0

    @property
    def blank(self) -> int:
        """The kind of a segment of one slot that can be added before it is known for what; 0 if there is no room for a
        usual one. Where the whole budget is less than that, it is most of the budget."""
        if self.left <= 0 or (self.left < self.nominal and self._all):
            return 0
        kind = rung(min(self.nominal, self.left))
        return kind if kind and self.fit(kind) else 0

    def bytes_of(self, size: int, slots: int) -> int:
        """What a segment of so many slots takes."""
        return -(-(self.header + slots * size) // self.grain) * self.grain

    def add(self, kind: int, slots: int, number: int | None = None) -> Segment:
        """A new segment, all free. The tier has found room for it (``fit``) and makes its bytes."""
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
        """Forget an empty segment whose bytes were given back to the host."""
        assert segment.empty, segment
        self._close(segment)
        self._uncount(segment)
        del self._all[segment.number]
        self._generation = max(self._generation, int(segment.generation.max()))
        self._count(segment, -1)

    def recut(self, segment: Segment, kind: int) -> None:
        """Cut an empty segment anew, in the bytes that it has."""
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
        """There is one segment less of its kind."""
        self._kinds[segment.kind] -= 1
        if not self._kinds[segment.kind]:
            del self._kinds[segment.kind]

    def spare(self, kind: int, unless: Segment | None = None) -> Segment | None:
        """An empty segment of another kind, or one that was emptied for a kind which then found room elsewhere."""
        return next(self._spares(kind, unless), None)

    def suiting(self, kind: int, unless: Segment | None = None) -> Segment | None:
        """The same that can be cut for that kind."""
        return next((s for s in self._spares(kind, unless) if self.suits(s, kind)), None)

    def _spares(self, kind: int, unless: Segment | None) -> Iterator[Segment]:
        return (s for s in self._all.values() if s.empty and (s.kind != kind or s.draining) and s is not unless)

    def others(self, kind: int) -> list[Segment]:
        """Segments of other kinds that could be emptied."""
        if self.frozen or self._kinds.get(kind, 0) == len(self._all):
            return []
        return [s for s in self._all.values() if s.kind != kind and not s.draining and not s.empty]

    def drain(self, segment: Segment) -> None:
        """Let nothing new into ``segment``."""
        segment.draining = True
        self._close(segment)

    def undrain(self, segment: Segment) -> None:
        """``segment`` could not be emptied: what is free in it may be used again."""
        segment.draining = False
        self.settle(segment)

    def free(self, kind: int) -> bool:
        """Whether a slot of that kind is free."""
        return bool(self._open.get(kind))

    def take(self, kind: int, owner: int) -> int | None:
        """A free slot of exactly that kind, or None."""
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
        """Up to ``count`` free slots of exactly that kind. Without ``owners``, these are told later (``own``).

        Neighbours come in their order: blocks that are written together can then be read together.
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
        """Tell the owners of slots that were taken without."""
        for number, mine in by_segment(places):
            self._all[number].owner[places[mine] & 0xFFFFFFFF] = owners[mine]

    def claim(self, segment: Segment, slots: npt.NDArray[np.int64], owner: int = SOMEBODY) -> None:
        """Take particular slots: for opening a tier that holds blocks already. Their owners are told later."""
        segment.owner[slots] = owner
        self.used += segment.size * len(slots)
        self.settle(segment)

    def settle(self, segment: Segment) -> None:
        """After ``claim``: work out again which slots are free."""
        self._close(segment)
        free = np.flatnonzero(segment.owner == EMPTY)[::-1].tolist()
        if segment.withheld:
            free = [slot for slot in free if slot not in segment.withheld]
        segment.free = array("I", free)
        if segment.free and not segment.draining:
            self._open.setdefault(segment.kind, []).append(segment)

    def keep(self, place: int) -> None:
        """Let a slot in use be nobody's, until it is given back."""
        self._all[segment_of(place)].owner[slot_of(place)] = KEPT

    def release(self, place: int) -> None:
        """Give a slot back."""
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
        """Make the book anew: these slots are in use, by these owners, and no others."""
        self._open = {}
        self._kinds = Counter(s.kind for s in self)
        self.taken = self.slots = self.used = 0
        mine = dict(by_segment(places))
        for segment in self:
            self._count(segment, 1)
            before, generation = segment.owner, segment.generation
            if not len(before) == len(generation) == segment.slots:  # it was just being cut anew, so it is empty
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
        """Give a slot back that is not to be used for now, or keep one that is free from being used."""
        segment, slot = self._all[segment_of(place)], slot_of(place)
        if segment.owner[slot] != EMPTY:
            self.release(place)
        segment.withheld.add(slot)
        if slot in segment.free:
            segment.free.remove(slot)
        if not segment.free:
            self._close(segment)

    def restore(self) -> None:
        """Let all slots that were withheld be used again."""
        for segment in self:
            if segment.withheld:
                segment.withheld = set()
                if segment.draining:
                    segment.free = array("I", np.flatnonzero(segment.owner == EMPTY)[::-1].tolist())
                else:
                    self.settle(segment)

    def release_many(self, places: npt.NDArray[np.int64]) -> None:
        """Give distinct slots back."""
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
        """Who owns the slot."""
        return int(self._all[segment_of(place)].owner[slot_of(place)])

    def size(self, place: int) -> int:
        """The size of the slot."""
        return self._all[segment_of(place)].size

    def offset(self, place: int) -> int:
        """Where the slot begins in its segment's bytes."""
        return self.header + slot_of(place) * self._all[segment_of(place)].size

    def owners(self, kind: int) -> npt.NDArray[np.int64]:
        """Who owns the slots of that kind, where one that is given back can be taken again."""
        found = [s.owner for s in self._all.values() if s.kind == kind and not s.draining]
        owners = np.concatenate(found) if found else np.zeros(0, np.int64)
        taken: npt.NDArray[np.int64] = owners[owners != EMPTY]
        return taken

    def _close(self, segment: Segment) -> None:
        peers = self._open.get(segment.kind)
        if peers and segment in peers:
            peers.remove(segment)
