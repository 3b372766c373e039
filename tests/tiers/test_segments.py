"""The book of slots: the ladder, the budget, generations, and sizes that take turns."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtide.block import ALIGN, padded
from kvtide.tiers.segments import Segments, by_segment, ladder, place_of, segment_of, slot_of

MIB = 1 << 20
SIZES = st.integers(1, 40).map(lambda pages: ladder(pages * ALIGN))


@given(st.integers(1, 1 << 45))
def test_a_rung_is_at_most_a_32nd_above(nbytes: int) -> None:
    rung = ladder(nbytes)
    assert rung % ALIGN == 0
    assert padded(nbytes) <= rung <= padded(nbytes) * 33 / 32
    assert ladder(rung) == rung


@given(st.integers(1, 1 << 40), st.integers(0, 1 << 20))
def test_the_ladder_never_goes_down(nbytes: int, more: int) -> None:
    assert ladder(nbytes) <= ladder(nbytes + more)


def test_the_ladder_has_few_rungs() -> None:
    """Or every compressed block would need a segment of its own."""
    assert len({ladder(pages * ALIGN) for pages in range(1, 8193)}) <= 32 * 9


@given(st.integers(0, (1 << 20) - 1), st.integers(0, (1 << 32) - 1))
def test_a_place_is_a_segment_and_a_slot(segment: int, slot: int) -> None:
    place = place_of(segment, slot)
    assert (segment_of(place), slot_of(place)) == (segment, slot)
    assert 0 <= place < 1 << 62


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), unique=True))
def test_places_by_segment(parts: list[tuple[int, int]]) -> None:
    places = np.array([place_of(*p) for p in parts], np.int64)
    found = {number: places[mine].tolist() for number, mine in by_segment(places)}
    assert found == {n: [place_of(*p) for p in parts if p[0] == n] for n in {n for n, _ in parts}}


class Book(RuleBasedStateMachine):
    """Random traffic on a book, as tiers and evictors cause it."""

    BUDGET = 100 * ALIGN
    HEADER = ALIGN
    PER_SLOT = 400

    def __init__(self) -> None:
        super().__init__()
        self.book = Segments(self.BUDGET, 16 * ALIGN, header=self.HEADER, per_slot=self.PER_SLOT)
        self.held: dict[int, int] = {}
        self.ever: set[tuple[int, int]] = set()
        self.owner = 0

    def hand_out(self, place: int, size: int) -> None:
        assert place not in self.held, "a slot with two owners"
        segment = self.book[segment_of(place)]
        assert segment.size == size
        assert not segment.draining
        generation = place, self.book.generation(place)
        assert generation not in self.ever, "a late writer could not be told from the owner"
        self.ever.add(generation)
        self.held[place] = size

    @rule(size=SIZES)
    def take(self, size: int) -> None:
        self.owner += 1
        free = self.book.free(size)
        place = self.book.take(size, self.owner)
        assert (place is not None) == free
        if place is not None:
            self.hand_out(place, size)

    @rule(size=SIZES, count=st.integers(1, 30))
    def take_many(self, size: int, count: int) -> None:
        places = self.book.take_many(size, count)
        assert len(set(places)) == len(places) <= count
        for place in places:
            self.hand_out(place, size)
        if len(places) < count:
            assert not self.book.free(size)

    @rule(size=SIZES)
    def grow(self, size: int) -> None:
        slots = self.book.fit(size)
        if slots:
            self.book.add(size, slots)
            assert self.book.free(size)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted(self.held)))
        generation = self.book.generation(place)
        self.book.release(place)
        del self.held[place]
        assert self.book.generation(place) > generation
        assert not self.book.holds(place)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def withhold(self, data: st.DataObject) -> None:
        """A write to a slot failed: it is neither in use nor handed out."""
        place = data.draw(st.sampled_from(sorted(self.held)))
        self.book.withhold(place)
        del self.held[place]
        assert not self.book.holds(place)

    @rule()
    def restore(self) -> None:
        self.book.restore()
        assert not any(segment.withheld for segment in self.book)

    @rule(size=SIZES)
    def use_a_spare(self, size: int) -> None:
        """As the tiers do: take an empty segment's bytes for another size."""
        spare = self.book.spare(size)
        if spare is not None:
            assert not any(segment_of(p) == spare.number for p in self.held)
            if 0 < (spare.nbytes - self.HEADER) // size <= spare.slots:  # more slots would cost more journal
                self.book.recut(spare, size)
            else:
                self.book.remove(spare)

    @precondition(lambda self: len(self.book) > 0)
    @rule(data=st.data())
    def empty_a_segment(self, data: st.DataObject) -> None:
        """As the evictor does."""
        number = data.draw(st.sampled_from(sorted(s.number for s in self.book)))
        self.book.drain(self.book[number])
        for place in [p for p in self.held if segment_of(p) == number]:
            self.book.release(place)
            del self.held[place]
        assert self.book.spare(self.book[number].size) is not None, "its own size may have it back"

    @invariant()
    def the_budget_holds(self) -> None:
        assert self.book.taken <= self.book.budget == self.BUDGET
        assert self.book.taken == sum(s.nbytes + s.slots * self.PER_SLOT for s in self.book)
        assert self.book.slots == sum(s.slots for s in self.book)
        assert self.book.used == sum(self.held.values())

    @invariant()
    def slots_do_not_overlap(self) -> None:
        for segment in self.book:
            assert self.HEADER + segment.slots * segment.size <= segment.nbytes
            assert len(segment.free) == len(set(segment.free))
            used = [slot_of(p) for p in self.held if segment_of(p) == segment.number]
            assert sorted([*segment.free, *segment.withheld, *used]) == list(range(segment.slots))
            assert segment.used == len(used)
        for place, size in self.held.items():
            assert self.book.holds(place)
            assert self.book.offset(place) == self.HEADER + slot_of(place) * size


