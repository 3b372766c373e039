"""Forgetting a tenant: its keys first, then its blocks in every tier; nobody else's; not under a legal hold."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import kvtide
from kvtide import Layout, Model, Tenant, cli
from kvtide.errors import ConfigError, HeldError, LayoutError, TierError
from kvtide.index.index import SEALED
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.security.audit import verify
from kvtide.security.key_admin import destroy, hold
from kvtide.security.key_file import KeyFile
from kvtide.store.partition import NVME
from kvtide.store.session import SessionHost
from kvtide.testing.blocks import content
from kvtide.testing.keys import WRAPPING
from kvtide.tiers.nvme.tier import Nvme
from tests.node.serving import Served, Thread, eventually

MODEL = Model(Layout.attention(layers=2, heads=1, head_dim=64, dtype="float32", block_tokens=16), "w")
SIZE = MODEL.layout.geometry["full"].nbytes
OTHER = Tenant("other", b"the other tenant's naming secret")
TOKENS = list(range(16 * 6))


def settings(folder: Path, encrypt: bool = True) -> dict[str, Any]:
    (folder / "kek").touch(0o600)
    (folder / "kek").write_bytes(WRAPPING)
    return {
        "dram": {"budget": "8MiB", "segment": "1MiB"},
        "nvme": {"path": str(folder / "tier"), "budget": "32MiB", "segment": "1MiB", "store": "through"},
        "security": {
            "encrypt": encrypt,
            "key_source": f"file:{folder / 'kek'}",
            "key_file": str(folder / "keys.json"),
            "lease": 1,
        },
    }


def environment(folder: Path) -> dict[str, str]:
    return {
        f"KVTIDE_{section}_{name}".upper(): str(value)
        for section, part in settings(folder).items()
        for name, value in part.items()
    }


def store(home: SessionHost, tenant: Tenant) -> None:
    with home.session(MODEL, tenant) as session:
        session.store(TOKENS, [content(tenant.tag + bytes([i]), SIZE) for i in range(6)])
    assert home.flush(60)  # type: ignore[attr-defined]


def blocks(home: SessionHost, tenant: Tenant) -> int:
    """How many blocks are found, loaded, and right."""
    into = [np.zeros(SIZE, np.uint8) for _ in range(6)]
    with home.session(MODEL, tenant) as session, session.match(TOKENS, prefill=0) as match:
        count = session.load(match, into).wait(60).tokens // 16
    assert all(np.array_equal(into[i], content(tenant.tag + bytes([i]), SIZE)) for i in range(count))
    return count


def traces(folder: Path, tenant: Tenant) -> int:
    """How many blocks' bytes are on the disk in the open."""
    disk = b"".join(p.read_bytes() for p in (folder / "tier").glob("*.segment"))
    return sum(content(tenant.tag + bytes([i]), SIZE).tobytes()[:64] in disk for i in range(6))


@pytest.mark.parametrize("again", [False, True], ids=["from memory", "after a restart"])
@pytest.mark.parametrize("encrypt", [False, True], ids=["open", "sealed"])
def test_a_tenant_is_forgotten_and_nobody_else(tmp_path: Path, encrypt: bool, again: bool) -> None:
    what = settings(tmp_path, encrypt)
    home = kvtide.open(**what)
    store(home, DEFAULT_TENANT)
    store(home, OTHER)
    if again:
        home.close()
        home = kvtide.open(**what)
    assert home.forget(OTHER.tag).blocks == 6
    assert (blocks(home, OTHER), blocks(home, DEFAULT_TENANT)) == (0, 6)
    home.close()
    assert traces(tmp_path, OTHER) == 0
    (tmp_path / "tier" / "journal").unlink()
    with kvtide.open(**what) as home:
        assert (blocks(home, OTHER), blocks(home, DEFAULT_TENANT)) == (0, 6)
        store(home, OTHER)  # a new life
        assert blocks(home, OTHER) == 6
    assert verify(tmp_path / "audit.jsonl").problem == ""
    acts = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [(a["tenant"], a["result"]) for a in acts if a["what"] == "forget"] == [
        (OTHER.tag.hex(), "begun"),
        (OTHER.tag.hex(), "done: 6 blocks"),
    ]


