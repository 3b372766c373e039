"""The public interface over a socket: the same contract, unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtide.testing.interface import InterfaceContract
from tests.node.serving import Served


def served(folder: Path, nvme: Mapping[str, object], settings: Mapping[str, Mapping[str, object]]) -> Any:
    tree: dict[str, Any] = {"dram": {"budget": "8MiB", "segment": "1MiB"}, "nvme": dict(nvme)}
    for section, values in settings.items():
        tree[section] = {**tree.get(section, {}), **values}
    return Served(folder.with_suffix(".sock"), **tree)


class TestNodeInMemory(InterfaceContract):
    def open(self, folder: Path, **settings: Mapping[str, object]) -> Any:
        return served(folder, {}, settings)


class TestNodeOnDisk(InterfaceContract):
    outlives = True

    def open(self, folder: Path, **settings: Mapping[str, object]) -> Any:
        nvme = {"path": str(folder), "budget": "32MiB", "segment": "4MiB", "threads": 2, "token_ids": True}
        return served(folder, nvme, settings)
