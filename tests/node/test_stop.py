"""A node ends when it is told to, in the time that it was given, whatever hangs."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvtide import Store, config
from kvtide.node.client.client import Client
from kvtide.node.server import server
from kvtide.node.server.loop import run_in_loop
from kvtide.node.server.server import Node
from kvtide.testing.interface import MODEL, PLAIN, data, prompt
from tests.node.serving import eventually

HANGING = """
import sys, threading
from pathlib import Path
from kvtide import config
from kvtide.node import run
from kvtide.store.store import Store
from kvtide.tiers.syscalls import Disk

class Hanging(Disk):
    armed = False

    def write(self, fd, data, offset):
        if self.armed:
            threading.Event().wait()
        return super().write(fd, data, offset)

    def ready(self, http):
        self.armed = True
        print("ready", flush=True)

disk = Hanging()
run.Store = lambda config, **more: Store(config, disk=disk, **more)
dram = {"budget": "8MiB", "segment": "1MiB"}
nvme = {"path": sys.argv[1] + ".kv", "budget": "32MiB", "segment": "4MiB"}
run.serve(config.read(None, {}, dram=dram, nvme=nvme), Path(sys.argv[1]), stop_seconds=0.5, ready=disk.ready)
"""


def test_a_disk_that_hangs_does_not_hold_up_the_end(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    command = [sys.executable, "-c", HANGING, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as node:
        try:
            assert node.stdout is not None
            assert node.stdout.readline() == "ready\n"
            with Client(path) as client, client.session(MODEL) as session:
                session.store(prompt(1), data(PLAIN, prompt(1)))
                assert not client.flush(0.1), "it hangs"
                node.terminate()
                _, said = node.communicate(timeout=60)
                assert "the rest is lost" in said
                eventually(lambda: not client.connected)
        finally:
            node.kill()


def test_a_node_that_waits_for_its_predecessor_can_be_stopped(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    environment = {**os.environ, "KVTIDE_DRAM_BUDGET": "8MiB"}
    command = [sys.executable, "-m", "kvtide", "node", "--socket", str(path)]
    with path.with_suffix(".alive").open("w") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        with subprocess.Popen(command, env=environment) as node:
            try:
                eventually(lambda: signal.SIGTERM in caught(node.pid))
                node.terminate()
                assert node.wait(60) == 0
            finally:
                node.kill()


def caught(pid: int) -> list[signal.Signals]:
    """The signals that a process handles."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")), 16)
    return [number for number in signal.Signals if mask >> (number - 1) & 1]


def test_an_idle_node_greets_nobody_once_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_FIRST", 0.0)
    path = tmp_path / "node.sock"

    async def idle(store: Store) -> bool:
        gone = asyncio.get_running_loop().create_future()

        def going() -> None:
            with socket.socket(socket.AF_UNIX) as sock:
                gone.set_result(sock.connect_ex(str(path)) != 0)

        node = Node(store, path)
        node.when_idle(0.0, going)
        refused: bool = await gone
        node.close()
        return refused

    with Store(config.read(None, {}, dram={"budget": "8MiB"}), mapped=True) as store:
        assert run_in_loop(idle(store))
