"""What leaves when a tier is full: the deepest block of the coldest chain, never a pinned or held one."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide import BlockRemoved, Session, Store, Tenant
from kvtide.block import ALIGN, BlockKey
from kvtide.index.index import DRAM, SEALED, Index, Rows
from kvtide.plan.evict import Evictor
from kvtide.plan.policy import Lru
from kvtide.plan.usage_tracker import UsageTracker
from kvtide.testing import blocks
from kvtide.tiers.segments import Segments
from tests.plan.small import LAYOUT, MODEL, SLOTS, Clock, content, keep, length, open_store, prompt, right


def present(store: Store, keys: list[BlockKey], tier: int = DRAM) -> list[bool]:
    with store.index.lock:
        found: list[bool] = (store.index.state[tier][store.index.rows(keys)] == SEALED).tolist()
    return found


# -- leaf first ---------------------------------------------------------------------------------------------

PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=SLOTS + 4).map(tuple)
STEPS = st.one_of(
    st.tuples(st.just("store"), PATHS, st.integers(0, 3)),
    st.tuples(st.just("grow"), PATHS, st.integers(1, 6)),
    st.tuples(st.just("touch"), PATHS, st.just(0)),
    st.tuples(st.just("load"), PATHS, st.just(0)),
)


@pytest.mark.parametrize("part", [1 << 30, 1], ids=["at once", "in parts"])
@settings(max_examples=60, deadline=None)
@given(steps=st.lists(STEPS, max_size=14))
def test_no_block_outlives_its_parent(part: int, steps: list[tuple[str, tuple[int, ...], int]]) -> None:
    """Whatever is stored and asked for, what is present is always whole prefixes: nothing useless takes room."""
    with pytest.MonkeyPatch.context() as patch, open_store() as store, store.session(MODEL) as mine:
        patch.setattr(mine.backend, "first_part", part)
        parents: dict[BlockKey, BlockKey] = {}
        for verb, path, number in steps:
            tokens = prompt(*path)
            keys = mine.chain(tokens).keys(b"full")
            parents.update(zip(keys[1:], keys, strict=False))
            if verb == "store":
                keep(mine, *path, priority=number)
            elif verb == "grow":
                with mine.match(tokens) as match:
                    have = match.blocks
                # A turn after the match was released: only what is new is given.
                mine.store(tokens, content(mine, tokens)[have : have + number], start=have)
            elif verb == "touch":
                length(mine, *path)
            else:
                right(mine, *path)
            known = list(parents.items())
            children = present(store, [c for c, _ in known])
            orphans = [
                child
                for (child, _), here, parent in zip(known, children, present(store, [p for _, p in known]), strict=True)
                if here and not parent
            ]
            assert not orphans, f"{len(orphans)} blocks without their parent after {verb} {path}"


def test_a_chain_longer_than_dram_keeps_its_head() -> None:
    with open_store() as store, store.session(MODEL) as mine:
        path = range(SLOTS + 5)
        done = mine.store(prompt(*path), content(mine, prompt(*path)))
        assert (done.stored, done.present, done.dropped) == (SLOTS, 0, 5)
        assert right(mine, *path) == SLOTS


def test_a_turn_does_not_push_out_its_own_beginning() -> None:
    """The conversation that grows is the oldest in the store: its own head must not make the room."""
    with open_store() as store, store.session(MODEL) as mine:
        keep(mine, *range(4))
        for other in range(100, 100 + SLOTS - 4):
            keep(mine, other)
        tokens = prompt(*range(8))
        done = mine.store(tokens, content(mine, tokens)[4:], start=4)
        assert done.stored == 4
        assert right(mine, *range(8)) == 8


def test_the_least_recently_used_leaves_first() -> None:
    with open_store() as store, store.session(MODEL) as mine:
        for number in range(SLOTS):
            keep(mine, number)
        assert length(mine, 0) == 1  # asked for: now the newest
        keep(mine, 100)
        keep(mine, 101)
        assert [length(mine, n) for n in (0, 1, 2, 3)] == [1, 0, 0, 1]


def test_eviction_is_announced() -> None:
    with open_store() as store, store.session(MODEL) as mine:
        (first,) = keep(mine, 0)
        for number in range(1, SLOTS):
            keep(mine, number)
        seen: list[object] = []
        store.follow(seen.append)
        keep(mine, 100)
        assert BlockRemoved("dram", (first,), "evicted") in seen
        assert store.statistics().counts["blocks evicted from dram"] == 1


# -- priority, pins, holds, time ----------------------------------------------------------------------------


def test_higher_priority_outlasts_all_of_lower() -> None:
    with open_store() as store, store.session(MODEL) as mine:
        keep(mine, 0, priority=1)
        keep(mine, 1, priority=-1)
        keep(mine, 2)
        for number in range(100, 100 + SLOTS - 2):  # one more than there is room for
            keep(mine, number)
        assert [length(mine, n) for n in (0, 1, 2)] == [1, 0, 1]
        for number in range(200, 200 + 3 * SLOTS):
            keep(mine, number)
        assert [length(mine, n) for n in (0, 2)] == [1, 0]


def test_a_parent_has_at_least_its_childs_priority() -> None:
    with open_store() as store, store.session(MODEL) as mine:
        keep(mine, 0, 1)
        tokens = prompt(0, 1, 2)
        mine.store(tokens, content(mine, tokens)[2:], start=2, priority=7)
        for number in range(100, 100 + 2 * SLOTS):
            keep(mine, number)
        assert right(mine, 0, 1, 2) == 3


def test_pinned_blocks_stay_until_every_pin_is_gone() -> None:
    with open_store() as store, store.session(MODEL) as mine:
        keep(mine, 0, 1)
        assert mine.pin(prompt(0, 1)) == 2
        assert mine.pin(prompt(0, 1), stop=1) == 1
        for number in range(100, 100 + 2 * SLOTS):
            keep(mine, number)
        assert (length(mine, 0, 1), store.statistics().pinned) == (2, 2)
        assert mine.unpin(prompt(0, 1)) == 2
        for number in range(200, 200 + 2 * SLOTS):
            keep(mine, number)
        assert length(mine, 0, 1) == 1, "the first block has a pin left"
        assert mine.unpin(prompt(0, 1)) == 1
        assert mine.unpin(prompt(0, 1)) == 0


def test_a_store_full_of_pins_drops_what_comes_and_says_so() -> None:
    with open_store() as store, store.session(MODEL) as mine:
        path = range(SLOTS)
        keep(mine, *path)
        mine.pin(prompt(*path))
        done = mine.store(prompt(99), content(mine, prompt(99)))
        assert (done.stored, done.dropped) == (0, 1)
        assert store.statistics().counts["stores dropped: no room in DRAM"] == 1
        assert right(mine, *path) == SLOTS


def test_a_match_keeps_its_blocks_and_only_those() -> None:
    with open_store() as store, store.session(MODEL) as mine:
        keep(mine, *range(SLOTS))
        with mine.match(prompt(*range(3))):
            for number in range(100, 100 + 2 * SLOTS):
                keep(mine, number)
            assert length(mine, *range(SLOTS)) == 3
        for number in range(200, 200 + 2 * SLOTS):
            keep(mine, number)
        assert length(mine, *range(SLOTS)) == 0
        assert store.statistics().held == 0


def test_ttl_ends_a_block_and_gives_its_room_back() -> None:
    clock = Clock()
    with open_store(clock=clock) as store, store.session(MODEL) as mine:
        seen: list[object] = []
        store.follow(seen.append)
        keys = keep(mine, 0, 1, ttl=10)
        keep(mine, 2)
        clock.now += 9.9
        assert length(mine, 0, 1) == 2
        clock.now += 0.2
        assert length(mine, 0, 1) == 0
        assert [e for e in seen if isinstance(e, BlockRemoved)] == [BlockRemoved("dram", tuple(keys), "expired")]
        assert (store.statistics().blocks, store.statistics().tiers["dram"].blocks) == (1, 1)
        keep(mine, 0, 1)
        clock.now += 1e9
        assert right(mine, 0, 1) == 2, "stored anew, for good"


def test_a_held_block_that_expires_goes_when_it_is_let_go_and_may_come_anew() -> None:
    clock = Clock()
    with open_store(clock=clock) as store, store.session(MODEL) as mine:
        keep(mine, 0, ttl=10)
        keep(mine, 1, ttl=20)
        keep(mine, 2, ttl=30)
        with mine.match(prompt(0)) as match:
            clock.now += 11
            assert length(mine, 0) == 0
            keep(mine, 0)
            clock.now += 10  # the next one expires while the first is still held
            assert length(mine, 1) == 0
            assert length(mine, 0) == 1, "the new block is not taken for the old"
            assert mine.load(match).wait().tokens == LAYOUT.block_tokens
            assert store.statistics().tiers["dram"].blocks == 3  # the old, its successor, and 2
        assert store.statistics().tiers["dram"].blocks == 2
        assert right(mine, 0) == 1


def test_a_block_that_expires_while_it_is_written_is_never_seen() -> None:
    clock = Clock()
    with open_store(clock=clock) as store, store.session(MODEL) as mine:
        seen: list[object] = []
        store.follow(seen.append)
        reservation = mine.reserve(prompt(0), ttl=10)
        clock.now += 11
        assert length(mine, 0) == 0
        reservation.seal()
        assert length(mine, 0) == 0
        assert (store.statistics().blocks, store.statistics().tiers["dram"].blocks) == (0, 0)
        assert seen == [], "nobody was told of it, so nobody is told that it went"


# -- tenants ------------------------------------------------------------------------------------------------


QUIET, LOUD = Tenant("quiet", b"q" * 32), Tenant("loud", b"l" * 32)


def held(session: Session, count: int) -> int:
    return sum(length(session, number) for number in range(count))


def test_a_tenant_over_its_share_loses_blocks_first() -> None:
    with open_store() as store:
        quiet, loud = store.session(MODEL, QUIET), store.session(MODEL, LOUD)
        for number in range(SLOTS // 2):
            keep(quiet, number)
        for number in range(3 * SLOTS):
            keep(loud, number, priority=5)
        assert held(quiet, SLOTS // 2) >= SLOTS // 2 - 1, "half of the tier, but for the block that comes in"
        for number in range(3 * SLOTS):
            keep(quiet, number)
        assert SLOTS // 2 - 1 <= held(loud, 3 * SLOTS) <= SLOTS // 2 + 1


def test_what_one_tenant_does_not_want_another_may_have() -> None:
    with open_store() as store:
        quiet, loud = store.session(MODEL, QUIET), store.session(MODEL, LOUD)
        keep(quiet, 0)
        for number in range(3 * SLOTS):
            keep(loud, number)
        assert (held(quiet, 1), held(loud, 3 * SLOTS)) == (1, SLOTS - 1)
        keep(quiet, 1, 2, 3)
        assert (held(quiet, 1), length(quiet, 1, 2, 3), held(loud, 3 * SLOTS)) == (1, 3, SLOTS - 4)


def test_a_tenant_that_loses_blocks_loses_leaves() -> None:
    with open_store() as store:
        quiet, loud = store.session(MODEL, QUIET), store.session(MODEL, LOUD)
        keep(loud, *range(SLOTS))
        keep(quiet, *range(5))
        assert (length(loud, *range(SLOTS)), length(quiet, *range(5))) == (SLOTS - 5, 5)


# -- the NVMe tier ------------------------------------------------------------------------------------------


def test_a_full_disk_loses_leaves_first_and_keeps_its_budget(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv") as store, store.session(MODEL) as mine:
        for chain in range(40):
            keep(mine, *(100 * chain + i for i in range(12)))
            assert store.flush(30)
            tier = store.statistics().tiers["nvme"]
            assert tier.bytes_taken <= tier.budget
        assert store.statistics().counts["blocks evicted from nvme"] > 100
        for chain in range(40):
            keys = mine.chain(prompt(*(100 * chain + i for i in range(12)))).keys(b"full")
            here = present(store, keys, 1)
            assert here == sorted(here, reverse=True), "a prefix, or nothing"


# -- segments of several sizes ------------------------------------------------------------------------------


class Book:
    """A tier that is nothing but its book of segments."""

    def __init__(self, budget: int) -> None:
        self.segments = Segments(budget, 4 * ALIGN)
        self.book_lock = threading.Lock()


def test_a_segment_with_a_slot_that_is_not_erased_yet_is_left_alone() -> None:
    """A dropped block's slot keeps its owner's number until it is erased, and the number may be another block's."""
    index, book = Index(tiers=2), Book(8 * ALIGN)
    uses = UsageTracker(index)
    evictor = Evictor(index, 1, book, Lru(index), uses)
    segment = book.segments.add(ALIGN, 4)
    rows = []
    for key in blocks.keys(2):
        row = index.add(key, bytes(32), 0)
        place = book.segments.take(ALIGN, row)
        assert place is not None
        index.put(row, 1, SEALED, place)
        rows.append(row)
    uses.touch(np.array(rows))
    stale = book.segments.take(ALIGN, rows[0])  # of a block that was dropped; its row number was used again
    assert stale is not None
    assert not evictor.victims(2 * ALIGN), "or one block would leave twice"
    assert not segment.draining
    book.segments.release(stale)
    assert sorted(evictor.victims(2 * ALIGN).leave) == sorted(rows)
    assert segment.draining


