"""Benchmarks that a user runs on their machine, compared with memory and the disk. Those that serve only the
development of kvtide are in ``bench/``, beside the other systems that it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvtide.benchmarks.disk import nvme
from kvtide.benchmarks.encryption import encryption
from kvtide.benchmarks.files import files
from kvtide.benchmarks.memory import dram, match
from kvtide.benchmarks.node import node
from kvtide.benchmarks.probe import probe
from kvtide.benchmarks.record import BenchRecord
from kvtide.benchmarks.settings import Settings, check_free_space, chosen
from kvtide.benchmarks.storage import objects, valkey

__all__ = ["FIGURES", "run"]

FIGURES: dict[str, Callable[[Settings], Iterator[BenchRecord]]] = {
    "match": match,
    "dram": dram,
    "nvme": nvme,
    "files": files,
    "sealed": encryption,
    "node": node,
    "probe": probe,
    "objects": objects,
    "valkey": valkey,
}
STORAGES = ("objects", "valkey")
"""Measured only if named explicitly: these benchmarks write to a storage that others may use."""


def run(settings: Settings, only: Sequence[str] = ()) -> Iterator[BenchRecord]:
    """Run all benchmarks, or only the named ones."""
    figures = chosen(FIGURES, only or [name for name in FIGURES if name not in STORAGES])
    check_free_space(settings)
    for measure in figures:
        yield from measure(settings)
