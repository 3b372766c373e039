"""Eviction and admission on real traces: hit rates beside leaf-first LRU and the optimum, and what they cost.

``python -m bench.policies --traces DIR [FIGURE ...]``: figures are ``eviction``, ``admission``, ``cost``, ``robust``
and ``hints``; the folder (or ``$KVTIDE_TRACES``) has ``mooncake_conversation.jsonl.gz`` and
``lmcache_agent_hashed.jsonl.gz``. Writes
``bench/results/policies/*.json`` and the tables of ``docs/eviction.md``. One configuration for all; nothing fits
one trace only. A rate is prefix hits over the last 60 % of the requests, tiers warmed by the first 40 %.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from kvtide.benchmarks.settings import configured
from kvtide.replay.optimum import optimum
from kvtide.replay.run import ReplayReport, replay
from kvtide.replay.simulation import Simulation
from kvtide.replay.trace import Trace, TraceRequest, chains, read

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


def run(trace: Trace, dram: int, policy: str, nvme: int = 0, below: dict[str, str] | None = None) -> ReplayReport:
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
        world = Simulation(configured(**tiers), BLOCK)
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


SEEDS = range(1000, 1020)
"""For ``robust``: never tuned on."""
LEAST = 100
"""Blocks of a tier in which a policy can be judged."""
ALLOWED = 0.2
"""Points that the default may be below leaf-first LRU."""


def rotated(requests: Sequence[TraceRequest], by: int) -> list[TraceRequest]:
    """The same requests, begun at another: those before it come after the last, with a usual gap between."""
    first, last = requests[by:], requests[:by]
    gap = (requests[-1].seconds - requests[0].seconds) / len(requests)
    moved = [r._replace(seconds=r.seconds - first[0].seconds) for r in first]
    end = moved[-1].seconds + gap
    return moved + [r._replace(seconds=r.seconds - requests[0].seconds + end) for r in last]


def merged(one: Sequence[TraceRequest], other: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Both at once, by time; their blocks are different ones."""
    named = [
        [r._replace(blocks=tuple(f"{number} {block!r}" for block in r.blocks)) for r in requests]
        for number, requests in enumerate((one, other))
    ]
    return sorted(named[0] + named[1], key=lambda r: r.seconds)


def lru_hits(trace: Trace, capacity: int, start: int) -> int:
    """What the policy ``lru`` finds, block by block and without the store around it: in a tenth of the time.

    The blocks of the request itself are not evicted for it.
    """
    resident: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for number, chain in enumerate(trace.blocks):
        blocks = chain.tolist()
        if number >= start:
            hits += next((i for i, block in enumerate(blocks) if block not in resident), len(blocks))
        for block in reversed(blocks):
            resident[block] = None
            resident.move_to_end(block)
        while len(resident) > capacity:
            resident.popitem(last=False)
    return hits


def _robust(given: tuple[str, int, list[TraceRequest]]) -> list[dict[str, Any]]:
    name, seed, requests = given
    trace = chains(requests)
    start = int(len(trace.blocks) * WARM)
    asked = sum(len(b) for b in trace.blocks[start:])
    found = []
    for size in SIZES:
        if (blocks := int(trace.unique * size)) >= LEAST:
            lru = 100 * lru_hits(trace, blocks, start) / asked
            report = run(trace, blocks, "auto")
            auto = 100 * report.hit_rate
            found.append({"trace": name, "seed": seed, "size": size, "blocks": blocks, "lru": lru, "auto": auto})
    return found


def robust(folder: Path, seeds: Iterable[int] = SEEDS) -> Iterator[dict[str, Any]]:
    """The default beside leaf-first LRU on traces that begin at a random request, and on pairs of them at once."""
    known = {name: list(read(folder / file)) for name, file in TRACES.items()}

    def drawn() -> Iterator[tuple[str, int, list[TraceRequest]]]:
        for seed in seeds:
            chance = random.Random(seed)
            here = {name: rotated(requests, chance.randrange(len(requests))) for name, requests in known.items()}
            yield from ((name, seed, requests) for name, requests in here.items())
            yield "both", seed, merged(*here.values())

    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for rows_ in pool.map(_robust, drawn()):
            yield from rows_


