"""Whoever can look at all of the arena finds nothing there that was dropped, or of a tenant that was forgotten.

Every prompt's blocks are filled with one value of its own, so that their bytes are known wherever they lie.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

import kvtide
from kvtide import config
from kvtide.block import Layout
from kvtide.errors import UnknownTenantError
from kvtide.index.absence_log import AbsenceCause
from kvtide.index.keys import Model, Tenant
from kvtide.node.client.client import Client
from kvtide.security.key_admin import destroy
from kvtide.security.key_file import KeyFile
from kvtide.store.session import SessionHost
from kvtide.testing.clock import FakeClock
from kvtide.testing.faults import Fault, FaultyDisk, How
from kvtide.testing.keys import WRAPPING
from kvtide.tiers.dram import zeroing
from kvtide.tiers.dram.tier import Dram
from kvtide.tiers.dram.zeroing import zero
from tests.node.serving import Thread, eventually
from tests.test_interrupts import Interrupted, Points

TENANTS = ANN, BOB, EVE = [Tenant(name, name.encode() * 8) for name in ("anne", "bobb", "evee")]


def _model(layers: int, head_dim: int, block_tokens: int) -> Model:
    layout = Layout.attention(layers=layers, heads=1, head_dim=head_dim, dtype="float16", block_tokens=block_tokens)
    return Model(layout, f"{layers}, {head_dim}, {block_tokens}")


MODELS = SMALL, LARGE = _model(2, 128, 16), _model(3, 512, 16)  # slots of 16 KiB, and of 96 KiB
LONG, LONGER = _model(65, 128, 16), _model(66, 128, 16)  # of 520 and 528 KiB, which go into slots of the same size


def opened(clock: FakeClock | None = None, budget: str = "2MiB", segment: str = "1MiB", **more: Any) -> kvtide.Store:
    found = {"dram": {"budget": budget, "segment": segment}, **more}
    return kvtide.Store(config.read(None, env={}, **found), clock=clock)


def tokens(value: int, count: int, model: Model = SMALL) -> list[int]:
    return [value] * (count * model.layout.block_tokens)


def put(
    home: SessionHost, tenant: Tenant, value: int, count: int, model: Model = SMALL, ttl: float | None = None
) -> None:
    block = np.full(model.layout.geometry["full"].nbytes, value, np.uint8)
    with home.session(model, tenant) as session:
        session.store(tokens(value, count, model), [block] * count, ttl=ttl)


def has(home: SessionHost, tenant: Tenant, value: int, count: int, model: Model = SMALL) -> int:
    """Blocks that can be had, all of whose bytes are right."""
    with home.session(model, tenant) as session, session.match(tokens(value, count, model)) as match:
        loaded = session.load(match).wait()
        for view in loaded.blocks:
            assert (np.frombuffer(view, np.uint8)[: model.layout.geometry["full"].nbytes] == value).all()
        return loaded.tokens // model.layout.block_tokens


def left(home: kvtide.Store, value: int) -> int:
    """Bytes in all of the arena that have that value."""
    with home.dram.book_lock:
        views = [memory.view for memory in home.dram._memory.values()]
        return sum(int(np.count_nonzero(np.frombuffer(view, np.uint8) == value)) for view in views)


def test_a_drop_zeroes_its_own_and_nothing_else() -> None:
    with opened() as home:
        put(home, ANN, 1, 4)
        put(home, ANN, 2, 4)
        put(home, BOB, 3, 4)
        assert left(home, 1) == 4 * SMALL.layout.geometry["full"].nbytes
        with home.session(SMALL, ANN) as session:
            assert session.drop(tokens(1, 4)) == 4
        assert left(home, 1) == 0
        assert (has(home, ANN, 2, 4), has(home, BOB, 3, 4)) == (4, 4)
        assert home.statistics().tiers["dram"].blocks == 8, "the slots can be used again"


def test_eviction_and_expiry_zero_nothing() -> None:
    clock = FakeClock()
    with opened(clock) as home:
        put(home, ANN, 1, 4, ttl=10.0)
        put(home, ANN, 2, 4)
        clock.advance(11)
        assert has(home, ANN, 1, 4) == 0
        with home.index.lock:
            rows = home.index.rows(home.session(SMALL, ANN).chain(tokens(2, 4)).keys(b"full"))
            home.pipeline._space._evict(rows[rows > 0].tolist(), [], AbsenceCause.LRU)
        home.dram.wait_zeroed()
        assert (left(home, 1), left(home, 2)) == (4 * 16384, 4 * 16384), "that would cost what eviction must not cost"


def test_what_eviction_left_of_a_tenant_is_zeroed_when_it_is_forgotten() -> None:
    clock = FakeClock()
    with opened(clock) as home:
        put(home, ANN, 1, 8, ttl=10.0)
        put(home, BOB, 2, 8, ttl=10.0)
        put(home, ANN, 3, 8)
        put(home, BOB, 4, 8)
        clock.advance(11)
        assert (has(home, ANN, 1, 8), has(home, BOB, 2, 8)) == (0, 0)
        assert home.forget(ANN.tag) == kvtide.Forgotten(8, held=0)
        assert (left(home, 1), left(home, 3)) == (0, 0)
        assert left(home, 2) > 0, "free slots of others are left alone"
        assert has(home, BOB, 4, 8) == 8


def test_a_tenant_with_nothing_but_traces_in_memory_is_zeroed_though_nothing_else_is_known_of_it() -> None:
    clock = FakeClock()
    with opened(clock) as home:
        put(home, ANN, 1, 8, ttl=10.0)
        clock.advance(11)
        assert has(home, ANN, 1, 8) == 0
        with contextlib.suppress(UnknownTenantError):
            home.forget(ANN.tag)
        assert left(home, 1) == 0


def test_what_somebody_holds_is_counted_and_zeroed_when_he_lets_go() -> None:
    with opened() as home, home.session(SMALL, ANN) as session:
        put(home, ANN, 1, 4)
        put(home, ANN, 2, 4)
        with session.match(tokens(1, 3)) as match:
            loaded = session.load(match).wait()
            assert home.forget(ANN.tag) == kvtide.Forgotten(8, held=3)
            assert all((np.frombuffer(view, np.uint8) == 1).all() for view in loaded.blocks), (
                "the holder has a right to it"
            )
            assert left(home, 1) == 3 * 16384
            assert left(home, 2) == 0
            del loaded
        home.dram.wait_zeroed()
        assert left(home, 1) == 0
        put(home, ANN, 3, 16)
        assert has(home, ANN, 3, 16) == 16, "all slots can be used again"


def test_a_drop_of_what_somebody_holds_does_not_wait_for_him() -> None:
    with opened() as home, home.session(SMALL, ANN) as session:
        put(home, ANN, 1, 4)
        with session.match(tokens(1, 4)) as match:
            session.load(match).wait()
            assert session.drop(tokens(1, 4)) == 4
            assert left(home, 1) == 4 * 16384
        home.dram.wait_zeroed()
        assert left(home, 1) == 0


@pytest.mark.parametrize("how", ["sealed", "aborted"])
def test_what_lies_below_a_block_that_is_being_written(how: str) -> None:
    """Another's reservation has the slots of a tenant that is forgotten meanwhile, and has not written to them."""
    clock = FakeClock()
    with opened(clock) as home, home.session(SMALL, BOB) as session:
        put(home, ANN, 1, 128, ttl=10.0)
        clock.advance(11)
        assert has(home, ANN, 1, 128) == 0
        put(home, ANN, 2, 1)  # so that the tenant is known
        reservation = session.reserve(tokens(3, 8))
        assert len(reservation.views) == 8
        assert home.forget(ANN.tag) == kvtide.Forgotten(1, held=8)
        assert left(home, 1) == 8 * 16384, "only below what is being written"
        if how == "aborted":
            reservation.abort()
        else:
            for span in reservation.views:
                span[:] = bytes([3]) * len(span)
            reservation.seal()
        home.dram.wait_zeroed()
        assert left(home, 1) == 0
        assert has(home, BOB, 3, 8) == (8 if how == "sealed" else 0)


