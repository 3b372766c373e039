"""The records behind ``explain``: what they tell, to whom, and what is not known."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvtide.index.absence_log import Absence, AbsenceLog
from kvtide.testing.clock import FakeClock

Numbers = npt.NDArray[np.uint64]
MINE, OTHERS = -0x7654321076543210, 0x1234567812345678


class Columns:
    """Of an index with a thousand rows."""

    mark = np.arange(1, 1001, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    identity = np.full(1000, MINE, np.int64)
    tenant = np.full(1000, 1, np.uint16)


def marks(count: int, seed: int) -> Numbers:
    found: Numbers = np.random.default_rng(seed).integers(1 << 62, 1 << 63, count, dtype=np.uint64)
    return found


def test_the_places_of_ones_own_blocks_tell_nothing_of_others_blocks() -> None:
    """Somebody fills the table with blocks of his own and sees which of their records were overwritten: from that he
    cannot tell which prompt another trust domain had, even if he can name the blocks of that prompt."""
    log = AbsenceLog(Columns(), 1 << 16)
    size = np.uint64(log.statistics().bytes // 16)
    mine, had = marks(1 << 17, 1), marks(50, 2)
    log.note_blocks(mine, MINE, Absence.STORE_DROPPED)

    def lost() -> Numbers:
        found: Numbers = mine[log.find(mine, MINE).codes == 0]
        return found

    before = lost()
    log.note_blocks(had, OTHERS, Absence.EVICTED)
    new = np.setdiff1d(lost(), before) % size
    assert len(new) > 40

    def score(prompt: Numbers) -> int:
        """The most places that one difference between places and marks explains."""
        return int(np.unique((new[:, None] - prompt[None, :]) % size, return_counts=True)[1].max())

    assert score(had) <= max(score(marks(50, seed)) for seed in range(10, 40)) + 2 < 20


def test_a_block_that_leaves_again_casts_no_doubt_on_others() -> None:
    log = AbsenceLog(Columns(), 1 << 12)
    some = marks(20, 1)
    for _ in range(5):
        log.note_blocks(some, MINE, Absence.EVICTED)
        log.find(some, MINE)
    first = log.find(marks(500, 2), MINE).doubtful.sum()
    for _ in range(5):
        log.note_blocks(some, MINE, Absence.EVICTED)
        log.find(some, MINE)
    assert log.find(marks(500, 2), MINE).doubtful.sum() == first
    assert first < 20


def test_of_an_overwritten_record_it_is_known_since_when_there_was_none() -> None:
    clock = FakeClock()
    log = AbsenceLog(Columns(), 16, clock)  # one place
    log.note_blocks(marks(1, 1), MINE, Absence.EVICTED)
    clock.advance(100)
    log.note_blocks(marks(1, 2), MINE, Absence.EVICTED)
    clock.advance(100)
    found = log.find(marks(1, 1), MINE)
    assert (found.codes[0], found.doubtful[0], round(found.times[0] - log.since)) == (0, True, 100)
    # something that happened earlier and is recorded later does not take the place of the later record
    log.note(np.array([0]), Absence.EXPIRED, times=np.array([log.since + 50]))
    assert log.find(marks(1, 2), MINE).codes[0] == Absence.EVICTED.code
    assert log.find(Columns.mark[:1], MINE).doubtful[0]


def test_records_are_the_same_one_by_one_and_together() -> None:
    rows = np.arange(100)
    one, together = AbsenceLog(Columns(), 1 << 20), AbsenceLog(Columns(), 1 << 20)
    for row in rows:
        one.note(rows[row : row + 1], Absence.EVICTED, 2, tenant=1, unwritten=np.array([row % 32], np.uint8))
        if row % 7 == 0:
            one.find(Columns.mark, MINE)
    together.note(rows, Absence.EVICTED, 2, tenant=1, unwritten=(rows % 32).astype(np.uint8))
    singly, at_once = one.find(Columns.mark[:100], MINE), together.find(Columns.mark[:100], MINE)
    for name in ("codes", "tiers", "causes", "for_whom", "unwritten"):
        assert (getattr(singly, name) == getattr(at_once, name)).all(), name
    assert singly.codes.all()
    assert (singly.for_whom == 1).all()


def test_an_interrupted_writing_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    log = AbsenceLog(Columns(), 1 << 10)  # 64 places
    some = marks(50, 1)
    log.note_blocks(some, MINE, Absence.EVICTED)
    whole = AbsenceLog._write

    def interrupted(self: AbsenceLog, *arguments: object) -> None:
        whole(self, *arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(AbsenceLog, "_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        log.write()
    monkeypatch.undo()
    found = log.find(some, MINE)
    assert ((found.codes > 0) | found.doubtful).all()


def test_collected_records_take_bounded_memory() -> None:
    log = AbsenceLog(Columns(), 1 << 12)
    for number in range(5000):
        log.note(np.arange(number % 5), Absence.DROPPED)
        log.note_blocks(marks(100, number), MINE, Absence.DROPPED)
        assert len(log._collected) <= 1024
        assert log._count <= 4096
