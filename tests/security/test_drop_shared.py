"""Dropped blocks do not come back through shared storage, whichever node still has them and whenever it writes them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtide
from kvtide import Session, Store
from kvtide import config as configuration
from kvtide.block import BlockKey
from kvtide.errors import TierError
from kvtide.events import BlockRemoved, Event
from kvtide.testing.clock import FakeClock
from kvtide.testing.faults import Fault, FaultyDisk
from kvtide.testing.interface import MODEL, PLAIN, data, length, prompt, until
from kvtide.testing.keys import WRAPPING
from kvtide.tiers.format.encryption import OPEN
from kvtide.tiers.shared import drop_log
from kvtide.tiers.shared.blobs import ROOT
from kvtide.tiers.shared.drop_log import DropLog
from kvtide.tiers.shared.files import Files
from kvtide.tiers.syscalls import Disk

TOKENS = prompt(1, 2, 3)
OTHERS = prompt(7, 8)
FULL = PLAIN.group("full").suffix
SILENT = "60min"
"""A lease with which nobody hears anything in a test, unless it is told to."""


def opened(folder: Path, disk: Disk | None = None, clock: FakeClock | None = None, **more: Any) -> Store:
    files = {"path": str(folder / "shared"), "threads": 2, "lease": SILENT, **more.pop("files", {})}
    memory = {"budget": "8MiB", "segment": "1MiB"}
    store = Store(configuration.read(None, env={}, dram=memory, files=files, **more), disk=disk, clock=clock)
    until(lambda: all(tier.drops.looked for _, tier in store.main.shared_tiers))
    return store


def log_of(store: Store) -> DropLog:
    ((_, tier),) = store.main.shared_tiers
    return tier.drops


def put(session: Session, tokens: list[int] = TOKENS) -> None:
    assert session.store(tokens, data(PLAIN, tokens)).dropped == 0


def blocks(folder: Path) -> int:
    return len([file for file in (folder / "shared").rglob("*") if len(file.name) == 64])


def there(session: Session, tokens: list[int] = TOKENS) -> int:
    """How many tokens are found, and are right, when nobody remembers that they were not there a moment ago."""
    ((_, tier),) = session.backend.partition.shared_tiers  # type: ignore[attr-defined]
    tier._absent.clear()
    return length(session, tokens)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Session, Session]]:
    """One that writes through, and one that writes when it is closed."""
    with ExitStack() as stack:
        a = stack.enter_context(opened(tmp_path))
        b = stack.enter_context(opened(tmp_path, files={"store": "eviction"}))
        one, two = stack.enter_context(a.session(MODEL)), stack.enter_context(b.session(MODEL))
        put(two)
        put(one)
        assert a.flush(60)
        yield one, two


def store_of(session: Session) -> Store:
    store = session._session_host
    assert isinstance(store, Store)
    return store


def test_one_that_hears_of_a_drop_has_the_blocks_no_more_tells_so_and_does_not_write_them(
    tmp_path: Path, pair: tuple[Session, Session]
) -> None:
    one, two = pair
    put(two, OTHERS)
    events: list[Event] = []
    store_of(two).follow(events.append)
    assert one.drop(TOKENS) == 3
    assert length(two, TOKENS) == len(TOKENS), "it has not heard of it yet"
    log_of(store_of(two)).hear()
    assert length(two, TOKENS) == 0
    gone = [event for event in events if isinstance(event, BlockRemoved) and event.reason == "dropped"]
    assert {key for event in gone for key in event.keys} == set(one.chain(TOKENS).keys(FULL))
    two.close()
    store_of(two).close()
    assert there(one) == 0
    assert there(one, OTHERS) == len(OTHERS), "nothing else is lost"


def test_one_that_was_never_told_writes_the_blocks_in_vain(tmp_path: Path) -> None:
    with opened(tmp_path) as a, a.session(MODEL) as one:
        with opened(tmp_path, files={"store": "eviction"}) as b, b.session(MODEL) as two:
            put(two)
            put(one)
            assert a.flush(60)
            assert one.drop(TOKENS) == 3
            log_of(b).hear = lambda: None  # type: ignore[method-assign]
            log_of(b).step = lambda: None  # type: ignore[method-assign]
        assert blocks(tmp_path) == 3, "it has written them, and died"
        assert there(one) == 0
        with opened(tmp_path) as c, c.session(MODEL) as three:
            assert there(three) == 0, "who comes later knows too"
        assert blocks(tmp_path) < 3, "who meets a copy from before the drop deletes it"
        put(one)
        assert a.flush(60)
        with opened(tmp_path) as c, c.session(MODEL) as three:
            assert there(three) == len(TOKENS), "what is stored again replaces it"


def test_what_was_written_before_the_page_was_read_is_deleted_by_its_writer(tmp_path: Path) -> None:
    with opened(tmp_path) as a, opened(tmp_path) as b, a.session(MODEL) as one, b.session(MODEL) as two:
        assert one.drop(TOKENS) == 0, "one can drop what others have"
        put(two)
        assert b.flush(60)
        assert blocks(tmp_path) == 3
        log_of(b).hear()
        assert blocks(tmp_path) == 0
        assert there(two) == there(one) == 0


def test_one_that_dies_between_the_page_and_the_deletion_has_dropped_all_the_same(
    pair: tuple[Session, Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    ((_, tier),) = store_of(one).main.shared_tiers
    monkeypatch.setattr(tier, "_delete", lambda run, _=None: [False] * len(run))
    with pytest.raises(TierError, match="could not be erased"):
        one.drop(TOKENS)
    log_of(store_of(two)).hear()
    assert there(two) == 0


def test_what_is_stored_again_is_found_by_all(tmp_path: Path) -> None:
    with (
        opened(tmp_path) as a,
        opened(tmp_path) as b,
        opened(tmp_path) as c,
        a.session(MODEL) as one,
        b.session(MODEL) as two,
        c.session(MODEL) as three,
    ):
        for session in (one, two, three):
            put(session)
            assert store_of(session).flush(60)
        for _ in range(2):
            assert one.drop(TOKENS) == 3
            assert one.drop(TOKENS) == 0, "twice is once"
            put(one)
            assert a.flush(60)
            for log in map(log_of, (b, c, a)):
                log.hear()
            assert [there(session) for session in (one, two, three)] == [len(TOKENS)] * 3
            assert blocks(tmp_path) == 3


def test_a_block_that_somebody_holds_stays_readable_for_him_and_is_not_written(
    tmp_path: Path, pair: tuple[Session, Session]
) -> None:
    one, two = pair
    with two.match(TOKENS) as match:
        loaded = two.load(match).wait(60)
        one.drop(TOKENS)
        log_of(store_of(two)).hear()
        assert loaded.tokens == len(TOKENS)
        assert bytes(loaded.views["full"][0])[:64] == data(PLAIN, TOKENS)[0][:64].tobytes()
        assert length(two, TOKENS) == 0
    two.close()
    store_of(two).close()
    assert there(one) == 0


def test_nobody_need_tell_them_to_hear(tmp_path: Path) -> None:
    quick = {"lease": "0.3s"}
    with (
        opened(tmp_path, files=quick) as a,
        opened(tmp_path, files=quick) as b,
        a.session(MODEL) as one,
        b.session(MODEL) as two,
    ):
        put(two)
        one.drop(TOKENS)
        until(lambda: length(two, TOKENS) == 0)
        put(two)
        assert b.flush(60)
        until(lambda: there(one) == len(TOKENS))


def test_one_that_was_away_for_longer_than_pages_are_kept_drops_all_that_it_has(
    tmp_path: Path, pair: tuple[Session, Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drop_log, "_KEPT", 2)
    one, two = pair
    put(two, OTHERS)
    one.drop(TOKENS)
    for n in range(4):
        one.drop(prompt(100 + n))
    log_of(store_of(one))._trim()
    assert len(list((tmp_path / "shared").rglob("dropped.*"))) == 2
    log_of(store_of(two))._hear(look=True)
    assert length(two, TOKENS) == length(two, OTHERS) == 0
    put(two, OTHERS)
    two.close()
    store_of(two).close()
    assert there(one) == 0
    assert there(one, OTHERS) == len(OTHERS), "what it stores from then on is written"


@pytest.mark.parametrize("heard", [True, False], ids=["with a bookmark", "without"])
def test_one_that_was_closed_for_longer_than_pages_are_kept_drops_what_its_own_disk_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: bool
) -> None:
    monkeypatch.setattr(drop_log, "_KEPT", 2)
    disk = {"path": str(tmp_path / "disk"), "budget": "32MiB", "segment": "1MiB", "store": "through"}

    def reopened() -> int:
        with opened(tmp_path, nvme=disk) as b, b.session(MODEL) as two:
            return sum(two.find(TOKENS))

    with opened(tmp_path) as a, a.session(MODEL) as one:
        with opened(tmp_path, nvme=disk) as b, b.session(MODEL) as two:
            put(two)
            assert b.flush(60)
        for n in range(4):
            assert reopened() == 3, "it has heard of all pages, though they are gone"
            one.drop(prompt(100 + n))
            log_of(a)._trim()
        one.drop(TOKENS)
        for n in range(4):
            one.drop(prompt(200 + n))
        log_of(a)._trim()
        mark = tmp_path / "disk" / "heard"
        assert mark.exists()
        if not heard:
            mark.write_text("[rubbish")
        assert reopened() == (0 if heard else 3)


def test_a_page_leaves_after_what_it_names_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as a, opened(tmp_path) as b, a.session(MODEL) as one, b.session(MODEL) as two:
        one.drop(TOKENS)
        put(two)  # has not heard, and never will
        assert b.flush(60)
        monkeypatch.setattr(drop_log, "_KEPT", 1)
        one.drop(OTHERS)
        log_of(a)._trim()
        assert blocks(tmp_path) == 0
        log_of(a).hear()
        assert there(one) == 0


def test_pages_are_kept_for_a_time_and_never_all_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as a, a.session(MODEL) as one:
        for n in range(3):
            one.drop(prompt(n))
        log_of(a)._trim()
        assert len(list((tmp_path / "shared").rglob("dropped.*"))) == 3
        monkeypatch.setattr(drop_log, "_KEPT_SECONDS", -1.0)
        log_of(a)._trim()
        assert len(list((tmp_path / "shared").rglob("dropped.*"))) == 1


def test_one_that_cannot_hear_does_not_write(tmp_path: Path) -> None:
    clock, disk = FakeClock(), FaultyDisk()
    with (
        opened(tmp_path) as a,
        opened(tmp_path, disk, clock, files={"lease": "1min"}) as b,
        a.session(MODEL) as one,
        b.session(MODEL) as two,
    ):
        one.drop(TOKENS)
        disk.arm(Fault("open", files="dropped.*", times=1000))
        clock.advance(1000)
        put(two)
        assert not b.flush(60)
        assert blocks(tmp_path) == 0
        disk.disarm()
        log_of(b).hear()
        put(two)
        assert b.flush(60)
        log_of(a).hear()
        assert there(one) == len(TOKENS)


def test_a_drop_that_cannot_be_told_is_told_to_its_caller(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, disk) as a, a.session(MODEL) as one:
        put(one)
        assert a.flush(60)
        disk.arm(Fault("open", files="dropped.*", times=1000))
        with pytest.raises(TierError, match="could not be notified"):
            one.drop(TOKENS)
        assert there(one) == 0
        assert blocks(tmp_path) == 0, "what can be deleted is"
        disk.disarm()
        one.drop(TOKENS)


def test_pages_are_sealed_where_records_are_and_another_is_no_page(tmp_path: Path) -> None:
    (tmp_path / "kek").touch(0o600)
    (tmp_path / "kek").write_bytes(WRAPPING)
    keys = {"encrypt": True, "key_source": f"file:{tmp_path / 'kek'}", "key_file": str(tmp_path / "keys.json")}
    with (
        opened(tmp_path, security=keys) as a,
        opened(tmp_path, security=keys) as b,
        a.session(MODEL) as one,
        b.session(MODEL) as two,
    ):
        put(one)
        assert a.flush(60)
        assert there(two) == len(TOKENS)
        DropLog(Files(tmp_path / "shared" / ROOT), 10.0, OPEN).announce(list(one.chain(TOKENS).keys(FULL)))
        for log in map(log_of, (a, b)):
            log.hear()
        assert there(one) == there(two) == len(TOKENS), "anybody could have written that"
        one.drop(TOKENS)
        pages = b"".join(page.read_bytes() for page in (tmp_path / "shared").rglob("dropped.*2"))
        assert pages
        assert not [key for key in one.chain(TOKENS).keys(FULL) if key[:32] in pages]
        log_of(b).hear()
        assert length(two, TOKENS) == 0


HOSTILE = [b"", b"x" * 60, b"KVDROP\r\n", secrets.token_bytes(5000), bytes(1 << 20), b"KVDROP\r\n" + b"\1" * 200]


def test_garbage_in_the_log_is_at_worst_a_miss(tmp_path: Path) -> None:
    with opened(tmp_path) as a, opened(tmp_path) as b, a.session(MODEL) as one, b.session(MODEL) as two:
        put(one)
        assert a.flush(60)
        blobs = Files(tmp_path / "shared" / ROOT)
        for n, page in enumerate(HOSTILE, 1):
            blobs.create(f"dropped.{n:018d}", page, 10.0)
        for name in (
            "dropped.",
            "dropped.x",
            "dropped.9",
            "forgotten.",
            "forgotten.zz.1",
            "dropped.00000000000000000a",
        ):
            blobs.create(name, b"", 10.0)
        log_of(b).hear()
        assert there(two) == len(TOKENS)
        assert one.drop(TOKENS) == 3
        log_of(b).hear()
        assert there(two) == 0
        for n in range(1000, 4000, 2):
            blobs.create(f"dropped.{n:018d}", b"KVDROP\r\n" + secrets.token_bytes(48 * 20), 10.0)
        for log in map(log_of, (a, b)):
            log._hear(look=True)
            assert len(log._pages) <= 2 * drop_log._KEPT
        put(one)
        assert a.flush(60)
        assert there(two) == len(TOKENS)
        log_of(a)._trim()
        assert one.drop(TOKENS) == 3


def test_memory_for_what_was_dropped_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drop_log, "_REMEMBERED", 5000)
    log = DropLog(Files(tmp_path), 10.0, OPEN)
    for _ in range(10):
        log.announce([BlockKey(secrets.token_bytes(32) + b"full") for _ in range(drop_log.PAGE)])
    assert len(log._keys) <= 5000 + drop_log.PAGE
    other = DropLog(Files(tmp_path), 10.0, OPEN)
    other.hear()
    assert other.number == log.number == 10
    assert len(other._keys) <= 5000 + drop_log.PAGE


def test_a_storage_that_was_emptied_makes_nobody_drop_anything(tmp_path: Path) -> None:
    with opened(tmp_path) as a, opened(tmp_path) as b, a.session(MODEL) as one, b.session(MODEL) as two:
        one.drop(OTHERS)
        log_of(b).hear()
        put(two)
        assert b.flush(60)
        for file in (tmp_path / "shared").rglob("dropped.*"):
            file.unlink()
        for log in map(log_of, (a, b)):
            log.hear()
        assert length(two, TOKENS) == len(TOKENS)
        one.drop(TOKENS)
        log_of(b).hear()
        assert length(two, TOKENS) == 0


class Copies:
    """What one process may have of one block, by the rules of the log: a model without storage tiers."""

    def __init__(self, folder: Path) -> None:
        self.log = DropLog(Files(folder), 10.0, OPEN)
        self.log.told.dropped = lambda keys: self.have.clear()
        self.log.told.missed = lambda: self.have.clear()
        self.have: set[int] = set()
        self.log.hear()


STEPS = st.lists(st.tuples(st.sampled_from(["store", "write", "drop", "hear", "trim"]), st.integers(0, 2)), max_size=40)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_whatever_the_order_no_copy_from_before_a_drop_is_believed(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    folder = tmp_path_factory.mktemp("log")
    everyone = [Copies(folder) for _ in range(3)]
    key, time, dropped = BlockKey(b"k" * 32 + b"full"), 0, -1
    written: list[tuple[int, int]] = []  # when it was stored, and what its record says
    for step, who in steps:
        one, time = everyone[who], time + 1
        match step:
            case "store":
                one.have = {time}
            case "write":
                written += [(stored, one.log.number) for stored in one.have]
            case "drop":
                one.have.clear()
                one.log.announce([key])
                dropped = time
            case "hear":
                one.log.hear()
            case "trim":
                one.log._trim()
    for one in everyone:
        one.log.hear()
        for stored, heard in written:
            if stored < dropped:
                assert heard < one.log.least(key)
        if dropped >= 0:
            assert all(stored > dropped for stored in one.have)
            assert one.log.number >= one.log.least(key), "what is stored now is believed"


def test_kvtide_open_hears_as_well(tmp_path: Path) -> None:
    with kvtide.open(dram={"budget": "8MiB", "segment": "1MiB"}, files={"path": str(tmp_path / "shared")}) as store:
        until(lambda: log_of(store).looked)
