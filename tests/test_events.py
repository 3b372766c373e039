"""Events reach all followers, in order, and a follower's failure does not affect the store."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from kvtide import BlockRemoved, BlockStored, Store
from kvtide.block import BlockKey
from kvtide.events import Backlog, Event, EventsLost, Feed
from tests.plan.small import MODEL, SLOTS, Clock, keep, length, open_store, prompt, right

ONE = BlockStored("dram", (BlockKey(b"one"),))
TWO = BlockRemoved("dram", (BlockKey(b"one"),), "dropped")


def test_everybody_who_follows_gets_every_event_in_order() -> None:
    feed = Feed()
    mine: list[Event] = []
    theirs: list[Event] = []
    feed.publish([ONE])
    followed = [feed.followed]
    feed.follow(mine.append)
    feed.follow(theirs.append)
    followed.append(feed.followed)
    assert followed == [False, True]
    feed.publish([ONE, TWO])
    assert mine == theirs == [ONE, TWO]


def test_who_follows_twice_stops_once_at_a_time() -> None:
    feed = Feed()
    seen: list[Event] = []
    follower = seen.append
    stop, stop_again = feed.follow(follower), feed.follow(follower)
    stop()
    stop()
    feed.publish([ONE])
    assert seen == [ONE]
    stop_again()
    feed.publish([ONE])
    assert seen == [ONE]
    assert not feed.followed


def test_a_follower_that_fails_is_logged_and_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    feed = Feed()
    seen: list[Event] = []

    def bad(event: Event) -> None:
        raise ZeroDivisionError

    feed.follow(bad)
    feed.follow(seen.append)
    with caplog.at_level(logging.ERROR):
        feed.publish([ONE])
    assert seen == [ONE]
    assert "a follower of events failed" in caplog.text


def test_a_follower_may_use_the_store() -> None:
    """It is called in no lock, so it may ask the store, from another thread even, and wait for the answer."""
    clock = Clock()
    with open_store(clock=clock) as store, store.session(MODEL) as mine:
        answers: list[int] = []

        def follower(event: Event) -> None:
            thread = threading.Thread(target=lambda: answers.append(length(mine, 1)))
            thread.start()
            thread.join(30)
            assert not thread.is_alive()

        stop = store.follow(follower)
        keep(mine, 1)  # stored
        keep(mine, 2, ttl=1)  # stored
        clock.now += 2
        assert length(mine, 2) == 0  # expired
        for number in range(100, 100 + SLOTS):
            keep(mine, number)  # stored, and at the end evicted
        assert mine.drop(prompt(100 + SLOTS - 1)) == 1
        stop()
    assert len(answers) == 2 + 1 + SLOTS + 1 + 1


class Ledger:
    """What followers believe, from events alone."""

    def __init__(self, store: Store) -> None:
        self.where: dict[str, set[BlockKey]] = {"dram": set(), "nvme": set()}
        self.wrong: list[Event] = []
        self._lock = threading.Lock()
        store.follow(self._on)

    def _on(self, event: Event) -> None:
        assert not isinstance(event, EventsLost)
        with self._lock:
            known = self.where[event.tier]
            if isinstance(event, BlockStored):
                self.wrong += [event] if known & set(event.keys) else []
                known.update(event.keys)
            else:
                self.wrong += [event] if not known.issuperset(event.keys) else []
                known.difference_update(event.keys)


def test_events_alone_tell_what_is_where(tmp_path: Path) -> None:
    clock = Clock()
    with open_store(tmp_path / "kv", clock=clock) as store, store.session(MODEL) as mine:
        ledger = Ledger(store)
        for number in range(3 * SLOTS):
            keep(mine, number % 7, number, ttl=5 if number % 5 == 0 else None)
            if number % 3 == 0:
                right(mine, number % 7, number)
            if number % 4 == 0:
                mine.drop(prompt(number % 7, number), start=1)
            clock.now += 0.5
        assert store.flush(30)
        length(mine, 1)  # what has expired goes
        statistics = store.statistics()
        assert not ledger.wrong
        assert {tier: len(keys) for tier, keys in ledger.where.items()} == {
            tier: statistics.tiers[tier].blocks for tier in ("dram", "nvme")
        }


def numbered(*numbers: int) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(b"%d" % n) for n in numbers)


def test_what_waits_is_joined_in_order_and_what_has_no_room_is_counted() -> None:
    backlog = Backlog(most=5)
    woken = [backlog.put(BlockStored("dram", numbered(n))) for n in (1, 2)]
    woken.append(backlog.put(BlockRemoved("dram", numbered(1), "evicted")))
    woken.append(backlog.put(BlockRemoved("dram", numbered(2), "dropped")))
    assert woken == [True, False, False, False], "one call empties it"
    for n in (3, 4, 5):
        backlog.put(BlockStored("nvme", numbered(n)))
    found = [backlog.take() for _ in range(5)]
    assert found == [
        BlockStored("dram", numbered(1, 2)),
        BlockRemoved("dram", numbered(1), "evicted"),
        BlockRemoved("dram", numbered(2), "dropped"),
        BlockStored("nvme", numbered(3)),
        EventsLost(2),
    ]
    assert backlog.put(BlockStored("nvme", numbered(6))), "there is room again"
    assert (backlog.take(), backlog.take()) == (BlockStored("nvme", numbered(6)), None)
