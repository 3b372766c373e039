"""An attacker who can write to our storage, and has no keys, can cost us blocks, and nothing else.

In each test the attacker plants one thing in the real folder of a tier. The tests assert what the other users still
have: opening ends, which blocks they get, how much memory it takes, nothing outside the folder was touched, and blocks
that are stored afterwards are found again.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from xxhash import xxh3_128_digest

from kvtide.block import ALIGN, BlockKey
from kvtide.errors import TierError
from kvtide.security.key_ring import KeyRing
from kvtide.testing.blocks import keys
from kvtide.testing.caller import CallerAnswer
from kvtide.testing.clock import FakeClock
from kvtide.testing.keys import ring_in
from kvtide.testing.tier import Caller, shaped
from kvtide.tiers.base import NOWHERE, FoundBlock
from kvtide.tiers.format.encryption import OPEN, Encryption
from kvtide.tiers.nvme.directory import SegmentHeader
from kvtide.tiers.nvme.journal import FREED, HOLDS, RECORD, Journal, boot_id, entry
from kvtide.tiers.nvme.tier import Nvme
from kvtide.tiers.shared.budget import BudgetCoordinator, CoordinationBlobs
from kvtide.tiers.shared.files import Files
from kvtide.tiers.shared.tier import Shared
from kvtide.tiers.syscalls import Disk

WHO = shaped(4, 5000)
OTHER = shaped(2, 9000)
"""Blocks of another size, and so in another segment."""
BUDGET = 4 << 20
GIANT = 1 << 30
"""Bytes of a file that takes none on the disk."""
SMALL = 128 << 20
"""What no opening of these few blocks takes more of."""
PATIENCE = 60.0

T = TypeVar("T")


def ends(call: Callable[[], T]) -> T:
    """What a call answers or raises; it must end."""
    answers: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            answers.append(call())
        except Exception as e:  # noqa: BLE001 - it is raised where it is waited for
            errors.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]
    return answers[0]


@contextmanager
def takes_little() -> Iterator[None]:
    """Resident memory does not grow by a giant meanwhile."""

    def most() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before = most()
    yield
    assert most() - before < SMALL


def outside(tmp_path: Path) -> Path:
    """A file of ours that is no business of the storage's."""
    file = tmp_path / "outside"
    file.write_text("precious")
    return file


# -- NVMe -----------------------------------------------------------------------------------------------------


def opened(path: Path, encryption: Encryption = OPEN) -> Caller:
    return ends(lambda: Caller(Nvme(path / "tier", BUDGET, segment=1 << 20, threads=2, encryption=encryption)))


def found(caller: Caller) -> dict[BlockKey, int]:
    return {k: p for held in caller.tier.scan() for k, p in zip(held.keys, held.places.tolist(), strict=True)}


def good(caller: Caller) -> set[BlockKey]:
    """The blocks that are found, of which each can be read."""
    places = found(caller)
    who = [WHO if caller.finds([k], WHO, [p]) == [True] else OTHER for k, p in places.items()]
    batch = [caller.read_item(k, w, p) for w, (k, p) in zip(who, places.items(), strict=True)]
    assert caller.read(batch) == [True] * len(places)
    return set(places)


def fill(path: Path, encryption: Encryption = OPEN) -> None:
    caller = opened(path, encryption)
    assert NOWHERE not in caller.write(keys(10), WHO)
    assert NOWHERE not in caller.write(keys(5, start=50), OTHER)
    caller.close()


ALL = {*keys(10), *keys(5, start=50)}
LATER = keys(5, start=100)


def goes_on(path: Path, expected: set[BlockKey], encryption: Encryption = OPEN) -> None:
    """These blocks are there, more can be stored, and all are found again, with the journal and without."""
    caller = opened(path, encryption)
    assert good(caller) == expected
    places = caller.write(LATER, WHO)
    assert NOWHERE not in places
    assert caller.finds(LATER, WHO, places) == [True] * 5
    caller.close()
    for journal in (True, False):
        if not journal:
            (path / "tier" / "journal").unlink()
        caller = opened(path, encryption)
        assert good(caller) == expected | set(LATER)
        caller.close()


@pytest.fixture
def key_ring(tmp_path: Path) -> Iterator[KeyRing]:
    made = ring_in(tmp_path)
    yield made
    made.close()


