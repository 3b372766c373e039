"""Reads from another node's memory, beside a bare stream over the same sockets, on loopback; lookups; and matches.

CPU time is that of all processes, both sides. Contestants take turns, round by round; a round is timed from the first
client's start to the last one's end. See ``node_processes.py`` for what the contestants do.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from bench.beside_mooncake import beside_mooncake
from bench.node_processes import (
    CONNECTIONS,
    TOTAL,
    Contest,
    Worker,
    make_credentials,
    match,
    read,
    receive_stream,
    send_stream,
    serve,
    settings_of,
)
from kvtide.benchmarks.record import BenchRecord, Rounds, figure
from kvtide.benchmarks.settings import MIB, SMALL, Settings
from kvtide.tiers.peers.tier import connections_of

__all__ = ["other_nodes"]

_SECONDS = 10.0
"""How long the rounds of a figure take, if more than the least."""


def other_nodes(settings: Settings) -> Iterator[BenchRecord]:
    """Reads from another node's DRAM, and lookups at three nodes."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        make_credentials(folder)
        yield from _matches(settings, text)
        yield from _lookups(settings, text)
        for tls in (False, True):
            for nbytes in (2 * MIB, 32 * MIB):
                for clients in (1, 4):
                    yield from _reads(settings, text, tls, nbytes, clients)
    yield from beside_mooncake(settings)


def _reads(settings: Settings, folder: str, tls: bool, nbytes: int, clients: int) -> Iterator[BenchRecord]:
    count = TOTAL // nbytes
    mine = count if clients == 1 else count // 2
    name = f"peers-{'tls-' if tls else ''}read-{nbytes // MIB}mib-{clients}-client{'s' if clients > 1 else ''}"
    with ExitStack() as stack:
        contests: dict[str, Contest] = {}
        server = Worker(stack, serve, folder, tls, nbytes, count)
        address, keys = server.pipe.recv()
        readers = [Worker(stack, read, folder, tls, nbytes, [address], keys[:mine]) for _ in range(clients)]
        contests["kvtide"] = Contest(server, readers, nbytes, mine)
        bare = {"stream": (CONNECTIONS, False), "stream, 1 connection": (1, False)}
        bare["stream + checksums"] = CONNECTIONS, True
        if (ours := connections_of(settings_of(folder, tls).peers)) > CONNECTIONS:
            bare["stream, as many connections"] = ours, False
        for what, (connections, checked) in bare.items():
            sender = Worker(stack, send_stream, folder, tls, nbytes, count, checked)
            where = sender.pipe.recv()
            takers = [
                Worker(stack, receive_stream, folder, tls, nbytes, mine, where, connections, checked)
                for _ in range(clients)
            ]
            contests[what] = Contest(sender, takers, nbytes, mine)
        for worker in [w for contest in contests.values() for w in contest._clients]:
            assert worker.pipe.recv() == "ready"
        rounds: Rounds = {what: {"read": []} for what in contests}
        first: dict[str, float] = {}
        """The speed of the first round, in which the node computes the checksums of its blocks."""
        least, began = settings.rounds(4, 2), time.monotonic()
        for turn in range(settings.rounds(16, 2) + 1):
            if turn > least and time.monotonic() - began > _SECONDS:
                break
            settings.progress(f"{name}, {f'round {turn}' if turn else 'warm-up'}")
            for what, contest in contests.items():
                sample = contest.round()
                if turn:
                    rounds[what]["read"].append(sample)
                else:
                    first[what] = sample.speed
    yield from _figures(settings, name, rounds, tls, first, ours)


