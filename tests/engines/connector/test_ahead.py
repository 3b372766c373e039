"""Prompts are looked up before the engine asks for them: it does not wait for what is absent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.engines.connector import scheduler
from kvtide.engines.connector.request import Prompt
from kvtide.engines.connector.request_options import RequestOptions
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.node.client.client import Client
from tests.engines.connector.test_late import Unheard
from tests.engines.connector.toy import Request, Toy
from tests.node.serving import Thread


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Thread]:
    running = Thread(tmp_path / "node.sock", dram={"budget": "4MiB", "segment": "1MiB"})
    yield running
    running.close()


@pytest.fixture
def toy(node: Thread) -> Iterator[Toy]:
    running = Toy(lambda: Client(node.path))
    running.run(Request("first", [9] * 200))  # opens the sessions
    yield running
    running.close()
    assert node.store.statistics().held == 0


def settled(toy: Toy) -> None:
    """Wait until the scheduler's node thread has made all calls that it was given."""
    toy.scheduler._node_thread.ask(int, 0).result()


def prompts(node: Thread) -> int:
    """Lookups that the node has counted."""
    return node.store.statistics().planner.prompts


def test_the_engine_does_not_wait_for_an_absent_prompt(toy: Toy, node: Thread) -> None:
    toy.add(Request("new", list(range(200))))
    settled(toy)
    before, unheard = prompts(node), Unheard(toy)
    assert toy.scheduler.matched("new", 0) == 0, "the node could not answer now"
    unheard.go()
    assert prompts(node) == before
    toy.run()
    settled(toy)
    assert prompts(node) == before + 1, "the lookup is counted all the same, and once"


def test_a_prompt_that_is_present_is_found_and_counted_once(toy: Toy, node: Thread) -> None:
    toy.run(Request("new", list(range(200))))
    settled(toy)
    before, again = prompts(node), Request("again", list(range(200)))
    toy.run(again)
    settled(toy)
    assert again.cached == 192
    assert prompts(node) == before + 1


def test_absence_is_believed_only_for_a_moment(toy: Toy, node: Thread) -> None:
    waiting = Request("waiting", list(range(200)))
    toy.add(waiting)
    settled(toy)
    other = Toy(lambda: Client(node.path))
    other.run(Request("elsewhere", list(range(200))))
    other.at_rest()
    other.close()
    toy.clock.advance(scheduler._FRESH)
    toy.run()
    assert waiting.cached == 192


def test_with_tokens_in_the_engine_the_node_is_asked(toy: Toy) -> None:
    """The store may have the blocks after them without the first."""
    toy.add(Request("new", list(range(200))))
    settled(toy)
    unheard = Unheard(toy)
    assert toy.scheduler.matched("new", 64) is None
    unheard.go()
    toy.run()


def test_only_the_next_prompts_are_looked_up(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_AHEAD", 300)
    waiting = [Request(f"{i}", [i] * 200) for i in range(5)]
    for request in waiting:
        toy.add(request)

    def probed() -> list[str]:
        return [r for r, state in toy.scheduler._requests.items() if state.probe is not None]

    assert probed() == ["0", "1"]
    settled(toy)
    assert toy.scheduler.matched("0", 0) == 0
    toy.scheduler.step([])
    assert probed() == ["1", "2"]
    toy.run()


def test_a_request_that_ends_before_it_is_asked_for_holds_nothing(toy: Toy, node: Thread) -> None:
    toy.run(Request("new", list(range(200))))
    toy.scheduler.arrived(Prompt("gone", list(range(200)), list, DEFAULT_TENANT, RequestOptions()))
    toy.scheduler.finished("gone")
    settled(toy)
    assert not toy.scheduler._unasked
    assert node.store.statistics().held == 0
