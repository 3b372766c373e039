"""A block leaves a tier only to make room that is then used; what must stay does not stand in the way of others.

Stores of 1 MiB segments with blocks of 64 KiB (``SMALL``), of other sizes, and of sizes that no tier can have.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtide import Layout, Model, Session, Store, Tenant, config, connect
from kvtide.index.index import DRAM, SEALED, Rows
from kvtide.store.match import Stored
from kvtide.store.partition import NVME
from kvtide.testing import blocks
from kvtide.tiers.dram import tier
from kvtide.tiers.segments import segment_of
from kvtide.transfer import space
from tests.books import agree
from tests.node.serving import Thread

MIB = 1 << 20
KIB = 1 << 10
TOKENS = 16


def model(kib: int) -> Model:
    """With blocks of so many KiB."""
    return Model(
        Layout.attention(layers=1, heads=1, head_dim=kib * KIB // 2 // TOKENS, dtype="int8", block_tokens=TOKENS),
        f"given:{kib} KiB",
    )


SMALL, OTHER = model(64), model(80)


def open_store(path: Path | None = None, memory: int = 4, disk: int = 16, **settings: dict[str, Any]) -> Store:
    tree: dict[str, Any] = {"dram": {"budget": memory * MIB, "segment": MIB, "checksum": True}}
    if path is not None:
        tree["nvme"] = {"path": str(path), "budget": disk * MIB, "segment": MIB, "threads": 2, "store": "through"}
    for section, values in settings.items():
        tree.setdefault(section, {}).update(values)
    return Store(config.read(env={}, **tree))


def prompt(*path: int) -> list[int]:
    return [token for number in path for token in [number] * TOKENS]


def data(session: Session, tokens: Sequence[int]) -> list[blocks.Bytes]:
    nbytes = session.layout.geometry["full"].nbytes
    return [blocks.content(key, nbytes) for key in session.chain(tokens).keys(b"full")]


def put(session: Session, *path: int) -> Stored:
    return session.store(prompt(*path), data(session, prompt(*path)))


def right(session: Session, *path: int) -> int:
    """Load a prompt and check every byte; answers how many blocks came."""
    with session.match(prompt(*path)) as match:
        loaded = session.load(match).wait(30)
        for view, expected in zip(loaded.blocks, data(session, prompt(*path)), strict=False):
            assert np.array_equal(np.frombuffer(view, np.uint8), expected), "a wrong byte"
        return loaded.tokens // TOKENS


def blocks_in(store: Store, tier: str = "dram") -> int:
    return store.statistics().tiers[tier].blocks


def evicted(store: Store, tier: str = "dram") -> int:
    return store.statistics().counts.get(f"blocks evicted from {tier}", 0)


def rows_of(session: Session, *path: int) -> Rows:
    index = session.backend.partition.index  # type: ignore[attr-defined]
    rows: Rows = index.rows(session.chain(prompt(*path)).keys(b"full"))
    return rows


def one_of_each_segment(store: Store, session: Session, numbers: Sequence[int], tier: int = DRAM) -> list[int]:
    """Prompts of one block each, in different segments: one for every segment that has any of them."""
    found: dict[int, int] = {}
    with store.index.lock:
        for number in numbers:
            (row,) = rows_of(session, number).tolist()
            if row and store.index.state[tier][row] == SEALED:
                found.setdefault(segment_of(int(store.index.place[tier][row])), number)
    return list(found.values())


# -- what cannot be had costs nothing -----------------------------------------------------------------------


@pytest.mark.parametrize("kib", [5 * KIB, 4 * KIB + 80], ids=["larger", "larger by a slot"])
def test_a_block_larger_than_memory_evicts_nothing(kib: int) -> None:
    with open_store() as store, store.session(SMALL) as small, store.session(model(kib)) as big:
        for number in range(64):
            put(small, number)
        for number in range(3):
            assert put(big, number) == Stored(0, 0, 1)
            with big.reserve(prompt(7, 8)) as reservation:
                assert not reservation.keys
        assert (blocks_in(store), evicted(store)) == (64, 0)
        assert all(right(small, number) == 1 for number in range(64))


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_block_larger_than_the_disk_evicts_nothing_there(tmp_path: Path, codec: str) -> None:
    store = open_store(tmp_path / "kv", memory=64, nvme={"codec": codec})
    with store, store.session(SMALL) as small, store.session(model(20 * KIB)) as big:
        for number in range(64):
            put(small, number)
        assert store.flush(30).complete
        before = blocks_in(store, "nvme")
        for number in range(2):
            assert put(big, number).stored == 1, "there is room in memory"
            assert store.flush(30).complete
        assert (blocks_in(store, "nvme"), evicted(store, "nvme")) == (before, 0)


def test_a_large_block_takes_as_many_segments_as_it_needs_and_no_more() -> None:
    with open_store() as store, store.session(SMALL) as small, store.session(model(2 * KIB)) as big:
        for number in range(64):
            put(small, number)
        assert put(big, 0).stored == 1
        assert (right(big, 0), evicted(store)) == (1, 32)
        assert [n for n in range(64) if right(small, n)] == list(range(32, 64)), "the coldest left"
        assert put(big, 1).stored == 1
        assert put(big, 2).stored == 1
        assert evicted(store) == 65, "two blocks of 2 MiB are all that fits"


@pytest.mark.parametrize("right_", ["match", "reservation"])
def test_a_large_block_that_finds_too_few_segments_evicts_nothing(right_: str) -> None:
    """Three of four segments have a block that somebody holds; a block of 2 MiB would need two."""
    with open_store() as store, store.session(SMALL) as small, store.session(model(2 * KIB)) as big:
        for number in range(64):
            put(small, number)
        held = one_of_each_segment(store, small, range(64))[:3]
        if right_ == "match":
            rights: list[Any] = [small.match(prompt(number)) for number in held]
        else:
            for number in held:
                small.drop(prompt(number))
            rights = [small.reserve(prompt(number)) for number in held]  # in the slots that came free
        before = blocks_in(store)
        assert put(big, 0) == Stored(0, 0, 1)
        assert (blocks_in(store), evicted(store)) == (before, 0)
        for given in rights:
            given.release() if right_ == "match" else given.abort()
        assert put(big, 0).stored == 1


def test_a_prompt_longer_than_what_can_be_had_evicts_only_for_what_it_gets() -> None:
    with open_store() as store, store.session(SMALL) as small:
        for number in range(64):
            put(small, number)
        small.pin(prompt(0))
        rights = [small.match(prompt(number)) for number in range(40)]
        with small.reserve(prompt(*range(100, 200))) as reservation:
            assert len(reservation.keys) == 24
            assert evicted(store) == 24
        for match in rights:
            match.release()


def test_a_load_that_finds_no_room_evicts_nothing(tmp_path: Path) -> None:
    """Memory has blocks of another size, one in each segment held: what is loaded could not have a slot."""
    with open_store(tmp_path / "kv") as store, store.session(SMALL) as small, store.session(OTHER) as other:
        put(other, 1, 2, 3)
        for number in range(500, 500 + 128):  # until ``other`` is out of memory
            put(small, number)
            assert store.flush(30).complete
        with store.index.lock:
            assert not (store.index.state[DRAM][rows_of(other, 1, 2, 3)] == SEALED).any()
        numbers = range(500, 500 + 128)
        rights = [small.match(prompt(number)) for number in one_of_each_segment(store, small, numbers)]
        assert len(rights) == len(store.dram.segments)
        before = evicted(store)
        assert right(other, 1, 2, 3) == 0
        assert evicted(store) == before
        for match in rights:
            match.release()
        assert right(other, 1, 2, 3) == 3


# -- quotas -------------------------------------------------------------------------------------------------

GREEDY = Tenant("greedy", b"the naming secret of the greedy one")


def test_a_block_larger_than_its_tenants_quota_costs_the_tenant_nothing(tmp_path: Path) -> None:
    quotas = {"quotas": f"{GREEDY.tag.hex()}:1MiB"}
    with (
        open_store(tmp_path / "kv", dram=quotas, nvme=quotas) as store,
        store.session(SMALL, GREEDY) as small,
        store.session(model(1500), GREEDY) as big,
    ):
        for number in range(12):
            put(small, number)
        assert store.flush(30).complete
        assert put(big, 0) == Stored(0, 0, 1)
        assert store.flush(30).complete
        assert (evicted(store), evicted(store, "nvme")) == (0, 0)
        assert all(right(small, number) == 1 for number in range(12))


@pytest.mark.parametrize("where", ["dram", "nvme"])
def test_a_quota_that_pins_use_up_costs_the_tenant_nothing(tmp_path: Path, where: str) -> None:
    """Half of the quota is pinned: all the rest would not be enough for the large block, so it stays."""
    quotas: dict[str, Any] = {where: {"quotas": f"{GREEDY.tag.hex()}:1200KiB"}}
    with (
        open_store(tmp_path / "kv", **quotas) as store,
        store.session(SMALL, GREEDY) as small,
        store.session(model(900), GREEDY) as big,
    ):
        for number in range(14):
            put(small, number)
        for number in range(7):
            small.pin(prompt(number))
        assert store.flush(30).complete
        put(big, 0)
        assert store.flush(30).complete
        assert evicted(store, where) == 0
        for number in range(7):
            small.unpin(prompt(number))
        put(big, 1)
        assert store.flush(30).complete
        assert 0 < evicted(store, where) < 14


def test_own_blocks_of_another_size_do_not_leave_for_a_slot_that_cannot_be_had() -> None:
    """The quota could be had by evicting, but every segment has a block that somebody holds."""
    quotas = {"quotas": f"{GREEDY.tag.hex()}:1MiB"}
    with (
        open_store(dram=quotas) as store,
        store.session(SMALL, GREEDY) as mine,
        store.session(SMALL) as others,
        store.session(OTHER, GREEDY) as wanted,
    ):
        for number in range(16):
            put(mine, number)
        for number in range(48):
            put(others, number)
        rights = [s.match(prompt(n)) for s in (mine, others) for n in one_of_each_segment(store, s, range(48))]
        assert put(wanted, 0) == Stored(0, 0, 1)
        assert evicted(store) == 0
        for match in rights:
            match.release()
        assert put(wanted, 0).stored == 1


# -- pinned blocks do not starve other sizes ----------------------------------------------------------------


def test_a_pin_in_every_segment_starves_no_other_size() -> None:
    with open_store() as store, store.session(SMALL) as small, store.session(OTHER) as other:
        for number in range(64):
            put(small, number)
        pinned = one_of_each_segment(store, small, range(64))
        assert len(pinned) == 4
        for number in pinned:
            small.pin(prompt(number))
        done = [put(other, number) for number in range(60)]
        assert sum(one.stored for one in done) == 60
        assert blocks_in(store) >= 0.8 * 4 * MIB / (80 * KIB)
        assert store.statistics().counts["blocks moved in dram"] >= 3
        assert all(right(small, number) == 1 for number in pinned)
        assert store.statistics().held == 0
        for number in range(100, 164):  # and back again
            put(small, number)
        assert all(right(small, number) == 1 for number in (*pinned, *range(150, 164)))


def test_blocks_that_only_lie_scattered_are_moved_together_and_nothing_leaves() -> None:
    with open_store() as store, store.session(SMALL) as small, store.session(OTHER) as other:
        for number in range(64):
            put(small, number)
        stay = {n for i in range(4) for n in range(16 * i, 16 * i + 4)}
        for number in stay:
            small.pin(prompt(number))
        for number in set(range(64)) - stay:
            small.drop(prompt(number))
        assert sum(put(other, number).stored for number in range(36)) == 36
        assert evicted(store) == 0
        assert all(right(small, number) == 1 for number in stay)


def test_what_is_held_is_not_moved_and_another_segment_is_taken() -> None:
    with open_store() as store, store.session(SMALL) as small, store.session(OTHER) as other:
        for number in range(64):
            put(small, number)
        numbers = one_of_each_segment(store, small, range(64))
        for number in numbers:
            small.pin(prompt(number))
        with store.index.lock:
            places = store.index.place[DRAM][rows_of(small, numbers[0])].tolist()
        with small.match(prompt(numbers[0])) as match:
            loaded = small.load(match).wait(0)
            before = bytes(loaded.blocks[0])
            assert sum(put(other, number).stored for number in range(30)) == 30
            with store.index.lock:
                assert store.index.place[DRAM][rows_of(small, numbers[0])].tolist() == places
            assert bytes(loaded.blocks[0]) == before
        assert all(right(small, number) == 1 for number in numbers)


class Copies:
    """Does something in the middle of each copy of a block that is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, what: Any) -> None:
        self.count = 0
        copy = tier.copy

        def copied(target: Any, source: Any) -> None:
            self.count += 1
            copy(target, source)
            what(self.count)

        monkeypatch.setattr(space, "copy", copied)


