"""What processes have, as the kernel tells it: shared memory, descriptors, and which of them are still there."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["alive", "descriptors", "memory", "resident", "standing_still"]

_ARENA = "/memfd:kvtide"


def memory(pids: Iterable[int]) -> dict[int, int]:
    """The arenas' segments that processes map or have open: inode and bytes, each once even if shared."""
    found: dict[int, int] = {}
    for pid in pids:
        found |= _mapped(pid)
        found |= _opened(pid)
    return found


@contextlib.contextmanager
def standing_still(pids: Iterable[int]) -> Iterator[None]:
    """Processes are stopped: what is read of one after the other is true of one moment."""
    stopped = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            stopped.append(pid)
    try:
        for pid in stopped:
            while _state(pid) in ("R", "S", "D"):
                time.sleep(0.0002)
        yield
    finally:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _opened(pid: int) -> dict[int, int]:
    found = {}
    for path in _links(pid):
        try:
            if str(path.readlink()).startswith(_ARENA):
                about = path.stat()
                found[about.st_ino] = about.st_size
        except OSError:
            continue  # closed meanwhile
    return found


def _mapped(pid: int) -> Counter[int]:
    found: Counter[int] = Counter()
    for line in _text(pid, "maps").splitlines():
        if _ARENA in line:
            addresses, _, _, _, inode = line.split()[:5]
            start, stop = addresses.split("-")
            found[int(inode)] += int(stop, 16) - int(start, 16)
    return found


def descriptors(pid: int, folder: Path) -> Counter[str]:
    """What a process has open, by kind, apart from its arena and the files of its tier in ``folder``."""
    found: Counter[str] = Counter()
    for path in _links(pid):
        try:
            target = str(path.readlink())
        except OSError:
            continue
        if not target.startswith((_ARENA, str(folder), "/proc/")):
            found[target.split(":")[0] if target.startswith("socket:") else target] += 1
    return found


def resident(pid: int) -> int:
    """Bytes of a process's own memory, without what it shares."""
    return sum(int(line.split()[1]) << 10 for line in _text(pid, "status").splitlines() if line.startswith("RssAnon"))


def alive(mark: str) -> list[int]:
    """Processes that were started with ``mark`` in their environment, and their forks."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if mark in _text(pid, "environ") and _state(pid) not in ("Z", "X", "")]


def _state(pid: int) -> str:
    """A letter, as ``ps`` shows it; none if there is no such process."""
    return _text(pid, "stat").rpartition(")")[2].strip()[:1]


def _links(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return []


def _text(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""
