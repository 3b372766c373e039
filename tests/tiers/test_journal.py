"""The journal is a hint: what it says is right or not believed, and it never grows past its share."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.testing.blocks import keys
from kvtide.testing.faults import FaultyDisk
from kvtide.tiers.nvme.journal import (
    FREED,
    HOLDS,
    PER_SLOT,
    RECORD,
    RESERVE,
    WRITING,
    Journal,
    boot_id,
    entry,
    latest,
    replay,
)
from kvtide.tiers.syscalls import AnyPath, Disk

BOOT = b"this boot"
NAMES = keys(40)


def started(path: Path, disk: Disk | None = None, boot: bytes = BOOT) -> Journal:
    journal = Journal(path, disk or Disk(), boot)
    journal.rewrite(np.zeros(0, RECORD))
    return journal


def everything(records: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    return np.ones(len(records), np.bool_)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def sample(path: Path, close: bool) -> list[int]:
    """A journal of five frames; answers where each ends."""
    journal = started(path)
    ends = [journal.size]
    for i in range(5):
        journal.append(entry(HOLDS, i, NAMES[i], i + 1) + entry(FREED, 99, NAMES[i]))
        ends.append(journal.size)
    journal.close(synced=close)
    assert path.stat().st_size == journal.size
    return ends


@given(
    st.sampled_from([HOLDS, FREED, WRITING]),
    st.integers(0, 2**62),
    st.integers(0, 2**62),
    st.floats(allow_nan=False),
    st.binary(min_size=32, max_size=32),
    st.integers(0, 2**32 - 1),
    st.integers(-100, 100),
)
def test_an_entry_is_a_record(
    kind: int, place: int, sequence: int, expiry: float, parent: bytes, depth: int, priority: int
) -> None:
    (record,) = np.frombuffer(entry(kind, place, NAMES[0], sequence, parent, depth, expiry, priority), RECORD)
    assert (record["kind"], record["place"], record["sequence"]) == (kind, place, sequence)
    assert (record["expiry"], record["depth"], record["priority"]) == (expiry, depth, priority)
    assert record["key"].tobytes().rstrip(b"\0") == NAMES[0]
    assert record["parent"].tobytes() == parent


@pytest.mark.parametrize("closed", [True, False])
def test_what_was_appended_is_replayed(path: Path, closed: bool) -> None:
    sample(path, closed)
    records, doubt = replay(path, BOOT)
    assert doubt == ""
    assert records["place"].tolist() == [0, 99, 1, 99, 2, 99, 3, 99, 4, 99]
    last = latest(records)
    assert last["place"].tolist() == [0, 1, 2, 3, 4, 99]
    assert last["kind"].tolist() == [HOLDS] * 5 + [FREED]
    assert last["key"][5].tobytes().rstrip(b"\0") == NAMES[4]


def test_only_a_proper_close_outlives_a_boot(path: Path) -> None:
    sample(path, close=False)
    assert replay(path, b"another boot")[1] == "from before a power loss"
    assert replay(path, b"")[1] == "from before a power loss"
    sample(path, close=True)
    assert replay(path, b"another boot")[1] == ""
    # Opened again and killed: the proper close of before counts no more.
    journal = Journal(path, Disk(), b"third boot")
    journal.rewrite(replay(path, b"third boot")[0])
    assert replay(path, b"fourth boot")[1] == "from before a power loss"
    assert len(replay(path, b"third boot")[0]) == 10


def test_a_system_that_does_not_name_its_boots_is_not_trusted(path: Path) -> None:
    started(path, boot=b"").append(entry(HOLDS, 1, NAMES[0]))
    assert replay(path, b"")[1] == "from before a power loss"


def test_torn_anywhere(path: Path, tmp_path: Path) -> None:
    """Cut at a frame's end it is a journal that is older; cut anywhere else it is doubted."""
    ends = sample(path, close=True)
    data = path.read_bytes()
    whole = replay(path, BOOT)[0]
    torn = tmp_path / "torn"
    torn.write_bytes(data)
    for length in reversed(range(len(data))):
        os.truncate(torn, length)
        records, doubt = replay(torn, BOOT)
        if length in ends:
            assert doubt == ""
            assert np.array_equal(records, whole[: 2 * ends.index(length)])
        else:
            assert doubt in ("torn", "empty")
            assert len(records) == 0


def test_holes_are_doubted(path: Path) -> None:
    """After a power loss the file may have its length but not its bytes."""
    ends = sample(path, close=True)
    data = path.read_bytes()
    for start, end in zip([0, *ends], [*ends, len(data)], strict=True):
        path.write_bytes(data[:start] + bytes(end - start) + data[end:])
        assert replay(path, BOOT)[1] in ("torn", "foreign")


def test_every_bit_counts(path: Path) -> None:
    journal = started(path)
    journal.append(entry(HOLDS, 7, NAMES[0], 8))
    journal.close()
    data = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for bit in range(8 * len(data)):
            at = bit // 8
            os.pwrite(file.fileno(), bytes([data[at] ^ 1 << bit % 8]), at)
            records, doubt = replay(path, BOOT)
            assert doubt, f"bit {bit}"
            assert len(records) == 0
            os.pwrite(file.fileno(), data[at : at + 1], at)


