"""The contract of a tier (``kvtide.tiers.base``) as tests. Needs pytest.

Subclass it, say how a tier is made and what it can do, and run pytest::

    class TestMine(TierContract):
        persistent = True

        def make(self, where: Path, budget: int) -> Tier:
            return Mine(where, budget)

Whatever is read is compared, byte for byte, with what its key says it must be; every batch must be answered exactly
once; every tier is closed at the end, and must have finished by then what it was given.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Generic, TypeVar

import numpy as np
import pytest
from msgspec import structs

from kvtide.block import BlockKey, Geometry, Group, Kind, Layout
from kvtide.index.keys import Tenant
from kvtide.testing.blocks import Bytes, aligned, content, fill, holds, identity, keys
from kvtide.tiers.base import NOWHERE, Held, Identity, Read, Tier, TierStatistics, Write

__all__ = ["GEOMETRIES", "Answer", "Caller", "TierContract", "shaped"]

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds until a batch without an answer is taken for lost."""


def shaped(sections: int, section: int) -> Identity:
    """The identity of blocks of ``sections`` sections of ``section`` bytes, bfloat16 if that is an even number."""
    dtype, tokens = ("uint8", section) if section % 2 else ("bfloat16", section // 2)
    group = Group("full", Kind.MLA, layers=sections, heads=1, head_dim=1, dtype=dtype, page=1)
    return identity(Layout((group,), block_tokens=tokens))


GEOMETRIES = {
    "one page": shaped(1, 4096),
    "one padded section": shaped(1, 5000),
    "one byte": shaped(1, 1),
    "padded sections": shaped(4, 4100),
    "pages without padding": shaped(8, 20480),
    "a header of two pages": shaped(130, 100),
}


class Answer(Generic[T]):
    """The ``done`` of one batch: waits for it, and knows whether it was called once."""

    def __init__(self, items: int) -> None:
        self._items = items
        self._calls: list[list[T]] = []
        self._event = threading.Event()

    def __call__(self, results: Sequence[T]) -> None:
        self._calls.append(list(results))
        self._event.set()

    def wait(self) -> list[T]:
        assert self._event.wait(PATIENCE), "a batch was never answered"
        return self._calls[0]

    def check(self) -> None:
        assert len(self._calls) == 1, f"done was called {len(self._calls)} times"
        assert len(self._calls[0]) == self._items, "one answer per item"


class Caller:
    """Calls a tier with blocks whose bytes follow from their keys, and checks what comes back.

    Every write has an owner of its own, as from an index. Safe from any thread.
    """

    def __init__(self, tier: Tier, make_content: Callable[[bytes, int], Bytes] = content, exact: bool = True) -> None:
        self.tier = tier
        self._content = make_content
        self._exact = exact
        self._owners = itertools.count(1)
        self._answers: list[Answer[bool] | Answer[int]] = []
        self._closed = False

    def _answer(self, answer: Answer[T]) -> Answer[T]:
        self._answers.append(answer)  # type: ignore[arg-type]
        return answer

    # -- without waiting

    def start_write(self, batch: Sequence[Write]) -> Answer[int]:
        answer = self._answer(Answer[int](len(batch)))
        self.tier.write(batch, answer)
        return answer

    def start_read(self, batch: Sequence[Read]) -> Answer[bool]:
        answer = self._answer(Answer[bool](len(batch)))
        self.tier.read(batch, answer)
        return answer

    def start_drop(self, items: Sequence[tuple[BlockKey, int]]) -> Answer[bool]:
        answer = self._answer(Answer[bool](len(items)))
        self.tier.drop(items, answer)
        return answer

    # -- whole blocks

    def block(self, key: BlockKey, who: Identity, depth: int = 0) -> Write:
        """The write of a block."""
        span = aligned(who.geometry.footprint)
        if self._exact:
            fill(span, who.geometry, self._content(key, who.geometry.nbytes))
        return Write(key, who, span.toreadonly(), bytes(32), depth, next(self._owners))

    def write(self, names: Sequence[BlockKey], who: Identity) -> list[int]:
        """Write blocks as one batch; answers their places."""
        return self.start_write([self.block(k, who) for k in names]).wait()

    def wish(self, key: BlockKey, who: Identity, place: int, sections: range | None = None) -> Read:
        """The read of a block, or of some sections."""
        count = who.geometry.sections if sections is None else len(sections)
        return Read(key, who, place, aligned(count * who.geometry.stride), sections)

    def read(self, batch: Sequence[Read]) -> list[bool]:
        """Read as one batch. What is found must be right to the last byte."""
        results = self.start_read(batch).wait()
        for item, found in zip(batch, results, strict=True):
            if found and self._exact:
                geometry = item.identity.geometry
                data = self._content(item.key, geometry.nbytes)
                assert holds(item.span, geometry, data, item.sections), f"wrong bytes: {item.key.hex()}"
        return results

    def finds(self, names: Sequence[BlockKey], who: Identity, places: Sequence[int]) -> list[bool]:
        """Which blocks can be read, each checked to the last byte."""
        return self.read([self.wish(k, who, p) for k, p in zip(names, places, strict=True)])

    def drop(self, *items: tuple[BlockKey, int]) -> list[bool]:
        return self.start_drop(items).wait()

    def evict(self, names: Sequence[BlockKey], places: Sequence[int]) -> None:
        for key, place in zip(names, places, strict=True):
            self.tier.evict(key, place)

    def fill(self, who: Identity, start: int = 0, limit: int = 100_000) -> dict[BlockKey, int]:
        """Write new blocks until one finds no room; answers those that did."""
        found: dict[BlockKey, int] = {}
        for number in range(start, start + limit):
            (key,) = keys(1, start=number)
            (place,) = self.write([key], who)
            if place == NOWHERE:
                return found
            found[key] = place
            self.statistics()
        raise AssertionError(f"{limit} blocks and still not full")

    def statistics(self) -> TierStatistics:
        """The tier's, checked for what must hold at every instant."""
        now = self.tier.statistics()
        assert 0 <= now.bytes_used <= now.bytes_taken <= now.budget
        return now

    def close(self) -> None:
        """Close the tier. By then every batch must have been answered, once."""
        if not self._closed:
            self._closed = True
            self.tier.close()
            for answer in self._answers:
                answer.check()


class TierContract(ABC):
    """See the module's text."""

    keeps_bytes = True
    """What is read is what was written. False for a tier that only pretends."""
    checks_identity = True
    """A read with another key, model, tenant or layout is refused. False where only the index knows."""
    persistent = False
    """Blocks are there when the tier is closed and made again in the same place."""
    budget = 4 << 20
    """Bytes that ``make`` is given."""

    @abstractmethod
    def make(self, where: Path, budget: int) -> Tier:
        """A tier of at most ``budget`` bytes. If it is persistent it keeps them in the folder ``where``."""

    def content(self, key: bytes, nbytes: int) -> Bytes:
        """The bytes of a block; always the same for one key."""
        return content(key, nbytes)

    def open(self, where: Path, budget: int | None = None) -> Caller:
        return Caller(self.make(where, budget or self.budget), self.content, self.keeps_bytes)

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
        assert caller.read([caller.wish(key, who, place, r) for r in ranges]) == [True] * len(ranges)
        mixed = [caller.wish(other, who, other_place), caller.wish(key, who, place, range(2, 4))]
        assert caller.read(mixed) == [True, True]

    def test_sections_that_a_block_has_not_are_refused(self, caller: Caller) -> None:
        who, (key,) = GEOMETRIES["padded sections"], keys(1)
        (place,) = caller.write([key], who)
        caller.write(keys(3, start=1), who)  # neighbours, whose bytes must not be taken for its own
        wrong = [range(3, 5), range(4, 5), range(-1, 1), range(2, 2), range(0, 4, 2), range(100, 101)]
        batch = [Read(key, who, place, aligned(8 * who.geometry.stride), r) for r in wrong]
        if self.keeps_bytes:
            batch.append(Read(key, who, place, aligned(3 * who.geometry.stride), None))  # no room for all of it
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

    # -- one answer per item, one call per batch ----------------------------------------------------------

    def test_a_bad_item_does_not_spoil_its_batch(self, caller: Caller) -> None:
        who, names = GEOMETRIES["padded sections"], keys(4)
        huge = shaped(1, 2 * self.budget)
        batch = [caller.block(k, who) for k in names]
        batch[2] = caller.block(names[2], huge)
        places = caller.start_write(batch).wait()
        assert [p == NOWHERE for p in places] == [False, False, True, False]
        wishes = [caller.wish(k, who, p) for k, p in zip(names, places, strict=True)]
        assert caller.read(wishes) == [True, True, False, True]
        assert caller.drop((names[0], places[0]), (names[2], NOWHERE), (names[3], places[3])) == [True] * 3
        assert caller.finds(names, who, places) == [False, True, False, False]

    def test_an_empty_batch_is_answered(self, caller: Caller) -> None:
        assert caller.start_write([]).wait() == []
        assert caller.start_read([]).wait() == []
        assert caller.start_drop([]).wait() == []

    def test_done_may_call_the_tier(self, caller: Caller) -> None:
        """A lane starts the next batch when one ends, on whatever thread that is."""
        who, (first, second) = GEOMETRIES["one page"], keys(2)
        ends = Answer[bool](1)

        def then_write(places: Sequence[int]) -> None:
            assert caller.tier.statistics().blocks == 1
            caller.tier.write([caller.block(second, who)], lambda more: then_read(places[0], more[0]))

        def then_read(place: int, more: int) -> None:
            caller.tier.read([caller.wish(second, who, more)], lambda found: then_drop(place, found[0]))

        def then_drop(place: int, found: bool) -> None:
            assert found
            caller.tier.evict(first, place)
            caller.tier.drop([(first, NOWHERE)], ends)

        caller.tier.write([caller.block(first, who)], then_write)
        assert ends.wait() == [True]
        assert caller.statistics().blocks == 1

    def test_close_finishes_what_was_submitted(self, where: Path) -> None:
        who, names = GEOMETRIES["pages without padding"], keys(16)
        caller = self.open(where)
        held = caller.write(names[:4], who)
        writes = [caller.start_write([caller.block(k, who) for k in names[i : i + 4]]) for i in range(4, 16, 4)]
        reads = caller.start_read([caller.wish(k, who, p) for k, p in zip(names, held, strict=False)])
        caller.close()
        assert reads.wait() == [True] * 4
        places = held + [p for w in writes for p in w.wait()]
        assert NOWHERE not in places
        again = self.open(where)
        found = {k: p for held_now in again.tier.scan() for k, p in _places(held_now)}
        assert found == (dict(zip(names, places, strict=True)) if self.persistent else {})
        again.close()

    # -- what is not there --------------------------------------------------------------------------------

    def test_unknown_places_are_misses(self, caller: Caller) -> None:
        who, (key,) = GEOMETRIES["one page"], keys(1)
        strange = [NOWHERE, 0, 1, 77, 5 << 32, (1 << 40) + 3, 1 << 62, -(1 << 40)]
        assert caller.finds([key] * len(strange), who, strange) == [False] * len(strange)
        (place,) = caller.write([key], who)
        unknown = [p for p in strange if p != place]
        assert caller.finds([key] * len(unknown), who, unknown) == [False] * len(unknown)
        assert caller.drop(*[(keys(1, start=5)[0], p) for p in unknown]) == [True] * len(unknown)
        assert caller.finds([key], who, [place]) == [True]
        assert caller.statistics().blocks == 1

    def test_evicted_and_dropped_blocks_are_misses(self, caller: Caller) -> None:
        who, names = GEOMETRIES["padded sections"], keys(4)
        places = caller.write(names, who)
        caller.tier.evict(names[0], places[0])
        assert caller.drop((names[1], places[1])) == [True]
        assert caller.finds(names, who, places) == [False, False, True, True]
        single = [caller.wish(k, who, p, range(1, 2)) for k, p in zip(names, places, strict=True)]
        assert caller.read(single) == [False, False, True, True]
        # Dropping what is gone is no error, with its old place or without.
        assert caller.drop((names[0], NOWHERE), (names[1], NOWHERE), (names[1], places[1])) == [True] * 3
        assert caller.statistics().blocks == 2

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
        assert caller.read([caller.wish(key, w, place) for w in wrong]) == [False] * len(wrong)
        assert caller.read([caller.wish(key, w, place, range(1)) for w in wrong]) == [False] * len(wrong)
        assert caller.finds([other, key], who, [place, other_place]) == [False, False]
        assert caller.finds([key, other], who, [place, other_place]) == [True, True]

    def test_a_block_larger_than_its_slot_is_a_miss(self, caller: Caller) -> None:
        """Also where nobody checks whose it is: bytes of a neighbour must never be seen."""
        who, names = GEOMETRIES["one page"], keys(3)
        places = caller.write(names, who)
        large = shaped(1, self.budget)
        assert caller.read([caller.wish(k, large, p) for k, p in zip(names, places, strict=True)]) == [False] * 3
        assert caller.finds(names, who, places) == [True] * 3

    # -- the budget ---------------------------------------------------------------------------------------

    def test_a_full_tier_refuses_and_keeps_what_it_has(self, caller: Caller) -> None:
        who = GEOMETRIES["pages without padding"]
        held = caller.fill(who)
        names, places = list(held), list(held.values())
        # Most of the budget really is room for blocks.
        assert len(held) * who.geometry.nbytes > 0.7 * self.budget
        assert caller.write(keys(3, start=10_000), who) == [NOWHERE] * 3
        assert caller.finds(names, who, places) == [True] * len(held)
        now = caller.statistics()
        assert (now.blocks, now.failed_writes) == (len(held), 4)

    def test_evicted_room_is_used_again(self, caller: Caller) -> None:
        who = GEOMETRIES["pages without padding"]
        held = caller.fill(who)
        count = len(held)
        random = Random(1)
        for turn in range(4):
            out = random.sample(sorted(held), count // 3)
            if turn % 2:
                caller.evict(out, [held.pop(k) for k in out])
            else:
                assert all(caller.drop(*[(k, held.pop(k)) for k in out]))
            held |= caller.fill(who, start=1000 * (turn + 1))
            assert len(held) == count
            assert caller.finds(list(held), who, list(held.values())) == [True] * count
            assert caller.statistics().blocks == count

    def test_two_shapes_take_turns(self, caller: Caller) -> None:
        """Each finds as much room as it did the first time, however often they alternate."""
        shapes = [GEOMETRIES["pages without padding"], shaped(2, 9000)]
        room: dict[int, int] = {}
        for turn in range(6):
            who = shapes[turn % 2]
            held = caller.fill(who, start=1000 * turn)
            assert len(held) >= 0.9 * room.setdefault(turn % 2, len(held))
            assert caller.finds(list(held), who, list(held.values())) == [True] * len(held)
            caller.evict(list(held), list(held.values()))
        assert caller.statistics().blocks == 0

    def test_statistics_add_up(self, caller: Caller) -> None:
        who, names = GEOMETRIES["pages without padding"], keys(6)
        start = caller.statistics()
        assert (start.blocks, start.bytes_used, start.bytes_read, start.bytes_written) == (0, 0, 0, 0)
        assert start.budget <= self.budget
        places = caller.write(names, who)
        written = caller.statistics()
        assert written.blocks == 6
        assert written.bytes_written > 0
        assert 0 < written.bytes_used <= written.bytes_taken
        caller.finds(names, who, places)
        whole = caller.statistics().bytes_read
        assert whole > 0
        caller.read([caller.wish(names[0], who, places[0], range(2))])
        part = caller.statistics().bytes_read - whole
        assert 0 < part < whole / 6
        caller.evict(names[:2], places[:2])
        caller.finds(names[:2], who, places[:2])
        assert caller.statistics().failed_reads == 2
        caller.drop(*zip(names[2:], places[2:], strict=True))
        end = caller.statistics()
        assert (end.blocks, end.bytes_used) == (0, 0)
        assert (end.bytes_read, end.bytes_written) == (whole + part, written.bytes_written)

    # -- threads ------------------------------------------------------------------------------------------

    def test_many_threads(self, caller: Caller) -> None:
        """Writes, whole and partial reads, evictions and drops of several shapes at once."""
        shapes = [GEOMETRIES[s] for s in ("one page", "padded sections", "pages without padding")]

        def traffic(number: int) -> int:
            random, who = Random(number), shapes[number % 3]
            held: dict[BlockKey, int] = {}
            for turn in range(12):
                names = keys(4, start=1000 * number + 4 * turn)
                places = caller.write(names, who)
                assert NOWHERE not in places
                held |= dict(zip(names, places, strict=True))
                batch = [caller.wish(k, who, p) for k, p in held.items()]
                batch += [caller.wish(k, who, p, range(who.geometry.sections // 2 + 1)) for k, p in held.items()]
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
        assert caller.statistics().blocks == left

    def test_a_read_that_meets_an_eviction_is_right_or_a_miss(self, caller: Caller) -> None:
        """The slot is evicted and written anew again and again while others read it: never a mixture."""
        if not self.checks_identity:
            pytest.skip("only the index knows whose the blocks of this tier are")
        who, names = GEOMETRIES["pages without padding"], keys(40)
        state = [(names[0], caller.write(names[:1], who)[0])]
        stop = threading.Event()

        def reader() -> int:
            found = 0
            while not (stop.is_set() and found):  # what was written last stays, so in the end a read must find it
                key, place = state[0]
                found += sum(caller.read([caller.wish(key, who, place), caller.wish(key, who, place, range(7, 8))]))
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

    # -- across openings ----------------------------------------------------------------------------------

    def test_what_outlives_closing(self, where: Path) -> None:
        caller = self.open(where)
        assert list(caller.tier.scan()) in ([], [_EMPTY])
        who, names = GEOMETRIES["padded sections"], keys(8)
        batch = [
            structs.replace(
                caller.block(k, who),
                parent=names[i - 1][:32] if i else bytes(32),
                depth=i,
                expiry=float("inf") if i % 2 else 2e9 + i,
                priority=i - 4,
                tokens=bytes(range(i)),
            )
            for i, k in enumerate(names)
        ]
        places = [caller.start_write([item]).wait()[0] for item in batch]
        assert caller.finds(names, who, places) == [True] * 8
        assert caller.drop((names[7], places[7])) == [True]
        caller.tier.evict(names[6], places[6])
        assert caller.drop((names[6], NOWHERE)) == [True]
        caller.close()

        again = self.open(where)
        held = list(again.tier.scan())
        if not self.persistent:
            assert held in ([], [_EMPTY])
            assert again.statistics().blocks == 0
            assert again.finds(names, who, places) == [False] * 8
            again.close()
            return
        assert {k: p for h in held for k, p in _places(h)} == dict(zip(names[:6], places[:6], strict=True))
        rows = sorted(
            (s, k, bytes(p), d, e, y)
            for h in held
            for s, k, p, d, e, y in zip(
                h.sequences.tolist(),
                h.keys,
                h.parents.tolist(),
                h.depths.tolist(),
                h.expiries.tolist(),
                h.priorities.tolist(),
                strict=True,
            )
        )
        assert [row[1:] for row in rows] == [(w.key, w.parent, w.depth, w.expiry, w.priority) for w in batch[:6]]
        for h in held:
            again.tier.own(h.places, np.arange(1, len(h.places) + 1))
        assert again.finds(names, who, places) == [True] * 6 + [False] * 2
        assert again.statistics().blocks == 6
        # And it goes on as if it had never been closed.
        more = keys(4, start=100)
        more_places = again.write(more, who)
        assert again.drop((names[0], places[0])) == [True]
        again.close()
        third = self.open(where)
        assert sorted(k for h in third.tier.scan() for k in h.keys) == sorted(names[1:6] + more)
        assert third.finds(names[1:6] + more, who, places[1:6] + more_places) == [True] * 9
        third.close()

    def test_the_budget_holds_across_openings(self, where: Path) -> None:
        caller = self.open(where)
        who = GEOMETRIES["pages without padding"]
        held = caller.fill(who)
        caller.close()
        less = self.open(where, self.budget // 2)
        kept = {k: p for h in less.tier.scan() for k, p in _places(h)}
        now = less.statistics()
        assert now.budget <= self.budget // 2
        assert now.blocks == len(kept) <= len(held) // 2
        assert all(held[k] == p for k, p in kept.items())
        assert less.finds(list(kept), who, list(kept.values())) == [True] * len(kept)
        less.fill(who, start=5000)
        assert less.finds(list(kept), who, list(kept.values())) == [True] * len(kept)
        less.close()


def _places(held: Held) -> list[tuple[BlockKey, int]]:
    return list(zip(held.keys, held.places.tolist(), strict=True))


class _Nothing:
    """Equal to any Held without blocks."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and not other.keys

    __hash__ = None  # type: ignore[assignment]


_EMPTY = _Nothing()
