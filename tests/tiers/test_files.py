"""Blobs as files, and what is particular to a tier over them: turns to write, and credit that ends meanwhile."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtide.block import Span
from kvtide.testing.blocks import aligned, keys
from kvtide.testing.clock import FakeClock
from kvtide.testing.tier import Caller, shaped
from kvtide.tiers.base import NOWHERE
from kvtide.tiers.shared.budget import BudgetCoordinatorStatistics
from kvtide.tiers.shared.files import Files
from kvtide.tiers.shared.tier import Permit, Shared
from kvtide.tiers.syscalls import AnyPath, Disk


class Until:
    """Credit for everything, until then."""

    def __init__(self, end: float) -> None:
        self._end = end

    @property
    def largest(self) -> int:
        return sys.maxsize

    def take(self, name: str, nbytes: int) -> Permit | None:
        return Permit(self._end, nbytes)

    def end(self, permit: Permit, *, failed: bool) -> None: ...

    def used(self, names: Sequence[str]) -> None: ...

    def coordinator_statistics(self) -> BudgetCoordinatorStatistics:
        return BudgetCoordinatorStatistics()


class Crowded(Disk):
    """Counts who writes at the same time; a write ends when all are there that will be."""

    def __init__(self, writers: int, crowd: int) -> None:
        self.most = self._now = self._opened = 0
        self._writers = writers
        self._crowd = crowd
        self._changed = threading.Condition()

    def open(self, path: AnyPath, *, direct: bool, create: bool = False) -> int:
        fd = super().open(path, direct=direct, create=create)
        with self._changed:
            self._opened += "/dropped." not in str(path)  # the first to write looks what was dropped
            self._changed.notify_all()
        return fd

    def write_all(self, fd: int, data: Sequence[Span], offset: int, direct: bool) -> None:
        if not data:
            return
        with self._changed:
            self._now += 1
            self.most = max(self.most, self._now)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._opened >= self._crowd and self.most >= self._writers, 30)
        super().write_all(fd, data, offset, direct)
        with self._changed:
            self._now -= 1


def test_so_many_blocks_are_written_at_a_time_and_as_many_made_ready_meanwhile(tmp_path: Path) -> None:
    disk = Crowded(writers=3, crowd=6)
    caller = Caller(Shared(Files(tmp_path, disk=disk), threads=3))
    assert NOWHERE not in caller.write(keys(12), shaped(4, 5000))
    assert disk.most == 3
    caller.close()


def test_credit_that_ended_before_the_write_began_is_not_used(tmp_path: Path) -> None:
    caller = Caller(Shared(Files(tmp_path), credit=Until(0.0)))
    assert caller.write(keys(2), shaped(4, 5000)) == [NOWHERE] * 2
    assert dict(caller.statistics().reasons) == {"its credit ended before it was written": 2}
    assert not [file for file in tmp_path.rglob("*") if not file.name.startswith("dropped.") and file.is_file()]
    caller.close()


class Slow(Disk):
    """Writes when it is told to, and says which calls were made."""

    def __init__(self) -> None:
        self.opened = threading.Semaphore(0)
        self.go = threading.Event()
        self.calls: list[str] = []

    def open(self, path: AnyPath, *, direct: bool, create: bool = False) -> int:
        fd = super().open(path, direct=direct, create=create)
        self.opened.release()
        return fd

    def write_all(self, fd: int, data: Sequence[Span], offset: int, direct: bool) -> None:
        assert self.go.wait(30)
        self.calls.append("write")
        super().write_all(fd, data, offset, direct)

    def close(self, fd: int) -> None:
        self.calls.append("close")
        super().close(fd)


def test_credit_that_ends_while_others_write_is_not_used(tmp_path: Path) -> None:
    clock, disk = FakeClock(), Slow()
    caller = Caller(Shared(Files(tmp_path, disk=disk), threads=1, credit=Until(5.0), clock=clock))
    writes = caller.start_write([caller.block(key, shaped(4, 5000)) for key in keys(2)])
    for _ in range(2):
        assert disk.opened.acquire(timeout=30)
    clock.advance(6)  # one is being written, and the other waits for its turn
    disk.go.set()
    assert writes.wait().count(NOWHERE) == 1
    assert dict(caller.statistics().reasons) == {"its credit ended before it was written": 1}
    assert len([file for file in tmp_path.rglob("*") if file.is_file()]) == 1
    caller.close()


@pytest.mark.parametrize("direct", [True, False])
def test_what_is_cached_is_sent_when_its_file_is_closed(tmp_path: Path, direct: bool) -> None:
    disk = Slow()
    disk.go.set()

    @contextmanager
    def turn() -> Iterator[None]:
        yield
        disk.calls.append("end of turn")

    Files(tmp_path, direct=direct, disk=disk).write([("ab" * 32, [aligned(8192)])], 10.0, turn)
    assert disk.calls == (["write", "end of turn", "close"] if direct else ["write", "close", "end of turn"])


def test_waiting_for_a_turn_is_not_time_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr("kvtide.tiers.shared.files.time.monotonic", clock.monotonic)

    @contextmanager
    def turn() -> Iterator[None]:
        clock.advance(60)
        yield

    files = Files(tmp_path)
    assert files.write([(name, [aligned(4096)]) for name in ("aa", "bb", "cc")], 10.0, turn) == [True] * 3


def test_a_filesystem_that_refuses_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "nn").mkdir()
    with pytest.raises(OSError, match="too long"):
        Files(tmp_path).find(["n" * 300], 10.0)
