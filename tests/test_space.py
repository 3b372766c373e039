"""Room on the NVMe tier: a block leaves only to make room that is then used, however little the disk has.

The disk may have less than the budget, its room may come and go, blocks may be of any size and compress to any size. In
all of that the tier keeps what it can hold, and nothing becomes unwritable for good.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvtide import config
from kvtide.block import Layout
from kvtide.errors import TierError
from kvtide.index.keys import Model
from kvtide.store.session import Session
from kvtide.store.store import Store
from kvtide.testing.clock import FakeClock
from kvtide.testing.faults import Fault, FaultyDisk
from kvtide.tiers.syscalls import Disk
from tests.books import agree, tier_bytes

KIB, MIB = 1 << 10, 1 << 20
TOKENS = 16
HOUR = 3600.0


def model(kib: int) -> Model:
    """Blocks of just so many KiB."""
    head_dim, rest = divmod(kib * KIB, 4 * TOKENS)
    assert not rest
    return Model(Layout.attention(layers=1, heads=1, head_dim=head_dim, block_tokens=TOKENS), "space")


def opened(path: Path, disk: Disk | None = None, clock: FakeClock | None = None, **nvme: Any) -> Store:
    settings = config.read(
        env={},
        dram={"budget": 64 * MIB, "segment": 4 * MIB},
        nvme={"path": str(path), "store": "through", "threads": 2, **nvme},
    )
    return Store(settings, disk=disk, clock=clock or FakeClock())


class Writer:
    """Stores blocks one at a time and says what each has cost."""

    def __init__(self, store: Store, seed: int = 0) -> None:
        self.store = store
        self._random = np.random.default_rng(seed)
        self._noise = self._random.integers(0, 256, 2 * MIB, np.uint8)
        self.number = seed << 16

    def content(self, nbytes: int, part: float) -> npt.NDArray[np.uint8]:
        """Bytes of which a codec can save all but a ``part``."""
        data = np.zeros(nbytes, np.uint8)
        some = int(nbytes * part)
        start = int(self._random.integers(0, len(self._noise) - some + 1)) if some < len(self._noise) else 0
        data[:some] = np.resize(self._noise[start:], some)
        data[:8] = np.frombuffer(np.int64(self.number).tobytes(), np.uint8)
        return data

    def write(self, session: Session, part: float = 1.0) -> tuple[bool, int]:
        """Store a new block; whether it came to the disk, and how many left the disk for it."""
        before = self.store.statistics().counts
        self.number += 1
        session.store([self.number] * TOKENS, [self.content(session.layout.geometry["full"].nbytes, part)])
        assert self.store.flush(60).complete
        after = self.store.statistics().counts
        written, evicted = (f"blocks {what} nvme" for what in ("written to", "evicted from"))
        return after.get(written, 0) > before.get(written, 0), after.get(evicted, 0) - before.get(evicted, 0)


def held(store: Store) -> int:
    return store.statistics().tiers["nvme"].blocks


def used(store: Store) -> int:
    return store.statistics().tiers["nvme"].bytes_used


# -- many sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [4, 8])
@pytest.mark.parametrize("sizes", ["ratios", "octaves", "bytes"])
def test_blocks_that_compress_differently_well_fill_the_budget(tmp_path: Path, segments: int, sizes: str) -> None:
    """From nothing to a twentieth, in a tier that has few segments: 80 % of the budget are bytes of blocks."""
    budget = 16 * MIB
    random = Random(1)
    draw: Callable[[], float] = {
        "ratios": lambda: 1 / random.uniform(1, 20),
        "octaves": lambda: 20 ** -random.random(),
        "bytes": lambda: random.uniform(0.05, 1),
    }[sizes]
    with opened(tmp_path / "tier", budget=budget, segment=budget // segments, codec="zstd") as store:
        writer, session = Writer(store), store.session(model(256))
        while not store.statistics().counts.get("blocks evicted from nvme"):
            assert writer.write(session, draw())[0]
        parts = []
        for _ in range(200):
            assert writer.write(session, draw())[0]
            # A slot is at most 1/32 larger than what lies in it.
            parts.append(used(store) * 32 / 33 / budget)
            assert tier_bytes(tmp_path / "tier") <= budget
        assert np.mean(parts[50:]) >= 0.85
        assert min(parts[50:]) >= 0.8, min(parts[50:])
        assert not store.statistics().tiers["nvme"].failed_writes


def test_many_models_share_few_segments(tmp_path: Path) -> None:
    """Without compression too: eight sizes in four segments."""
    budget = 16 * MIB
    with opened(tmp_path / "tier", budget=budget, segment=4 * MIB) as store:
        writer = Writer(store)
        sessions = [store.session(model(kib)) for kib in (36, 48, 64, 100, 128, 160, 200, 256)]
        random = Random(1)
        for number in range(600):
            assert writer.write(random.choice(sessions))[0]
            if number > 300:
                assert used(store) >= 0.8 * budget
        assert not store.statistics().tiers["nvme"].failed_writes


def test_one_size_still_has_large_segments(tmp_path: Path) -> None:
    with opened(tmp_path / "tier", budget=32 * MIB, segment=8 * MIB) as store:
        writer, session = Writer(store), store.session(model(256))
        while not writer.write(session)[1]:
            pass
        assert len(list((tmp_path / "tier").glob("*.segment"))) == 4


# -- blocks that are too large -----------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_block_larger_than_the_tier_costs_nothing(tmp_path: Path, codec: str) -> None:
    with opened(tmp_path / "tier", budget=16 * MIB, segment=MIB, codec=codec) as store:
        writer, small, large = Writer(store), store.session(model(128)), store.session(model(17 * 1024))
        while not writer.write(small)[1]:
            pass
        before = held(store)
        for _ in range(2):
            assert writer.write(large) == (False, 0)
        assert held(store) == before
        assert dict(store.statistics().tiers["nvme"].reasons)["too large"] == 2
        if codec == "zstd":
            # It is what is stored that counts.
            assert writer.write(large, 0.1)[0]
        assert writer.write(small)[0]
        agree(store)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_block_that_would_need_the_room_of_pinned_ones_costs_nothing(tmp_path: Path, codec: str) -> None:
    """It is not larger than the tier, but too much of that must stay."""
    with opened(tmp_path / "tier", budget=16 * MIB, segment=MIB, codec=codec) as store:
        writer, small, large = Writer(store), store.session(model(128)), store.session(model(8 * 1024))
        while not writer.write(small)[1]:
            if writer.number % 5 < 3:
                small.pin([writer.number] * TOKENS)
        before = held(store)
        assert writer.write(large) == (False, 0)
        assert held(store) == before
        assert writer.write(small)[0]
        agree(store)


# -- a disk that is smaller than the budget ----------------------------------------------------------------


def small_disk(path: Path, disk: Disk | None, codec: str, capacity: int, caplog: pytest.LogCaptureFixture) -> None:
    """Fill a disk that has less than the budget, with blocks of changing sizes, in three lives."""
    settings: Any = {"budget": 64 * MIB, "segment": 4 * MIB, "codec": codec}
    random = Random(1)
    kept = 0
    for life in range(3):
        caplog.clear()
        with opened(path, disk, **settings) as store:
            assert held(store) == kept, "what was there before is still there"
            writer = Writer(store, life + 1)
            sessions = [store.session(model(kib)) for kib in (64, 100, 700)]
            full = life > 0
            for number in range(150):
                written, evicted = writer.write(sessions[number // 10 % 3], random.uniform(0.05, 1))
                assert written
                full = full or evicted > 0
                if number > 100 and full:
                    assert used(store) >= 0.7 * capacity, (life, number)
            assert full
            huge = store.session(model(capacity // KIB + 1024))
            before = held(store)
            assert writer.write(huge) == (False, 0)
            assert held(store) == before
            said = [r for r in caplog.records if "cannot take a segment" in r.message]
            assert len(said) == 1, "once, not at each write"
            agree(store)
            kept = held(store)
    assert (path / "journal").exists(), "it has its room on a full disk too"


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_disk_with_less_room_than_the_budget(tmp_path: Path, codec: str, caplog: pytest.LogCaptureFixture) -> None:
    small_disk(tmp_path / "tier", FaultyDisk(capacity=12 * MIB), codec, 12 * MIB, caplog)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "mounted"
    folder.mkdir()
    mount = shutil.which("mount")
    if mount is None:
        pytest.skip("there is no mount command")
    done = subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"a filesystem cannot be mounted here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_real_filesystem_that_is_full(mounted: Path, codec: str, caplog: pytest.LogCaptureFixture) -> None:
    small_disk(mounted / "tier", None, codec, 12 * MIB, caplog)


def test_it_grows_when_the_disk_has_room_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk, clock = FaultyDisk(capacity=6 * MIB), FakeClock()
    with opened(tmp_path / "tier", disk, clock, budget=16 * MIB, segment=MIB) as store:
        writer, session = Writer(store), store.session(model(64))
        for _ in range(120):
            assert writer.write(session)[0]
        assert 0.8 * 6 * MIB <= used(store) <= 6 * MIB
        asked = sum(what == "full" for what, _, _ in disk.struck)
        for _ in range(50):
            assert writer.write(session) == (True, 1)
        assert sum(what == "full" for what, _, _ in disk.struck) == asked, "it is not asked at each write"
        disk.capacity = None
        clock.advance(HOUR)
        for _ in range(240):
            assert writer.write(session)[0]
        assert used(store) >= 0.9 * 16 * MIB
        said = [r.message for r in caplog.records if r.name == "kvtide.nvme" and r.levelno >= logging.WARNING]
        assert [("cannot take" in m, "takes segments again" in m) for m in said] == [(True, False), (False, True)]


def test_a_disk_that_refuses_the_write_itself(tmp_path: Path) -> None:
    """Its files have holes: what was written before can be overwritten, the rest cannot."""
    disk, clock = FaultyDisk(capacity=4 * MIB, sparse=True), FakeClock()
    with opened(tmp_path / "tier", disk, clock, budget=16 * MIB, segment=4 * MIB) as store:
        writer, session = Writer(store), store.session(model(64))
        failed = 0
        for _ in range(300):
            written, evicted = writer.write(session)
            failed += not written
            assert written or not evicted
        assert failed <= 8, "slots that cannot be written are left alone for a while"
        assert used(store) >= 0.7 * 4 * MIB
        agree(store)
        disk.capacity = None
        clock.advance(HOUR)
        for _ in range(300):
            assert writer.write(session)[0]
        assert used(store) >= 0.9 * 16 * MIB


@pytest.mark.parametrize("call", ["write", "sync", "resize"])
def test_a_full_tier_keeps_its_blocks_while_the_disk_fails(tmp_path: Path, call: str) -> None:
    """Whatever is evicted could not be replaced; so nearly nothing is."""
    disk, clock = FaultyDisk(), FakeClock()
    with opened(tmp_path / "tier", disk, clock, budget=16 * MIB, segment=MIB) as store:
        writer, small, large = Writer(store), store.session(model(128)), store.session(model(200))
        while not writer.write(small)[1]:
            pass
        before = held(store)
        disk.arm(Fault(call, times=1 << 30, files="*.segment"))
        for turn in range(3):
            for number in range(40):
                writer.write(large if number % 2 else small)
            # Each time that it is tried again, at most what a write or one segment needs.
            assert held(store) >= before - 16 * (turn + 1) or call == "resize"
            clock.advance(HOUR)
        disk.disarm()
        assert writer.write(large)[0]
        assert writer.write(small)[0]
        agree(store)


# -- anything at all ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("seed", range(4))
def test_what_leaves_is_replaced(tmp_path: Path, seed: int, codec: str) -> None:
    """Blocks of any size, on a disk whose room comes and goes."""
    random, clock = Random(seed), FakeClock()
    disk = FaultyDisk(seed)
    budget = 16 * MIB
    settings: Any = {"budget": budget, "segment": random.choice([MIB, 4 * MIB]), "codec": codec}
    kinds = (20, 64, 132, 300, 600, 1024, 5 * 1024, 17 * 1024)
    store = opened(tmp_path / "tier", disk, clock, **settings)
    writer = Writer(store, seed + 1)
    try:
        for step in range(160):
            if random.random() < 0.05:
                disk.capacity = random.choice(
                    [None, tier_bytes(tmp_path / "tier"), random.randrange(4 * MIB, 16 * MIB)]
                )
            if random.random() < 0.03:
                clock.advance(HOUR)
            if random.random() < 0.02:
                before = held(store)
                store.close()
                store = writer.store = opened(tmp_path / "tier", disk, clock, **settings)
                assert held(store) == before
            files = [file.stat().st_size for file in (tmp_path / "tier").glob("*.segment")]
            session = store.session(model(random.choice(kinds)))
            before = used(store)
            written, evicted = writer.write(session, random.uniform(0.03, 1))
            # Whole segments are emptied, so one may hold more than is needed at once; nothing else leaves in vain.
            lost = before - used(store)
            if written:
                assert lost <= max(files, default=0), step
            elif disk.capacity is None:
                assert not evicted, step
            else:  # others took the room of what had left: no more than what the block needed
                assert lost <= max(files, default=0) + session.layout.geometry["full"].footprint, step
            assert tier_bytes(tmp_path / "tier") <= budget
        disk.capacity = None
        clock.advance(HOUR)
        for kib in kinds[:-1]:
            assert writer.write(store.session(model(kib)))[0], "it can be written again"
        agree(store)
    finally:
        store.close()


def test_a_new_directory_on_a_full_disk_is_refused_with_its_reason(mounted: Path) -> None:
    with (mounted / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(MIB))
    nvme: Any = {"path": str(mounted / "tier"), "budget": "16MiB", "segment": "1MiB"}
    settings = config.read(env={}, dram={"budget": "16MiB"}, nvme=nvme)
    with pytest.raises(TierError, match=r"tier: No space left on device"):
        Store(settings)
    (mounted / "filler").unlink()
    Store(settings).close()
