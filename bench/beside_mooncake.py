"""Reads from another node's memory beside Mooncake's TCP transfer, in the same rounds.

Mooncake listens on all interfaces, whatever it is told. So both are measured in a network namespace of their own that
has nothing but loopback: this module runs itself there, and prints what it has measured.

Mooncake gets all blocks of a round in the way that is fastest here: one call for all, a call for each, or calls in two
threads. Its memory is registered before. It verifies nothing; kvtide's reads are verified.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.node_processes import TOTAL, Contest, Worker, make_credentials, read, serve
from bench.peers import environments
from bench.peers.client import Peer
from kvtide.benchmarks.record import BenchRecord, Sample, figure
from kvtide.benchmarks.settings import MIB, NoPeers, Settings

__all__ = ["beside_mooncake"]

_MODES = ("batch", "single", "threads")
_LEAST, _SECONDS = 4, 10.0
_UP = 0x8914, struct.pack("16sh14x", b"lo", 0x41)
"""SIOCSIFFLAGS, and lo with IFF_UP and IFF_RUNNING."""


def beside_mooncake(settings: Settings) -> Iterator[BenchRecord]:
    """Nothing without peers."""
    if isinstance(settings.peers, NoPeers):
        return
    environments.build("mooncake")
    command = ["unshare", "--net", "--map-root-user", sys.executable, "-m", __name__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=environments.ROOT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said = json.loads(line)
            if "progress" in said:
                settings.progress(said["progress"])
            else:
                yield _figure(settings, **said)
    if process.returncode:
        raise RuntimeError(f"the measurement beside Mooncake failed with {process.returncode}")


def _figure(
    settings: Settings, name: str, version: str, ours: list[float], theirs: Mapping[str, list[float]], cpu: list[float]
) -> BenchRecord:
    best = max(theirs, key=lambda mode: statistics.median(theirs[mode]))
    ratios = [a / b for a, b in zip(ours, theirs[best], strict=True)]
    return figure(
        name,
        "GB/s",
        ours,
        better="higher",
        peers={f"mooncake {mode}": speeds for mode, speeds in theirs.items()},
        against=f"Mooncake {version}, TCP, {best}",
        reference=theirs[best],
        bar=1.5,
        command=settings.command,
        note=f"ratio {min(ratios):.1f} to {max(ratios):.1f} in {len(ratios)} rounds; CPU seconds per GB, both sides: "
        f"{cpu[0]:.2f}, and Mooncake {cpu[1]:.2f}; ours verified; both sides on {os.cpu_count()} cores",
    )


class _Mooncake:
    """A process that holds blocks, and clients that get them."""

    def __init__(self, stack: ExitStack, port: int, nbytes: int, count: int, mine: int, clients: int) -> None:
        variables = {"LD_LIBRARY_PATH": environments.libraries("mooncake")}
        self._holder, *self._clients = (stack.enter_context(Peer("mooncake", variables)) for _ in range(1 + clients))
        self.version = self._holder.version
        self._bytes = clients * mine * nbytes
        where: dict[str, Any] = {"port": port, "host": "127.0.0.1", "block_bytes": nbytes}
        self._holder.ask(op="hold", count=count, **where)
        for client in self._clients:
            client.ask(op="connect", count=mine, **where)
        self._pool = stack.enter_context(ThreadPoolExecutor(clients))

    def _cpu(self) -> float:
        return sum(float(one.ask(op="cpu")["seconds"]) for one in (self._holder, *self._clients))

    def round(self, mode: str) -> Sample:
        before = self._cpu()
        answers = list(self._pool.map(lambda client: client.ask(op="get", mode=mode), self._clients))
        seconds = max(a["stop"] for a in answers) - min(a["start"] for a in answers)
        return Sample(seconds, self._cpu() - before, self._bytes)


def _measure(folder: str, port: int, nbytes: int, clients: int) -> dict[str, object]:
    name = f"peers-mooncake-{nbytes // MIB}mib-{clients}-client{'s' if clients > 1 else ''}"
    count = TOTAL // nbytes
    mine = max(1, count // clients // 2) if clients > 1 else count
    with ExitStack() as stack:
        server = Worker(stack, serve, folder, False, nbytes, count)
        address, keys = server.pipe.recv()
        readers = [Worker(stack, read, folder, False, nbytes, [address], keys[:mine]) for _ in range(clients)]
        for reader in readers:
            assert reader.pipe.recv() == "ready"
        contest = Contest(server, readers, nbytes, mine)
        other = _Mooncake(stack, port, nbytes, count, mine, clients)
        ours: list[Sample] = []
        theirs: dict[str, list[Sample]] = {mode: [] for mode in _MODES}
        contest.round()
        for mode in _MODES:
            other.round(mode)
        began = time.monotonic()
        while len(ours) < _LEAST or (time.monotonic() - began < _SECONDS and len(ours) < 16):
            print(json.dumps({"progress": f"{name}, round {len(ours) + 1}"}), flush=True)
            ours.append(contest.round())
            for mode, samples in theirs.items():
                samples.append(other.round(mode))
    best = max(theirs.values(), key=lambda samples: statistics.median(s.speed for s in samples))
    return {
        "name": name,
        "version": other.version,
        "ours": [s.speed for s in ours],
        "theirs": {mode: [s.speed for s in samples] for mode, samples in theirs.items()},
        "cpu": [statistics.median(s.cpu_per_gb for s in samples) for samples in (ours, best)],
    }


def main() -> None:
    with socket.socket() as sock:
        fcntl.ioctl(sock, *_UP)
    with tempfile.TemporaryDirectory() as folder:
        make_credentials(Path(folder))
        ports = iter(range(15500, 15600))
        for nbytes in (2 * MIB, 32 * MIB):
            for clients in (1, 4):
                print(json.dumps(_measure(folder, next(ports), nbytes, clients)), flush=True)


if __name__ == "__main__":
    main()