def test_segments_that_were_cut_for_other_slots_since() -> None:
    clock = FakeClock()
    with opened(clock) as home:
        put(home, ANN, 1, 128, ttl=10.0)  # all of the arena
        clock.advance(11)
        assert has(home, ANN, 1, 128) == 0
        put(home, BOB, 2, 3, LARGE)  # some of it is cut anew, into slots that do not fill it
        assert has(home, BOB, 2, 3, LARGE) == 3
        assert left(home, 1) > 0
        put(home, ANN, 3, 1)
        home.forget(ANN.tag)
        assert left(home, 1) == 0
        assert has(home, BOB, 2, 3, LARGE) == 3


def test_the_end_of_a_slot_behind_a_shorter_block() -> None:
    clock = FakeClock()
    with opened(clock, budget="4MiB", segment="4MiB") as home:
        put(home, ANN, 1, 7, LONGER, ttl=10.0)
        clock.advance(11)
        assert has(home, ANN, 1, 7, LONGER) == 0
        put(home, BOB, 2, 6, LONG)
        assert has(home, BOB, 2, 6, LONG) == 6
        assert left(home, 1) > 6 * 8192, "six ends, and one slot"
        put(home, ANN, 3, 1, LONG)
        home.forget(ANN.tag)
        assert left(home, 1) == 0
        assert has(home, BOB, 2, 6, LONG) == 6


