"""What ``flush`` says of blocks that are not written, and how a durable store goes on, step by step.

The colder tier answers only when the test lets it, so every moment in between can be looked at.
"""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvtide import Flushed, Unwritten
from kvtide.transfer import demotion
from tests.plan.small import MODEL, NBYTES, SLOTS, content, keep, length, open_store, prompt
from tests.transfer.gate import Gated
from tests.transfer.test_pipeline import world

# -- flush --------------------------------------------------------------------------------------------------


def test_without_a_tier_below_nothing_is_to_be_written_and_the_answer_says_so() -> None:
    with open_store() as store, store.session(MODEL) as session:
        keep(session, 1, 2)
        flushed = store.flush()
        assert flushed
        assert flushed == Flushed(0, {Unwritten.NO_TIER: 2})


@pytest.mark.parametrize("mode", ["second-touch", "eviction"])
def test_what_the_admission_does_not_want_is_told_and_no_failure(mode: str) -> None:
    with world(mode=mode) as w:
        keep(w.session, 1, 2)
        flushed = w.store.flush()
        assert flushed
        assert flushed == Flushed(0, {Unwritten.NOT_ADMITTED: 2})


def test_what_is_still_being_written_when_the_time_is_over_is_told() -> None:
    with world() as w:
        keep(w.session, 1, 2)
        assert w.store.flush(0) == Flushed(0, {Unwritten.TIMEOUT: 2}, complete=False)
        w.tier.let_all()
        assert w.store.flush(0) == Flushed(2)


def test_a_flush_waits_no_longer_than_it_may_however_much_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Miser:
        def wait_for_credit(self, timeout: float | None) -> None:
            waits.append(timeout)

    waits: list[float | None] = []
    with world() as w:
        keep(w.session, 1, 2)
        with monkeypatch.context() as patched:
            patched.setitem(w.store.main._budget_threads, "nvme", Miser())
            assert not w.store.flush(0.05)
        assert waits == [0.0], "the time was over when the queue had been waited for"


def test_what_a_full_queue_refused_is_told_until_it_is_written_or_gone() -> None:
    with world(queue=NBYTES) as w:
        keep(w.session, 1, 2, 3)
        w.tier.let_all()
        flushed = w.store.flush()
        assert not flushed
        assert flushed == Flushed(1, {Unwritten.QUEUE_FULL: 2})
        w.session.drop(prompt(1, 2, 3), start=2)
        assert w.store.flush().unwritten == {Unwritten.QUEUE_FULL: 1}
        persisted = w.session.store(prompt(1, 2), content(w.session, prompt(1, 2)), durable=True)
        w.tier.let_all()
        assert persisted.wait(0)
        assert w.store.flush() == Flushed(2)


def test_what_the_tier_could_not_write_is_told() -> None:
    with world() as w:
        keep(w.session, 1, 2)
        w.tier.let_write(good=False)
        flushed = w.store.flush()
        assert not flushed
        assert flushed == Flushed(0, {Unwritten.WRITE_FAILED: 2})


def test_what_is_said_of_a_block_ends_with_it() -> None:
    with world(mode="second-touch", queue=NBYTES) as w:
        keep(w.session, 1, 2, 3)
        for _ in range(2):
            w.clock.now += 100
            length(w.session, 1, 2, 3)
        w.tier.let_all()
        assert w.store.flush().unwritten == {Unwritten.QUEUE_FULL: 2}
        w.session.drop(prompt(1, 2, 3))
        keep(w.session, 4, 5, 6)  # in the rows of the others
        assert w.store.flush() == Flushed(0, {Unwritten.NOT_ADMITTED: 3})


def test_what_left_memory_unwritten_is_told_once() -> None:
    with world() as w:
        keep(w.session, 1)
        w.tier.let_write(good=False)
        for number in range(100, 100 + SLOTS):
            keep(w.session, number)
            w.tier.let_all()
        assert length(w.session, 1) == 0
        flushed = w.store.flush()
        assert not flushed
        assert flushed == Flushed(SLOTS, {}, {Unwritten.WRITE_FAILED: 1})
        assert w.store.flush() == Flushed(SLOTS)


# -- a durable store ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["through", "second-touch", "eviction"])
def test_a_block_is_durable_when_it_was_synced_and_not_before(mode: str) -> None:
    with world(mode=mode) as w:
        w.tier.open_syncs = False
        persist = w.session.store(prompt(1, 2), content(w.session, prompt(1, 2)), durable=True)
        assert persist.wait(0).reasons == {Unwritten.TIMEOUT: 2}
        w.tier.let_all()
        assert persist.wait(0).reasons == {Unwritten.TIMEOUT: 2}, "it is written, but a power loss may take it"
        w.tier.let_sync()
        assert persist.transfer.ended
        assert (bool(persist.wait()), persist.wait().durable) == (True, 2)
        assert w.store.statistics().held == 0


