"""Blocks on disk: damage of any kind is a miss, the budget holds in bytes of files, what is dropped stays gone."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_128_digest

from kvtide.block import ALIGN, BlockKey, Span
from kvtide.errors import TierError
from kvtide.testing.blocks import aligned, keys
from kvtide.testing.clock import FakeClock
from kvtide.testing.faults import Fault, FaultyDisk, How
from kvtide.testing.tier import Answer, Caller, shaped
from kvtide.tiers.base import NOWHERE, Identity
from kvtide.tiers.format.record import MAGIC
from kvtide.tiers.nvme.directory import Directory
from kvtide.tiers.nvme.journal import HOLDS, RECORD
from kvtide.tiers.nvme.tier import Nvme
from kvtide.tiers.segments import segment_of, slot_of
from kvtide.tiers.syscalls import AnyPath, Disk

BUDGET = 4 << 20
SMALL, LARGE = shaped(4, 4100), shaped(8, 20480)


def opened(
    path: Path, disk: Disk | None = None, budget: int = BUDGET, segment: int = 512 << 10, **options: Any
) -> Caller:
    return Caller(Nvme(path, budget, segment=segment, threads=2, disk=disk, **options))


def found(caller: Caller) -> dict[BlockKey, int]:
    """What the tier says it holds from before."""
    (held,) = caller.tier.scan()
    return dict(zip(held.keys, held.places.tolist(), strict=True))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tier"


def record_at(path: Path, place: int) -> tuple[Path, int, int]:
    """The file of a place, where its record begins, and the size of its slot."""
    directory = Directory(path, Disk())
    file = directory.segment(segment_of(place))
    fd = os.open(file, os.O_RDONLY)
    size = directory.segment_header(fd).size
    os.close(fd)
    return file, ALIGN + slot_of(place) * size, size


def patch(file: Path, at: int, data: bytes) -> None:
    with file.open("r+b") as f:
        f.seek(at)
        f.write(data)


def flip(file: Path, bit: int) -> None:
    with file.open("r+b") as f:
        f.seek(bit // 8)
        (old,) = f.read(1)
        f.seek(bit // 8)
        f.write(bytes([old ^ 1 << bit % 8]))


# -- damage -----------------------------------------------------------------------------------------------


def _truncate(size: Callable[[int], int]) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        file = path / "00000.segment"
        os.truncate(file, size(file.stat().st_size))

    return act


def _swap(path: Path) -> None:
    one, other, aside = path / "00000.segment", path / "00001.segment", path / "aside"
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def _scatter(path: Path) -> None:
    """A bit in every page of a segment."""
    random, file = Random(1), path / "00000.segment"
    for page in range(1, file.stat().st_size // ALIGN):
        flip(file, 8 * ALIGN * page + random.randrange(8 * ALIGN))


def _shift(path: Path) -> None:
    """Every record a slot too far."""
    file = path / "00000.segment"
    data = file.read_bytes()
    size = struct.unpack_from("<Q", data, 16)[0]
    file.write_bytes(data[:ALIGN] + data[-size:] + data[ALIGN:-size])


def _other_directory(what: str) -> Callable[[Path], None]:
    """Files of a directory that other blocks were written to in the same order."""

    def act(path: Path) -> None:
        other = opened(path.parent / "other")
        other.write(keys(12, start=500), SMALL)
        other.write(keys(4, start=600), LARGE)
        other.close()
        for file in (path.parent / "other").glob(what):
            shutil.copy(file, path / file.name)

    return act


def _write(name: str, data: bytes) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        (path / name).write_bytes(data)

    return act


def _copy(path: Path) -> None:
    shutil.copy(path / "00000.segment", path / "00005.segment")


def _folder(path: Path) -> None:
    (path / "journal").unlink()
    (path / "journal").mkdir()


DAMAGE: dict[str, Callable[[Path], None]] = {
    "none": lambda path: None,
    "segment deleted": lambda path: (path / "00000.segment").unlink(),
    "segment empty": _truncate(lambda size: 0),
    "segment of some bytes": _truncate(lambda size: 10),
    "segment without slots": _truncate(lambda size: ALIGN),
    "segment cut in a page": _truncate(lambda size: size // 2 + 77),
    "segment without its last page": _truncate(lambda size: size - ALIGN),
    "segment too long": _truncate(lambda size: size + 999),
    "segment of zeros": _write("00000.segment", bytes(64 << 10)),
    "segment of noise": _write("00000.segment", Random(1).randbytes(64 << 10)),
    "segment header flipped": lambda path: flip(path / "00000.segment", 8 * 20),
    "segment header of an older version": lambda path: patch(path / "00000.segment", 8, b"\0\0"),
    "segments swapped": _swap,
    "segment twice": _copy,
    "a bit in every page": _scatter,
    "records a slot too far": _shift,
    "segments of another directory": _other_directory("*.segment"),
    "journal of another directory": _other_directory("journal"),
    "journal of noise": _write("journal", Random(2).randbytes(5000)),
    "journal empty": _write("journal", b""),
    "journal torn": lambda path: os.truncate(path / "journal", (path / "journal").stat().st_size - 5),
    "journal flipped": lambda path: flip(path / "journal", 8 * 300),
    "journal a folder": _folder,
}


@pytest.mark.parametrize("journal", [True, False], ids=["with journal", "without journal"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_a_miss(path: Path, damage: str, journal: bool) -> None:
    """Whatever was done to the files: it opens, serves what is whole, and goes on."""
    caller = opened(path)
    blocks = dict.fromkeys(keys(12), SMALL) | dict.fromkeys(keys(4, start=100), LARGE)
    for key, who in blocks.items():
        caller.write([key], who)
    caller.close()
    if not journal:
        (path / "journal").unlink()
    if journal or "journal" not in damage:
        DAMAGE[damage](path)

    again = opened(path)
    held = found(again)
    mine = {k: p for k, p in held.items() if k in blocks}
    whole = sum(again.finds([k], blocks[k], [p])[0] for k, p in mine.items())
    # Asked for by a name that it may have been given in error: never the wrong bytes.
    for key, place in held.items():
        for who in (SMALL, LARGE):
            again.finds([key], who, [place])
    untouched = damage in ("none", "segment too long", "segment twice") or "journal" in damage
    if untouched and "another directory" not in damage:
        assert whole == len(blocks)
    # Nothing of the damage is in the way: it fills up, within its budget, and reads what it wrote.
    again.evict(list(held), list(held.values()))
    fresh = again.fill(SMALL, start=1000)
    assert len(fresh) * SMALL.geometry.footprint > 0.7 * BUDGET
    assert all(again.finds(list(fresh), SMALL, list(fresh.values())))
    assert sum(p.stat().st_size for p in path.iterdir() if p.is_file()) <= BUDGET
    again.close()


def test_every_bit_of_a_record_counts(path: Path) -> None:
    """Flipped while the tier is open, anywhere but in the padding, it makes a miss; flipped back, a hit."""
    (key,) = keys(1)
    caller = opened(path, direct=False)  # so that the flip is seen at once
    (place,) = caller.write([key], SMALL)
    file, start, _ = record_at(path, place)
    random = Random(3)
    header = [8 * start + b for b in (*range(0, 8 * 448, 61), *range(8 * 448, 8 * ALIGN, 997))]
    payload = [
        8 * (start + ALIGN + section * SMALL.geometry.stride) + random.randrange(8 * SMALL.geometry.section)
        for section in range(4)
        for _ in range(10)
    ]
    for bit in header + payload:
        flip(file, bit)
        assert caller.finds([key], SMALL, [place]) == [False], bit
        flip(file, bit)
    assert caller.finds([key], SMALL, [place]) == [True]
    reasons = dict(caller.statistics().reasons)
    assert reasons["corrupt payload"] == len(payload)
    assert reasons["corrupt header"] > 30
    caller.close()


def test_a_damaged_section_spoils_no_other(path: Path) -> None:
    (key,) = keys(1)
    caller = opened(path, direct=False)
    (place,) = caller.write([key], SMALL)
    file, start, _ = record_at(path, place)
    flip(file, 8 * (start + ALIGN + 2 * SMALL.geometry.stride) + 5)
    single = [caller.read_item(key, SMALL, place, range(i, i + 1)) for i in range(4)]
    assert caller.read(single) == [True, True, False, True]
    ranges = [range(2), range(1, 3), range(3, 4)]
    assert caller.read([caller.read_item(key, SMALL, place, r) for r in ranges]) == [True, False, True]
    caller.close()


def reseal(record: bytearray) -> bytes:
    record[16:32] = bytes(16)
    record[16:32] = xxh3_128_digest(record[:ALIGN])
    return bytes(record)


@pytest.mark.parametrize(
    ("what", "at", "value"),
    [
        ("version 2", 8, b"\2\0"),
        ("version 0", 8, b"\0\0"),
        ("its key is not here", 12, b"\1\0\0\0"),
        ("unknown flags", 12, b"\2\0\0\0"),
        ("codec 9 is not known here", 144, b"\x09\0"),
        ("another block", 96, b"\x77"),
        ("another layout", 320 + 12, b"\x05"),
        ("corrupt header", 320, struct.pack("<Q", 2 * ALIGN)),
        ("corrupt header", 320, struct.pack("<Q", 1 << 63)),
        ("corrupt header", 320 + 32, struct.pack("<Q", ALIGN)),
        ("corrupt header", 320 + 8, struct.pack("<I", 0)),
        ("corrupt header", 320 + 96, struct.pack("<Q", 100 * ALIGN)),
        ("required field 0x8000 is not known here", 152, struct.pack("<I", 8)),
    ],
)
def test_a_record_that_was_meant_so_is_refused_too(path: Path, what: str, at: int, value: bytes) -> None:
    """Its checksum is right: by a later version, or by a writer that is wrong. A miss, with its reason."""
    (key, other) = keys(2)
    caller = opened(path, direct=False)
    place, other_place = caller.write([key, other], SMALL)
    file, start, _ = record_at(path, place)
    record = bytearray(file.read_bytes()[start : start + ALIGN])
    record[at : at + len(value)] = value
    if "required" in what:
        record[448:456] = struct.pack("<HHI", 0x8000, 0, 0)
    if "codec" in what:  # with a table as a codec would leave it
        record[320 + 8 : 320 + 12] = struct.pack("<I", 4000)
        record[320 + 16 : 320 + 32] = xxh3_128_digest(file.read_bytes()[start + ALIGN : start + ALIGN + 4000])
    patch(file, start, reseal(record))
    for sections in (None, range(1), range(3, 4)):
        assert caller.read([caller.read_item(key, SMALL, place, sections)]) == [False]
    assert caller.finds([other], SMALL, [other_place]) == [True]
    assert dict(caller.statistics().reasons)[what] == 3
    caller.close()


def test_optional_fields_of_a_later_version_are_skipped(path: Path) -> None:
    (key,) = keys(1)
    caller = opened(path, direct=False)
    (place,) = caller.write([key], SMALL)
    file, start, _ = record_at(path, place)
    record = bytearray(file.read_bytes()[start : start + ALIGN])
    record[152:156] = struct.pack("<I", 8 + 40)
    record[448:496] = struct.pack("<HHI", 0x0777, 0, 40) + b"x" * 40
    patch(file, start, reseal(record))
    assert caller.finds([key], SMALL, [place]) == [True]
    caller.close()
    (path / "journal").unlink()
    again = opened(path)
    assert found(again) == {key: place}
    assert again.finds([key], SMALL, [place]) == [True]
    again.close()


def test_a_stale_neighbour_is_never_taken_for_the_block(path: Path) -> None:
    """The record of an earlier write of the same key, put back: its sequence number gives it away."""
    (key,) = keys(1)
    caller = opened(path, direct=False)
    (place,) = caller.write([key], SMALL)
    file, start, size = record_at(path, place)
    old = file.read_bytes()[start : start + size]
    caller.tier.evict(key, place)
    assert caller.write([key], SMALL) == [place]
    patch(file, start, old)
    assert caller.finds([key], SMALL, [place]) == [False]
    assert ("another block", 1) in caller.statistics().reasons
    caller.close()


# -- opening ----------------------------------------------------------------------------------------------


def test_the_headers_alone_tell_everything(path: Path) -> None:
    caller = opened(path)
    names = keys(30)
    for i, key in enumerate(names):
        who = (SMALL, LARGE)[i % 3 == 0]
        item = caller.block(key, who, depth=i)
        caller.start_write(
            [type(item)(key, who, item.span, names[i - 1][:32], i, item.owner, 2e9 + i, i - 10, bytes(4 * i))]
        ).wait()
    caller.close()
    with_journal = opened(path)
    (expected,) = with_journal.tier.scan()
    with_journal.close()
    (path / "journal").unlink()
    again = opened(path)
    (held,) = again.tier.scan()
    order, other = expected.sequences.argsort(), held.sequences.argsort()
    assert [held.keys[i] for i in other] == [expected.keys[i] for i in order] == names
    for column in ("parents", "places", "depths", "expiries", "priorities", "sequences"):
        assert getattr(held, column)[other].tolist() == getattr(expected, column)[order].tolist(), column
    for i, key in enumerate(names):
        place = dict(zip(held.keys, held.places.tolist(), strict=True))[key]
        assert again.finds([key], (SMALL, LARGE)[i % 3 == 0], [place]) == [True]
    again.close()


def test_a_killed_process_loses_nothing_that_was_written(path: Path) -> None:
    disk = FaultyDisk()
    caller = opened(path, disk)
    places = caller.write(keys(10), SMALL)
    disk.die()
    caller.close()
    disk.revive()
    again = opened(path, disk)
    assert found(again) == dict(zip(keys(10), places, strict=True))
    assert all(again.finds(keys(10), SMALL, places))
    again.close()


def test_a_fault_of_ours_costs_a_block_and_hangs_nobody(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Buggy(Disk):
        sick = False

        def read(self, fd: int, into: Sequence[Span], offset: int) -> int:
            return super().read(fd, into, offset) // (0 if self.sick else 1)

        def write(self, fd: int, data: Sequence[Span | bytes], offset: int) -> int:
            return super().write(fd, data, offset) // (0 if self.sick else 1)

    disk = Buggy()
    caller = opened(path, disk)
    places = caller.write(keys(4), SMALL)
    disk.sick = True
    assert not any(caller.finds(keys(4), SMALL, places))
    assert caller.write(keys(30)[20:], SMALL) == [NOWHERE] * 10, "more than there are threads"
    assert "ZeroDivisionError" in caplog.text
    disk.sick = False
    assert all(caller.finds(keys(4), SMALL, places))
    caller.close()


def test_nothing_is_left_open(path: Path) -> None:
    def descriptors() -> list[str]:
        return [target for p in Path("/proc/self/fd").iterdir() if str(path) in (target := _target(p))]

    before = {t.name for t in threading.enumerate()}
    caller = opened(path)
    caller.write(keys(20), SMALL)
    assert descriptors()
    caller.close()
    assert not descriptors()
    assert {t.name for t in threading.enumerate()} == before
    os.truncate(path / "00000.segment", 10)
    opened(path).close()
    assert not descriptors()


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""


# -- the budget -------------------------------------------------------------------------------------------


class Watched(Disk):
    """Weighs the directory after every call that changes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.most = 0
        self.files = 0
        self._lock = threading.Lock()

    def _weigh(self) -> None:
        with self._lock:
            sizes = []
            with os.scandir(self.path) as entries:
                for item in entries:
                    try:
                        sizes.append(item.stat().st_size)
                    except FileNotFoundError:
                        continue  # renamed meanwhile
            self.most = max(self.most, sum(sizes))
            self.files = max(self.files, len(sizes))

    def open(self, path: AnyPath, *, direct: bool, create: bool = False) -> int:
        fd = super().open(path, direct=direct, create=create)
        self._weigh()
        return fd

    def resize(self, fd: int, nbytes: int) -> None:
        super().resize(fd, nbytes)
        self._weigh()

    def write(self, fd: int, data: Sequence[Span | bytes], offset: int) -> int:
        count = super().write(fd, data, offset)
        self._weigh()
        return count

    def append(self, fd: int, data: bytes) -> int:
        count = super().append(fd, data)
        self._weigh()
        return count

    def rename(self, old: AnyPath, new: AnyPath, *, durable: bool = True) -> None:
        self._weigh()
        super().rename(old, new, durable=durable)