def encryption(folder: Path) -> dict[str, Any]:
    (folder / "kek").touch(0o600)
    (folder / "kek").write_bytes(WRAPPING)
    return {
        "nvme": {"path": str(folder / "tier"), "budget": "32MiB", "segment": "1MiB", "codec": "zstd"},
        "security": {"encrypt": True, "key_source": f"file:{folder / 'kek'}", "key_file": str(folder / "keys.json")},
    }


def test_memory_in_which_blocks_were_packed_and_sealed_goes_too(tmp_path: Path) -> None:
    with opened(**encryption(tmp_path)) as home:
        put(home, ANN, 1, 8)
        put(home, BOB, 2, 8)
        assert home.flush(60)
        assert home.statistics().scratch.taken > 0, "there is nothing to give back"
        home.forget(ANN.tag)
        eventually(lambda: home.statistics().scratch.taken == 0)
        put(home, BOB, 3, 8)
        assert home.flush(60)
        assert (has(home, BOB, 2, 8), has(home, BOB, 3, 8)) == (8, 8)


def test_headers_with_token_ids_go_too(tmp_path: Path) -> None:
    where = {"path": str(tmp_path), "budget": "32MiB", "segment": "1MiB", "token_ids": True}
    ids = np.arange(0x5EC0DE00, 0x5EC0DE00 + SMALL.layout.block_tokens, dtype=np.uint32)
    with opened(nvme=where) as home:
        with home.session(SMALL, ANN) as session:
            session.store(ids, [np.full(SMALL.layout.geometry["full"].nbytes, 1, np.uint8)])
        assert home.flush(60)
        headers = [header for pool in home.main._scratch for header in pool._headers]
        assert any(ids.tobytes() in bytes(header._buffer) for header in headers), "there is nothing to give back"
        home.forget(ANN.tag)
        assert not any(map(len, headers))
        put(home, BOB, 2, 8)
        assert home.flush(60)
        assert has(home, BOB, 2, 8) == 8


def test_a_process_that_hears_of_it_later_zeroes_too(tmp_path: Path) -> None:
    with opened(**encryption(tmp_path)) as home:
        put(home, ANN, 1, 4)
        put(home, BOB, 2, 4)
        destroy(KeyFile(tmp_path / "keys.json"), ANN.tag)
        assert home.key_ring is not None
        home.key_ring.tend()
        eventually(lambda: left(home, 1) == 0)
        assert has(home, BOB, 2, 4) == 4


def test_a_node_zeroes_what_its_clients_have_mapped(tmp_path: Path) -> None:
    node = Thread(tmp_path / "node.sock", dram={"budget": "2MiB", "segment": "1MiB"})
    try:
        with Client(tmp_path / "node.sock") as client:
            put(client, ANN, 1, 4)
            put(client, BOB, 2, 4)
            with client.session(SMALL, ANN) as session, session.match(tokens(1, 2)) as match:
                view = session.load(match).wait().blocks[0]
                assert client.forget(ANN.tag) == kvtide.Forgotten(4, held=2)
                assert bytes(view[:4]) == b"\1\1\1\1"
            eventually(lambda: left(node.store, 1) == 0)
            assert has(client, BOB, 2, 4) == 4
    finally:
        node.close()


