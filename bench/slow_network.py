"""Reads from another node over a link of so many megabytes per second, with blocks as they are, compressed, and as the
reader chooses by itself.

::

    python -m bench.slow_network [--synthetic] [--seconds N] [MEGABYTES_PER_SECOND ...]

The link is the loopback device of a network namespace, with a token bucket (``tc tbf``), so this needs iproute2, and
root or user namespaces. Both nodes share the cores. The blocks are the KV of SmolLM2-135M-Instruct in bfloat16, of
texts that it reads first, or (``--synthetic``) normally distributed numbers. Bytes are those of blocks in memory.
"""

from __future__ import annotations

import argparse
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

import kvtide
from bench.node_processes import CONNECTIONS, Message, Worker, answer_all, make_credentials, settings_of
from kvtide.benchmarks.settings import MIB
from kvtide.block import BLOCK_TOKENS, BlockKey
from kvtide.clock import SystemClock
from kvtide.peers.server import PeerServer
from kvtide.store.store import Store
from kvtide.testing.blocks import aligned, floats, identity
from kvtide.tiers.base import Read
from kvtide.tiers.peers.compression import CompressionChoice, ReadEnd
from kvtide.tiers.peers.tier import PeerTier
from kvtide.tiers.peers.trust import PeerTrust

_LAYOUT = kvtide.Layout.attention(layers=30, heads=3, head_dim=64)
_WEIGHTS = "bench"
_INSIDE = "KVTIDE_BENCH_INSIDE"
_SETTLED = 7
"""Reads after which a reader has chosen: it times three of either kind."""
_SYNTHETIC = 24
"""Blocks."""


class _Always(CompressionChoice):
    """Always the same choice."""

    def __init__(self, compressed: bool) -> None:
        super().__init__(SystemClock())
        self._always = compressed

    def begin(self) -> bool:
        return self._always

    def ended(self, nbytes: int, how: ReadEnd, *, able: bool) -> None:
        assert able, "the nodes cannot compress"
        assert how is ReadEnd.WHOLE, "not all blocks were read"