class Fifo:
    """Makes room in a tier by evicting what was written first."""

    def __init__(self) -> None:
        self.held: OrderedDict[BlockKey, tuple[int, Identity]] = OrderedDict()
        self.caller: Caller
        self._lock = threading.Lock()

    def __call__(self, size: int, count: int, owner: int) -> bool:
        with self._lock:
            first = [self.held.popitem(last=False) for _ in range(min(count, len(self.held)))]
        for key, (place, _) in first:
            self.caller.tier.evict(key, place)
        return bool(first)

    def write(self, names: Sequence[BlockKey], who: Identity) -> int:
        places = self.caller.write(names, who)
        with self._lock:
            self.held.update((k, (p, who)) for k, p in zip(names, places, strict=True) if p != NOWHERE)
        return sum(p != NOWHERE for p in places)

    def check(self) -> None:
        for key, (place, who) in self.held.items():
            assert self.caller.finds([key], who, [place]) == [True]


@pytest.mark.parametrize("compression", ["raw", "zstd"])
def test_files_never_exceed_the_budget(path: Path, compression: str) -> None:
    """While full, evicting, changing slot sizes, compacting the journal, dropping: after every call to the disk."""
    budget = 2 << 20
    fifo, disk = Fifo(), Watched(path)
    caller = fifo.caller = opened(path, disk, budget, compression=compression, evict=fifo)
    tiny = shaped(1, 100)
    for turn in range(8):
        who = (tiny, LARGE, SMALL)[turn % 3]
        blocks = 3 * budget // (who.geometry.footprint + ALIGN)
        for i in range(0, blocks, 4):
            names = keys(min(4, blocks - i), start=10_000 * turn + i)
            assert fifo.write(names, who) == len(names)
        caller.statistics()
        key, (place, _) = fifo.held.popitem()
        assert caller.drop((key, place)) == [True]
        assert len({w for _, w in fifo.held.values()}) == 1  # this size has all of it
        assert len(fifo.held) * (who.geometry.footprint + ALIGN) > 0.6 * budget
    fifo.check()
    caller.close()
    assert 0.8 * budget < disk.most <= budget
    # A handful of files, not one for each block.
    assert disk.files <= budget // (512 << 10) + 12
    again = opened(path, Watched(path), budget)
    assert set(found(again)) == set(fifo.held)
    fifo.caller = again
    fifo.check()
    again.close()