def test_stale_headers_of_evicted_blocks_go_too(tmp_path: Path) -> None:
    what = settings(tmp_path, encrypt=False)
    with kvtide.open(**what) as home:
        store(home, OTHER)
        tier = home.main.colds[0].tier
        assert isinstance(tier, Nvme)
        with home.index.lock:
            for row in np.flatnonzero(home.index.state[NVME][: home.index.size] == SEALED)[:3].tolist():
                tier.evict(home.index.key(row), home.index.remove(row, NVME))
        home.forget(OTHER.tag)
    assert traces(tmp_path, OTHER) == 0


@pytest.mark.parametrize("files", [False, True], ids=["", "with shared storage"])
def test_what_was_kept_in_the_open_before_encryption_is_no_hit_and_is_forgotten_too(
    tmp_path: Path, files: bool
) -> None:
    """It stays on the disk until its place is taken; so forgetting the tenant must reach it, and the result says so."""
    with kvtide.open(**settings(tmp_path, encrypt=False)) as home:
        store(home, OTHER)
    how = settings(tmp_path) | ({"files": {"path": str(tmp_path / "shared")}} if files else {})
    with kvtide.open(**how) as home:
        assert blocks(home, OTHER) == 0
    assert traces(tmp_path, OTHER) == 6
    with kvtide.open(**how) as home:
        assert home.forget(OTHER.tag) == kvtide.Forgotten(0), "and not that nothing was found"
    assert traces(tmp_path, OTHER) == 0
    entries = [e for e in KeyFile(tmp_path / "keys.json").read().keys if e.tenant == OTHER.tag.hex()]
    assert [e.destroyed is not None for e in entries] == [True], "by which other processes hear of it"


def test_a_legal_hold_refuses_and_that_is_written_down(tmp_path: Path) -> None:
    with kvtide.open(**settings(tmp_path)) as home:
        store(home, OTHER)
        hold(KeyFile(tmp_path / "keys.json"), OTHER.tag, "case 17")
        with pytest.raises(HeldError, match="case 17"):
            home.forget(OTHER.tag)
        assert blocks(home, OTHER) == 6
    assert '"what":"forget"' in (tmp_path / "audit.jsonl").read_text()
    assert "HeldError" in (tmp_path / "audit.jsonl").read_text()


def test_a_node_forgets_for_its_own_user(tmp_path: Path) -> None:
    with Served(tmp_path / "node.sock", **settings(tmp_path)) as client:
        store(client, OTHER)
        store(client, DEFAULT_TENANT)
        assert client.forget(OTHER.tag).blocks == 6
        assert (blocks(client, OTHER), blocks(client, DEFAULT_TENANT)) == (0, 6)
        hold(KeyFile(tmp_path / "keys.json"), DEFAULT_TENANT.tag, "case 17")
        with pytest.raises(TierError, match="case 17"):
            client.forget(DEFAULT_TENANT.tag)
        with pytest.raises(LayoutError, match="16 bytes"):
            client.forget(b"short")


def test_keys_that_are_destroyed_elsewhere_end_with_their_lease_in_memory_too(tmp_path: Path) -> None:
    with kvtide.open(**settings(tmp_path)) as home:
        store(home, OTHER)
        store(home, DEFAULT_TENANT)
        destroy(KeyFile(tmp_path / "keys.json"), OTHER.tag)
        eventually(lambda: blocks(home, OTHER) == 0)
        assert blocks(home, DEFAULT_TENANT) == 6


def test_blocks_that_never_left_memory_are_forgotten_elsewhere_as_well(tmp_path: Path) -> None:
    what = settings(tmp_path)
    what["nvme"]["path"] = ""
    with kvtide.open(**what) as home:
        store(home, OTHER)
        destroy(KeyFile(tmp_path / "keys.json"), OTHER.tag)
        eventually(lambda: blocks(home, OTHER) == 0)


# -- commands -------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("KVTIDE_")]:
        monkeypatch.delenv(name)

    def invoke(*words: str, **more: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli.app, words, env=environment(tmp_path) | more)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            return 2, str(done.exception)
        return done.exit_code, done.output

    return invoke


