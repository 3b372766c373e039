"""The order in which the node thread runs its calls."""

from __future__ import annotations

import threading

import pytest

from kvtide.engines.connector import node_thread
from kvtide.engines.connector.node_thread import NodeThread


def test_other_calls_go_between_calls_in_turn() -> None:
    thread, gate, ran = NodeThread("test"), threading.Event(), list[str]()
    thread.ask(gate.wait, False)
    last = [thread.ask_in_turn(lambda name=name: ran.append(name), None) for name in "abc"][-1]  # type: ignore[misc]
    thread.ask(lambda: ran.append("store"), None)
    gate.set()
    last.result()
    assert ran == ["a", "store", "b", "c"]
    thread.ask_in_turn(lambda: ran.append("d"), None).result()
    assert ran[4:] == ["d"]
    thread.close()


def test_a_call_in_turn_that_fails_does_not_stop_those_after_it() -> None:
    thread, gate = NodeThread("test"), threading.Event()
    thread.ask(gate.wait, False)
    failed = thread.ask_in_turn(lambda: 1 // 0, -1)
    exits = thread.ask_in_turn(_exit, None)
    after = thread.ask_in_turn(lambda: 5, 0)
    gate.set()
    assert (failed.result(), exits.result(), after.result()) == (-1, None, 5)
    thread.close()


def test_a_late_call_in_turn_does_not_keep_the_engine_from_waiting_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    thread, gate = NodeThread("test"), threading.Event()
    monkeypatch.setattr(node_thread, "_MOMENT", 0.01)
    late = thread.ask_in_turn(gate.wait, False)
    assert not thread.soon(late, in_turn=True)
    thread.step()
    assert not thread.soon(thread.ask_in_turn(int, 0), in_turn=True)
    assert not thread._waited, "it runs after the late one"
    monkeypatch.setattr(node_thread, "_MOMENT", 60.0)
    store = thread.ask(int, 0)
    gate.set()
    assert thread.soon(store)
    thread.close()


def _exit() -> None:
    raise SystemExit
