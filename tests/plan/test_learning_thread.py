"""The thread that learns ends when it is told to, whatever it is doing."""

from __future__ import annotations

import threading
from typing import Any, cast

from kvtide.index.index import DRAM
from kvtide.plan.learning_thread import LearningThread
from kvtide.plan.policy import Duel
from kvtide.plan.recorded_uses import Uses
from kvtide.plan.usage_tracker import UsageTracker
from kvtide.testing.policy import Forest


class Slow:
    """Uses that take their time."""

    learns = True

    def __init__(self) -> None:
        self.due, self.begun, self.go = threading.Event(), threading.Event(), threading.Event()

    def catch_up(self) -> None:
        self.begun.set()
        assert self.go.wait(30)
        self.due.clear()


def test_closing_does_not_wait_for_all_that_was_recorded() -> None:
    forest = Forest(lambda index, room: Duel(index, DRAM, room), 100)
    processed = list[int]()
    learner = LearningThread(forest.uses)

    def watch(uses: Uses) -> None:
        processed.append(len(uses.starts))
        threading.Thread(target=learner.close, daemon=True).start()
        while not learner._closed.is_set():
            pass

    forest.policy.watch = watch  # type: ignore[method-assign]
    for number in range(1000):
        forest.store((number, 1, 2))
    forest.uses.due.set()
    learner.close()
    assert sum(processed) < 1000


def test_what_waits_to_be_learned_from_is_bounded_in_blocks() -> None:
    forest = Forest(lambda index, room: Duel(index, DRAM, room), 4000)
    path = tuple(range(4000))
    forest.store(path)
    most = 0
    for _ in range(200):
        forest.ask(path)
        most = max(most, sum(len(use.marks) for use in forest.uses._recorded))
    assert most < 300_000
    forest.uses.learn()


def test_it_ends_though_it_was_about_to_learn_when_it_was_told() -> None:
    uses = Slow()
    learner = LearningThread(cast("UsageTracker", cast(Any, uses)))
    uses.due.set()
    assert uses.begun.wait(30)
    closing = threading.Thread(target=learner.close, daemon=True)
    closing.start()
    while not learner._closed.is_set():
        pass
    uses.go.set()
    closing.join(30)
    assert not closing.is_alive()
