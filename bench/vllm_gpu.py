"""A real vLLM on a GPU, with random weights in the shape of Llama-3-8B.

    python -m bench.vllm_gpu first 32776x1 8200x16 batchx1   # tokens x tokens out; a batch is 16 prompts of 4,000
    python -m bench.vllm_gpu --dram 6GiB disk 32776 --nvme FOLDER
    python -m bench.vllm_gpu cold --pairs 20

``first``: the first request of a new engine with a new node, of each case; how much of what it computed is found when
vLLM's own cache was emptied, and how long loading it takes each of six times, beside vLLM's own cache
and beside the bus: one large copy of as many bytes from pinned memory, in the same process. Then how long prompts
of that length take that nobody has had, now that the engine is warm.
``disk``: prompts take turns, three by default, whose KV together does not fit into the node's memory. What was loaded
from each tier, and how long the first token took, beside computing other prompts.
``cold``: three engines alive in one process, without a connector, with one that does nothing and with kvtide, which
take turns at prompts that nobody has had: 16 prompts of 4,000 tokens with 64 out, 32 prompts of 200 with 200 out, and
32 prompts of 16 with 200 out, which complete no block. The ratio to the engine without a connector in each round, with
the 95 % interval of its mean, and which steps took longer. A few rounds go before, in which the node takes its memory
from the system: their times are printed too.

vLLM needs no tokenizer or checkpoint here. Give each run another ``--dram``: engines with the same settings share a
node.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
VOCABULARY = 32000
BLOCK = 256
TOKEN_BYTES = 2 * 32 * 8 * 128 * 2
"""Of KV: K and V of 32 layers of 8 heads of 128, in 2 bytes."""
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": VOCABULARY,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 262144,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
T_95 = {20: 2.093, 22: 2.080, 30: 2.045, 40: 2.023}


def engine(transfer: dict[str, Any] | None, *, compiled: bool, longest: int = 39_000) -> Any:
    """An engine for prompts of so many tokens, with a connector or without."""
    from vllm import LLM

    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=longest + 1000,
        enforce_eager=not compiled,
        kv_cache_memory_bytes=max(16 << 30, (longest + 8000) * TOKEN_BYTES),
        max_num_batched_tokens=8192,
        max_num_seqs=64,
        gpu_memory_utilization=0.2,
        kv_transfer_config=transfer,
    )


def kvtide(dram: str, nvme: Path | None = None) -> dict[str, Any]:
    """kvtide, with a node of so much memory, and a disk."""
    tiers: dict[str, Any] = {"dram": {"budget": dram}}
    if nvme is not None:
        tiers["nvme"] = {"path": str(nvme), "budget": "45GiB", "store": "through"}
    return {
        "kv_connector": "KvtideConnector",
        "kv_connector_module_path": "kvtide.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            **tiers,
            "engine": {"weights_id": "random", "store": "through"},
        },
    }


KINDS = {"batch": (16, 4000, 64), "decode": (32, 200, 200), "decode-no-block": (32, 16, 200)}
"""Prompts, tokens of each, and tokens out."""
BARE = {"kv_connector": "BareConnector", "kv_connector_module_path": "bench.bare_connector", "kv_role": "kv_both"}


def prompt(tokens: int, seed: str) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(10, VOCABULARY) for _ in range(tokens)]


def ask(llm: Any, prompts: list[list[int]], out: int) -> tuple[float, dict[str, int]]:
    """Seconds, and how many tokens of the prompts came from each of kvtide's tiers."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0,
        max_tokens=out,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": {"priority": 0}},
    )
    began = time.perf_counter()
    answers = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - began
    told = [(a.kv_transfer_params or {}).get("kvtide") or {} for a in answers]
    return seconds, {tier: sum(one.get(f"{tier}_tokens", 0) for one in told) for tier in ("dram", "disk")}


def empty(llm: Any) -> None:
    """Empty vLLM's own cache. It refuses while pages are kept for a store, which its next steps end."""
    for _ in range(10):
        if llm.reset_prefix_cache():
            return
        time.sleep(0.2)
        ask(llm, [[5, 6, 7]], 1)
    raise RuntimeError("vLLM does not empty its own cache: pages are in use")


