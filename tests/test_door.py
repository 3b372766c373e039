"""When a door is shut nobody is inside any more, and nobody comes in."""

from __future__ import annotations

import sys
import threading

import pytest

from kvtide.door import Door
from kvtide.errors import ClosedError


def test_shutting_waits_for_who_is_inside() -> None:
    door, shut = Door("too late"), threading.Event()

    def close() -> None:
        door.shut()
        shut.set()

    with door:
        thread = threading.Thread(target=close)
        thread.start()
        while door._open:
            pass
        with pytest.raises(ClosedError, match="too late"), door:
            pytest.fail("let in")
        assert not shut.is_set()
    assert shut.wait(60)
    thread.join()
    door.shut()


def test_many_who_come_and_go_while_it_is_shut() -> None:
    """Threads change places as often as they can: whoever is let in has left when it is shut."""
    often = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(30):
            door, busy, began = Door("closed"), [0] * 4, threading.Barrier(5)

            def come_and_go(me: int, door: Door, busy: list[int], began: threading.Barrier) -> None:
                began.wait()
                try:
                    while True:
                        with door:
                            busy[me] = 1
                            busy[me] = 0
                except ClosedError:
                    pass

            threads = [threading.Thread(target=come_and_go, args=(i, door, busy, began)) for i in range(4)]
            for thread in threads:
                thread.start()
            began.wait()
            door.shut()
            assert busy == [0] * 4
            for thread in threads:
                thread.join()
            assert busy == [0] * 4
    finally:
        sys.setswitchinterval(often)
