"""An attacker who can read everything on the disk and in shared storage, and has no key, learns nothing of a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtide
from kvtide import config
from kvtide.block import Layout
from kvtide.index.keys import Model, Tenant
from kvtide.testing.keys import WRAPPING

MODEL = Model(Layout.attention(layers=2, heads=2, head_dim=64, block_tokens=16), "read by others")
TENANT = Tenant("patients", b"a naming secret that nobody knows")
TOKENS = [4_000_000_000 + number for number in range(64)]
BLOCKS = [np.random.default_rng(n).integers(0, 256, MODEL.layout.geometry["full"].nbytes, np.uint8) for n in range(4)]


def settings(folder: Path, encrypt: bool) -> dict[str, Any]:
    (folder / "kek").touch(0o600)
    (folder / "kek").write_bytes(WRAPPING)
    return {
        "dram": {"budget": "8MiB", "segment": "1MiB"},
        "nvme": {"path": str(folder / "seen" / "nvme"), "budget": "32MiB", "segment": "1MiB", "token_ids": True},
        "files": {"path": str(folder / "seen" / "files")},
        "security": {
            "encrypt": encrypt,
            "key_source": f"file:{folder / 'kek'}",
            "key_file": str(folder / "keys.json"),
        },
    }


def traces(folder: Path) -> dict[str, int]:
    """How many pieces of what is secret can be read in all files and their names."""
    files = [path for path in (folder / "seen").rglob("*") if path.is_file()]
    seen = b"".join(path.name.encode() + b"\0" + path.read_bytes() for path in files)
    chain = MODEL.namer(TENANT).chain(TOKENS)
    return {
        "files": len(files),
        "pieces of blocks": sum(
            block[at : at + 32].tobytes() in seen for block in BLOCKS for at in range(0, 4096, 256)
        ),
        "tokens": sum(np.array(TOKENS[at : at + 4], np.uint32).tobytes() in seen for at in range(0, 64, 8)),
        "names of blocks": sum(digest in seen or digest.hex().encode() in seen for digest in chain.digests),
        "tenants": TENANT.name.encode() in seen,
    }


@pytest.mark.parametrize("encrypt", [True, False], ids=["sealed", "in the open"])
def test_what_can_be_read_without_a_key(tmp_path: Path, encrypt: bool) -> None:
    for folder in ("nvme", "files"):
        (tmp_path / "seen" / folder).mkdir(parents=True)
    what = settings(tmp_path, encrypt)
    with kvtide.Store(config.read(None, env={}, **what)) as home, home.session(MODEL, TENANT) as session:
        session.store(TOKENS, BLOCKS)
        assert home.flush(60)
        running = traces(tmp_path)
    found = traces(tmp_path)
    assert found["files"] > 4
    if encrypt:
        assert {**found, "files": 0} == dict.fromkeys(found, 0)
        assert {**running, "files": 0} == dict.fromkeys(found, 0), "nor while it is in use"
    else:
        assert found["pieces of blocks"] == 64, "so the search finds what is there"
        assert found["tokens"] == 8
    with (
        kvtide.Store(config.read(None, env={}, **what)) as home,
        home.session(MODEL, TENANT) as session,
        session.match(TOKENS) as match,
    ):
        assert session.load(match).wait().tokens == len(TOKENS), "whose it is has all of it"


def names(folder: Path, encrypt: bool) -> set[str]:
    """Those of the blobs that a prompt of everybody's tenant has in shared storage."""
    (folder / "seen" / "files").mkdir(parents=True)
    what = settings(folder, encrypt) | {"nvme": {"path": ""}}
    with kvtide.Store(config.read(None, env={}, **what)) as home, home.session(MODEL) as session:
        session.store(TOKENS, BLOCKS)
        assert home.flush(60)
    return {path.name for path in (folder / "seen" / "files").rglob("*") if len(path.name) == 64}


def test_who_has_no_keys_cannot_tell_by_names_which_prompts_are_in_shared_storage(tmp_path: Path) -> None:
    """The attacker creates the blobs of guessed prompts, in a store with other keys and in one without keys."""
    guesses = [names(tmp_path / "own", True), names(tmp_path / "open", False)]
    found = names(tmp_path / "victim", True)
    assert [len(found), *map(len, guesses)] == [4, 4, 4]
    assert [len(found & guess) for guess in guesses] == [0, 0]
    assert names(tmp_path / "again", False) == guesses[1], "without keys anybody can tell"