def forge_journal(path: Path, records: bytes) -> None:
    """A journal such as a kvtide without keys writes, closed properly."""
    (path / "tier" / "journal").unlink()
    journal = Journal(path / "tier" / "journal", Disk(), boot_id())
    journal.rewrite(np.frombuffer(records, RECORD))
    journal.close()


@pytest.mark.parametrize("kind", [FREED, HOLDS])
def test_an_open_journal_in_a_sealed_directory_is_not_believed(tmp_path: Path, key_ring: KeyRing, kind: int) -> None:
    """It says that all is free, or that other blocks are there."""
    fill(tmp_path, Encryption(key_ring))
    forge_journal(tmp_path, b"".join(entry(kind, i, k, 1000 + i) for i, k in enumerate(keys(10, start=900))))
    goes_on(tmp_path, ALL, Encryption(key_ring))


def test_open_records_in_a_sealed_directory_are_not_found(tmp_path: Path, key_ring: KeyRing) -> None:
    caller = opened(tmp_path, Encryption(key_ring))
    caller.write(keys(10), WHO)
    caller.close()
    sealed = (tmp_path / "tier" / "00000.segment").read_bytes()
    stranger = opened(tmp_path)
    assert NOWHERE not in stranger.write(keys(5, start=50), OTHER)
    stranger.close()
    (tmp_path / "tier" / "00000.segment").write_bytes(sealed)
    (tmp_path / "tier" / "journal").unlink()
    goes_on(tmp_path, set(keys(10)), Encryption(key_ring))


def forge_sequence(path: Path, slot: int, sequence: int) -> None:
    """Give a record in the open another sequence number, with a checksum that is right."""
    file = path / "tier" / "00000.segment"
    data = bytearray(file.read_bytes())
    at = ALIGN + slot * SegmentHeader.parse(bytes(data[:ALIGN])).size
    data[at + 96 : at + 104] = struct.pack("<Q", sequence)
    data[at + 16 : at + 32] = bytes(16)
    data[at + 16 : at + 32] = xxh3_128_digest(data[at : at + ALIGN])
    file.write_bytes(data)