def test_the_journal_gives_its_room_back(path: Path) -> None:
    """Many small slots need a long journal; when large ones take their place, its bytes are theirs too."""
    budget, tiny = 24 << 20, shaped(1, 100)
    fifo, disk = Fifo(), Watched(path)
    caller = fifo.caller = opened(path, disk, budget, evict=fifo)
    written = 0
    while (path / "journal").stat().st_size < 700_000:
        assert fifo.write(keys(100, start=written), tiny) == 100
        written += 100
    for i in range(0, 200, 10):
        assert fifo.write(keys(10, start=100_000 + i), LARGE) == 10
    assert (path / "journal").stat().st_size < 200_000
    assert 0.95 * budget < disk.most <= budget
    caller.close()


def test_a_smaller_budget_frees_files_at_opening(path: Path) -> None:
    caller = opened(path)
    held = caller.fill(SMALL)
    caller.close()
    budget = BUDGET // 3
    again = opened(path, budget=budget)
    assert sum(p.stat().st_size for p in path.iterdir()) <= budget
    kept = found(again)
    assert 0 < len(kept) < len(held)
    assert all(again.finds(list(kept), SMALL, list(kept.values())))
    again.close()


def test_room_is_made_by_whoever_was_asked(path: Path) -> None:
    """One slot size after another, always with room made by the caller's evictor; nobody else's block is lost."""
    fifo = Fifo()
    caller = fifo.caller = opened(path, evict=fifo)
    for turn in range(6):
        who = (SMALL, LARGE)[turn % 2]
        for i in range(40):
            assert fifo.write(keys(2, start=1000 * turn + 2 * i), who) == 2
        fifo.check()
    caller.close()


