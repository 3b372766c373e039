"""A directory is opened by one process, of a version that knows it, or left exactly as it was."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from xxhash import xxh3_128_digest

from kvtide.block import ALIGN
from kvtide.errors import ConfigError, TierError, TierLockedError, TierVersionError
from kvtide.testing.blocks import keys
from kvtide.testing.tier import GEOMETRIES, Caller, shaped
from kvtide.tiers.format.record import Header, Rejected
from kvtide.tiers.nvme.directory import FORMAT, Directory, SegmentHeader
from kvtide.tiers.nvme.tier import Nvme
from kvtide.tiers.syscalls import Disk

BUDGET = 4 << 20
WHO = GEOMETRIES["padded sections"]


def opened(path: Path, budget: int = BUDGET) -> Nvme:
    return Nvme(path, budget, segment=512 << 10, threads=2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A directory with a few blocks in it."""
    caller = Caller(opened(tmp_path / "tier"))
    caller.write(keys(5), WHO)
    caller.write(keys(2, start=10), GEOMETRIES["pages without padding"])
    caller.close()
    return tmp_path / "tier"


def snapshot(path: Path) -> dict[str, tuple[bytes, int]]:
    """Every file, its bytes and when it was last changed."""
    return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in path.iterdir() if p.is_file() and p.name != "lock"}


# -- the lock ---------------------------------------------------------------------------------------------


def test_opened_twice_in_one_process(path: Path) -> None:
    first = opened(path)
    with pytest.raises(TierLockedError, match=f"pid {os.getpid()}"):
        opened(path)
    # The one that was refused has not disturbed the other, nor let its lock go.
    caller = Caller(first)
    places = caller.write(keys(1, start=50), WHO)
    assert caller.finds(keys(1, start=50), WHO, places) == [True]
    with pytest.raises(TierLockedError):
        opened(path)
    caller.close()
    opened(path).close()


HOLDER = """
import sys
from pathlib import Path
from kvtide.tiers.nvme.tier import Nvme
tier = Nvme(Path(sys.argv[1]), int(sys.argv[2]), segment=512 << 10)
print("open", flush=True)
sys.stdin.read()
"""


def test_opened_in_another_process(path: Path) -> None:
    arguments = [sys.executable, "-c", HOLDER, str(path), str(BUDGET)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        before = snapshot(path)
        with pytest.raises(TierLockedError, match=f"pid {holder.pid}") as e:
            opened(path)
        assert str(path) in str(e.value)
        assert snapshot(path) == before
        # Killed, it holds nothing any more, and nobody has to clean up after it.
        os.kill(holder.pid, signal.SIGKILL)
    caller = Caller(opened(path))
    (held,) = caller.tier.scan()
    assert len(held.keys) == 7
    caller.close()


# -- versions ---------------------------------------------------------------------------------------------


def test_a_newer_directory_is_left_untouched(path: Path) -> None:
    (path / "kvtide.json").write_text(json.dumps({"format": "kvtide nvme", "version": FORMAT + 1, "more": [1, 2]}))
    before, names = snapshot(path), sorted(path.iterdir())
    with pytest.raises(TierVersionError, match=f"format {FORMAT + 1}"):
        opened(path)
    assert snapshot(path) == before
    assert sorted(path.iterdir()) == names


def newer_segment(page: bytes) -> bytes:
    """A segment header as a later version might write it: ours, with its number and a right checksum."""
    head = bytearray(page[:48])
    struct.pack_into("<H", head, 8, FORMAT + 1)
    head[32:48] = bytes(16)
    head[32:48] = xxh3_128_digest(head)
    return bytes(head) + page[48:]


def test_a_newer_segment_stops_the_opening_before_anything_is_touched(path: Path) -> None:
    segments = sorted(path.glob("*.segment"))
    assert len(segments) >= 2
    data = segments[-1].read_bytes()
    segments[-1].write_bytes(newer_segment(data[:ALIGN]) + data[ALIGN:])
    # Damage that would otherwise be cleaned up, in a segment that is looked at before.
    segments[0].write_bytes(b"garbage" + segments[0].read_bytes()[7:])
    (path / "journal").unlink()
    before = snapshot(path)
    with pytest.raises(TierVersionError, match=f"format {FORMAT + 1}.*nothing was touched"):
        opened(path)
    assert snapshot(path) == before
    with pytest.raises(TierVersionError):  # and it holds no lock
        opened(path)


# -- what is not ours -------------------------------------------------------------------------------------


def test_a_directory_with_other_things_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(TierError, match=r"thesis\.tex"):
        opened(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        '{"format": "kvtide nvme"}',
        '{"format": "other", "version": 1}',
        '{"format": "kvtide nvme", "version": "1"}',
        '{"format": "kvtide nvme", "version": null}',
        "\xff\xfe",
    ],
)
def test_a_damaged_description_is_refused(path: Path, text: str) -> None:
    (path / "kvtide.json").write_bytes(text.encode("latin-1"))
    before = snapshot(path)
    with pytest.raises(TierError, match=r"kvtide\.json is damaged or not kvtide's"):
        opened(path)
    assert snapshot(path) == before
    # Its advice works.
    (path / "kvtide.json").write_text('{"format": "kvtide nvme", "version": 1}')
    caller = Caller(opened(path))
    (held,) = caller.tier.scan()
    assert len(held.keys) == 7
    caller.close()


