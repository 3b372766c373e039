"""Prompts that are expected back are in DRAM by then: once, in bounds, and only where there is room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide import Session, Store, config
from kvtide.index.index import DRAM, SEALED, Index
from kvtide.plan.tier_speed import Speed
from kvtide.testing.clock import FakeClock
from kvtide.transfer import prefetch
from kvtide.transfer.prefetch import Prefetcher
from kvtide.transfer.transfer import Transfer
from tests.node.serving import eventually
from tests.plan.small import MODEL, SLOTS, keep, length, prompt, right


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(tmp_path: Path, clock: FakeClock) -> Iterator[Store]:
    tier = {"path": str(tmp_path / "tier"), "budget": "16MiB", "segment": "1MiB", "threads": 2, "store": "through"}
    memory = {"budget": "1MiB", "segment": "1MiB", "policy": "lru"}
    with Store(config.read(env={}, dram=memory, nvme=tier), clock=clock) as store:
        yield store


@pytest.fixture
def session(store: Store) -> Iterator[Session]:
    with store.session(MODEL) as session:
        yield session


def in_dram(store: Store, session: Session, *path: int) -> int:
    with store.index.lock:
        rows = store.index.rows(session.chain(prompt(*path)).keys(b"full"))
        return int((store.index.state[DRAM][rows[rows > 0]] == SEALED).sum())


def push_out(store: Store, session: Session, first: int = 1000, **how: int) -> None:
    for number in range(first, first + 2 * SLOTS):
        keep(session, number, **how)
        store.flush(30)


def looked(store: Store) -> None:
    """The housekeeping thread has looked at what was due."""
    eventually(lambda: not len(store.main.prefetcher) and "0 under way" in repr(store.main.prefetcher))


def test_what_has_left_is_back_before_its_return(store: Store, session: Session, clock: FakeClock) -> None:
    keep(session, 1, 2)
    session.expect(prompt(1, 2), returns_in=100)
    push_out(store, session)
    assert in_dram(store, session, 1, 2) == 0
    clock.advance(99)
    assert in_dram(store, session, 1, 2) == 0, "it is too early"
    clock.advance(0.6)
    eventually(lambda: in_dram(store, session, 1, 2) == 2)
    looked(store)
    assert store.statistics().held == 0
    keep(session, 5000)
    assert in_dram(store, session, 1, 2) == 2, "it is not the first to leave again"
    assert right(session, 1, 2, 3) == 2
    counts = store.statistics().counts
    assert (counts["prompts brought back"], counts["prompts brought back in time"]) == (1, 1)


def test_it_is_brought_once(store: Store, session: Session, clock: FakeClock) -> None:
    keep(session, 1, 2)
    session.expect(prompt(1, 2), returns_in=10)
    session.expect(prompt(1, 2), turn="tool", returns_in=10)
    push_out(store, session)
    clock.advance(9.9)
    eventually(lambda: in_dram(store, session, 1, 2) == 2)
    looked(store)
    push_out(store, session, 3000)
    assert in_dram(store, session, 1, 2) == 0
    clock.advance(100)
    assert store.statistics().counts["prompts brought back"] == 1


def test_a_prompt_that_is_used_before_is_not_looked_at(store: Store, session: Session, clock: FakeClock) -> None:
    keep(session, 1, 2)
    keep(session, 3, 4)
    for path in [(1, 2), (3, 4)]:
        session.expect(prompt(*path), returns_in=100)
    assert len(store.main.prefetcher) == 2
    assert length(session, 1, 2, 7) == 2
    assert len(store.main.prefetcher) == 1
    push_out(store, session)
    clock.advance(99.9)
    eventually(lambda: in_dram(store, session, 3, 4) == 2)
    looked(store)
    assert in_dram(store, session, 1, 2) == 0


def test_it_ends_with_its_session_and_with_its_blocks(store: Store, session: Session, clock: FakeClock) -> None:
    other = store.session(MODEL)
    keep(session, 1, 2)
    keep(session, 3, 4)
    other.expect(prompt(1, 2), returns_in=100)
    session.expect(prompt(3, 4), returns_in=100)
    other.close()
    assert len(store.main.prefetcher) == 1
    assert session.drop(prompt(3, 4)) == 2
    push_out(store, session)
    clock.advance(99.9)
    looked(store)
    assert "prompts brought back" not in store.statistics().counts


def test_it_takes_no_room_of_what_is_worth_more(store: Store, session: Session, clock: FakeClock) -> None:
    keep(session, 1, 2)
    session.expect(prompt(1, 2), returns_in=100)
    push_out(store, session, priority=5)
    clock.advance(99.9)
    looked(store)
    assert in_dram(store, session, 1, 2) == 0
    assert "prompts brought back" not in store.statistics().counts


def test_a_tool_that_does_not_say_when_is_not_looked_at(store: Store, session: Session) -> None:
    keep(session, 1, 2)
    session.expect(prompt(1, 2), turn="tool")
    session.expect(prompt(8, 9), returns_in=5)
    assert len(store.main.prefetcher) == 0, "nor is what is not here"


class FakeBackend:
    """Begins loads that never end."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.brought: list[bytes] = []
        self.begun: list[Transfer] = []

    def bring_back(self, joined: bytes, seconds: float) -> Transfer | None:
        self.brought.append(joined)
        self.begun.append(Transfer(self.clock))
        self.begun[-1].expect([1])
        return self.begun[-1]


def made(clock: FakeClock, count: int = 0) -> tuple[Prefetcher, FakeBackend]:
    found, backend = Prefetcher(clock, Index(tiers=1), Counter(), [Speed(clock)], lambda: None), FakeBackend(clock)
    for number in range(count):
        found.expect(backend, name(number), 1, 10.0 + number)
    return found, backend


def name(number: int, blocks: int = 1) -> bytes:
    return number.to_bytes(32, "big") * blocks


def test_a_flood_is_bounded_and_what_is_due_last_gives_way(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_PROMPTS", 10)
    monkeypatch.setattr(prefetch, "_BLOCKS", 100)
    found, backend = made(clock, 50)
    assert len(found) == 10
    found.expect(backend, name(99), 1, 5.0)
    clock.advance(4.6)
    found.step()
    assert backend.brought == [name(99)]
    assert len(found) == 9
    found.expect(backend, name(7, 200), 1, 1e6)
    assert len(found) == 9, "one that is too long is not remembered"


def test_few_are_under_way_at_a_time_and_a_closed_session_ends_its_own(clock: FakeClock) -> None:
    found, backend = made(clock, 5)
    clock.advance(8.6)
    for _ in range(5):
        clock.advance(1)
        found.step()
    assert len(backend.begun) == 2
    assert found.due() == float("inf"), "it wakes somebody when one has ended"
    backend.begun[0].cancel()
    assert found.due() == 0
    found.forget(backend)
    assert len(found) == 0
    assert all(transfer.ended for transfer in backend.begun)
    assert repr(found) == "<Prefetcher 0 expected, 0 under way>"
    assert not found._known


def test_whoever_looks_too_late_brings_nothing(clock: FakeClock) -> None:
    found, backend = made(clock, 2)
    clock.advance(1000)
    found.step()
    found.step()
    assert not backend.brought
    assert len(found) == 0
    assert not found._known
