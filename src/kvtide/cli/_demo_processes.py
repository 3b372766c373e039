"""The processes of ``kvtide demo``: started, and ended in any case, also when the demonstration is interrupted.

Each has a process group of its own. So a Ctrl-C reaches only the process of the command, which ends the others, and
grandchildren end with their group.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, Self

from kvtide.capacity import memory_limits
from kvtide.errors import TierError
from kvtide.formatting import size

__all__ = [
    "DemoProcesses",
    "SignalGuard",
    "check_room",
    "clean_environment",
    "failure",
    "filesystem",
    "scratch_folder",
    "start_node",
    "working_folder",
    "write_settings",
]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STOP_SECONDS = 15.0
"""How long processes may take to end when they are asked to; then they are killed."""


class SignalGuard:
    """Turns the first signal that asks to end into a KeyboardInterrupt, and ignores those that follow, so that nothing
    interrupts the cleanup. Use it in a ``with``, in the main thread; elsewhere it changes nothing."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._deferred = 0
        self._seen = False
        self._raised = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            ignored = (signal.SIG_IGN, None)  # as under nohup
            heard = [one for one in _SIGNALS if signal.getsignal(one) not in ignored]
            self._before = {one: signal.signal(one, self._handle) for one in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """A signal that arrives meanwhile takes effect at the end."""
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1
            self._raise()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._seen = True
        self._raise()

    def _raise(self) -> None:
        if self._seen and not self._raised and not self._deferred:
            self._raised = True
            raise KeyboardInterrupt


class DemoProcesses:
    """Processes that run. Use it in a ``with``: none of them runs after it."""

    def __init__(self, guard: SignalGuard) -> None:
        self._guard = guard
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._guard.deferred():
            self.stop(*self._running)

    def start(
        self, command: Sequence[str], folder: Path, log: Path, environment: dict[str, str], **streams: Any
    ) -> subprocess.Popen[bytes]:
        """Start a process in ``folder`` that writes its errors, and its output unless ``streams`` say otherwise, to
        ``log``."""
        with self._guard.deferred(), log.open("ab") as output:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stderr=output,
                start_new_session=True,
                **{"stdin": subprocess.DEVNULL, "stdout": output, **streams},
            )
            self._running.append(process)
        return process

    def stop(self, *processes: subprocess.Popen[bytes], seconds: float = _STOP_SECONDS) -> None:
        """Ask processes to end, wait, and kill what is left of their groups."""
        for process in processes:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + seconds
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    _close(stream)
        self._running = [one for one in self._running if one not in processes]


def _close(stream: IO[bytes] | None) -> None:
    if stream is not None:
        stream.close()


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment, without kvtide settings and without access to the hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVTIDE_")}
    return kept | {"HF_HUB_OFFLINE": "1", **more}


def write_settings(folder: Path) -> Path:
    """Write the settings of the demonstration's store, which is in this folder, and return their file."""
    nvme = json.dumps(str(folder / "nvme"))  # a string of TOML, whatever letters the folder has
    settings = folder / "kvtide.toml"
    settings.write_text(f'[dram]\nbudget = "1GiB"\n[nvme]\npath = {nvme}\nbudget = "2GiB"\nstore = "through"\n')
    return settings


def start_node(processes: DemoProcesses, folder: Path, settings: Path) -> subprocess.Popen[bytes]:
    """Start a node at ``folder/node.sock``, and wait until it serves. To stop it writes its blocks to disk."""
    socket, log = folder / "node.sock", folder / "node.log"
    command = [sys.executable, "-m", "kvtide", "node", "--socket", str(socket), "--config", str(settings)]
    node = processes.start(command, folder, log, clean_environment())
    while not socket.exists():
        if node.poll() is not None:
            raise failure("the node", node.returncode, log)
        time.sleep(0.02)
    return node


def failure(name: str, code: int, log: Path) -> TierError:
    """The error of a process that ended with ``code``; ``log`` says why, or its end is quoted."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    text = "\n".join(lines)
    if "No space left on device" in text or "ENOSPC" in text:
        return TierError(
            f"{name} failed: the disk of {log.parent} is full. Free space there, or name a folder on another disk "
            "with --path"
        )
    if code == -signal.SIGKILL or "MemoryError" in text or "not enough memory" in text:
        return TierError(
            f"{name} was ended, probably for want of memory: end other programs, or allow this container more memory"
        )
    last = "\n".join(lines[-5:])
    return TierError(f"{name} ended with code {code}; its log ends:\n{last}")


def check_room(place: Path, disk: int, memory: int) -> None:
    """Raises TierError if there is too little disk space or memory for the demonstration."""
    free = shutil.disk_usage(place).free
    if free < disk:
        raise TierError(
            f"the demonstration needs {size(disk)} of disk space, and {place} has {size(free)} left. Free space there, "
            "or name a folder on another disk with --path"
        )
    total, limit = memory_limits()
    known = [number for number in (limit, _available() or total) if number is not None]
    if known and min(known) < memory:
        raise TierError(
            f"the demonstration needs {size(memory)} of memory, and {size(min(known))} can be used: end other "
            "programs, or allow this container more memory"
        )


def _available() -> int | None:
    """Memory that programs can still take, in bytes."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


@contextlib.contextmanager
def working_folder(place: Path, guard: SignalGuard, say: Callable[[str], None]) -> Iterator[Path]:
    """A temporary folder in ``place``, deleted at the end."""
    folder = None
    try:
        with guard.deferred():
            folder = Path(tempfile.mkdtemp(prefix="kvtide-demo-", dir=place))
        yield folder
    finally:
        if folder is not None:
            with guard.deferred():
                try:
                    say("deleting what was stored")
                finally:  # the output may have gone
                    shutil.rmtree(folder, ignore_errors=True)


def filesystem(folder: Path) -> str:
    """The type of the filesystem of ``folder``."""
    found = ("", "unknown")
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mount, kind, *_ = line.split()
            if folder.resolve().is_relative_to(mount) and len(mount) >= len(found[0]):
                found = mount, kind
    return found[1]


def scratch_folder() -> Path:
    """A folder for temporary files that is on a disk, if there is one: on tmpfs "NVMe" would be memory."""
    usual = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()]
    there = [folder for folder in usual if folder.is_dir() and os.access(folder, os.W_OK)]
    return next((folder for folder in there if filesystem(folder) != "tmpfs"), there[0])
