"""The node: what the socket costs, beside memory itself and a server that only echoes."""

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
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

import kvtide
from kvtide.benchmarks.record import Record, Sample, compare, figure, timed
from kvtide.benchmarks.settings import BLOCK_TOKENS, MIB, TOKENS, Settings, block_sources, layout_of

__all__ = ["node"]

_STEP = 64
"""Blocks in the message of a step."""


@contextmanager
def _running(budget: int) -> Iterator[tuple[Path, int]]:
    """A node in a process of its own: its socket and its process number."""
    with tempfile.TemporaryDirectory(prefix="kvtide-bench-") as folder:
        path = Path(folder) / "node.sock"
        environment = {**os.environ, "KVTIDE_DRAM_BUDGET": str(budget), "KVTIDE_DRAM_PREFAULT": "true"}
        environment |= {"KVTIDE_NVME_PATH": "", "NOTIFY_SOCKET": f"{folder}/ready"}
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
            ready.bind(f"{folder}/ready")
            command = [sys.executable, "-m", "kvtide", "node", "--socket", str(path)]
            process = subprocess.Popen(command, env=environment, cwd=folder)
            try:
                ready.settimeout(60)
                ready.recv(100)
                yield path, process.pid
            finally:
                process.terminate()
                process.wait()


def _cpu(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def node(settings: Settings) -> Iterator[Record]:
    """Match, store and load through a node, and the round trip of a step."""
    nbytes = 32 * MIB
    count = settings.rounds(1024, 512) * MIB // nbytes
    with _running(count * nbytes + 512 * MIB) as (path, pid):
        yield from _match(settings, path, pid)
        yield from _copies(settings, path, nbytes, count)
        yield from _steps(settings, path, pid)


def _match(settings: Settings, path: Path, pid: int) -> Iterator[Record]:
    tokens = np.random.default_rng(0).integers(0, 128_256, TOKENS, np.uint32)
    tiny = kvtide.Layout.attention(layers=1, heads=1, head_dim=8)
    block = np.zeros(tiny.geometry["full"].nbytes, np.uint8)
    repeats = settings.rounds(100, 30)
    with kvtide.connect(f"unix:{path}") as store, store.session(kvtide.Model(tiny, "bench")) as session:
        session.store(tokens, [block] * (TOKENS // BLOCK_TOKENS))
        wall, cpu = [], []
        for _ in range(settings.rounds(7, 3)):
            settings.progress("match through the node")
            start, own, theirs = time.perf_counter(), time.process_time(), _cpu(pid)
            for _ in range(repeats):
                with session.match(tokens) as found:
                    assert found.tokens == TOKENS
            wall.append((time.perf_counter() - start) / repeats * 1e3)
            cpu.append((time.process_time() - own + _cpu(pid) - theirs) / repeats * 1e3)
    note = "131,072 tokens as a buffer, 512 blocks, all present, with the release"
    for name, unit, values in (("node-match", "ms", wall), ("node-match-cpu", "CPU ms", cpu)):
        yield figure(name, unit, values, better="lower", command=settings.command, note=note)


def _copies(settings: Settings, path: Path, nbytes: int, count: int) -> Iterator[Record]:
    sources = block_sources(nbytes)
    target = np.zeros((count, nbytes), np.uint8)
    scratch = np.zeros((count, nbytes), np.uint8)
    blocks = [sources[i % 4] for i in range(count)]

    def memcpy() -> Mapping[str, Sample]:
        def copy() -> None:
            for i in range(count):
                np.copyto(scratch[i], blocks[i])

        sample = timed(copy, nbytes=count * nbytes)
        return {"store": sample, "load": sample}

    with kvtide.connect(f"unix:{path}") as store:
        session = store.session(kvtide.Model(layout_of(nbytes), "bench"))
        chain = session.chain(np.arange(count * BLOCK_TOKENS, dtype=np.uint32))

        def ours() -> Mapping[str, Sample]:
            samples = {"store": timed(session.store, chain, blocks, nbytes=count * nbytes)}
            with session.match(chain) as found:
                samples["load"] = timed(lambda: session.load(found, list(target)).wait(), nbytes=count * nbytes)
            assert (target[-1] == blocks[-1]).all(), "a wrong byte"
            session.drop(chain)
            return samples

        rounds = compare({"kvtide": ours, "memcpy": memcpy}, settings.rounds(11, 5), settings.progress)
    for task in ("store", "load"):
        limit = [s.speed for s in rounds["memcpy"][task]]
        yield figure(
            f"node-{task}-32mib",
            "GB/s",
            [s.speed for s in rounds["kvtide"][task]],
            better="higher",
            limit=limit,
            against="memcpy on one core",
            reference=limit,
            bar=0.85,
            command=settings.command,
        )


def _echo(pipe: Connection, path: str) -> None:
    """A server that answers each message with itself: what a round trip costs without work."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                size = await reader.readexactly(4)
                writer.write(size + await reader.readexactly(int.from_bytes(size, "little")))
            except asyncio.IncompleteReadError:
                return

    async def main() -> None:
        await asyncio.start_unix_server(answer, path)
        pipe.send("ready")
        await asyncio.Event().wait()

    asyncio.run(main())


def _steps(settings: Settings, path: Path, pid: int) -> Iterator[Record]:
    """A step asks for 64 blocks and gives back those of the step before, in one message."""
    repeats = settings.rounds(3000, 500)
    tiny = kvtide.Layout.attention(layers=1, heads=1, head_dim=8)
    block = np.zeros(tiny.geometry["full"].nbytes, np.uint8)
    ours_pipe, theirs = multiprocessing.get_context("spawn").Pipe()
    echo_path = f"{path}.echo"
    echo = multiprocessing.get_context("spawn").Process(target=_echo, args=(theirs, echo_path), daemon=True)
    echo.start()
    ours_pipe.recv()
    frame = (_STEP * 32).to_bytes(4, "little") + bytes(_STEP * 32)
    with (
        kvtide.connect(f"unix:{path}") as store,
        store.session(kvtide.Model(tiny, "steps")) as session,
        socket.socket(socket.AF_UNIX) as sock,
    ):
        chain = session.chain(np.arange(_STEP * BLOCK_TOKENS, dtype=np.uint32))
        session.store(chain, [block] * _STEP)
        sock.connect(echo_path)

        def step() -> None:
            session.match(chain).release()

        def bare() -> None:
            sock.sendall(frame)
            left = len(frame)
            while left:
                left -= len(sock.recv(left))

        times: dict[str, list[float]] = {"node": [], "echo": []}
        cpu = []
        for _ in range(settings.rounds(7, 3)):
            settings.progress("steps through the node")
            before = time.process_time() + _cpu(pid)
            times["node"] += _each(step, repeats)
            cpu.append((time.process_time() + _cpu(pid) - before) / repeats * 1e6)
            times["echo"] += _each(bare, repeats)
    echo.terminate()
    for name, at in (("p50", 0.5), ("p99", 0.99)):
        mine, echoed = (float(np.quantile(times[who], at)) * 1e6 for who in ("node", "echo"))
        yield figure(
            f"node-step-{name}",
            "us",
            [mine],
            better="lower",
            limit=[echoed],
            against="an asyncio server that echoes",
            reference=[echoed],
            bar=0.5,
            command=settings.command,
            note="match of 64 blocks that are present, found and leased, and the release of those of the step before",
        )
    yield figure("node-step-cpu", "CPU us", cpu, better="lower", bar=150, command=settings.command, note="both ends")


def _each(work: Callable[[], None], repeats: int) -> list[float]:
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return found
