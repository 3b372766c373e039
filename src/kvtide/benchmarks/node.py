"""The node: the cost of the socket, compared with memory, an echo server and, if available, another system's server."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvtide
from kvtide.benchmarks.client_processes import ClientProcesses
from kvtide.benchmarks.copies import Copies, Memcpy, Moment, memcpy, moment, records, through, together
from kvtide.benchmarks.record import BenchRecord, Contestant, Sample, compare, figure
from kvtide.benchmarks.settings import MIB, SMALL, TOKENS, Settings, environment
from kvtide.block import BLOCK_TOKENS
from kvtide.config import Dram
from kvtide.errors import KvtideError

__all__ = ["node", "running"]

_STEP = 64
"""Blocks in the message of a step."""
_STARTING = 60
"""Seconds that a node may take to start."""
_PROMPTS = 8
"""Prompts that a client requests in turn."""


@contextmanager
def running(budget: int, **settings: str) -> Iterator[tuple[Path, int]]:
    """A node in a process of its own that has allocated all its memory: its socket and its process number. ``settings``
    are for its environment."""
    with tempfile.TemporaryDirectory(prefix="kvtide-bench-") as folder:
        path = Path(folder) / "node.sock"
        variables = {"KVTIDE_DRAM_BUDGET": str(budget), "KVTIDE_DRAM_PREFAULT": "true", **settings}
        variables |= {"KVTIDE_CONFIG": os.devnull, "NOTIFY_SOCKET": f"{folder}/ready"}
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
            ready.bind(f"{folder}/ready")
            command = [sys.executable, "-m", "kvtide", "node", "--socket", str(path)]
            process = subprocess.Popen(command, env=environment(**variables), cwd=folder)
            try:
                _await_ready(ready, process)
                with kvtide.connect(f"unix:{path}") as store:
                    while (dram := store.statistics().tiers["dram"]).budget - dram.bytes_taken >= Dram().segment:
                        time.sleep(0.05)
                yield path, process.pid
            finally:
                process.terminate()
                process.wait()


def _await_ready(ready: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Wait for a node's message that it accepts clients. Raises KvtideError if it ends before, or says nothing."""
    ready.settimeout(0.2)
    end = time.monotonic() + _STARTING
    while True:
        try:
            ready.recv(100)
        except TimeoutError:
            if process.poll() is not None:
                raise KvtideError(
                    f"the node to be measured ended with exit status {process.returncode} before it was ready: its "
                    "messages are above"
                ) from None
            if time.monotonic() > end:
                raise KvtideError(f"the node to be measured was not ready after {_STARTING} s") from None
        else:
            return


