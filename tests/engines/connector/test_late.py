"""A node that answers late costs a store only when the pages are not there any more."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvtide.engines.connector.request_options import RequestOptions
from kvtide.engines.paged import Copy, HostMover, Move, Pages
from kvtide.errors import KvtideError
from kvtide.index.keys import Model
from kvtide.node.client.client import Client
from kvtide.testing.interface import until
from tests.engines.connector.toy import LAYOUT, Request, Toy
from tests.node.serving import Thread


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Thread]:
    running = Thread(tmp_path / "node.sock", dram={"budget": "4MiB", "segment": "1MiB"})
    yield running
    running.close()


@pytest.fixture
def toy(node: Thread) -> Iterator[Toy]:
    running = Toy(lambda: Client(node.path))
    running.run(Request("first", [9] * 200))  # from now on scheduler and workers know each other
    yield running
    running.close()
    assert node.store.statistics().held == 0


class Held:
    """The thread with which a worker talks to its node does nothing until ``go``."""

    def __init__(self, toy: Toy) -> None:
        (worker,) = toy.workers
        worker.take()
        self._node_thread, self._gate = worker._node_thread, threading.Event()
        self._node_thread._late = self._node_thread.ask(self._gate.wait, False)  # so nobody waits for it

    def go(self) -> None:
        """Wait until it has done all that it was given."""
        self._gate.set()
        self._node_thread.ask(int, 0).result()


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


# -- requests that are over before there is room for their blocks ------------------------------------------------


class Unheard:
    """The thread with which the scheduler talks to its node does nothing until ``go``."""

    def __init__(self, toy: Toy) -> None:
        self._node_thread, self._gate = toy.scheduler._node_thread, threading.Event()
        self._node_thread._late = self._node_thread.ask(self._gate.wait, False)

    def go(self) -> None:
        self._gate.set()
        self._node_thread.ask(int, 0).result()


@pytest.fixture
def keeping(node: Thread) -> Iterator[Toy]:
    """An engine that keeps up to 16 pages for us."""
    running = Toy(lambda: Client(node.path), keep=16)
    running.run(Request("first", [9] * 200))
    assert not running.kept, "the node answered in time"
    yield running
    running.close()
    assert node.store.statistics().held == 0


def over(toy: Toy, tokens: int) -> Request:
    """A request whose node did not answer before it was over."""
    request = Request("over", list(range(tokens)), options=RequestOptions(no_load=True))
    toy.run(request)
    return request


def lost(node: Thread) -> dict[str, int]:
    return {why: n for why, n in node.store.statistics().counts.items() if why.startswith("stores dropped")}


def test_a_request_that_is_over_keeps_its_pages_until_there_is_room(keeping: Toy, node: Thread) -> None:
    free, unheard = keeping.free, Unheard(keeping)
    request = over(keeping, 200)
    assert list(keeping.kept) == ["over"]
    assert keeping.free == free - 13
    keeping.run(Request("meanwhile", [5] * 30))
    assert "over" in keeping.kept, "whose pages others did not get"
    unheard.go()
    while keeping.kept:
        keeping.step()
        unheard.go()
    assert keeping.free == free
    again = Request("again", request.tokens)
    keeping.run(again)  # which compares every byte
    assert again.cached == 192
    assert not lost(node)


def test_pages_are_kept_for_a_second(keeping: Toy, node: Thread) -> None:
    free, unheard = keeping.free, Unheard(keeping)
    request = over(keeping, 200)
    keeping.clock.advance(0.9)
    keeping.step()
    assert keeping.kept
    keeping.clock.advance(0.2)
    keeping.step()
    assert not keeping.kept
    assert keeping.free == free
    unheard.go()
    again = Request("again", request.tokens)
    keeping.run(again)
    assert again.cached == 0
    assert lost(node) == {"stores dropped: the node answered an engine too late": 3}


def test_no_more_pages_are_kept_than_a_twentieth(keeping: Toy, node: Thread) -> None:
    free, unheard = keeping.free, Unheard(keeping)
    over(keeping, 300)
    assert not keeping.kept
    assert keeping.free == free
    unheard.go()
    assert lost(node) == {"stores dropped: too many pages of an engine waited": 4}


def test_blocks_wait_for_memory_that_the_node_is_taking(
    keeping: Toy, node: Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node answers at once, and is asked again for what it had no memory for."""
    with monkeypatch.context() as scarce:
        scarce.setattr(node.store.dram, "take_many", lambda *_: [])
        scarce.setattr(node.store.dram, "growable", lambda *_: True)
        scarce.setattr(node.store.dram, "grow", lambda *_, wait: None)
        request = over(keeping, 200)
        assert keeping.kept
        keeping.step()
        keeping.step()
        assert keeping.kept
    while keeping.kept:
        keeping.step()
    again = Request("again", request.tokens)
    keeping.run(again)
    assert again.cached == 192
    assert not lost(node)


