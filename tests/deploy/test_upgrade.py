"""An upgrade and a way back: an earlier version of kvtide beside this one, as docs/upgrade.md promises.

The earlier version is the last tag, or without tags a fixed commit, from before the protocol had minor versions.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.node.serving import Process
from tests.test_docs import ROOT

EARLIER = "6044c9c"
CLIENT = """
import sys, kvtide, numpy as np
assert kvtide.__file__.startswith(sys.argv[2]), kvtide.__file__
layout = kvtide.Layout.attention(layers=2, heads=2, head_dim=64, dtype="bfloat16", block_tokens=64)
nbytes = layout.geometry["full"].nbytes
with kvtide.connect("unix:" + sys.argv[1]) as client, client.session(kvtide.Model(layout, weights="w")) as session:
    for word in sys.argv[3:]:
        what, number = word.split(":")
        tokens = np.arange(640, dtype=np.uint32) + 1000 * int(number)
        blocks = [np.random.default_rng([int(number), i]).bytes(nbytes) for i in range(10)]
        if what == "store":
            assert session.store(tokens, blocks).stored == 10
            client.flush()
        with session.match(tokens) as match:
            assert match.tokens == 640, (word, match.tokens)
            loaded = [np.empty(nbytes, np.uint8) for _ in blocks]
            session.load(match, into=loaded).wait()
            assert [one.tobytes() for one in loaded] == blocks, word
"""


def git(*words: str) -> bytes:
    ended = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=False)
    if ended.returncode:
        pytest.skip(f"git {' '.join(words)}: {ended.stderr.decode().strip()}")
    return ended.stdout


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source of the earlier version."""
    tags = git("tag", "--list", "--merged", "HEAD~1", "--sort=-creatordate", "v*").decode().split()
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(fileobj=io.BytesIO(git("archive", tags[0] if tags else EARLIER, "src"))) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


THIS = ROOT / "src"


def environment(source: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(source), "KVTIDE_NVME_STORE": "through"}


def client(source: Path, node: Process, *words: str) -> None:
    """What a client of that source does at a node; it checks every byte."""
    command = [sys.executable, "-c", CLIENT, str(node.path), str(source), *words]
    ended = subprocess.run(command, env=os.environ | environment(source), capture_output=True, text=True)
    assert ended.returncode == 0, f"{ended.stderr}\n{node.log}"


def test_versions_work_together_and_read_each_others_disks(earlier: Path, tmp_path: Path) -> None:
    before = Process(tmp_path, **environment(earlier))
    try:
        client(THIS, before, "store:1")
        before.stop()
        after = Process(tmp_path, **environment(THIS))  # the upgrade
    finally:
        before.kill()
    try:
        client(earlier, after, "load:1", "store:2")
        after.stop()
        back = Process(tmp_path, **environment(earlier))  # the way back
    finally:
        after.kill()
    try:
        client(earlier, back, "load:1", "load:2")
        client(THIS, back, "load:2")
        back.stop()
    finally:
        back.kill()