@given(data=st.binary(min_size=1, max_size=400))
def test_foreign_bytes_are_doubted(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal"
    path.write_bytes(data)
    assert replay(path, BOOT)[1] in ("torn", "foreign")
    path.unlink()
    path.parent.rmdir()


def test_what_is_no_file_is_doubted(path: Path) -> None:
    assert replay(path, BOOT)[1] == "missing"
    path.touch()
    assert replay(path, BOOT)[1] == "empty"
    path.unlink()
    path.mkdir()
    assert replay(path, BOOT)[1].startswith("unreadable")


def test_it_stays_within_its_share(path: Path) -> None:
    """PER_SLOT bytes for each slot and RESERVE hold it, whatever happens, and its successor beside it."""
    slots, random = 300, np.random.default_rng(1)
    journal = started(path)
    expected: dict[int, int] = {}
    largest = 0
    for sequence in range(1, 5000):
        place = int(random.integers(slots))
        body = entry(HOLDS, place, NAMES[0], sequence) * int(random.integers(1, 4))
        if journal.full(slots, len(body)):
            before = journal.size
            journal.compact(everything)
            assert before + journal.size <= PER_SLOT * slots + RESERVE
        journal.append(body)
        assert journal.size == path.stat().st_size
        largest = max(largest, journal.size)
        expected[place] = sequence
    assert largest <= 2 * RECORD.itemsize * slots + RESERVE
    journal.close()
    records, doubt = replay(path, BOOT)
    last = latest(records)
    assert doubt == ""
    assert dict(zip(last["place"].tolist(), last["sequence"].tolist(), strict=True)) == expected


def test_compaction_forgets_slots_that_are_no_more(path: Path) -> None:
    journal = started(path)
    journal.append(b"".join(entry(HOLDS, place, NAMES[0]) for place in range(4000)))
    assert journal.full(slots=100)
    journal.compact(lambda records: records["place"] < 100)
    assert not journal.full(slots=100)
    journal.append(entry(FREED, 5, NAMES[0]))
    records, doubt = replay(path, BOOT)
    assert doubt == ""
    assert latest(records)["place"].tolist() == list(range(100))


@pytest.mark.parametrize("closed", [False, True], ids=["", "closed"])
@pytest.mark.parametrize("seed", range(20))
def test_a_power_loss_after_compaction_leaves_all_of_it_or_nothing_to_trust(
    path: Path, seed: int, closed: bool
) -> None:
    """Compaction syncs nothing: the file before it may come back, or a part of the new one."""
    disk = FaultyDisk(seed)
    journal = Journal(path, disk, disk.boot_id())
    journal.rewrite(np.zeros(0, RECORD))
    journal.append(entry(HOLDS, 1, NAMES[0], 1))
    journal.compact(everything)
    journal.append(entry(HOLDS, 2, NAMES[1], 2))
    if closed:
        journal.close()
    disk.power_loss()
    records, doubt = replay(path, disk.boot_id())
    assert doubt or (closed and records["place"].tolist() == [1, 2])


class Broken(Disk):
    """Fails at one of its verbs, once told to."""

    def __init__(self, verb: str, how: str) -> None:
        self.verb, self.how = verb, how
        self.armed = False

    def _break(self, verb: str) -> None:
        if self.armed and verb == self.verb and self.how == "error":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def append(self, fd: int, data: bytes) -> int:
        self._break("append")
        if self.armed and self.verb == "append":
            return super().append(fd, data[: len(data) // 2])
        return super().append(fd, data)

    def sync(self, fd: int) -> None:
        self._break("sync")
        super().sync(fd)

    def rename(self, old: AnyPath, new: AnyPath, *, durable: bool = True) -> None:
        self._break("rename")
        super().rename(old, new, durable=durable)


@pytest.mark.parametrize(
    ("verb", "how", "act"),
    [
        ("append", "error", "append"),
        ("append", "short", "append"),
        ("append", "error", "compact"),
        ("append", "short", "compact"),
        ("sync", "error", "rewrite"),
        ("rename", "error", "compact"),
    ],
)
def test_a_failure_removes_it(path: Path, verb: str, how: str, act: str) -> None:
    """A journal with a gap would be believed: better none at all."""
    disk = Broken(verb, how)
    journal = started(path, disk)
    journal.append(entry(HOLDS, 1, NAMES[0], 1))
    before = len(list(Path("/proc/self/fd").iterdir()))
    disk.armed = True
    if act == "append":
        journal.append(entry(FREED, 1, NAMES[0]))
    elif act == "rewrite":
        journal.rewrite(np.zeros(0, RECORD))
    else:
        journal.compact(everything)
    assert journal.failed
    assert list(path.parent.iterdir()) == []
    assert journal.size == 0
    disk.armed = False
    # It stays silent, and says nothing that would be a gap.
    journal.append(entry(HOLDS, 2, NAMES[1], 2))
    journal.compact(everything)
    journal.close()
    assert replay(path, BOOT)[1] == "missing"
    assert len(list(Path("/proc/self/fd").iterdir())) == before - 1


def test_the_remains_of_a_killed_compaction_are_no_hindrance(path: Path) -> None:
    journal = started(path)
    journal.append(entry(HOLDS, 1, NAMES[0], 1))
    path.with_suffix(".new").write_bytes(b"half a journ")
    assert len(replay(path, BOOT)[0]) == 1
    journal.compact(everything)
    assert len(replay(path, BOOT)[0]) == 1
    assert [p.name for p in path.parent.iterdir()] == ["journal"]


def test_many_records(path: Path) -> None:
    """More than one frame's worth."""
    records = np.zeros(150_000, RECORD)
    records["place"] = np.arange(150_000)
    journal = Journal(path, Disk(), BOOT)
    journal.rewrite(records)
    assert journal.size == path.stat().st_size
    found, doubt = replay(path, BOOT)
    assert doubt == ""
    assert np.array_equal(found, records)


def test_this_boot_has_a_name() -> None:
    assert boot_id() == Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