def test_forget_offline(tmp_path: Path, run: Callable[..., tuple[int, str]]) -> None:
    with kvtide.open(**settings(tmp_path)) as home:
        store(home, DEFAULT_TENANT)
    assert run("hold", "--tenant", "default", "--why", "case 17") == (0, f"{DEFAULT_TENANT.tag.hex()}: held\n")
    assert "case 17" in run("keys", "list")[1]
    code, said = run("forget", "--tenant", "default")
    assert code == 2
    assert "legal hold (case 17)" in said
    assert run("hold", "--tenant", "default", "--release")[0] == 0
    assert run("forget", "--tenant", DEFAULT_TENANT.tag.hex()) == (0, f"{tmp_path / 'tier'}: done, 6 blocks\n")
    assert "destroyed" in run("keys", "list")[1]
    code, said = run("audit", "verify")
    assert (code, "all in order" in said) == (0, True)
    with kvtide.open(**settings(tmp_path)) as home:
        assert blocks(home, DEFAULT_TENANT) == 0


def test_forget_at_nodes_says_done_or_by_when(tmp_path: Path, run: Callable[..., tuple[int, str]]) -> None:
    how = settings(tmp_path)
    how["security"]["lease"] = "60s"  # else the node itself may find out first
    node = Thread(tmp_path / "node.sock", **how)
    with kvtide.connect(f"unix:{node.path}") as client:
        store(client, OTHER)
    words = ("forget", "--tenant", OTHER.tag.hex(), "--socket", str(node.path))
    code, said = run(*words, "--socket", str(tmp_path / "gone.sock"))
    first, second = said.splitlines()
    assert (code, first) == (1, f"{node.path}: done, 6 blocks")
    assert second.startswith(f"{tmp_path / 'gone.sock'}: ends by 20")
    node.close()


@pytest.mark.parametrize("address", ["https://host", "https://host:94l0", "https://host:99999"])
def test_a_mistyped_address_is_refused_before_anything_is_destroyed(
    tmp_path: Path, run: Callable[..., tuple[int, str]], address: str
) -> None:
    with kvtide.open(**settings(tmp_path)) as home:
        store(home, OTHER)
    code, said = run("forget", "--tenant", OTHER.tag.hex(), "--node", "https://127.0.0.1:9", "--node", address)
    assert (code, address in said) == (2, True)
    assert "destroyed" not in run("keys", "list")[1]


def test_what_is_no_log_is_not_one_that_was_changed(tmp_path: Path, run: Callable[..., tuple[int, str]]) -> None:
    assert run("audit", "verify", str(tmp_path)) == (2, f"{tmp_path} cannot be read as a log: Is a directory")


def test_without_a_log_verifying_asks_for_one(run: Callable[..., tuple[int, str]]) -> None:
    code, said = run("audit", "verify", KVTIDE_SECURITY_KEY_FILE="", KVTIDE_SECURITY_KEY_SOURCE="")
    assert (code, said.partition(":")[0]) == (2, "no audit log is set")


def test_rotation_by_command(tmp_path: Path, run: Callable[..., tuple[int, str]]) -> None:
    with kvtide.open(**settings(tmp_path)) as home:
        store(home, OTHER)
    code, made = run("keys", "make")
    (tmp_path / "new").touch(0o600)
    (tmp_path / "new").write_text(made)
    source = f"file:{tmp_path / 'new'}"
    before = {file: file.read_bytes() for file in (tmp_path / "tier").rglob("*") if file.is_file()}
    code, said = run("keys", "rotate", "--to", source)
    assert (code, said) == (0, f"2 keys are wrapped anew; set security.key_source to {source}\n")
    assert len(before) > 2
    assert all(file.read_bytes() == was for file, was in before.items()), "no block is touched"
    what = settings(tmp_path)
    what["security"]["key_source"] = source
    with kvtide.open(**what) as home:
        assert blocks(home, OTHER) == 6
    assert run("keys", "rotate")[0] == 2  # with the old source nothing can be unwrapped


@pytest.mark.parametrize("words", [("forget", "--tenant", "x"), ("hold", "--tenant", "abcd")])
def test_a_tenant_that_is_none_is_refused(run: Callable[..., tuple[int, str]], words: tuple[str, ...]) -> None:
    code, said = run(*words)
    assert code == 2
    assert "32 hexadecimal digits" in said