def test_a_lost_description_is_refused(path: Path) -> None:
    """Without it nobody knows the version: better to ask than to wipe a directory of blocks."""
    (path / "kvtide.json").unlink()
    before = snapshot(path)
    with pytest.raises(TierError, match="not empty"):
        opened(path)
    assert snapshot(path) == before


def test_paths_that_cannot_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(TierError, match="cannot make the directory"):
            opened(path)
    (tmp_path / "tier" / "lock").mkdir(parents=True)
    with pytest.raises(TierError, match="cannot lock"):
        opened(tmp_path / "tier")
    (tmp_path / "more" / "kvtide.json").mkdir(parents=True)
    with pytest.raises(TierError, match=r"cannot read .*kvtide\.json"):
        opened(tmp_path / "more")


def test_a_segment_that_cannot_be_opened_is_an_error_and_frees_the_lock(path: Path) -> None:
    (path / "00007.segment").mkdir()
    for _ in range(2):
        with pytest.raises(TierError, match="cannot open"):
            opened(path)
    (path / "00007.segment").rmdir()
    opened(path).close()


def test_a_killed_creation_is_finished(tmp_path: Path) -> None:
    (tmp_path / "kvtide.json.new").write_text("{")
    (tmp_path / "lock").write_text("1\n")
    opened(tmp_path).close()
    assert json.loads((tmp_path / "kvtide.json").read_text()) == {"format": "kvtide nvme", "version": FORMAT}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["journal", "kvtide.json", "lock"]


def test_files_of_others_stay(path: Path) -> None:
    """Names that look a little like ours are not ours."""
    strange = [
        "x.segment",
        "1.segment",
        "-0001.segment",
        "00001.segment.bak",
        "0000١.segment",
        "notes.txt",
        "000001.segment",
    ]
    for name in strange:
        (path / name).write_bytes(b"mine")
    (path / "folder").mkdir()
    caller = Caller(opened(path))
    (held,) = caller.tier.scan()
    assert len(held.keys) == 7
    caller.fill(WHO, start=100)
    caller.close()
    assert all((path / name).read_bytes() == b"mine" for name in strange)


def test_a_budget_too_small_for_anything_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too small"):
        opened(tmp_path / "tier", 1 << 19)
    assert not (tmp_path / "tier").exists()


# -- segment headers --------------------------------------------------------------------------------------


def test_a_segment_header_is_what_was_packed() -> None:
    header = SegmentHeader(size=3 * ALIGN, slots=77, cut=1 << 40)
    page = header.pack()
    assert len(page) == ALIGN
    assert SegmentHeader.parse(page) == header
    assert header.nbytes == ALIGN + 77 * 3 * ALIGN
    # As a reader of another program would see it.
    assert struct.unpack_from("<8sHHIQQ", page) == (b"KVTIDE\nS", 1, 0, 77, 3 * ALIGN, 1 << 40)


def test_every_bit_of_a_segment_header_counts() -> None:
    page = bytearray(SegmentHeader(size=3 * ALIGN, slots=77, cut=5).pack())
    for bit in range(8 * 48):
        page[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Rejected):
            SegmentHeader.parse(bytes(page))
        page[bit // 8] ^= 1 << bit % 8
    for length in range(48):
        with pytest.raises(Rejected, match="torn"):
            SegmentHeader.parse(bytes(page[:length]))


# -- what the headers say ---------------------------------------------------------------------------------


def test_token_ids_are_in_the_header_area(tmp_path: Path) -> None:
    """More of them than a header's first page holds; the block reads as any other."""
    who, (few, many) = shaped(3, 5000), keys(2)
    caller = Caller(opened(tmp_path / "tier"))
    items = [caller.block(few, who), caller.block(many, who)]
    tokens = [struct.pack("<4I", 9, 8, 7, 6), struct.pack("<2000I", *range(2000))]
    places = [
        caller.start_write([type(i)(i.key, i.identity, i.span, i.parent, i.depth, i.owner, tokens=t)]).wait()[0]
        for i, t in zip(items, tokens, strict=True)
    ]
    assert caller.finds([few, many], who, places) == [True, True]
    assert caller.read([caller.read_item(many, who, places[1], range(1, 3))]) == [True]
    caller.close()
    directory = Directory(tmp_path / "tier", Disk())
    found = {}
    for number in directory.segments():
        fd = os.open(directory.segment(number), os.O_RDONLY)
        for _, header in directory.records(fd, directory.segment_header(fd)):
            assert isinstance(header, Header)
            found[header.key] = header.tokens
        os.close(fd)
    assert found == {few: tokens[0], many: tokens[1]}