def full_of_pins(store: Store, small: Session) -> list[int]:
    for number in range(64):
        put(small, number)
    numbers = one_of_each_segment(store, small, range(64))
    for number in numbers:
        small.pin(prompt(number))
    return numbers


def test_a_block_that_is_asked_for_while_it_is_copied_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store() as store, store.session(SMALL) as small, store.session(OTHER) as other:
        numbers = full_of_pins(store, small)
        rights: list[Any] = []

        def ask(count: int) -> None:
            if count == 1:
                rights.extend(small.match(prompt(number)) for number in numbers)

        Copies(monkeypatch, ask)
        put(other, 0)
        assert len(rights) == 4
        for match in rights:
            loaded = small.load(match).wait(0)
            assert loaded.tokens == TOKENS
            match.release()
        assert all(right(small, number) == 1 for number in numbers)
        assert put(other, 1).stored == 1, "nobody holds them any more"
        assert store.statistics().held == 0


def test_a_block_that_is_dropped_while_it_is_copied_leaves_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store() as store, store.session(SMALL) as small, store.session(OTHER) as other:
        numbers = full_of_pins(store, small)
        before = [data(small, prompt(number))[0].tobytes() for number in numbers]

        def drop(count: int) -> None:
            if count == 1:
                assert sum(small.drop(prompt(number)) for number in numbers) == 4

        copies = Copies(monkeypatch, drop)
        put(other, 0)
        assert copies.count
        store.dram.wait_zeroed()
        with store.dram.book_lock:
            memory = b"".join(bytes(memory.view) for memory in store.dram._memory.values())
        assert not any(block in memory for block in before)


