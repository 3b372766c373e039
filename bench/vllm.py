"""What kvtide does for a real vLLM on this machine's processor: beside the same engine without it.

``.venv-vllm/bin/python -m bench.vllm [overhead] [first-token] [peer] [turns] [probe]``; records go to
``bench/results``.

- *overhead*: requests with nothing to reuse, in pairs, one to an engine with kvtide and one to an engine without, in
  turn. Whoever comes first in a pair pays for having idled, so two pairs in both orders are one measurement. Wall time,
  and CPU time of all the engine's processes and, with kvtide, of the node. What counts is the upper end of the 95 %
  interval of the mean of the ratios.
- *first-token*: a prompt of 4,096 tokens: cold, from DRAM, and from the disk after engine and node were restarted.
- *peer*: such a prompt that an engine at another node has computed: read from that node's memory over TCP on loopback,
  beside the same prompt from DRAM and a prompt that is computed, in turn.
- *turns*: ten conversations of six turns, one turn of each after the other, where the engine has room for two.
- *probe*: can a tenant tell by the time to the first token that another has cached a prompt? See benchmarks/probe.py.
  With a small model, whose answers come sooner and differ less in time, so that less is seen by chance.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvtide.benchmarks.probe import NOBODY, OTHER, OWN, verdicts
from kvtide.benchmarks.record import BenchRecord, figure, machine
from kvtide.node.client.client import Client
from kvtide.testing.servers import free_ports
from tests.engines.vllm.checkpoints import checkpoint, random_llama
from tests.engines.vllm.engines import Engine, engine
from tests.engines.vllm.kept import READING, ask, at_rest, joined
from tests.node.serving import Process, eventually
from tests.peers.nodes import token

RESULTS = Path(__file__).parent / "results"
_PAIRS = 32
_LONG = 4096
_SESSIONS, _TURNS, _TURN = 10, 6, 256
_PROBED = 264
"""Tokens of a prompt that is asked for: a block, and a few more."""
_TICK = os.sysconf("SC_CLK_TCK")


def _prompt(seed: object, tokens: int) -> list[int]:
    return random.Random(str(seed)).choices(range(1000, 40000), k=tokens)


def _cpu(*leaders: int) -> float:
    """CPU seconds of processes, and of all in the groups that they lead."""
    seconds = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[2]) in leaders or int(stat.parent.name) in leaders:
            seconds += (int(fields[11]) + int(fields[12])) / _TICK
    return seconds


class _Node(Process):
    """A node with a disk, in a process of its own."""

    def __init__(self, folder: Path, dram: str, **more: str) -> None:
        settings = {"KVTIDE_DRAM_BUDGET": dram, "KVTIDE_DRAM_SEGMENT": "256MiB", "KVTIDE_DRAM_PREFAULT": "true"}
        settings |= {"KVTIDE_NVME_BUDGET": "4GiB", "KVTIDE_NVME_SEGMENT": "256MiB", "KVTIDE_NVME_STORE": "through"}
        super().__init__(folder, **settings, **more)

    @property
    def connector(self) -> dict[str, Any]:
        return {
            "kv_connector": "KvtideConnector",
            "kv_connector_module_path": "kvtide.engines.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"engine": {"address": f"unix:{self.path}", "store": "through"}},
        }

    def restart(self) -> None:
        """With what it has on the disk, and nothing in DRAM."""
        with Client(self.path) as client:
            assert client.flush(60)
        self.process.terminate()
        self.process.wait(60)
        self.start()


@contextmanager
def _node(folder: Path, dram: str = "3GiB", **more: str) -> Iterator[_Node]:
    node = _Node(folder, dram, **more)
    try:
        yield node
    finally:
        node.kill()


def _timed(running: Engine, prompt: Sequence[int], tokens: int = 1, *beside: int) -> tuple[float, float, int]:
    """Wall and CPU seconds of a request, those of processes ``beside`` included, and how much of it was cached."""
    leaders = running.process.pid, *beside
    cpu, wall = _cpu(*leaders), time.perf_counter()
    cached = running.complete(prompt, tokens).cached
    return time.perf_counter() - wall, _cpu(*leaders) - cpu, cached


def overhead(folder: Path) -> Iterator[BenchRecord]:
    """Nothing to reuse."""
    spent: dict[str, list[dict[str, float]]] = {"wall": [], "cpu": []}
    with (
        _node(folder) as node,
        engine(checkpoint(), folder / "plain.log") as plain,
        engine(checkpoint(), folder / "kvtide.log", node.connector) as ours,
    ):
        engines = {"plain": plain, "kvtide": ours}
        for i in range(-2, _PAIRS):
            order = ["plain", "kvtide"] if i % 2 else ["kvtide", "plain"]
            beside = {"plain": [], "kvtide": [node.process.pid]}
            found = {name: _timed(engines[name], _prompt(f"{i}", 520), 8, *beside[name]) for name in order}
            assert not any(cached for _, _, cached in found.values())
            if i >= 0:
                for place, task in enumerate(spent):
                    spent[task].append({name: each[place] for name, each in found.items()})
            _say(f"pair {i + 1} of {_PAIRS}: {found}")
    for task, pairs in spent.items():
        both = list(zip(pairs[::2], pairs[1::2], strict=True))
        values = [(a["kvtide"] + b["kvtide"]) / (a["plain"] + b["plain"]) for a, b in both]
        mean = statistics.mean(values)
        upper = mean + 1.96 * statistics.stdev(values) / math.sqrt(len(values))
        yield BenchRecord(
            name=f"vllm-overhead-{task}",
            unit="of an engine without",
            better="lower",
            ours=round(upper, 4),
            spread=(round(min(values), 4), round(max(values), 4)),
            bar=1.03,
            met=upper <= 1.03,
            rounds=len(pairs),
            command=_COMMAND,
            machine=machine(),
            note=f"520 tokens of prompt and 8 generated, nothing to reuse; upper end of the 95 % interval, mean "
            f"{mean:.4f}",
        )


def first_token(folder: Path) -> Iterator[BenchRecord]:
    """A long prompt that was there before."""
    cold, dram, disk = [], [], []
    prompts = [_prompt(f"long {i}", _LONG) for i in range(3)]
    with _node(folder) as node:
        with engine(checkpoint(), folder / "first.log", node.connector, max_model_len=4608) as running:
            for prompt in prompts:
                cold.append(_timed(running, prompt)[0])
                for _ in range(2):
                    running.reset_prefix_cache()
                    dram.append(_hit(running, prompt))
                _say(f"cold {cold[-1]:.2f} s, from DRAM {dram[-1]:.2f} s")
        node.restart()
        with engine(checkpoint(), folder / "second.log", node.connector, max_model_len=4608) as running:
            for prompt in prompts:
                disk.append(_hit(running, prompt))
                _say(f"from disk {disk[-1]:.2f} s")
    for name, found in (("dram", dram), ("nvme", disk)):
        part = [f / statistics.median(cold) for f in found]
        yield figure(
            f"vllm-first-token-{name}",
            "of cold",
            part,
            better="lower",
            bar=0.2,
            command=_COMMAND,
            note=f"{_LONG:,} tokens; cold {statistics.median(cold):.2f} s",
        )


def _hit(running: Engine, prompt: Sequence[int]) -> float:
    wall, _, cached = _timed(running, prompt)
    assert cached >= _LONG - 256, f"only {cached} tokens were cached"
    return wall


def peer(folder: Path) -> Iterator[BenchRecord]:
    """A long prompt that an engine at another node has computed."""
    cold, far, dram = [], [], []
    prompts = [_prompt(f"far {i}", _LONG) for i in range(5)]
    address = f"127.0.0.1:{free_ports(1)[0]}"
    secret = {"KVTIDE_PEERS_TOKEN_FILE": token(folder)}
    for name in ("one", "two"):
        (folder / name).mkdir()
    with (
        _node(folder / "one", "2GiB", KVTIDE_PEERS_LISTEN=address, **secret) as one,
        _node(folder / "two", "2GiB", KVTIDE_PEERS_ADDRESSES=address, **secret) as two,
    ):
        with engine(checkpoint(), folder / "one.log", one.connector, max_model_len=4608) as running:
            with Client(one.path) as client:
                for i, prompt in enumerate(prompts, 1):
                    # A worker that is late drops blocks; then the rest is computed again.
                    while client.statistics().counts.get("blocks stored", 0) < i * _LONG // 256:
                        running.reset_prefix_cache()
                        running.complete(prompt, 1)
                        at_rest(client)
            _say(f"{len(prompts)} prompts are computed at the first node")
        with engine(checkpoint(), folder / "two.log", two.connector, max_model_len=4608) as running:
            with Client(two.path) as client:
                joined(client)
            for i, prompt in enumerate(prompts):
                cold.append(_timed(running, _prompt(f"near {i}", _LONG))[0])
                far.append(_hit(running, prompt))
                running.reset_prefix_cache()
                dram.append(_hit(running, prompt))
                _say(f"cold {cold[-1]:.2f} s, from the other node {far[-1]:.3f} s, from DRAM {dram[-1]:.3f} s")
            with Client(two.path) as client:
                read = client.statistics().tiers[f"peer {address}"].bytes_read
        assert read >= len(prompts) * (_LONG // 256 - 1) * 256 * 23_040, "they did not come from the other node"
    of_dram = statistics.median(a / b for a, b in zip(far, dram, strict=True))
    yield figure(
        "vllm-first-token-peer",
        "of cold",
        [f / statistics.median(cold) for f in far],
        better="lower",
        bar=1.0,
        command=f"{_COMMAND} peer",
        note=f"{_LONG:,} tokens from the memory of another node, over TCP on loopback; cold "
        f"{statistics.median(cold):.2f} s; {of_dram:.1f} x a hit in DRAM",
    )


def turns(folder: Path) -> Iterator[BenchRecord]:
    """Conversations that take turns in an engine with room for two of them."""
    blocks = 2 * -(-_TURNS * _TURN // 128) + 2
    means = {}
    with _node(folder) as node:
        for name, kind in (("plain", None), ("kvtide", node.connector)):
            options = ["--num-gpu-blocks-override", str(blocks)]
            log = folder / f"{name}.log"
            with engine(checkpoint(), log, kind, max_model_len=2048, options=options) as running:
                walls = []
                for turn in range(1, _TURNS + 1):
                    for session in range(_SESSIONS):
                        walls.append(_timed(running, _prompt(f"session {session}", _TURN * turn))[0])
                    _say(f"{name}, turn {turn} of {_TURNS}: {statistics.mean(walls[-_SESSIONS:]):.2f} s")
                means[name] = statistics.mean(walls)
    yield figure(
        "vllm-turns",
        "of plain vLLM",
        [means["kvtide"] / means["plain"]],
        better="lower",
        bar=0.4,
        command=_COMMAND,
        note=f"mean time to first token of {_SESSIONS} conversations of {_TURNS} turns of {_TURN} tokens, room for "
        f"two of them ({blocks} pages of 128); plain vLLM with its prefix cache {means['plain']:.2f} s",
    )


def probe(folder: Path, count: int) -> Iterator[BenchRecord]:
    """Prompts that another tenant has cached, that nobody has, and that who asks has, ``count`` of each."""
    prompts = {kind: [_prompt(f"{kind} {i}", _PROBED) for i in range(count)] for kind in (NOBODY, OTHER, OWN)}
    times: dict[str, list[float]] = {kind: [] for kind in prompts}

    def timed(prompt: Sequence[int]) -> tuple[float, int]:
        start = time.perf_counter()
        found = running.complete(prompt, 1, cache_salt="who asks", **READING)
        return (time.perf_counter() - start) * 1e3, found.cached

    with (
        _node(folder, "1GiB") as node,
        engine(random_llama(), folder / "engine.log", node.connector, max_model_len=1024) as running,
        Client(node.path) as client,
    ):
        joined(client)
        for kind, salt in ((OTHER, "another"), (OWN, "who asks")):
            for prompt in prompts[kind]:
                eventually(lambda p=prompt, s=salt: ask(running, p, 1, cache_salt=s).cached)  # type: ignore[misc]
            _say(f"{count} prompts of {kind} are stored")
        running.reset_prefix_cache()
        for i in range(10):
            timed(_prompt(f"warm-up {i}", _PROBED))
        order = [(kind, prompt) for kind, mine in prompts.items() for prompt in mine]
        random.Random(0).shuffle(order)
        for kind, prompt in order:
            milliseconds, cached = timed(prompt)
            assert not cached or kind == OWN
            times[kind].append(milliseconds)
    found = {kind: np.array(mine) for kind, mine in times.items()}
    yield from verdicts("probe-vllm", "ms", found, f"{_COMMAND} probe")


_COMMAND = ".venv-vllm/bin/python -m bench.vllm"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.vllm", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="overhead, first-token, peer, turns, probe; by default all"
    )
    parser.add_argument("--probes", type=int, default=200, metavar="N", help="prompts of each kind that are probed")
    given = parser.parse_args()
    parts: dict[str, Callable[[Path], Iterator[BenchRecord]]] = {
        "overhead": overhead,
        "first-token": first_token,
        "peer": peer,
        "turns": turns,
        "probe": partial(probe, count=given.probes),
    }
    if unknown := [name for name in given.parts if name not in parts]:
        parser.error(f"there is no part {unknown[0]!r}; choose of {', '.join(parts)}")
    for name in given.parts or parts:
        with tempfile.TemporaryDirectory(prefix="kvtide-bench-") as folder:
            for record in parts[name](Path(folder)):
                record.write(RESULTS)
                sign = ">=" if record.better == "higher" else "<="
                print(f"{record.name}: {record.ours:g} {record.unit}, asked for {sign} {record.bar:g}; {record.note}")


if __name__ == "__main__":
    main()
