"""A move under way: it ends once, by arrival, deadline or cancellation, and tells everybody who waits."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading

import pytest

from kvtide.clock import SystemClock
from kvtide.transfer.transfer import Transfer
from tests.plan.small import Clock


def expecting(*rows: int, clock: Clock | None = None, deadline: float | None = None) -> Transfer:
    transfer = Transfer(clock or SystemClock(), deadline)
    transfer.expect(rows)
    return transfer


def test_it_ends_when_every_row_has_arrived_or_failed() -> None:
    transfer = expecting(1, 2, 3)
    transfer.started()
    assert not transfer.wait(0)
    transfer.finish([1, 3], [True, False])
    assert not transfer.wait(0)
    assert repr(transfer) == "<Transfer 1 arrived, 1 failed, 1 under way>"
    transfer.finish([2], [True])
    assert transfer.wait(0)
    assert transfer.ended
    assert (transfer.arrived, transfer.failed) == ({1, 2}, {3})
    assert repr(transfer) == "<Transfer 2 arrived, 1 failed, ended>"


def test_nothing_to_wait_for_ends_at_once() -> None:
    transfer = Transfer(SystemClock())
    transfer.started()
    assert transfer.ended


def test_rows_of_others_and_rows_told_twice_do_not_count() -> None:
    transfer = expecting(1, 2)
    transfer.finish([7], [True])
    transfer.finish([1], [True])
    transfer.finish([1], [False])
    assert (transfer.arrived, transfer.failed, transfer.ended) == ({1}, set(), False)


def test_cancelling_fails_what_has_not_come_and_later_arrivals_are_not_its_own() -> None:
    transfer = expecting(1, 2)
    transfer.finish([1], [True])
    transfer.cancel()
    transfer.finish([2], [True])
    assert not transfer.wanted
    assert (transfer.arrived, transfer.failed) == ({1}, {2})
    transfer.cancel()


def test_a_passed_deadline_makes_it_unwanted_and_ends_a_wait() -> None:
    clock = Clock()
    transfer = expecting(1, clock=clock, deadline=clock.now + 5)
    clock.now += 4.9
    wanted = [transfer.wanted]
    clock.now += 0.1
    wanted.append(transfer.wanted)
    assert wanted == [True, False]
    assert transfer.wait()  # with no timeout: it must not hang
    assert transfer.failed == {1}


def test_a_deadline_ends_a_wait_that_has_begun() -> None:
    transfer = Transfer(SystemClock(), SystemClock().monotonic() + 0.05)
    transfer.expect([1])
    assert transfer.wait(60)
    assert transfer.failed == {1}


def test_a_timeout_is_not_a_deadline() -> None:
    transfer = expecting(1)
    assert not transfer.wait(0.01)
    assert transfer.wanted
    transfer.finish([1], [True])
    assert transfer.arrived == {1}


def test_waits_that_timed_out_leave_nothing_behind() -> None:
    transfer = expecting(1)
    for _ in range(100):
        assert not transfer.wait(0)
    assert not transfer._waiters
    transfer.finish([1], [True])
    assert transfer.wait(0)


def test_callbacks_are_called_once_also_when_it_has_ended_before() -> None:
    transfer, calls = expecting(1), []
    transfer.on_end(lambda: calls.append("early"))
    transfer.finish([1], [True])
    transfer.cancel()
    transfer.on_end(lambda: calls.append("late"))
    assert calls == ["early", "late"]


def test_a_callback_that_fails_stops_neither_the_others_nor_the_tier(caplog: pytest.LogCaptureFixture) -> None:
    transfer, calls = expecting(1), []

    def bad() -> None:
        raise ZeroDivisionError

    transfer.on_end(bad)
    transfer.on_end(lambda: calls.append("good"))
    with caplog.at_level(logging.ERROR):
        transfer.finish([1], [True])
    assert calls == ["good"]
    assert "a callback at the end of a transfer failed" in caplog.text


def test_many_threads_end_it_once() -> None:
    for _ in range(50):
        transfer = expecting(*range(8))
        calls: list[int] = []
        transfer.on_end(functools.partial(calls.append, 1))
        start = threading.Barrier(9)

        def finish(row: int, transfer: Transfer = transfer, start: threading.Barrier = start) -> None:
            start.wait()
            transfer.finish([row], [True])

        def cancel(transfer: Transfer = transfer, start: threading.Barrier = start) -> None:
            start.wait()
            transfer.cancel()

        threads = [threading.Thread(target=finish, args=(row,)) for row in range(8)]
        threads.append(threading.Thread(target=cancel))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert calls == [1]
        assert transfer.arrived | transfer.failed == set(range(8))
        assert not transfer.arrived & transfer.failed


def test_await_is_woken_from_another_thread() -> None:
    transfer = expecting(1)

    async def main() -> bool:
        threading.Timer(0.02, transfer.finish, ([1], [True])).start()
        return await transfer

    assert asyncio.run(main())
    assert transfer.arrived == {1}


def test_await_of_what_has_ended_returns_at_once() -> None:
    transfer = expecting(1)
    transfer.cancel()

    async def main() -> bool:
        return await asyncio.wait_for(transfer._wait_async(), 10)

    assert asyncio.run(main())


def test_await_ends_at_the_deadline() -> None:
    transfer = Transfer(SystemClock(), SystemClock().monotonic() + 0.05)
    transfer.expect([1])

    async def main() -> bool:
        return await transfer

    assert asyncio.run(main())
    assert transfer.failed == {1}


def test_two_tasks_may_await_one_transfer() -> None:
    transfer = expecting(1)

    async def main() -> list[bool]:
        async def one() -> bool:
            return await transfer

        tasks = [asyncio.create_task(one()) for _ in range(2)]
        await asyncio.sleep(0)
        transfer.finish([1], [True])
        return await asyncio.gather(*tasks)

    assert asyncio.run(main()) == [True, True]


def test_a_loop_that_was_closed_meanwhile_does_not_hurt_the_tier(caplog: pytest.LogCaptureFixture) -> None:
    transfer = expecting(1)

    async def main() -> None:
        task = asyncio.ensure_future(transfer._wait_async())
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(main())
    transfer.finish([1], [True])
    assert transfer.arrived == {1}
    assert not caplog.records
