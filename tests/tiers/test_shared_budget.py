"""The byte budget of shared storage, whatever becomes of those who keep it.

Processes are played here, on a clock that is turned by hand: each sees storage through a ``View``, which can stop its
process before any call, let the others go on for as long as it takes, and then wake it up in the middle of what it did.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from random import Random

import numpy as np
import pytest

from kvtide.block import Span
from kvtide.testing.clock import FakeClock
from kvtide.tiers.shared.blobs import Turn
from kvtide.tiers.shared.budget import BudgetCoordinator, BudgetCoordinatorStatistics, CoordinationBlobs, is_block
from kvtide.tiers.shared.credits import WriteCredits

BUDGET = 1 << 20
LEASE = 6.0
MEMORY = 20
"""Blocks that a process keeps for when it has credit."""


class Storage:
    """Blobs in memory."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.held: dict[str, tuple[bytes, float]] = {}
        self.ever: dict[str, int] = {}
        """Bytes of all blobs that were ever there."""
        self.most = 0

    @property
    def nbytes(self) -> int:
        return sum(len(data) for data, _ in self.held.values())

    @property
    def blocks(self) -> set[str]:
        return {name for name in self.held if is_block(name)}

    @property
    def removed(self) -> set[str]:
        """Blocks that were there once."""
        return {name for name in self.ever if is_block(name)} - self.blocks

    @property
    def bytes_removed(self) -> int:
        return sum(self.ever[name] for name in self.removed)

    def put(self, name: str, data: bytes) -> None:
        self.held[name] = data, self.clock.time()
        self.ever[name] = len(data)
        self.most = max(self.most, self.nbytes)


class View:
    """The same storage, as one process sees it."""

    def __init__(self, storage: Storage, stop: Callable[[], None] = lambda: None) -> None:
        self.storage = storage
        self.stop = stop

    def read_part(self, name: str, into: Span, offset: int, timeout: float) -> int:
        self.stop()
        if name not in self.storage.held:
            return -1
        data = self.storage.held[name][0][offset : offset + len(into)]
        into[: len(data)] = data
        return len(data)

    def create(self, name: str, data: bytes, timeout: float) -> bool:
        self.stop()
        if name in self.storage.held:
            return False
        self.storage.put(name, data)
        return True

    def delete(self, names: Sequence[str], timeout: float) -> None:
        for name in names:
            self.stop()
            self.storage.held.pop(name, None)

    def tidy(self, age: float, timeout: float, alive: Callable[[], None]) -> tuple[int, int]:
        return 0, 0

    def read(self, batch: Sequence[tuple[str, Sequence[Span]]], timeout: float) -> list[int]:
        raise NotImplementedError

    def write(
        self, batch: Sequence[tuple[str, Sequence[Span]]], timeout: float, turn: Turn = nullcontext
    ) -> list[bool]:
        raise NotImplementedError

    def find(self, names: Sequence[str], timeout: float) -> list[bool]:
        raise NotImplementedError

    def list(self, timeout: float, prefix: str = "") -> Iterator[tuple[str, int, float]]:
        self.stop()
        found = [(n, len(d), when) for n, (d, when) in self.storage.held.items() if n.startswith(prefix)]
        return iter(found)

    def close(self) -> None: ...


