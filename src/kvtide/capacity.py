"""What a host has for a store's budgets: checked once, when the store is opened.

A budget beyond the memory that there is would be found out by the system's out-of-memory killer, at a moment of its
choice. So a node refuses one beyond the host's memory or the limit of a control group that it is in. A store in another
program's process takes memory only as blocks come, and its control group's limit may yet be raised: it refuses what the
host can never have, and warns of the rest.
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
    """Bytes that this host has, and the least that a control group of this process may have; None: not known, no limit.

    Control groups of version 1 and 2; each above ours counts as well.
    """
    return _total(root), min(_groups(root), default=None)


def _total(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def group_folders(root: Path = _ROOT) -> Iterator[tuple[Path, bool]]:
    """The folders of the control groups for memory that this process is in, and whether they are of version 1."""
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
        # In a container the path may be the host's: what can be seen of it, and the container's own root, count.
        for place in (base / inside, *(base / above for above in inside.parents)):
            yield place, bool(controllers)


def _groups(root: Path) -> Iterator[int]:
    for place, first_version in group_folders(root):
        try:
            text = (place / ("memory.limit_in_bytes" if first_version else "memory.max")).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():  # else "max"; version 1 has a huge number for that
            yield int(text)


def check_memory(budget: int, node: bool, root: Path = _ROOT) -> None:
    """Raises ConfigError for a DRAM budget that cannot be had; ``node``: by a node."""
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
    """Warn if a disk has no room for a tier's budget, with what the tier has there already."""
    there = next((p for p in (path, *path.absolute().parents) if p.exists()), None)
    if there is None:
        return
    try:
        facts = os.statvfs(there)
        taken = sum(file.stat().st_blocks * 512 for file in path.iterdir() if file.is_file()) if path.is_dir() else 0
    except OSError:
        return  # opening the tier will tell
    room = facts.f_bavail * facts.f_frsize + taken
    if room < budget:
        log.warning(
            "nvme.budget is %s, and the disk of %s has room for %s of it; blocks will leave earlier than the budget "
            "says: lower nvme.budget, or free space there",
            size(budget),
            path,
            size(room),
        )
