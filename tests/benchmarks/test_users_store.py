"""Benchmarks never open the store that the user has configured: they would evict what is in it."""

from __future__ import annotations

import ast
import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtide
from bench import bookkeeping, connector, scheduler
from kvtide import benchmarks
from kvtide.benchmarks.disk import Below
from kvtide.benchmarks.node import running
from kvtide.benchmarks.settings import MIB, NoPeers, Settings, configured, environment
from kvtide.errors import KvtideError
from tests.node.serving import Thread, eventually

FILES = [
    *Path(benchmarks.__file__).parent.glob("*.py"),
    *(Path(str(m.__file__)) for m in (bookkeeping, connector, scheduler)),
]
TOKENS = np.arange(64, dtype=np.uint32)
MODEL = kvtide.Model(kvtide.Layout.attention(layers=1, heads=1, head_dim=8, block_tokens=16), "the user's")


class Mine:
    """A user's store in folders, with content, and a node: all named by kvtide.toml and the environment."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.tiers: dict[str, Any] = {
            "dram": {"budget": "64MiB", "segment": "8MiB"},
            "nvme": {"path": str(folder / "nvme"), "budget": "16MiB", "segment": "4MiB", "store": "through"},
            "files": {"path": str(folder / "files"), "store": "through"},
        }
        with kvtide.open(**self.tiers) as store, store.session(MODEL) as session:
            block = np.ones(MODEL.layout.geometry["full"].nbytes, np.uint8)
            session.store(TOKENS, [block] * 4)
            eventually(lambda: store.flush() and store.statistics().counts.get("blocks written to files") == 4)
        home = folder / "work"
        home.mkdir()
        lines = []
        for name, section in self.tiers.items():
            lines += [f"[{name}]", *(f'{key} = "{value}"' for key, value in section.items())]
            for key, value in section.items():
                patch.setenv(f"KVTIDE_{name.upper()}_{key.upper()}", value)
        (home / "kvtide.toml").write_text("\n".join(lines))
        patch.setenv("KVTIDE_CONFIG", str(home / "kvtide.toml"))
        patch.setenv("KVTIDE_ENGINE_ADDRESS", f"unix:{folder}/node.sock")
        patch.setenv("KVTIDE_NODE_HTTP", "127.0.0.1:1")
        patch.chdir(home)
        self.before = self.content()

    def content(self) -> dict[str, tuple[int, bytes]]:
        """When each file was changed, and its bytes."""
        files = [file for tier in ("nvme", "files") for file in (self.folder / tier).rglob("*") if file.is_file()]
        assert files
        return {str(file): (file.stat().st_mtime_ns, file.read_bytes()) for file in files}


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mine:
    return Mine(tmp_path, monkeypatch)


def test_figures_are_measured_beside_it(mine: Mine, tmp_path: Path) -> None:
    settings = Settings(True, tmp_path / "work", "test", lambda _: None, NoPeers())
    node = Thread(tmp_path / "node.sock", dram={"budget": "64MiB"}, nvme={"path": ""}, files={"path": ""})
    with contextlib.closing(node):
        found = {record.name for record in benchmarks.run(settings, ["match", "probe"])}
        found |= {record.name for record in bookkeeping.pipeline(settings)}
        used = node.store.statistics().counts
    assert {"match-list", "pipeline-load-key", "probe-node-files-own"} <= found
    assert not used.get("blocks stored"), "the user's node was used"
    assert mine.content() == mine.before
    assert [file.name for file in (tmp_path / "work").iterdir()] == ["kvtide.toml"], "something was left behind"


def test_stores_of_large_figures_are_made_beside_it(mine: Mine, tmp_path: Path) -> None:
    """What those build that take too long to run here."""
    costs: dict[str, list[list[float]]] = {"find": [], "store": [], "evict": []}
    bookkeeping._costs_at(4096, costs)
    assert all(costs.values())
    below = Below(2 * MIB, 2, "nvme", {"path": str(tmp_path / "own"), "budget": 64 * MIB})
    assert set(below()) == {"store", "load"}
    below.close()
    with running(256 * MIB) as (path, _), kvtide.connect(f"unix:{path}") as node:
        assert set(node.statistics().tiers) == {"dram"}
        assert node.statistics().tiers["dram"].budget == 256 * MIB
    assert mine.content() == mine.before


def test_a_node_that_cannot_start_is_told_at_once() -> None:
    with pytest.raises(KvtideError, match="ended with exit status"), running(256 * MIB, KVTIDE_DRAM_POLICY="none"):
        pass


def test_settings_are_those_of_the_benchmark_alone(mine: Mine) -> None:
    assert configured(dram={"budget": "8MiB"}) == kvtide.config.Config(dram=kvtide.config.Dram(budget=8 * MIB))
    assert {name for name in environment(KVTIDE_A="b", C="d") if name.startswith("KVTIDE_")} == {"KVTIDE_A"}


@pytest.mark.parametrize("file", sorted(FILES), ids=lambda file: file.stem)
def test_no_benchmark_opens_a_store_in_another_way(file: Path) -> None:
    """Only settings.py makes a store; only storage.py asks where the storage is that it was told to measure."""
    calls = {ast.unparse(node.func) for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)}
    opening = {
        "kvtide.open",
        "kvtide.Store",
        "Store",
        "open_anywhere",
        "open_node",
        "configuration.read",
        "config.read",
    }
    allowed = {"settings": {"kvtide.Store", "configuration.read"}, "storage": {"configuration.read"}}
    assert calls & opening == allowed.get(file.stem, set())
