"""The thread that learns ends when it is told to, whatever it is doing."""

from __future__ import annotations

import threading
from typing import Any, cast

from kvtide.plan.learning_thread import LearningThread
from kvtide.plan.usage_tracker import UsageTracker


class Slow:
    """Uses that take their time."""

    learns = True

    def __init__(self) -> None:
        self.due, self.begun, self.go = threading.Event(), threading.Event(), threading.Event()

    def catch_up(self) -> None:
        self.begun.set()
        assert self.go.wait(30)
        self.due.clear()


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
