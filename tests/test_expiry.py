"""How long blocks live, and that removing them keeps nobody waiting."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtide import Group, Kind, Layout, Model, Tenant, config
from kvtide.errors import ClosedError, KvtideError, LayoutError, UnknownTenantError
from kvtide.events import BlockRemoved, Event
from kvtide.index import work_slices
from kvtide.store.housekeeping import Housekeeper
from kvtide.store.session import Session
from kvtide.store.store import Store
from kvtide.testing.clock import FakeClock
from kvtide.testing.keys import WRAPPING
from tests.bounds import watch

TOKENS = 16
MODEL = Model(Layout((Group("mla", Kind.MLA, 1, 1, 128, "bfloat16", page=TOKENS),), TOKENS), "expiry")
ANN = Tenant("ann", b"a" * 32)
BLOCK = np.arange(MODEL.layout.geometry["mla"].nbytes, dtype=np.uint32).astype(np.uint8)


def prompt(*blocks: int) -> list[int]:
    return [number for number in blocks for _ in range(TOKENS)]


def put(session: Session, *blocks: int, start: int = 0, ttl: float | None = None) -> None:
    done = session.store(prompt(*blocks), [BLOCK] * (len(blocks) - start), start=start, ttl=ttl)
    assert not done.dropped


def many(session: Session, prompts: int, each: int, ttl: float | None = None) -> list[list[int]]:
    """Store so many prompts of so many blocks."""
    made = [prompt(*range(1000 * (n + 1), 1000 * (n + 1) + each)) for n in range(prompts)]
    for tokens in made:
        assert session.store(tokens, [BLOCK] * each, ttl=ttl).stored == each
    return made


def found(session: Session, *blocks: int) -> int:
    """How many blocks a match finds."""
    with session.match(prompt(*blocks), wait=10) as match:
        return match.blocks


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)


def housekeepers() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name == "kvtide-housekeeping"}


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=["dram", "nvme", "zstd"])
def opened(request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> Callable[[], Store]:
    """Opens the same store, again and again."""
    nvme: dict[str, Any] = {"path": str(tmp_path / "tier"), "budget": "64MiB", "segment": "8MiB"}
    nvme["codec"] = "zstd" if request.param == "zstd" else "raw"
    parts: dict[str, Any] = {} if request.param == "dram" else {"nvme": nvme}
    settings = config.read(env={}, dram={"budget": "32MiB", "segment": "8MiB"}, **parts)
    return lambda: Store(settings, clock=clock)


@pytest.fixture
def store(opened: Callable[[], Store]) -> Iterator[Store]:
    with opened() as store:
        yield store


@pytest.fixture
def disk(tmp_path: Path, clock: FakeClock) -> Callable[..., Store]:
    """Opens a store with a disk, plain or encrypted."""

    def opened(encrypt: bool = False) -> Store:
        (tmp_path / "kek").touch(0o600)
        (tmp_path / "kek").write_bytes(WRAPPING)
        security = {
            "encrypt": encrypt,
            "key_source": f"file:{tmp_path / 'kek'}",
            "key_file": str(tmp_path / "keys.json"),
        }
        settings = config.read(
            env={},
            dram={"budget": "32MiB", "segment": "8MiB"},
            nvme={"path": str(tmp_path / "tier"), "budget": "64MiB", "segment": "8MiB", "store": "through"},
            security=security if encrypt else {},
        )
        return Store(settings, clock=clock)

    return opened


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """No housekeeping thread can be started."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "kvtide-housekeeping":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


# -- in slices ----------------------------------------------------------------------------------------------


def test_what_expires_is_removed_by_time_alone_in_slices(store: Store, clock: FakeClock) -> None:
    with store.session(MODEL) as session:
        put(session, 1, 2)
        prompts = many(session, 10, 300, ttl=60)
        store.flush(60)
        lock = watch(store)
        clock.advance(61)
        assert not any(session.find(prompts[7])), "what has expired is not found, removed or not"
        until(lambda: store.index.statistics().blocks == 2)
        assert lock.most <= work_slices.SLICE
        assert store.pipeline.largest_slice <= work_slices.SLICE
        assert store.statistics().counts["blocks expired"] == 3000
        store.flush(60)
        assert {name: tier.blocks for name, tier in store.statistics().tiers.items()} == dict.fromkeys(
            store.statistics().tiers, 2
        )
        assert found(session, 1, 2) == 2