STEPS = st.one_of(
    st.tuples(st.just("store"), st.integers(0, 2), st.integers(0, 1), st.integers(1, 12)),
    st.tuples(st.just("drop"), st.integers(0, 30)),
    st.tuples(st.just("hold"), st.integers(0, 30)),
    st.tuples(st.just("release")),
    st.tuples(st.just("reserve"), st.integers(0, 2), st.integers(0, 1), st.integers(1, 4), st.booleans()),
    st.tuples(st.just("end")),
    st.tuples(st.just("expire")),
    st.tuples(st.just("forget"), st.integers(0, 2)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, min_size=5, max_size=40))
def test_whatever_came_before_nothing_is_left_of_a_tenant(steps: list[tuple[Any, ...]]) -> None:
    """A value for each tenant, in an arena so small that slots change hands, and segments sizes, all the time."""
    clock = FakeClock()
    prompts: list[tuple[int, int, list[int]]] = []
    held: list[tuple[int, Any, Any]] = []
    writing: list[tuple[int, Any, bool]] = []
    with opened(clock) as home, contextlib.ExitStack() as stack:
        sessions = [[stack.enter_context(home.session(m, t)) for m in MODELS] for t in TENANTS]

        def prompt(tenant: int, model: int, count: int) -> tuple[list[int], list[Any]]:
            chosen = [len(prompts) + 10 + tenant] * (count * 16)
            prompts.append((tenant, model, chosen))
            size = MODELS[model].layout.geometry["full"].nbytes
            return chosen, [np.full(size, tenant + 1, np.uint8)] * count

        def release(of: Any, match: Any) -> None:
            with match:
                pass

        for step in steps:
            match step:
                case "store", tenant, model, count:
                    sessions[tenant][model].store(*prompt(tenant, model, count), ttl=5.0 if count % 2 else None)
                case "drop", number if prompts:
                    tenant, model, chosen = prompts[number % len(prompts)]
                    sessions[tenant][model].drop(chosen)
                case "hold", number if prompts:
                    tenant, model, chosen = prompts[number % len(prompts)]
                    match_ = sessions[tenant][model].match(chosen)
                    held.append((tenant, match_, sessions[tenant][model].load(match_).wait().blocks))
                case ("release",) if held:
                    release(*held.pop(0)[:2])
                case "reserve", tenant, model, count, sealed:
                    chosen, _ = prompt(tenant, model, count)
                    writing.append((tenant, sessions[tenant][model].reserve(chosen), sealed))
                case ("end",) if writing:
                    _end(*writing.pop(0))
                case ("expire",):
                    clock.advance(6)
                    home.main.sweep()
                case "forget", tenant:
                    with contextlib.suppress(UnknownTenantError):
                        home.forget(TENANTS[tenant].tag)
                    if not writing and not any(of == tenant for of, *_ in held):
                        event("a tenant is forgotten")
                        assert left(home, tenant + 1) == 0
            for tenant, _, views in held:
                assert all((np.frombuffer(view, np.uint8) == tenant + 1).all() for view in views)
        for number, match_, _ in held:
            release(number, match_)
        for one in writing:
            _end(*one)
        for tenant in range(3):
            with contextlib.suppress(UnknownTenantError):
                home.forget(TENANTS[tenant].tag)
            home.dram.wait_zeroed()
            assert left(home, tenant + 1) == 0
        assert home.statistics().tiers["dram"].blocks == 0


def _end(tenant: int, reservation: Any, sealed: bool) -> None:
    if not sealed:
        reservation.abort()
        return
    for span in reservation.views:
        span[:] = bytes([tenant + 1]) * len(span)
    reservation.seal()


def test_room_that_is_being_zeroed_is_waited_for_and_nobody_leaves_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    began = threading.Event()

    def late(span: Any) -> None:
        began.wait(0.02)  # nobody sets it: zeroing takes a while
        zero(span)

    monkeypatch.setattr(zeroing, "zero", late)
    with opened() as home, home.session(SMALL, ANN) as session:
        put(home, BOB, 1, 124)
        put(home, ANN, 2, 4)
        with session.match(tokens(2, 4)) as match:
            session.load(match).wait()
            session.drop(tokens(2, 4))
        put(home, ANN, 3, 4)
        assert has(home, ANN, 3, 4) == 4
        assert has(home, BOB, 1, 124) == 124, "others left though there was room"