def summary(found: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The draws of ``robust`` by trace and size."""
    for name, size in dict.fromkeys((row["trace"], row["size"]) for row in found):
        some = [row for row in found if (row["trace"], row["size"]) == (name, size)]
        gains = [row["auto"] - row["lru"] for row in some]
        yield {
            "trace": name,
            "size": size,
            "draws": len(some),
            "lru_mean": statistics.mean(row["lru"] for row in some),
            "gain_mean": statistics.mean(gains),
            "gain_least": min(gains),
            "gain_most": max(gains),
            "more_than_0.2_below": sum(gain < -ALLOWED for gain in gains),
        }


def hints(folder: Path) -> Iterator[dict[str, Any]]:
    """The agents' trace without and with what its callers know of each turn's end.

    The trace does not say it. It is made up: a request that another of its session follows ended in a call of a tool,
    and the last of a session ended the turn.
    """
    file = folder / TRACES["agents"]
    with gzip.open(file, "rt") as lines:
        found = [json.loads(line) for line in lines]
    last = {(row["app"], row["sid"]): number for number, row in enumerate(found)}
    first: dict[str, int] = {}
    for row in found:
        first[row["app"]] = min(first.get(row["app"], row["ts"]), row["ts"])
    order = sorted(range(len(found)), key=lambda n: found[n]["ts"] - first[found[n]["app"]])
    requests = [
        TraceRequest(
            (found[n]["ts"] - first[found[n]["app"]]) / 1e6,
            tuple(found[n]["hash_ids"]),
            turn="end" if last[found[n]["app"], found[n]["sid"]] == n else "tool",
        )
        for n in order
        if found[n]["hash_ids"]
    ]
    for size in SIZES:
        told = chains(requests)
        untold = chains(r._replace(turn="") for r in requests)
        blocks = max(1, int(told.unique * size))
        rates = {
            f"{policy}{'_told' if trace is told else ''}": 100 * run(trace, blocks, policy).hit_rate
            for policy in ("lru", "reuse", "auto")
            for trace in ((untold, told) if policy != "lru" else (untold,))
        }
        yield {"trace": "agents", "size": size, "blocks": blocks, **rates}


FIGURES = {"eviction": eviction, "admission": admission, "cost": cost}
WHOLE = {"robust": robust, "hints": hints}
"""Figures that make their traces by themselves."""


def rows(found: list[dict[str, Any]]) -> list[str]:
    """A table in Markdown."""
    names = list(found[0])
    shown = [[f"{v:.2f}" if isinstance(v, float) and k != "size" else f"{v}" for k, v in row.items()] for row in found]
    heads = [name.replace("_", " ") for name in names]
    return [f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(names), *shown)]


def shown(figure: str, found: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """What the page tells of a record."""
    return summary(found) if figure == "robust" else found


def write_page() -> None:
    """Put the records' tables into ``docs/eviction.md``, each between its marks."""
    text = PAGE.read_text()
    for figure in (*FIGURES, *WHOLE):
        record = RESULTS / f"{figure}.json"
        if record.exists() and f"<!-- {figure} -->" in text:
            before, _, rest = text.partition(f"<!-- {figure} -->\n")
            _, _, after = rest.partition(f"<!-- /{figure} -->\n")
            found = msgspec.json.decode(record.read_bytes())
            table = [f"<!-- {figure} -->", *rows(list(shown(figure, found))), f"<!-- /{figure} -->", ""]
            text = before + "\n".join(table) + after
    PAGE.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figures", nargs="*", choices=[*FIGURES, *WHOLE, []], help="all, if none is named")
    parser.add_argument("--traces", type=Path, default=os.environ.get("KVTIDE_TRACES"))
    parser.add_argument("--report", action="store_true", help="only write the page")
    given = parser.parse_args()
    if not given.report:
        if given.traces is None:
            parser.error("name the folder with the traces: --traces DIR or $KVTIDE_TRACES")
        figures = given.figures or (*FIGURES, *WHOLE)
        named = TRACES if any(figure in FIGURES for figure in figures) else {}
        traces = {name: chains(read(Path(given.traces) / file)) for name, file in named.items()}
        RESULTS.mkdir(parents=True, exist_ok=True)
        for figure in figures:
            found: list[dict[str, Any]] = []
            measured = (
                WHOLE[figure](Path(given.traces))
                if figure in WHOLE
                else (row for name, trace in traces.items() for row in FIGURES[figure](name, trace))
            )
            for row in measured:
                sys.stderr.write(f"{figure}: {row}\n")
                found.append(row)
                (RESULTS / f"{figure}.json").write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2))
            sys.stdout.write("\n".join([*rows(list(shown(figure, found))), ""]))
    write_page()


if __name__ == "__main__":
    main()
