"""Checks of the NVMe tier's disk: free space, direct I/O, and speed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvtide.benchmarks.disk import RawDisk
from kvtide.config import Nvme
from kvtide.doctor.finding import Finding, error, ok, warning
from kvtide.errors import KvtideError, TierError
from kvtide.formatting import size
from kvtide.tiers.nvme.directory import Directory
from kvtide.tiers.syscalls import Disk

__all__ = ["check", "filesystem", "measure"]

_BLOCK, _COUNT = 8 << 20, 32
"""Bytes per block and number of blocks written and read in a measurement."""


def check(nvme: Nvme) -> Iterator[Finding]:
    """Check the folder of a tier that is not open yet."""
    path = Path(nvme.path).absolute()
    try:
        base = _there(path)
        _look(path)
        with _aside(path) as folder:
            direct = Directory(Path(folder), Disk()).direct_works()
    except (KvtideError, OSError) as e:
        yield error("disk", f"{path} cannot be used: {e}", "let this user write there, or give another nvme.path")
        return
    held = sum(file.stat().st_blocks * 512 for file in path.glob("*.segment"))
    free = shutil.disk_usage(base).free + held
    text = f"nvme.budget is {size(nvme.budget)}, and {path} has room for {size(free)}"
    yield ok("disk space", text) if nvme.budget <= free else error("disk space", text, "lower it, or free space")
    kind = filesystem(base)
    if kind in ("tmpfs", "ramfs"):
        yield warning("disk", f"{path} is on {kind}, which is memory and ends with the host", "give a folder on a disk")
    elif kind == "overlay":
        yield warning("disk", f"{path} is in a container's own layer, and ends with it", "mount a volume there")
    if nvme.direct and direct:
        yield ok("O_DIRECT", f"works on {kind}")
    elif nvme.direct:
        yield warning(
            "O_DIRECT", f"{kind} has none: all goes through the page cache", "use ext4 or XFS on a local disk"
        )
    else:
        yield warning("O_DIRECT", "is turned off: all goes through the page cache", "set nvme.direct = true")


def _look(path: Path) -> None:
    """Raises TierError, or OSError, if no tier can be opened there."""
    if path.exists() and any(path.iterdir()):
        try:
            Directory(path, Disk()).check()
        except FileNotFoundError:
            raise TierError("it is not empty, and not kvtide's") from None


def measure(nvme: Nvme) -> float:
    """Bytes per second read from the tier's disk, by direct I/O, a few blocks at a time. Raises OSError."""
    path = Path(nvme.path).absolute()
    with _aside(path) as folder:
        raw = RawDisk(Path(folder), _BLOCK, _COUNT)
        try:
            raw()  # warm-up: then extents and memory have been used before, as in a running tier
            return raw()["load"].speed * 1e9
        finally:
            raw.close()


def _aside(path: Path) -> tempfile.TemporaryDirectory[str]:
    """A temporary folder on the same filesystem: if possible beside the tier's own, which only the tier should write
    to."""
    base = _there(path)
    if base == path and os.access(path.parent, os.W_OK | os.X_OK) and path.parent.stat().st_dev == path.stat().st_dev:
        base = path.parent
    return tempfile.TemporaryDirectory(prefix=".kvtide-doctor-", dir=base)


def _there(path: Path) -> Path:
    """The path, or its closest existing parent."""
    return next(p for p in (path, *path.parents) if p.is_dir())


def filesystem(path: Path) -> str:
    """The filesystem type, as the kernel names it."""
    where, found = path.resolve(), ("", "a filesystem")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split(" ")
        place = place.encode().decode("unicode_escape")
        if where.is_relative_to(place) and len(place) >= len(found[0]):
            found = place, kind
    return found[1]
