"""Does what breaks on command break as commanded? Every other proof of robustness stands on that."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.block import ALIGN, Span
from kvtide.testing.blocks import aligned, keys
from kvtide.testing.clock import FakeClock
from kvtide.testing.faults import Fault, FaultyDisk, FaultyTier, How
from kvtide.testing.tier import Caller, TierContract, shaped
from kvtide.tiers.base import NOWHERE, Tier
from kvtide.tiers.dram.tier import Dram
from kvtide.tiers.nvme.tier import Nvme

PAGES = 8


def page(byte: int, count: int = 1) -> Span:
    span = aligned(count * ALIGN)
    span[:] = bytes([byte]) * len(span)
    return span


class Opened:
    """One file on a faulty disk, all ones, synced."""

    def __init__(self, path: Path, seed: int = 0) -> None:
        self.path = path / "0.segment"
        self.disk = FaultyDisk(seed)
        self.fd = self.disk.open(self.path, direct=True, create=True)
        self.disk.resize(self.fd, PAGES * ALIGN)
        self.write(1, 0, PAGES)
        self.disk.sync(self.fd)
        self.disk.sync_folder(path)

    def write(self, byte: int, at: int, count: int = 1) -> int:
        return self.disk.write(self.fd, [page(byte, count)], at * ALIGN)

    def read(self) -> tuple[int, bytes]:
        into = aligned(PAGES * ALIGN)
        count = self.disk.read(self.fd, [into], 0)
        return count, bytes(into)

    def bytes(self) -> bytes:
        """What is really in the file."""
        return self.path.read_bytes()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    opened = Opened(tmp_path)
    yield opened
    opened.disk.close(opened.fd)


def test_without_faults_it_is_a_disk(opened: Opened, tmp_path: Path) -> None:
    assert opened.write(2, 3) == ALIGN
    assert opened.read() == (PAGES * ALIGN, opened.bytes())
    assert opened.bytes()[3 * ALIGN : 4 * ALIGN] == b"\2" * ALIGN
    opened.disk.resize(opened.fd, ALIGN)
    assert opened.bytes() == b"\1" * ALIGN
    opened.disk.rename(opened.path, tmp_path / "1.segment")
    opened.disk.unlink(tmp_path / "1.segment")
    opened.disk.unlink(tmp_path / "1.segment")
    assert not list(tmp_path.iterdir())
    assert not opened.disk.struck


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_failed_call_does_nothing(opened: Opened, code: int) -> None:
    opened.disk.arm(Fault("write", How.FAIL, code, after=1, times=2))
    opened.write(2, 0)
    before = opened.bytes()
    for _ in range(2):
        with pytest.raises(OSError, match=os.strerror(code)) as e:
            opened.write(3, 1)
        assert e.value.errno == code
    assert opened.bytes() == before
    assert opened.write(4, 1) == ALIGN
    assert opened.disk.struck == [("write", How.FAIL, "0.segment")] * 2


def test_a_short_call_says_how_much_it_did(opened: Opened) -> None:
    opened.disk.arm(Fault("write", How.SHORT), Fault("read", How.SHORT))
    count = opened.write(2, 0, PAGES)
    assert 0 <= count < PAGES * ALIGN
    assert opened.bytes() == b"\2" * count + b"\1" * (PAGES * ALIGN - count)
    assert opened.read()[0] < PAGES * ALIGN


def test_a_torn_write_leaves_its_beginning(opened: Opened) -> None:
    opened.disk.arm(Fault("write", How.TORN))
    with pytest.raises(OSError, match="Input/output"):
        opened.write(2, 0, PAGES)
    data = opened.bytes()
    assert data == b"\2" * data.count(2) + b"\1" * data.count(1)
    assert not opened.disk.lied


def test_a_lie_says_that_all_was_written(opened: Opened) -> None:
    opened.disk.arm(Fault("write", How.LIE))
    assert opened.write(2, 0, PAGES) == PAGES * ALIGN
    assert b"\1" in opened.bytes()
    assert opened.disk.lied


def test_a_flip_changes_one_bit(opened: Opened) -> None:
    opened.disk.arm(Fault("write", How.FLIP), Fault("read", How.FLIP))
    right = b"\2" * PAGES * ALIGN
    opened.write(2, 0, PAGES)
    (wrong,) = {a ^ b for a, b in zip(opened.bytes(), right, strict=True)} - {0}
    assert wrong.bit_count() == 1
    on_disk = opened.bytes()
    (wrong,) = {a ^ b for a, b in zip(opened.read()[1], on_disk, strict=True)} - {0}
    assert wrong.bit_count() == 1
    assert opened.bytes() == on_disk


def test_a_fault_is_for_the_files_that_it_names(opened: Opened) -> None:
    opened.disk.arm(Fault("write", files="journal*"))
    assert opened.write(2, 0) == ALIGN
    opened.disk.disarm()


def test_only_growing_can_find_the_disk_full(opened: Opened) -> None:
    opened.disk.arm(Fault("resize", code=errno.ENOSPC))
    opened.disk.resize(opened.fd, ALIGN)
    with pytest.raises(OSError, match="No space"):
        opened.disk.resize(opened.fd, 2 * ALIGN)
    assert len(opened.bytes()) == ALIGN


def test_a_gate_holds_calls_back_until_it_is_opened(opened: Opened) -> None:
    with opened.disk.gate("write") as gate:
        late = threading.Thread(target=opened.write, args=(2, 0))
        late.start()
        assert gate.wait_for(1)
        assert opened.read()[1] == b"\1" * PAGES * ALIGN  # reads are not late
    late.join(30)
    assert opened.bytes()[:ALIGN] == b"\2" * ALIGN


def test_the_dead_do_nothing_and_let_go(opened: Opened) -> None:
    gate = opened.disk.gate("sync")
    errors: list[OSError] = []

    def sync() -> None:
        try:
            opened.disk.sync(opened.fd)
        except OSError as e:
            errors.append(e)

    late = threading.Thread(target=sync)
    late.start()
    assert gate.wait_for(1)
    opened.disk.die()
    late.join(30)
    assert len(errors) == 1
    for call in (lambda: opened.write(2, 0), opened.read, lambda: opened.disk.unlink(opened.path)):
        with pytest.raises(OSError, match="dead"):
            call()
    assert opened.bytes() == b"\1" * PAGES * ALIGN
    opened.disk.revive()
    assert opened.write(2, 0) == ALIGN


def lost(path: Path, seed: int) -> bytes:
    """A file after a power loss in which pages 0 to 3 were written twice, and page 0 synced after the first time."""
    path.mkdir()
    opened = Opened(path, seed)
    opened.write(2, 0)
    opened.disk.sync(opened.fd)
    opened.write(3, 0, 4)
    opened.write(4, 0, 4)
    opened.disk.die()
    opened.disk.close(opened.fd)
    opened.disk.power_loss()
    return opened.bytes()


def test_a_power_loss_may_lose_and_reorder_all_that_was_not_synced_and_nothing_else(tmp_path: Path) -> None:
    first, later = set(), set()
    mixed = 0
    for seed in range(60):
        data = lost(tmp_path / str(seed), seed)
        assert len(data) == PAGES * ALIGN
        assert data[4 * ALIGN :] == b"\1" * (PAGES - 4) * ALIGN
        first |= set(data[:ALIGN])
        later |= set(data[ALIGN : 4 * ALIGN])
        mixed += len(set(data[ALIGN : 4 * ALIGN])) > 1
    assert first == {2, 3, 4}, "what was synced, or later"
    assert later == {1, 3, 4}
    assert mixed, "units are lost one by one"
    assert lost(tmp_path / "again", 7) == (tmp_path / "7" / "0.segment").read_bytes()


def test_a_power_loss_is_another_boot(opened: Opened) -> None:
    before = opened.disk.boot_id()
    opened.disk.die()
    opened.disk.revive()
    assert opened.disk.boot_id() == before
    opened.disk.power_loss()
    assert opened.disk.boot_id() != before


@pytest.mark.parametrize("synced", [False, True])
def test_a_new_file_may_be_gone_unless_its_folder_was_synced(tmp_path: Path, synced: bool) -> None:
    gone = 0
    for seed in range(20):
        disk = FaultyDisk(seed)
        path = tmp_path / f"{seed}.segment"
        fd = disk.open(path, direct=False, create=True)
        disk.write(fd, [b"something"], 0)
        disk.sync(fd)
        if synced:
            disk.sync_folder(tmp_path)
        disk.close(fd)
        disk.power_loss()
        gone += not path.exists()
        assert not path.exists() or path.read_bytes() == b"something"
    assert bool(gone) is not synced


def test_an_appended_end_may_be_cut_anywhere(tmp_path: Path) -> None:
    sizes = set()
    for seed in range(40):
        disk = FaultyDisk(seed)
        path = tmp_path / f"journal-{seed}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        disk.append(fd, b"a" * 1000)
        disk.sync(fd)
        disk.append(fd, b"b" * 1000)
        disk.close(fd)
        disk.power_loss()
        data = path.read_bytes()
        assert data.startswith(b"a" * 1000)
        assert set(data[1000:]) <= {ord("b"), 0}
        sizes.add(len(data))
    assert {1000, 2000} < sizes


def test_a_shrunken_file_may_come_back_whole(tmp_path: Path) -> None:
    seen = set()
    for seed in range(20):
        folder = tmp_path / str(seed)
        folder.mkdir()
        opened = Opened(folder, seed)
        opened.disk.resize(opened.fd, 0)
        opened.disk.close(opened.fd)
        opened.disk.power_loss()
        seen.add(opened.bytes())
    assert {b"", b"\1" * PAGES * ALIGN} <= seen


# -- a tier that breaks -----------------------------------------------------------------------------------


class TestFaultyDram(TierContract):
    checks_identity = False

    def make(self, where: Path, budget: int) -> Tier:
        return FaultyTier(Dram(budget, segment=512 << 10))


class TestFaultyNvme(TierContract):
    persistent = True

    def make(self, where: Path, budget: int) -> Tier:
        return FaultyTier(Nvme(where, budget, segment=512 << 10))


class TestNvmeOnFaultyDisk(TierContract):
    """The disk too is a wrapper: with nothing armed it changes nothing."""

    persistent = True

    def make(self, where: Path, budget: int) -> Tier:
        return Nvme(where, budget, segment=512 << 10, disk=FaultyDisk())


WHO = shaped(1, 4096)


@pytest.fixture
def faulty() -> Iterator[tuple[FaultyTier, Caller]]:
    tier = FaultyTier(Dram(1 << 20, segment=1 << 20))
    caller = Caller(tier)
    yield tier, caller
    caller.close()


def test_items_fail_one_by_one(faulty: tuple[FaultyTier, Caller]) -> None:
    tier, caller = faulty
    names = keys(4)
    tier.fail_writes = 1
    places = caller.write(names, WHO)
    assert [place == NOWHERE for place in places] == [True, False, False, False]
    tier.fail_reads = 2
    assert caller.finds(names[1:], WHO, places[1:]) == [False, False, True]
    assert caller.finds(names[1:], WHO, places[1:]) == [True, True, True]
    tier.fail_drops = 1
    assert caller.drop((names[1], places[1]), (names[2], places[2])) == [False, True]


def test_a_lost_write_is_acknowledged_but_cannot_be_read(faulty: tuple[FaultyTier, Caller]) -> None:
    tier, caller = faulty
    names = keys(2)
    tier.lose_writes = 1
    places = caller.write(names, WHO)
    assert NOWHERE not in places
    assert caller.finds(names, WHO, places) == [False, True]


def test_late_batches_wait_for_the_door(faulty: tuple[FaultyTier, Caller]) -> None:
    tier, caller = faulty
    tier.late = True
    answer = caller.start_write([caller.block(key, WHO) for key in keys(2)])
    assert tier.wait_for(1)
    assert not answer._event.is_set()
    tier.open()
    assert NOWHERE not in answer.wait()


# -- a clock that stands still ----------------------------------------------------------------------------


def test_time_passes_only_when_it_is_told_to() -> None:
    clock = FakeClock(1000.0)
    assert (clock.monotonic(), clock.time()) == (0.0, 1000.0)
    clock.advance(2.5)
    assert (clock.monotonic(), clock.time()) == (2.5, 1002.5)
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)
