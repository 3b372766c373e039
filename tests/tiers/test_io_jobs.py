"""Jobs on storage that may hang: everybody gets an answer in time, and nobody's memory is given away too early."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvtide.clock import SystemClock
from kvtide.testing.caller import CallerAnswer
from kvtide.testing.interface import until
from kvtide.tiers.shared import io_jobs
from kvtide.tiers.shared.io_jobs import Batch, Jobs, Trickle

TIMEOUT = 0.2


class Hanging:
    """Storage that hangs until it is told to go on."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Semaphore(0), threading.Event()

    def __call__(self, items: Sequence[int], worker: int) -> list[bool]:
        self.begun.release()
        assert self.go.wait(30)
        return [True] * len(items)


@pytest.fixture
def refused() -> list[tuple[str, int]]:
    return []


@pytest.fixture
def jobs(refused: list[tuple[str, int]]) -> Iterator[Jobs[int]]:
    made = Jobs("test", [1, 2], TIMEOUT, lambda verb, count: refused.append((verb, count)), SystemClock())
    yield made
    made.close()


def test_items_keep_their_order(jobs: Jobs[int]) -> None:
    answer = CallerAnswer[int](50)
    jobs.submit(Batch("read", range(50), lambda items, _: [2 * n for n in items], -1, answer))
    assert answer.wait() == [2 * n for n in range(50)]


@pytest.mark.parametrize(("most", "sizes"), [(None, [2, 16, 16, 16]), (20, [10, 20, 20]), (40, [25, 25])])
def test_a_caller_may_have_larger_jobs(jobs: Jobs[int], most: int | None, sizes: list[int]) -> None:
    """Of 50 items on two threads."""
    answer, seen = CallerAnswer[int](50), list[int]()

    def run(items: Sequence[int], worker: int) -> list[int]:
        seen.append(len(items))
        return list(items)

    batch = Batch("read", range(50), run, -1, answer)
    jobs.submit(batch) if most is None else jobs.submit(batch, most)
    assert answer.wait() == [*range(50)]
    assert sorted(seen) == sizes


def test_a_job_that_hangs_and_uses_no_memory_fails(jobs: Jobs[int], refused: list[tuple[str, int]]) -> None:
    hanging, answer = Hanging(), CallerAnswer[bool](1)
    jobs.submit(Batch("find", [1], hanging, False, answer))
    assert answer.wait() == [False]
    assert refused == [("find", 1)]
    hanging.go.set()


def test_a_job_that_hangs_with_memory_is_late_and_answered_when_it_ends(jobs: Jobs[int]) -> None:
    hanging, answer = Hanging(), CallerAnswer[bool](1)
    late: queue.SimpleQueue[Sequence[int]] = queue.SimpleQueue()
    jobs.submit(Batch("read", [7], hanging, False, answer, late.put))
    assert late.get(timeout=30) == [7]
    assert answer._calls == []
    hanging.go.set()
    assert answer.wait() == [True]
    answer.check()


def test_a_batch_may_take_longer_than_others(jobs: Jobs[int], refused: list[tuple[str, int]]) -> None:
    """It fails neither while it runs, nor while it waits behind others that take as long."""
    slow, answers = Hanging(), [CallerAnswer[bool](2) for _ in range(2)]
    for answer in answers:
        jobs.submit(Batch("read", [1, 2], slow, False, answer, longer=600.0), 1)
    other = CallerAnswer[bool](1)
    jobs.submit(Batch("find", [1], slow, False, other))
    assert other.wait() == [False]
    slow.go.set()
    assert [answer.wait() for answer in answers] == [[True, True]] * 2
    assert refused == [("find", 1)]


def test_the_watcher_notices_a_late_job_after_a_quiet_time(
    jobs: Jobs[int], refused: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_jobs, "_QUIET", 1)
    until(lambda: jobs._idle)
    hanging, answer = Hanging(), CallerAnswer[bool](1)
    jobs.submit(Batch("find", [1], hanging, False, answer))
    assert answer.wait() == [False]
    hanging.go.set()


def test_when_one_of_a_batch_hangs_all_of_it_is_late(jobs: Jobs[int]) -> None:
    """They are answered together: otherwise a caller that waits for another of them would wait as long."""
    go, answer = threading.Event(), CallerAnswer[bool](2)
    late: queue.SimpleQueue[Sequence[int]] = queue.SimpleQueue()

    def run(items: Sequence[int], worker: int) -> list[bool]:
        assert items[0] != 7 or go.wait(30)
        return [True] * len(items)

    jobs.submit(Batch("read", [7, 8], run, False, answer, late.put), 1)
    assert late.get(timeout=30) == [7, 8]
    go.set()
    assert answer.wait() == [True, True]


def test_while_one_is_late_everything_else_fails_at_once(jobs: Jobs[int]) -> None:
    hanging, first, second, third = Hanging(), CallerAnswer[bool](1), CallerAnswer[bool](8), CallerAnswer[bool](1)
    told = threading.Event()
    jobs.submit(Batch("read", [1], hanging, False, first, lambda _: told.set()))
    jobs.submit(Batch("read", range(8), hanging, False, second, lambda _: None))  # some of them are never begun
    assert told.wait(30)
    jobs.submit(Batch("read", [1], hanging, False, third, lambda _: None))
    assert third._calls == [[False]]
    hanging.go.set()
    assert first.wait() == [True]
    assert len(second.wait()) == 8
    until(lambda: not jobs.hangs)
    again = CallerAnswer[bool](1)
    jobs.submit(Batch("read", [1], hanging, False, again, lambda _: None))
    assert again.wait() == [True]


def test_closing_does_not_wait_for_what_hangs_nor_answer_it_later() -> None:
    hanging, answer = Hanging(), CallerAnswer[bool](1)
    jobs = Jobs("test", [1], TIMEOUT, lambda verb, count: None, SystemClock())
    jobs.submit(Batch("write", [1], hanging, False, answer, lambda _: None))
    assert hanging.begun.acquire(timeout=30)
    jobs.close()
    hanging.go.set()
    for thread in jobs._threads:
        thread.join(30)
    assert answer._calls == [], "the caller may be gone"


class Slow:
    """Does what a trickle wants when it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], Callable[[Sequence[bool]], None]]] = []
        self.given_up: list[int] = []
        self.trickle = Trickle[int](lambda items, done: self.asked.append((items, done)), self.given_up.extend)

    def let(self, good: bool = True) -> list[int]:
        """Answer what is under way."""
        ((items, done),) = self.asked
        self.asked.clear()
        done([good] * len(items))
        return items


def test_a_trickle_is_a_few_at_a_time_and_all_in_the_end() -> None:
    slow = Slow()
    for n in range(1000):
        slow.trickle.add(n)
    seen: list[int] = []
    while slow.asked:
        some = slow.let()
        assert len(some) <= 64
        seen += some
    assert seen == list(range(1000))
    slow.trickle.add(1000)
    assert slow.let() == [1000], "it begins again"


def test_a_trickle_does_not_go_on_where_nothing_goes() -> None:
    slow = Slow()
    for n in range(1000):
        slow.trickle.add(n)
    first = slow.let(good=False)
    assert (first + slow.given_up, slow.asked) == (list(range(1000)), [])
    slow.trickle.add(7)
    assert slow.let() == [7]