def test_no_row_is_chosen_twice() -> None:
    index, book = Index(tiers=2), Book(8 * ALIGN)
    uses = UsageTracker(index)
    evictor = Evictor(index, 1, book, Lru(index), uses)
    book.segments.add(ALIGN, 4)
    (key,) = blocks.keys(1)
    row = index.add(key, bytes(32), 0)
    place, _ = book.segments.take(ALIGN, row), book.segments.take(ALIGN, row)
    assert place is not None
    index.put(row, 1, SEALED, place)
    uses.touch(np.array([row]))
    assert evictor.victims(ALIGN, count=4).leave == [row]


# -- after a restart ----------------------------------------------------------------------------------------


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Parents by position (-1: a root), each before its children, an order of writing, and priorities."""
    count = draw(st.integers(1, 30))
    parents = [draw(st.integers(-1, i - 1)) for i in range(count)]
    return parents, draw(st.permutations(range(count))), [draw(st.sampled_from([0, 0, -3, 5])) for _ in range(count)]


@given(forests())
def test_restore_keeps_every_parent_above_its_children(forest: tuple[list[int], list[int], list[int]]) -> None:
    parents, sequences, priorities = forest
    index = Index(tiers=2)
    depths: list[int] = []
    for i, parent in enumerate(parents):
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        index.add(blocks.keys(1, start=i)[0], bytes(32), depths[i])
    rows: Rows = np.arange(1, len(parents) + 1)
    index.priority[rows] = priorities
    policy, uses = Lru(index), UsageTracker(index)
    uses.restore(rows, np.array(parents), np.array(sequences))
    scores = policy.score(rows).tolist()
    assert len(set(scores)) == len(scores)
    for child, parent in enumerate(parents):
        assert parent < 0 or scores[parent] > scores[child]
    # A block is as young as the youngest that hangs on it; of two such, the later one leaves later.
    newest, highest = list(sequences), list(priorities)
    for child in reversed(range(len(parents))):
        if (parent := parents[child]) >= 0:
            newest[parent] = max(newest[parent], newest[child])
            highest[parent] = max(highest[parent], highest[child])
    for a in range(len(parents)):
        for b in range(len(parents)):
            if (highest[a], newest[a]) < (highest[b], newest[b]):
                assert scores[a] < scores[b]
    later = index.add(blocks.keys(1, start=999)[0], bytes(32), 0)
    index.priority[later] = max(priorities)
    uses.touch(np.array([later]))
    assert policy.score(np.array([later]))[0] > max(scores), "what is used now is younger than all from before"


def test_after_a_restart_a_parent_has_the_priority_that_its_child_gave_it(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv") as store, store.session(MODEL) as mine:
        keep(mine, 0, 1)
        assert store.flush(30)  # on disk it has priority 0 for ever
        tokens = prompt(0, 1, 2)
        mine.store(tokens, content(mine, tokens)[2:], start=2, priority=7)
    with open_store(tmp_path / "kv") as store, store.session(MODEL) as mine:
        for chain in range(1, 41):
            keep(mine, *(100 * chain + i for i in range(12)))
            assert store.flush(30)
        assert store.statistics().counts["blocks evicted from nvme"] > 100
        assert right(mine, 0, 1, 2) == 3


def test_after_a_restart_the_oldest_chain_leaves_first(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv") as store, store.session(MODEL) as mine:
        for chain in range(12):
            keep(mine, *(100 * chain + i for i in range(12)))
            assert store.flush(30)
    with open_store(tmp_path / "kv") as store, store.session(MODEL) as mine:
        before = store.statistics().tiers["nvme"].blocks
        assert before > 100
        for chain in range(50, 54):
            keep(mine, *(100 * chain + i for i in range(12)))
            assert store.flush(30)
        lengths = []
        for chain in range(12):
            keys = mine.chain(prompt(*(100 * chain + i for i in range(12)))).keys(b"full")
            here = present(store, keys, 1)
            assert here == sorted(here, reverse=True)
            lengths.append(sum(here))
        assert lengths == sorted(lengths), "the older, the less is left"
        assert lengths[-1] == 12