def _figures(
    settings: Settings, name: str, rounds: Rounds, tls: bool, first: dict[str, float], connections: int
) -> Iterator[BenchRecord]:
    samples = {what: tasks["read"] for what, tasks in rounds.items()}
    bare = ["stream", "stream, 1 connection"]
    best = max(bare, key=lambda what: statistics.median(s.speed for s in samples[what]))
    kind = "a bare TLS stream" if tls else "a bare socket stream"
    checked, plain = samples["stream + checksums"], samples["stream"]
    with_checksums = statistics.median(s.speed for s in checked)
    like = samples.get("stream, as many connections")
    as_many = f"; over {connections}, as kvtide, {statistics.median(s.speed for s in like):.2f} GB/s" if like else ""
    yield figure(
        name,
        "GB/s",
        [s.speed for s in samples["kvtide"]],
        better="higher",
        limit=[s.speed for s in samples[best]],
        against=kind,
        reference=[s.speed for s in samples[best]],
        bar=0.85,
        command=settings.command,
        note=f"verified; the bare stream, over {1 if best != 'stream' else CONNECTIONS} connections, which is faster "
        f"than over {CONNECTIONS if best != 'stream' else 1}, computes no checksum (with checksums on both ends: "
        f"{with_checksums:.2f} GB/s{as_many}); when the blocks were read for the first time, and their checksums "
        f"computed, {first['kvtide']:.2f} GB/s, and the bare stream {first[best]:.2f}; both sides on "
        f"{os.cpu_count()} cores",
    )
    allowed = [1.2 * b.cpu_per_gb + max(0.0, c.cpu_per_gb - b.cpu_per_gb) for b, c in zip(plain, checked, strict=True)]
    costs = [statistics.median(s.cpu_per_gb for s in some) for some in (plain, checked)]
    yield figure(
        f"{name}-cpu",
        "CPU s/GB",
        [s.cpu_per_gb for s in samples["kvtide"]],
        better="lower",
        limit=allowed,
        against=f"1.2 x {kind}, plus checksums",
        reference=allowed,
        bar=1.0,
        command=settings.command,
        note=f"both sides together; the bare stream: {costs[0]:.2f}, with XXH3-128 of every block on both ends: "
        f"{costs[1]:.2f}",
    )


def _matches(settings: Settings, folder: str) -> Iterator[BenchRecord]:
    with ExitStack() as stack:
        nbytes = SMALL.geometry[SMALL.groups[0].name].nbytes
        servers = [Worker(stack, serve, folder, False, nbytes, 1) for _ in range(2)]
        addresses = [server.pipe.recv()[0] for server in servers]
        settings.progress("peers-match-3")
        askers = [Worker(stack, match, folder, some) for some in ([], addresses)]
        for asker in askers:
            assert asker.pipe.recv() == "ready"
        times: list[list[float]] = [[], []]
        for turn in range(10 + settings.rounds(200, 30)):
            for asker, some in zip(askers, times, strict=True):
                seconds = asker.ask("match")
                if turn >= 10:
                    some.append(1000 * seconds)
    alone, others = times
    yield figure(
        "peers-match-3",
        "ms",
        others,
        better="lower",
        limit=alone,
        against="a match without other nodes",
        command=settings.command,
        note=f"a new prompt of 3 blocks, which 2 other nodes are asked for and do not have; without other nodes "
        f"{statistics.median(alone):.2f} ms; {os.cpu_count()} cores for 4 processes",
    )


def _lookups(settings: Settings, folder: str) -> Iterator[BenchRecord]:
    nbytes, count = SMALL.geometry[SMALL.groups[0].name].nbytes, 512
    with ExitStack() as stack:
        servers = [Worker(stack, serve, folder, False, nbytes, n) for n in (count, 1, 1, count, count)]
        told = [server.pipe.recv() for server in servers]
        addresses, keys = [address for address, _ in told], told[0][1]
        groups = {"": addresses[:3], "-everywhere": [addresses[0], *addresses[3:]]}
        askers = {name: Worker(stack, read, folder, False, nbytes, some, keys) for name, some in groups.items()}
        moments: dict[str, list[tuple[float, float]]] = {name: [] for name in askers}
        settings.progress("peers-locate-512")
        for asker in askers.values():
            assert asker.pipe.recv() == "ready"
        for turn in range(10 + settings.rounds(200, 30)):
            for name, asker in askers.items():
                moment = asker.ask("find")
                if turn >= 10:
                    moments[name].append(moment)
    for name, where in (("", "at one of them"), ("-everywhere", "at each of them")):
        yield figure(
            f"peers-locate-512{name}",
            "ms",
            [1000 * (stop - start) for start, stop in moments[name]],
            better="lower",
            bar=2.0,
            command=settings.command,
            note=f"512 blocks looked up at 3 nodes in parallel, and all found {where}; {os.cpu_count()} cores for 4 "
            "processes",
        )
