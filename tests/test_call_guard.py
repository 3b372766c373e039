"""When a door is shut nobody is inside any more, and nobody comes in."""

from __future__ import annotations

import sys
import threading

import pytest

from kvtide.call_guard import CallGuard
from kvtide.errors import ClosedError


def test_shutting_waits_for_who_is_inside() -> None:
    guard, shut = CallGuard("too late"), threading.Event()

    def close() -> None:
        guard.shut()
        shut.set()

    with guard:
        thread = threading.Thread(target=close)
        thread.start()
        while guard._open:
            pass
        with pytest.raises(ClosedError, match="too late"), guard:
            pytest.fail("let in")
        assert not shut.is_set()
    assert shut.wait(60)
    thread.join()
    guard.shut()


def test_many_who_come_and_go_while_it_is_shut() -> None:
    """Threads change places as often as they can: every call that was admitted has left when the guard is shut."""
    often = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(30):
            guard, busy, began = CallGuard("closed"), [0] * 4, threading.Barrier(5)

            def come_and_go(me: int, guard: CallGuard, busy: list[int], began: threading.Barrier) -> None:
                began.wait()
                try:
                    while True:
                        with guard:
                            busy[me] = 1
                            busy[me] = 0
                except ClosedError:
                    pass

            threads = [threading.Thread(target=come_and_go, args=(i, guard, busy, began)) for i in range(4)]
            for thread in threads:
                thread.start()
            began.wait()
            guard.shut()
            assert busy == [0] * 4
            for thread in threads:
                thread.join()
            assert busy == [0] * 4
    finally:
        sys.setswitchinterval(often)