# -- what is dropped stays gone ---------------------------------------------------------------------------


def gone(path: Path, key: BlockKey, disk: Disk | None = None) -> bool:
    """Whether a block is unknown, with the journal and without."""
    for _ in range(2):
        caller = opened(path, disk)
        held = found(caller)
        caller.close()
        if key in held:
            return False
        (path / "journal").unlink()
    return True


def test_dropped(path: Path) -> None:
    key, other = keys(2)
    caller = opened(path)
    place, _ = caller.write([key, other], SMALL)
    assert caller.drop((key, place)) == [True]
    caller.close()
    assert gone(path, key)
    assert not gone(path, other)


def test_dropped_after_it_was_evicted(path: Path) -> None:
    """Its header lies in a free slot, where only the headers' reader would find it."""
    key, other = keys(2)
    caller = opened(path)
    place, _ = caller.write([key, other], SMALL)
    caller.tier.evict(key, place)
    assert caller.drop((key, NOWHERE)) == [True]
    caller.close()
    assert gone(path, key)


def test_evicted_then_dropped_by_the_next_opener(path: Path) -> None:
    (key,) = keys(1)
    caller = opened(path)
    (place,) = caller.write([key], SMALL)
    caller.tier.evict(key, place)
    caller.close()
    again = opened(path)
    assert found(again) == {}
    assert again.drop((key, NOWHERE)) == [True]
    again.close()
    assert gone(path, key)


