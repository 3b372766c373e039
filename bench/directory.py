"""The directory of a cluster in a real Valkey, on loopback: lookups, memory, publishing, and the number of nodes.

The server is one process with its defaults, and shares the cores with whatever else runs: each note says the load. Its
CPU time is what it says itself (``used_cpu_user`` and ``used_cpu_sys``). Bytes are those that its sockets moved.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from kvtide.benchmarks.record import BenchRecord, figure
from kvtide.benchmarks.settings import Settings
from kvtide.block import BlockKey
from kvtide.testing.servers import ValkeyServer
from kvtide.tiers.peers.directory import BlockDirectory
from kvtide.tiers.peers.members import Member
from kvtide.tiers.shared.resp import ValkeyConnection, command
from kvtide.tiers.shared.valkey_client import ValkeyClient
from kvtide.tiers.shared.valkey_scripts import ScriptCall, ValkeyScripts

__all__ = ["directory"]

_WANTED = 512
"""Blocks of a lookup: a prompt of 131,072 tokens."""
_BATCH = 4096
_LEASE = 3600.0
_NODES = (2, 8, 64)
_Usage = dict[str, float]


class _Counted(ValkeyScripts):
    """Counts the commands that are sent."""

    commands = 0

    def run(self, calls: Sequence[ScriptCall], timeout: float) -> list[Any]:
        self.commands += len(calls)
        return super().run(calls, timeout)


class _Server:
    """A Valkey, and what it says of itself."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._server = stack.enter_context(ValkeyServer(folder, maxmemory="6gb"))
        address = ("127.0.0.1", self._server.port)
        self._asker = stack.enter_context(closing(ValkeyConnection(address, None, time.monotonic() + 60)))

    def ask(self, *words: bytes) -> Any:
        self._asker.send(command(*words), time.monotonic() + 60)
        return self._asker.reply(time.monotonic() + 60)

    def usage(self) -> _Usage:
        lines = dict(line.split(":", 1) for line in self.ask(b"INFO").decode().splitlines() if ":" in line)
        names = ("used_memory", "used_cpu_user", "used_cpu_sys", "total_net_input_bytes", "total_net_output_bytes")
        return {name: float(lines[name]) for name in names}

    def client(self, stack: ExitStack, cluster: str) -> tuple[BlockDirectory, _Counted]:
        runner = _Counted(ValkeyClient(self._server.url))
        return stack.enter_context(closing(BlockDirectory(runner, cluster=cluster, timeout=60))), runner