def _blocks(synthetic: bool) -> list[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    if synthetic:
        nbytes = _LAYOUT.geometry["full"].nbytes
        return [floats(b"%d" % n, nbytes) for n in range(_SYNTHETIC)]
    import torch

    from kvtide.benchmarks.reader import readings

    found = []
    for text in readings(2048, 128):
        both = torch.stack([text.keys, text.values], 1).bfloat16()  # layer, K and V, head, token, dim
        for part in both.split(BLOCK_TOKENS, 3):
            if part.shape[3] == BLOCK_TOKENS:
                found.append(part.contiguous().view(torch.uint8).numpy().ravel())
    return found


def _serve(pipe: Connection, folder: str, count: int) -> None:
    """A node that has the blocks. Says its address and their keys."""
    blocks = np.load(f"{folder}/blocks.npy")
    with (
        Store(settings_of(folder, False, listen="127.0.0.1:0")) as store,
        closing(PeerServer(store)) as server,
        store.session(kvtide.Model(_LAYOUT, _WEIGHTS)) as session,
    ):
        chain = session.chain(np.arange(count * BLOCK_TOKENS, dtype=np.uint32))
        session.store(chain, list(blocks))
        assert store.statistics().tiers["dram"].blocks == count
        pipe.send((server.address, [bytes(digest) for digest in chain.digests]))
        answer_all(pipe, lambda _: None)


def _read(pipe: Connection, folder: str, address: str, keys: list[bytes]) -> None:
    """A reader of all blocks. To (how,): the seconds that it took."""
    config = settings_of(folder, False, addresses=address)
    trust, who = PeerTrust(config.peers, config.security), identity(_LAYOUT, weights=_WEIGHTS)
    blocks, geometry = np.load(f"{folder}/blocks.npy"), _LAYOUT.geometry["full"]
    assert geometry.nbytes == geometry.footprint, "without padding, as below"
    memory = aligned(geometry.footprint * len(keys))
    spans = [memory[i : i + geometry.footprint] for i in range(0, len(memory), geometry.footprint)]
    items = [Read(BlockKey(key + who.group), who, 0, span) for key, span in zip(keys, spans, strict=True)]
    tiers = {
        how: PeerTier(address, trust, connections=CONNECTIONS, timeout=30.0) for how in ("plain", "compressed", "auto")
    }
    for how, always in (("plain", False), ("compressed", True)):
        tiers[how].compression = _Always(always)

    def answer(message: Message) -> object:
        if message[0] == "new":
            tiers["auto"].compression = CompressionChoice(SystemClock())
            return None
        ended: queue.SimpleQueue[Sequence[object]] = queue.SimpleQueue()
        np.frombuffer(memory, np.uint8)[:] = 0
        start = time.perf_counter()
        tiers[message[0]].read(items, ended.put)
        results = ended.get()
        seconds = time.perf_counter() - start
        assert all(result is True for result in results), "not all blocks were read"
        assert all(np.array_equal(np.frombuffer(s, np.uint8), b) for s, b in zip(spans, blocks, strict=True))
        return seconds, repr(tiers["auto"].compression)

    pipe.send("ready")
    answer_all(pipe, answer)
    for tier in tiers.values():
        tier.close()


def _limit(megabytes: int) -> None:
    burst = max(128 << 10, megabytes * 1_000_000 // 250)
    shape = f"tbf rate {8 * megabytes}mbit burst {burst} limit {4 * burst + (1 << 20)}"
    subprocess.run(f"tc qdisc replace dev lo root {shape}".split(), check=True)


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.slow_network", description=__doc__.partition("\n")[0])
    parser.add_argument("speeds", nargs="*", type=int, metavar="MEGABYTES_PER_SECOND")
    parser.add_argument("--synthetic", action="store_true")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each kind and speed")
    given = parser.parse_args()
    if _INSIDE not in os.environ:
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        command = ["unshare", "--net", *user, sys.executable, "-m", "bench.slow_network", *sys.argv[1:]]
        sys.exit(subprocess.run(command, env=os.environ | {_INSIDE: "1"}, check=False).returncode)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        blocks = _blocks(given.synthetic)
        np.save(f"{folder}/blocks.npy", np.stack(blocks))
        total = sum(len(block) for block in blocks)
        print(f"{len(blocks)} blocks, {total / MIB:.0f} MiB; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        make_credentials(Path(folder))
        server = Worker(stack, _serve, folder, len(blocks))
        address, keys = server.pipe.recv()
        reader = Worker(stack, _read, folder, address, keys)
        assert reader.pipe.recv() == "ready"
        print("link MB/s   plain MB/s  compressed MB/s  ratio  CPU s/GB: plain  compressed   chosen: MB/s")
        for speed in given.speeds or (50, 125, 200, 400, 1000):
            _limit(speed)
            _measure(speed, total, server, reader, given.seconds)


def _measure(speed: int, total: int, server: Worker, reader: Worker, seconds: float) -> None:
    rates: dict[str, list[float]] = {"plain": [], "compressed": [], "auto": []}
    costs: dict[str, list[float]] = {how: [] for how in rates}
    reader.ask("new")
    said = ""
    for how in ("plain", "compressed", *["auto"] * _SETTLED):
        reader.ask(how)
    began = time.monotonic()
    while time.monotonic() - began < 3 * seconds or len(rates["auto"]) < 3:
        for how in rates:
            before = server.ask("cpu") + reader.ask("cpu")
            took, said = reader.ask(how)
            rates[how].append(total / took / 1e6)
            costs[how].append((server.ask("cpu") + reader.ask("cpu") - before) / total * 1e9)
    middle = {how: statistics.median(values) for how, values in rates.items()}
    cost = {how: statistics.median(values) for how, values in costs.items()}
    last = statistics.median(rates["auto"][-3:])
    print(
        f"{speed:9}  {middle['plain']:11.0f}  {middle['compressed']:15.0f}  "
        f"{middle['compressed'] / middle['plain']:5.2f}  {cost['plain']:15.2f}  {cost['compressed']:10.2f}   "
        f"{said}, {last:.0f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