class Process:
    """A node that writes, reads, and may be coordinator. Blocks without credit wait until it arrives."""

    def __init__(self, storage: Storage, budget: int = BUDGET, seed: int = 0) -> None:
        self.view = View(storage)
        coordination = CoordinationBlobs(self.view, LEASE)
        self.coordinator = BudgetCoordinator(coordination, budget, storage.clock)
        self.write_credits = WriteCredits(
            coordination,
            budget,
            filled=self.write_what_waits,
            removed=self.hear,
            waiting=lambda: sum(self.waiting.values()),
            clock=storage.clock,
        )
        self.heard: set[str] = set()
        self.times_missed = 0
        self.storage = storage
        self.random = Random(seed)
        self.names: list[str] = []
        """Of all blocks that it was to write."""
        self.written = 0
        self.bytes_written = 0
        self.waiting: dict[str, int] = {}
        self.fails = False
        """Whether its writes fail, though it has credit."""

    def hear(self, names: list[str] | None) -> None:
        self.times_missed += names is None
        self.heard.update(names or ())

    def step(self) -> None:
        self.write_credits.step()
        self.coordinator.step()

    def write(self, nbytes: int) -> str | None:
        """Write a block now or, where there is no credit, later: then the answer is None."""
        name = self.random.randbytes(32).hex()
        self.names.append(name)
        if self.try_to_write(name, nbytes):
            return name
        if nbytes <= self.write_credits.largest:
            self.waiting[name] = nbytes
            if len(self.waiting) > MEMORY:
                del self.waiting[next(iter(self.waiting))]
        return None

    def try_to_write(self, name: str, nbytes: int) -> bool:
        permit = self.write_credits.take(name, nbytes) if nbytes <= self.write_credits.largest else None
        if permit is None:
            return False
        self.waiting.pop(name, None)
        if not self.fails:
            self.storage.put(name, bytes(nbytes))
            self.write_credits.used([name])
            self.written += 1
            self.bytes_written += nbytes
        self.write_credits.end(permit, failed=self.fails)
        return True

    def write_what_waits(self) -> None:
        for name, nbytes in list(self.waiting.items()):
            self.try_to_write(name, nbytes)


def later(clock: FakeClock, processes: Sequence[Process], seconds: float) -> None:
    """Let time pass, and all processes take their steps."""
    for _ in range(round(seconds)):
        clock.advance(1.0)
        for process in processes:
            process.step()


def fill(
    clock: FakeClock, process: Process, count: int, others: Sequence[Process] = (), nbytes: int = BUDGET // 100
) -> None:
    """Let a process write so many blocks, one a second or as credit comes."""
    for _ in range(count):
        later(clock, [process, *others], 1)
        process.write(nbytes)
        for _ in range(60):
            if not process.waiting:
                break
            later(clock, [process, *others], 1)
        assert not process.waiting, "a block was not written within a minute"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def storage(clock: FakeClock) -> Storage:
    return Storage(clock)


def write_all(clock: FakeClock, processes: Sequence[Process]) -> None:
    """Each writes a block, within a few steps."""
    before = [process.written for process in processes]
    for process in processes:
        process.write(1000)
    later(clock, processes, 3)
    assert [process.written - one for process, one in zip(processes, before, strict=True)] == [1] * len(processes)


def terms(processes: Sequence[Process]) -> list[int]:
    return [process.coordinator.statistics().term for process in processes]


def test_one_is_elected_and_the_others_write(storage: Storage, clock: FakeClock) -> None:
    processes = [Process(storage, seed=n) for n in range(3)]
    later(clock, processes, 4)
    assert terms(processes) == [1, 0, 0]
    write_all(clock, processes)


def test_without_a_coordinator_nothing_is_written(storage: Storage, clock: FakeClock) -> None:
    process = Process(storage)
    assert process.write(1) is None
    process.write_credits.step()
    assert process.write(1) is None


@pytest.mark.parametrize("resigns", [False, True])
def test_another_takes_over_within_a_lease(storage: Storage, clock: FakeClock, resigns: bool) -> None:
    first, *others = processes = [Process(storage, seed=n) for n in range(3)]
    later(clock, processes, 4)
    if resigns:
        first.coordinator.resign()
    later(clock, others, LEASE if not resigns else 2)
    later(clock, others, 1)
    assert sorted(terms(others)) == [0, 2]
    later(clock, others, 2 * LEASE + 3)
    write_all(clock, others)
    first.step()  # it wakes up, and sees that it is over
    assert terms([first]) == [0]
    later(clock, processes, 3)
    assert sorted(terms(processes)) == [0, 0, 2]


def test_what_was_used_longest_ago_goes(storage: Storage, clock: FakeClock) -> None:
    process = Process(storage)
    fill(clock, process, 80)
    old = set(process.names[:10])
    process.write_credits.used(list(old))
    fill(clock, process, 50)
    names = process.names
    assert old <= storage.blocks, "written first, and read since"
    assert not set(names[10:35]) & storage.blocks
    assert storage.most <= BUDGET


