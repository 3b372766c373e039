"""What somebody meets who adds kvtide to an engine, names a folder, and asks the same question twice.

The engine is bound to one core, and starts its node itself. Nothing waits for anything here: a document is asked for,
vLLM's own cache is emptied, and the document is asked for again; then both processes are gone, and a new engine is
asked.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from kvtide.errors import KvtideError
from kvtide.node.client.client import Client
from tests.engines.vllm.checkpoints import checkpoint
from tests.engines.vllm.engines import engine
from tests.engines.vllm.kept import BLOCK, connector, prompt
from tests.node.serving import eventually


def nodes(runtime: Path) -> list[int]:
    """Processes of nodes that listen in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            words = (process / "cmdline").read_text().split("\0")
            if "node" in words and any(word.startswith(str(runtime)) for word in words):
                found.append(int(process.name))
    return found


def status(runtime: Path) -> str:
    """What the nodes that listen in a folder, and their logs, tell about a miss."""
    told = [log.read_text(errors="replace") for log in runtime.glob("kvtide-*/*.log")]
    for path in runtime.glob("kvtide-*/*.sock"):
        with contextlib.suppress(KvtideError, OSError), Client(path) as client:
            told.append(repr(client.status()))
    return "\n".join(told)


@pytest.mark.parametrize("round_", [0, *(pytest.param(i, marks=pytest.mark.long) for i in range(1, 5))])
def test_a_document_is_found_the_second_time_and_by_the_next_engine(tmp_path: Path, round_: int) -> None:
    config = connector(nvme={"path": str(tmp_path / "kv")}, engine={"store": "through"})
    where = {"XDG_RUNTIME_DIR": str(tmp_path), "VLLM_CPU_OMP_THREADS_BIND": "0"}
    document = prompt(round_, 2400)
    whole = len(document) // BLOCK * BLOCK
    with engine(checkpoint(), tmp_path / "first.log", config, environment=where) as running:
        cold = running.complete(document, 1)
        assert cold.cached == 0
        running.reset_prefix_cache()
        assert running.complete(document, 1).cached == whole
        (node,) = nodes(tmp_path)
        assert os.sched_getaffinity(node) == os.sched_getaffinity(0), "it is bound to no core"
        running.terminate()
    os.kill(node, signal.SIGTERM)
    eventually(lambda: not nodes(tmp_path))
    with engine(checkpoint(), tmp_path / "second.log", config, environment=where) as running:
        found = running.complete(document, 1)
        assert (found.cached, found.tokens) == (whole, cold.tokens), status(tmp_path)
    for node in nodes(tmp_path):
        os.kill(node, signal.SIGKILL)
