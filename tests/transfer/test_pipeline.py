"""Blocks on the move: joined reads, reads of what is on its way down, deadlines, failures, drops and full queues.

The colder tier answers only when the test lets it, so every moment in between can be looked at.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtide import BlockRemoved, BlockStored, Session
from kvtide.errors import TierError
from kvtide.events import Event
from kvtide.tiers.base import NOWHERE
from kvtide.transfer import promotion
from tests.plan.small import LAYOUT, MODEL, NBYTES, SLOTS, Clock, content, keep, length, open_store, prompt, right
from tests.transfer.gate import Gated, GatedStore

TOKENS = LAYOUT.block_tokens


class World:
    """A store over a gated tier, one session, and every event so far."""

    def __init__(self, tier: Gated, **options: Any) -> None:
        self.tier = tier
        self.clock = Clock()
        self.store = GatedStore(tier, clock=self.clock, **options)
        self.session = self.store.session(MODEL)
        self.events: list[Event] = []
        self.store.follow(self.events.append)

    def chill(self, *path: int) -> None:
        """Store a prompt, let it be written, and push it out of DRAM: only the colder tier has it then."""
        keep(self.session, *path)
        self.tier.let_all()
        filler = self.store.session(MODEL)
        others = prompt(*range(900_000, 900_000 + SLOTS))
        with filler.match(others) as match:
            assert match.tokens == 0
        filler.store(others, content(filler, others))
        self.tier.let_all()
        filler.drop(others)
        filler.close()
        with self.session.match(prompt(*path)) as match:
            assert match.blocks == len(path)
            assert not match.ready
        self.events.clear()

    @property
    def counts(self) -> dict[str, int]:
        return self.store.statistics().counts

    @property
    def dram_blocks(self) -> int:
        return self.store.statistics().tiers["dram"].blocks


@contextmanager
def world(tier: Gated | None = None, **options: Any) -> Iterator[World]:
    opened = World(tier or Gated(), **options)
    try:
        yield opened
    finally:
        opened.store.close()
        assert opened.store.statistics().held == 0
        assert opened.store.pipeline.blocks_doomed == 0
        assert opened.store.pipeline.blocks_pending == 0


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block is read by a job of its own."""
    monkeypatch.setattr(promotion, "_CHUNK", NBYTES)


def check(session: Session, views: list[memoryview], *path: int) -> None:
    for view, data in zip(views, content(session, prompt(*path)), strict=False):
        assert view == memoryview(data), "a wrong byte"  # type: ignore[arg-type]


# -- up -----------------------------------------------------------------------------------------------------


def test_equal_reads_in_flight_join() -> None:
    with world() as w:
        w.chill(1, 2, 3)
        other = w.store.session(MODEL)
        with w.session.match(prompt(1, 2, 3)) as mine, other.match(prompt(1, 2)) as theirs:
            loads = w.session.load(mine), other.load(theirs)
            assert len(w.tier.reads) == 1, "one read serves both"
            assert not any(load.transfer.ended for load in loads)
            w.tier.let_read()
            got = [load.wait(0) for load in loads]
            assert [g.tokens for g in got] == [3 * TOKENS, 2 * TOKENS]
            for loaded in got:
                check(w.session, loaded.blocks, 1, 2, 3)
        assert w.counts["blocks read from nvme"] == 3
        assert w.tier.journal.count("read") == 1


def test_a_load_reads_only_what_nobody_reads_yet() -> None:
    with world() as w:
        w.chill(1, 2, 3)
        with w.session.match(prompt(1)) as short, w.session.match(prompt(1, 2, 3)) as long:
            first = w.session.load(short)
            second = w.session.load(long)
            assert [len(batch) for batch, _ in w.tier.reads] == [1, 2]
            w.tier.let_all()
            assert (first.wait(0).tokens, second.wait(0).tokens) == (TOKENS, 3 * TOKENS)


def test_when_one_of_two_gives_up_the_other_still_gets_its_blocks() -> None:
    with world(depth=1) as w:
        w.chill(1)
        w.chill(2)
        with w.session.match(prompt(2)) as busy, w.session.match(prompt(1)) as a, w.session.match(prompt(1)) as b:
            w.session.load(busy)  # keeps the lane busy, so that the others wait
            mine, theirs = w.session.load(a), w.session.load(b)
            mine.cancel()
            assert mine.wait(0).tokens == 0
            w.tier.let_read()
            assert len(w.tier.reads) == 1
            w.tier.let_read()
            assert theirs.wait(0).tokens == TOKENS


