"""A durable store over real disks: what was said to be durable is there after a power loss at any later moment."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvtide import Flushed, Layout, Model, Session, Store, Unwritten, config
from kvtide.testing.clock import FakeClock
from kvtide.testing.faults import Fault, FaultyDisk
from kvtide.testing.interface import MODEL, PLAIN, SIZE, data, length, prompt
from kvtide.testing.keys import WRAPPING
from tests.plan.small import Clock

DRAM = {"budget": "4MiB", "segment": "1MiB"}


def nvme(path: Path, **more: object) -> dict[str, object]:
    return {"path": str(path / "kv"), "budget": "16MiB", "segment": "1MiB", "threads": 2, **more}


def opened(disk: FaultyDisk | None, **settings: Any) -> Store:
    return Store(config.read(None, {}, dram=DRAM, **settings), disk=disk)


def lose_power(store: Store, disk: FaultyDisk) -> None:
    """The process ends here, and the host with it."""
    disk.die()
    store.close()
    disk.power_loss()


@pytest.mark.parametrize("kind", ["raw", "zstd", "sealed", "files"])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_durable_survives_a_power_loss(tmp_path: Path, kind: str, seed: int) -> None:
    kinds: dict[str, dict[str, Mapping[str, object]]] = {
        "raw": {"nvme": nvme(tmp_path, store="second-touch")},
        "zstd": {"nvme": nvme(tmp_path, store="eviction", codec="zstd")},
        "sealed": {"nvme": nvme(tmp_path, store="through"), "security": keys(tmp_path)},
        "files": {"files": {"path": str(tmp_path / "files"), "store": "second-touch"}},
    }
    settings, disk = kinds[kind], FaultyDisk(seed)
    store = opened(disk, **settings)
    with store.session(MODEL) as session:
        head, tokens = prompt(1, 2), prompt(1, 2, 3)
        session.store(head, data(PLAIN, head))
        assert session.store(tokens, data(PLAIN, tokens), durable=True).wait(60)
        for number in range(100, 120):  # what comes later is not synced, and may be lost
            session.store(prompt(number), data(PLAIN, prompt(number)))
            length(session, prompt(number))
    lose_power(store, disk)
    with opened(disk, **settings) as store, store.session(MODEL) as session:
        assert length(session, tokens) == 3 * SIZE


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power lost"])
@pytest.mark.parametrize("kind", ["raw", "sealed"])
def test_what_lives_longer_than_its_record_says_survives_when_it_is_durable(
    tmp_path: Path, kind: str, power: bool
) -> None:
    """A record of a block that was to expire soon says so until it is renewed; an encrypted one is written anew."""
    settings: dict[str, Mapping[str, object]] = {"nvme": nvme(tmp_path, store="through")}
    if kind == "sealed":
        settings["security"] = keys(tmp_path)
    disk, clock = FaultyDisk(), FakeClock()
    store = Store(config.read(None, {}, dram=DRAM, **settings), disk=disk, clock=clock)
    with store.session(MODEL) as session:
        assert session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)), ttl=3.0, durable=True).wait(60)
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        clock.advance(100.0)
        assert put(session, 1, 2) == {}
        assert put(session, 1, 2) == {}, "again: nothing is left to do"
    disk.die()
    store.close()
    if power:
        disk.power_loss()
    disk.revive()
    store = Store(config.read(None, {}, dram=DRAM, **settings), disk=disk, clock=clock)
    with store, store.session(MODEL) as session:
        assert length(session, prompt(1, 2)) == 2 * SIZE


def keys(folder: Path) -> dict[str, object]:
    file = folder / "kek"
    file.write_bytes(WRAPPING)
    file.chmod(0o600)
    return {"encrypt": True, "key_source": f"file:{file}", "key_file": str(folder / "keys.json")}


def put(session: Session, *path: int) -> Mapping[Unwritten, int]:
    return session.store(prompt(*path), data(PLAIN, prompt(*path)), durable=True).wait(60).reasons


@pytest.mark.parametrize("call", ["resize", "write", "sync"])
def test_a_disk_that_refuses_is_told_and_memory_goes_on(tmp_path: Path, call: str) -> None:
    disk = FaultyDisk()
    with opened(disk, nvme=nvme(tmp_path)) as store, store.session(MODEL) as session:
        disk.arm(Fault(call, code=errno.ENOSPC, files="*.segment", times=1 << 30))
        assert put(session, 1, 2) == {Unwritten.WRITE_FAILED: 2}
        assert length(session, prompt(1, 2)) == 2 * SIZE
        disk.disarm()
        assert put(session, 1, 2) == {}
        assert store.flush(60)


def test_after_a_sync_that_failed_a_later_one_proves_nothing(tmp_path: Path) -> None:
    """A system that could not write a page says so once; the next sync of the file goes well without it."""
    disk = FaultyDisk()
    with opened(disk, nvme=nvme(tmp_path, store="through")) as store, store.session(MODEL) as session:
        session.store(prompt(1), data(PLAIN, prompt(1)))
        session.store(prompt(2), data(PLAIN, prompt(2)))
        assert store.flush(60)
        written = store.statistics().counts["blocks written to nvme"]
        disk.arm(Fault("sync", files="*.segment"))
        assert put(session, 1) == {}, "it was written again, and then synced"
        assert store.statistics().counts["blocks written to nvme"] == written + 1
        assert put(session, 2) == {}
        assert store.statistics().counts["blocks written to nvme"] == written + 2, "so was its neighbour"


def test_budgets_of_writes_hold_and_are_told(tmp_path: Path) -> None:
    clock = Clock()
    budget = PLAIN.geometry["full"].footprint // 20  # three blocks a minute
    settings = config.read(None, {}, dram=DRAM, nvme=nvme(tmp_path, store="second-touch", write_limit=budget))
    with Store(settings, clock=clock) as store, store.session(MODEL) as session:
        assert put(session, 1, 2, 3, 4, 5) == {Unwritten.WRITE_BUDGET: 2}
        assert store.flush(60) == Flushed(3, {Unwritten.WRITE_BUDGET: 2})
        clock.now += 60
        assert put(session, 1, 2, 3, 4, 5) == {}
        assert store.flush(60) == Flushed(5)


def test_a_full_queue_refuses_no_tenant_with_a_quota(tmp_path: Path) -> None:
    disk = nvme(tmp_path, store="second-touch", queue=SIZE, quotas="default:8MiB")
    with opened(None, nvme=disk) as store, store.session(MODEL) as session:
        assert put(session, *range(1, 33)) == {}
        assert store.statistics().lanes["nvme"].writes_refused == 0


def test_a_block_larger_than_the_tier_is_told(tmp_path: Path) -> None:
    large = Layout.attention(layers=16, heads=8, head_dim=1024, block_tokens=64)
    nbytes = large.geometry["full"].nbytes
    settings = config.read(None, {}, dram={"budget": 2 * nbytes, "segment": nbytes}, nvme=nvme(tmp_path))
    with Store(settings) as store, store.session(Model(large, "given:large")) as session:
        persist = session.store([1] * 64, [bytes(nbytes)], durable=True)
        assert (persist.stored, persist.wait(60).reasons) == (1, {Unwritten.TIER_TOO_SMALL: 1})
        assert store.flush(60) == Flushed(0, {Unwritten.TIER_TOO_SMALL: 1})


def test_when_the_nearest_tier_refuses_the_next_one_takes_it(tmp_path: Path) -> None:
    disk = FaultyDisk()
    settings = {
        "nvme": nvme(tmp_path, store="second-touch"),
        "files": {"path": str(tmp_path / "files"), "store": "second-touch"},
    }
    store = opened(disk, **settings)
    with store.session(MODEL) as session:
        disk.arm(Fault("resize", code=errno.ENOSPC, files="*.segment", times=1 << 30))
        assert put(session, 1, 2) == {}
        assert not store.flush(60), "NVMe was asked and has not got them"
    lose_power(store, disk)
    with opened(disk, **settings) as store, store.session(MODEL) as session:
        assert length(session, prompt(1, 2)) == 2 * SIZE


def test_a_blob_that_others_removed_is_written_again(tmp_path: Path) -> None:
    files = {"path": str(tmp_path / "files"), "store": "through"}
    with opened(None, files=files) as store, store.session(MODEL) as session:
        session.store(prompt(1), data(PLAIN, prompt(1)))
        assert store.flush(60)
        (blob,) = [p for p in (tmp_path / "files").rglob("*") if p.is_file() and p.stat().st_size > 1000]
        blob.unlink()
        assert put(session, 1) == {}
        assert blob.exists()
