"""A node that does not answer is left alone, ever longer, and is asked again after a greeting."""

from __future__ import annotations

import errno
import logging

import pytest

from kvtide.testing.clock import FakeClock
from kvtide.tiers.peers.availability import Availability, OwnAddress

HUNG = OSError(errno.ETIMEDOUT, "the node does not answer")


def pauses(node: Availability, clock: FakeClock, count: int) -> list[int]:
    """Seconds until each of the next greetings, which fail."""
    found = []
    for _ in range(count):
        passed = 0
        while not node.try_again():
            clock.advance(1)
            passed += 1
        found.append(passed)
        node.failed(HUNG, trial=True)
    return found


def test_pauses_grow_to_a_minute() -> None:
    clock = FakeClock()
    node = Availability("there", clock)
    assert not node.try_again(), "a node that is asked need not be greeted"
    node.failed(HUNG)
    assert node.away
    assert pauses(node, clock, 9) == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_one_caller_greets() -> None:
    clock = FakeClock()
    node = Availability("there", clock)
    node.failed(HUNG)
    clock.advance(1)
    assert node.try_again()
    assert not node.try_again()
    assert repr(node).endswith("away>"), "until it has answered"
    node.greeted()
    assert not node.away


def test_requests_that_fail_together_count_once() -> None:
    clock = FakeClock()
    node = Availability("there", clock)
    for _ in range(10):
        node.failed(HUNG)
    assert pauses(node, clock, 2) == [1, 2]


def test_a_node_that_greets_and_answers_nothing_is_asked_ever_less() -> None:
    clock = FakeClock()
    node = Availability("there", clock)
    for pause in (1, 2, 4, 8):
        node.failed(HUNG)
        clock.advance(pause - 0.5)
        assert not node.try_again()
        clock.advance(0.5)
        assert node.try_again()
        node.greeted()
    node.answered()
    node.failed(HUNG)
    assert pauses(node, clock, 1) == [1]


def test_an_own_address_is_greeted_each_minute() -> None:
    """It may have been given to another node."""
    clock = FakeClock()
    node = Availability("there", clock)
    node.failed(OwnAddress(errno.ELOOP, "own"))
    clock.advance(59)
    assert not node.try_again()
    clock.advance(1)
    assert node.try_again()
    node.greeted()
    assert not node.away


def test_each_outage_is_logged_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvtide.peers")
    clock = FakeClock()
    node = Availability("there", clock)
    for _ in range(2):
        node.failed(HUNG)
        pauses(node, clock, 3)
        clock.advance(60)
        assert node.try_again()
        node.greeted()
        node.answered()
        node.answered()
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "INFO"] * 2, "once each, however often the node is greeted"