def test_a_read_that_nobody_wants_any_more_is_not_made() -> None:
    with world(depth=1) as w:
        for head in (1, 2, 3):
            w.chill(head)
        before = w.dram_blocks
        busy = [w.session.match(prompt(head)) for head in (2, 3)]
        with busy[0], busy[1], w.session.match(prompt(1)) as match:
            for other in busy:
                w.session.load(other)
            load = w.session.load(match)
            load.cancel()
            w.tier.let_read()
            w.tier.let_read()
            assert w.tier.reads == []
            assert w.store.statistics().lanes["nvme"].reads_cancelled == 1
            assert load.wait(0).tokens == 0
            assert w.dram_blocks == before + 2, "its slot was given back"
            again = w.session.load(match)
            w.tier.let_read()
            assert again.wait(0).tokens == TOKENS, "it is no worse for having been cancelled"


def test_a_read_under_way_that_was_cancelled_still_warms_dram() -> None:
    with world() as w:
        w.chill(1)
        with w.session.match(prompt(1)) as match:
            load = w.session.load(match)
            load.cancel()
            w.tier.let_read()
        with w.session.match(prompt(1)) as match:
            assert match.ready


def test_a_deadline_gives_a_shorter_prefix(one_by_one: None) -> None:
    with world(depth=8) as w:
        w.chill(1, 2, 3, 4)
        with w.session.match(prompt(1, 2, 3, 4)) as match:
            load = w.session.load(match, deadline=5.0)
            w.tier.let_read()
            w.tier.let_read()
            w.clock.now += 5.0
            loaded = load.wait()
            assert loaded.tokens == 2 * TOKENS
            check(w.session, loaded.blocks, 1, 2)
            assert len(loaded.blocks) == 2


def test_blocks_that_came_out_of_order_count_only_up_to_the_gap(one_by_one: None) -> None:
    with world(depth=8) as w:
        w.chill(1, 2, 3)
        with w.session.match(prompt(1, 2, 3)) as match:
            load = w.session.load(match, deadline=5.0)
            w.tier.reads.insert(0, w.tier.reads.pop())  # the last one first
            w.tier.let_read()
            w.clock.now += 5.0
            assert load.wait().tokens == 0
            w.tier.let_all()
            assert w.session.load(match).wait(0).tokens == 3 * TOKENS


def test_the_configured_deadline_holds_where_none_is_given() -> None:
    with world(plan={"deadline_seconds": 2.0}) as w:
        w.chill(1)
        with w.session.match(prompt(1)) as match:
            load = w.session.load(match)
            w.clock.now += 2.0
            assert load.wait().tokens == 0


def test_a_failed_read_is_a_miss_forgotten_and_announced() -> None:
    with world() as w:
        w.chill(1, 2)
        keys = tuple(w.session.chain(prompt(1, 2)).keys(b"full"))
        with w.session.match(prompt(1, 2)) as match:
            load = w.session.load(match)
            w.tier.let_read(good=False)
            loaded = load.wait(0)
            assert (loaded.tokens, loaded.blocks) == (0, [])
        assert BlockRemoved("nvme", keys, "unreadable") in w.events
        assert w.counts["blocks unreadable in nvme"] == 2
        assert length(w.session, 1, 2) == 0
        assert not any(key in keys for key, _ in w.tier.kept.values()), "the bad copies were dropped"
        keep(w.session, 1, 2)
        w.tier.let_all()
        assert right(w.session, 1, 2) == 2


def test_a_load_waits_for_a_block_that_is_being_written_anew() -> None:
    with world() as w:
        w.chill(1)
        with w.session.match(prompt(1)) as match:
            load = w.session.load(match)
            w.tier.let_read(good=False)  # the copy is lost, but the match still knows the block
            assert load.wait(0).tokens == 0
            reservation = w.session.reserve(prompt(1))
            again = w.session.load(match)
            assert not again.transfer.ended, "somebody is writing it"
            reservation.views[0][:] = memoryview(content(w.session, prompt(1))[0])  # type: ignore[arg-type]
            reservation.seal()
            loaded = again.wait(0)
            assert loaded.tokens == TOKENS
            check(w.session, loaded.blocks, 1)


