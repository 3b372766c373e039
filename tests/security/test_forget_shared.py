"""A tenant that is forgotten: no process that shares the storage has, writes or believes what was stored before."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from kvtide import Forgotten, Store, Tenant
from kvtide import config as configuration
from kvtide.errors import TierError, UnknownTenantError
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.security.key_admin import destroy
from kvtide.security.key_file import KeyFile
from kvtide.testing.faults import Fault, FaultyDisk
from kvtide.testing.interface import MODEL, PLAIN, data, length, prompt, until
from kvtide.testing.keys import WRAPPING
from kvtide.tiers.shared import drop_log
from kvtide.tiers.syscalls import Disk
from tests.node.serving import Served

GONE = Tenant("gone", b"7" * 32)
TOKENS = prompt(1, 2, 3)


def opened(folder: Path, disk: Disk | None = None, **sections: Any) -> Store:
    files = {"path": str(folder / "shared"), "threads": 2, "lease": "60min", **sections.pop("files", {})}
    memory = {"budget": "16MiB", "segment": "1MiB", **sections.pop("dram", {})}
    store = Store(configuration.read(None, env={}, dram=memory, files=files, **sections), disk=disk)
    until(lambda: all(tier.drops.looked for _, tier in store.main.shared_tiers))
    return store


def keys(folder: Path, *, encrypt: bool) -> dict[str, Any]:
    (folder / "kek").touch(0o600)
    (folder / "kek").write_bytes(WRAPPING)
    return {"encrypt": encrypt, "key_source": f"file:{folder / 'kek'}", "key_file": str(folder / "keys.json")}


def hear(*stores: Store) -> None:
    for store in stores:
        for partition in store.partitions:
            for _, tier in partition.shared_tiers:
                tier.drops.hear()


def put(home: Store, tenant: Tenant = GONE, *, written: bool = True) -> None:
    with home.session(MODEL, tenant) as session:
        assert session.store(TOKENS, data(PLAIN, TOKENS)).dropped == 0
    if written:
        assert home.flush(60)


def found(home: Store, tenant: Tenant = GONE) -> int:
    for partition in home.partitions:
        for _, tier in partition.shared_tiers:
            tier._absent.clear()
    with home.session(MODEL, tenant) as session:
        return length(session, TOKENS)


def blocks(folder: Path) -> int:
    return len([file for file in (folder / "shared").rglob("*") if len(file.name) == 64])


@pytest.mark.parametrize("encrypt", [None, False, True], ids=["no keys", "in the open", "sealed"])
def test_who_was_not_reached_has_nothing_of_the_tenant_and_writes_nothing(tmp_path: Path, encrypt: bool | None) -> None:
    security: dict[str, Any] = {} if encrypt is None else {"security": keys(tmp_path, encrypt=encrypt)}
    with opened(tmp_path, **security) as a:
        with opened(tmp_path, files={"store": "eviction"}, **security) as b:
            put(a)
            put(a, DEFAULT_TENANT)
            put(b, written=False)
            put(b, DEFAULT_TENANT, written=False)
            assert a.forget(GONE.tag).blocks == 3
            hear(b)
            assert found(b) == 0
            assert found(b, DEFAULT_TENANT) == len(TOKENS)
        assert found(a) == 0
        with opened(tmp_path, **security) as c:
            assert found(c) == 0
            assert found(c, DEFAULT_TENANT) == len(TOKENS), "nobody else loses anything"
            put(c)
            hear(a)
            assert found(a) == len(TOKENS), "what is stored afterwards is new"
        assert a.forget(GONE.tag).blocks == 3
        assert len(list((tmp_path / "shared").rglob("forgotten.*"))) == 1, "the later one replaces the first"


def test_one_that_never_hears_writes_in_vain_and_so_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as a:
        with opened(tmp_path, files={"store": "eviction"}) as b:
            put(b, written=False)
            put(a)
            assert a.forget(GONE.tag).blocks == 3
            ((_, tier),) = b.main.shared_tiers
            monkeypatch.setattr(tier.drops, "hear", lambda: None)
            monkeypatch.setattr(tier.drops, "step", lambda: None)
        assert blocks(tmp_path) == 3, "it has written them"
        monkeypatch.setattr(drop_log, "_KEPT", 1)
        ((_, tier),) = a.main.shared_tiers
        with a.session(MODEL) as session:
            session.drop(prompt(9))
        tier.drops._trim()
        with opened(tmp_path) as c:
            assert found(c) == found(a) == 0, "the page is gone, and the tenant's name stays"
            put(c)
        hear(a)
        assert found(a) == len(TOKENS)


def test_blobs_that_this_process_knew_nothing_of_are_read_by_nobody(tmp_path: Path) -> None:
    with opened(tmp_path) as b:
        put(b)
    with opened(tmp_path) as a, opened(tmp_path) as c:
        assert a.forget(GONE.tag) == Forgotten(0, announced=True), (
            "nobody can tell whose a blob is, but whose it was not"
        )
        hear(c)
        assert found(a) == found(c) == 0


def test_whoever_forgets_is_told_that_nothing_was_found_and_others_were_told(tmp_path: Path) -> None:
    memory, where = {"budget": "8MiB", "segment": "1MiB"}, {"path": str(tmp_path / "shared")}
    with Served(tmp_path / "node.sock", dram=memory, files=where) as client:
        assert client.forget(GONE.tag) == Forgotten(0, announced=True)
        with client.session(MODEL, GONE) as session:
            session.store(TOKENS, data(PLAIN, TOKENS))
        found = client.forget(GONE.tag)
        assert (found.blocks, found.announced) == (3, False)
        said = str(client.forget(GONE.tag))
        assert "neither a key nor a block of it was found here" in said


def test_a_tenant_that_nobody_knows_is_still_told_where_records_are_sealed(tmp_path: Path) -> None:
    with opened(tmp_path, security=keys(tmp_path, encrypt=True)) as a, pytest.raises(UnknownTenantError):
        a.forget(GONE.tag)


def test_what_is_on_the_own_disk_of_one_that_hears_goes_too(tmp_path: Path) -> None:
    disk = {"path": str(tmp_path / "disk"), "budget": "32MiB", "segment": "1MiB", "store": "through"}
    with opened(tmp_path) as a:
        with opened(tmp_path, nvme=disk) as b:
            put(b)
        with opened(tmp_path, nvme=disk) as b:  # in its index, and not in its memory
            a.forget(GONE.tag)
            hear(b)
            assert found(b) == 0
        content = b"".join(file.read_bytes() for file in (tmp_path / "disk").glob("*.segment"))
        assert GONE.tag not in content


def test_one_that_was_closed_meanwhile_drops_what_its_own_disk_has(tmp_path: Path) -> None:
    disk = {"path": str(tmp_path / "disk"), "budget": "32MiB", "segment": "1MiB", "store": "through"}
    with opened(tmp_path) as a:
        with opened(tmp_path, nvme=disk) as b:
            put(b)
            put(b, DEFAULT_TENANT)
        a.forget(GONE.tag)
        with opened(tmp_path, nvme=disk) as b:
            assert found(b) == 0
            assert found(b, DEFAULT_TENANT) == len(TOKENS)


def test_what_is_in_a_reserved_share_of_one_that_hears_goes_too(tmp_path: Path) -> None:
    with opened(tmp_path) as a, opened(tmp_path, dram={"reserved": f"{GONE.tag.hex()}:4MiB"}) as b:
        put(a)
        put(b, written=False)
        a.forget(GONE.tag)
        hear(b)
        assert found(b) == 0
        put(b, written=False)
        hear(b)
        assert found(b) == len(TOKENS)


def test_a_storage_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with opened(tmp_path, disk) as a:
        put(a)
        disk.arm(Fault("open", files="dropped.*", times=1000))
        with pytest.raises(TierError, match="could not be notified"):
            a.forget(GONE.tag)
        assert found(a) == 0
        disk.disarm()
        a.forget(GONE.tag)


@pytest.mark.parametrize("tier", ["files", "nvme"])
def test_what_was_stored_before_a_key_was_destroyed_is_not_written_in_the_open_either(
    tmp_path: Path, tier: str
) -> None:
    """Nothing is sealed, but the key file says that the tenant was forgotten by somebody who reached nobody."""
    security = {**keys(tmp_path, encrypt=False), "lease": "10min"}
    places: dict[str, Any] = {"files": {"store": "eviction"}}
    if tier == "nvme":
        places["nvme"] = {"path": str(tmp_path / "disk"), "budget": "32MiB", "segment": "1MiB", "store": "eviction"}
    file = KeyFile(tmp_path / "keys.json")
    with opened(tmp_path, security=security, **places) as b:
        put(b, written=False)
        put(b, DEFAULT_TENANT, written=False)
        destroy(file, GONE.tag)
        began = time.monotonic()
    assert time.monotonic() - began < 30
    with opened(tmp_path, security=security, **places) as b:
        assert found(b) == 0
        assert found(b, DEFAULT_TENANT) == len(TOKENS), "nobody else loses anything"


def test_who_refuses_to_write_in_the_open_hears_of_it_at_once_and_then_writes_what_is_new(tmp_path: Path) -> None:
    security = {**keys(tmp_path, encrypt=False), "lease": "10min"}
    with opened(tmp_path, security=security) as a, opened(tmp_path, security=security) as b:
        put(b)
        destroy(KeyFile(tmp_path / "keys.json"), GONE.tag)
        with b.session(MODEL, GONE) as session:
            session.store(prompt(5), data(PLAIN, prompt(5)))
            until(lambda: length(session, prompt(5)) == 0)  # the ring was asked, and tells
        with b.session(MODEL, GONE) as session:
            session.store(prompt(6), data(PLAIN, prompt(6)))
            assert b.flush(60)
        with a.session(MODEL, GONE) as session:
            assert length(session, prompt(6)) == 16