def in_order(store: Store) -> bool:
    """Whether nobody holds anything, and every slot is some row's and may be used again."""
    with store.index.lock:
        rows = int(np.count_nonzero(store.index.state[DRAM][: store.index.size]))
    return not (
        store.statistics().held
        or blocks_in(store) != rows
        or any(segment.draining and not segment.empty for segment in store.dram.segments)
    )


@pytest.mark.parametrize("all_of_them", [True, False])
def test_what_shares_a_segment_with_a_block_that_is_asked_for_while_it_is_copied_stays(
    monkeypatch: pytest.MonkeyPatch, all_of_them: bool
) -> None:
    with open_store() as store, store.session(SMALL) as small, store.session(OTHER) as other:
        numbers = full_of_pins(store, small)
        rights: list[Any] = []

        def ask(count: int) -> None:
            if count == 1:
                moved = store.pipeline._space.moving().rows.tolist()
                asked = [n for n in numbers if all_of_them or rows_of(small, n)[0] in moved]
                rights.extend(small.match(prompt(number)) for number in asked)

        Copies(monkeypatch, ask)
        stored = put(other, 0).stored
        assert rights
        for match in rights:
            match.release()
        if all_of_them:
            assert (stored, evicted(store)) == (0, 1), "only what made way for the one that was to be moved"
        else:
            assert stored == 1, "another segment was chosen"
            assert evicted(store) <= 17
        assert in_order(store)