def test_a_load_that_waits_for_a_writer_that_gives_up_ends_as_a_miss() -> None:
    with world() as w:
        w.chill(1)
        with w.session.match(prompt(1)) as match:
            first = w.session.load(match)
            w.tier.let_read(good=False)
            assert first.wait(0).tokens == 0
            with w.session.reserve(prompt(1)):
                again = w.session.load(match)
            assert again.wait(0).tokens == 0


def test_a_load_that_finds_dram_full_of_held_blocks_is_shorter_and_does_not_hang() -> None:
    with world() as w:
        w.chill(*range(1, 5))
        others = prompt(*range(100, 100 + SLOTS - 2))
        w.session.store(others, content(w.session, others))
        w.tier.let_all()
        with w.session.match(others) as held, w.session.match(prompt(*range(1, 5))) as match:
            assert held.blocks == SLOTS - 2
            load = w.session.load(match)
            w.tier.let_all()
            loaded = load.wait(0)
            assert loaded.tokens == 2 * TOKENS
            check(w.session, loaded.blocks, 1, 2)
            assert w.counts["loads dropped: no room in DRAM"] == 2


def test_prefetch_lets_go_when_it_ends() -> None:
    with world() as w:
        w.chill(1, 2)
        transfer = w.session.prefetch(prompt(1, 2))
        assert w.store.statistics().held > 0
        w.tier.let_all()
        assert transfer.wait(0)
        assert w.store.statistics().held == 0
        with w.session.match(prompt(1, 2)) as match:
            assert match.ready


# -- down ---------------------------------------------------------------------------------------------------


def test_a_block_on_its_way_down_is_read_from_dram() -> None:
    with world() as w:
        keep(w.session, 1, 2)
        assert len(w.tier.writes) == 1, "it is being written"
        with w.session.match(prompt(1, 2)) as match:
            assert match.ready
            check(w.session, w.session.load(match).wait(0).blocks, 1, 2)
        assert w.tier.reads == []
        w.tier.let_write()
        assert BlockStored("nvme", tuple(w.session.chain(prompt(1, 2)).keys(b"full"))) in w.events


def test_a_block_on_its_way_down_is_not_evicted_from_dram() -> None:
    with world() as w:
        keep(w.session, *range(SLOTS))
        done = w.session.store(prompt(99), content(w.session, prompt(99)))
        assert (done.stored, done.dropped) == (0, 1), "all slots are being read by writes"
        w.tier.let_all()
        assert w.session.store(prompt(99), content(w.session, prompt(99))).stored == 1
        assert length(w.session, *range(SLOTS)) == SLOTS, "what left DRAM is in the colder tier"


def test_a_full_queue_drops_the_write_and_blocks_nobody() -> None:
    with world(queue=2 * NBYTES, depth=1) as w:
        done = w.session.store(prompt(*range(5)), content(w.session, prompt(*range(5))))
        assert done.stored == 5, "DRAM has them all the same"
        assert w.counts["stores dropped: the queue of nvme is full"] == 3
        w.tier.let_all()
        assert len(w.tier.kept) == 2
        assert right(w.session, *range(5)) == 5


def test_a_write_that_fails_leaves_the_block_in_dram() -> None:
    with world() as w:
        keep(w.session, 1)
        w.tier.let_write(good=False)
        assert w.tier.kept == {}
        assert "blocks written to nvme" not in w.counts
        assert right(w.session, 1) == 1


def test_a_tier_that_answers_at_once_works_from_within_every_verb() -> None:
    with world(Gated(inline=True), depth=1) as w:
        for first in range(0, 40, 4):
            keep(w.session, *range(first, first + 4))
        for first in range(0, 40, 4):
            assert right(w.session, *range(first, first + 4)) == 4
        assert w.session.drop(prompt(*range(4))) == 4
        assert length(w.session, *range(4)) == 0


def test_second_touch_writes_what_is_asked_for_again() -> None:
    with world(mode="second-touch") as w:
        keep(w.session, 1)
        keep(w.session, 2)
        assert w.tier.writes == []
        assert length(w.session, 1) == 1
        w.tier.let_all()
        assert {k for k, _ in w.tier.kept.values()} == set(w.session.chain(prompt(1)).keys(b"full"))
        assert length(w.session, 1) == 1
        assert w.tier.writes == [], "once is enough"


