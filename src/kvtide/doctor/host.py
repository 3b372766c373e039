"""Checks of this host's memory: for a node, for pinning by a GPU, and for sharing between processes."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from kvtide.capacity import group_folders
from kvtide.config import Config
from kvtide.doctor.finding import Finding, error, ok, warning
from kvtide.formatting import size
from kvtide.tiers.dram.memory import Memory

__all__ = ["available", "check", "has_gpu"]

_PROBE = 2 << 20
_SHM = 1 << 30
"""Bytes of /dev/shm that suffice for communication between the ranks of an engine."""
_FILES = 256
"""File descriptors that a node needs besides those of its segments."""


def has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


def available(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes available to a new process, and what limits them: the machine, or a control group."""
    facts = _fields((root / "proc/meminfo").read_text().replace(":", ""))
    least, why = facts["MemAvailable"] * 1024, "free on this machine"
    for limit, used in _groups(root):
        if limit - used < least:
            least, why = max(0, limit - used), f"left of this control group's {size(limit)}"
    return least, why


def _groups(root: Path) -> Iterator[tuple[int, int]]:
    """The limit of each control group of this process, and its usage that cannot be reclaimed."""
    names = [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ]
    for place, first_version in group_folders(root):
        limit, used, cached = names[first_version]
        try:
            text = (place / limit).read_text().strip()
            taken = int((place / used).read_text()) - _fields((place / "memory.stat").read_text()).get(cached, 0)
        except (OSError, ValueError):
            continue
        if text.isdecimal():
            yield int(text), taken


def _fields(text: str) -> dict[str, int]:
    return {words[0]: int(words[1]) for line in text.splitlines() if len(words := line.split()) > 1}


def check(config: Config, ranks: int, here: bool) -> Iterator[Finding]:
    """``here``: the node is not running yet, and will be started on this host with this configuration."""
    if here:
        yield _memory(config)
        yield _memfd(config)
        yield _descriptors(config)
    yield _pinned(config)
    if ranks > 1:
        yield _shm()


def _memory(config: Config) -> Finding:
    budget = config.dram.budget
    if config.dram.huge_pages == "2MiB":
        facts = _fields(Path("/proc/meminfo").read_text().replace(":", ""))
        free = facts.get("HugePages_Free", 0) * facts.get("Hugepagesize", 0) * 1024
        why, more = "free in huge pages", f"vm.nr_hugepages to {-(-budget // (2 << 20))} at least"
    else:
        free, why = available()
        more = "the container's memory limit"
    if budget > free:
        return error("DRAM", f"dram.budget is {size(budget)}, and {size(free)} are {why}", f"lower it, or raise {more}")
    if budget > 0.8 * free:
        return warning(
            "DRAM", f"dram.budget is {size(budget)} of {size(free)} {why}: little is left for vLLM", "lower it"
        )
    return ok("DRAM", f"dram.budget is {size(budget)}, and {size(free)} are {why}")


def _memfd(config: Config) -> Finding:
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most != resource.RLIM_INFINITY and most < config.dram.segment:
        return error(
            "memfd",
            f"files have {size(most)} at most here, segments {size(config.dram.segment)}",
            "ulimit -f unlimited",
        )
    try:
        memory = Memory(0, _PROBE, config.dram.huge_pages, shared=True)
        huge = memory.huge
        memory.close()
    except OSError as e:
        return error(
            "memfd",
            f"memory cannot be shared ({os.strerror(e.errno or 0)})",
            "allow memfd_create in the sandbox; with dram.huge_pages = 2MiB, set pages aside with vm.nr_hugepages",
        )
    if config.dram.huge_pages != "no" and not huge:
        return warning(
            "memfd",
            "sealed memory can be shared, but in pages of 4 KiB: the disk reads into it at more CPU, and slower",
            "use Linux 6.1 or later, or set pages aside with vm.nr_hugepages and dram.huge_pages = 2MiB",
        )
    pages = ", in huge pages" if huge else ""
    return ok("memfd", f"sealed memory can be shared{pages}; it takes nothing of /dev/shm")


def _descriptors(config: Config) -> Finding:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    disk = config.nvme.budget // config.nvme.segment if config.nvme.path else 0
    need = config.dram.budget // config.dram.segment + disk + _FILES
    if most != resource.RLIM_INFINITY and most < need:
        return error(
            "descriptors",
            f"{most:,} are allowed, and the segments need {need:,}",
            "raise the hard limit (ulimit -n, LimitNOFILE), or dram.segment and nvme.segment",
        )
    return ok("descriptors", f"{need:,} are needed at most")


def _pinned(config: Config) -> Finding:
    if not has_gpu():
        return ok("pinned memory", "no NVIDIA GPU here: blocks are copied by the CPU, and no memory is pinned")
    most, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if most != resource.RLIM_INFINITY and most < config.dram.budget:
        return warning(
            "pinned memory",
            f"the limit of locked memory is {size(most)}, less than dram.budget; where the driver heeds it, loads fail",
            "ulimit -l unlimited, docker run --ulimit memlock=-1, or LimitMEMLOCK=infinity",
        )
    return ok("pinned memory", "all of DRAM may be pinned for the GPU")


def _shm() -> Finding:
    try:
        about = os.statvfs("/dev/shm")
    except OSError as e:
        return error("/dev/shm", f"is not there ({e.strerror}), and the ranks of vLLM need it", "mount a tmpfs there")
    free = about.f_bavail * about.f_frsize
    if free < _SHM:
        return warning(
            "/dev/shm",
            f"{size(free)} are free; ranks of vLLM talk through it (kvtide does not)",
            "docker run --ipc=host or --shm-size=2g; in Kubernetes an emptyDir with medium: Memory there",
        )
    return ok("/dev/shm", f"{size(free)} are free for vLLM's ranks")
