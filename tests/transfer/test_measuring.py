"""A disk is measured when its store opens, within the budget, and remembered."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtide import Store, config
from kvtide.block import Span
from kvtide.clock import SystemClock
from kvtide.errors import TierError
from kvtide.plan.tier_speed import SpeedStatistics
from kvtide.testing.clock import FakeClock
from kvtide.tiers.nvme import measure
from kvtide.tiers.nvme.speeds import DiskSpeeds, recall, remember
from kvtide.tiers.nvme.tier import Nvme
from kvtide.tiers.syscalls import Disk
from kvtide.transfer import disk_measurement
from tests.plan.small import MODEL, Clock, keep, length, open_store, prompt

MIB = 1 << 20
NOW = SystemClock().time


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores of a few megabytes are measured too, with less."""
    monkeypatch.setattr(disk_measurement, "LEAST", 16 * MIB)
    for module in ("kvtide.tiers.nvme.measure", "kvtide.tiers.nvme.volume", "kvtide.transfer.disk_measurement"):
        monkeypatch.setattr(f"{module}.FILE", 4 * MIB)


def ended(store: Store) -> None:
    """Wait until nothing is measured any more."""
    assert store._measuring is not None
    if store._measuring._thread is not None:
        store._measuring._thread.join(30)
        assert not store._measuring._thread.is_alive()


def speeds(store: Store) -> tuple[SpeedStatistics, SpeedStatistics]:
    lane = store.statistics().lanes["nvme"]
    return lane.read_speed, lane.write_speed


class Watched(Disk):
    """Counts what is written and read, and sees how much there is at any time."""

    def __init__(self) -> None:
        self.read_bytes = self.written_bytes = self.most = 0
        self.sizes: dict[int, int] = {}
        self.lock = threading.Lock()
        self.fault: OSError | None = None

    def resize(self, fd: int, nbytes: int) -> None:
        if self.fault is not None:
            raise self.fault
        super().resize(fd, nbytes)
        with self.lock:
            self.sizes[os.fstat(fd).st_ino] = nbytes
            self.most = max(self.most, sum(self.sizes.values()))

    def close(self, fd: int) -> None:
        about = os.fstat(fd)
        super().close(fd)
        if not about.st_nlink:
            with self.lock:
                self.sizes.pop(about.st_ino, None)

    def read(self, fd: int, into: Sequence[Span], offset: int) -> int:
        count = super().read(fd, into, offset)
        self.read_bytes += count
        return count

    def write(self, fd: int, data: Sequence[Span | bytes], offset: int) -> int:
        count = super().write(fd, data, offset)
        self.written_bytes += count
        return count


