"""How many connections to read another node's blocks over, and how large the pieces that are verified together.

    python -m bench.connections [--seconds 8] [--output FILE]

Prints JSON. Every combination, and bare streams over 1, 2 and 4 connections, take turns, for one client and four, plain
and with TLS. A node chooses by the number of its processors (``connections_of``, ``many_processors``).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.node_processes import (
    TOTAL,
    Contest,
    Worker,
    make_credentials,
    read,
    receive_stream,
    send_stream,
    serve,
)
from kvtide.benchmarks.record import Sample, machine
from kvtide.benchmarks.settings import MIB
from kvtide.peers import callers
from kvtide.tiers.peers import link

_WAYS = ((2, 8 * MIB), (2, MIB), (4, 8 * MIB), (4, MIB), (4, MIB // 2))
"""Connections, and bytes of a piece."""
_STREAMS = (1, 2, 4)


def serve_all(pipe: Connection, *arguments: Any) -> None:
    """A node that has room for the connections of all contestants at a time."""
    callers._EACH = callers._CONNECTIONS = callers._STRANGERS = callers._STRANGERS_EACH = 1000
    serve(pipe, *arguments)


def read_in_pieces(
    pipe: Connection,
    connections: int,
    piece: int,
    folder: str,
    tls: bool,
    nbytes: int,
    addresses: Sequence[str],
    keys: list[bytes],
) -> None:
    """A reader over so many connections, with pieces of that size."""
    link._SMALL_PIECE = link._LARGE_PIECE = piece
    read(pipe, folder, tls, nbytes, addresses, keys, connections=connections)


def measure(seconds: float, tls: bool, nbytes: int, clients: int) -> Iterator[dict[str, Any]]:
    count = TOTAL // nbytes
    mine = count if clients == 1 else count // 2
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        make_credentials(Path(folder))
        node = Worker(stack, serve_all, folder, tls, nbytes, count)
        address, keys = node.pipe.recv()
        contests: dict[tuple[int, int], Contest] = {}
        for way in _WAYS:
            readers = [
                Worker(stack, read_in_pieces, *way, folder, tls, nbytes, [address], keys[:mine]) for _ in range(clients)
            ]
            contests[way] = Contest(node, readers, nbytes, mine)
        for connections in _STREAMS:
            sender = Worker(stack, send_stream, folder, tls, nbytes, count, False)
            arguments = folder, tls, nbytes, mine, sender.pipe.recv(), connections, False
            takers = [Worker(stack, receive_stream, *arguments) for _ in range(clients)]
            contests[connections, 0] = Contest(sender, takers, nbytes, mine)
        for contest in contests.values():
            for client in contest._clients:
                assert client.pipe.recv() == "ready"
        found: dict[tuple[int, int], list[Sample]] = {way: [] for way in contests}
        start, turn = time.monotonic(), 0
        while turn < 4 or time.monotonic() - start < seconds:
            for way, contest in contests.items():
                sample = contest.round()
                if turn:  # the first computes the checksums of the blocks
                    found[way].append(sample)
            turn += 1
    for (connections, piece), samples in found.items():
        yield {
            "what": "kvtide" if piece else "bare stream",
            "tls": tls,
            "block_mib": nbytes // MIB,
            "clients": clients,
            "connections": connections,
            "piece_kib": piece >> 10,
            "gb_per_second": _summary([sample.speed for sample in samples]),
            "cpu_seconds_per_gb": _summary([sample.cpu_per_gb for sample in samples]),
            "rounds": len(samples),
        }


def _summary(figures: Sequence[float]) -> list[float]:
    """Median, least and most."""
    return [round(figure, 3) for figure in (statistics.median(figures), min(figures), max(figures))]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seconds", type=float, default=8.0, help="at least so long for each kind of read")
    arguments.add_argument("--output", type=Path, help="write the figures there, too")
    given = arguments.parse_args()
    found: list[dict[str, Any]] = []
    for tls in (False, True):
        for nbytes in (2 * MIB, 32 * MIB):
            for clients in (1, 4):
                for figure in measure(given.seconds, tls, nbytes, clients):
                    found.append(figure)
                    print(json.dumps(figure), flush=True)
    if given.output is not None:
        whole = {
            "machine": machine(),
            "cpus": len(os.sched_getaffinity(0)),
            "command": f"python -m bench.connections --seconds {given.seconds:g}",
            "read": found,
        }
        given.output.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
