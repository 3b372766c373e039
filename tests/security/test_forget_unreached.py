"""A tenant is forgotten by a command that does not reach a process with its blocks in memory: they stay unwritten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtide
from kvtide import config
from kvtide.block import Layout
from kvtide.index.keys import DEFAULT_TENANT, Model, Tenant
from kvtide.security.key_admin import destroy
from kvtide.security.key_file import KeyFile
from kvtide.testing.keys import WRAPPING

MODEL = Model(Layout.attention(layers=1, heads=1, head_dim=64, block_tokens=16), "forgotten")
GONE = Tenant("gone", b"7" * 32)
TOKENS = list(range(64))
BLOCKS = [np.full(MODEL.layout.geometry["full"].nbytes, 1 + i, np.uint8) for i in range(4)]


def settings(folder: Path, **nvme: str) -> dict[str, Any]:
    (folder / "kek").touch(0o600)
    (folder / "kek").write_bytes(WRAPPING)
    return {
        "dram": {"budget": "8MiB", "segment": "1MiB"},
        "nvme": {"path": str(folder / "tier"), "budget": "32MiB", "segment": "1MiB", **nvme},
        "security": {
            "encrypt": True,
            "key_source": f"file:{folder / 'kek'}",
            "key_file": str(folder / "keys.json"),
        },
    }


def put(home: kvtide.Store, tenant: Tenant) -> None:
    with home.session(MODEL, tenant) as session:
        assert session.store(TOKENS, BLOCKS).dropped == 0


def found(home: kvtide.Store, tenant: Tenant) -> int:
    with home.session(MODEL, tenant) as session, session.match(TOKENS) as match:
        return session.load(match).wait().tokens


@pytest.mark.parametrize("written", [False, True], ids=["in memory alone", "written before"])
@pytest.mark.parametrize("again", [False, True], ids=["and no more", "and another process has stored for it since"])
def test_a_clean_stop_writes_nothing_of_a_tenant_that_was_forgotten_elsewhere(
    tmp_path: Path, written: bool, again: bool
) -> None:
    what = settings(tmp_path, **({"store": "through"} if written else {"store": "eviction"}))
    file = KeyFile(tmp_path / "keys.json")
    with kvtide.Store(config.read(None, env={}, **what)) as home:
        put(home, GONE)
        put(home, DEFAULT_TENANT)
        if written:
            assert home.flush(60)
        destroy(file, GONE.tag)
        if again:
            elsewhere = {**what, "nvme": {**what["nvme"], "path": str(tmp_path / "elsewhere")}}
            with kvtide.Store(config.read(None, env={}, **elsewhere)) as other:
                put(other, GONE)
                assert found(other, GONE) == len(TOKENS), "what is stored afterwards is new"
    with kvtide.Store(config.read(None, env={}, **what)) as home:
        assert found(home, GONE) == 0
        assert found(home, DEFAULT_TENANT) == len(TOKENS), "nobody else loses anything"
    living = [e for e in file.read().keys if e.tenant == GONE.tag.hex() and e.destroyed is None]
    assert len(living) == again, "no key is made for what was stored before"
