"""The table of blocks: what is found, how long a prefix is usable, and that rows are reused and stay small."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide import Group, Kind, Layout
from kvtide.block import BlockKey
from kvtide.index.index import ABSENT, DRAM, NOWHERE, PENDING, SEALED, Index, Mask, Rows
from kvtide.index.pins import PinCharge, Pins
from kvtide.testing import blocks

NVME = 1
ROOT = bytes(32)


def add(index: Index, key: BlockKey, *states: int) -> int:
    row = index.add(key, ROOT, 0)
    for tier, state in enumerate(states):
        if state != ABSENT:
            index.put(row, tier, state, 7)
    return row


# -- usable -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("states", "usable"),
    [
        ((SEALED, ABSENT), True),
        ((ABSENT, SEALED), True),
        ((SEALED, PENDING), True),  # on its way down: read from DRAM
        ((PENDING, SEALED), True),  # on its way up
        ((PENDING, ABSENT), False),
        ((ABSENT, PENDING), False),
        ((ABSENT, ABSENT), False),
    ],
)
def test_a_block_is_usable_once_it_is_complete_in_some_tier(states: tuple[int, int], usable: bool) -> None:
    index = Index(tiers=2)
    known, other = blocks.keys(2)
    add(index, known, *states)
    assert index.usable(index.rows([other, known, other]), now=0.0).tolist() == [False, usable, False]


def test_what_has_expired_is_not_usable_from_that_moment_on() -> None:
    index = Index(tiers=1)
    (key,) = blocks.keys(1)
    row = add(index, key, SEALED)
    index.expire_at([row], 10.0)
    assert index.usable(np.array([row]), now=9.999).tolist() == [True]
    assert index.usable(np.array([row]), now=10.0).tolist() == [False]


def test_an_empty_question_has_an_empty_answer() -> None:
    index = Index(tiers=2)
    assert index.usable(index.rows([]), 0.0).tolist() == []


# -- the longest usable prefix ------------------------------------------------------------------------------

KINDS = {
    "full": Group("full", Kind.FULL, 1, 1, 64, "int8", page=1),
    "latent": Group("latent", Kind.MLA, 1, 1, 64, "int8", page=1),
    "near": Group("near", Kind.WINDOW, 1, 1, 64, "int8", window=10, page=1),
    "nearer": Group("nearer", Kind.WINDOW, 1, 1, 64, "int8", window=4, page=1),
    "mamba": Group("mamba", Kind.STATE, 1, 1, 64, "int8", page=1),
    "eagle": Group("eagle", Kind.DRAFT, 1, 1, 64, "int8", page=1),
}


@st.composite
def presences(draw: st.DrawFn) -> tuple[Layout, dict[str, list[bool]]]:
    names = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4, unique=True))
    if names == ["eagle"]:
        names = ["eagle", "full"]
    layout = Layout(tuple(KINDS[n] for n in names), draw(st.sampled_from([1, 2, 4, 8])))
    length = draw(st.integers(0, 12))
    return layout, {n: draw(st.lists(st.booleans(), min_size=length, max_size=length)) for n in names}


def usable(layout: Layout, present: dict[str, list[bool]], length: int) -> bool:
    """The rules of the design, token by token: does every required group have what a prefix of ``length`` needs?"""
    size = layout.block_tokens
    for group in layout.groups:
        have = present[group.name]
        end = length * size
        match group.kind:
            case Kind.FULL | Kind.MLA:
                good = all(have[:length])
            case Kind.WINDOW:
                good = all(have[t // size] for t in range(max(0, end - group.window), end))
            case Kind.STATE:
                good = length == 0 or have[length - 1]
            case Kind.DRAFT:
                good = True
        if not good:
            return False
    return True


@given(presences())
def test_lengths_are_those_that_the_rules_allow(case: tuple[Layout, dict[str, list[bool]]]) -> None:
    layout, present = case
    index = Index(tiers=2)
    rows: dict[str, Rows] = {}
    whole: dict[str, Mask] = {}
    for name, have in present.items():
        keys = blocks.keys(len(have), name.encode())
        for i, (key, here) in enumerate(zip(keys, have, strict=True)):
            if here:
                add(index, key, *((SEALED, ABSENT) if i % 2 else (ABSENT, SEALED)))
        rows[name] = index.rows(keys)
        whole[name] = index.usable(rows[name], 0.0)
        assert whole[name].tolist() == have
    blocks_count = len(next(iter(present.values())))
    found = index.lengths(layout, rows, whole)
    assert found.tolist() == [usable(layout, present, n) for n in range(blocks_count + 1)]
    assert found[0], "the empty prefix is always usable"


# -- rows ---------------------------------------------------------------------------------------------------


def test_rows_of_unknown_keys_are_row_0_which_is_nowhere() -> None:
    index = Index(tiers=2)
    one, two = blocks.keys(2)
    row = add(index, one, SEALED)
    assert index.rows([two, one, two]).tolist() == [0, row, 0]
    assert (index.row(one), index.row(two)) == (row, 0)
    assert not index.usable(np.array([0]), 0.0).any()
    assert not index.evictable(np.array([0]), DRAM).any()


def test_a_retired_row_is_used_again_and_remembers_nothing() -> None:
    index = Index(tiers=2)
    one, two = blocks.keys(2)
    row = add(index, one, SEALED)
    somebody = Pins()
    index.pin(np.array([row]), somebody, 4096)
    index.priority[row] = 5
    index.expire_at([row], 1.0)
    assert not index.retire(row), "it is in a tier"
    assert index.remove(row, DRAM) == 7
    assert index.retire(row)
    assert not index.retire(row), "only once"
    assert (len(index), index.row(one)) == (0, 0)
    again = index.add(two, b"\x01" * 32, 9)
    assert again == row
    assert index.key(again) == two
    assert (index.pins[row], index.priority[row], index.expiry[row], index.depth[row]) == (0, 0, np.inf, 9)
    assert index.parent(row) == b"\x01" * 32
    assert index.place[DRAM][row] == NOWHERE
    assert index.size == 2, "no row was added"
    assert (len(somebody), somebody.nbytes, somebody.charge.nbytes) == (0, 0, 0)


def test_a_row_that_is_held_is_not_retired_before_it_is_let_go() -> None:
    index = Index(tiers=1)
    (key,) = blocks.keys(1)
    row = add(index, key, SEALED)
    rows = np.array([row])
    index.hold(rows)
    index.hold(rows)
    assert not index.evictable(rows, DRAM).any()
    index.remove(row, DRAM)
    index.unhold(rows)
    assert index.row(key) == row
    index.unhold(rows)
    assert index.row(key) == 0
    assert len(index) == 0


def test_letting_go_of_a_row_that_is_somewhere_keeps_it() -> None:
    index = Index(tiers=2)
    here, gone = blocks.keys(2)
    rows = np.array([add(index, here, ABSENT, SEALED), add(index, gone, ABSENT, SEALED)])
    index.hold(rows)
    index.remove(int(rows[1]), NVME)
    changes = index.changes
    index.unhold(rows)
    assert (index.row(here) > 0, index.row(gone)) == (True, 0)
    assert index.changes > changes, "a fruitless search for victims is worth another try"


def test_what_is_pinned_pending_or_absent_is_not_evictable() -> None:
    index = Index(tiers=2)
    rows = np.array([add(index, k, *s) for k, s in zip(blocks.keys(4), [(2, 2), (2,), (1, 2), (0, 2)], strict=True)])
    index.pins[rows[1]] = 1
    assert index.evictable(rows, DRAM).tolist() == [True, False, False, False]
    assert index.evictable(rows, NVME).tolist() == [True, False, True, True]


def test_a_detached_row_is_found_by_nobody_and_its_key_may_come_again() -> None:
    index = Index(tiers=1)
    (key,) = blocks.keys(1)
    old = add(index, key, SEALED)
    index.hold(np.array([old]))
    index.detach_many(np.array([old]))
    assert index.row(key) == 0
    new = add(index, key, SEALED)
    assert new != old
    index.remove(old, DRAM)
    index.unhold(np.array([old]))
    assert index.row(key) == new, "the old row goes without the new one's name"


def test_a_block_names_its_parent_after_that_is_gone() -> None:
    index = Index(tiers=1)
    parent, child, other = blocks.keys(3)
    above = index.add(parent, ROOT, 0)
    row = index.add(child, parent[:32], 1)
    assert index.parent(row) == parent[:32]
    assert index.retire(above)
    assert index.add(other, ROOT, 0) == above, "its row is another's now"
    assert index.parent(row) == parent[:32]


def test_the_table_grows_and_keeps_every_fact() -> None:
    index = Index(tiers=2)
    keys = blocks.keys(3000)
    for i, key in enumerate(keys):
        row = index.add(key, key[:32], i)
        index.put(row, i % 2, SEALED, i)
        index.expire_at([row], 100.0 + i)
    rows = index.rows(keys)
    assert len(set(rows.tolist())) == 3000
    assert index.depth[rows].tolist() == list(range(3000))
    assert index.expiry[rows].tolist() == [100.0 + i for i in range(3000)]
    assert all(index.parent(r) == k[:32] for r, k in zip(rows.tolist(), keys, strict=True))
    assert index.place[0][rows].tolist() == [i if i % 2 == 0 else NOWHERE for i in range(3000)]
    assert index.usable(rows, 0.0).all()
    row = index.add(blocks.keys(1, start=3000)[0], ROOT, 0)
    assert (index.place[1][row], index.expiry[row], index.holds[row]) == (NOWHERE, np.inf, 0)


def test_many_rows_at_once_are_the_same_rows() -> None:
    index = Index(tiers=2)
    keys = blocks.keys(2500)
    parents = [ROOT, *(k[:32] for k in keys[:-1])]
    parents[100] = b"\x01" * 32
    rows, above = index.add_many(keys, np.frombuffer(b"".join(parents), "V32"), np.arange(2500))
    assert index.rows(keys).tolist() == rows.tolist()
    assert index.key(int(rows[-1])) == keys[-1]
    assert index.depth[rows].tolist() == list(range(2500))
    assert [index.parent(row) for row in rows.tolist()] == parents
    assert above.tolist() == [0 if i in (0, 100) else row - 1 for i, row in enumerate(rows.tolist())]
    assert index.add(blocks.keys(1, start=9999)[0], ROOT, 0) == rows[-1] + 1


def test_a_block_takes_at_most_300_bytes() -> None:
    count = 100_000
    keys = (BlockKey(i.to_bytes(32, "little") + b"full") for i in range(count))
    gc.collect()
    tracemalloc.start()
    try:
        index = Index(tiers=2)
        for key in keys:
            index.put(index.add(key, ROOT, 3), DRAM, SEALED, 1)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(index) == count
    # Columns that have grown are mappings, which are not traced.
    parts = [part for fact in vars(index).values() for part in (fact if isinstance(fact, list) else [fact])]
    used += sum(part.nbytes for part in parts if isinstance(part, np.ndarray))
    assert used / count <= 300, f"{used / count:.0f} bytes a block, its key included"


def test_pins_are_their_owners_and_any_number_counts() -> None:
    index = Index(tiers=1)
    many, one, nobody = Pins(), Pins(), Pins()
    row = np.array([index.add(BlockKey(b"a" * 36), bytes(32), 0)])
    for _ in range(70_000):
        index.pin(row, many)
    index.pin(row, one)
    assert index.pins[row] == 65_535
    assert [index.unpin(row, owner) for owner in (one, one, nobody)] == [1, 0, 0]
    assert index.pins[row] > 0
    assert not index.unpin_some(many, 1)
    assert index.pins[row] == 0
    assert index.unpin(row, many) == 0


def test_a_block_is_charged_once_to_each_owner_until_its_last_pin_ends() -> None:
    index = Index(tiers=1)
    both = PinCharge()
    me, you = Pins(both), Pins(both)
    row = np.array([index.add(BlockKey(b"a" * 36), bytes(32), 0)])
    charged = []
    for owner, change in ((me, 1), (me, 1), (you, 1), (me, -1), (me, -1), (you, -1)):
        if change > 0:
            index.pin(row, owner, 100)
        else:
            index.unpin(row, owner)
        charged.append((me.nbytes, you.nbytes, both.nbytes))
    assert charged == [(100, 0, 100), (100, 0, 100), (100, 100, 200), (100, 100, 200), (0, 100, 100), (0, 0, 0)]


def test_the_pins_of_a_detached_row_end_though_it_is_held() -> None:
    index = Index(tiers=1)
    owner = Pins()
    row = np.array([add(index, BlockKey(b"a" * 36), SEALED)])
    index.hold(row)
    index.pin(row, owner, 100)
    index.detach_many(row)
    assert (owner.nbytes, index.statistics().pinned, index.unpin(row, owner)) == (0, 0, 0)
    again = np.array([add(index, BlockKey(b"a" * 36), SEALED)])
    index.pin(again, owner, 100)
    index.remove(int(row[0]), DRAM)
    index.unhold(row)
    assert (owner.nbytes, index.statistics().pinned) == (100, 1), "those of the row that followed it stay"


def test_pins_of_a_session_that_ends_are_ended_in_slices() -> None:
    index = Index(tiers=1)
    owner, other = Pins(), Pins()
    rows = np.array([add(index, key, SEALED) for key in blocks.keys(10)])
    index.pin(rows, owner, 1)
    index.pin(rows[:3], other, 1)
    left = []
    while index.unpin_some(owner, 4):
        left.append(owner.nbytes)
    assert left == [6, 2]
    assert (owner.nbytes, other.nbytes, index.statistics().pinned) == (0, 3, 3)


# -- expiry -------------------------------------------------------------------------------------------------


def test_expired_rows_are_found_in_parts_and_none_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.index.index._SEARCHED", 3)
    index = Index(tiers=1)
    rows = [add(index, key, SEALED) for key in blocks.keys(20)]
    index.expire_at(rows[::2], 10.0)
    index.expire_at(rows[1::2], 20.0)
    found: list[int] = []
    late = rows[1]
    while index.next_expiry <= 15.0:
        some = index.expired(15.0, 2)
        assert len(some) <= 2
        index.expire_at(some, np.inf)
        found += some.tolist()
        if len(found) == 6:
            index.expire_at([late], 12.0)  # behind what was searched already
    assert sorted(found) == sorted([*rows[::2], late])
    assert index.next_expiry == 20.0


def test_a_row_that_lives_longer_since_it_was_found_expired_stays() -> None:
    index = Index(tiers=1)
    rows = np.array([add(index, key, SEALED) for key in blocks.keys(4)])
    index.expire_at(rows, 10.0)
    assert index.expired(10.0, 1).tolist() == rows[:1].tolist()
    index.extend(rows[1:3], 30.0)
    assert index.expired(10.0, 9).tolist() == rows[3:].tolist()
    assert index.next_expiry == 30.0


def test_whoever_sleeps_is_told_only_of_an_earlier_expiry() -> None:
    index, told = Index(tiers=1), []
    index.on_earlier_expiry = lambda: told.append(index.next_expiry)
    rows = np.array([add(index, key, SEALED) for key in blocks.keys(2)])
    index.expire_at(rows, np.inf)
    for when in (50.0, 60.0, 40.0):
        index.expire_at(rows, when)
    assert told == [50.0, 40.0]