def test_zeroing_takes_no_more_bandwidth_than_it_may_and_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert zeroing._BANDWIDTH == 4 << 30
    monkeypatch.setattr(zeroing, "_BANDWIDTH", 16 << 20)
    with opened(budget="32MiB") as home, home.session(SMALL, ANN) as session:
        put(home, ANN, 1, 1024)
        assert left(home, 1) == 16 << 20
        with session.match(tokens(1, 1024)) as match:
            session.load(match).wait()
            session.drop(tokens(1, 1024))  # what is held is zeroed behind our back
        began = time.monotonic()
        put(home, BOB, 2, 4)
        assert has(home, BOB, 2, 4) == 4
        assert left(home, 1) > 0, "others have stored and loaded before it was done"
        home.dram.wait_zeroed()
        # It rests after each 4 MiB: three times before the last of them.
        assert time.monotonic() - began > 3 * 4 / 16


def test_a_slot_that_cannot_be_zeroed_is_nobodys_and_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = True

    def fails(span: Any) -> None:
        if broken and span[0] == 1:
            raise MemoryError
        zero(span)

    monkeypatch.setattr(zeroing, "zero", fails)
    with opened() as home, home.session(SMALL, ANN) as session:
        put(home, ANN, 1, 4)
        put(home, ANN, 2, 4)
        assert session.drop(tokens(2, 4)) == 4
        assert session.drop(tokens(1, 4)) == 4
        assert (left(home, 1), left(home, 2)) == (4 * 16384, 0)
        put(home, BOB, 3, 124)
        assert has(home, BOB, 3, 128) == 124, "the other slots are used again"
        put(home, BOB, 4, 1)
        assert left(home, 1) == 4 * 16384, "nobody gets those four"
        assert home.forget(BOB.tag).held == 4, "the caller of forget gets the number"
        assert len([record for record in caplog.records if "zeroing" in record.message]) == 1
        broken = False
        put(home, ANN, 5, 1)
        assert home.forget(ANN.tag) == kvtide.Forgotten(1, held=0)
        assert left(home, 1) == 0
        put(home, BOB, 3, 128)
        assert has(home, BOB, 3, 128) == 128


def waited(dram: Dram) -> bool:
    thread = threading.Thread(target=dram.wait_zeroed, daemon=True)
    thread.start()
    thread.join(30)
    return not thread.is_alive()


def test_who_waits_is_called_though_another_who_waited_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    may, called = threading.Event(), threading.Event()

    def late(span: Any) -> None:
        may.wait()
        zero(span)

    def fails() -> None:
        raise ValueError

    monkeypatch.setattr(zeroing, "zero", late)
    dram = Dram(1 << 20, segment=1 << 20)
    assert dram.grow(16384)
    first, second = dram.take_many(16384, 2)
    dram.zero(np.array([first], np.int64))
    dram.when_zeroed(fails)
    dram.when_zeroed(called.set)
    may.set()
    assert called.wait(30)
    dram.zero(np.array([second], np.int64))
    assert waited(dram), "the thread lives on"
    assert dram.statistics().bytes_used == 0
    dram.close()


def test_nobody_waits_for_an_arena_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    may, called = threading.Event(), threading.Event()

    def late(span: Any) -> None:
        may.wait()
        zero(span)

    monkeypatch.setattr(zeroing, "zero", late)
    dram = Dram(1 << 20, segment=1 << 20)
    assert dram.grow(16384)
    first, second = dram.take_many(16384, 2)
    dram.zero(np.array([first], np.int64))
    dram.when_zeroed(called.set)
    closing = threading.Thread(target=dram.close)
    closing.start()
    assert not called.is_set()
    may.set()
    closing.join(60)
    assert called.is_set(), "who waits when it is closed"
    with dram.book_lock:
        dram._zeroing.add([second])
    assert waited(dram), "who comes later"