def test_all_copies_are_dropped(path: Path) -> None:
    """Evicted from one slot and written to another: both headers name it, and the newer one counts."""
    key, *others = keys(6)
    caller = opened(path)
    (first,) = caller.write([key], SMALL)
    places = caller.write(others, SMALL)
    caller.tier.evict(key, first)
    caller.tier.evict(others[0], places[0])
    (second,) = caller.write([key], SMALL)
    assert second != first
    caller.close()
    (path / "journal").unlink()
    again = opened(path)
    assert found(again)[key] == second
    assert again.drop((key, second)) == [True]
    again.close()
    assert gone(path, key)


def test_dropped_after_its_segment_was_cut_anew(path: Path) -> None:
    """Sequence numbers go on across openings, or an old record would pass for one of the new cut."""
    caller = opened(path)
    held = caller.fill(SMALL)
    caller.evict(list(held), list(held.values()))
    caller.close()
    again = opened(path)
    more = again.fill(LARGE, start=1000)
    assert all(again.drop(*[(k, NOWHERE) for k in held]))
    again.close()
    (path / "journal").unlink()
    last = opened(path)
    assert found(last) == more
    assert all(last.finds(list(more), LARGE, list(more.values())))
    last.close()


class KilledAfterHeader(FaultyDisk):
    """Dies when the journal is about to learn that a slot holds a block."""

    armed = False

    def append(self, fd: int, data: bytes) -> int:
        frame = 16
        if self.armed and (np.frombuffer(data[frame:], RECORD)["kind"] == HOLDS).any():
            self.die()
        return super().append(fd, data)


def test_dropped_after_its_writer_was_killed(path: Path) -> None:
    """Header written, journal not: nobody holds the block, but its header names it."""
    disk = KilledAfterHeader()
    caller = opened(path, disk)
    other, key = keys(2)
    caller.write([other], SMALL)
    disk.armed = True
    caller.write([key], SMALL)
    caller.close()
    disk.armed = False
    disk.revive()
    file = path / "00000.segment"
    assert file.read_bytes().count(MAGIC) == 2  # the header is there
    again = opened(path, disk)
    assert set(found(again)) == {other}  # the journal was believed
    assert again.drop((key, NOWHERE)) == [True]
    again.close()
    assert gone(path, key, disk)


def test_dropped_after_its_write_failed(path: Path) -> None:
    """The disk reported an error for the header, but wrote it."""

    class Liar(Disk):
        armed = False

        def write(self, fd: int, data: Sequence[Span | bytes], offset: int) -> int:
            count = super().write(fd, data, offset)
            if self.armed and bytes(data[0][:8]) == MAGIC:
                raise OSError(errno.EIO, "but it is written")
            return count

    disk = Liar()
    caller = opened(path, disk)
    (key,) = keys(1)
    disk.armed = True
    assert caller.write([key], SMALL) == [NOWHERE]
    disk.armed = False
    assert (path / "00000.segment").read_bytes().count(MAGIC) == 1
    assert caller.drop((key, NOWHERE)) == [True]
    assert (path / "00000.segment").read_bytes().count(MAGIC) == 0
    caller.close()
    assert gone(path, key)


