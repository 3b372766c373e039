"""The queue before a tier: reads first, bounded, never blocking, and never lost."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from kvtide.block import BlockKey, Geometry
from kvtide.clock import SystemClock
from kvtide.testing import blocks
from kvtide.tiers.base import NOWHERE, Identity, Miss, Read, Write
from kvtide.transfer.lane import Lane
from tests.plan.small import Clock
from tests.transfer.gate import Gated

SIZE = 8192
IDENTITY = Identity(bytes(32), bytes(16), bytes(16), b"full", 16, Geometry(2, 4096), 1)
KEYS = blocks.keys(64)


def write(number: int) -> Write:
    return Write(KEYS[number], IDENTITY, blocks.aligned(SIZE), bytes(32), 0, number + 1)


def read(number: int) -> Read:
    return Read(KEYS[number], IDENTITY, number + 1, blocks.aligned(SIZE))


def full(count: int = len(KEYS)) -> Gated:
    """A tier that has the first blocks."""
    return Gated({number + 1: (KEYS[number], bytes(SIZE)) for number in range(count)})


class Driver:
    """A lane whose answers are collected."""

    def __init__(self, tier: Gated, limit: int = 1 << 30, depth: int = 2, clock: Clock | None = None) -> None:
        self.tier = tier
        self.lane = Lane(tier, clock or SystemClock(), limit, depth)
        self.read_results: list[list[bool]] = []
        self.places: list[list[int]] = []
        self.asked: list[BlockKey] = []

    def read(self, *items: Read, cancelled: bool = False) -> None:
        def cancel() -> bool:
            self.asked.append(items[0].key)
            return cancelled

        self.lane.read(items, lambda r: self.read_results.append([bool(one) for one in r]), cancel)

    def write(self, *items: Write) -> bool:
        if not all(self.lane.reserve_write(len(i.span)) for i in items):
            return False
        self.lane.write(items, lambda p: self.places.append(list(p)))
        return True


def test_reads_go_before_writes_that_came_earlier() -> None:
    driver = Driver(Gated(), depth=1)
    for number in range(3):
        assert driver.write(write(number))
    for number in range(3):
        driver.read(read(number))
    assert driver.tier.journal == ["write", "write", "read", "read"], "two of a kind are under way, the rest waits"
    driver.tier.let_all()
    assert driver.tier.journal == ["write", "write", "read", "read", "read", "write"]


def test_only_a_little_is_under_way() -> None:
    driver = Driver(Gated(), depth=2)
    for number in range(6):
        driver.read(read(number))
    assert len(driver.tier.reads) == 2
    statistics = driver.lane.statistics()
    assert (statistics.reads_waiting, statistics.read_bytes_waiting) == (4, 6 * SIZE)
    driver.tier.let_read()
    assert len(driver.tier.reads) == 2, "the next one follows at once"
    assert repr(driver.lane) == "<Lane 3 reads, 0 writes waiting, 2 blocks under way>"
    driver.tier.let_all()
    assert len(driver.read_results) == 6
    assert (driver.lane.read_bytes, driver.lane.statistics().reads_waiting) == (0, 0)


def test_writes_beyond_the_limit_are_refused_at_once_until_there_is_room() -> None:
    driver = Driver(Gated(), limit=2 * SIZE, depth=1)
    assert [driver.write(write(n)) for n in range(4)] == [True, True, False, False]
    assert driver.lane.statistics().writes_refused == 2
    assert driver.lane.statistics().write_bytes_waiting == 2 * SIZE
    driver.tier.let_write()
    assert driver.write(write(4))
    driver.tier.let_all()
    assert driver.lane.statistics().write_bytes_waiting == 0
    assert len(driver.places) == 3


def test_an_empty_queue_takes_a_block_larger_than_its_limit() -> None:
    driver = Driver(Gated(), limit=1)
    assert driver.write(write(0))
    assert not driver.write(write(1))
    driver.tier.let_write()
    assert driver.write(write(1))
    driver.tier.let_all()


def test_a_read_that_is_cancelled_before_it_starts_is_not_made() -> None:
    driver = Driver(Gated(), depth=1)
    driver.read(read(0))
    driver.read(read(1))
    driver.read(read(2), cancelled=True)
    driver.read(read(3))
    assert driver.asked == [], "asked only if it must wait, and when its turn comes"
    driver.tier.let_read()
    assert driver.asked == KEYS[2:4]
    driver.tier.let_all()
    assert driver.tier.journal == ["read", "read", "read"]
    assert len(driver.read_results) == 3
    assert driver.lane.statistics().reads_cancelled == 1
    assert driver.lane.read_bytes == 0
    assert driver.lane.wait_idle(0)


def test_a_tier_that_answers_at_once_does_not_recurse() -> None:
    driver = Driver(Gated(inline=True), depth=1)
    count = 5000  # deeper than the interpreter's stack, were each started inside the last
    left = count

    def again(results: Sequence[object]) -> None:
        nonlocal left
        left -= 1
        if left:
            driver.lane.read([read(0)], again, lambda: False)

    driver.lane.read([read(0)], again, lambda: False)
    assert left == 0
    assert driver.tier.journal == ["read"] * count
    assert driver.lane.wait_idle(0)


def test_wait_idle_waits_for_what_is_under_way_and_for_its_answer() -> None:
    driver = Driver(Gated())
    assert driver.lane.wait_idle(0)
    driver.write(write(0))
    assert not driver.lane.wait_idle(0)
    order: list[str] = []

    def wait() -> None:
        driver.lane.wait_idle(30)
        order.append("idle")

    waiter = threading.Thread(target=wait)
    waiter.start()
    driver.lane.read([read(1)], lambda _: order.append("answered"), lambda: False)
    driver.tier.let_read()
    assert order == ["answered"]
    driver.tier.let_write()
    waiter.join(30)
    assert order == ["answered", "idle"]
    assert driver.places == [[1]]


def test_many_threads_lose_nothing() -> None:
    driver = Driver(Gated(inline=True), depth=2)

    def work(start: int) -> None:
        for number in range(start, start + 8):
            driver.write(write(number))
            driver.read(read(number))

    threads = [threading.Thread(target=work, args=(i * 8,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert driver.lane.wait_idle(30)
    assert (len(driver.places), len(driver.read_results)) == (64, 64)
    statistics = driver.lane.statistics()
    assert (statistics.read_bytes_waiting, statistics.write_bytes_waiting) == (0, 0)


# -- measuring ----------------------------------------------------------------------------------------------


def test_speed_is_measured_over_the_time_in_which_jobs_overlap() -> None:
    clock = Clock()
    driver = Driver(full(), depth=8, clock=clock)
    for number in range(4):
        driver.read(read(number))
    clock.now += 1.0  # all four took the same second
    for _ in range(4):
        driver.tier.let_read()
        clock.now += 0.0001
    assert driver.lane.read_speed.statistics().bytes_per_second == pytest.approx(4 * SIZE, rel=0.01)
    assert driver.lane.write_speed.statistics().measured == 0


def test_a_steady_flow_is_measured_before_it_ends() -> None:
    clock = Clock()
    driver = Driver(full(), depth=2, clock=clock)
    for number in range(40):
        driver.read(read(number))
    for _ in range(19):
        clock.now += 0.25  # two at a time
        driver.tier.let_read()
        driver.tier.let_read()
    assert driver.tier.reads, "work is still under way"
    assert driver.lane.read_speed.statistics().bytes_per_second == pytest.approx(8 * SIZE, rel=0.1)


def test_a_pause_between_jobs_does_not_count() -> None:
    clock = Clock()
    driver = Driver(Gated(), clock=clock)
    for number in range(3):
        driver.write(write(number))
        clock.now += 0.5
        driver.tier.let_write()
        clock.now += 1000.0
    assert driver.lane.write_speed.statistics().bytes_per_second == pytest.approx(SIZE / 0.5)


def test_short_jobs_are_measured_too() -> None:
    clock = Clock()
    driver = Driver(full(), clock=clock)
    for number in range(8):
        driver.read(read(number))
        clock.now += 0.0005
        driver.tier.let_read()
        clock.now += 1.0
    assert driver.lane.read_speed.statistics().bytes_per_second == pytest.approx(SIZE / 0.0005, rel=0.01)


def test_a_write_that_failed_says_nothing_of_speed() -> None:
    clock = Clock()
    driver = Driver(Gated(), clock=clock)
    driver.write(write(0))
    clock.now += 1.0
    driver.tier.let_write(good=False)
    assert driver.places == [[NOWHERE]]
    assert driver.lane.write_speed.statistics().measured == 0


def test_blocks_that_are_not_there_say_nothing_of_speed() -> None:
    clock = Clock()
    driver = Driver(full(2), clock=clock)
    for start, found in ((0, [True, True]), (1, [True, False]), (2, [False, False])):
        driver.read(read(start), read(start + 1))
        clock.now += 0.5 * sum(found)
        driver.tier.let_read()
        assert driver.read_results.pop() == found
        assert driver.lane.read_speed.statistics().bytes_per_second == pytest.approx(SIZE / 0.5)


def test_a_read_that_ends_by_its_deadline_is_slow() -> None:
    """Otherwise a medium from which nothing ever arrives in time would look fast for ever. What fails at once says
    nothing."""
    clock = Clock()
    driver = Driver(full(2), clock=clock)
    speed = driver.lane.read_speed
    for seconds, measured in ((0.0, 0), (0.01, 0), (2.0, 1)):
        driver.read(read(0))
        clock.now += seconds
        (_, done), *driver.tier.reads = driver.tier.reads
        done([Miss.FAILED])
        assert speed.statistics().measured == measured
    assert speed.seconds(SIZE) > 1000
    for _ in range(20):
        driver.read(read(0))
        clock.now += 0.5
        driver.tier.let_read()
    assert speed.statistics().bytes_per_second == pytest.approx(SIZE / 0.5, rel=0.05), "as soon as blocks arrive again"


def test_a_read_that_has_not_begun_can_be_taken_back() -> None:
    driver = Driver(full(), depth=1)
    waiting = [read(2)]
    driver.read(read(0))
    driver.read(read(1))
    ended: list[Sequence[object]] = []
    driver.lane.read(waiting, ended.append, lambda: False)
    assert driver.lane.reading(waiting)
    assert driver.lane.withdraw(waiting)
    assert ended == [[Miss.FAILED]]
    assert not driver.lane.withdraw(waiting), "it has ended"
    assert not driver.lane.reading(waiting)
    driver.tier.let_all()
    assert driver.tier.journal == ["read", "read"], "it was never read"
    assert driver.lane.read_bytes == 0
    assert driver.lane.wait_idle(0)
