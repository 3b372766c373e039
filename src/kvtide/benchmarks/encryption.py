"""The cost of encryption: encrypted blocks to the disk and back, compared with unencrypted ones and raw direct I/O."""

from __future__ import annotations

import os
import secrets
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from kvtide.benchmarks.disk import THREADS, Below, RawDisk, rehearsed
from kvtide.benchmarks.record import BenchRecord, compare, figure
from kvtide.benchmarks.settings import MIB, Settings, size_name

__all__ = ["encryption"]

_BAR = 1 / 1.3
"""Target relative to the unencrypted speed: 1.3 times the time."""


def encryption(settings: Settings) -> Iterator[BenchRecord]:
    """Store and load with a key for the tenant, verified by authentication tags."""
    for nbytes in (32 * MIB, 2 * MIB):
        count = settings.rounds(1024, 256) * MIB // nbytes
        with tempfile.TemporaryDirectory(dir=settings.folder, prefix="kvtide-bench-") as name, ExitStack() as stack:
            folder = Path(name)
            (folder / "key").touch(0o600)
            (folder / "key").write_bytes(secrets.token_bytes(32))
            security = {
                "encrypt": True,
                "key_source": f"file:{folder / 'key'}",
                "key_file": str(folder / "keys.json"),
            }
            room: dict[str, object] = {"budget": int(count * nbytes * 1.2) + 64 * MIB, "threads": THREADS}
            contestants: dict[str, Below | RawDisk] = {
                "sealed": Below(nbytes, count, "nvme", {"path": str(folder / "sealed"), **room}, security=security),
                "open": Below(nbytes, count, "nvme", {"path": str(folder / "open"), **room}),
                "raw": RawDisk(folder, nbytes, count),
            }
            for one in contestants.values():
                stack.callback(one.close)
            turns = {name: rehearsed(one) for name, one in contestants.items()}
            rounds = compare(turns, settings.rounds(7, 3), settings.progress)
        for task in ("store", "load"):
            ours, plain, raw = (rounds[name][task] for name in ("sealed", "open", "raw"))
            # The target is for systems limited by the disk: whether this one is depends on the cores needed to keep up
            # with it.
            cores = statistics.median(s.speed for s in raw) * statistics.median(s.cpu_per_gb for s in ours)
            slow = cores < (os.cpu_count() or 1)
            note = "" if slow else f"the processor is the limit: the disk's pace takes {cores:.1f} cores"
            yield figure(
                f"sealed-{task}-{size_name(nbytes)}",
                "GB/s",
                [s.speed for s in ours],
                better="higher",
                limit=[s.speed for s in raw],
                against="the same blocks unencrypted",
                reference=[s.speed for s in plain],
                bar=_BAR if task == "load" and slow else None,
                command=settings.command,
                note=note,
            )
            yield figure(
                f"sealed-{task}-cpu-{size_name(nbytes)}",
                "CPU s/GB",
                [s.cpu_per_gb for s in ours],
                better="lower",
                limit=[s.cpu_per_gb for s in raw],
                against="the same blocks unencrypted",
                reference=[s.cpu_per_gb for s in plain],
                command=settings.command,
            )
