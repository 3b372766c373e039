"""Measure the store beside its peers, and write records, plots and docs/benchmarks.md.

The figures are those of ``kvtide bench store``; ``codec``, which is ``kvtide bench codec``; and what only
kvtide's own targets need: the index at scale, opening a tier, the pipeline and the connector's scheduler. Records go to
``bench/results``; a figure that is not measured this time keeps its last one.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench import bookkeeping, readme
from bench.directory import directory
from bench.mooncake_tier import mooncake_tier
from bench.other_nodes import other_nodes
from bench.peers.client import Peer
from bench.report import RESULTS, write_report
from bench.scheduler import scheduler
from kvtide.benchmarks import FIGURES, STORAGES, run
from kvtide.benchmarks.copies import together
from kvtide.benchmarks.record import BenchRecord, Contestant, Sample
from kvtide.benchmarks.settings import NoPeers, Settings, check_free_space
from kvtide.errors import ConfigError
from kvtide.testing.servers import S3Server, ValkeyServer

OWN: dict[str, Callable[[Settings], Iterator[BenchRecord]]] = {
    "scale": bookkeeping.scale,
    "opening": bookkeeping.opening,
    "pipeline": bookkeeping.pipeline,
    "scheduler": scheduler,
    "peers": other_nodes,
    "directory": directory,
    "mooncake": mooncake_tier,
}
"""Figures that only kvtide's own targets need."""
LMCACHE_DISK = ("fs_native_odirect", "legacy_odirect")
"""Its best ways to a disk; those through the page cache end before the bytes are on it."""
LMCACHE_SERVER = ("handle", "shm")
"""Its server's ways to move bytes, best first; the third, pickled bytes over the socket, is ten times slower."""


def _samples(answer: Mapping[str, Any]) -> dict[str, Sample]:
    return {
        task: Sample(answer[task]["seconds"][0], answer[task]["cpu_seconds"][0], answer["bytes"])
        for task in ("store", "load")
    }


class RealPeers:
    """LMCache, its server, and vLLM's file tier, each in a process and an environment of its own."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._clients: list[Peer] = []

    @functools.cached_property
    def _lmcache(self) -> Peer:
        return self._stack.enter_context(Peer("lmcache"))

    @functools.cached_property
    def _vllm(self) -> Peer:
        return self._stack.enter_context(Peer("vllm"))

    def match(self) -> Mapping[str, Contestant]:
        def ask(mode: str) -> Contestant:
            def contestant() -> Mapping[str, Sample]:
                answer = self._lmcache.ask(op="match", tokens=131072, block_tokens=256, rounds=1)[mode]
                return {"match": Sample(answer["wall_ms"][0] / 1e3, answer["cpu_ms"][0] / 1e3)}

            return contestant

        return {"lmcache mp": ask("mp"), "lmcache legacy, pinned": ask("legacy_pinned")}

    def dram(self, block: int, count: int) -> Mapping[str, Contestant]:
        def ask(mode: str) -> Contestant:
            return lambda: _samples(self._lmcache.ask(op="dram", block_bytes=block, count=count, rounds=1)[mode])

        return {"lmcache mp": ask("mp"), "lmcache legacy": ask("legacy")}

    def disk(self, block: int, count: int, folder: Path) -> Mapping[str, Contestant]:
        def ask(peer: Peer, mode: str) -> Contestant:
            return lambda: _samples(
                peer.ask(op="disk", modes=[mode], block_bytes=block, count=count, rounds=1, dir=str(folder))["modes"][
                    mode
                ]
            )

        return {
            **{f"lmcache {mode}": ask(self._lmcache, mode) for mode in LMCACHE_DISK},
            "vllm fs": ask(self._vllm, "fs"),
        }

    def _drivers(self, count: int) -> list[Peer]:
        """Drivers of LMCache's server, without servers or clients."""
        while len(self._clients) < count:
            self._clients.append(self._stack.enter_context(Peer("lmcache", driver="lmcache_server")))
        for driver in self._clients:
            driver.ask(op="stop")
        return self._clients[:count]

    def server_match(self) -> Mapping[str, Contestant]:
        (driver,) = self._drivers(1)
        port = _free_port()
        driver.ask(op="serve", mode="handle", port=port, gigabytes=0.25, clients=1)
        driver.ask(op="connect", mode="handle", port=port, number=0, block_bytes=4096, count=512)
        driver.ask(op="store", turn=0)

        def contestant() -> Mapping[str, Sample]:
            answer = driver.ask(op="match", turn=0, repeats=10)
            return {"match": Sample(answer["seconds"], answer["cpu_seconds"])}

        return {"lmcache server": contestant}

    def server_copies(self, clients: int, block: int, count: int) -> Mapping[str, Contestant]:
        modes = LMCACHE_SERVER[: 1 if clients > 1 else None]
        drivers = iter(self._drivers(clients * len(modes)))
        return {
            f"lmcache server, {mode}": self._copying(mode, [next(drivers) for _ in range(clients)], block, count)
            for mode in modes
        }

    def _copying(self, mode: str, drivers: Sequence[Peer], block: int, count: int) -> Contestant:
        port, total = _free_port(), len(drivers) * block * count
        drivers[0].ask(op="serve", mode=mode, port=port, gigabytes=1.2 * total / 2**30, clients=len(drivers))
        for number, driver in enumerate(drivers):
            driver.ask(op="connect", mode=mode, port=port, number=number, block_bytes=block, count=count)
        turns = itertools.count()

        def contestant() -> Mapping[str, Sample]:
            turn, samples = next(turns), {}
            with ThreadPoolExecutor(len(drivers)) as pool:
                for task in ("store", "load"):
                    answers = list(pool.map(lambda d, op=task: d.ask(op=op, turn=turn), drivers))
                    samples[task] = together([(a["start"], a["stop"]) for a in answers], total)
            drivers[0].ask(op="clear")
            return samples

        return contestant


