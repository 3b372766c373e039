"""Checks a store's budgets against what the host has, once, when the store is opened.

With a budget beyond the available memory, the system's out-of-memory killer would end the process at an arbitrary
moment. So a node refuses a budget beyond the host's memory or the limit of one of its control groups. A store in
another program's process takes memory only as blocks are stored, and its control group's limit may still be raised: it
refuses what the host can never provide, and warns of the rest.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

from kvtide.errors import ConfigError
from kvtide.formatting import size

__all__ = ["check_disk", "check_memory", "group_folders", "memory_limits"]

log = logging.getLogger("kvtide.store")

_ROOT = Path("/")


def memory_limits(root: Path = _ROOT) -> tuple[int | None, int | None]:
    """The memory of this host, and the lowest limit of this process's control groups, in bytes; None: unknown, or no
    limit.

    For control groups of version 1 and 2; parent groups are included.
    """
    return _total(root), min(_groups(root), default=None)


def _total(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def group_folders(root: Path = _ROOT) -> Iterator[tuple[Path, bool]]:
    """The folders of the memory control groups of this process, and whether they are of version 1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        inside = Path(path.lstrip("/"))
        # In a container the path may be the host's: the visible part of it, and the container's own root, are used.
        for place in (base / inside, *(base / above for above in inside.parents)):
            yield place, bool(controllers)


def _groups(root: Path) -> Iterator[int]:
    for place, first_version in group_folders(root):
        try:
            text = (place / ("memory.limit_in_bytes" if first_version else "memory.max")).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():  # otherwise "max"; version 1 has a huge number for that
            yield int(text)


def check_memory(budget: int, node: bool, root: Path = _ROOT) -> None:
    """Raise ConfigError for a DRAM budget that is impossible; ``node``: for a node."""
    total, limit = memory_limits(root)
    if total is not None and budget > total:
        raise ConfigError(
            f"dram.budget is {size(budget)}, and this host has {size(total)} of memory; set dram.budget to "
            "what can be spared of that"
        )
    if limit is None or budget <= limit:
        return
    text = (
        f"dram.budget is {size(budget)}, and the control group of this process may have {size(limit)} of "
        "memory; lower dram.budget, or raise the container's or service's memory limit"
    )
    if node:
        raise ConfigError(text)
    log.warning("%s", text)


def check_disk(path: Path, budget: int) -> None:
    """Warn if a disk has no space for a tier's budget, including what the tier already uses there."""
    there = next((p for p in (path, *path.absolute().parents) if p.exists()), None)
    if there is None:
        return
    try:
        facts = os.statvfs(there)
        taken = sum(file.stat().st_blocks * 512 for file in path.iterdir() if file.is_file()) if path.is_dir() else 0
    except OSError:
        return  # opening the tier will report it
    room = facts.f_bavail * facts.f_frsize + taken
    if room < budget:
        log.warning(
            "nvme.budget is %s, and the disk of %s has space for %s of it; blocks will be evicted before the budget "
            "is reached: lower nvme.budget, or free space there",
            size(budget),
            path,
            size(room),
        )