def test_memory_that_comes_too_late_is_counted(keeping: Toy, node: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.store.dram, "take_many", lambda *_: [])
    monkeypatch.setattr(node.store.dram, "growable", lambda *_: True)
    monkeypatch.setattr(node.store.dram, "grow", lambda *_, wait: None)
    over(keeping, 200)
    keeping.clock.advance(1.1)
    keeping.step()
    assert not keeping.kept
    Unheard(keeping).go()
    assert lost(node) == {"stores dropped: memory was not taken in time": 3}


# -- an engine that has nothing to do ------------------------------------------------------------------------------


class _Slow(Move):
    """A copy that ends when it may."""

    at_once = False

    def __init__(self) -> None:
        self.may = threading.Event()

    def done(self) -> bool:
        return self.may.is_set()

    def wait(self) -> None:
        self.may.wait()


def test_blocks_can_be_read_as_soon_as_they_are_copied_though_no_step_follows(
    toy: Toy, node: Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves: list[_Slow] = []

    def store(pages: Pages, copies: Sequence[Copy]) -> Move:
        HostMover.store(toy.workers[0]._mover, pages, copies)  # type: ignore[arg-type]
        moves.append(_Slow())
        return moves[-1]

    monkeypatch.setattr(toy.workers[0]._mover, "store", store)
    tokens = list(range(100))
    toy.run(Request("last", tokens))
    with Client(node.path) as client, client.session(Model(LAYOUT, "given:toy")) as session:
        assert session.match(tokens).tokens == 0
        for move in moves:
            move.may.set()
        until(lambda: session.match(tokens).tokens == 64)
    toy.step()
    assert toy.workers[0].take().missed == 0


class _Failed(_Slow):
    """A copy that has failed."""

    def done(self) -> bool:
        raise KvtideError("this copy failed")

    def wait(self) -> None:
        super().wait()
        self.done()


def test_an_engine_that_exits_after_a_failed_copy_closes_its_worker(
    toy: Toy, node: Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this its threads would be in torch when the interpreter ends."""
    moves: list[_Failed] = []

    def store(pages: Pages, copies: Sequence[Copy]) -> Move:
        moves.append(_Failed())
        return moves[-1]

    monkeypatch.setattr(toy.workers[0]._mover, "store", store)
    toy.run(Request("last", list(range(100))))
    for move in moves:
        move.may.set()  # no step follows, so nobody hears of it
    closed: list[bool] = []
    monkeypatch.setattr(toy.workers[0]._mover, "close", lambda: closed.append(True))
    toy.workers[0].end()
    assert closed == [True]


def test_blocks_of_several_requests_are_copied_together(
    toy: Toy, node: Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread, and on a GPU the thread that launches copies, have work for each move."""
    moves: list[int] = []

    def store(pages: Pages, copies: Sequence[Copy]) -> Move:
        moves.append(len(copies))
        return HostMover.store(toy.workers[0]._mover, pages, copies)  # type: ignore[arg-type]

    monkeypatch.setattr(toy.workers[0]._mover, "store", store)
    requests = [Request(f"request {i}", list(range(1000 * i, 1000 * i + 70))) for i in range(4)]
    for request in requests:
        toy.add(request)
    while toy.requests:
        toy.step()
    assert len(moves) < len(requests) == sum(moves)
    with Client(node.path) as client, client.session(Model(LAYOUT, "given:toy")) as session:
        until(lambda: [session.match(request.tokens).tokens for request in requests] == [64] * 4)


def test_pages_that_another_connector_kept_are_not_ours(keeping: Toy, node: Thread) -> None:
    """vLLM tells all connectors of a request that any of them has sent."""
    request = Request("running", list(range(300)))
    keeping.add(request)
    keeping.step()
    keeping.scheduler.sent(["running", "nobody"])
    keeping.run()
    again = Request("again", request.tokens)
    keeping.run(again)
    assert again.cached == 256
    assert not lost(node)