def test_nothing_is_done_that_cannot_be_written_down(run: Callable[..., tuple[int, str]]) -> None:
    code, said = run("forget", "--tenant", "default", KVTIDE_SECURITY_KEY_FILE="", KVTIDE_SECURITY_KEY_SOURCE="")
    assert code == 2
    assert "must be written down" in said


def test_encryption_without_keys_is_refused_at_opening(tmp_path: Path) -> None:
    for missing, said in (("key_source", "needs security.key_source"), ("key_file", "needs security.key_file")):
        what = settings(tmp_path)
        what["security"][missing] = ""
        with pytest.raises(ConfigError, match=said):
            kvtide.open(**what)


def test_shared_storage_is_forgotten_by_its_keys(tmp_path: Path) -> None:
    how = settings(tmp_path) | {"files": {"path": str(tmp_path / "shared"), "store": "through"}}
    with kvtide.open(None, **how) as one:
        for tenant in (DEFAULT_TENANT, OTHER):
            store(one, tenant)
        assert one.forget(OTHER.tag).blocks == 6
        assert (blocks(one, OTHER), blocks(one, DEFAULT_TENANT)) == (0, 6)
    elsewhere = how | {"nvme": {"path": ""}}
    with kvtide.open(None, **elsewhere) as two:
        with two.session(MODEL) as session, session.match(TOKENS, prefill=0, wait=30) as found:
            assert found.tokens == len(TOKENS), "the others' are found by another host"
        with two.session(MODEL, OTHER) as session, session.match(TOKENS, prefill=0, wait=30) as found:
            assert found.tokens == 0


def test_a_blob_that_is_put_back_or_elsewhere_is_its_own_bytes_or_a_miss(tmp_path: Path) -> None:
    """Whoever can write to storage may keep what was sealed there once."""
    how = settings(tmp_path) | {"files": {"path": str(tmp_path / "shared"), "store": "through"}, "nvme": {"path": ""}}

    def found(tenant: Tenant) -> int:
        with (
            kvtide.open(None, **how) as home,
            home.session(MODEL, tenant) as session,
            session.match(TOKENS, prefill=0, wait=30),
        ):
            return blocks(home, tenant)  # which looks at every byte

    with kvtide.open(None, **how) as home:
        store(home, OTHER)
    kept = {f: f.read_bytes() for f in (tmp_path / "shared").rglob("*") if f.is_file() and len(f.name) == 64}
    names = sorted(kept)
    for name, other in zip(names, [*names[1:], names[0]], strict=True):
        name.write_bytes(kept[other])
    assert found(OTHER) == 0, "none is what its name says"
    for name, was in kept.items():
        name.parent.mkdir(parents=True, exist_ok=True)
        name.write_bytes(was)
    assert found(OTHER) == 6, "that they are whole shows that the next miss is for want of a key"
    with kvtide.open(None, **how) as home:
        home.forget(OTHER.tag)
    for name, was in kept.items():
        name.parent.mkdir(parents=True, exist_ok=True)
        name.write_bytes(was)
    assert found(OTHER) == 0


@pytest.mark.parametrize("accept", [False, True], ids=["", "accept_open"])
def test_a_record_in_the_open_is_no_record_where_records_are_sealed(tmp_path: Path, accept: bool) -> None:
    """Whoever can write to storage but has no key could make one. What is accepted is from the own disk alone."""
    how = settings(tmp_path) | {"files": {"path": str(tmp_path / "shared"), "store": "through"}, "nvme": {"path": ""}}
    how["security"]["accept_open"] = accept
    with kvtide.open(None, **how) as one:
        store(one, DEFAULT_TENANT)
    sealed = sorted(f for f in (tmp_path / "shared").rglob("*") if f.is_file() and len(f.name) == 64)
    plain = how | {"security": {}, "files": {"path": str(tmp_path / "plain"), "store": "through"}}
    with kvtide.open(None, **plain) as other:
        store(other, DEFAULT_TENANT)
    forged = next(f for f in (tmp_path / "plain").rglob("*") if f.is_file() and len(f.name) == 64)
    for file in sealed:
        file.write_bytes(forged.read_bytes())
    with (
        kvtide.open(None, **how) as one,
        one.session(MODEL) as session,
        session.match(TOKENS, prefill=0, wait=30) as found,
    ):
        assert found.tokens == 0