def bus(nbytes: int) -> float:
    """Seconds that so many bytes take from pinned memory to the GPU, the best of five."""
    import torch

    host = torch.empty(min(nbytes, 1 << 30), dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")
    took = []
    for _ in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return min(took[1:]) * nbytes / len(host)


def first(cases: list[str], dram: str, *, compiled: bool, pause: float) -> None:
    longest = max([39_000, *(int(case.partition("x")[0]) for case in cases if not case.startswith("batch"))])
    llm = engine(kvtide(dram), compiled=compiled, longest=longest)
    for case in cases:
        kind, _, out = case.partition("x")
        batch = kind == "batch"
        prompts = [prompt(4000, f"{case} {i}") for i in range(16)] if batch else [prompt(int(kind), case)]
        whole = sum((len(p) - 1) // BLOCK * BLOCK for p in prompts)
        cold, _ = ask(llm, prompts, int(out))
        time.sleep(pause)
        found, seconds = [], []
        for _ in range(6):
            empty(llm)
            took, tokens = ask(llm, prompts, int(out))
            found.append(tokens["dram"])
            seconds.append(round(took, 4))
        own = min(ask(llm, prompts, int(out))[0] for _ in range(3))
        computed = []
        for number in range(3):
            empty(llm)
            others = [prompt(len(p), f"{case} other {number} {i}") for i, p in enumerate(prompts)]
            computed.append(round(ask(llm, others, int(out))[0], 4))
        empty(llm)
        floor = bus(whole * TOKEN_BYTES)
        row = {"case": case, "whole": whole, "found": found, "cold": cold, "loads": seconds, "own": own, "bus": floor}
        second = statistics.median(seconds[1:])
        row |= {"computed": computed, "load_against_computing": second / statistics.median(computed)}
        row |= {"load_against_limit": second / (floor + own), "first_against_second": seconds[0] / second}
        print(json.dumps(row), flush=True)


def disk(tokens: int, count: int, dram: str, nvme: Path) -> None:
    llm = engine(kvtide(dram, nvme), compiled=False, longest=max(39_000, tokens))
    prompts = [prompt(tokens, f"disk {number}") for number in range(count)]
    for round_ in range(4):  # the first computes them
        for number, one in enumerate(prompts):
            empty(llm)
            seconds, found = ask(llm, [one], 1)
            row = {"tokens": tokens, "round": round_, "prompt": number, "seconds": round(seconds, 4), "found": found}
            print(json.dumps(row), flush=True)
    for number in range(2):
        empty(llm)
        seconds, _ = ask(llm, [prompt(tokens, f"other {number}")], 1)
        print(json.dumps({"tokens": tokens, "computed": round(seconds, 4)}), flush=True)


class Steps:
    """When each step of an engine ended, counted from the start of the request."""

    def __init__(self, llm: Any) -> None:
        self.ends: list[float] = []
        self._step = llm.llm_engine.step
        llm.llm_engine.step = self._timed

    def _timed(self) -> Any:
        found = self._step()
        self.ends.append(time.perf_counter())
        return found

    def take(self, began: float) -> list[float]:
        ends, self.ends = [end - began for end in self.ends], []
        return ends


def by_step(none: list[list[float]], ours: list[list[float]]) -> dict[str, list[float]]:
    """Milliseconds that each step took longer with a connector: the median over all rounds, in tens of steps after the
    first ten."""
    steps = min(len(run) for run in none + ours)
    extra = [1000 * statistics.median(b[i] - a[i] for a, b in zip(none, ours, strict=True)) for i in range(steps)]
    each = [after - before for before, after in zip([0.0, *extra], extra, strict=False)]
    tens = [sum(each[i : i + 10]) for i in range(10, steps, 10)]
    return {"first_steps_ms": [round(e, 2) for e in each[:10]], "tens_of_steps_ms": [round(e, 2) for e in tens]}


def cold(pairs: int, dram: str, names: list[str], only: list[str], warm: int) -> None:
    connectors = {"none": None, "bare": BARE, "kvtide": kvtide(dram)}
    engines = {name: engine(connectors[name], compiled=True) for name in ["none", *names]}
    steps = {name: Steps(llm) for name, llm in engines.items()}
    kinds = {kind: KINDS[kind] for kind in only}
    for name, llm in engines.items():
        for kind, (count, tokens, out) in kinds.items():
            warmed = [
                ask(llm, [prompt(tokens, f"warm {kind} {number} {i}") for i in range(count)], out)[0]
                for number in range(warm)
            ]
            print(json.dumps({"kind": kind, "engine": name, "warm_up_seconds": warmed}), flush=True)
            empty(llm)
    for kind, (count, tokens, out) in kinds.items():
        took: dict[str, list[float]] = {name: [] for name in engines}
        ends: dict[str, list[list[float]]] = {name: [] for name in engines}
        for number in range(pairs):
            prompts = [prompt(tokens, f"{kind} {number} {i}") for i in range(count)]
            first = number % len(engines)
            for name in [*list(engines)[first:], *list(engines)[:first]]:
                steps[name].take(0)
                began = time.perf_counter()
                took[name].append(ask(engines[name], prompts, out)[0])
                ends[name].append(steps[name].take(began))
                empty(engines[name])
            last = {name: round(seconds[-1], 4) for name, seconds in took.items()}
            print(json.dumps({"kind": kind, "round": number, **last}), flush=True)
        for name in names:
            ratios = [ours / without for ours, without in zip(took[name], took["none"], strict=True)]
            mean = statistics.mean(ratios)
            wide = T_95.get(pairs, 2.1) * statistics.stdev(ratios) / pairs**0.5
            row = {"kind": kind, "engine": name, "pairs": pairs, "seconds": statistics.median(took["none"])}
            row |= {"ratio": mean, "low": mean - wide, "high": mean + wide, "median": statistics.median(ratios)}
            row |= by_step(ends["none"], ends[name]) | {"ratios": [round(ratio, 4) for ratio in ratios]}
            print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dram", default="24GiB", help="memory of the node")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("first")
    one.add_argument("cases", nargs="+", metavar="TOKENSxOUT")
    one.add_argument("--compiled", action="store_true", help="with torch.compile and CUDA graphs")
    one.add_argument("--pause", type=float, default=0, help="seconds between the first request and the second")
    three = commands.add_parser("disk")
    three.add_argument("tokens", type=int)
    three.add_argument("--prompts", type=int, default=3)
    three.add_argument("--nvme", type=Path, required=True, help="a folder for the node's disk tier")
    two = commands.add_parser("cold")
    two.add_argument("--pairs", type=int, default=20)
    two.add_argument("--connectors", nargs="+", choices=["bare", "kvtide"], default=["bare", "kvtide"])
    two.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    two.add_argument("--warm", type=int, default=6, help="unmeasured rounds first, in which the node takes its memory")
    given = parser.parse_args()
    if given.command == "first":
        first(given.cases, given.dram, compiled=given.compiled, pause=given.pause)
    elif given.command == "disk":
        disk(given.tokens, given.prompts, given.dram, given.nvme)
    else:
        cold(given.pairs, given.dram, given.connectors, given.kinds, given.warm)


if __name__ == "__main__":
    main()