# -- eviction mode ------------------------------------------------------------------------------------------


def test_in_eviction_mode_nothing_leaves_dram_before_it_is_saved() -> None:
    with world(mode="eviction") as w:
        for number in range(SLOTS // 2 - 1):
            keep(w.session, number)
        assert w.tier.writes == [], "there is room enough"
        for number in range(SLOTS // 2 - 1, 2 * SLOTS):
            keep(w.session, number)
            w.tier.let_all()
        gone = [n for n in range(2 * SLOTS) if length(w.session, n) == 0]
        assert gone == []
        for number in range(2 * SLOTS):
            with w.session.match(prompt(number)) as match:
                load = w.session.load(match)
                w.tier.let_all()
                check(w.session, load.wait(0).blocks, number)


def test_in_eviction_mode_a_slow_tier_drops_stores_and_loses_nothing() -> None:
    with world(mode="eviction") as w:
        stored = [n for n in range(2 * SLOTS) if w.session.store(prompt(n), content(w.session, prompt(n))).stored]
        assert len(stored) == SLOTS, "nothing was saved, so nothing could leave"
        w.tier.let_all()
        assert w.session.store(prompt(99), content(w.session, prompt(99))).stored == 1
        assert all(length(w.session, n) == 1 for n in stored)


def test_in_eviction_mode_a_block_that_was_dropped_while_held_is_not_saved() -> None:
    with world(mode="eviction") as w:
        keep(w.session, 1)
        with w.session.match(prompt(1)):
            assert w.session.drop(prompt(1)) == 1
            for number in range(100, 100 + SLOTS - 1):
                keep(w.session, number)
            w.tier.let_all()
            dropped = w.session.chain(prompt(1)).keys(b"full")[0]
            assert dropped not in {key for key, _ in w.tier.kept.values()}
            assert w.tier.kept


def test_in_eviction_mode_a_chain_longer_than_dram_is_saved_as_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own blocks are held while it is stored, and yet they are written down to make room for its end."""
    with world(Gated(inline=True), mode="eviction") as w:
        monkeypatch.setattr(w.session.backend, "first_part", 1)
        path = range(2 * SLOTS)
        assert w.session.store(prompt(*path), content(w.session, prompt(*path))).stored == 2 * SLOTS
        with w.session.match(prompt(*path), have=SLOTS * TOKENS) as match:
            assert match.blocks == 2 * SLOTS
        assert right(w.session, *path) == SLOTS, "as much as DRAM can hold at once"


def test_in_eviction_mode_the_close_saves_everything_pinned_or_not_through_a_short_queue(tmp_path: Path) -> None:
    nvme = {"store": "eviction", "queue": 1}
    path = range(10)
    with open_store(tmp_path / "kv", nvme=nvme) as store, store.session(MODEL) as mine:
        keep(mine, *path)
        keep(mine, 100, 101)
        mine.pin(prompt(*path))
        # A match that is never given back, too: the session is closed with the store.
        mine.match(prompt(100, 101))
    with open_store(tmp_path / "kv", nvme=nvme) as store, store.session(MODEL) as mine:
        assert right(mine, *path) == 10
        assert right(mine, 100, 101) == 2


def test_the_close_saves_what_a_full_queue_could_not_take_at_first() -> None:
    tier = Gated()
    w = World(tier, mode="eviction", queue=1, depth=1)
    keep(w.session, *range(SLOTS // 2))  # half full: one write is under way, and the queue is full
    assert len(tier.writes) == 1
    closing = threading.Thread(target=w.store.pipeline.flush)
    closing.start()
    while closing.is_alive():
        if tier.writes:
            tier.let_write()
    closing.join()
    tier.let_all()
    assert len(tier.kept) == SLOTS // 2
    w.store.close()


# -- out ----------------------------------------------------------------------------------------------------


def test_a_block_that_is_dropped_while_it_is_held_goes_when_it_is_let_go() -> None:
    with world() as w:
        keep(w.session, 1, 2)
        w.tier.let_all()
        with w.session.match(prompt(1, 2)) as match:
            views = w.session.load(match).wait(0).blocks
            assert w.session.drop(prompt(1, 2)) == 2
            assert w.tier.kept == {}
            assert length(w.session, 1, 2) == 0, "nobody finds it any more"
            check(w.session, views, 1, 2)
            assert (w.dram_blocks, w.store.pipeline.blocks_doomed) == (2, 2)
            keep(w.session, 1)  # the same block anew, beside the old one
            assert w.dram_blocks == 3
        assert (w.dram_blocks, w.store.pipeline.blocks_doomed) == (1, 0)
        assert right(w.session, 1) == 1


def test_a_drop_during_a_read_ends_the_load_as_a_miss() -> None:
    with world() as w:
        w.chill(1)
        before = w.dram_blocks
        with w.session.match(prompt(1)) as match:
            load = w.session.load(match)
            assert w.session.drop(prompt(1)) == 1
            w.tier.let_read()  # finds nothing there
            assert load.wait(0).tokens == 0
        assert w.dram_blocks == before
        assert not [e for e in w.events if isinstance(e, BlockRemoved) and e.reason == "unreadable"]


def test_a_drop_returns_only_when_a_write_under_way_is_undone() -> None:
    with world() as w:
        keep(w.session, 1)
        assert len(w.tier.writes) == 1
        dropping = threading.Thread(target=w.session.drop, args=(prompt(1),))
        dropping.start()
        while length(w.session, 1):
            pass
        dropping.join(0.05)
        assert dropping.is_alive(), "after a power loss now, the block could come back"
        w.tier.let_write()
        dropping.join(30)
        assert not dropping.is_alive()
        assert w.tier.kept == {}


def test_a_drop_that_the_medium_refuses_is_an_error_but_a_miss_all_the_same() -> None:
    with world(Gated(open_drops=False)) as w:
        keep(w.session, 1)
        w.tier.let_all()
        failed: list[TierError] = []

        def drop() -> None:
            with pytest.raises(TierError, match="could not be erased from disk") as caught:
                w.session.drop(prompt(1))
            failed.append(caught.value)

        dropping = threading.Thread(target=drop)
        dropping.start()
        while not w.tier.drops:
            pass
        w.tier.let_drop(good=False)
        dropping.join(30)
        assert failed
        assert length(w.session, 1) == 0


def test_a_drop_that_takes_too_long_says_that_it_goes_on() -> None:
    with world(Gated(open_drops=False)) as w:
        keep(w.session, 1)
        w.tier.let_all()
        with pytest.raises(TierError, match=r"longer than 0\.01 s; it goes on in the background"):
            w.session.drop(prompt(1), timeout=0.01)
        w.tier.let_drop()


def test_a_drop_of_blocks_that_nobody_has_still_reaches_the_tier() -> None:
    """A tier may have traces of what was evicted: they must not come back either."""
    with world() as w:
        assert w.session.drop(prompt(1, 2)) == 0
        assert w.tier.journal == ["drop"]


def test_a_reservation_whose_block_was_dropped_is_sealed_into_nothing() -> None:
    with world() as w:
        with w.session.reserve(prompt(1)) as reservation:
            assert w.session.drop(prompt(1)) == 1
            reservation.seal()
        assert (length(w.session, 1), w.dram_blocks) == (0, 0)
        assert [e for e in w.events if isinstance(e, BlockStored)] == []


def test_a_block_that_expires_on_its_way_down_does_not_stay_there() -> None:
    with world() as w:
        keep(w.session, 1, ttl=10)
        w.clock.now += 11
        assert length(w.session, 1) == 0
        w.tier.let_all()
        assert w.tier.kept == {}
        assert w.dram_blocks == 0


def test_places_that_were_evicted_are_not_given_to_reads(tmp_path: Path) -> None:
    """What expired in a colder tier gives its slot back at once."""
    with world() as w:
        keep(w.session, 1, ttl=10)
        w.tier.let_all()
        w.clock.now += 11
        assert length(w.session, 1) == 0
        assert w.tier.kept == {}
        assert w.store.index.place[1][1] == NOWHERE


def test_sessions_that_come_and_go_leave_nothing(tmp_path: Path) -> None:
    """What is remembered of a model is remembered once."""
    with open_store(tmp_path / "kv") as store:
        for number in range(10):
            with store.session(MODEL) as session:
                keep(session, number)
        assert len(store.pipeline._residents._identities) == 1