def test_a_successor_knows_what_was_used(storage: Storage, clock: FakeClock) -> None:
    first, second = Process(storage), Process(storage, seed=1)
    later(clock, [first], 3)
    fill(clock, first, 80)
    names = first.names
    first.write_credits.used(names[:5])
    later(clock, [first], 2)
    fill(clock, second, 40)  # the first is dead
    assert set(names[:5]) <= storage.blocks
    assert not set(names[5:20]) & storage.blocks


def test_everybody_hears_what_was_removed_and_of_nothing_else(storage: Storage, clock: FakeClock) -> None:
    writer, reader = Process(storage), Process(storage, seed=1)
    fill(clock, writer, 150, [reader])
    late = Process(storage, seed=2)
    later(clock, [late], 1)
    assert late.heard == set(), "it knew of nothing that it could forget"
    before = storage.removed
    fill(clock, writer, 50, [reader, late])
    later(clock, [writer, reader, late], 4)
    assert len(before) > 20
    assert writer.heard == reader.heard == storage.removed
    assert late.heard == storage.removed - before > set()


def test_everybody_knows_how_the_budget_stands(storage: Storage, clock: FakeClock) -> None:
    writer, reader = Process(storage), Process(storage, seed=1)
    fill(clock, writer, 150, [reader])
    later(clock, [writer, reader], 10 * LEASE)
    told = reader.write_credits.coordinator_statistics()
    assert told.who
    assert (told.term, told.budget, told.blocks) == (1, BUDGET, writer.coordinator.statistics().blocks)
    assert told.blocks_removed == len(storage.removed) > 0
    assert 0 < told.bytes_used + told.bytes_granted <= BUDGET
    assert reader.write_credits.silence < LEASE
    writer.coordinator.resign()
    later(clock, [reader], 1)
    assert reader.write_credits.coordinator_statistics().who == ""


def test_rubbish_where_a_beat_should_be_is_no_news(storage: Storage, clock: FakeClock) -> None:
    reader = Process(storage)
    for n, rubbish in enumerate((b"", b"\xff" * 5000, b'{"who": 3}', b"[]")):
        storage.put(f"evictor.0000000001.{n:010d}", rubbish)
        reader.write_credits.step()
    assert reader.write_credits.coordinator_statistics() == BudgetCoordinatorStatistics()


def test_who_was_away_for_too_long_is_told_so(storage: Storage, clock: FakeClock) -> None:
    writer, reader = Process(storage), Process(storage, seed=1)
    fill(clock, writer, 120, [reader])
    assert reader.times_missed == 0
    fill(clock, writer, 800)
    later(clock, [reader], 1)
    assert reader.times_missed == 1
    fill(clock, writer, 50, [reader])
    assert (reader.times_missed, writer.times_missed) == (1, 0)


def test_a_storage_that_takes_no_page_is_emptied_all_the_same(storage: Storage, clock: FakeClock) -> None:
    for n in range(100):
        storage.put(Random(n).randbytes(32).hex(), bytes(10_000))

    class Full(View):
        def create(self, name: str, data: bytes, timeout: float) -> bool:
            if data:
                raise OSError(errno.ENOSPC, "full")
            return super().create(name, data, timeout)

    coordinator = BudgetCoordinator(CoordinationBlobs(Full(storage), LEASE), 300_000, clock)
    for _ in range(3):
        clock.advance(1.0)
        coordinator.step()
    assert storage.nbytes <= 300_000


def test_slow_deletes_cost_nobody_his_office(storage: Storage, clock: FakeClock) -> None:
    for n in range(1000):
        storage.put(Random(n).randbytes(32).hex(), bytes(1000))
    watcher = Process(storage, seed=1)

    class Slow(View):
        def delete(self, names: Sequence[str], timeout: float) -> None:
            for name in names:
                clock.advance(0.05)
                super().delete([name], timeout)
            watcher.step()

    coordinator = BudgetCoordinator(CoordinationBlobs(Slow(storage), LEASE), 200_000, clock)
    for _ in range(3):
        clock.advance(1.0)
        coordinator.step()
    assert len(storage.removed) > 700
    assert terms([watcher]) == [0]