def _cpu(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def node(settings: Settings) -> Iterator[BenchRecord]:
    """Match, store and load through a node, and the round trip of a step."""
    nbytes = 32 * MIB
    with running(64 * MIB) as (path, pid):
        yield from _match(settings, path, pid)
    for clients in (1, 4):
        count = settings.rounds(1024, 512) * MIB // nbytes // clients
        yield from _copies(settings, clients, nbytes, count)
    for clients in (1, 8):
        yield from _steps(settings, clients)


def _match(settings: Settings, path: Path, pid: int) -> Iterator[BenchRecord]:
    tokens = np.random.default_rng(0).integers(0, 128_256, TOKENS, np.uint32)
    block = np.zeros(SMALL.geometry["full"].nbytes, np.uint8)
    repeats = settings.rounds(50, 20)
    with kvtide.connect(f"unix:{path}") as store, store.session(kvtide.Model(SMALL, "bench")) as session:
        session.store(tokens, [block] * (TOKENS // BLOCK_TOKENS))

        def ours() -> Mapping[str, Sample]:
            start, own, theirs = time.perf_counter(), time.process_time(), _cpu(pid)
            for _ in range(repeats):
                with session.match(tokens) as found:
                    assert found.tokens == TOKENS
            wall = time.perf_counter() - start
            cpu = time.process_time() - own + _cpu(pid) - theirs
            return {"match": Sample(wall / repeats, cpu / repeats)}

        rounds = compare({"kvtide": ours, **settings.peers.server_match()}, settings.rounds(11, 5), settings.progress)
    note = "131,072 tokens as a buffer, 512 blocks, all present, with the release; CPU of both processes"
    measures: dict[str, tuple[str, Callable[[Sample], float]]] = {
        "node-match": ("ms", lambda s: s.seconds * 1e3),
        "node-match-cpu": ("CPU ms", lambda s: s.cpu_seconds * 1e3),
    }
    for name, (unit, measure) in measures.items():
        peers = {n: [measure(s) for s in t["match"]] for n, t in rounds.items() if n != "kvtide"}
        best = next(iter(peers), "")
        yield figure(
            name,
            unit,
            [measure(s) for s in rounds["kvtide"]["match"]],
            better="lower",
            peers=peers,
            against=best,
            reference=peers.get(best),
            bar=4.0 if best else None,
            command=settings.command,
            note=note,
        )


# -- copies ---------------------------------------------------------------------------------------------------


@contextmanager
def _copying_client(number: int, path: str, nbytes: int, count: int) -> Iterator[Mapping[str, Callable[[], Any]]]:
    with kvtide.connect(f"unix:{path}") as store:
        copies = Copies(store, nbytes, count, number)

        def end() -> None:
            copies.check()
            copies.drop()

        yield {"store": lambda: moment(copies.store), "load": lambda: moment(copies.load()), "end": end}


@contextmanager
def _copying(number: int, nbytes: int, count: int) -> Iterator[Mapping[str, Callable[[], Moment]]]:
    work = Memcpy(nbytes, count)
    yield {"store": lambda: moment(work.copy)}


def _copies(settings: Settings, clients: int, nbytes: int, count: int) -> Iterator[BenchRecord]:
    total = clients * count * nbytes
    with ExitStack() as stack:
        path, _ = stack.enter_context(running(total + 512 * MIB))
        ours: Contestant
        limit: Contestant
        if clients == 1:
            store = stack.enter_context(kvtide.connect(f"unix:{path}"))
            ours, limit = through(Copies(store, nbytes, count), total), memcpy(nbytes, count)
        else:
            group = stack.enter_context(ClientProcesses(clients, _copying_client, str(path), nbytes, count))
            copiers = stack.enter_context(ClientProcesses(clients, _copying, nbytes, count))

            def ours() -> Mapping[str, Sample]:
                samples = {task: together(group.do(task), total) for task in ("store", "load")}
                group.do("end")
                return samples

            def limit() -> Mapping[str, Sample]:
                sample = together(copiers.do("store"), total)
                return {"store": sample, "load": sample}

        contestants = {"kvtide": ours, "memcpy": limit, **settings.peers.server_copies(clients, nbytes, count)}
        rounds = compare(contestants, settings.rounds(31, 3), settings.progress)
    who = "memcpy on one core" if clients == 1 else f"memcpy by {clients} processes"
    name = "node-{task}-32mib" + ("" if clients == 1 else f"-{clients}-clients")
    yield from records(settings, name, rounds, who, 0.85, 2.0)


# -- steps ----------------------------------------------------------------------------------------------------


def _echo(pipe: Connection, path: str) -> None:
    """A server that answers each message with itself: the cost of a round trip without work."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                size = await reader.readexactly(4)
                writer.write(size + await reader.readexactly(int.from_bytes(size, "little")))
            except (asyncio.IncompleteReadError, ConnectionError):
                return

    async def main() -> None:
        await asyncio.start_unix_server(answer, path)
        pipe.send("ready")
        await asyncio.Event().wait()

    asyncio.run(main())


@contextmanager
def _echoing(path: str) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_echo, args=(theirs, path), daemon=True)
    process.start()
    theirs.close()
    try:
        ours.recv()
        yield
    finally:
        process.terminate()
        process.join()


@contextmanager
def _stepping(number: int, path: str, echo: str, repeats: int) -> Iterator[Mapping[str, Callable[[], Any]]]:
    """A client that requests 64 blocks and releases those of the step before, in one message."""
    block = np.zeros(SMALL.geometry["full"].nbytes, np.uint8)
    frame = (_STEP * 32).to_bytes(4, "little") + bytes(_STEP * 32)
    with (
        kvtide.connect(f"unix:{path}") as store,
        store.session(kvtide.Model(SMALL, "steps")) as session,
        socket.socket(socket.AF_UNIX) as sock,
    ):
        chains = []
        for prompt in range(_PROMPTS):
            first = np.uint32((number * _PROMPTS + prompt) << 20)
            chains.append(session.chain(np.arange(_STEP * BLOCK_TOKENS, dtype=np.uint32) + first))
            session.store(chains[-1], [block] * _STEP)
        sock.connect(echo)

        def step(i: int) -> None:
            session.match(chains[i % _PROMPTS]).release()

        def bare(i: int) -> None:
            sock.sendall(frame)
            left = len(frame)
            while left:
                left -= len(sock.recv(left))

        yield {"node": lambda: _each(step, repeats), "echo": lambda: _each(bare, repeats)}


def _each(work: Callable[[int], None], repeats: int) -> tuple[npt.NDArray[np.float64], float]:
    """The seconds of each call, and the CPU seconds of all."""
    found, cpu = np.zeros(repeats), time.process_time()
    for i in range(repeats):
        start = time.perf_counter()
        work(i)
        found[i] = time.perf_counter() - start
    return found, time.process_time() - cpu


def _steps(settings: Settings, clients: int) -> Iterator[BenchRecord]:
    """A step requests 64 blocks and releases those of the step before, in one message.

    The processes are restarted every few rounds: depending on their cores, some are slower by a third for as long as
    they live.
    """
    repeats = settings.rounds(3000, 500) // clients
    quantiles = {"p50": 0.5, "p99": 0.99}
    times: dict[str, dict[str, list[float]]] = {who: {q: [] for q in quantiles} for who in ("node", "echo")}
    cpu: list[float] = []
    for life in range(settings.rounds(5, 1)):
        with ExitStack() as stack:
            path, pid = stack.enter_context(running(64 * MIB))
            echo = f"{path}.echo"
            stack.enter_context(_echoing(echo))
            group = stack.enter_context(ClientProcesses(clients, _stepping, str(path), echo, repeats))
            for i in range(4):
                settings.progress(f"steps through the node, {clients} clients, processes {life + 1}, round {i}")
                for who, mine in times.items():
                    before = _cpu(pid)
                    answers = group.do(who)
                    used = _cpu(pid) - before + sum(seconds for _, seconds in answers)
                    if i == 0:
                        continue
                    if who == "node":
                        cpu.append(used / clients / repeats * 1e6)
                    for name, at in quantiles.items():
                        each = np.concatenate([seconds for seconds, _ in answers])
                        mine[name].append(float(np.quantile(each, at)) * 1e6)
    suffix = "" if clients == 1 else f"-{clients}-clients"
    for name in quantiles:
        yield figure(
            f"node-step-{name}{suffix}",
            "us",
            times["node"][name],
            better="lower",
            limit=times["echo"][name],
            against="an asyncio server that echoes",
            reference=times["echo"][name],
            bar=0.5,
            command=settings.command,
            note=f"clients: {clients}; match of 64 blocks that are present, found and leased, and the release of those "
            "of the step before, in one message",
        )
    yield figure(
        f"node-step-cpu{suffix}", "CPU us", cpu, better="lower", bar=150, command=settings.command, note="both ends"
    )