@pytest.mark.parametrize("held", [False, True])
def test_a_drop_that_is_interrupted_anywhere_leaves_a_block_or_zeros(held: bool) -> None:
    with opened() as home, home.session(SMALL, ANN) as session:

        def drop() -> None:
            session.drop(tokens(1, 4))

        def run(points: Points) -> str:
            """Where it was interrupted."""
            try:
                if held:
                    with session.match(tokens(1, 4)) as match:
                        session.load(match).wait()
                        drop()
                        points.run(match.release)
                else:
                    points.run(drop)
            except Interrupted as e:
                return str(e)
            return ""

        def interrupted(at: int) -> bool:
            put(home, ANN, 1, 4)
            place = run(Points(at))
            put(home, BOB, 2, 1)  # the next call ends what was left
            home.dram.wait_zeroed()
            assert left(home, 1) == sum(session.find(tokens(1, 4))) * 16384, f"interrupted at {place}"
            return bool(place)

        at = 1
        while interrupted(at):
            at += 1
        assert at > 50, "no call was interrupted: this test tested nothing"


def test_a_forget_that_is_interrupted_anywhere_can_be_repeated() -> None:
    clock = FakeClock()
    with opened(clock) as home:

        def interrupted(at: int) -> bool:
            put(home, ANN, 1, 4, ttl=10.0)
            clock.advance(11)
            assert has(home, ANN, 1, 4) == 0
            place = ""
            try:
                Points(at).run(lambda: home.main.zero_traces(ANN.tag))
            except Interrupted as e:
                place = str(e)
            home.main.zero_traces(ANN.tag)
            assert left(home, 1) == 0, f"interrupted at {place}"
            with home.dram.book_lock:
                assert home.dram.segments.used == 0, f"interrupted at {place}, a slot is nobody's"
            return bool(place)

        at = 1
        while interrupted(at):
            at += 1
        assert at > 50, "no call was interrupted: this test tested nothing"


@pytest.mark.parametrize("how", [How.TORN, How.SHORT, How.FLIP])
def test_what_a_load_that_failed_half_way_has_left_is_zeroed(tmp_path: Path, how: How) -> None:
    disk = FaultyDisk()
    settings = config.read(
        None,
        env={},
        dram={"budget": "2MiB", "segment": "1MiB"},
        nvme={"path": str(tmp_path), "budget": "32MiB", "segment": "1MiB"},
    )
    with kvtide.Store(settings, disk=disk) as home:
        put(home, ANN, 1, 4)
    with kvtide.Store(settings, disk=disk) as home, home.session(SMALL, ANN) as session:
        with session.match(tokens(1, 4)) as match:
            disk.arm(Fault("read", how, files="*.segment", times=1 << 30))
            assert session.load(match).wait().tokens < 64
            disk.disarm()
        assert left(home, 1) > 0, "nothing was read: this test tests nothing"
        with contextlib.suppress(UnknownTenantError):  # what cannot be read is not kept
            home.forget(ANN.tag)
        assert left(home, 1) == 0


@pytest.mark.parametrize("whole", [True, False])
def test_bytes_of_another_that_were_read_in_vain_are_zeroed_when_that_one_is_forgotten(
    tmp_path: Path, whole: bool
) -> None:
    """Somebody puts a blob of one tenant, or half of it, in the place of another's, who asks for it."""
    with opened(files={"path": str(tmp_path)}) as home:
        put(home, ANN, 1, 1)
        assert home.flush(60)
        (blob,) = [file for file in tmp_path.rglob("*") if len(file.name) == 64]
        before = blob.read_bytes()
        put(home, BOB, 2, 1)
        assert home.flush(60)
    (other,) = [file for file in tmp_path.rglob("*") if len(file.name) == 64 and file != blob]
    with opened(files={"path": str(tmp_path)}) as home, home.session(SMALL, BOB) as session:
        with session.match(tokens(2, 1), wait=30) as match:
            assert match.tokens == 16
            other.write_bytes(before if whole else before[: len(before) // 2])
            assert session.load(match).wait().tokens == 0
        assert left(home, 1) > 0, "nothing was read: this test tests nothing"
        home.forget(ANN.tag)
        assert left(home, 1) == 0
