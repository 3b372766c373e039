"""What other versions of kvtide wrote is not lost: older segments are read, and newer records are left alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_128_digest

from kvtide import config
from kvtide.block import ALIGN, Layout
from kvtide.clock import Clock
from kvtide.index.index import SEALED
from kvtide.index.keys import Model
from kvtide.store.partition import NVME
from kvtide.store.session import Session
from kvtide.store.store import Store
from kvtide.testing.clock import FakeClock
from kvtide.tiers.format import record
from kvtide.tiers.nvme import directory, inspect
from kvtide.tiers.nvme.directory import FORMAT
from kvtide.tiers.nvme.tier import Nvme

MODEL = Model(Layout.attention(layers=1, heads=1, head_dim=1024, block_tokens=16), "versions")
OTHER = Model(Layout.attention(layers=1, heads=1, head_dim=1536, block_tokens=16), "versions")
NAMES = [("with journal", True), ("without journal", False)]


def opened(folder: Path, clock: Clock | None = None, **nvme: Any) -> Store:
    known = {"path": str(folder / "tier"), "budget": "16MiB", "segment": "1MiB", "store": "through", "threads": 2}
    return Store(config.read(dram={"budget": "4MiB", "segment": "1MiB"}, nvme=known | nvme), clock=clock)


def data(seed: int, model: Model = MODEL) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, model.layout.geometry["full"].nbytes, np.uint8)


def put(session: Session, *seeds: int) -> None:
    for seed in seeds:
        session.store([seed] * 16, [data(seed, session.model)])


def got(session: Session, seed: int) -> bool:
    """Whether that block is there. It is never another."""
    with session.match([seed] * 16) as match:
        loaded = session.load(match).wait()
        if loaded.tokens:
            assert bytes(loaded.blocks[0]) == data(seed, session.model).tobytes()
        return loaded.tokens == 16


def fill(store: Store, session: Session, count: int = 400) -> None:
    """Write more than there is room for."""
    for seed in range(1000, 1000 + count):
        put(session, seed)
        if not seed % 20:
            store.flush()
    store.flush()


def segments(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((folder / "tier").glob("*.segment"))}


def taken(folder: Path) -> int:
    return sum(file.stat().st_size for file in (folder / "tier").iterdir())


def sealed(page: bytearray, at: int) -> bytes:
    """A header with a right checksum."""
    page[at : at + 16] = bytes(16)
    page[at : at + 16] = xxh3_128_digest(page)
    return bytes(page)


def older(folder: Path) -> None:
    """Let all segments be of version 0."""
    for file in (folder / "tier").glob("*.segment"):
        with file.open("r+b") as f:
            head = bytearray(f.read(48))
            head[8:10] = bytes(2)
            f.seek(0)
            f.write(sealed(head, 32))


def newer(folder: Path, change: Callable[[bytearray], None], files: int | None = None) -> dict[str, list[int]]:
    """Let every second record, of so many segments or all, be one of a later version; where they are."""
    changed: dict[str, list[int]] = {}
    for file in sorted((folder / "tier").glob("*.segment"))[:files]:
        with file.open("r+b") as f:
            size, count = struct.unpack_from("<Q", f.read(24), 16)[0], 0
            for at in range(ALIGN, file.stat().st_size, size):
                f.seek(at)
                page = bytearray(f.read(ALIGN))
                if page[:8] == record.MAGIC and (count := count + 1) % 2:
                    change(page)
                    f.seek(at)
                    f.write(sealed(page, 16))
                    changed.setdefault(file.name, []).extend((at, at + size))
    assert changed
    return changed


def kept(folder: Path, changed: dict[str, list[int]], before: dict[str, bytes]) -> bool:
    """Whether those records are what they were."""
    now = segments(folder)
    return all(
        now[name][start:stop] == before[name][start:stop]
        for name, borders in changed.items()
        for start, stop in zip(borders[::2], borders[1::2], strict=True)
    )


def version_2(page: bytearray) -> None:
    page[8:10] = b"\2\0"


CHANGES: dict[str, Callable[[bytearray], None]] = {
    "version": version_2,
    "flag": lambda page: page.__setitem__(slice(12, 16), b"\0\1\0\0"),
}


@pytest.fixture
def blocks(tmp_path: Path) -> range:
    """A directory with blocks in it."""
    with opened(tmp_path) as store, store.session(MODEL) as session:
        put(session, *range(40))
    return range(40)


def distrust(folder: Path, journal: bool) -> None:
    if not journal:
        (folder / "tier" / "journal").unlink()


# -- older segments -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "journal"), NAMES)
def test_an_older_segment_is_read_and_not_written_to(tmp_path: Path, blocks: range, name: str, journal: bool) -> None:
    older(tmp_path)
    distrust(tmp_path, journal)
    before = segments(tmp_path)
    for _ in range(2):
        with opened(tmp_path) as store, store.session(MODEL) as session:
            assert all(got(session, seed) for seed in blocks)
            assert store.statistics().tiers["nvme"].blocks >= len(blocks)
            put(session, 500, 501)
            store.flush()
        assert {name: segments(tmp_path)[name] for name in before} == before
    assert any(part.version == 0 for part in inspect.look(tmp_path / "tier").segments)
    with opened(tmp_path) as store, store.session(MODEL) as session:
        assert all(got(session, seed) for seed in (*blocks, 500, 501))


@pytest.mark.parametrize("model", [MODEL, OTHER], ids=["one size", "another size"])
def test_an_older_segment_ages_out_within_the_budget(tmp_path: Path, blocks: range, model: Model) -> None:
    older(tmp_path)
    with opened(tmp_path) as store, store.session(MODEL) as session, store.session(model) as other:
        fill(store, other)
        assert taken(tmp_path) <= 16 << 20
        assert got(other, 1399)
        assert store.statistics().tiers["nvme"].bytes_used > 12 << 20, "its room is used again"
        session.drop([blocks[0]] * 16)
    assert {page[8] for page in segments(tmp_path).values() if page} == {FORMAT}, "none is left"


def test_a_block_in_an_older_segment_can_be_dropped(tmp_path: Path, blocks: range) -> None:
    older(tmp_path)
    with opened(tmp_path) as store, store.session(MODEL) as session:
        assert session.drop([blocks[0]] * 16) == 1
    distrust(tmp_path, False)
    with opened(tmp_path) as store, store.session(MODEL) as session:
        assert [got(session, seed) for seed in blocks[:3]] == [False, True, True]


def test_an_older_segment_that_nobody_can_read_stays_until_room_is_needed(
    tmp_path: Path, blocks: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    older(tmp_path)
    monkeypatch.delitem(directory._READERS, 0)
    before = segments(tmp_path)
    evicted: list[object] = []
    with opened(tmp_path) as store, store.session(MODEL) as session:
        store.follow(lambda e: evicted.append(e) if getattr(e, "tier", "") == "nvme" and hasattr(e, "reason") else None)
        assert not any(got(session, seed) for seed in blocks)
        put(session, 500)
        store.flush()
        assert {name: segments(tmp_path)[name] for name in before} == before
        assert store.statistics().tiers["nvme"].bytes_taken >= sum(map(len, before.values()))
        fill(store, session, 60)
        assert {name: segments(tmp_path)[name] for name in before} == before, "there was room"
        assert not evicted
        fill(store, session)
        assert taken(tmp_path) <= 16 << 20
        assert store.statistics().tiers["nvme"].bytes_used > 12 << 20
    assert {page[8] for page in segments(tmp_path).values() if page} == {FORMAT}


def test_an_older_directory_says_what_it_is_from_now_on(tmp_path: Path, blocks: range) -> None:
    about = tmp_path / "tier" / "kvtide.json"
    about.write_text(json.dumps({"format": "kvtide nvme", "version": 0}))
    with opened(tmp_path) as store, store.session(MODEL) as session:
        assert all(got(session, seed) for seed in blocks)
    assert json.loads(about.read_text())["version"] == FORMAT


# -- newer records --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("name", "journal"), NAMES)
def test_a_newer_record_is_not_overwritten(
    tmp_path: Path, blocks: range, name: str, journal: bool, change: str
) -> None:
    where = newer(tmp_path, CHANGES[change])
    hidden = sum(len(borders) // 2 for borders in where.values())
    distrust(tmp_path, journal)
    before = segments(tmp_path)
    for turn in range(3):  # by its journal, then by ours
        with opened(tmp_path) as store, store.session(MODEL) as session, store.session(OTHER) as other:
            if not turn and change == "flag":  # else nobody looks at them before their room is needed
                assert sum(got(session, seed) for seed in blocks) == len(blocks) - hidden
                assert sum(got(session, seed) for seed in blocks) == len(blocks) - hidden, "and it stays so"
            fill(store, session if turn % 2 else other)
            assert taken(tmp_path) <= 16 << 20
        assert kept(tmp_path, where, before), turn
        report = inspect.look(tmp_path / "tier")
        assert len(report.kept) == hidden
        assert not report.damaged
        assert any("another version" in line for line in inspect.advice(report))


@pytest.mark.parametrize(("name", "journal"), NAMES)
def test_the_newer_kvtide_finds_its_records_again(
    tmp_path: Path, blocks: range, name: str, journal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer(tmp_path, version_2)
    distrust(tmp_path, journal)
    with opened(tmp_path) as store, store.session(MODEL) as session:
        fill(store, session, 20)
        assert 0 < sum(got(session, seed) for seed in blocks) < len(blocks)
    monkeypatch.setitem(record._READERS, 2, record._READERS[1])
    with opened(tmp_path) as store, store.session(MODEL) as session:
        assert all(got(session, seed) for seed in blocks)


def test_a_newer_record_whose_block_is_dropped_goes(
    tmp_path: Path, blocks: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer(tmp_path, version_2)
    with opened(tmp_path) as store, store.session(MODEL) as session:
        there = [seed for seed in blocks if not got(session, seed)]
        asked, unasked = there[:5], there[5:]
        for seed in asked:
            session.drop([seed] * 16)
        assert store.statistics().tiers["nvme"].blocks == len(blocks) - 5
    monkeypatch.setitem(record._READERS, 2, record._READERS[1])
    for journal in (True, False):
        distrust(tmp_path, journal)
        with opened(tmp_path) as store, store.session(MODEL) as session:
            assert not any(got(session, seed) for seed in asked)
            assert all(got(session, seed) for seed in unasked)


def test_damage_does_not_pass_for_a_newer_record(tmp_path: Path, blocks: range) -> None:
    """A bit of the version may flip; then the checksum is wrong, and the slot is as good as free."""
    for file in (tmp_path / "tier").glob("*.segment"):
        with file.open("r+b") as f:
            size = struct.unpack_from("<Q", f.read(24), 16)[0]
            for at in range(ALIGN, file.stat().st_size, size):
                f.seek(at + 9)
                f.write(b"\4")
    distrust(tmp_path, False)
    with opened(tmp_path) as store:
        assert store.statistics().tiers["nvme"].blocks == 0


@pytest.mark.parametrize(("model", "files"), [(MODEL, None), (OTHER, 1)], ids=["one size", "another size"])
def test_slots_beside_newer_records_are_used_and_belong_to_the_blocks_in_them(
    tmp_path: Path, model: Model, files: int | None
) -> None:
    """All that was there has expired: slots are taken many at a time, and empty segments are cut for another size."""
    with opened(tmp_path, FakeClock()) as store, store.session(MODEL) as session:  # its clock stands years ago
        for seed in range(400):
            session.store([seed] * 16, [data(seed)], ttl=1.0)
        assert store.flush(60)
    where = newer(tmp_path, version_2, files)
    before = segments(tmp_path)
    with opened(tmp_path) as store, store.session(model) as session:
        for seed in range(5):
            tokens = [token for i in range(16) for token in [1000 + 16 * seed + i] * 16]
            session.store(tokens, [data(1000 + 16 * seed + i, model) for i in range(16)])
            assert store.flush(60), "none was refused"
        rows = np.flatnonzero(store.index.state[NVME][: store.index.size] == SEALED)
        assert len(rows) == 80
        nvme = next(cold.tier for cold in store.main.colds if cold.number == NVME)
        assert isinstance(nvme, Nvme)
        assert nvme.owners(store.index.place[NVME][rows]).tolist() == rows.tolist()
    assert kept(tmp_path, where, before)