@pytest.mark.parametrize("killed", [False, True], ids=["", "killed before"])
@pytest.mark.parametrize("what", ["held", "evicted", "overwritten"])
@pytest.mark.parametrize("seed", range(6))
def test_a_power_loss_brings_no_dropped_block_back(path: Path, seed: int, what: str, killed: bool) -> None:
    """Also not one whose header was overwritten by another block, if that write is undone."""
    disk = FaultyDisk(seed)
    caller = opened(path, disk)
    names = keys(3)
    places = caller.write(names, SMALL)
    caller.close()  # by now they are on the medium
    caller = opened(path, disk)
    found(caller)
    if what != "held":
        caller.tier.evict(names[0], places[0])
    if what == "overwritten":
        assert caller.write(keys(1, start=100), SMALL) == [places[0]]
    if killed:  # and the next process cannot know what of that is on the medium
        disk.die()
        caller.close()
        disk.revive()
        caller = opened(path, disk)
    # Killed before the journal knew of the eviction, it is held again.
    place = found(caller).get(names[0], NOWHERE) if killed else places[0] if what == "held" else NOWHERE
    assert caller.drop((names[0], place)) == [True]
    caller.write(keys(3, start=200), SMALL)
    disk.die()
    caller.close()
    disk.power_loss()
    again = opened(path, disk)
    held = found(again)
    assert names[0] not in held
    assert held.keys() >= set(names[1:])
    assert all(again.finds(names[1:], SMALL, [held[k] for k in names[1:]]))
    again.close()


