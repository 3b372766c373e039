"""Calls on a thread of their own: in order, whatever one of them raises, and without keeping the process alive."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import weakref

import pytest

from kvtide.serial_executor import SerialExecutor


def test_calls_run_in_order_on_one_thread_and_close_finishes_them() -> None:
    seen: list[tuple[int, str]] = []
    executor = SerialExecutor("in-order")
    for i in range(100):
        executor.put(lambda i=i: seen.append((i, threading.current_thread().name)))  # type: ignore[misc]
    executor.close(30)
    assert seen == [(i, "in-order") for i in range(100)]


def fail() -> None:
    raise KeyError("missing")


def test_a_call_that_fails_is_logged_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    executor, ran = SerialExecutor("fails"), threading.Event()
    with caplog.at_level(logging.ERROR, "kvtide.calls"):
        executor.put(fail)
        executor.put(ran.set)
        executor.close(30)
    assert ran.is_set()
    assert "KeyError" in caplog.text


def test_nothing_runs_after_close() -> None:
    executor, ran = SerialExecutor("closed"), threading.Event()
    executor.close(30)
    executor.put(ran.set)
    executor.close(30)
    assert not ran.is_set()


def test_a_call_may_close_it() -> None:
    executor, closed = SerialExecutor("closes-itself"), threading.Event()

    def close() -> None:
        executor.close(3600)
        closed.set()

    executor.put(close)
    assert closed.wait(30)


class Kept:
    def run(self) -> None:
        pass


def test_what_a_call_held_is_released_when_it_ends() -> None:
    executor, kept, gone = SerialExecutor("releases"), Kept(), threading.Event()
    weakref.finalize(kept, gone.set)
    executor.put(kept.run)
    del kept
    assert gone.wait(30), "though no other call follows"
    executor.close(30)


def test_the_process_does_not_wait_for_a_call_that_hangs_and_exits_in_order() -> None:
    script = """
import threading
from kvtide.serial_executor import SerialExecutor
begun = threading.Event()
executor = SerialExecutor("hangs")
executor.put(lambda: (begun.set(), threading.Event().wait()))
begun.wait()
executor.close(0.01)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_in_a_forked_child_close_returns_at_once_and_nothing_runs() -> None:
    script = """
import os, threading
from kvtide.serial_executor import SerialExecutor
executor = SerialExecutor("forks")
if not (child := os.fork()):
    executor.put(lambda: os._exit(3))
    executor.close(3600)
    os._exit(7)
ran = threading.Event()
executor.put(ran.set)
executor.close(30)
assert ran.is_set()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
