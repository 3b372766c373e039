"""What containers have apart and what they share: a node and its clients in namespaces of their own.

As in Kubernetes with hostPID, the node is in this process id namespace; its clients are not. They share a folder. That
a node without hostPID refuses clients is checked in tests/node/test_client.py.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.node.serving import Process

OWN = ("unshare", "--user", "--map-root-user", "--mount", "--ipc", "--net", "--uts")
"""What a container has of its own, except for processes."""
PIDS = ("--pid", "--fork", "--kill-child", "--mount-proc")

CLIENT = """
import os, sys, kvtide, numpy as np
assert os.getpid() == 1
layout = kvtide.Layout.attention(layers=1, heads=2, head_dim=64, dtype="bfloat16", block_tokens=64)
tokens, block = np.arange(64, dtype=np.uint32), bytes(range(256)) * (layout.geometry["full"].nbytes // 256)
with kvtide.connect("unix:" + sys.argv[1]) as client, client.session(kvtide.Model(layout, weights="w")) as session:
    stored = session.store(tokens, [block])
    assert (stored.stored, stored.present) == ((1, 0) if sys.argv[2] == "first" else (0, 1)), stored
    with session.match(tokens) as match:
        loaded = np.empty(len(block), np.uint8)
        session.load(match, into=[loaded]).wait()
        assert loaded.tobytes() == block
"""

pytestmark = pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*OWN, *PIDS, "true"], capture_output=True).returncode != 0,
    reason="this system lets nobody make namespaces",
)


class Container(Process):
    """A node in a container with hostPID."""

    before = OWN


def test_containers_with_their_own_processes_share_the_memory_of_a_node(tmp_path: Path) -> None:
    node = Container(tmp_path)
    try:
        for which in ("first", "second"):
            command = [*OWN, *PIDS, sys.executable, "-c", CLIENT, str(node.path), which]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert ended.returncode == 0, ended.stderr + node.log
        node.stop()
    finally:
        node.kill()