def test_what_was_written_before_is_synced_and_not_written_again() -> None:
    with world() as w:
        keep(w.session, 1, 2)
        w.tier.let_all()
        w.tier.journal.clear()
        persist = w.session.store(prompt(1, 2), content(w.session, prompt(1, 2)), durable=True)
        assert (persist.stored, persist.present, bool(persist.wait(0))) == (0, 2, True)
        assert w.tier.journal == ["sync"]


def test_blocks_before_those_given_are_made_durable_too() -> None:
    with world(mode="second-touch") as w:
        keep(w.session, 1, 2)
        tokens = prompt(1, 2, 3)
        persist = w.session.store(tokens, content(w.session, tokens)[2:], start=2, durable=True)
        w.tier.let_all()
        assert persist.wait(0).durable == 3
        other = prompt(7, 8)
        persist = w.session.store(other, content(w.session, other)[1:], start=1, durable=True)
        w.tier.let_all()
        assert (persist.wait(0).durable, persist.wait().failed) == (1, {"full": {0: Unwritten.NOT_STORED}})


def test_a_full_queue_makes_the_transfer_wait_and_not_the_caller() -> None:
    with world(queue=NBYTES) as w:
        persist = w.session.store(prompt(*range(8)), content(w.session, prompt(*range(8))), durable=True)
        assert not persist.transfer.ended
        w.tier.let_all()
        assert persist.wait(0).durable == 8


def test_a_write_that_fails_is_told_and_tried_again_by_the_next_store() -> None:
    with world(mode="second-touch") as w:
        persist = w.session.store(prompt(1), content(w.session, prompt(1)), durable=True)
        w.tier.let_write(good=False)
        assert persist.wait(0).failed == {"full": {0: Unwritten.WRITE_FAILED}}
        assert not w.store.flush()
        again = w.session.store(prompt(1), content(w.session, prompt(1)), durable=True)
        w.tier.let_write()
        assert again.wait(0)
        assert w.store.flush()


def test_what_cannot_be_synced_is_written_again_and_then_given_up() -> None:
    with world(mode="second-touch") as w:
        w.tier.open_syncs = False
        persist = w.session.store(prompt(1), content(w.session, prompt(1)), durable=True)
        w.tier.let_write()
        w.tier.let_sync(good=False)
        assert persist.wait(0).failed == {"full": {0: Unwritten.WRITE_FAILED}}
        assert w.tier.kept == {}, "nobody may take it for durable later"
        keep(w.session, 2)
        with w.session.match(prompt(2)):
            pass
        w.tier.let_write()  # at its second use, and not synced
        persist = w.session.store(prompt(2), content(w.session, prompt(2)), durable=True)
        w.tier.let_sync(good=False)
        w.tier.let_write()
        w.tier.let_sync()
        assert persist.wait(0)


@pytest.mark.parametrize("moment", ["waits", "is written", "is synced"])
@pytest.mark.parametrize("how", ["dropped", "expired"])
def test_a_block_that_is_removed_meanwhile_is_not_durable(moment: str, how: str) -> None:
    with world(mode="second-touch", depth=1) as w:
        w.tier.open_syncs = False
        busy = [w.session.store(prompt(9, i), content(w.session, prompt(9, i)), durable=True) for i in range(2)]
        if moment != "waits":
            w.tier.let_all()
            w.tier.let_sync()
        persist = w.session.store(prompt(1), content(w.session, prompt(1)), durable=True, ttl=10)
        if moment == "is synced":
            w.tier.let_all()
        if how == "dropped":
            dropping = threading.Thread(target=w.session.drop, args=(prompt(1),))
            dropping.start()
            while w.session.find(prompt(1)) != [False]:
                pass
        else:
            w.clock.now += 20
            assert w.session.find(prompt(1)) == [False]
        while w.tier.writes or w.tier.syncs:
            w.tier.let_all()
            while w.tier.syncs:
                w.tier.let_sync()
        if how == "dropped":
            dropping.join()
        assert persist.wait(10).failed == {"full": {0: Unwritten.REMOVED}}
        assert all(one.wait(10) for one in busy)


def test_a_block_that_was_removed_and_stored_again_is_the_same_block() -> None:
    with world(mode="second-touch") as w:
        w.tier.open_syncs = False
        persist = w.session.store(prompt(1), content(w.session, prompt(1)), durable=True, ttl=10)
        w.tier.let_write()
        w.clock.now += 20
        keep(w.session, 1)
        w.tier.let_sync()
        w.tier.let_write()
        w.tier.let_sync()
        assert persist.wait(0)


