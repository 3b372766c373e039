"""Eviction and admission on real traces: hit rates beside leaf-first LRU and the optimum, and what they cost.

``python -m bench.policies --traces DIR [FIGURE ...]``: figures are ``eviction``, ``admission`` and ``cost``; the folder
(or ``$KVTIDE_TRACES``) has ``mooncake_conversation.jsonl.gz`` and ``lmcache_agent_hashed.jsonl.gz``. Writes
``bench/results/policies/*.json`` and the tables of ``docs/eviction.md``. One configuration for all; nothing fits
one trace only. A rate is prefix hits over the last 60 % of the requests, tiers warmed by the first 40 %.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvtide.benchmarks.settings import configured
from kvtide.replay.optimum import optimum
from kvtide.replay.run import Report, replay
from kvtide.replay.trace import Trace, chains, read
from kvtide.replay.world import World

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results" / "policies"
PAGE = ROOT / "docs" / "eviction.md"

TRACES = {"conversation": "mooncake_conversation.jsonl.gz", "agents": "lmcache_agent_hashed.jsonl.gz"}
SIZES = (0.001, 0.01, 0.05, 0.10, 0.25, 0.50)
ASKED = {("conversation", 0.01): 10.2, ("conversation", 0.05): 24.7, ("conversation", 0.10): 31.8}
"""Hit rates in percent that the default must reach."""
BLOCK = 1 << 20
"""A size that has a slot of its own, so that capacities are exact."""
WARM = 0.4
STORES = ("through", "eviction", "second-touch", "ghost")


def run(trace: Trace, dram: int, policy: str, nvme: int = 0, below: dict[str, str] | None = None) -> Report:
    """A replay with room for ``dram`` blocks, and for ``nvme`` below, with the settings for that tier."""
    tiers: dict[str, Any] = {"dram": {"budget": dram * BLOCK, "policy": policy}}
    if nvme:
        tiers["nvme"] = {"path": "replayed", "budget": nvme * BLOCK, **(below or {})}
    return replay(trace, configured(**tiers), BLOCK, WARM, best=False)


def eviction(name: str, trace: Trace) -> Iterator[dict[str, Any]]:
    start = int(len(trace.blocks) * WARM)
    asked = sum(len(b) for b in trace.blocks[start:])
    for size in SIZES:
        blocks = max(1, int(trace.unique * size))
        rates = {policy: 100 * run(trace, blocks, policy).hit_rate for policy in ("lru", "reuse", "auto")}
        yield {
            "trace": name,
            "size": size,
            "blocks": blocks,
            **rates,
            "optimum": 100 * optimum(trace, blocks, start).hits / asked,
            "asked_for": max(rates["lru"] - 0.2, ASKED.get((name, size), 0.0)),
        }


def admission(name: str, trace: Trace) -> Iterator[dict[str, Any]]:
    start = int(len(trace.blocks) * WARM)
    asked = sum(len(b) for b in trace.blocks[start:])
    dram, below = max(1, int(trace.unique * 0.01)), max(1, int(trace.unique * 0.10))
    for store in STORES:
        report = run(trace, dram, "auto", below, {"store": store})
        yield {
            "trace": name,
            "store": store,
            "hit_rate": 100 * report.hit_rate,
            "blocks_written": report.tiers[1].bytes_written // BLOCK,
            "written_per_computed": report.write_amplification,
        }
    best = optimum(trace, dram + below, start)
    yield {
        "trace": name,
        "store": "optimum",
        "hit_rate": 100 * best.hits / asked,
        "blocks_written": best.kept,
        "written_per_computed": best.kept / (asked - best.hits),
    }


def cost(name: str, trace: Trace) -> Iterator[dict[str, Any]]:
    """Microseconds at 5 %: all that a caller waits for of uses and policy, ranking included, for each block of its
    prompt and for each time that a block is touched (asked for, about to get children, stored); and learning."""
    every = sum(len(b) for b in trace.blocks)
    for policy in ("lru", "reuse", "auto"):
        tiers = {"dram": {"budget": max(1, int(trace.unique * 0.05)) * BLOCK, "policy": policy}}
        world = World(configured(**tiers), BLOCK)
        spent = [0.0, 0]
        for owner, verb in (
            (world.uses, "asked"),
            (world.uses, "stored"),
            (world.uses, "touch"),
            (world.policy, "score"),
        ):
            setattr(owner, verb, _timed(getattr(owner, verb), spent))
        for blocks in trace.blocks:
            world.request(blocks.tolist())
        yield {
            "trace": name,
            "policy": policy,
            "us_a_block": 1e6 * spent[0] / every,
            "us_a_touch": 1e6 * spent[0] / spent[1],
            "learning_us_a_block": 1e6 * world.learning_seconds / every,
        }


def _timed(verb: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """The verb, with the time that it takes, and the blocks of those that are touches, added up in ``spent``."""

    def timed(*given: Any) -> Any:
        began = time.perf_counter()
        answer = verb(*given)
        spent[0] += time.perf_counter() - began
        spent[1] += len(given[0]) if answer is None else 0
        return answer

    return timed


FIGURES = {"eviction": eviction, "admission": admission, "cost": cost}


def rows(found: list[dict[str, Any]]) -> list[str]:
    """A table in Markdown."""
    names = list(found[0])
    shown = [[f"{v:.2f}" if isinstance(v, float) and k != "size" else f"{v}" for k, v in row.items()] for row in found]
    heads = [name.replace("_", " ") for name in names]
    return [f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(names), *shown)]


def write_page() -> None:
    """Put the records' tables into ``docs/eviction.md``, each between its marks."""
    text = PAGE.read_text()
    for figure in FIGURES:
        record = RESULTS / f"{figure}.json"
        if record.exists():
            before, _, rest = text.partition(f"<!-- {figure} -->\n")
            _, _, after = rest.partition(f"<!-- /{figure} -->\n")
            table = [f"<!-- {figure} -->", *rows(msgspec.json.decode(record.read_bytes())), f"<!-- /{figure} -->", ""]
            text = before + "\n".join(table) + after
    PAGE.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figures", nargs="*", choices=[*FIGURES, []], help="all, if none is named")
    parser.add_argument("--traces", type=Path, default=os.environ.get("KVTIDE_TRACES"))
    parser.add_argument("--report", action="store_true", help="only write the page")
    given = parser.parse_args()
    if not given.report:
        if given.traces is None:
            parser.error("name the folder with the traces: --traces DIR or $KVTIDE_TRACES")
        traces = {name: chains(read(Path(given.traces) / file)) for name, file in TRACES.items()}
        RESULTS.mkdir(parents=True, exist_ok=True)
        for figure in given.figures or FIGURES:
            found: list[dict[str, Any]] = []
            for name, trace in traces.items():
                for row in FIGURES[figure](name, trace):
                    sys.stderr.write(f"{figure}: {row}\n")
                    found.append(row)
            sys.stdout.write("\n".join([*rows(found), ""]))
            (RESULTS / f"{figure}.json").write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2))
    write_page()


if __name__ == "__main__":
    main()
