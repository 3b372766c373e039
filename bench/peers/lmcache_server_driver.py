"""Drives LMCache 0.5.6's server: one driver starts it, this one or others are its clients.

The client is LMCache's own, the one of ``lmcache bench server``, with tensors on the CPU. Modes. ``handle``: the
engine's tensors lie in shared memory and the server copies out of and into them (its ``lmcache_driven``, the default
of the server). ``shm``: the client copies into and out of the server's memory (``engine_driven`` with ``--shm-name``).
``pickle``: the bytes travel over the socket (``engine_driven`` without it).

The server gets what is best for it: a page of the engine is a whole block, all layers in one tensor, so that it copies
two long pieces for each block; memory that is taken beforehand; a thread for each client; no metrics and no log.
Retrieving needs a lookup first, which takes the locks; it is not timed.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import base_driver as base
import torch
from lmcache.cli.commands.bench.server_bench import helpers
from lmcache.cli.commands.bench.server_bench.client import RequestContext, ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig

TOKENS = 256
MODES = {
    "handle": ("lmcache_driven", []),
    "shm": ("engine_driven", ["--shm-name", f"lmcache-bench-{os.getpid()}"]),
    "pickle": ("engine_driven", []),
}
START_S = 120.0


class Server:
    """``lmcache server`` in a process of its own."""

    def __init__(self, mode: str, port: int, gigabytes: float, clients: int) -> None:
        transfer, more = MODES[mode]
        command = [str(Path(sys.executable).with_name("lmcache")), "server", "--port", str(port), "--http-port"]
        command += [str(port + 1), "--supported-transfer-mode", transfer, "--l1-size-gb", str(gigabytes), *more]
        command += ["--no-l1-use-lazy", "--disable-observability", "--null-block-id", "-1"]
        command += ["--max-workers", str(clients), "--eviction-policy", "noop", "--chunk-size", str(TOKENS)]
        self.process = subprocess.Popen(
            command,
            stdout=sys.stderr,
            env={**os.environ, "LMCACHE_DISABLE_BANNER": "1"},
            preexec_fn=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL),  # it dies with us
        )

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Client:
    """One engine with ``count`` blocks of its own, which it stores and loads all at once."""

    def __init__(self, mode: str, port: int, number: int, block_bytes: int, count: int) -> None:
        helpers._INSTANCE_ID_BASE = 1000 + 100 * number  # an engine for the server
        helpers._DEFAULT_RPC_TIMEOUT_S = START_S
        self._first = number << 20
        self._blocks = count
        self.tokens = count * TOKENS
        width = block_bytes // (2 * TOKENS * 2)
        self.client = ServerBenchClient(
            BenchConfig(
                rpc_url=f"tcp://localhost:{port}",
                http_url="",
                mode="cpu",
                transfer_mode=MODES[mode][0],
                tp_size=1,
                use_mla=False,
                num_tokens=self.tokens,
                kvcache_shape_spec=f"(2,{count},{TOKENS},1,{width}):bfloat16:1",
                num_blocks=count,
                block_size=TOKENS,
            ),
            lambda text: print(text, file=sys.stderr),
        )
        self.client.start()
        self.requests = self.client._require_started()

    def request(self, turn: int) -> RequestContext:
        found = self.client.create_request(self._first + turn, f"{self._first + turn}", "bench")
        if found is None or found.num_full_tokens != self.tokens or found.block_offset != 0:
            raise RuntimeError(f"a request of other blocks than asked for: {found}")
        return found

    def fill(self, value: int) -> None:
        for tensor in self.client._workers[0].kv_caches.values():
            tensor.view(torch.uint8).fill_(value)

    def require(self, value: int) -> None:
        for tensor in self.client._workers[0].kv_caches.values():
            if not bool((tensor.view(torch.uint8) == value).all()):
                raise RuntimeError("the peer returned other bytes than were stored")

    def find(self, request: RequestContext) -> None:
        """Look all blocks up and lock them. Asked again without a pause, which is its quickest."""
        key = helpers._make_key(request.token_ids, request.request_id, end=self.tokens)
        self.requests.lookup(key, 1).result(timeout=START_S)
        while (found := self.requests.query_prefetch_status(request.request_id).result(timeout=START_S)) is None:
            pass
        if found != self._blocks:
            raise RuntimeError(f"{found} of {self._blocks} blocks found")

    def unlock(self, request: RequestContext) -> None:
        key = helpers._make_key(request.token_ids, request.request_id, end=self.tokens)
        self.requests.free_lookup_locks(key, 1).result(timeout=START_S)
        self.client.end_session(request)


_server: Server | None = None
_client: Client | None = None


def serve(mode: str, port: int, gigabytes: float, clients: int) -> dict[str, Any]:
    global _server
    stop()
    _server = Server(mode, port, gigabytes, clients)
    return {}


def connect(mode: str, port: int, number: int, block_bytes: int, count: int) -> dict[str, Any]:
    global _client
    leave()
    _client = Client(mode, port, number, block_bytes, count)
    return {}


def _timed(work: Any) -> dict[str, Any]:
    """When it began and ended, on a clock that all processes share."""
    start = time.perf_counter()
    work()
    return {"start": start, "stop": time.perf_counter()}


def store(turn: int) -> dict[str, Any]:
    assert _client is not None
    client, request = _client, _client.request(turn)
    client.fill(1 + turn % 100)
    answer = _timed(lambda: _good(client.client.store(request, 0, client.tokens)))
    client.client.end_session(request)
    return answer


def load(turn: int) -> dict[str, Any]:
    assert _client is not None
    client, request = _client, _client.request(turn)
    client.fill(0)
    client.find(request)
    answer = _timed(lambda: _good(client.client.retrieve(request, 0, client.tokens)))
    client.client.end_session(request)
    client.require(1 + turn % 100)
    return answer


def _good(result: Any) -> None:
    if result is None or not result.succeeded:
        raise RuntimeError(f"the transfer failed: {result}")


def match(turn: int, repeats: int) -> dict[str, Any]:
    """Look up a prompt that was stored: what one costs in wall time, and in CPU time of both processes."""
    assert _client is not None
    assert _server is not None
    client, wall, cpu = _client, 0.0, 0.0
    for _ in range(repeats):
        request = client.request(turn)
        theirs, own, start = _server.cpu_seconds(), time.process_time(), time.perf_counter()
        client.find(request)
        wall += time.perf_counter() - start
        cpu += time.process_time() - own + _server.cpu_seconds() - theirs
        client.unlock(request)
    return {"seconds": wall / repeats, "cpu_seconds": cpu / repeats}


def clear() -> dict[str, Any]:
    assert _client is not None
    _client.requests.clear(True).result(timeout=START_S)
    return {}


def leave() -> dict[str, Any]:
    global _client
    if _client is not None:
        _client.client.close()
        _client = None
    return {}


def stop() -> dict[str, Any]:
    global _server
    leave()
    if _server is not None:
        _server.stop()
        _server = None
    return {}


if __name__ == "__main__":
    operations = {f.__name__: f for f in (serve, connect, store, load, match, clear, leave, stop)}
    base.serve(version("lmcache"), operations)
