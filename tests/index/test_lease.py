"""The two rights: given back once, by the first thread that does so, and unusable afterwards."""

from __future__ import annotations

import sys
from collections import deque

import numpy as np
import pytest

from kvtide.errors import RightError
from kvtide.index.index import Rows
from kvtide.index.lease import Lease, Reservation, Watch
from kvtide.testing import blocks

ROWS: Rows = np.array([3, 4])


def reservation(ended: list[bool]) -> Reservation:
    return Reservation(
        blocks.keys(2),
        ROWS,
        [blocks.aligned(4096), blocks.aligned(4096)],
        [0, 1],
        [7, 7],
        lambda r, sealed: ended.append(sealed),
    )


def never(number: int) -> None:
    raise AssertionError


def test_a_lease_is_given_back_once() -> None:
    released: list[int] = []
    with Lease(released.append, 7, ROWS) as lease:
        assert repr(lease) == "<Lease 2 blocks>"
        lease.release()
        assert released == [7]
    lease.release()
    assert released == [7]
    assert repr(lease) == "<Lease 0 blocks>"


def test_a_lease_on_nothing_tells_nobody() -> None:
    released: list[int] = []
    with Lease(released.append, 0, ROWS[:0]):
        pass
    assert released == []


def test_a_release_that_is_interrupted_can_be_repeated() -> None:
    released: list[int] = []

    def release(number: int) -> None:
        released.append(number)
        if len(released) == 1:
            raise KeyboardInterrupt

    lease = Lease(release, 7, ROWS)
    with pytest.raises(KeyboardInterrupt):
        lease.release()
    lease.release()
    lease.release()
    assert released == [7, 7]


def test_a_right_that_is_forgotten_is_abandoned() -> None:
    abandoned: deque[Watch] = deque()
    lease, reservation = Lease(never, 7, ROWS), Reservation([], ROWS, [], [], [], lambda r, sealed: None, 5)
    watches = [Watch.over(lease, 7, abandoned), Watch.over(reservation, 5, abandoned)]
    assert not abandoned
    del lease, reservation
    assert [watch.number for watch in abandoned] == [7, 5]
    assert list(abandoned) == watches


def test_the_end_of_a_reservation_that_is_interrupted_can_be_repeated() -> None:
    ended: list[bool] = []

    def finish(reservation: Reservation, sealed: bool) -> None:
        ended.append(sealed)
        if len(ended) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Reservation([], ROWS, [], [], [], finish) as mine:
        mine.seal()
    assert ended == [True, False]
    assert not mine.open


def test_a_sealed_reservation_is_ended_and_its_views_are_gone() -> None:
    ended: list[bool] = []
    told: list[Reservation] = []
    with reservation(ended) as mine:
        mine.on_end.append(told.append)
        assert repr(mine) == "<Reservation 2 blocks>"
        mine.seal()
        assert ended == [True]
        assert not mine.open
        assert len(mine.views) == 0
        with pytest.raises(RightError, match="reserve again"):
            mine.seal()
        mine.abort()
    assert ended == [True]
    assert told == [mine]
    assert repr(mine) == "<Reservation 2 blocks, ended>"


def test_a_reservation_that_is_left_is_aborted() -> None:
    ended: list[bool] = []
    with pytest.raises(ZeroDivisionError), reservation(ended):
        raise ZeroDivisionError
    assert ended == [False]


def test_no_interrupt_hides_that_a_right_was_forgotten() -> None:
    """What is called in Python may be interrupted before its first line. Here nothing is."""
    abandoned: deque[Watch] = deque()
    lease, reservation = Lease(never, 7, ROWS), Reservation([], ROWS, [], [], [], lambda r, sealed: None, 5)
    watches = [Watch.over(lease, 7, abandoned), Watch.over(reservation, 5, abandoned)]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    sys.settrace(interrupt)
    try:
        del lease, reservation
    finally:
        sys.settrace(None)
    assert list(abandoned) == watches