TestBook = Book.TestCase
TestBook.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)


def test_a_segment_that_was_emptied_in_vain_is_not_lost() -> None:
    """Its room was asked for by another size, which then found a slot elsewhere."""
    book = Segments(8 * ALIGN, 8 * ALIGN)
    (segment,) = [book.add(ALIGN, book.fit(ALIGN))]
    places = book.take_many(ALIGN, 8)
    book.drain(segment)
    for place in places:
        book.release(place)
    assert book.take(ALIGN, 1) is None
    spare = book.spare(ALIGN)
    assert spare is segment
    book.recut(spare, ALIGN)
    assert len(book.take_many(ALIGN, 8)) == 8


def test_segments_are_small_where_there_are_many_sizes() -> None:
    book = Segments(1 << 30, 256 << 20, header=ALIGN, least=256 << 10)
    assert book.add(ladder(MIB), book.fit(ladder(MIB))).nbytes == (256 << 20) + ALIGN
    for pages in range(1, 60):
        book.add(pages * ALIGN, min(1, book.fit(pages * ALIGN)))
    assert book.fit(ladder(2 * MIB)) == (1 << 30) // (4 * 61) // (2 * MIB)
    # Slots may be larger than that; and no segment is so small that its header counts.
    assert book.fit(ladder(16 * MIB)) == 1
    small = Segments(4 * MIB, MIB, header=ALIGN, least=256 << 10, sizes=64)
    assert small.fit(ALIGN) == 64


def test_what_is_missing_until_a_slot_fits() -> None:
    book = Segments(64 * ALIGN, 16 * ALIGN, header=ALIGN)
    assert book.possible(63 * ALIGN)
    assert not book.possible(64 * ALIGN)
    while slots := book.fit(ALIGN):
        book.add(ALIGN, slots)
    assert book.lacking(63 * ALIGN) == 64 * ALIGN - book.left
    assert sum(map(book.cost, book)) + book.left == 64 * ALIGN
    book.aside = 8 * ALIGN
    assert book.lacking(ALIGN) > 8 * ALIGN


def test_two_sizes_alternate() -> None:
    """The same bytes serve each in turn, ten times over, and no slot is ever taken for one of an earlier turn."""
    budget = 256 * ALIGN
    book = Segments(budget, 16 * ALIGN)
    seen: set[tuple[int, int]] = set()
    for turn in range(10):
        size = ladder((3, 5)[turn % 2] * ALIGN)
        places: list[int] = []
        while True:
            place = book.take(size, 1)
            if place is not None:
                places.append(place)
            elif slots := book.fit(size):
                book.add(size, slots)
            elif (spare := book.spare(size)) is not None:
                book.remove(spare)
            else:
                break
        assert len(places) * size >= 0.9 * budget
        generations = {(place, book.generation(place)) for place in places}
        assert not generations & seen
        seen |= generations
        for place in places:
            book.release(place)


@given(st.integers(1, 300), SIZES, st.integers(1, 64), st.sampled_from([ALIGN, 4 * ALIGN, 512 * ALIGN]))
def test_a_segment_that_fits_fits(budget_pages: int, size: int, nominal_pages: int, grain: int) -> None:
    book = Segments(budget_pages * ALIGN, nominal_pages * ALIGN, header=ALIGN, per_slot=100, grain=grain)
    while slots := book.fit(size):
        segment = book.add(size, slots)
        assert segment.nbytes % grain == 0
        assert ALIGN + slots * size <= segment.nbytes
        assert book.taken <= book.budget <= budget_pages * ALIGN
    # No room was given up: one more slot would not have fitted.
    assert book.taken + -(-(ALIGN + size) // grain) * grain + 100 > book.budget
