"""What kvtide does for a real vLLM on this machine's processor: beside the same engine without it.

``.venv-vllm/bin/python -m bench.vllm [overhead] [first-token] [turns]``; records go to ``bench/results``.

- *overhead*: requests with nothing to reuse, in pairs, one to an engine with kvtide and one to an engine without, in
  turn. Whoever comes first in a pair pays for having idled, so two pairs in both orders are one measurement. Wall time,
  and CPU time of all the engine's processes and, with kvtide, of the node. What counts is the upper end of the 95 %
  interval of the mean of the ratios.
- *first-token*: a prompt of 4,096 tokens: cold, from DRAM, and from the disk after engine and node were restarted.
- *turns*: ten conversations of six turns, one turn of each after the other, where the engine has room for two.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtide.benchmarks.record import Record, figure, machine
from kvtide.node.client import Client
from tests.engines.vllm.checkpoints import checkpoint
from tests.engines.vllm.engines import Engine, engine
from tests.node.serving import Process

RESULTS = Path(__file__).parent / "results"
_PAIRS = 32
_LONG = 4096
_SESSIONS, _TURNS, _TURN = 10, 6, 256
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

    def __init__(self, folder: Path) -> None:
        settings = {"KVTIDE_DRAM_BUDGET": "3GiB", "KVTIDE_DRAM_SEGMENT": "256MiB", "KVTIDE_DRAM_PREFAULT": "true"}
        settings |= {"KVTIDE_NVME_BUDGET": "4GiB", "KVTIDE_NVME_SEGMENT": "256MiB", "KVTIDE_NVME_STORE": "through"}
        super().__init__(folder, **settings)

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
def _node(folder: Path) -> Iterator[_Node]:
    node = _Node(folder)
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


def overhead(folder: Path) -> Iterator[Record]:
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
        yield Record(
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


def first_token(folder: Path) -> Iterator[Record]:
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


def turns(folder: Path) -> Iterator[Record]:
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


_COMMAND = ".venv-vllm/bin/python -m bench.vllm"
_PARTS: dict[str, Callable[[Path], Iterator[Record]]] = {
    "overhead": overhead,
    "first-token": first_token,
    "turns": turns,
}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    for name in sys.argv[1:] or _PARTS:
        with tempfile.TemporaryDirectory(prefix="kvtide-bench-") as folder:
            for record in _PARTS[name](Path(folder)):
                record.write(RESULTS)
                print(f"{record.name}: {record.ours} {record.unit}, asked for <= {record.bar}; {record.note}")


if __name__ == "__main__":
    main()
