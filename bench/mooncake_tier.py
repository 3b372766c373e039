"""Blocks through DRAM to a Mooncake pool and back, verified, beside Mooncake's own client, in the same rounds.

Mooncake listens on all interfaces, whatever it is told. So this module runs itself in a network namespace that has
nothing but loopback, with a master and a process that holds the pool's memory, and prints its records.

Mooncake's own client has its memory registered, and puts and gets in the way that is fastest here: one at a time, in
several threads, or several objects in a call. It verifies nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from bench.peers import environments
from kvtide import config as configuration
from kvtide.benchmarks.disk import Below
from kvtide.benchmarks.record import BenchRecord, compare, figure
from kvtide.benchmarks.settings import MIB, NoPeers, Settings, size_name
from kvtide.benchmarks.storage import PlainClient
from kvtide.testing.servers import free_ports

__all__ = ["mooncake_tier"]

_POOL, _ROUND = 1280 * MIB, 256 * MIB
_THREADS = configuration.Mooncake().threads
_MODES = {"one at a time": (1, 1), "2 threads": (2, 1), "8 in a call": (1, 8)}
"""Threads, and objects in a call."""
_PATIENCE = 60.0
_HOLD = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 0, "tcp", "", sys.argv[1]) == 0
print("ready", flush=True)
sys.stdin.read()
"""


def mooncake_tier(settings: Settings) -> Iterator[BenchRecord]:
    """Nothing without peers."""
    if isinstance(settings.peers, NoPeers):
        return
    environments.build("mooncake")
    script = f'ip link set lo up && exec {sys.executable} -m {__name__} "$@"'
    command = ["unshare", "--net", "--map-root-user", "sh", "-c", script, "sh", settings.command]
    variables = os.environ | {"LD_LIBRARY_PATH": environments.libraries("mooncake")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=environments.ROOT, env=variables) as process:
        assert process.stdout is not None
        for line in process.stdout:
            yield msgspec.json.decode(line, type=BenchRecord)
    if process.returncode:
        raise RuntimeError(f"the measurement beside Mooncake's own client failed with {process.returncode}")


class _OwnClient:
    """Mooncake's client, used as its documentation says."""

    def __init__(self, library: Any, master: str) -> None:
        self._store = library.MooncakeDistributedStore()
        self._kept = library.ReplicateConfig()
        assert self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master) == 0
        self._places: dict[int, int] = {}
        """Addresses of arrays, which are registered at their first use: in the warm-up."""

    def _place(self, value: npt.NDArray[np.uint8]) -> int:
        place = self._places.get(id(value))
        if place is None:
            place = self._places[id(value)] = value.ctypes.data
            assert self._store.register_buffer(place, value.nbytes) == 0
        return place

    def put(self, names: Sequence[str], values: Sequence[npt.NDArray[np.uint8]]) -> None:
        places, sizes = [self._place(value) for value in values], [value.nbytes for value in values]
        if len(names) == 1:
            assert self._store.put_from(names[0], places[0], sizes[0], self._kept) == 0
        else:
            assert not any(self._store.batch_put_from(list(names), places, sizes, self._kept))

    def get(self, names: Sequence[str], values: Sequence[npt.NDArray[np.uint8]]) -> None:
        places, sizes = [self._place(value) for value in values], [value.nbytes for value in values]
        if len(names) == 1:
            assert self._store.get_into(names[0], places[0], sizes[0]) == sizes[0]
        else:
            assert list(self._store.batch_get_into(list(names), places, sizes)) == sizes

    def remove(self, name: str) -> None:
        assert self._store.remove(name, True) == 0


def _measure(library: Any, master: str, url: str, nbytes: int, rounds: int, command: str) -> Iterator[BenchRecord]:
    count = _ROUND // nbytes
    with ExitStack() as stack:
        given = {"url": url, "timeout": _PATIENCE, "threads": _THREADS}
        contestants: dict[str, Any] = {
            "kvtide": stack.enter_context(contextlib.closing(Below(nbytes, count, "mooncake", given)))
        }
        for mode, (threads, row) in _MODES.items():
            client = _OwnClient(library, master)
            plain = PlainClient(nbytes, count, threads, row, client.put, client.get, client.remove)
            contestants[mode] = stack.enter_context(contextlib.closing(plain))
        found = compare(contestants, rounds, lambda text: print(f"{size_name(nbytes)}: {text}", file=sys.stderr))
    for task, what in (("store", "put"), ("load", "get")):
        speeds = {name: [sample.speed for sample in tasks[task]] for name, tasks in found.items()}
        ours = speeds.pop("kvtide")
        best = max(speeds, key=lambda mode: statistics.median(speeds[mode]))
        cpu = {name: statistics.median(s.cpu_per_gb for s in tasks[task]) for name, tasks in found.items()}
        yield figure(
            f"mooncake-{what}-{size_name(nbytes)}",
            "GB/s",
            ours,
            better="higher",
            peers={f"mooncake {mode}": values for mode, values in speeds.items()},
            against=f"Mooncake's own client, {best}",
            reference=speeds[best],
            bar=0.85,
            command=command,
            note=f"CPU seconds per GB in the client's process: {cpu['kvtide']:.2f}, and Mooncake's {cpu[best]:.2f}; "
            "ours with the copy into DRAM and every checksum",
        )


def _wait(port: int) -> None:
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def main() -> None:
    from kvtide.tiers.shared.mooncake_client import load_library

    library = load_library()
    port, admin = free_ports(2)
    program = Path(str(library.__file__)).with_name("mooncake_master")
    command = [str(program), f"--rpc_port={port}", f"--metrics_port={admin}"]
    master = f"127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            for each in (port, admin):
                _wait(each)
            hold = [sys.executable, "-c", _HOLD, master, str(_POOL)]
            with subprocess.Popen(hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=2) as holder:
                try:
                    assert holder.stdout is not None
                    assert holder.stdout.readline() == b"ready\n"
                    for nbytes in (32 * MIB, 2 * MIB):
                        url = f"mooncake://{master}?admin={admin}"
                        for record in _measure(library, master, url, nbytes, 7, sys.argv[1]):
                            print(msgspec.json.encode(record).decode(), flush=True)
                finally:
                    holder.kill()
        finally:
            server.kill()
    sys.stdout.flush()
    os._exit(0)  # the clients have no master any more


if __name__ == "__main__":
    main()
