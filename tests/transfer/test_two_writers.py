"""Two who write the same blocks at the same time, in all orders of their ends: one never waits for the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtide import Session, Store
from kvtide import config as configuration
from kvtide.index.lease import Reservation
from kvtide.testing.clock import FakeClock
from kvtide.testing.interface import MODEL, PLAIN, SIZE, check, data, prompt
from kvtide.tiers.dram.copy import same_shape

TOKENS = prompt(1, 2, 3)
BLOCKS = 3
SLOT = PLAIN.geometry["full"].footprint


@contextmanager
def opened(nvme: Path | None = None, clock: FakeClock | None = None) -> Iterator[Store]:
    tree: dict[str, Any] = {"dram": {"budget": 64 * SLOT, "segment": "1MiB", "quotas": f"default:{20 * SLOT}"}}
    if nvme is not None:
        tree["nvme"] = {"path": str(nvme), "budget": "16MiB", "segment": "1MiB", "store": "through", "threads": 2}
    with Store(configuration.read(None, env={}, **tree), clock=clock) as store:
        yield store


def fill(made: Reservation, tokens: list[int] = TOKENS) -> None:
    blocks, geometry = data(PLAIN, tokens), PLAIN.geometry["full"]
    for depth, view in zip(made.depths, made.views, strict=True):
        to, source = same_shape(geometry, view, blocks[depth].data)
        to[...] = source


def length(session: Session, tokens: list[int]) -> int:
    """The tokens of a prompt that can be had now, loaded and checked, without waiting for who is writing it."""
    with session.match(tokens) as match:
        loaded = session.load(match).wait(30)
        check(PLAIN, loaded, tokens)
        return loaded.tokens


def check_balance(store: Store, blocks: int) -> None:
    """Nothing is held, and so many blocks have slots and are charged."""
    assert store.flush(30)
    found = store.statistics()
    pipeline = found.pipeline
    assert (pipeline.leases, pipeline.reservations, pipeline.pending, pipeline.doomed) == (0, 0, 0, 0)
    assert (found.held, found.pinned) == (0, 0)
    assert found.tiers["dram"].blocks == blocks
    assert [tenant.blocks["dram"] for tenant in found.tenants.values()] == [blocks]
    assert found.blocks >= blocks
    assert store.index.size - 1 - len(store.index._free) == found.blocks, "no row is left behind"


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("dropped", ["never", "at first", "in between"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("ends", [(a, b) for a in ("seal", "abort", "die") for b in ("seal", "abort", "die")])
def test_all_orders_of_their_ends(
    tmp_path: Path, ends: tuple[str, str], order: tuple[int, int], dropped: str, cold: bool
) -> None:
    with opened(tmp_path if cold else None) as store, store.session(MODEL) as reader:
        sessions = [store.session(MODEL) for _ in range(2)]
        made = [session.reserve(TOKENS) for session in sessions]
        assert [len(one.keys) for one in made] == [BLOCKS, BLOCKS]
        assert [(one.refused, one.pending) for one in made] == [(0, 0), (0, 0)]
        done = reader.store(TOKENS, data(PLAIN, TOKENS))
        assert (done.stored, done.present, done.dropped, done.pending) == (0, 0, 0, BLOCKS)
        here = False
        if dropped == "at first":
            reader.drop(TOKENS)
        for n, who in enumerate(order):
            if dropped == "in between" and n:
                reader.drop(TOKENS)
                here = False
            fill(made[who])
            if ends[who] == "seal":
                made[who].seal()
                here |= dropped == "never" or (dropped == "in between" and n == 0)
            elif ends[who] == "abort":
                made[who].abort()
            else:
                sessions[who].close()
            assert length(reader, TOKENS) == (len(TOKENS) if here else 0)
        check_balance(store, BLOCKS if here else 0)
        # What comes later is stored, once.
        done = reader.store(TOKENS, data(PLAIN, TOKENS))
        assert (done.stored, done.present) == ((0, BLOCKS) if here else (BLOCKS, 0))
        assert length(reader, TOKENS) == len(TOKENS)
        for session in sessions:
            session.close()
        check_balance(store, BLOCKS)


def test_the_first_copy_that_is_sealed_stays(tmp_path: Path) -> None:
    """A block is not replaced while it is read, and a late writer does not write into slots of others."""
    with opened() as store, store.session(MODEL) as slow, store.session(MODEL) as quick:
        late = slow.reserve(TOKENS)
        assert quick.store(TOKENS, data(PLAIN, TOKENS)).stored == BLOCKS
        with quick.match(TOKENS) as match:
            views = quick.load(match).wait().blocks
            before = [bytes(view) for view in views]
            for view in late.views:
                view[:] = b"\xff" * len(view)
            late.seal()
            assert [bytes(view) for view in views] == before
        assert length(quick, TOKENS) == len(TOKENS)
        check_balance(store, BLOCKS)


def test_pins_and_priorities_go_with_the_key(tmp_path: Path) -> None:
    with opened() as store, store.session(MODEL) as slow, store.session(MODEL) as quick:
        late = slow.reserve(TOKENS)
        assert quick.pin(TOKENS) == BLOCKS
        quick.store(TOKENS, data(PLAIN, TOKENS))
        assert store.statistics().pinned == BLOCKS
        late.abort()
        assert store.statistics().pinned == BLOCKS
        assert quick.unpin(TOKENS) == BLOCKS
        check_balance(store, BLOCKS)


def test_a_block_that_comes_from_disk_is_present(tmp_path: Path) -> None:
    with opened(tmp_path) as store, store.session(MODEL) as session:
        session.store(TOKENS, data(PLAIN, TOKENS))
    with opened(tmp_path) as store, store.session(MODEL) as session:
        with session.match(TOKENS) as match:
            load = session.load(match)
            done = session.store(TOKENS, data(PLAIN, TOKENS))
            assert (done.stored, done.present, done.pending) == (0, BLOCKS, 0)
            assert load.wait(30).tokens == len(TOKENS)
        check_balance(store, BLOCKS)


def test_a_second_copy_that_expires_before_it_is_sealed(tmp_path: Path) -> None:
    clock = FakeClock()
    with opened(clock=clock) as store, store.session(MODEL) as slow, store.session(MODEL) as quick:
        late, second = slow.reserve(TOKENS), quick.reserve(TOKENS, ttl=5.0)
        clock.advance(10.0)
        assert length(quick, TOKENS) == 0
        fill(second)
        second.seal()
        assert length(quick, TOKENS) == 0
        fill(late)
        late.seal()
        assert length(quick, TOKENS) == len(TOKENS)
        check_balance(store, BLOCKS)


def test_many_threads_store_the_same(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        results = []

        def work() -> None:
            with store.session(MODEL) as session:
                for n in range(20):
                    tokens = prompt(n, n + 1)
                    results.append(session.store(tokens, data(PLAIN, tokens)))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(results) == 80
        assert all(done.stored + done.present + done.pending + done.dropped == 2 for done in results)
        # While a slow disk writes, the tenant's quota may be full of blocks that cannot leave, and stores are dropped.
        assert store.flush(60)
        with store.session(MODEL) as session:
            tokens = prompt(19, 20)
            assert session.store(tokens, data(PLAIN, tokens)).dropped == 0
            assert length(session, tokens) == 2 * SIZE
        found = store.statistics()
        check_balance(store, found.tiers["dram"].blocks)


_acts = st.lists(
    st.tuples(st.sampled_from(["reserve", "seal", "abort", "die", "store", "drop", "evict"]), st.integers(0, 2)),
    max_size=25,
)


@given(_acts)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_three_writers_do_all_is_given_back(acts: list[tuple[str, int]]) -> None:
    with opened() as store, store.session(MODEL) as reader:
        sessions: list[Session] = [store.session(MODEL) for _ in range(3)]
        made: dict[int, Reservation] = {}
        for act, who in acts:
            if act == "reserve" and who not in made:
                made[who] = sessions[who].reserve(TOKENS[: SIZE * (who + 1)])
                fill(made[who])
            elif act in ("seal", "abort") and who in made:
                getattr(made.pop(who), act)()
            elif act == "die":
                sessions[who].close()
                made.pop(who, None)
                sessions[who] = store.session(MODEL)
            elif act == "store":
                tokens = TOKENS[: SIZE * (who + 1)]
                done = reader.store(tokens, data(PLAIN, tokens))
                assert done.stored + done.present + done.pending == who + 1
                assert length(reader, tokens) >= SIZE * (done.stored if done.stored == who + 1 else 0)
            elif act == "drop":
                reader.drop(TOKENS)
                assert length(reader, TOKENS) == 0
            elif act == "evict":
                store.pipeline.make_room(0, SLOT)
            length(reader, TOKENS)  # checks all bytes
        for session in sessions:
            session.close()
        reader.drop(TOKENS)
        check_balance(store, 0)