def directory(settings: Settings) -> Iterator[BenchRecord]:
    """A directory with a million blocks and with ten, and with 2 to 64 nodes."""
    with ExitStack() as stack:
        server = _Server(stack, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        yield from _nodes(settings, server)
        server.ask(b"FLUSHALL")
        yield from _sizes(settings, server)


# -- how large it is ------------------------------------------------------------------------------------------------


def _keys(count: int) -> list[BlockKey]:
    data = secrets.token_bytes(32 * count)
    return [BlockKey(data[start : start + 32] + b"full") for start in range(0, len(data), 32)]


def _sizes(settings: Settings, server: _Server) -> Iterator[BenchRecord]:
    sizes = {"100k": 100_000} if settings.quick else {"1m": 1_000_000, "10m": 10_000_000}
    with ExitStack() as stack:
        client, _ = server.client(stack, "size")
        members = [client.join(secrets.token_bytes(16), f"host{i}:9411", _LEASE) for i in range(8)]
        empty = server.usage()["used_memory"]
        published, wanted = 0, list[BlockKey]()
        for name, size in sizes.items():
            rates, costs, servers = list[float](), list[float](), list[float]()
            while published < size:
                settings.progress(f"{published:,} of {size:,} blocks")
                count = min(size // 10, size - published)
                rate, cost, theirs, some = _publish(server, client, members[len(rates) % 8], count)
                rates, costs, servers = [*rates, rate], [*costs, cost], [*servers, theirs]
                wanted += some
                published += count
            nbytes = (server.usage()["used_memory"] - empty) / size
            estimate = client.counts()
            yield from _lookups(settings, server, client, wanted, name, size)
            yield figure(
                f"directory-memory-{name}",
                "bytes/block",
                [nbytes],
                better="lower",
                command=settings.command,
                note=f"of Valkey's memory, with {size:,} blocks of one holder each; the directory's own estimate: "
                f"{estimate.nbytes / size:.1f}",
            )
            yield figure(
                f"directory-publish-{name}",
                "blocks/s",
                rates[-8:],
                better="higher",
                command=settings.command,
                note=f"one node, {_BATCH:,} blocks with a call, up to {size:,} blocks; {_load()}",
            )
            told = f"and {sorted(servers)[len(servers) // 2]:.1f} of Valkey"
            yield figure(
                f"directory-publish-cpu-{name}",
                "CPU us/block",
                costs[-8:],
                better="lower",
                command=settings.command,
                note=f"of the node, without walking its index; {told}; {_load()}",
            )


def _publish(
    server: _Server, client: BlockDirectory, member: Member, count: int
) -> tuple[float, float, float, list[BlockKey]]:
    """Publish new blocks. Returns blocks per second, CPU microseconds per block of the node and of the server, and some
    of the blocks."""
    seconds = cpu = 0.0
    before = server.usage()
    wanted: list[BlockKey] = []
    for start in range(0, count, _BATCH):
        keys = _keys(min(_BATCH, count - start))
        if len(wanted) < 10 * _WANTED:
            wanted += keys
        wall, used = time.perf_counter(), time.process_time()
        assert client.publish(member, keys, [])
        seconds += time.perf_counter() - wall
        cpu += time.process_time() - used
    return count / seconds, 1e6 * cpu / count, 1e6 * _cpu(before, server.usage()) / count, wanted


def _lookups(
    settings: Settings, server: _Server, client: BlockDirectory, keys: list[BlockKey], name: str, size: int
) -> Iterator[BenchRecord]:
    moments: dict[str, list[float]] = {"found": [], "absent": []}
    rounds = settings.rounds(400, 50)
    cpu, before = time.process_time(), server.usage()
    absent = _keys(_WANTED)
    for turn in range(rounds + 10):
        start = turn * _WANTED % (len(keys) - _WANTED)
        for what, some in (("found", keys[start : start + _WANTED]), ("absent", absent)):
            begin = time.perf_counter()
            found = client.holders(some)
            if turn >= 10:
                moments[what].append(1000 * (time.perf_counter() - begin))
            assert all(map(bool, found)) == (what == "found")
    calls = 2 * (rounds + 10)
    costs = 1000 * (time.process_time() - cpu) / calls, 1000 * _cpu(before, server.usage()) / calls
    for what, values in moments.items():
        yield figure(
            f"directory-locate-512-{name}{'' if what == 'found' else '-absent'}",
            "ms",
            values,
            better="lower",
            bar=3.0,
            command=settings.command,
            note=f"512 blocks, all {what}, in a directory of {size:,}; CPU of a lookup, found or not: {costs[0]:.2f} "
            f"ms here and {costs[1]:.2f} ms in Valkey; {_load()}",
        )


def _cpu(before: _Usage, after: _Usage) -> float:
    return sum(after[name] - before[name] for name in ("used_cpu_user", "used_cpu_sys"))


def _load() -> str:
    return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


# -- how many nodes there are -----------------------------------------------------------------------------------------


def _nodes(settings: Settings, server: _Server) -> Iterator[BenchRecord]:
    nbytes, commands = dict[int, float](), dict[int, float]()
    rounds = settings.rounds(100, 20)
    for nodes in _NODES:
        settings.progress(f"{nodes} nodes")
        with ExitStack() as stack:
            clients = [server.client(stack, f"nodes-{nodes}") for _ in range(nodes)]
            keys = _keys(_WANTED)
            for i, (client, _) in enumerate(clients):
                member = client.join(secrets.token_bytes(16), f"host{i}:9411", _LEASE)
                assert client.publish(member, [*keys[i::nodes], *_keys(1000)], [])
            for client, runner in clients:
                client.holders(keys)
                runner.commands = 0
            before = server.usage()
            for turn in range(rounds):
                assert all(clients[turn % nodes][0].holders(keys))
            after = server.usage()
            moved = sum(after[name] - before[name] for name in after if name.startswith("total_net"))
            nbytes[nodes] = moved / rounds
            commands[nodes] = sum(runner.commands for _, runner in clients) / rounds
    few, many = min(_NODES), max(_NODES)
    for name, values, unit in (("bytes", nbytes, "bytes"), ("commands", commands, "commands")):
        told = ", ".join(f"{value:,.0f} {unit} with {nodes} nodes" for nodes, value in values.items())
        yield figure(
            f"directory-nodes-{name}",
            "x",
            [values[many] / values[few]],
            better="lower",
            bar=1.1,
            command=settings.command,
            note=f"a lookup of 512 blocks, which all nodes together hold, with {many} nodes against {few}: {told}; "
            "all its commands are sent with one system call to each server of Valkey",
        )
