"""What is done to keys and tenants is in the audit log, refused or not; what cannot be written there is not done."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvtide
from kvtide import cli, config
from kvtide.errors import AuditError, ConfigError, HeldError, KvtideError, TierError
from kvtide.security.audit import verify
from kvtide.security.key_file import KeyFile
from kvtide.testing.faults import Fault, FaultyDisk
from kvtide.tiers.syscalls import Disk
from tests.node.serving import Served, Thread
from tests.test_forget import OTHER, blocks, environment, settings, store

TAG = OTHER.tag.hex()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    return tmp_path


def run(*words: str) -> BaseException | None:
    done = CliRunner().invoke(cli.app, words)
    return None if isinstance(done.exception, SystemExit) else done.exception


def acts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]


def living(folder: Path) -> int:
    """Keys of the tenant that are not destroyed."""
    return sum(e.tenant == TAG and e.destroyed is None for e in KeyFile(folder / "keys.json").read().keys)


def test_every_act_is_written_down_with_what_came_of_it(folder: Path) -> None:
    with kvtide.open(**settings(folder)) as home:
        store(home, OTHER)
    (folder / "new").touch(0o600)
    (folder / "new").write_bytes(bytes(32))
    (folder / "bad").write_bytes(bytes(32))
    (folder / "bad").chmod(0o644)
    node = Thread(folder / "node.sock", **settings(folder))
    try:
        assert run("hold", "--tenant", TAG, "--why", "case 17") is None
        assert isinstance(run("forget", "--tenant", TAG, "--socket", str(node.path)), HeldError)
        assert run("hold", "--tenant", TAG, "--release") is None
        assert run("forget", "--tenant", TAG, "--socket", str(node.path)) is None
    finally:
        node.close()
    assert isinstance(run("keys", "rotate", "--to", f"file:{folder / 'bad'}"), ConfigError)
    assert run("keys", "rotate", "--to", f"file:{folder / 'new'}") is None
    found = Counter((a["what"], a["result"].split(":")[0], a.get("tenant", "")) for a in acts(folder))
    own = bytes(16).hex()
    assert found == {
        ("make key", "done", own): 1,
        ("make key", "done", TAG): 1,
        ("hold", "begun", TAG): 1,
        ("hold", "held", TAG): 1,
        ("destroy keys", "begun", TAG): 2,
        ("destroy keys", "HeldError", TAG): 1,
        ("end hold", "begun", TAG): 1,
        ("end hold", "released", TAG): 1,
        ("destroy keys", "done", TAG): 1,
        ("forget", "begun", TAG): 1,
        ("forget", "done", TAG): 1,
        ("forget at a node", "done, 6 blocks", TAG): 1,
        ("rotate", "begun", ""): 2,
        ("rotate", "failed", ""): 1,
        ("rotate", "done", ""): 1,
    }
    assert all(a["who"] and a["when"] for a in acts(folder))
    assert verify(folder / "audit.jsonl").problem == ""


def test_what_cannot_be_written_down_is_not_done(folder: Path) -> None:
    """Somebody has made the log a folder: no act finds a way around it, and no block or key is touched."""
    (folder / "new").touch(0o600)
    (folder / "new").write_bytes(bytes(32))
    with Served(folder / "node.sock", **settings(folder)) as client:
        store(client, OTHER)
        (folder / "audit.jsonl").rename(folder / "before")
        (folder / "audit.jsonl").mkdir()
        keys = (folder / "keys.json").read_bytes()
        for words in (
            ("forget", "--tenant", TAG, "--socket", str(client.path)),
            ("hold", "--tenant", TAG),
            ("hold", "--tenant", TAG, "--release"),
            ("keys", "rotate", "--to", f"file:{folder / 'new'}"),
        ):
            assert isinstance(run(*words), AuditError), words
        with pytest.raises(TierError, match="cannot write the audit log"):
            client.forget(OTHER.tag)
        assert (folder / "keys.json").read_bytes() == keys
        assert (blocks(client, OTHER), living(folder)) == (6, 1)


class Watching(Disk):
    """Notes how many keys of the tenant are left whenever bytes of blocks are given back to the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.left: list[int] = []

    def discard(self, fd: int, offset: int, nbytes: int) -> None:
        self.left.append(living(self._folder))
        super().discard(fd, offset, nbytes)


def test_keys_are_destroyed_before_the_first_block_is_touched(tmp_path: Path) -> None:
    disk = Watching(tmp_path)
    with kvtide.Store(config.read(None, env={}, **settings(tmp_path)), disk=disk) as home:
        store(home, OTHER)
        assert (living(tmp_path), disk.left) == (1, [])
        assert home.forget(OTHER.tag).blocks == 6
        assert disk.left == [0] * 6


@pytest.mark.parametrize("place", ["tier", "shared"])
def test_what_a_failing_disk_keeps_of_a_tenant_is_of_no_use(tmp_path: Path, place: str) -> None:
    """Nothing can be written or removed when it is forgotten; and whoever has a copy puts that back."""
    how = settings(tmp_path) | {"files": {"path": str(tmp_path / "shared"), "store": "through"}}
    disk = FaultyDisk()
    with kvtide.Store(config.read(None, env={}, **how), disk=disk) as home:
        store(home, OTHER)
        kept = {f: f.read_bytes() for f in (tmp_path / place).rglob("*") if f.is_file()}
        for call in ("write", "discard", "delete", "open"):
            disk.arm(Fault(call, files="*", times=100_000))
        with pytest.raises(KvtideError):
            home.forget(OTHER.tag)
        assert living(tmp_path) == 0
        disk.disarm()
    for file, was in kept.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(was)
    with kvtide.open(**how) as home:
        assert blocks(home, OTHER) == 0
