"""Tests of the contract that all tiers share; see tier.py, which has the rest of the contract. Needs pytest.

All bytes that are read are compared with what their key says they must be; every batch must be answered exactly once;
every tier is closed at the end, and must have finished all submitted batches by then.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from kvtide.block import BlockKey, Geometry
from kvtide.index.keys import Tenant
from kvtide.testing.blocks import Bytes, aligned, content, keys
from kvtide.testing.caller import GEOMETRIES, Caller, CallerAnswer, shaped
from kvtide.tiers.base import NOWHERE, Miss, Read, Tier

__all__ = ["AnyTierContract"]


class AnyTierContract(ABC):
    """See the module's docstring."""

    keeps_bytes = True
    """Whether the bytes that were written can be read. False for a tier that only simulates."""
    checks_identity = True
    """Whether a read with another key, model, tenant or layout is refused. False where only the index knows."""
    persistent = False
    """Whether blocks are still there when the tier is closed and opened again in the same place."""
    counts = True
    """Whether the tier knows its number of blocks. False where others may delete some."""
    budget = 4 << 20
    """The budget in bytes passed to ``make``."""

    @abstractmethod
    def make(self, where: Path, budget: int) -> Tier:
        """A tier of at most ``budget`` bytes. If it is persistent, it keeps its blocks in the folder ``where``."""

    def content(self, key: bytes, nbytes: int) -> Bytes:
        """The bytes of a block; always the same for one key."""
        return content(key, nbytes)

    def open(self, where: Path, budget: int | None = None) -> Caller:
        return Caller(self.make(where, budget or self.budget), self.content, self.keeps_bytes, self.counts)

    @pytest.fixture
    def where(self, tmp_path: Path) -> Path:
        return tmp_path / "tier"

    @pytest.fixture
    def caller(self, where: Path) -> Iterator[Caller]:
        caller = self.open(where)
        yield caller
        caller.close()

    # -- reading what was written -------------------------------------------------------------------------

    @pytest.mark.parametrize("shape", GEOMETRIES)
    def test_what_was_written_is_read(self, caller: Caller, shape: str) -> None:
        who, names = GEOMETRIES[shape], keys(5)
        places = caller.write(names, who)
        assert NOWHERE not in places
        assert len(set(places)) == 5
        assert caller.finds(names, who, places) == [True] * 5
        # In another order, twice in one batch, and again later: reading changes nothing.
        assert caller.finds([*names[::-1], names[0]], who, [*places[::-1], places[0]]) == [True] * 6

    @pytest.mark.parametrize("shape", ["padded sections", "pages without padding", "a header of two pages"])
    def test_sections_are_read_alone(self, caller: Caller, shape: str) -> None:
        who, (key, other) = GEOMETRIES[shape], keys(2)
        place, other_place = caller.write([key, other], who)
        count = who.geometry.sections
        ranges = [range(i, i + 1) for i in (*range(min(count, 8)), count - 1)]
        ranges += [range(count), range(1, count), range(count - 1), range(1, 3)]
        assert caller.read([caller.read_item(key, who, place, r) for r in ranges]) == [True] * len(ranges)
        mixed = [caller.read_item(other, who, other_place), caller.read_item(key, who, place, range(2, 4))]
        assert caller.read(mixed) == [True, True]

    def test_sections_that_a_block_has_not_are_refused(self, caller: Caller) -> None:
        who, (key,) = GEOMETRIES["padded sections"], keys(1)
        (place,) = caller.write([key], who)
        caller.write(keys(3, start=1), who)  # neighbours, whose bytes must not be returned
        wrong = [range(3, 5), range(4, 5), range(-1, 1), range(2, 2), range(0, 4, 2), range(100, 101)]
        batch = [Read(key, who, place, aligned(8 * who.geometry.stride), r) for r in wrong]
        if self.keeps_bytes:
            batch.append(Read(key, who, place, aligned(3 * who.geometry.stride), None))  # too small for the whole block
        assert caller.read(batch) == [False] * len(batch)
        assert caller.finds([key], who, [place]) == [True]

    def test_a_write_leaves_the_callers_bytes_alone(self, caller: Caller) -> None:
        who, (key,) = GEOMETRIES["padded sections"], keys(1)
        item = caller.block(key, who)
        before = bytes(item.span)
        caller.start_write([item]).wait()
        assert bytes(item.span) == before

    def test_shapes_lie_side_by_side(self, caller: Caller) -> None:
        written: dict[str, tuple[list[BlockKey], list[int]]] = {}
        for n, (shape, who) in enumerate(GEOMETRIES.items()):
            names = keys(3, start=100 * n)
            written[shape] = names, caller.write(names, who)
        for shape, (names, places) in written.items():
            assert caller.finds(names, GEOMETRIES[shape], places) == [True] * 3, shape
        first, *_ = written
        caller.evict(*written.pop(first))
        for shape, (names, places) in written.items():
            assert caller.finds(names, GEOMETRIES[shape], places) == [True] * 3, shape

    # -- one result per item, one call per batch ----------------------------------------------------------

    def test_a_bad_item_does_not_spoil_its_batch(self, caller: Caller) -> None:
        who, names = GEOMETRIES["padded sections"], keys(4)
        huge = shaped(1, 2 * self.budget)
        batch = [caller.block(k, who) for k in names]
        batch[2] = caller.block(names[2], huge)
        places = caller.start_write(batch).wait()
        assert [p == NOWHERE for p in places] == [False, False, True, False]
        options = [caller.read_item(k, who, p) for k, p in zip(names, places, strict=True)]
        assert caller.read(options) == [True, True, False, True]
        assert caller.drop((names[0], places[0]), (names[2], NOWHERE), (names[3], places[3])) == [True] * 3
        assert caller.finds(names, who, places) == [False, True, False, False]

    def test_an_empty_batch_is_answered(self, caller: Caller) -> None:
        assert caller.start_write([]).wait() == []
        assert caller.start_read([]).wait() == []
        assert caller.start_drop([]).wait() == []

    def test_done_may_call_the_tier(self, caller: Caller) -> None:
        """A lane starts the next batch when one ends, on whatever thread that is."""
        who, (first, second) = GEOMETRIES["one page"], keys(2)
        ends = CallerAnswer[bool](1)

        def then_write(places: Sequence[int]) -> None:
            assert caller.has(1)
            caller.tier.write([caller.block(second, who)], lambda more: then_read(places[0], more[0]))

        def then_read(place: int, more: int) -> None:
            caller.tier.read([caller.read_item(second, who, more)], lambda found: then_drop(place, bool(found[0])))

        def then_drop(place: int, found: bool) -> None:
            assert found
            caller.tier.evict(first, place)
            caller.tier.drop([(first, NOWHERE)], ends)

        caller.tier.write([caller.block(first, who)], then_write)
        assert ends.wait() == [True]
        assert caller.has(1)

    def test_close_finishes_what_was_submitted(self, where: Path) -> None:
        who, names = GEOMETRIES["pages without padding"], keys(16)
        caller = self.open(where)
        held = caller.write(names[:4], who)
        writes = [caller.start_write([caller.block(k, who) for k in names[i : i + 4]]) for i in range(4, 16, 4)]
        reads = caller.start_read([caller.read_item(k, who, p) for k, p in zip(names, held, strict=False)])
        caller.close()
        assert reads.wait() == [True] * 4
        places = held + [p for w in writes for p in w.wait()]
        assert NOWHERE not in places
        again = self.open(where)
        list(again.tier.scan())
        assert again.finds(names, who, places) == [self.persistent] * 16
        again.close()

    # -- missing blocks -----------------------------------------------------------------------------------

    def test_unknown_places_are_misses(self, caller: Caller) -> None:
        who, (key,) = GEOMETRIES["one page"], keys(1)
        strange = [NOWHERE, 0, 1, 77, 5 << 32, (1 << 40) + 3, 1 << 62, -(1 << 40)]
        assert caller.finds([key] * len(strange), who, strange) == [False] * len(strange)
        (place,) = caller.write([key], who)
        unknown = [p for p in strange if p != place]
        assert caller.finds([key] * len(unknown), who, unknown) == [False] * len(unknown)
        assert caller.drop(*[(keys(1, start=5)[0], p) for p in unknown]) == [True] * len(unknown)
        assert caller.finds([key], who, [place]) == [True]
        assert caller.has(1)

    def test_evicted_and_dropped_blocks_are_misses(self, caller: Caller) -> None:
        who, names = GEOMETRIES["padded sections"], keys(4)
        places = caller.write(names, who)
        caller.tier.evict(names[0], places[0])
        assert caller.drop((names[1], places[1])) == [True]
        assert caller.finds(names, who, places) == [False, False, True, True]
        single = [caller.read_item(k, who, p, range(1, 2)) for k, p in zip(names, places, strict=True)]
        assert caller.read(single) == [False, False, True, True]
        # Dropping a block that is already gone is not an error, with its old place or without.
        assert caller.drop((names[0], NOWHERE), (names[1], NOWHERE), (names[1], places[1])) == [True] * 3
        assert caller.has(2)

    def test_another_identity_is_a_miss(self, caller: Caller) -> None:
        if not self.checks_identity:
            pytest.skip("only the index knows whose the blocks of this tier are")
        who, (key, other) = GEOMETRIES["padded sections"], keys(2)
        place, other_place = caller.write([key, other], who)
        geometry = who.geometry
        tenant = Tenant("somebody else", b"another secret, of 32 bytes or more")
        wrong = [
            replace(who, namespace=bytes(32)),
            replace(who, tenant=tenant.tag),
            replace(who, layout=bytes(16)),
            replace(who, geometry=Geometry(geometry.sections, geometry.section + 1)),
            replace(who, geometry=Geometry(geometry.sections, geometry.section - 8)),
            replace(who, geometry=Geometry(geometry.sections + 1, geometry.section)),
            replace(who, geometry=Geometry(geometry.sections - 1, geometry.section)),
            replace(who, geometry=Geometry(geometry.sections * 40, geometry.section)),
            replace(who, geometry=Geometry(1, geometry.nbytes)),
        ]
        for sections in (None, range(1)):
            results = caller.results([caller.read_item(key, w, place, sections) for w in wrong])
            # A different identity says nothing about the record: False would drop it for all readers.
            assert results[:3] == [Miss.REFUSED] * 3
            assert not any(results)
        assert caller.finds([other, key], who, [place, other_place]) == [False, False]
        assert caller.finds([key, other], who, [place, other_place]) == [True, True]

    def test_a_block_larger_than_its_slot_is_a_miss(self, caller: Caller) -> None:
        """Also in tiers that do not check the identity: bytes of a neighbour must never be returned."""
        who, names = GEOMETRIES["one page"], keys(3)
        places = caller.write(names, who)
        large = shaped(1, self.budget)
        assert caller.read([caller.read_item(k, large, p) for k, p in zip(names, places, strict=True)]) == [False] * 3
        assert caller.finds(names, who, places) == [True] * 3

    # -- threads ------------------------------------------------------------------------------------------

    def test_many_threads(self, caller: Caller) -> None:
        """Writes, whole and partial reads, evictions and drops of several shapes at once."""
        shapes = [GEOMETRIES[s] for s in ("one page", "padded sections", "pages without padding")]

        def traffic(number: int) -> int:
            random, who = Random(number), shapes[number % 3]
            held: dict[BlockKey, int] = {}
            for turn in range(8):
                names = keys(4, start=1000 * number + 4 * turn)
                places = caller.write(names, who)
                assert NOWHERE not in places
                held |= dict(zip(names, places, strict=True))
                batch = [caller.read_item(k, who, p) for k, p in held.items()]
                batch += [caller.read_item(k, who, p, range(who.geometry.sections // 2 + 1)) for k, p in held.items()]
                assert all(caller.read(batch))
                caller.statistics()
                out = random.sample(sorted(held), len(held) - 2)
                gone = [(k, held.pop(k)) for k in out]
                if turn % 3:
                    caller.evict(*zip(*gone, strict=True))
                else:
                    assert all(caller.drop(*gone))
            assert all(caller.finds(list(held), who, list(held.values())))
            return len(held)

        with ThreadPoolExecutor(6) as pool:
            left = sum(pool.map(traffic, range(6)))
        assert caller.has(left)

    def test_a_read_that_meets_an_eviction_is_right_or_a_miss(self, caller: Caller) -> None:
        """The slot is evicted and rewritten again and again while other threads read it: never a mixture."""
        if not self.checks_identity:
            pytest.skip("only the index knows whose the blocks of this tier are")
        who, names = GEOMETRIES["pages without padding"], keys(40)
        state = [(names[0], caller.write(names[:1], who)[0])]
        stop = threading.Event()

        def reader() -> int:
            found = 0
            while not (stop.is_set() and found):  # the last written block stays, so in the end a read must find it
                key, place = state[0]
                found += sum(
                    caller.read([caller.read_item(key, who, place), caller.read_item(key, who, place, range(7, 8))])
                )
            return found

        with ThreadPoolExecutor(3) as pool:
            readers = [pool.submit(reader) for _ in range(3)]
            try:
                for key in names[1:]:
                    caller.tier.evict(*state[0])
                    state[0] = key, caller.write([key], who)[0]
            finally:
                stop.set()
        assert sum(r.result() for r in readers) > 0
