"""Drives Mooncake's store over TCP: one process holds blocks in its memory, others get them.

A driver reads one JSON object a line and answers with one, as the other drivers do (README.md). The process that holds
blocks also starts the master, which knows who has what. Mooncake listens on all interfaces, whatever it is told, so
this runs in a network namespace that has nothing but loopback: the driver refuses any other.

Modes of ``get``: ``batch`` is one ``batch_get_into`` for all blocks, ``single`` a ``get_into`` for each, and
``threads`` the same in two threads. The memory is registered before.
"""

import ctypes
import json
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

_answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # the library prints

from mooncake.store import MooncakeDistributedStore, ReplicateConfig  # noqa: E402 - after stdout was moved

DEADLINE_S = 60.0
MODES = ("batch", "single", "threads")


class Memory:
    """Registered memory for blocks."""

    def __init__(self, store: Any, block: int, count: int) -> None:
        self.view = memoryview(mmap.mmap(-1, block * count))
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.view))
        self.places = [start + i * block for i in range(count)]
        self.sizes = [block] * count
        check(store.register_buffer(start, block * count), "register_buffer")


def check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what} answered {code}")


def key(number: int) -> str:
    return f"block-{number}"


def pattern(number: int) -> bytes:
    return bytes([number % 251 + 1]) * 64


class Driver:
    def __init__(self) -> None:
        if {name for _, name in socket.if_nameindex()} != {"lo"}:
            raise RuntimeError("there are other interfaces than loopback here, and Mooncake would listen on them")
        self._master: subprocess.Popen[bytes] | None = None
        self._store: Any = None
        self._memory: Memory | None = None

    def hold(self, port: int, host: str, block_bytes: int, count: int) -> dict[str, Any]:
        """Start the master, and put blocks into this process's segment."""
        master = Path(sys.executable).with_name("mooncake_master")
        self._master = subprocess.Popen([master, f"--rpc_port={port}", "--default_kv_lease_ttl=600000"], stdout=2)
        end = time.monotonic() + DEADLINE_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)
        total = block_bytes * count
        self._open(port, host, total + total // 4 + (64 << 20), block_bytes, count)
        assert self._memory is not None
        for i, place in enumerate(self._memory.places):
            self._memory.view[i * block_bytes : i * block_bytes + 64] = pattern(i)
            check(self._store.put_from(key(i), place, block_bytes, ReplicateConfig()), "put_from")
        return {}

    def connect(self, port: int, host: str, block_bytes: int, count: int) -> dict[str, Any]:
        """Be a client that holds nothing."""
        self._open(port, host, 0, block_bytes, count)
        return {}

    def _open(self, port: int, host: str, segment: int, block: int, count: int) -> None:
        self._store = MooncakeDistributedStore()
        master = f"127.0.0.1:{port}"
        check(self._store.setup(host, "P2PHANDSHAKE", segment, 64 << 20, "tcp", "", master), "setup")
        self._memory = Memory(self._store, block, count)

    def get(self, mode: str) -> dict[str, Any]:
        """Get all blocks, and look at the start of each."""
        memory, block = self._memory, self._memory.sizes[0] if self._memory else 0
        assert memory is not None
        numbers = range(len(memory.places))
        for i in numbers:
            memory.view[i * block : i * block + 64] = bytes(64)
        results: list[int] = [0] * len(memory.places)
        start = time.perf_counter()
        if mode == "batch":
            results = self._store.batch_get_into([key(i) for i in numbers], memory.places, memory.sizes)
        else:
            parts = [numbers] if mode == "single" else [numbers[::2], numbers[1::2]]
            threads = [threading.Thread(target=self._some, args=(part, memory, results)) for part in parts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        stop = time.perf_counter()
        if list(results) != memory.sizes:
            raise RuntimeError(f"not all blocks were got: {sorted(set(results))}")
        if any(bytes(memory.view[i * block : i * block + 64]) != pattern(i) for i in numbers):
            raise RuntimeError("other bytes were got than were put")
        return {"start": start, "stop": stop}

    def _some(self, part: Sequence[int], memory: Memory, results: list[int]) -> None:
        for i in part:
            results[i] = self._store.get_into(key(i), memory.places[i], memory.sizes[i])

    def cpu(self) -> dict[str, Any]:
        return {"seconds": time.process_time()}

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
        if self._master is not None:
            self._master.kill()
            self._master.wait()


def main() -> None:
    driver = Driver()
    print(json.dumps({"ready": True, "version": version("mooncake-transfer-engine-non-cuda")}), file=_answers)
    try:
        for line in sys.stdin:
            request = json.loads(line)
            if request["op"] == "quit":
                return
            try:
                answer = getattr(driver, request.pop("op"))(**request)
            except Exception as e:  # noqa: BLE001 - told to whoever asks
                answer = {"error": f"{type(e).__name__}: {e}"}
            print(json.dumps(answer), file=_answers)
    finally:
        driver.close()


main()