@pytest.mark.usefixtures("no_threads")
def test_a_call_removes_no_more_than_a_slice(store: Store, clock: FakeClock) -> None:
    with store.session(MODEL) as session:
        prompts = many(session, 4, 300, ttl=60)
        store.flush(60)
        clock.advance(61)
        for calls in range(1, 5):
            assert not any(session.find(prompts[3])), "not removed yet, and not found"
            assert len(store.index) == 1200 - calls * work_slices.SLICE
        for _ in range(5):
            session.find(prompts[0])
        assert len(store.index) == 0


@pytest.mark.usefixtures("no_threads")
def test_a_prompt_that_was_asked_for_lately_is_not_found_when_it_has_expired(
    store: Store, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_slices, "SLICE", 1)
    with store.session(MODEL) as session:
        put(session, *range(100, 110), ttl=5)  # these are removed first
        put(session, 1, 2, 3, ttl=5)
        for _ in range(3):
            assert found(session, 1, 2, 3) == 3
        clock.advance(6)
        with session.match(prompt(1, 2, 3)) as match:
            assert (match.blocks, len(store.index)) == (0, 12)


@pytest.mark.usefixtures("no_threads")
def test_what_has_expired_and_is_not_removed_yet_can_be_stored_anew(
    store: Store, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_slices, "SLICE", 1)
    with store.session(MODEL) as session:
        put(session, *range(100, 110), ttl=5)
        put(session, 1, 2, 3, ttl=5)
        clock.advance(6)
        done = session.store(prompt(1, 2, 3), [BLOCK] * 3, ttl=5)
        assert (done.stored, done.present) == (3, 0)
        for _ in range(20):
            assert found(session, 1, 2, 3) == 3


def test_a_drop_of_a_long_prompt_goes_in_slices(store: Store) -> None:
    with store.session(MODEL) as session:
        (long,) = many(session, 1, 900)
        put(session, 1, 2)
        store.flush(60)
        lock = watch(store)
        assert session.drop(long) == 900
        assert lock.most <= work_slices.SLICE
        assert not any(session.find(long))
        assert found(session, 1, 2) == 2


def test_a_forget_goes_in_slices_and_lets_nothing_of_its_tenant_in(store: Store) -> None:
    with store.session(MODEL, ANN) as ann, store.session(MODEL) as other:
        prompts = many(ann, 4, 300)
        put(other, 1, 2)
        store.flush(60)
        tried: list[int] = []

        def meanwhile(event: Event) -> None:
            if isinstance(event, BlockRemoved) and event.reason == "dropped":
                done = ann.store(prompt(7, 8), [BLOCK] * 2)
                tried.append(done.stored + done.present)
                assert found(other, 1, 2) == 2

        stop = store.follow(meanwhile)
        lock = watch(store)
        assert store.forget(ANN.tag).blocks == 1200
        stop()
        assert len(tried) >= 1200 // work_slices.SLICE
        assert not any(tried)
        assert lock.most <= work_slices.SLICE
        assert not any(hit for tokens in [*prompts, prompt(7, 8)] for hit in ann.find(tokens))
        assert store.statistics().counts["stores dropped: their tenant is being forgotten"] == 2 * len(tried)
        put(ann, 7, 8)
        assert found(ann, 7, 8) == 2, "what comes afterwards is kept"


def test_a_reservation_that_is_open_while_its_tenant_is_forgotten_brings_nothing_back(store: Store) -> None:
    with store.session(MODEL, ANN) as ann:
        put(ann, 1)
        part = ann.reserve(prompt(1, 2, 3))
        assert store.forget(ANN.tag).blocks == 3
        part.seal()
        assert not any(ann.find(prompt(1, 2, 3)))
        store.flush(60)
        until(lambda: store.statistics().tiers["dram"].blocks == 0)


def test_two_forget_at_once_and_a_close_waits_for_them(opened: Callable[[], Store]) -> None:
    store = opened()
    with store.session(MODEL, ANN) as ann:
        many(ann, 4, 300)
    store.flush(60)
    inside = threading.Barrier(3)
    counts: list[int] = []
    failures: list[BaseException] = []

    def forget() -> None:
        inside.wait()
        try:
            counts.append(store.forget(ANN.tag).blocks)
        except (ClosedError, UnknownTenantError):  # the other one was quicker
            counts.append(0)
        except BaseException as e:  # noqa: BLE001 - told to the test
            failures.append(e)

    threads = [threading.Thread(target=forget) for _ in range(2)]
    for thread in threads:
        thread.start()
    inside.wait()
    store.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures
    with opened() as again, again.session(MODEL, ANN) as ann:
        with contextlib.suppress(UnknownTenantError):  # nothing is left
            again.forget(ANN.tag)
        assert found(ann, 1000) == 0