@contextmanager
def _servers(names: Sequence[str], folder: Path) -> Iterator[None]:
    """Servers of the storages to be measured, told to the configuration by the environment."""
    told: dict[str, str] = {}
    with ExitStack() as stack:
        if names:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix="kvtide-servers-")))
        if "objects" in names:
            s3 = stack.enter_context(S3Server(folder / "s3"))
            told |= {"KVTIDE_OBJECTS_URL": "s3://bench", "KVTIDE_OBJECTS_ENDPOINT": s3.endpoint, **s3.environment}
        if "valkey" in names:
            server = stack.enter_context(ValkeyServer(folder / "valkey", maxmemory="2gb"))
            told |= {"KVTIDE_VALKEY_URL": server.url}
        os.environ.update(told)
        try:
            yield
        finally:
            for name in told:
                del os.environ[name]


def _free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        return int(sock.getsockname()[1])


def main() -> None:
    known = [*FIGURES, *OWN, "codec"]
    parser = argparse.ArgumentParser("python -m bench", description=__doc__.partition("\n")[0])
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"of {', '.join(known)}; by default all")
    parser.add_argument("--no-peers", action="store_true", help="measure ours and the limits alone")
    parser.add_argument("--report", action="store_true", help="measure nothing, only write the page and the plots")
    given = parser.parse_args()
    if unknown := [n for n in given.figures if n not in known]:
        parser.error(f"there is no figure {unknown[0]!r}; choose of {', '.join(known)}")
    if not given.report:
        missed = 0
        with ExitStack() as stack:
            peers = NoPeers() if given.no_peers else RealPeers(stack)
            folder = Path(tempfile.gettempdir())
            command = shlex.join(["python", "-m", "bench", *sys.argv[1:]])
            settings = Settings(False, folder, command, _progress, peers)
            names = given.figures or known
            if names != ["codec"]:  # all others may write to the folder
                try:
                    check_free_space(settings)
                except ConfigError as e:
                    parser.exit(1, f"{e}\n")
            for record in _records(settings, names):
                record.write(RESULTS)
                told = "" if record.ratio is None else f", {record.ratio:.2f} x {record.against}"
                print(f"{record.name}: {record.ours:g} {record.unit}{told}{_verdict(record.met)}", flush=True)
                missed += record.met is False
        print(f"{missed} target{'s' if missed > 1 else ''} missed" if missed else "all targets met")
    write_report()
    readme.main()


def _records(settings: Settings, names: Sequence[str]) -> Iterator[BenchRecord]:
    if stores := [n for n in names if n in FIGURES]:
        with _servers([n for n in stores if n in STORAGES], settings.folder):
            yield from run(settings, stores)
    for name in names:
        if name in OWN:
            yield from OWN[name](settings)
    if "codec" in names:
        from kvtide.benchmarks.codec import codec  # it needs torch, and no other figure does

        yield from codec(settings)


def _verdict(met: bool | None) -> str:
    return {True: "  met", False: "  MISSED", None: ""}[met]


def _progress(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
