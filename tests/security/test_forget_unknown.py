"""Whoever mistypes a tenant is told so: no key is made and destroyed for it, and nobody else's blocks are touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvtide
from kvtide import Tenant, cli
from kvtide.config import Node
from kvtide.errors import AccessError, UnknownTenantError
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.node.client.admin import HttpAdminClient
from kvtide.node.client.client import Client
from kvtide.security.key_file import KeyFile
from tests.node.serving import Served, Thread
from tests.node.test_http import Watched
from tests.test_forget import OTHER, blocks, environment, settings, store

NOBODY = Tenant("nobody", b"a tenant that never stored a block").tag


def entries(folder: Path, tag: bytes) -> int:
    return sum(e.tenant == tag.hex() for e in KeyFile(folder / "keys.json").read().keys)


@pytest.mark.parametrize("encrypt", [False, True], ids=["open", "sealed"])
def test_an_unknown_tenant_is_an_error_and_changes_nothing(tmp_path: Path, encrypt: bool) -> None:
    with kvtide.open(**settings(tmp_path, encrypt)) as home:
        store(home, OTHER)
        for _ in range(2):
            with pytest.raises(UnknownTenantError, match=f"no tenant {NOBODY.hex()}"):
                home.forget(NOBODY)
        assert (blocks(home, OTHER), entries(tmp_path, NOBODY)) == (6, 0)
    acts = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    results = [a["result"][:18] for a in acts if a["what"] == "forget"]
    assert results == ["begun", "UnknownTenantError"] * 2


@pytest.mark.parametrize("again", [False, True], ids=["from memory", "after a restart"])
def test_a_tenant_without_keys_is_known_by_its_blocks(tmp_path: Path, again: bool) -> None:
    how = settings(tmp_path, encrypt=False)
    home = kvtide.open(**how)
    store(home, OTHER)
    if again:
        home.close()
        home = kvtide.open(**how)
    assert entries(tmp_path, OTHER.tag) == 0
    assert home.forget(OTHER.tag).blocks == 6
    assert entries(tmp_path, OTHER.tag) == 1, "by which other processes hear of it"
    assert home.forget(OTHER.tag).blocks == 0, "who was forgotten may be forgotten again"
    home.close()
    del how["security"]
    with kvtide.open(**how) as home:
        store(home, OTHER)
        assert home.forget(OTHER.tag).blocks == 6
        with pytest.raises(UnknownTenantError):
            home.forget(OTHER.tag)


def test_a_node_says_so_too(tmp_path: Path) -> None:
    with Served(tmp_path / "node.sock", **settings(tmp_path)) as client:
        store(client, OTHER)
        with pytest.raises(UnknownTenantError, match=NOBODY.hex()):
            client.forget(NOBODY)
        assert (blocks(client, OTHER), entries(tmp_path, NOBODY)) == (6, 0)
        assert client.forget(OTHER.tag).blocks == 6


def test_the_command_fails_if_nobody_knows_the_tenant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)

    def run(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli.app, ["forget", *words])
        if isinstance(done.exception, kvtide.errors.KvtideError):
            return 2, str(done.exception)
        return done.exit_code, done.output

    with kvtide.open(**settings(tmp_path)) as home:
        store(home, DEFAULT_TENANT)
    code, said = run("--tenant", NOBODY.hex())
    assert (code, f"no tenant {NOBODY.hex()}" in said) == (2, True)
    node = Thread(tmp_path / "node.sock", **settings(tmp_path))
    code, said = run("--tenant", NOBODY.hex(), "--socket", str(node.path))
    assert (code, f"no tenant {NOBODY.hex()}" in said) == (2, True)
    assert entries(tmp_path, NOBODY) == 0
    code, said = run("--tenant", "default", "--socket", str(node.path))
    assert (code, said.startswith(f"{node.path}: done, ")) == (0, True)
    node.close()
    # A node that cannot be reached may have blocks in memory: it learns of the destroyed key from the key file.
    code, said = run("--tenant", NOBODY.hex(), "--socket", str(node.path))
    assert (code, entries(tmp_path, NOBODY)) == (1, 1)


def test_over_http_it_is_the_same_error_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal for want of a role is another: who may not ask learns nothing of which tenants there are."""
    monkeypatch.chdir(tmp_path)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    tokens = f"ops admin {'o' * 32}\nreader read {'r' * 32}"
    node = Watched(tmp_path, KVTIDE_NODE_HTTP="127.0.0.1:0", KVTIDE_NODE_TOKENS="env:TOKENS", TOKENS=tokens)
    address = f"http://127.0.0.1:{node.port}"
    try:
        with Client(node.path) as client:
            store(client, OTHER)
            with pytest.raises(UnknownTenantError, match=f"{address} refused: there is no tenant {NOBODY.hex()}"):
                HttpAdminClient(address, Node(), {"KVTIDE_TOKEN": "o" * 32}).forget(NOBODY)
            answers = set()
            for tag in (NOBODY, OTHER.tag):
                with pytest.raises(AccessError, match="forget needs the role admin") as refused:
                    HttpAdminClient(address, Node(), {"KVTIDE_TOKEN": "r" * 32}).forget(tag)
                answers.add(str(refused.value))
            assert len(answers) == 1
            assert (blocks(client, OTHER), entries(tmp_path, NOBODY)) == (6, 0)
            monkeypatch.setenv("KVTIDE_TOKEN", "o" * 32)
            done = CliRunner().invoke(cli.app, ["forget", "--tenant", NOBODY.hex(), "--node", address])
            assert isinstance(done.exception, UnknownTenantError)
            assert done.output == f"{address}: has no such tenant\n"
            assert (blocks(client, OTHER), entries(tmp_path, NOBODY)) == (6, 0)
            assert HttpAdminClient(address, Node(), {"KVTIDE_TOKEN": "o" * 32}).forget(OTHER.tag).blocks == 6
            assert blocks(client, OTHER) == 0
    finally:
        node.stop()
