"""A node that answers late costs a store only when the pages are not there any more."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.node.client import Client
from tests.engines.halves.toy import Request, Toy
from tests.node.serving import Thread


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Thread]:
    running = Thread(tmp_path / "node.sock", dram={"budget": "4MiB", "segment": "1MiB"})
    yield running
    running.close()


@pytest.fixture
def toy(node: Thread) -> Iterator[Toy]:
    running = Toy(lambda: Client(node.path))
    running.run(Request("first", [9] * 200))  # from now on the halves know each other
    yield running
    running.close()
    assert node.store.statistics().held == 0


class Held:
    """The thread with which a worker talks to its node does nothing until ``go``."""

    def __init__(self, toy: Toy) -> None:
        (worker,) = toy.workers
        worker.take()
        self._errands, self._gate = worker._errands, threading.Event()
        self._errands._late = self._errands.ask(self._gate.wait, False)  # so nobody waits for it

    def go(self) -> None:
        """Wait until it has done all that it was given."""
        self._gate.set()
        self._errands.ask(int, 0).result()


def begun(toy: Toy, tokens: int) -> Request:
    """A request, after the step in which the first of its blocks is whole."""
    request = Request("late", list(range(tokens)))
    toy.add(request)
    while request.computed < toy.chunk:
        toy.step()
    return request


def test_a_late_answer_is_used_while_the_pages_are_there(toy: Toy) -> None:
    held = Held(toy)
    request = begun(toy, 250)
    assert toy.workers[0].take().missed == 0
    held.go()
    toy.run()
    held.go()  # what it stored is told to the node
    assert toy.workers[0].take().missed == 0
    again = Request("again", request.tokens)
    toy.run(again)
    assert again.cached == 192


def test_pages_that_were_taken_away_are_not_stored(toy: Toy) -> None:
    held = Held(toy)
    request = begun(toy, 250)
    toy.preempt(request)
    toy.step()
    assert toy.workers[0].take().missed == 1
    held.go()
    toy.run()  # which compares every byte
    toy.run(Request("again", request.tokens))
