"""``python -m bench.nixl``: reads from another node's memory by NIXL over UCX, over TCP, and a bare stream, in turns.

It needs nixl-cu12. UCX takes what it finds, or what UCX_TLS says: without an RDMA device these are shared memory and
TCP, which NIXL is not made for. The figures are printed, and written to ``bench/results/nixl/``."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

from bench.node_processes import (
    CONNECTIONS,
    Contest,
    Worker,
    make_credentials,
    read,
    receive_stream,
    send_stream,
    serve,
)
from kvtide.benchmarks.settings import MIB

_RESULTS = Path(__file__).parent / "results" / "nixl"
_TOTAL = 128 * MIB
_ROUNDS = 8


def _measured(folder: str, nbytes: int) -> dict[str, dict[str, float]]:
    count = _TOTAL // nbytes
    with ExitStack() as stack:
        contests: dict[str, Contest] = {}
        for name, fabric in (("kvtide, TCP", "tcp"), ("kvtide, NIXL over UCX", "nixl")):
            server = Worker(stack, serve, folder, False, nbytes, count, fabric)
            address, keys = server.pipe.recv()
            reader = Worker(stack, read, folder, False, nbytes, [address], keys, fabric)
            assert reader.pipe.recv() == "ready"
            contests[name] = Contest(server, [reader], nbytes, count)
        sender = Worker(stack, send_stream, folder, False, nbytes, count, False)
        taker = Worker(stack, receive_stream, folder, False, nbytes, count, sender.pipe.recv(), CONNECTIONS, False)
        assert taker.pipe.recv() == "ready"
        contests["bare stream"] = Contest(sender, [taker], nbytes, count)
        speeds: dict[str, list[float]] = {name: [] for name in contests}
        for turn in range(1 + _ROUNDS):
            for name, contest in contests.items():
                sample = contest.round()
                if turn:
                    speeds[name].append(sample.speed)
    return {
        name: {"GB/s": statistics.median(some), "lowest": min(some), "highest": max(some)}
        for name, some in speeds.items()
    }


def _main() -> None:
    found: dict[str, object] = {
        "command": "python -m bench.nixl",
        "nixl": version("nixl-cu12"),
        "UCX_TLS": os.environ.get("UCX_TLS", ""),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "rounds": _ROUNDS,
        "bytes of a round": _TOTAL,
    }
    with tempfile.TemporaryDirectory() as text:
        make_credentials(Path(text))
        for nbytes in (2 * MIB, 32 * MIB):
            found[f"blocks of {nbytes // MIB} MiB"] = _measured(text, nbytes)
    _RESULTS.mkdir(exist_ok=True)
    name = os.environ.get("UCX_TLS", "default").replace(",", "-")
    (_RESULTS / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n")
    json.dump(found, sys.stdout, indent=2)


if __name__ == "__main__":
    _main()
