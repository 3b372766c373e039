"""The two rights: given back once, by whoever is first, and of no use afterwards."""

from __future__ import annotations

import numpy as np
import pytest

from kvtide.errors import RightError
from kvtide.index.index import Rows
from kvtide.index.lease import Lease, Reservation
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


def test_a_lease_is_given_back_once() -> None:
    released: list[list[int]] = []
    with Lease(lambda rows: released.append(rows.tolist()), ROWS) as lease:
        assert repr(lease) == "<Lease 2 blocks>"
        lease.release()
        assert released == [[3, 4]]
    lease.release()
    assert released == [[3, 4]]
    assert repr(lease) == "<Lease 0 blocks>"


def test_a_lease_on_nothing_tells_nobody() -> None:
    released: list[Rows] = []
    with Lease(released.append, ROWS[:0]):
        pass
    assert released == []


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
