"""Nodes for tests: in a thread of this process, or in a process of its own."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from kvtide import config as configuration
from kvtide.clock import Clock
from kvtide.node.client.client import Client
from kvtide.node.events.open import publish_events
from kvtide.node.server.loop import run_in_loop
from kvtide.node.server.server import Node
from kvtide.store.store import Store
from kvtide.tiers.syscalls import Disk
from tests.node import host

__all__ = ["Apart", "Process", "Served", "Thread", "apart", "eventually"]

T = TypeVar("T")
_SOCKETS = 3
"""Of a node without clients: the one it listens on, and its loop's own pair."""


class Thread:
    """A node in a thread."""

    def __init__(self, path: Path, disk: Disk | None = None, clock: Clock | None = None, **settings: Any) -> None:
        self.path = path
        self.store = Store(configuration.read(None, **settings), clock=clock, disk=disk, mapped=True)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: run_in_loop(self._run()), name="node")
        self._thread.start()
        self._ready.wait()

    async def _run(self) -> None:
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.node = Node(self.store, self.path)
        numbers = self.path.with_suffix(".events")
        events = publish_events(self.store, numbers) if self.store.given.events.endpoint else None
        self.node.events = events
        self._ready.set()
        await self._stop.wait()
        self.node.close()
        if events is not None:
            events.close()

    def close(self) -> None:
        """Stop serving, and close the store."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self.store.close()


class Served(Client):
    """A client with a node of its own, which ends with it."""

    def __init__(self, path: Path, **settings: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._thread = Thread(path, **settings)
        super().__init__(path)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._thread.close()


class Process:
    """A node in a process of its own, on ``folder``."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        self.path = folder / "node.sock"
        self._settings = settings
        self.start()

    before: tuple[str, ...] = ()
    """What its command line begins with."""

    def start(self) -> None:
        """Start it, and wait until it serves."""
        environment = {
            **os.environ,
            "KVTIDE_DRAM_BUDGET": "16MiB",
            "KVTIDE_DRAM_SEGMENT": "2MiB",
            "KVTIDE_NVME_PATH": str(self.folder / "tier"),
            "KVTIDE_NVME_BUDGET": "64MiB",
            "KVTIDE_NVME_SEGMENT": "8MiB",
            **self._settings,
        }
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
            at = self.folder / "ready.sock"
            at.unlink(missing_ok=True)
            ready.bind(str(at))
            ready.settimeout(60)
            command = [*self.before, sys.executable, "-m", "kvtide", "node", "--socket", str(self.path), "--verbose"]
            environment["NOTIFY_SOCKET"] = str(at)
            with (self.folder / "log").open("ab") as log:
                self.process = subprocess.Popen(command, env=environment, stderr=log)
            try:
                assert ready.recv(100) == b"READY=1"
            except TimeoutError:
                self.kill()
                raise AssertionError(self.log) from None

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def at_rest(self) -> Counter[str]:
        """Its descriptors, when all clients have gone and all that they held is free. Wait for that."""
        with Client(self.path) as client:
            assert client.flush(60)
            eventually(lambda: client.statistics().held == 0)
        eventually(lambda: host.descriptors(self.process.pid, self.folder)["socket"] == _SOCKETS)
        return host.descriptors(self.process.pid, self.folder)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Let it end in good order."""
        self.process.terminate()
        assert self.process.wait(60) == 0, self.log


class Apart(Process):
    """A node that cannot see the processes of others, as in a container."""

    before = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


apart = pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*Apart.before, "true"], check=False).returncode != 0,
    reason="this system lets nobody make a PID namespace",
)


def eventually(condition: Callable[[], T]) -> T:
    """Wait until a condition holds; answers it."""
    end = time.monotonic() + 120
    while not (found := condition()):
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)
    return found