def test_closing_a_session_with_many_pins_goes_in_slices(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with store.session(MODEL) as other:
        session = store.session(MODEL)
        (long,) = many(session, 1, 900)
        put(other, 1)
        other.pin(prompt(1))
        assert session.pin(long) == 900
        ended: list[int] = []
        unpin = store.index.unpin_some

        def unpin_some(owner: Any, most: int) -> bool:
            before = len(owner)
            more = unpin(owner, most)
            ended.append(before - len(owner))
            return more

        monkeypatch.setattr(store.index, "unpin_some", unpin_some)
        session.close()
        assert (sum(ended), max(ended)) == (900, work_slices.SLICE)
        assert store.statistics().pinned == 1


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize("moment", ["before", "within"])
def test_what_an_interrupted_call_did_not_remove_is_removed_by_the_next(
    store: Store, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def interrupted(rows: object) -> None:
        raise KeyboardInterrupt

    with store.session(MODEL) as session:
        put(session, 1, 2, 3, ttl=5)
        clock.advance(6)
        with monkeypatch.context() as patched:
            if moment == "before":
                patched.setattr(store.main, "expire_rows", interrupted)
            else:
                patched.setattr(store.pipeline, "expire", interrupted)
            with pytest.raises(KeyboardInterrupt):
                found(session, 9)
        assert store.statistics().blocks == 3
        assert found(session, 9) == 0
        assert store.statistics().blocks == 0


# -- the thread ---------------------------------------------------------------------------------------------


def test_a_store_without_expiries_has_no_housekeeping_thread_and_one_with_ends_it(opened: Callable[[], Store]) -> None:
    before = housekeepers()
    with opened() as store, store.session(MODEL) as session:
        put(session, 1)
        assert housekeepers() == before
        put(session, 2, ttl=50)
        assert len(housekeepers() - before) == 1
    assert housekeepers() == before


class Owner:
    """Something that is kept in order, and fails the first time."""

    def __init__(self) -> None:
        self.calls = 0
        self.called = threading.Event()

    def tidy(self) -> float:
        self.calls += 1
        if self.calls == 1:
            raise OSError("no luck")
        self.called.set()
        return float("inf")


@pytest.mark.parametrize("runs", [True, False])
def test_a_start_that_was_interrupted_leaves_one_thread_at_most(monkeypatch: pytest.MonkeyPatch, runs: bool) -> None:
    owner, before, start = Owner(), housekeepers(), threading.Thread.start
    owner.calls = 1

    def interrupted(thread: threading.Thread) -> None:
        if runs:
            start(thread)
        raise KeyboardInterrupt

    budget_thread = Housekeeper(owner, FakeClock())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            budget_thread.wake()
    if runs:
        assert owner.called.wait(60)
        owner.called.clear()
    budget_thread.wake()
    assert owner.called.wait(60)
    assert len(housekeepers() - before) == 1
    budget_thread.close()
    assert housekeepers() == before


def test_an_error_does_not_end_the_thread(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("kvtide.store.housekeeping._AFTER_ERROR", 0.001)
    owner, clock = Owner(), FakeClock()
    budget_thread = Housekeeper(owner, clock)
    budget_thread.wake()
    assert owner.called.wait(60)
    assert "housekeeping failed" in caplog.text
    owner.called.clear()
    clock.advance(1)
    assert owner.called.wait(60), "it is woken when the clock is turned"
    budget_thread.close()
    assert not any(t.is_alive() for t in housekeepers() if t is budget_thread._thread)


def test_the_thread_sleeps_when_nothing_is_due() -> None:
    owner = Owner()
    owner.calls = 1
    budget_thread = Housekeeper(owner, FakeClock())
    budget_thread.wake()
    assert owner.called.wait(60)
    owner.called.clear()
    assert not owner.called.wait(0.05)
    budget_thread.close()


def test_the_thread_does_not_keep_its_owner_alive() -> None:
    owner = Owner()
    owner.calls = 1
    budget_thread = Housekeeper(owner, FakeClock())
    budget_thread.wake()
    assert owner.called.wait(60)
    thread, left = budget_thread._thread, weakref.ref(owner)
    assert thread is not None
    del owner
    until(lambda: bool(gc.collect() or True) and left() is None)
    thread.join(60)
    assert not thread.is_alive()


# -- what a ttl means ---------------------------------------------------------------------------------------


def test_a_block_lives_as_long_as_its_longest_store_says(store: Store, clock: FakeClock) -> None:
    with store.session(MODEL) as session:
        put(session, 1, ttl=5)
        put(session, 1, ttl=50)
        put(session, 1, ttl=5)
        put(session, 2)
        put(session, 2, ttl=5)
        clock.advance(49)
        assert (found(session, 1), found(session, 2)) == (1, 1)
        clock.advance(2)
        assert (found(session, 1), found(session, 2)) == (0, 1)


def test_a_store_extends_the_beginning_of_its_prompt(store: Store, clock: FakeClock) -> None:
    with store.session(MODEL) as session:
        put(session, 1, 2, ttl=5)
        put(session, 1, 7, ttl=5)
        put(session, 1, 2, 3, 4, start=2, ttl=50)
        clock.advance(6)
        assert session.find(prompt(1, 2, 3, 4)) == [True] * 4
        assert session.find(prompt(1, 7)) == [True, False], "it was never stored for longer"
        clock.advance(45)
        until(lambda: len(store.index) == 0)


def test_a_block_that_came_back_for_a_shorter_time_takes_what_follows_with_it(store: Store, clock: FakeClock) -> None:
    with store.session(MODEL) as session:
        put(session, 1, 2, 3)
        session.drop(prompt(1))
        put(session, 1, ttl=5)
        assert found(session, 1, 2, 3) == 3
        clock.advance(6)
        until(lambda: len(store.index) == 0)


def test_a_reservation_extends_only_when_it_is_sealed(store: Store, clock: FakeClock) -> None:
    with store.session(MODEL) as session:
        put(session, 1, ttl=5)
        put(session, 8, ttl=5)
        session.reserve(prompt(1, 2)).abort()
        with session.reserve(prompt(8, 9)) as part:
            part.seal()
        clock.advance(6)
        assert (found(session, 1), found(session, 8, 9)) == (0, 2)


def test_expire_shortens_and_extends(store: Store, clock: FakeClock) -> None:
    with store.session(MODEL) as session:
        put(session, 1, 2, 3)
        put(session, 7, 8, ttl=5)
        assert session.expire(prompt(1, 2, 3), 10, start=1) == 2
        assert session.expire(prompt(7, 8), 100, start=1) == 1
        assert session.expire(prompt(90, 91), 10) == 0
        for wrong in (0, -1.0, float("nan")):
            with pytest.raises(LayoutError):
                session.expire(prompt(1), wrong)
        clock.advance(11)
        assert session.find(prompt(1, 2, 3)) == [True, False, False]
        assert found(session, 7, 8) == 2, "and its beginning lives as long"
        session.expire(prompt(7, 8), None)
        clock.advance(1e9)
        assert found(session, 7, 8) == 2


@pytest.mark.parametrize("wrong", [{"timeout": "5"}, {"timeout": float("nan")}, {"start": 0.5}, {"start": -1}])
def test_expire_checks_what_it_is_given_before_it_changes_anything(
    store: Store, clock: FakeClock, wrong: dict[str, Any]
) -> None:
    with store.session(MODEL) as session:
        put(session, 1, 2)
        with pytest.raises(KvtideError):
            session.expire(prompt(1, 2), 5, **wrong)
        clock.advance(6)
        assert found(session, 1, 2) == 2


def test_a_prompt_that_goes_on_behind_an_expired_one_expires_with_it(store: Store, clock: FakeClock) -> None:
    with store.session(MODEL) as session:
        put(session, 1, 2)
        put(session, 1, 2, *range(100, 400))
        put(session, 5, 6, 7)
        store.flush(60)
        assert session.expire(prompt(1, 2), 10) == 2
        clock.advance(11)
        assert found(session, 1, 2, 100) == 0
        until(lambda: len(store.index) == 3)
        assert store.statistics().counts["blocks expired"] == 302
        assert found(session, 5, 6, 7) == 3


def test_what_follows_a_block_that_was_stored_again_stays(store: Store, clock: FakeClock) -> None:
    with store.session(MODEL) as session:
        put(session, 1, 2, 3)
        session.expire(prompt(1), 10)
        clock.advance(9)
        put(session, 1)
        clock.advance(10)
        assert found(session, 1, 2, 3) == 3
        assert store.statistics().counts.get("blocks expired", 0) == 0


# -- at rest ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("journal", ["kept", "lost"])
@pytest.mark.parametrize("encrypt", [False, True])
def test_an_expiry_that_was_shortened_holds_after_a_restart(
    disk: Callable[..., Store], clock: FakeClock, tmp_path: Path, journal: str, encrypt: bool
) -> None:
    with disk(encrypt) as store, store.session(MODEL) as session:
        put(session, 1, 2, 3)
        put(session, 7, 8)
        assert store.flush(60)
        assert session.expire(prompt(1, 2, 3), 100, start=1) == 2
        assert found(session, 1, 2, 3) == 3, "it has not expired yet"
    if journal == "lost":
        (tmp_path / "tier" / "journal").unlink()
    with disk(encrypt) as store, store.session(MODEL) as session:
        assert found(session, 7, 8) == 2
        # A record that is encrypted cannot be changed, so it was erased.
        assert found(session, 1, 2, 3) == (1 if encrypt else 3)
        with session.match(prompt(1, 2, 3)) as match:
            for view in session.load(match).wait(60).blocks:
                assert bytes(view[: len(BLOCK)]) == BLOCK.tobytes(), "the payload is what it was"
        clock.advance(101)
        assert found(session, 1, 2, 3) == 1


def test_an_expiry_that_was_shortened_while_it_was_written_holds_after_a_restart(
    disk: Callable[..., Store], clock: FakeClock, tmp_path: Path
) -> None:
    with disk() as store, store.session(MODEL) as session:
        for n in range(50):
            put(session, n)
            session.expire(prompt(n), 100)
        assert store.flush(60)
        assert store.statistics().tiers["nvme"].blocks == 50
    (tmp_path / "tier" / "journal").unlink()
    clock.advance(101)
    with disk() as store, store.session(MODEL) as session:
        assert [found(session, n) for n in range(50)] == [0] * 50


def test_an_expiry_that_was_extended_holds_after_a_close(disk: Callable[..., Store], clock: FakeClock) -> None:
    with disk() as store, store.session(MODEL) as session:
        put(session, 1, 2, ttl=10)
        assert store.flush(60)
        put(session, 1, 2, 3, ttl=1000)
    for _ in range(2):  # the journal is written anew at each opening
        clock.advance(20)
        with disk() as store, store.session(MODEL) as session:
            assert found(session, 1, 2, 3) == 3
    clock.advance(1000)
    with disk() as store, store.session(MODEL) as session:
        assert found(session, 1, 2, 3) == 0


# -- pins ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["drop", "expire", "forget", "close"])
def test_the_charge_of_a_pin_ends_with_its_block(store: Store, clock: FakeClock, how: str) -> None:
    with store.session(MODEL, ANN) as session, store.session(MODEL, ANN) as other:
        put(session, 1, 2, ttl=10)
        assert (session.pin(prompt(1, 2)), session.pin(prompt(1)), other.pin(prompt(1))) == (2, 1, 1)
        with session.match(prompt(1, 2)):  # the rows stay a little longer
            if how == "drop":
                other.drop(prompt(1, 2))
            elif how == "expire":
                clock.advance(11)
                until(lambda: len(store.index) == 0)
            elif how == "forget":
                store.forget(ANN.tag)
            else:
                other.close()
                session.unpin(prompt(1, 2))
                session.unpin(prompt(1))
            pins = session.backend.pins, other.backend.pins  # type: ignore[attr-defined]
            assert [p.nbytes for p in pins] == [0, 0]
            assert store.statistics().pinned == 0
        if how != "close":
            assert session.unpin(prompt(1, 2)) == 0
            put(session, 1, 2)
            assert session.pin(prompt(1, 2)) == 2
            assert (store.statistics().pinned, session.backend.pins.nbytes) == (2, 2 * 4096)  # type: ignore[attr-defined]


def test_the_charge_of_a_pin_ends_with_a_record_that_cannot_be_read(disk: Callable[..., Store], tmp_path: Path) -> None:
    with disk() as store, store.session(MODEL) as session:
        put(session, 1)
    for segment in (tmp_path / "tier").glob("*.segment"):
        data = bytearray(segment.read_bytes())
        data[4096:] = bytes(b ^ 0xFF for b in data[4096 : 4096 + 64 * 4096]) + data[4096 + 64 * 4096 :]
        segment.write_bytes(data)
    with disk() as store, store.session(MODEL) as session:
        try:
            assert session.pin(prompt(1)) == 1
            with session.match(prompt(1)) as match:
                assert session.load(match).wait(60).tokens == 0
            assert (session.backend.pins.nbytes, store.statistics().pinned) == (0, 0)  # type: ignore[attr-defined]
            assert session.unpin(prompt(1)) == 0
        except KvtideError as e:  # pragma: no cover - told apart from a failed assertion
            raise AssertionError(str(e)) from e