def test_it_is_evicted_from_no_tier_while_it_waits() -> None:
    with world(mode="second-touch") as w:
        persist = w.session.store(prompt(1), content(w.session, prompt(1)), durable=True)
        for number in range(100, 100 + 2 * SLOTS):
            keep(w.session, number)
        assert length(w.session, 1) == 1
        w.tier.let_all()
        assert persist.wait(0)


@pytest.mark.parametrize("sealed", [True, False])
def test_a_block_that_another_is_just_writing_is_waited_for(sealed: bool) -> None:
    with world(mode="second-touch") as w:
        reservation, second = w.session.reserve(prompt(1)), w.session.reserve(prompt(1))
        persist = w.session.store(prompt(1), content(w.session, prompt(1)), durable=True)
        assert (persist.stored, persist.present, persist.pending) == (0, 0, 1)
        assert persist.wait(0).reasons == {Unwritten.TIMEOUT: 1}
        second.abort()
        if not sealed:
            reservation.abort()
            assert persist.wait(0).failed["full"][0] in (Unwritten.NOT_STORED, Unwritten.REMOVED)
            return
        reservation.views[0][:] = content(w.session, prompt(1))[0].data
        reservation.seal()
        w.tier.let_all()
        assert persist.wait(0)


def test_what_found_no_room_is_told() -> None:
    with world() as w, w.session.reserve(prompt(*range(SLOTS))):
        persist = w.session.store(prompt(100, 101), content(w.session, prompt(100, 101)), durable=True)
        assert (persist.dropped, persist.wait(0).reasons) == (2, {Unwritten.NOT_STORED: 2})


def test_a_tier_that_does_not_last_is_not_enough() -> None:
    with world(durable=False) as w:
        persist = w.session.store(prompt(1), content(w.session, prompt(1)), durable=True)
        assert persist.wait(0).reasons == {Unwritten.NOT_DURABLE: 1}


def test_it_can_be_cancelled_and_lets_go() -> None:
    with world(mode="second-touch") as w:
        persist = w.session.store(prompt(1), content(w.session, prompt(1)), durable=True)
        persist.cancel()
        assert persist.wait(0).reasons == {Unwritten.CANCELLED: 1}
        w.tier.let_all()
        assert w.store.statistics().held == 0


def test_what_was_cancelled_before_its_turn_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demotion, "_CHUNK", NBYTES)
    monkeypatch.setattr(demotion, "_ENOUGH", NBYTES)
    with world(mode="second-touch") as w:
        tokens = prompt(1, 2, 3, 4)
        persisted = w.session.store(tokens, content(w.session, tokens), durable=True)
        other = w.session.store(prompt(1, 2), content(w.session, prompt(1, 2)), durable=True)
        persisted.cancel()
        w.tier.let_all()
        assert other.wait(0), "who asked for the same blocks gets them"
        assert w.counts["blocks written to nvme"] == 2
        w.session.drop(tokens)
        keep(w.session, 5, 6, 7, 8)  # in the rows of the others
        w.tier.let_all()
        assert w.counts["blocks written to nvme"] == 2
        again = w.session.store(prompt(5, 6, 7, 8), content(w.session, prompt(5, 6, 7, 8)), durable=True)
        w.tier.let_all()
        assert again.wait(0)


def test_a_request_that_is_cancelled_while_it_is_written_leaves_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demotion, "_CHUNK", NBYTES)
    with world(mode="second-touch") as w:
        w.session.store(prompt(1), content(w.session, prompt(1)), durable=True).cancel()
        w.tier.let_all()
        other = w.session.store(prompt(2), content(w.session, prompt(2)), durable=True)
        w.tier.let_all()
        assert other.wait(0)


def test_closing_the_store_ends_it() -> None:
    tier = Gated()
    with world(tier, mode="second-touch") as w:
        tier.open_syncs = False
        persist = w.session.store(prompt(1), content(w.session, prompt(1)), durable=True)
        w.tier.let_all()
    assert persist.wait(10).reasons == {Unwritten.CLOSED: 1}
    tier.let_sync()  # nobody hears of it


def test_asyncio_waits_for_it() -> None:
    with world(mode="second-touch") as w:

        async def main() -> bool:
            persist = w.session.store(prompt(1), content(w.session, prompt(1)), durable=True)
            asyncio.get_running_loop().call_soon(w.tier.let_all)
            return bool(await persist)

        assert asyncio.run(main())


def test_many_that_wait_are_synced_together() -> None:
    with world(mode="second-touch") as w:
        w.tier.open_syncs = False
        some = [w.session.store(prompt(i), content(w.session, prompt(i)), durable=True) for i in range(6)]
        w.tier.let_all()
        w.tier.let_sync()
        w.tier.let_sync()
        assert all(persist.wait(0) for persist in some)
        assert w.tier.journal.count("sync") == 2