@pytest.mark.parametrize("how", ["match", "pin"])
def test_what_is_asked_for_while_another_is_copied_out_of_its_segment_stays(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with open_store() as store, store.session(SMALL) as small, store.session(OTHER) as other:
        numbers = full_of_pins(store, small)
        rights: dict[int, Any] = {}

        def ask(count: int) -> None:
            if count == 1:
                with store.index.lock:
                    here = [n for n in range(64) if n not in numbers and rows_of(small, n)[0]]
                rights.update((number, getattr(small, how)(prompt(number))) for number in here)

        Copies(monkeypatch, ask)
        put(other, 0)
        assert len(rights) > 50
        assert all(right(small, number) == 1 for number in (*rights, *numbers))
        assert evicted(store) == 1
        for match in rights.values() if how == "match" else ():
            match.release()
        assert in_order(store)


def test_an_interrupt_while_others_are_chosen_to_be_moved_leaves_everything_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open_store() as store, store.session(SMALL) as small, store.session(OTHER) as other:
        numbers = full_of_pins(store, small)
        rights: list[Any] = []
        begin = store.pipeline._space._begin

        def ask(count: int) -> None:
            moved = store.pipeline._space.moving().rows.tolist()
            rights.extend(small.match(prompt(n)) for n in numbers if rows_of(small, n)[0] in moved)

        def interrupted(eviction: Any) -> None:
            if rights:
                raise KeyboardInterrupt
            begin(eviction)

        with monkeypatch.context() as patched:
            Copies(patched, ask)
            patched.setattr(store.pipeline._space, "_begin", interrupted)
            with pytest.raises(KeyboardInterrupt):
                put(other, 0)
        for match in rights:
            match.release()
        assert in_order(store)
        assert put(other, 1).stored == 1
        assert all(right(small, number) == 1 for number in numbers)


def test_a_block_that_is_dropped_while_it_is_copied_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store() as store, store.session(SMALL) as small, store.session(OTHER) as other:
        numbers = full_of_pins(store, small)
        Copies(monkeypatch, lambda count: count == 1 and [small.drop(prompt(number)) for number in numbers])
        assert put(other, 0).stored == 1
        assert [right(small, number) for number in numbers] == [0] * 4
        statistics = store.statistics()
        assert (statistics.held, statistics.pipeline.doomed) == (0, 0)
        with store.index.lock:
            rows = int(np.count_nonzero(store.index.state[DRAM][: store.index.size]))
        assert blocks_in(store) == rows, "no slot is left behind"


def test_an_interrupt_while_blocks_are_copied_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store() as store, store.session(SMALL) as small, store.session(OTHER) as other:
        numbers = full_of_pins(store, small)

        def interrupt(count: int) -> None:
            if count == 1:
                raise KeyboardInterrupt

        Copies(monkeypatch, interrupt)
        with pytest.raises(KeyboardInterrupt):
            put(other, 0)
        assert put(other, 1).stored == 1
        assert all(right(small, number) == 1 for number in numbers)
        assert store.statistics().held == 0


def test_others_use_the_store_while_blocks_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store() as store, store.session(SMALL) as small, store.session(OTHER) as other:
        numbers = full_of_pins(store, small)
        seen: list[int] = []

        def from_elsewhere(count: int) -> None:
            thread = threading.Thread(target=lambda: seen.append(right(small, numbers[-1])))
            thread.start()
            thread.join(30)  # it would wait for ever if the index were locked

        Copies(monkeypatch, from_elsewhere)
        assert put(other, 0).stored == 1
        assert seen
        assert set(seen) == {1}


def test_a_client_of_a_node_finds_a_block_where_it_was_moved_to(tmp_path: Path) -> None:
    """The node remembers where the blocks of a prompt lie that is asked for at every step; a move ends that."""
    settings: dict[str, Any] = {"dram": {"budget": 4 * MIB, "segment": MIB}, "nvme": {"path": ""}}
    node = Thread(tmp_path / "node.sock", env={}, **settings)
    try:
        with connect(f"unix:{node.path}") as client, client.session(SMALL) as small, client.session(OTHER) as other:
            for number in range(64):
                put(small, number)
            chains = {n: small.chain(prompt(n)).keys(b"full")[0] for n in range(64)}
            index, found = node.store.index, dict[int, int]()
            with index.lock:
                for number, key in chains.items():
                    found.setdefault(segment_of(int(index.place[DRAM][index.row(key)])), number)
            for number in range(64):
                if number in found.values():
                    small.pin(prompt(number))
                else:
                    small.drop(prompt(number))  # so that nothing need be evicted: that alone would end it too
            for number in found.values():
                assert [right(small, number) for _ in range(2)] == [1, 1]
            with small.match(prompt(found[0])) as match:
                view = small.load(match).wait(30).blocks[0]
                assert put(other, *range(12)).stored == 12  # all of the segment, over what was there before
                assert np.array_equal(np.frombuffer(view, np.uint8), data(small, prompt(found[0]))[0])
                del view
            counts = node.store.statistics().counts
            assert (counts["blocks moved in dram"], counts.get("blocks evicted from dram", 0)) == (1, 0)
            assert [right(small, number) for number in found.values()] == [1] * len(found)
    finally:
        node.close()


def test_a_large_match_and_pins_together_leave_room_for_the_rest() -> None:
    """A match holds two of four segments whole; pins are in the others."""
    with open_store() as store, store.session(SMALL) as small, store.session(OTHER) as other:
        put(small, *range(32))
        for number in range(100, 132):
            put(small, number)
        pinned = one_of_each_segment(store, small, range(100, 132))
        for number in pinned:
            small.pin(prompt(number))
        with small.match(prompt(*range(32))) as match:
            assert match.blocks == 32
            assert sum(put(other, number).stored for number in range(24)) == 24
        assert right(small, *range(32)) == 32
        assert all(right(small, number) == 1 for number in pinned)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_pins_on_disk_starve_no_other_size(tmp_path: Path, codec: str) -> None:
    """A pinned block in every segment of a full disk: blocks of another size are written all the same."""
    with (
        open_store(tmp_path / "kv", memory=32, nvme={"codec": codec}) as store,
        store.session(SMALL) as small,
        store.session(OTHER) as other,
    ):
        for number in range(220):
            put(small, number)
        assert store.flush(30).complete
        pinned = one_of_each_segment(store, small, range(220), NVME)
        for number in pinned:
            small.pin(prompt(number))
        for number in range(100):
            put(other, number)
            assert store.flush(30).complete
        agree(store)
        with store.index.lock:
            there = [n for n in range(100) if store.index.state[NVME][rows_of(other, n)].tolist() == [SEALED]]
            kept = [n for n in pinned if store.index.state[NVME][rows_of(small, n)].tolist() == [SEALED]]
        assert len(there) >= 80
        assert kept == pinned, "they were written again"
        assert all(right(small, number) == 1 for number in pinned)


# -- store = "eviction" -------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [12, 48, 60])
def test_a_match_that_is_held_for_long_does_not_stop_the_others(tmp_path: Path, held: int) -> None:
    with open_store(tmp_path / "kv", disk=64, nvme={"store": "eviction"}) as store, store.session(SMALL) as small:
        put(small, *range(held))
        with small.match(prompt(*range(held))) as match:
            dropped = 0
            for number in range(1000, 1150):
                dropped += put(small, number).dropped
                assert store.flush(30).complete
            assert match.held
        assert dropped == 0
        assert store.statistics().tiers["nvme"].blocks >= 150 - 64
        assert right(small, *range(held)) == held


def test_what_only_memory_has_does_not_keep_its_segments_from_another_size(tmp_path: Path) -> None:
    """Blocks of the other size come while memory is full of such that must be written down before they leave."""
    with (
        open_store(tmp_path / "kv", disk=64, nvme={"store": "eviction"}) as store,
        store.session(SMALL) as small,
        store.session(OTHER) as other,
    ):
        for number in range(64):
            put(small, number)
            assert store.flush(30).complete
        stored = 0
        for number in range(100):
            stored += put(other, number).stored
            assert store.flush(30).complete
        assert stored >= 95, "but for the first, before anything was written down"
        found = sum(right(small, number) for number in range(64))
        assert found == 64, "nothing that left memory was lost"