def test_much_to_read_and_many_who_ask_cost_nobody_his_office(storage: Storage, clock: FakeClock) -> None:
    for n in range(256):
        storage.put(f"used.aa.{n:010}", bytes(32))
    watcher = Process(storage, seed=1)

    class Slow(View):
        def read_part(self, name: str, into: Span, offset: int, timeout: float) -> int:
            if name.startswith("used."):
                clock.advance(0.1)
                watcher.step()
            return super().read_part(name, into, offset, timeout)

        def create(self, name: str, data: bytes, timeout: float) -> bool:
            if name.startswith("grant"):
                clock.advance(0.1)
                watcher.step()
            return super().create(name, data, timeout)

    coordinator = BudgetCoordinator(CoordinationBlobs(Slow(storage), LEASE), BUDGET, clock)
    coordinator.step()
    coordinator.step()
    asking = [Process(storage, seed=2 + n) for n in range(100)]
    for _ in range(30):
        clock.advance(1.0)
        for process in asking:
            process.write(100)
            process.write_credits.step()
        coordinator.step()
    assert sum(name.startswith("grant") for name in storage.ever) >= 100
    assert terms([watcher]) == [0]


def test_a_lower_budget_is_reached_without_anybody_asking(storage: Storage, clock: FakeClock) -> None:
    for n in range(100):
        storage.put(Random(n).randbytes(32).hex(), bytes(10_000))
    process = Process(storage, budget=300_000)
    later(clock, [process], 3)
    assert storage.nbytes <= 300_000


