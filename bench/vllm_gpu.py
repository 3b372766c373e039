"""A real vLLM on a GPU, with random weights in the shape of Llama-3-8B.

    python -m bench.vllm_gpu first 32776x1 8200x16 batchx1   # tokens x tokens out; a batch is 16 prompts of 4,000
    python -m bench.vllm_gpu cold --pairs 20

``first``: the first request of a new engine with a new node, of each case; how much of what it computed is found when
vLLM's own cache was emptied, and how long loading it takes the first, second and third time, beside vLLM's own cache.
``cold``: two engines alive in one process, with kvtide and without, which take turns at prompts that nobody has had: 16
prompts of 4,000 tokens with 64 out, and 32 prompts of 200 with 200 out. The ratio of each pair, with the 95 % interval
of their mean.

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
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
T_95 = {20: 2.093, 22: 2.080, 30: 2.045, 40: 2.023}


def engine(dram: str | None, *, compiled: bool) -> Any:
    """An engine, with a node of so much memory; None: without kvtide."""
    from vllm import LLM

    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    transfer = None
    if dram is not None:
        transfer = {
            "kv_connector": "KvtideConnector",
            "kv_connector_module_path": "kvtide.engines.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "dram": {"budget": dram},
                "engine": {"weights_id": "random", "store": "through"},
            },
        }
    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=40000,
        enforce_eager=not compiled,
        kv_cache_memory_bytes=16 << 30,
        max_num_batched_tokens=8192,
        max_num_seqs=64,
        gpu_memory_utilization=0.2,
        kv_transfer_config=transfer,
    )


def prompt(tokens: int, seed: str) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(10, VOCABULARY) for _ in range(tokens)]


def ask(llm: Any, prompts: list[list[int]], out: int) -> tuple[float, int]:
    """Seconds, and how many tokens of the prompts came from kvtide's memory."""
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
    told = [((a.kv_transfer_params or {}).get("kvtide") or {}).get("dram_tokens", 0) for a in answers]
    return seconds, sum(told)


def empty(llm: Any) -> None:
    """Empty vLLM's own cache. It refuses while pages are kept for a store, which its next steps end."""
    for _ in range(10):
        if llm.reset_prefix_cache():
            return
        time.sleep(0.2)
        ask(llm, [[5, 6, 7]], 1)
    raise RuntimeError("vLLM does not empty its own cache: pages are in use")


def first(cases: list[str], dram: str) -> None:
    llm = engine(dram, compiled=False)
    for case in cases:
        kind, _, out = case.partition("x")
        batch = kind == "batch"
        prompts = [prompt(4000, f"{case} {i}") for i in range(16)] if batch else [prompt(int(kind), case)]
        whole = sum((len(p) - 1) // BLOCK * BLOCK for p in prompts)
        cold, _ = ask(llm, prompts, int(out))
        found, seconds = [], []
        for _ in range(3):
            empty(llm)
            took, tokens = ask(llm, prompts, int(out))
            found.append(tokens)
            seconds.append(round(took, 4))
        own, _ = ask(llm, prompts, int(out))
        empty(llm)
        print(json.dumps({"case": case, "whole": whole, "found": found, "cold": cold, "loads": seconds, "own": own}))


def cold(pairs: int, dram: str) -> None:
    engines = [engine(None, compiled=True), engine(dram, compiled=True)]
    kinds = {"batch": (16, 4000, 64), "decode": (32, 200, 200)}
    for llm in engines:
        for kind, (count, tokens, out) in kinds.items():
            ask(llm, [prompt(tokens, f"warm {kind} {i}") for i in range(count)], out)
    for kind, (count, tokens, out) in kinds.items():
        ratios = []
        for number in range(pairs):
            prompts = [prompt(tokens, f"{kind} {number} {i}") for i in range(count)]
            took = [0.0, 0.0]
            for which in (0, 1) if number % 2 else (1, 0):
                took[which], _ = ask(engines[which], prompts, out)
                empty(engines[which])
            ratios.append(took[1] / took[0])
        mean = statistics.mean(ratios)
        wide = T_95.get(pairs, 2.1) * statistics.stdev(ratios) / pairs**0.5
        print(json.dumps({"kind": kind, "pairs": pairs, "ratio": mean, "low": mean - wide, "high": mean + wide}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dram", default="24GiB", help="memory of the node")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("first").add_argument("cases", nargs="+", metavar="TOKENSxOUT")
    commands.add_parser("cold").add_argument("--pairs", type=int, default=20)
    given = parser.parse_args()
    if given.command == "first":
        first(given.cases, given.dram)
    else:
        cold(given.pairs, given.dram)


if __name__ == "__main__":
    main()
