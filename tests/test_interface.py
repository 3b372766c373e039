"""The public interface, by its contract: in DRAM alone, and with an NVMe tier below in its several modes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import kvtide
from kvtide import Store
from kvtide.testing.interface import InterfaceContract


def opened(nvme: Mapping[str, object], **settings: Mapping[str, object]) -> Store:
    tree: dict[str, Any] = {"dram": {"budget": "8MiB", "segment": "1MiB"}, "nvme": dict(nvme)}
    for section, values in settings.items():
        tree[section] = {**tree.get(section, {}), **values}
    return kvtide.open(**tree)


class TestDram(InterfaceContract):
    def open(self, folder: Path, **settings: Mapping[str, object]) -> Store:
        return opened({}, **settings)


class TestDramChecked(InterfaceContract):
    """With a checksum of every block in memory, which is checked at every load."""

    def open(self, folder: Path, **settings: Mapping[str, object]) -> Store:
        return opened({}, **{**settings, "dram": {"checksum": True, **settings.get("dram", {})}})


class TestNvme(InterfaceContract):
    outlives = True
    extra: ClassVar[dict[str, object]] = {}

    def open(self, folder: Path, **settings: Mapping[str, object]) -> Store:
        nvme = {"path": str(folder), "budget": "32MiB", "segment": "4MiB", "threads": 2, **self.extra}
        return opened(nvme, **settings)


class TestNvmeOnEviction(TestNvme):
    extra: ClassVar[dict[str, object]] = {"store": "eviction"}


class TestNvmeCompressed(TestNvme):
    extra: ClassVar[dict[str, object]] = {"codec": "zstd", "token_ids": True, "direct": False}