@pytest.mark.parametrize("seed", range(12))
def test_the_budget_holds_whoever_is_stopped_in_the_middle_of_whatever(seed: int) -> None:
    """Any process may be stopped before any call to storage, for any time, while the others go on."""
    random = Random(seed)
    clock = FakeClock()
    storage = Storage(clock)
    processes = [Process(storage, seed=100 * seed + n) for n in range(4)]
    running: list[Process] = []

    def go_on(seconds: float) -> None:
        for _ in range(round(2 * seconds)):
            clock.advance(0.5)
            for process in random.sample(processes, len(processes)):
                if process in running:
                    continue  # it is stopped
                running.append(process)
                process.step()
                for _ in range(random.randrange(6)):
                    process.write(random.randrange(1, BUDGET // 20))
                running.remove(process)

    def maybe_stop() -> None:
        if len(running) < 3 and random.random() < 0.0015:
            go_on(random.choice([1, LEASE, 3 * LEASE, 6 * LEASE]))

    go_on(1)  # a process that has not looked yet knows of nothing that it could forget
    for process in processes:
        process.view.stop = maybe_stop
    go_on(60)
    for process in processes:
        process.view.stop = lambda: None
        process.write_credits.step()
    assert storage.most <= BUDGET
    for process in processes:
        assert process.times_missed or storage.removed <= process.heard, "nothing goes untold"
    assert sum(process.written for process in processes) > 20
    assert sum(process.coordinator.statistics().terms_served for process in processes) >= 1


def test_coordination_blobs_do_not_pile_up(storage: Storage, clock: FakeClock) -> None:
    processes = [Process(storage, seed=n) for n in range(3)]
    for _ in range(200):
        later(clock, processes, 1)
        for process in processes:
            process.write(BUDGET // 200)
    coordination = [name.partition(".")[0] for name in storage.held if not is_block(name)]
    counts = dict(zip(*np.unique(coordination, return_counts=True), strict=True))
    assert counts.pop("used") <= 300
    assert 10 < counts.pop("evicted") <= 64
    assert sum(counts.values()) <= 12, counts


# -- nothing is removed without need --------------------------------------------------------------------------

BATCH = BUDGET // 16
"""The most that a node is given at a time for blocks of usual size."""


def full(storage: Storage, part: float = 0.98) -> None:
    """Let storage be full of blocks of somebody who has gone."""
    for n in range(int(100 * part)):
        storage.put(Random(f"old {n}").randbytes(32).hex(), bytes(BUDGET // 100))


@pytest.mark.parametrize("part", [0.5, 0.9, 0.98])
def test_nodes_that_store_nothing_remove_nothing(storage: Storage, clock: FakeClock, part: float) -> None:
    full(storage, part)
    nodes = [Process(storage, seed=n) for n in range(8)]
    later(clock, nodes, 20 * LEASE)
    assert storage.removed == set()
    assert not [name for name in storage.ever if name.startswith(("ask.", "grant."))]


def test_nodes_that_have_stored_and_are_idle_remove_nothing(storage: Storage, clock: FakeClock) -> None:
    nodes = [Process(storage, seed=n) for n in range(8)]
    while storage.nbytes < 0.9 * BUDGET:
        for node in nodes:
            node.write(BUDGET // 200)
        later(clock, nodes, 1)
    later(clock, nodes, 5)
    removed = storage.removed
    later(clock, nodes, 20 * LEASE)
    assert storage.removed == removed
    assert [node.write_credits.credit for node in nodes] == [0] * 8
    (budget_thread,) = [node for node in nodes if node.coordinator.statistics().term]
    budget_thread.write(1)
    later(clock, nodes, 3 * LEASE)
    assert budget_thread.coordinator.statistics().bytes_granted <= BATCH


@pytest.mark.parametrize("writers", [1, 3])
@pytest.mark.parametrize("nbytes", [BUDGET // 1000, BUDGET // 100, BUDGET // 17])
def test_no_more_is_removed_than_is_written(storage: Storage, clock: FakeClock, nbytes: int, writers: int) -> None:
    full(storage, 0.9)
    nodes = [Process(storage, seed=n) for n in range(writers + 4)]
    later(clock, nodes, 2)
    before = storage.nbytes
    for n in range(60):
        for node in nodes[:writers]:
            if n % 3 == 0:
                node.write(nbytes)
        later(clock, nodes, 1)
        written = sum(node.bytes_written for node in nodes)
        assert storage.bytes_removed <= max(0, before + written - 0.9 * BUDGET) + (writers + 1) * BATCH
        assert storage.most <= BUDGET
    assert written > writers * 9 * nbytes
    assert storage.nbytes > (0.8 if nbytes > BUDGET // 50 else 0.9) * BUDGET, "and nearly all of it is in use"


def test_what_idle_nodes_give_back_is_used_before_anything_is_removed(storage: Storage, clock: FakeClock) -> None:
    full(storage, 0.40)
    nodes = [Process(storage, seed=n) for n in range(9)]
    later(clock, nodes, 2)
    for node in nodes[:8]:
        for _ in range(MEMORY):
            node.write(BATCH // MEMORY)
        node.step()  # it asks
    nodes[0].coordinator.step()
    for node in nodes[:8]:
        node.waiting.clear()  # and does not want it any more
    later(clock, nodes, 1)
    assert nodes[0].coordinator.statistics().bytes_granted > 7 * BATCH
    fill(clock, nodes[8], 50, nodes[:8])
    assert storage.removed == set()
    assert nodes[8].written == 50
    assert storage.most <= BUDGET


def test_the_credit_of_the_dead_counts_until_it_is_over_and_is_then_used(storage: Storage, clock: FakeClock) -> None:
    full(storage, 0.45)
    coordinator, *dying = nodes = [Process(storage, seed=n) for n in range(9)]
    later(clock, nodes, 2)
    for node in dying:
        for _ in range(MEMORY):
            node.write(BATCH // MEMORY)
        node.write_credits.step()
    coordinator.step()
    granted = coordinator.coordinator.statistics().bytes_granted
    assert granted > 7 * BATCH
    later(clock, [coordinator], LEASE)
    assert coordinator.coordinator.statistics().bytes_granted == granted
    later(clock, [coordinator], 2 * LEASE)
    fill(clock, coordinator, 50)
    assert storage.removed == set()
    assert storage.most <= BUDGET


def test_the_ask_of_a_dead_node_is_forgotten(storage: Storage, clock: FakeClock) -> None:
    full(storage)
    coordinator = Process(storage)
    later(clock, [coordinator], 2)
    coordinator.coordinator.resign()
    later(clock, [coordinator], 2)
    assert terms([coordinator]) == [2]
    dead = Process(storage, seed=1)
    dead.write_credits.step()
    dead.write(BUDGET // 100)
    dead.write_credits.step()
    assert [name for name in storage.held if name.startswith("ask.")]
    later(clock, [coordinator], 3 * LEASE)  # it gives nothing for two leases
    assert not [name for name in storage.held if name.startswith("ask.")]
    assert storage.removed == set()


def test_nodes_that_come_and_go_remove_only_what_they_replace(storage: Storage, clock: FakeClock) -> None:
    full(storage)
    coordinator = Process(storage)
    later(clock, [coordinator], 2)
    written = 0
    for n in range(40):
        node = Process(storage, seed=n + 1)
        node.write_credits.step()
        node.write(BUDGET // 1000)
        later(clock, [coordinator, node], 3)
        assert node.written == 1
        written += node.bytes_written
        if n % 2:
            node.write_credits.close()  # the others are killed
    later(clock, [coordinator], 3 * LEASE)
    assert storage.bytes_removed <= written + BATCH
    assert storage.most <= BUDGET


@pytest.mark.parametrize("nbytes", [BUDGET, 3 * BUDGET])
def test_a_block_that_can_never_fit_removes_nothing(storage: Storage, clock: FakeClock, nbytes: int) -> None:
    full(storage)
    node = Process(storage)
    later(clock, [node], 2)
    for _ in range(10):
        assert node.write(nbytes) is None
        assert node.write_credits.take("f" * 64, nbytes) is None
        later(clock, [node], 2)
    storage.put(f"ask.0000000001.{'a' * 12}.0000000001.{nbytes}", b"")  # of a node with another budget
    later(clock, [node], 2 * LEASE)
    assert storage.removed == set()


def test_a_large_block_that_fits_is_written(storage: Storage, clock: FakeClock) -> None:
    full(storage)
    _, other = nodes = [Process(storage), Process(storage, seed=1)]
    later(clock, nodes, 2)
    other.write(BUDGET // 2)
    later(clock, nodes, 4)
    assert other.written == 1
    assert storage.bytes_removed <= BUDGET // 2 + BATCH
    assert storage.most <= BUDGET


def test_a_node_whose_writes_fail_does_not_empty_storage(storage: Storage, clock: FakeClock) -> None:
    full(storage)
    coordinator, broken = nodes = [Process(storage), Process(storage, seed=1)]
    later(clock, nodes, 2)
    broken.fails = True
    for _ in range(200):
        broken.write(BUDGET // 200)
        later(clock, nodes, 1)
    assert storage.bytes_removed <= 3 * BATCH
    broken.fails = False
    fill(clock, broken, 20, [coordinator])
    assert storage.most <= BUDGET


def test_who_wants_nothing_any_more_takes_its_ask_back(storage: Storage, clock: FakeClock) -> None:
    full(storage)
    coordinator, node = Process(storage), Process(storage, seed=1)
    later(clock, [coordinator, node], 2)
    node.write(BUDGET // 100)
    node.write_credits.step()
    assert [name for name in storage.held if name.startswith("ask.")]
    node.waiting.clear()
    clock.advance(3.0)
    node.write_credits.step()
    assert not [name for name in storage.held if name.startswith("ask.")]
    later(clock, [coordinator, node], LEASE)
    assert storage.removed == set()


def test_a_coordinator_that_knows_nothing_of_giving_back_is_not_left_with_blobs(
    storage: Storage, clock: FakeClock
) -> None:
    class Earlier(BudgetCoordinator):
        def _take_back(self) -> None:
            """It did not know."""

    node = Process(storage)
    node.coordinator = Earlier(CoordinationBlobs(node.view, LEASE), BUDGET, clock)
    fill(clock, node, 30)
    assert [name for name in storage.ever if name.startswith("back.")]
    later(clock, [node], 4 * LEASE)
    assert not [name for name in storage.held if name.startswith("back.")]