def test_a_drop_that_the_disk_refused_says_so(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = FaultyDisk()
    caller = opened(path, disk)
    names = keys(3)
    places = caller.write(names, SMALL)
    disk.arm(Fault("write", files="*.segment"))
    assert caller.drop((names[0], places[0]), (names[1], places[1])) == [False, True]
    disk.arm(Fault("sync", files="*.segment"))
    assert caller.drop((names[2], places[2])) == [False]
    assert caller.finds(names, SMALL, places) == [False] * 3
    # Asked again, it finishes.
    assert caller.drop((names[0], NOWHERE), (names[2], NOWHERE)) == [True, True]
    caller.close()
    assert all(gone(path, k) for k in names)
    assert "could not overwrite" in caplog.text
    assert "could not sync" in caplog.text


# -- a disk that fails ------------------------------------------------------------------------------------


def test_without_direct_io_it_warns_once_and_works(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class NoDirect(Disk):
        def open(self, path: AnyPath, *, direct: bool, create: bool = False) -> int:
            if direct:
                raise OSError(errno.EINVAL, "no O_DIRECT here")
            return super().open(path, direct=direct, create=create)

    caller = opened(path, NoDirect())
    names = keys(30)
    assert all(caller.finds(names, SMALL, caller.write(names, SMALL)))
    caller.close()
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "no direct I/O" in warnings[0].getMessage()
    assert not (path / "probe").exists()


def test_direct_io_is_used_where_there_is_some(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caller = opened(path)
    caller.write(keys(1), SMALL)
    flags = {
        int(line.split()[1], 8) & os.O_DIRECT
        for link in Path("/proc/self/fd").iterdir()
        if _target(link).endswith(".segment")
        for line in Path(f"/proc/self/fdinfo/{link.name}").read_text().splitlines()
        if line.startswith("flags")
    }
    caller.close()
    probe = Directory(path, Disk()).direct_works()
    assert flags == ({os.O_DIRECT} if probe else {0})
    assert bool(caplog.records) != probe


def test_a_full_disk_refuses_blocks_and_recovers(path: Path) -> None:
    disk = FaultyDisk()
    caller = opened(path, disk)
    disk.arm(Fault("resize", code=errno.ENOSPC, times=1 << 30))
    assert caller.write(keys(1), SMALL) == [NOWHERE]
    assert caller.write(keys(1), SMALL) == [NOWHERE]
    disk.disarm()
    reasons = dict(caller.statistics().reasons)
    assert reasons["segment: No space left on device"] == 2
    assert reasons["write: No space left on device"] == 2
    assert caller.statistics().bytes_used == 0
    places = caller.write(keys(5), SMALL)
    assert all(caller.finds(keys(5), SMALL, places))
    caller.close()


@pytest.mark.parametrize("how", [How.FAIL, How.SHORT, How.TORN, How.LIE, How.FLIP])
@pytest.mark.parametrize("after", [0, 1])
def test_a_failed_write_leaves_nothing_that_is_wrong(path: Path, how: How, after: int) -> None:
    """``after``: the payload fails, or the header. What the disk hides is found when the block is read."""
    disk = FaultyDisk(seed=5)
    caller = opened(path, disk, direct=False)
    first, key = keys(2)
    (kept,) = caller.write([first], SMALL)
    disk.arm(Fault("write", how, files="*.segment", after=after))
    (place,) = caller.write([key], SMALL)
    if how in (How.FAIL, How.TORN):
        assert place == NOWHERE
        assert caller.statistics().failed_writes == 1
        assert caller.statistics().blocks == 1
    readable = caller.finds([key], SMALL, [place])
    assert readable == [True] or how is not How.SHORT
    assert readable == [False] or how in (How.SHORT, How.LIE)  # the end of a header is zeros, written or not
    assert caller.finds([first], SMALL, [kept]) == [True]
    disk.disarm()
    (again,) = caller.write([key], SMALL)
    assert caller.finds([key], SMALL, [again]) == [True]
    caller.close()


@pytest.mark.parametrize("how", [How.FAIL, How.SHORT, How.TORN, How.FLIP])
def test_a_failed_read_is_a_miss(path: Path, how: How) -> None:
    disk = FaultyDisk(seed=2)
    caller = opened(path, disk)
    places = caller.write(keys(1), LARGE)  # without padding: every bit counts
    disk.arm(Fault("read", how, files="*.segment", times=20))
    assert not any(caller.finds(keys(1), LARGE, places)[0] for _ in range(20))
    disk.disarm()
    assert caller.statistics().failed_reads == 20
    assert caller.finds(keys(1), LARGE, places) == [True]
    caller.close()


def test_durable_syncs_before_it_answers(path: Path) -> None:
    disk = FaultyDisk()
    caller = opened(path, disk, durable=True)
    caller.write(keys(1), SMALL)
    with disk.gate("sync", "*.segment") as gate:
        answer = caller.start_write([caller.block(k, SMALL) for k in keys(3, start=10)])
        assert gate.wait_for(1)
        assert not answer._calls
    places = answer.wait()
    disk.die()
    caller.close()
    disk.power_loss()
    again = opened(path, disk)
    assert found(again).items() >= dict(zip(keys(3, start=10), places, strict=True)).items()
    assert all(again.finds(keys(3, start=10), SMALL, places))
    again.close()


def test_a_sync_on_request_covers_what_was_written_and_nothing_else(path: Path) -> None:
    disk = FaultyDisk()
    caller = opened(path, disk)
    tier = caller.tier
    assert isinstance(tier, Nvme)
    places = caller.write(keys(3), SMALL)

    def sync(*items: tuple[BlockKey, int]) -> list[bool]:
        answers: SimpleQueue[Sequence[bool]] = SimpleQueue()
        tier.sync(items, answers.put)
        return list(answers.get(timeout=30))

    held = list(zip(keys(3), places, strict=True))
    assert sync() == []
    assert sync(held[0], (keys(9)[8], NOWHERE), (keys(9)[7], 77 << 32)) == [True, False, False]
    tier.evict(*held[1])
    assert sync(*held) == [True, False, True]
    disk.arm(Fault("sync", files="*.segment"))
    assert sync(held[0]) == [False]
    assert sync(*held) == [False, False, False], "a sync that goes well later does not bring back what was lost"
    (place,) = caller.write(keys(1, start=10), SMALL)
    assert sync((keys(1, start=10)[0], place), held[0]) == [True, False]
    caller.close()


def test_a_sync_does_not_answer_for_a_record_that_took_the_slot_meanwhile(path: Path) -> None:
    disk = FaultyDisk()
    caller = opened(path, disk)
    tier = caller.tier
    assert isinstance(tier, Nvme)
    (place,) = caller.write(keys(1), SMALL)
    answers: SimpleQueue[Sequence[bool]] = SimpleQueue()
    with disk.gate("sync", "*.segment") as gate:
        tier.sync([(keys(1)[0], place)], answers.put)
        assert gate.wait_for(1)
        tier.evict(keys(1)[0], place)
        assert caller.write(keys(1, start=10), SMALL) == [place], "another block has the slot"
    assert list(answers.get(timeout=30)) == [False]
    caller.close()


def test_what_cannot_be_synced_is_not_acknowledged(path: Path) -> None:
    disk = FaultyDisk()
    caller = opened(path, disk, durable=True)
    first = caller.write(keys(1), SMALL)
    disk.arm(Fault("sync", files="*.segment"))
    assert caller.write(keys(2, start=10), SMALL) == [NOWHERE, NOWHERE]
    assert caller.statistics().blocks == 1
    assert ("sync: Input/output error", 1) in caller.statistics().reasons
    caller.close()
    again = opened(path, disk)
    assert found(again) == {keys(1)[0]: first[0]}
    again.close()


@pytest.mark.parametrize("seed", range(8))
def test_a_file_whose_name_could_not_be_synced_is_not_trusted(path: Path, seed: int) -> None:
    disk = FaultyDisk(seed)
    caller = opened(path, disk, durable=True)
    disk.arm(Fault("sync", How.FAIL, errno.EIO, path.name))
    assert caller.write(keys(1), SMALL) == [NOWHERE]
    (place,) = caller.write(keys(1), SMALL)
    assert place != NOWHERE
    disk.die()
    caller.close()
    disk.power_loss()
    again = opened(path, disk)
    assert keys(1)[0] in found(again), "it was acknowledged"
    again.close()


@pytest.mark.parametrize("refused", [None, *range(8)], ids=lambda n: "" if n is None else f"after sync {n}")
@pytest.mark.parametrize("seed", range(3))
def test_segments_that_were_given_up_take_no_room_after_a_power_loss(
    path: Path, seed: int, refused: int | None
) -> None:
    """Several small ones make room for a large one; if they came back too, others would be over the budget."""
    disk, clock = FaultyDisk(seed), FakeClock()
    caller = opened(path, disk, 1 << 20, segment=4 * ALIGN, durable=True, clock=clock)
    held = caller.fill(SMALL)
    evicted = list(held)[:6]
    caller.evict(evicted, [held.pop(key) for key in evicted])
    if refused is not None:
        disk.arm(Fault("sync", files="*.segment", after=refused, times=2))
    (key,) = keys(1, start=1000)
    for _ in range(3):
        (place,) = caller.write([key], LARGE)
        if place != NOWHERE:
            break
        clock.advance(60)  # a disk that refused is not asked again at once
    assert place != NOWHERE
    held[key] = place
    disk.die()
    caller.close()
    disk.power_loss()
    again = opened(path, disk, 1 << 20)
    assert found(again).items() >= held.items(), "they were acknowledged"
    again.close()


def test_a_lost_journal_costs_only_time(path: Path) -> None:
    """The disk refuses to append: it is removed, and the next opener reads the headers."""
    disk = FaultyDisk()
    caller = opened(path, disk)
    held = dict(zip(keys(4), caller.write(keys(4), SMALL), strict=True))
    disk.arm(Fault("append", code=errno.ENOSPC, times=1))
    held |= dict(zip(keys(4, start=50), caller.write(keys(4, start=50), SMALL), strict=True))
    assert not (path / "journal").exists()
    caller.tier.evict(*held.popitem())
    assert all(caller.finds(list(held), SMALL, list(held.values())))
    caller.close()
    again = opened(path, disk)
    assert held.items() <= found(again).items()
    assert all(again.finds(list(held), SMALL, list(held.values())))
    again.close()


def test_an_answer_does_not_wait_for_other_batches(path: Path) -> None:
    """Submitting never blocks, however slow the disk; what is fast is answered first."""
    disk = FaultyDisk()
    caller = opened(path, disk)
    (place,) = caller.write(keys(1), SMALL)
    with disk.gate("write", "*.segment") as gate:
        slow = caller.start_write([caller.block(k, SMALL) for k in keys(1, start=10)])
        assert gate.wait_for(1)
        queued: list[Answer[int]] = []
        assert caller.finds(keys(1), SMALL, [place]) == [True]
        queued += [caller.start_write([caller.block(k, SMALL)]) for k in keys(20, start=20)]
        caller.tier.evict(keys(1)[0], place)
        caller.statistics()
        assert not slow._calls
    assert NOWHERE not in [p for answer in (slow, *queued) for p in answer.wait()]
    caller.close()


def test_what_is_called_soon_goes_before_what_waits(path: Path) -> None:
    tier = Nvme(path, 16 << 20, segment=1 << 20, threads=1)
    busy, gates, over, called = threading.Barrier(3), [threading.Event(), threading.Event()], threading.Event(), []

    def hold(gate: threading.Event, _: object) -> None:
        busy.wait(60)
        gate.wait(60)

    for gate in gates:  # both of its threads
        tier.sync([], partial(hold, gate))
    busy.wait(60)
    for _ in range(4):
        tier.sync([], lambda _: called.append("sync"))
    tier.call_soon(lambda: called.append("soon"))
    tier.sync([], lambda _: over.set())
    gates[0].set()
    assert over.wait(60)
    gates[1].set()
    tier.close()
    assert called == ["soon", *["sync"] * 4]


def test_what_is_shredded_is_not_what_another_has_just_written(tmp_path: Path) -> None:
    """A slot with a payload still has the header of the block before it."""
    tier = Nvme(tmp_path / "tier", BUDGET, segment=1 << 20, threads=2)
    caller = Caller(tier)
    old, new = keys(2)
    (place,) = caller.write([old], SMALL)
    tier.evict(old, place)
    volume = tier._volume
    size = volume.find([place])[0][2] or volume.segments[segment_of(place)].size
    assert list(volume.take(size, [1], None)) == [place]
    ((fd, offset, _),) = volume.begin([new], [place])
    payload = aligned(ALIGN)
    payload[:] = b"new!" * (ALIGN // 4)
    volume.write(fd, [payload], offset + ALIGN)
    assert tier.shred(lambda page: bytes(page[:8]) == MAGIC) == ([], [])
    found = aligned(2 * ALIGN)
    assert volume.read(fd, [found], offset) == 2 * ALIGN
    assert bytes(found[:ALIGN]) == bytes(ALIGN), "the old one is named no more"
    assert found[ALIGN:] == payload
    volume.failed(place)
    (place,) = caller.write([old], SMALL)
    assert tier.shred(lambda page: bytes(page[:8]) == MAGIC) == ([place], [])
    caller.close()


def test_a_segment_that_cannot_be_read_is_left_alone(tmp_path: Path) -> None:
    caller = Caller(Nvme(tmp_path / "tier", BUDGET, segment=1 << 20, threads=2))
    names = keys(3)
    caller.write(names, SMALL)
    caller.close()
    before = {file.name: file.read_bytes() for file in (tmp_path / "tier").glob("*.segment")}
    disk = FaultyDisk()
    disk.arm(Fault("read", How.FAIL, errno.EIO, files="*.segment"))
    with pytest.raises(TierError, match=r"Input/output error\. Nothing was touched"):
        Nvme(tmp_path / "tier", BUDGET, segment=1 << 20, threads=2, disk=disk)
    assert {file.name: file.read_bytes() for file in (tmp_path / "tier").glob("*.segment")} == before
    again = Caller(Nvme(tmp_path / "tier", BUDGET, segment=1 << 20, threads=2))
    assert sum(len(held.keys) for held in again.tier.scan()) == 3
    again.close()