class Gated(Watched):
    """A measurement's writes wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.free = threading.Event(), threading.Event()

    def write(self, fd: int, data: Sequence[Span | bytes], offset: int) -> int:
        if threading.current_thread().name == "kvtide-measure":
            self.began.set()
            self.free.wait(30)
        return super().write(fd, data, offset)


def opened(path: Path, disk: Disk | None = None, clock: Any = None, **nvme: Any) -> Store:
    tree = {"path": str(path), "budget": "16MiB", "segment": "1MiB", "threads": 2, **nvme}
    return Store(config.read(env={}, dram={"budget": "1MiB", "segment": "1MiB"}, nvme=tree), disk=disk, clock=clock)


def test_a_fresh_disk_is_measured_soon_after_opening_and_nothing_is_left(tmp_path: Path) -> None:
    disk = Watched()
    with opened(tmp_path / "kv", disk) as store:
        ended(store)
        read, write = speeds(store)
        assert (read.measured, write.measured) == (1, 1)
        assert disk.written_bytes >= 4 * MIB
        assert not disk.sizes, "its bytes are given back"
        assert store.statistics().tiers["nvme"].bytes_taken < MIB
        assert {p.name for p in (tmp_path / "kv").iterdir()} == {"kvtide.json", "lock", "journal", "speeds"}
    assert recall(tmp_path / "kv") is not None


def test_what_was_measured_is_known_at_once_when_opened_again(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as store:
        ended(store)
        before = [s.bytes_per_second for s in speeds(store)]
    disk = Watched()
    with opened(tmp_path / "kv", disk) as store:
        assert [(s.bytes_per_second, s.measured, s.remembered) for s in speeds(store)] == [(b, 0, True) for b in before]
        ended(store)
        assert disk.written_bytes < MIB, "it is not measured again"
        assert store._measuring is not None
        assert store._measuring._thread is None


def test_what_work_has_taught_is_remembered_too(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as store:
        ended(store)
        for _ in range(50):
            store.main.colds[0].lane.read_speed.measured(7_000_000, 1.0)
    with opened(tmp_path / "kv") as store:
        assert speeds(store)[0].bytes_per_second == pytest.approx(7e6, rel=0.01)


@pytest.mark.parametrize("age", [86_401.0, -60.0])
def test_an_old_record_stands_until_it_is_measured_anew(tmp_path: Path, age: float) -> None:
    with opened(tmp_path / "kv", Watched()) as store:
        ended(store)
    remember(tmp_path / "kv", DiskSpeeds(123e6, None, NOW() - age))
    with opened(tmp_path / "kv") as store:
        ended(store)
        assert speeds(store)[0].measured == 1
    found = recall(tmp_path / "kv")
    assert found is not None
    assert found.time > NOW() - 60 - 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        '{"read": 1e9}',
        '{"read": "fast", "write": null, "time": "now"}',
        '{"read": true, "write": [], "time": NaN}',
        "[" * 5000,
        "9" * 5000,
    ],
)
def test_a_damaged_record_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "speeds").write_text(text)
    assert recall(tmp_path) is None


@pytest.mark.parametrize("value", ["0", "-1", "1e300", "1e-300", "Infinity", "NaN", "true", '"1e9"', "{}"])
def test_a_speed_that_cannot_be_is_not_believed(tmp_path: Path, value: str) -> None:
    (tmp_path / "speeds").write_text(f'{{"read": {value}, "write": 2e9, "time": 1000}}')
    assert recall(tmp_path) == DiskSpeeds(None, 2e9, 1000.0)


def test_a_record_that_is_a_link_or_a_folder_is_neither_read_nor_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text(json.dumps({"read": 1e9, "write": 1e9, "time": NOW()}))
    (tmp_path / "speeds").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "speeds.new").symlink_to(tmp_path / "victim")
    assert recall(tmp_path) is None
    remember(tmp_path, DiskSpeeds(5e6, None, 1.0))
    assert recall(tmp_path) == DiskSpeeds(5e6, None, 1.0)
    assert not (tmp_path / "victim").exists()
    (tmp_path / "speeds").unlink()
    (tmp_path / "speeds").mkdir()
    remember(tmp_path, DiskSpeeds(5e6, None, 1.0))
    assert recall(tmp_path) is None


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv"):
        pass
    (tmp_path / "kv" / "measuring").write_bytes(bytes(MIB))
    remember(tmp_path / "kv", DiskSpeeds(1e9, 1e9, NOW()))
    with opened(tmp_path / "kv"):
        assert not (tmp_path / "kv" / "measuring").exists()


def test_all_together_never_take_more_than_the_budget(tmp_path: Path) -> None:
    """Blocks are stored while the disk is measured, again and again, until the budget is full."""
    disk = Watched()
    with opened(tmp_path / "kv", disk, store="through") as store, store.session(MODEL) as mine:
        ended(store)
        tier = store.main.colds[0].tier
        assert isinstance(tier, Nvme)
        done, wrote = threading.Event(), []

        def again() -> None:
            while not done.is_set():
                wrote.append(tier.measure(lambda: True, done.is_set).written is not None)
                assert store.statistics().tiers["nvme"].bytes_taken <= 16 * MIB

        thread = threading.Thread(target=again)
        thread.start()
        try:
            for i in range(300):
                keep(mine, i)
                store.flush(30)
        finally:
            done.set()
            thread.join(30)
        assert any(wrote)
        assert disk.most <= 16 * MIB
        assert tier.measure(lambda: True, lambda: False).written is None, "there is no room any more"
        assert tier.measure(lambda: True, lambda: False).read is not None, "what is there is read"
        assert store.statistics().tiers["nvme"].bytes_used > 14 * MIB, "all of the budget serves blocks"


def test_what_the_measurement_has_blocks_do_not_get(tmp_path: Path) -> None:
    """The tier is filled to its budget while a measurement is under way, which holds its bytes all the time."""
    disk = Gated()
    with opened(tmp_path / "kv", disk, store="through") as store, store.session(MODEL) as mine:
        assert disk.began.wait(30)
        try:
            for i in range(300):
                keep(mine, i)
                assert store.flush(30)
                assert store.statistics().tiers["nvme"].bytes_taken <= 16 * MIB
            assert 12 * MIB < disk.most <= 16 * MIB
        finally:
            disk.free.set()
        ended(store)
        for i in range(300, 400):
            keep(mine, i)
            store.flush(30)
        assert store.statistics().tiers["nvme"].bytes_used > 14 * MIB, "they have it afterwards"
        assert disk.most <= 16 * MIB


@pytest.mark.parametrize("how", ["full", "refused", "small", "not written"])
def test_where_it_cannot_be_measured_the_guess_stands_and_all_works(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, nvme = Watched(), {}
    match how:
        case "full":
            monkeypatch.setattr(measure, "_SPARE", 1 << 60)
        case "refused":
            disk.fault = OSError(28, "No space left on device")
        case "small":
            monkeypatch.setattr(disk_measurement, "LEAST", 17 * MIB)
        case "not written":
            nvme = {"write_limit": "64KiB"}
    with opened(tmp_path / "kv", disk, **nvme) as store:
        ended(store)
        disk.fault = None
        assert [s.measured for s in speeds(store)] == [0, 0]
        assert disk.written_bytes < MIB
        with store.session(MODEL) as mine:
            keep(mine, 1, 2, 3)
    with opened(tmp_path / "kv") as store, store.session(MODEL) as mine:
        assert length(mine, 1, 2, 3) == 3


def test_closing_does_not_wait_for_the_measurement_to_be_complete(tmp_path: Path) -> None:
    disk = Gated()
    store = opened(tmp_path / "kv", disk)
    assert disk.began.wait(30), "opening does not wait for it either"
    with store.session(MODEL) as mine:
        keep(mine, 1, 2)
    closing = threading.Thread(target=store.close)
    closing.start()
    disk.free.set()
    closing.join(30)
    assert not closing.is_alive()
    assert not disk.sizes or all(size <= MIB for size in disk.sizes.values())
    with opened(tmp_path / "kv") as store, store.session(MODEL) as mine:
        assert length(mine, 1, 2) == 2


def test_time_that_stands_still_is_no_measurement(tmp_path: Path) -> None:
    with opened(tmp_path / "kv", clock=FakeClock()) as store:
        ended(store)
        assert [s.measured for s in speeds(store)] == [0, 0]


def test_a_directory_that_cannot_be_opened_leaves_no_thread(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "strange").touch()
    with pytest.raises(TierError):
        opened(tmp_path / "kv")
    assert not [t for t in threading.enumerate() if t.name == "kvtide-measure"]


# -- load or recompute --------------------------------------------------------------------------------------


def test_a_disk_that_is_wrongly_believed_slow_is_loaded_from_within_a_few_prompts(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv") as store, store.session(MODEL) as mine:
        keep(mine, *range(8))
    remember(tmp_path / "kv", DiskSpeeds(1e3, 1e3, NOW()))  # a kilobyte a second
    with open_store(tmp_path / "kv") as store, store.session(MODEL) as mine:
        prompts = 0
        while prompts < 10:
            prompts += 1
            with mine.match(prompt(*range(8)), prefill=160.0) as match:  # 0.1 s a block
                assert match.blocks == 8 or match.plan.trial is not None or not match.blocks
                if match.blocks == 8 and match.plan.trial is None:
                    break
                if match.blocks:
                    mine.load(match).wait(30)
        assert prompts <= 4
        assert store.statistics().tiers["nvme"].bytes_read > 0


def test_a_trial_may_take_as_long_as_computing_and_no_longer_than_its_caller_wants(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv") as store, store.session(MODEL) as mine:
        keep(mine, *range(8))
    remember(tmp_path / "kv", DiskSpeeds(1e3, 1e3, 1000.0))
    clock = Clock()
    for given, seconds in [(None, 1.28), (100.0, 1.28), (0.5, 0.5)]:
        with (
            open_store(tmp_path / "kv", clock) as store,
            store.session(MODEL) as mine,
            mine.match(prompt(*range(8)), prefill=100.0) as match,
        ):
            assert match.blocks == 8
            assert match.plan.trial == pytest.approx(1.28)
            load = mine.load(match, deadline=given)
            assert load.transfer.deadline == pytest.approx(clock.now + seconds)
            assert load.wait(30).tokens == match.tokens