@pytest.mark.parametrize("sequence", [1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_a_sequence_number_that_nobody_reaches_costs_its_record(tmp_path: Path, sequence: int) -> None:
    fill(tmp_path)
    places = found(caller := opened(tmp_path))
    caller.close()
    forge_sequence(tmp_path, 3, sequence)
    (tmp_path / "tier" / "journal").unlink()
    goes_on(tmp_path, ALL - {k for k, p in places.items() if p == 3})


def test_a_sequence_number_just_below_those_does_no_lasting_harm(tmp_path: Path) -> None:
    """It is believed; what is written next is dropped with it when the directory is opened again, and no more."""
    fill(tmp_path)
    places = found(caller := opened(tmp_path))
    caller.close()
    forged = {k for k, p in places.items() if p == 3}
    forge_sequence(tmp_path, 3, (1 << 62) - 1)
    (tmp_path / "tier" / "journal").unlink()
    caller = opened(tmp_path)
    assert good(caller) == ALL
    written = caller.write(keys(5, start=200), WHO)
    assert caller.finds(keys(5, start=200), WHO, written) == [True] * 5
    caller.close()
    goes_on(tmp_path, ALL - forged)


@pytest.mark.parametrize("sequence", [1 << 62, (1 << 63) - 1])
def test_a_journal_with_a_number_that_nobody_reaches_is_not_believed(tmp_path: Path, sequence: int) -> None:
    fill(tmp_path)
    forge_journal(tmp_path, entry(HOLDS, 0, keys(1)[0], sequence))
    goes_on(tmp_path, ALL)


@pytest.mark.parametrize("cut", [1 << 62, (1 << 63) - 2, (1 << 63) - 1, (1 << 64) - 1])
@pytest.mark.parametrize("journal", [True, False])
@pytest.mark.parametrize("seals", [True, False])
def test_a_cut_that_nobody_reaches_costs_its_segment(
    tmp_path: Path, key_ring: KeyRing, cut: int, journal: bool, seals: bool
) -> None:
    """Headers of segments are in the open in a sealed directory too."""
    encryption = Encryption(key_ring) if seals else OPEN
    fill(tmp_path, encryption)
    file = tmp_path / "tier" / "00000.segment"
    data = file.read_bytes()
    header = SegmentHeader.parse(data[:ALIGN])
    file.write_bytes(SegmentHeader(header.size, header.slots, cut).pack() + data[ALIGN:])
    if not journal:
        (tmp_path / "tier" / "journal").unlink()
    goes_on(tmp_path, set(keys(5, start=50)), encryption)


@pytest.mark.parametrize("name", ["kvtide.json", "lock"])
@pytest.mark.parametrize("what", ["FIFO", "link"])
def test_without_the_files_that_say_what_it_is_a_directory_is_not_opened(tmp_path: Path, name: str, what: str) -> None:
    """At once, and with the name of the file; nothing is written to where a link leads."""
    fill(tmp_path)
    before = (tmp_path / "tier" / name).read_bytes()
    plant(tmp_path / "tier" / name, what, precious := outside(tmp_path))
    with pytest.raises(TierError, match="regular" if (name, what) != ("lock", "link") else "lock"):
        opened(tmp_path)
    assert precious.read_text() == "precious"
    (tmp_path / "tier" / name).unlink()
    (tmp_path / "tier" / name).write_bytes(before)
    goes_on(tmp_path, ALL)


def plant(path: Path, what: str, target: Path) -> None:
    """A FIFO, or a link, in the place of whatever is there."""
    path.unlink(missing_ok=True)
    if what == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to(target if what == "link" else target.with_name("nowhere"))


@pytest.mark.parametrize("name", ["journal", "journal.new", "kvtide.json.new", "probe", "00009.segment"])
@pytest.mark.parametrize("what", ["FIFO", "link", "link to nowhere"])
def test_what_is_no_file_is_not_opened_nor_followed(tmp_path: Path, name: str, what: str) -> None:
    fill(tmp_path)
    plant(tmp_path / "tier" / name, what, precious := outside(tmp_path))
    with takes_little():
        goes_on(tmp_path, ALL)
    assert precious.read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("what", ["FIFO", "link"])
def test_a_segment_that_is_no_file_costs_its_blocks(tmp_path: Path, what: str) -> None:
    fill(tmp_path)
    segment = tmp_path / "tier" / "00000.segment"
    (tmp_path / "outside").write_bytes(before := segment.read_bytes())
    plant(segment, what, tmp_path / "outside")
    goes_on(tmp_path, set(keys(5, start=50)))
    assert (tmp_path / "outside").read_bytes() == before


@pytest.mark.parametrize("what", ["FIFO", "link", "link to nowhere"])
def test_what_comes_while_a_directory_is_open_is_in_nobodys_way(tmp_path: Path, what: str) -> None:
    """In the place of the journal, which is read again to be shortened, and of the segment that is made next."""
    fill(tmp_path)
    precious = outside(tmp_path)
    caller = opened(tmp_path)
    for name in ("journal", "journal.new", "00002.segment"):
        plant(tmp_path / "tier" / name, what, precious)
    wide = shaped(2, 50_000)
    for _ in range(30):  # more than the journal's share, so that it must be shortened
        places = ends(lambda: caller.write(keys(5, start=300), wide))
        assert caller.finds(keys(5, start=300), wide, places) == [True] * 5
        for _ in range(20):
            assert all(caller.drop(*zip(keys(5, start=300), places, strict=True)))
            places = caller.write(keys(5, start=300), wide)
        caller.drop(*zip(keys(5, start=300), places, strict=True))
    caller.close()
    assert precious.read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()
    goes_on(tmp_path, ALL)


def sparse(path: Path) -> None:
    with path.open("ab") as file:
        file.truncate(GIANT)


def test_a_giant_that_says_what_a_directory_is_is_not_read(tmp_path: Path) -> None:
    fill(tmp_path)
    sparse(tmp_path / "tier" / "kvtide.json")
    with takes_little(), pytest.raises(TierError, match=r"kvtide\.json"):
        opened(tmp_path)


def test_a_giant_journal_is_not_read_whatever_the_headers_of_segments_say(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "tier" / "00009.segment").write_bytes(SegmentHeader(ALIGN, (1 << 32) - 1, 1).pack())
    sparse(tmp_path / "tier" / "journal")
    with takes_little():
        goes_on(tmp_path, ALL)


@pytest.mark.parametrize("number", ["1999999999", "9" * 30])
def test_the_numbers_of_segments_are_bounded(tmp_path: Path, number: str) -> None:
    fill(tmp_path)
    header = SegmentHeader(ALIGN, 1, 1)
    (tmp_path / "tier" / f"{number}.segment").write_bytes(header.pack() + bytes(ALIGN))
    with takes_little():
        goes_on(tmp_path, ALL)


# -- shared storage -------------------------------------------------------------------------------------------


def shared(root: Path, encryption: Encryption = OPEN, clock: FakeClock | None = None) -> Caller:
    return Caller(Shared(Files(root), threads=2, timeout=5.0, encryption=encryption, clock=clock), counts=False)


def sought(caller: Caller, names: list[BlockKey]) -> list[bool]:
    """Which blocks are found by asking for them, of which each can be read."""
    answer: CallerAnswer[FoundBlock | None] = CallerAnswer(len(names))
    assert isinstance(caller.tier, Shared)
    caller.tier.find([(key, WHO) for key in names], answer)
    there = {key: one.place for key, one in zip(names, answer.wait(), strict=True) if one is not None}
    assert caller.finds(list(there), WHO, list(there.values())) == [True] * len(there)
    return [key in there for key in names]


def blob(root: Path, key: BlockKey, encryption: Encryption = OPEN) -> Path:
    name = encryption.name(key)
    return root / name[:2] / name


@pytest.mark.parametrize("what", ["FIFO", "link", "link to nowhere"])
def test_what_is_no_file_is_no_blob_and_a_store_takes_its_place(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    root, names = tmp_path / "root", keys(10)
    precious = outside(tmp_path)
    writer = shared(root)
    places = writer.write(names, WHO)
    for key in names[:4]:
        plant(blob(root, key), what, precious)
    with caplog.at_level(logging.WARNING, "kvtide.files"):
        reader = shared(root)
        assert sought(reader, names) == [False] * 4 + [True] * 6
    assert len(caplog.records) == 1, "said once"
    assert reader.finds(names, WHO, places) == [False] * 4 + [True] * 6
    assert isinstance(reader.tier, Shared)
    assert "hangs" not in repr(reader.tier)
    assert reader.tier.statistics().errors_in_a_row == 0
    assert reader.tier._blobs._direct == writer.tier._blobs._direct  # type: ignore[attr-defined]
    answer: CallerAnswer[bool] = CallerAnswer(10)
    reader.tier.sync(list(zip(names, places, strict=True)), answer)
    assert answer.wait() == [False] * 4 + [True] * 6
    assert reader.write(names[:4], WHO) == places[:4]
    reader.close()
    writer.close()
    again = shared(root)
    assert sought(again, names) == [True] * 10
    again.close()
    assert precious.read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_with_the_name_of_a_blob_costs_that_blob(tmp_path: Path) -> None:
    root, names = tmp_path / "root", keys(10)
    blob(root, names[0]).mkdir(parents=True)
    (blob(root, names[0]) / "file").touch()
    caller = shared(root)
    assert [place == NOWHERE for place in caller.write(names, WHO)] == [True] + [False] * 9
    assert sought(caller, names) == [False] + [True] * 9
    assert caller.drop(*[(key, NOWHERE) for key in names]) == [True] * 10
    assert [p.name for p in root.rglob("*") if not p.is_dir() and not p.name.startswith("dropped.")] == ["file"]
    caller.close()


@pytest.mark.parametrize("what", ["link", "FIFO"])
def test_a_folder_of_blobs_that_is_a_link_leads_nowhere(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks that should lie there are misses; what lies where it leads is neither read, nor written, nor removed."""
    root, names, elsewhere = tmp_path / "root", keys(10), tmp_path / "elsewhere"
    caller = shared(root)
    places = caller.write(names, WHO)
    folder = blob(root, names[0]).parent
    there = [blob(root, key).parent != folder for key in names]
    folder.rename(elsewhere)
    (elsewhere / f"{folder.name}.new").write_text("precious")
    os.utime(elsewhere / f"{folder.name}.new", (0, 0))
    plant(folder, what, elsewhere)
    before = {file.name: file.read_bytes() for file in elsewhere.iterdir()}
    with caplog.at_level(logging.WARNING, "kvtide.files"):
        assert ends(lambda: sought(caller, names)) == there
    assert caller.finds(names, WHO, places) == there
    assert [place != NOWHERE for place in caller.write(names, WHO)] == there
    blobs = Files(root)
    every = [Encryption().name(key) for key in names]
    assert blobs.find(every, 5.0) == there
    assert blobs.sync(every, 5.0) == there
    listed = {name for name, _, _ in blobs.list(5.0) if not name.startswith("dropped.")}
    assert listed == {n for n, t in zip(every, there, strict=True) if t}
    assert list(blobs.list(5.0, folder.name)) == []
    assert blobs.tidy(1.0, 5.0, lambda: None) == (0, 0)
    assert caller.drop(*zip(names, places, strict=True)) == [True] * 10
    assert [p for p in root.rglob("*") if p.is_file() and p.parent != folder] == []
    assert {file.name: file.read_bytes() for file in elsewhere.iterdir()} == before
    assert len(caplog.records) == 2, "said once by each of the two who use it"
    caller.close()


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    for name in ("storage", "directory"):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name} link").symlink_to(tmp_path / name)
    caller = shared(tmp_path / "storage link")
    caller.write(keys(10), WHO)
    assert sought(caller, keys(10)) == [True] * 10
    assert caller.drop(*[(key, NOWHERE) for key in keys(10)]) == [True] * 10
    caller.close()
    (tmp_path / "tier").symlink_to(tmp_path / "directory")
    fill(tmp_path)
    goes_on(tmp_path, ALL)


@pytest.mark.parametrize("forged", ["an unknown key", "a known key"])
@pytest.mark.parametrize("asked", ["find", "read"])
def test_a_blob_that_somebody_without_the_keys_sealed_is_replaced(
    tmp_path: Path, key_ring: KeyRing, forged: str, asked: str
) -> None:
    """The ids of keys are not encrypted, so the attacker can use an existing one."""
    root, encryption, names, clock = tmp_path / "root", Encryption(key_ring), keys(10), FakeClock()
    caller = shared(root, encryption, clock)
    places = caller.write(names, WHO)
    for key in names[:3]:
        data = bytearray((file := blob(root, key, encryption)).read_bytes())
        data[32:48] = bytes(range(16)) if forged == "an unknown key" else data[32:48]
        data[48:80] = bytes(32)
        data[16:32] = bytes(16)
        data[16:32] = xxh3_128_digest(data[:ALIGN])
        file.write_bytes(data)
    if asked == "find":
        assert sought(caller, names) == [False] * 3 + [True] * 7
    else:
        assert caller.finds(names, WHO, places) == [False] * 3 + [True] * 7
    assert caller.write(names, WHO) == places
    clock.advance(10)
    assert sought(caller, names) == [True] * 10
    caller.close()
    again = shared(root, encryption)
    assert sought(again, names) == [True] * 10
    again.close()


def test_what_others_say_was_used_is_read_up_to_a_limit(tmp_path: Path) -> None:
    clock = FakeClock()
    coordinator = BudgetCoordinator(CoordinationBlobs(Files(tmp_path), 6.0), 1 << 20, clock)
    (tmp_path / "us").mkdir()
    (tmp_path / "us" / "used.me.0000000001").touch()
    sparse(tmp_path / "us" / "used.me.0000000001")
    with takes_little():
        for _ in range(3):
            coordinator.step()
            clock.advance(3)
    assert coordinator.statistics().term == 1


def test_a_coordination_blob_that_is_no_file_does_not_decide_the_election(tmp_path: Path) -> None:
    """Of several nodes that create a blob one wins the election; a blob that no node created must not win it."""
    blobs = Files(tmp_path)
    assert blobs.create("evictor.1", b"mine", 5.0)
    (tmp_path / "ev" / "evictor.1").unlink()
    os.mkfifo(tmp_path / "ev" / "evictor.1")
    assert blobs.create("evictor.1", b"mine", 5.0)
    assert not blobs.create("evictor.1", b"another's", 5.0)
    assert [(name, size) for name, size, _ in blobs.list(5.0)] == [("evictor.1", 4)]


@pytest.mark.parametrize(
    "name",
    ["evictor.", "evictor.x.y", "evictor.1.2", "ask.x", "ask.1.me.1.many", "back.1.2.3.4.5", "grant....", "used."],
)
def test_a_coordination_blob_that_no_node_can_have_written_is_not_read(tmp_path: Path, name: str) -> None:
    """Whoever wants to write gets credit all the same."""
    clock, blobs = FakeClock(), Files(tmp_path)
    (tmp_path / name[:2]).mkdir()
    (tmp_path / name[:2] / name).touch()
    coordination = CoordinationBlobs(blobs, 6.0)
    coordinator = BudgetCoordinator(coordination, 1 << 20, clock)
    coordinator.step()
    coordination.create("ask", 1, "me", 1, 1000)
    coordinator.step()
    assert [(blob.who, blob.nbytes) for blob in coordination.find("grant")] == [("me", 1000)]
    assert coordinator.statistics().term == 1
