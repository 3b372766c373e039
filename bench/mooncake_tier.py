"""Blocks from DRAM to a Mooncake pool and back, verified, beside Mooncake's own client, in the same rounds: by the tier
alone, which the target is for, and by the whole store, which first copies each block into DRAM.

Mooncake listens on all interfaces, whatever it is told. So this module runs itself in a network namespace that has
nothing but loopback, with a master and a process that holds the pool's memory, and prints its records.

Mooncake's own client has its memory registered, and puts and gets in the way that is fastest here: one at a time, in
several threads, several objects in a call, or in sessions, which do not poll. It verifies nothing, except in the
last way: there it computes one checksum of each object, in the same thread.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_digest

from bench.peers import environments
from kvtide import config as configuration
from kvtide.benchmarks.disk import Below
from kvtide.benchmarks.record import BenchRecord, Sample, compare, figure, timed
from kvtide.benchmarks.settings import MIB, NoPeers, Settings, block_sources, layout_of, size_name
from kvtide.benchmarks.storage import PlainClient
from kvtide.testing.blocks import aligned, fill, identity, keys
from kvtide.testing.servers import free_ports
from kvtide.tiers.base import Read, Write
from kvtide.tiers.shared.mooncake import Mooncake
from kvtide.tiers.shared.tier import Shared

__all__ = ["mooncake_tier"]

_POOL, _ROUND = 1536 * MIB, 256 * MIB
_THREADS = configuration.Mooncake().threads
_SUMMED = "8 in sessions, with checksums"
_MODES = {
    "one at a time": (1, 1, False),
    "2 threads": (2, 1, False),
    "8 in a call": (1, 8, False),
    "8 in sessions": (1, 8, True),
    _SUMMED: (1, 8, True),
}
"""Threads, objects in a call, and whether it is a call for ranges of objects that have sessions."""
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


class _Tier:
    """The tier alone, as the store uses it: records with a checksum of every section, verified when they are read."""

    def __init__(self, nbytes: int, count: int, url: str) -> None:
        layout = layout_of(nbytes)
        self._identity = identity(layout)
        self._keys = keys(count)
        footprint = layout.geometry["full"].footprint
        self._total = nbytes * count
        sources = block_sources(nbytes)
        self._spans = [aligned(footprint) for _ in sources]
        for span, source in zip(self._spans, sources, strict=True):
            fill(span, layout.geometry["full"], source)
        self._room = [aligned(footprint) for _ in range(count)]
        # Nobody drops anything: a store would read the drop log each second.
        blobs = Mooncake(url, transfers=_THREADS)
        self._tier = Shared(blobs, threads=_THREADS, timeout=_PATIENCE, patience=3600.0)

    def __call__(self) -> Mapping[str, Sample]:
        places: list[int] = []

        def put() -> None:
            items = [
                Write(key, self._identity, self._spans[i % len(self._spans)], b"", i + 1, i + 1)
                for i, key in enumerate(self._keys)
            ]
            places.extend(_awaited(lambda done: self._tier.write(items, done)))

        def get() -> None:
            items = [
                Read(key, self._identity, place, span)
                for key, place, span in zip(self._keys, places, self._room, strict=True)
            ]
            assert all(_awaited(lambda done: self._tier.read(items, done))), self._tier.statistics().reasons

        store = timed(put, nbytes=self._total)
        assert all(place >= 0 for place in places), self._tier.statistics().reasons
        load = timed(get, nbytes=self._total)
        assert self._room[-1] == self._spans[(len(self._keys) - 1) % len(self._spans)], "a wrong byte"
        assert all(_awaited(lambda done: self._tier.drop(list(zip(self._keys, places, strict=True)), done)))
        return {"store": store, "load": load}

    def close(self) -> None:
        self._tier.close()


def _awaited(call: Callable[[Callable[[Any], None]], None]) -> list[Any]:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    call(answers.put)
    return list(answers.get(timeout=_PATIENCE))


class _OwnClient:
    """Mooncake's client, used as its documentation says."""

    def __init__(self, library: Any, master: str, *, sessions: bool, summed: bool) -> None:
        self._sessions = sessions
        self._summed = summed
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
        self._sum(values)
        if self._sessions:
            assert not any(self._store.batch_put_session_start(list(names), sizes, self._kept))
            self._moved(self._store.batch_put_from_multi_buffer_ranges, names, places, sizes)
            assert not any(self._store.batch_put_session_end(list(names)))
        elif len(names) == 1:
            assert self._store.put_from(names[0], places[0], sizes[0], self._kept) == 0
        else:
            assert not any(self._store.batch_put_from(list(names), places, sizes, self._kept))

    def get(self, names: Sequence[str], values: Sequence[npt.NDArray[np.uint8]]) -> None:
        places, sizes = [self._place(value) for value in values], [value.nbytes for value in values]
        if self._sessions:
            assert not any(self._store.batch_get_session_start(list(names)))
            self._moved(self._store.batch_get_into_multi_buffer_ranges, names, places, sizes)
            self._store.batch_get_session_end(list(names))
            self._sum(values)
        elif len(names) == 1:
            assert self._store.get_into(names[0], places[0], sizes[0]) == sizes[0]
        else:
            assert list(self._store.batch_get_into(list(names), places, sizes)) == sizes

    def _sum(self, values: Sequence[npt.NDArray[np.uint8]]) -> None:
        if self._summed:
            for value in values:
                xxh3_128_digest(value.data)

    def _moved(
        self, call: Callable[..., Sequence[int]], names: Sequence[str], places: Sequence[int], sizes: Sequence[int]
    ) -> None:
        answers = call(list(names), [[place] for place in places], [[size] for size in sizes], [[0] for _ in names])
        assert list(answers) == list(sizes)

    def remove(self, name: str) -> None:
        assert self._store.remove(name, True) == 0


def _measure(library: Any, master: str, url: str, nbytes: int, rounds: int, command: str) -> Iterator[BenchRecord]:
    count = _ROUND // nbytes
    with ExitStack() as stack:
        given = {"url": url, "timeout": _PATIENCE, "threads": _THREADS}
        contestants: dict[str, Any] = {
            "kvtide": stack.enter_context(contextlib.closing(_Tier(nbytes, count, url))),
            "store": stack.enter_context(contextlib.closing(Below(nbytes, count, "mooncake", given))),
        }
        for mode, (threads, row, sessions) in _MODES.items():
            client = _OwnClient(library, master, sessions=sessions, summed=mode == _SUMMED)
            plain = PlainClient(nbytes, count, threads, row, client.put, client.get, client.remove)
            contestants[mode] = stack.enter_context(contextlib.closing(plain))
        found = compare(contestants, rounds, lambda text: print(f"{size_name(nbytes)}: {text}", file=sys.stderr))
    for task, what in (("store", "put"), ("load", "get")):
        speeds = {name: [sample.speed for sample in tasks[task]] for name, tasks in found.items()}
        ours, whole = speeds.pop("kvtide"), speeds.pop("store")
        best = max(speeds.keys() - {_SUMMED}, key=lambda mode: statistics.median(speeds[mode]))
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
            "ours with every checksum",
        )
        yield figure(
            f"mooncake-store-{what}-{size_name(nbytes)}",
            "GB/s",
            whole,
            better="higher",
            against=f"Mooncake's own client, {best}",
            reference=speeds[best],
            command=command,
            note=f"CPU seconds per GB in the client's process: {cpu['store']:.2f}; with the copy into DRAM, index and "
            "planner",
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
