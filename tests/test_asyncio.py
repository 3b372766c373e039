"""The asyncio face: awaiting, many at once, cancelled tasks, and loops that are gone before a disk answers."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from kvtide.errors import ClosedError, RightError
from tests.plan.small import LAYOUT, MODEL, NBYTES, Clock, content, keep, open_store, prompt
from tests.test_interface import SlowCopier
from tests.transfer.gate import Gated
from tests.transfer.test_pipeline import World, check, world

TOKENS = LAYOUT.block_tokens


def test_await_a_load_that_must_come_from_disk(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv") as store, store.session(MODEL) as mine:
        keep(mine, 1, 2, 3)
    with open_store(tmp_path / "kv") as store, store.session(MODEL) as mine:

        async def main() -> None:
            with mine.match(prompt(1, 2, 3)) as match:
                assert not match.ready
                buffers = [bytearray(NBYTES) for _ in range(3)]
                loaded = await mine.load(match, buffers)
                assert loaded.tokens == 3 * TOKENS
                check(mine, loaded.blocks, 1, 2, 3)
                assert [bytes(b) for b in buffers] == [c.tobytes() for c in content(mine, prompt(1, 2, 3))]

        asyncio.run(main())


def test_await_a_prefetch(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv") as store, store.session(MODEL) as mine:
        keep(mine, 1, 2, 3)
    with open_store(tmp_path / "kv") as store, store.session(MODEL) as mine:

        async def main() -> None:
            transfer = mine.prefetch(prompt(1, 2, 3))
            assert await transfer
            assert len(transfer.arrived) == 3
            with mine.match(prompt(1, 2, 3)) as match:
                assert match.ready

        asyncio.run(main())


def test_many_loads_at_once(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv") as store, store.session(MODEL) as mine:
        for number in range(12):
            keep(mine, number, number + 1)
            assert store.flush(30)  # or a store finds DRAM full of blocks that are being written
    with open_store(tmp_path / "kv", dram={"budget": "4MiB"}) as store, store.session(MODEL) as mine:

        async def one(number: int) -> int:
            with mine.match(prompt(number, number + 1)) as match:
                buffers = [bytearray(NBYTES) for _ in range(match.blocks)]
                loaded = await mine.load(match, buffers)
                check(mine, loaded.blocks, number, number + 1)
                assert bytes(buffers[1]) == content(mine, prompt(number, number + 1))[1].tobytes()
                return loaded.tokens

        async def main() -> list[int]:
            return await asyncio.gather(*(one(number % 12) for number in range(48)))

        assert asyncio.run(main()) == [2 * TOKENS] * 48
        assert store.statistics().held == 0


def test_the_loop_goes_on_while_a_load_waits() -> None:
    with world() as w:
        w.chill(1)

        async def main() -> None:
            with w.session.match(prompt(1)) as match:
                task = asyncio.ensure_future(w.session.load(match)._wait_async())
                for _ in range(10):
                    await asyncio.sleep(0)
                assert not task.done()
                w.tier.let_read()
                assert (await task).tokens == TOKENS

        asyncio.run(main())


def test_a_deadline_ends_an_await() -> None:
    tier = Gated()
    warm = World(tier)
    warm.chill(1)
    with warm.session.match(prompt(1)) as match:
        warm.store.clock = RealTime()

        async def main() -> int:
            return (await warm.session.load(match, deadline=0.02)).tokens

        assert asyncio.run(main()) == 0
    warm.store.close()


class RealTime(Clock):
    """The clock of the loop."""

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()


def test_cancelling_the_task_cancels_the_load() -> None:
    with world(depth=1) as w:
        for head in (1, 2, 3):
            w.chill(head)

        async def main() -> None:
            busy = [w.session.match(prompt(head)) for head in (2, 3)]
            with busy[0], busy[1], w.session.match(prompt(1)) as match:
                for other in busy:
                    w.session.load(other)  # keeps the tier busy
                load = w.session.load(match)
                task = asyncio.ensure_future(load._wait_async())
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert load.transfer.ended
            w.tier.let_read()
            w.tier.let_read()
            assert w.tier.reads == [], "nobody wanted it any more"

        asyncio.run(main())
        assert w.store.statistics().lanes["nvme"].reads_cancelled == 1


def test_a_timeout_around_a_load_cancels_it() -> None:
    with world() as w:
        w.chill(1)

        async def main() -> None:
            with w.session.match(prompt(1)) as match:
                load = w.session.load(match)
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.01):
                        await load
                assert load.transfer.ended

        asyncio.run(main())


def test_a_cancelled_task_ends_only_when_nobody_writes_into_its_buffers_any_more() -> None:
    with open_store() as store, store.session(MODEL) as mine:
        keep(mine, 1)
        store.copier.close()
        store.copier = slow = SlowCopier()
        buffer = bytearray(NBYTES)

        async def main() -> None:
            with mine.match(prompt(1)) as match:
                task = asyncio.ensure_future(mine.load(match, [buffer])._wait_async())
                assert await asyncio.to_thread(slow.begun.wait, 30)
                for _ in range(3):  # once more does not help
                    task.cancel()
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                assert not task.done()
                slow.go.set()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert bytes(buffer) == content(mine, prompt(1))[0].tobytes()

        asyncio.run(main())


def test_a_loop_that_is_closed_before_the_disk_answers_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with world() as w:
        w.chill(1)
        loop = asyncio.new_event_loop()

        async def main() -> None:
            asyncio.ensure_future(w.session.prefetch(prompt(1))._wait_async())  # noqa: RUF006 - to be left alone
            await asyncio.sleep(0)

        loop.run_until_complete(main())
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()
        w.tier.let_read()
        with w.session.match(prompt(1)) as match:
            assert match.ready
        assert w.store.statistics().held == 0
        assert not caplog.records


def test_a_released_match_fails_the_await() -> None:
    with world() as w:
        w.chill(1)

        async def main() -> None:
            match = w.session.match(prompt(1))
            load = w.session.load(match)
            match.release()
            w.tier.let_read()
            with pytest.raises(RightError, match="released while its load was under way"):
                await load

        asyncio.run(main())


def test_a_store_that_is_closed_ends_every_await() -> None:
    tier = Gated()
    w = World(tier)
    w.chill(1, 2)

    async def main() -> None:
        match = w.session.match(prompt(1, 2))
        task = asyncio.ensure_future(w.session.load(match)._wait_async())
        await asyncio.sleep(0)
        await asyncio.to_thread(w.store.close)
        with suppress(RightError, ClosedError):  # or it came in time
            await asyncio.wait_for(task, 30)

    asyncio.run(main())
    assert w.store.statistics().held == 0
