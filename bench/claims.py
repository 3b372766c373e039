"""The four claims that ``docs/benchmarks.md`` begins with, and the three charts beside them.

Every number is a value of a record, or the quotient or product of two values of one record. What a claim does not hold
for is said with it.
"""

from __future__ import annotations

from collections.abc import Mapping

from bench.charts import Bar, Group, bar_chart
from kvtide.benchmarks.record import BenchRecord

__all__ = ["Found", "charts", "claims"]

Found = Mapping[str, Mapping[str, BenchRecord]]
"""Records by machine (a file's name in ``bench/results/elsewhere``, or "" for ``bench/results``) and by name."""

_HERE, _16_CORES, _GPU, _NEWER = "", "16-cores-x86", "h200", "h200-first-token"
_LENGTHS = {"8k": 8_192, "32k": 32_768, "128k": 131_072}
_TOKEN_BYTES = 2 * 32 * 8 * 128 * 2
"""Of KV in the shape of Llama-3-8B: K and V of 32 layers of 8 heads of 128, in 2 bytes."""
_SIZES = {"32mib": "32 MiB", "2mib": "2 MiB"}
_PAGES = {
    "llama-3-8b": "blocks of 32 MiB",
    "tp8": "one head of 8 of them (TP 8)",
    "small": "blocks of 256 KiB",
}


def charts(found: Found) -> dict[str, str]:
    """The charts by the name of their file."""
    return {
        "first-token-dram": _dram_chart(found),
        "first-token-nvme": _nvme_chart(found),
        "hardware-limits": _limits_chart(found),
    }


def claims(found: Found) -> list[str]:
    """The lines of the page's first part."""
    return [*_dram(found), *_nvme(found), *_limits(found), *_cost(found)]


def _seconds(value: float) -> str:
    return f"{_digits(value, 2 if value < 1 else 3)} s"


def _digits(value: float, count: int) -> str:
    """With trailing zeros, which say how exact it is."""
    return f"{value:#.{count}g}".removesuffix(".")


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _measured(r: BenchRecord) -> str:
    return f"{r.machine}; median of {r.rounds} rounds"


def _computing(r: BenchRecord) -> float:
    """The seconds that computing the prompt took: a ratio against it is that time divided by ours."""
    assert r.against == "computing the prompt"
    assert r.ratio is not None
    return r.ratio * r.ours


def _share(r: BenchRecord) -> float:
    """Of the hardware's limit in the same run: the median of the rounds' ratios, where they were kept."""
    if r.ratio is not None:
        return r.ratio
    assert r.limit
    return r.ours / r.limit


def _dram(found: Found) -> list[str]:
    gpu, newer, here = found[_GPU], found[_NEWER], found[_HERE]
    long, beside = gpu["gpu-first-token-128k"], gpu["gpu-first-token-128k-against-computing"]
    vllm, vllm_short = (newer[f"vllm-first-token-{n}-against-computing"] for n in ("128k", "32k"))
    assert long.limit is not None
    shorter = " and ".join(
        f"{gpu[f'gpu-first-token-{n}-against-computing'].ratio:.3g} times sooner at {_LENGTHS[n]:,} tokens"
        for n in ("32k", "8k")
    )
    return [
        "### 1. From DRAM: the first token of a long prompt",
        "",
        f"**The first token of a prompt of {_LENGTHS['128k']:,} tokens that was seen before comes after "
        f"{_seconds(long.ours)} from DRAM and after {_seconds(_computing(beside))} computed: "
        f"{beside.ratio:.3g} times sooner.**",
        "",
        "![First token from DRAM against computing](plots/first-token-dram.svg)",
        "",
        f"- Limit: the bus for {_LENGTHS['128k'] * _TOKEN_BYTES / 1e9:.1f} GB of KV, and then one token, take "
        f"{_seconds(long.limit)}.",
        f"- Shorter prompts gain less: {shorter}.",
        "- `generate` of transformers with a model in the shape of Llama-3-8B, random weights, on an NVIDIA H200 "
        f"({_measured(long)}): `{long.command}`.",
        f"- A real vLLM on an H200 has the first token of {_LENGTHS['128k']:,} tokens after {_seconds(vllm.ours)} from "
        f"DRAM and after {_seconds(_computing(vllm))} computed, {vllm.ratio:.3g} times sooner; of {_LENGTHS['32k']:,} "
        f"tokens {vllm_short.ratio:.3g} times. Loading these takes "
        f"{newer['vllm-load-32k'].ours:.3g} times the sum of one large copy from pinned memory and a hit of vLLM's own "
        f"cache (target {newer['vllm-load-32k'].bar:g}; `{newer['vllm-load-32k'].command}`). "
        "On two CPU cores a real vLLM has the first token of 4,096 tokens in "
        f"{100 * here['vllm-first-token-dram'].ours:.2g} % of the time of computing them "
        f"(`{here['vllm-first-token-dram'].command}`).",
        "",
    ]


def _dram_chart(found: Found) -> str:
    gpu, groups = found[_GPU], []
    for name, tokens in _LENGTHS.items():
        loaded, beside = gpu[f"gpu-first-token-{name}"], gpu[f"gpu-first-token-{name}-against-computing"]
        assert loaded.limit is not None
        cold = _computing(beside)
        groups.append(
            Group(
                f"{tokens:,} tokens, {tokens * _TOKEN_BYTES / 1e9:.3g} GB of KV",
                [
                    Bar(cold, f"{_seconds(cold)} computed", "computed"),
                    Bar(loaded.ours, f"{_seconds(loaded.ours)} loaded, {beside.ratio:.3g} times sooner", "kvtide"),
                    Bar(loaded.limit, f"{_seconds(loaded.limit)} bus, then one token", "limit"),
                ],
            )
        )
    long = gpu["gpu-first-token-128k"]
    return bar_chart(
        "First token of a prompt that was seen before: from DRAM, or computed",
        "seconds to the first token (less is better)",
        {"computed": "computed", "kvtide": "loaded by kvtide", "limit": "the bus alone, then one token"},
        groups,
        notes=[
            f"NVIDIA H200, transformers, a model in the shape of Llama-3-8B. {_measured(long)}: {long.command}",
            "kvtide prepares the token while the bus works: with short prompts it takes less than the two in turn.",
        ],
    )


def _nvme(found: Found) -> list[str]:
    newer, gpu = found[_NEWER], found[_GPU]
    ours, compute, load = (newer[f"overlap-{name}"] for name in ("default", "compute", "load"))
    met, first, r4 = newer["overlap-crossing"], newer["overlap-first"], gpu["gpu-first-token-nvme-r4-128k"]
    r4_beside = gpu["gpu-first-token-nvme-r4-128k-against-computing"]
    smaller = found[_HERE]["codec-r4-bytes"].ratio
    assert r4.limit is not None
    idle = [r.name for r in gpu.values() if not r.exercised and r.name.endswith("-against-computing")]
    lines = [
        "### 2. From NVMe: load and compute at once",
        "",
        f"**From NVMe the same prompt has its first token after {_seconds(ours.ours)}, against "
        f"{_seconds(compute.ours)} computed and {_seconds(load.ours)} loaded alone: "
        "its tail is loaded while its front is computed.**",
        "",
        "![First token from NVMe against computing](plots/first-token-nvme.svg)",
        "",
        "- Limit: computing from the front and loading from the back, each measured alone, have all tokens together "
        f"after {_seconds(met.ours)}. A run can be quicker, because the disk's speed changes: loading alone took "
        f"{_seconds(load.spread[0])} to {_seconds(load.spread[1])}.",
        f"- The first request on a new store took {_seconds(first.ours)}.",
        f"- Only {ours.rounds} rounds, on an NVIDIA H200 ({ours.machine}): `{ours.command}`.",
        f"- In the lossy form `r4`, {smaller:.2g} times smaller, loading alone took {_seconds(r4.ours)}, against "
        f"{_seconds(_computing(r4_beside))} computed and {_seconds(r4.limit)} for raw reads of the same bytes "
        f"({_measured(r4)}): `{r4.command}`.",
    ]
    if idle:
        lines.append(
            f"- That older run loaded nothing in the forms `raw` and `zstd`: {len(idle)} comparisons count as "
            "[missed](#what-we-miss)."
        )
    return [*lines, ""]


def _nvme_chart(found: Found) -> str:
    newer, gpu = found[_NEWER], found[_GPU]
    ours, compute, load, first = (newer[f"overlap-{name}"] for name in ("default", "compute", "load", "first"))
    groups = [
        Group(
            f"{_LENGTHS['128k']:,} tokens, {_LENGTHS['128k'] * _TOKEN_BYTES / 1e9:.3g} GB of KV",
            [
                Bar(compute.ours, f"{_seconds(compute.ours)} computed", "computed"),
                Bar(load.ours, f"{_seconds(load.ours)} loaded alone", "second"),
                Bar(first.ours, f"{_seconds(first.ours)} at once, first request", "kvtide"),
                Bar(ours.ours, f"{_seconds(ours.ours)} at once, later requests", "kvtide"),
            ],
        )
    ]
    for name in ("128k", "32k"):
        r = gpu[f"gpu-first-token-nvme-r4-{name}"]
        beside = gpu[f"{r.name}-against-computing"]
        assert r.limit is not None
        cold = _computing(beside)
        smaller = found[_HERE]["codec-r4-bytes"].ratio
        groups.append(
            Group(
                f"{_LENGTHS[name]:,} tokens in form r4 (lossy, {smaller:.2g} times smaller)",
                [
                    Bar(cold, f"{_seconds(cold)} computed", "computed"),
                    Bar(r.ours, f"{_seconds(r.ours)} loaded alone", "second"),
                    Bar(r.limit, f"{_seconds(r.limit)} raw reads", "limit"),
                ],
            )
        )
    older = gpu["gpu-first-token-nvme-r4-128k"]
    notes = [
        "NVIDIA H200, transformers, a model in the shape of Llama-3-8B.",
        f"Exact: {_measured(ours)}: {ours.command}",
        f"r4: {_measured(older)}: {older.command}",
    ]
    if any(not r.exercised for r in gpu.values()):
        notes.append("The older run loaded nothing in the forms raw and zstd. It counts as missed and is not drawn.")
    return bar_chart(
        "First token of a prompt that was seen before: from NVMe, or computed",
        "seconds to the first token (less is better)",
        {
            "computed": "computed",
            "second": "loaded alone",
            "kvtide": "loaded and computed at once",
            "limit": "raw reads of the same bytes",
        },
        groups,
        notes=notes,
    )


def _limits(found: Found) -> list[str]:
    gpu, here, other = found[_GPU], found[_HERE], found[_16_CORES]
    out, into, both = (gpu[f"gpu-{way}-llama-3-8b"] for way in ("out", "in", "both"))
    small = gpu["gpu-out-small"], gpu["gpu-in-small"]
    assert out.limit is not None
    assert both.limit is not None

    def disk(records: Mapping[str, BenchRecord]) -> str:
        store, load = (records[f"nvme-{task}-32mib"] for task in ("store", "load"))
        return f"{_percent(_share(store))} and {_percent(_share(load))}"

    return [
        "### 3. Bytes at the speed of the hardware",
        "",
        f"**Blocks of 32 MiB go from the GPU to DRAM at {_percent(_share(out))} of the bus's speed and back at "
        f"{_percent(_share(into))}, and are stored to and loaded from NVMe at {disk(here)} of raw direct I/O on one "
        f"machine, at {disk(other)} on another.**",
        "",
        "![Speeds as shares of the hardware's limit](plots/hardware-limits.svg)",
        "",
        f"- Limits: large copies of pinned memory ({out.limit:.3g} GB/s one way, {both.limit:.4g} GB/s both ways at "
        "once), and direct I/O of whole blocks at the same depth, each in the same run. kvtide verifies every section "
        "that it loads from a disk.",
        "- Blocks of 256 KiB reach "
        f"{_percent(_share(small[0]))} of the limit to DRAM and {_percent(_share(small[1]))} back.",
        f"- `{out.command}` on an NVIDIA H200 ({_measured(out)}); "
        + " and ".join(f"`{r.command}` ({r.machine})" for r in (here["nvme-load-32mib"], other["nvme-load-32mib"]))
        + ".",
        "",
    ]


def _limits_chart(found: Found) -> str:
    gpu = found[_GPU]

    def bar(r: BenchRecord, label: str) -> Bar:
        kind = "second" if r.met is None else "kvtide" if r.met else "missed"
        assert r.limit is not None
        share = _share(r)
        return Bar(100 * share, f"{100 * share:.0f} %: {_digits(r.ours, 3)} of {_digits(r.limit, 3)} GB/s", kind, label)

    ways = {"out": "to DRAM", "in": "to the GPU", "both": "both ways"}
    groups = [
        Group(
            f"GPU and DRAM, {shape}: NVIDIA H200",
            [bar(gpu[f"gpu-{way}-{name}"], label) for way, label in ways.items()],
        )
        for name, shape in _PAGES.items()
    ]
    connector = [bar(gpu[f"gpu-connector-{way}"], ways[way]) for way in ("out", "in")]
    groups.append(Group("GPU and DRAM, vLLM's connector: NVIDIA H200", connector))
    for tier, what in (("nvme", "NVMe"), ("files", "Shared files")):
        for machine, cores in ((_HERE, "2 cores, aarch64"), (_16_CORES, "16 cores, x86_64")):
            rows = [
                bar(found[machine][f"{tier}-{task}-{size}"], f"{task} {label}")
                for size, label in _SIZES.items()
                for task in ("store", "load")
            ]
            groups.append(Group(f"{what}: {cores}", rows))
    here, other = found[_HERE], found[_16_CORES]
    measured = [
        ("H200", gpu["gpu-out-llama-3-8b"]),
        ("Its connector", gpu["gpu-connector-out"]),
        ("NVMe", here["nvme-load-32mib"]),
        ("NVMe", other["nvme-load-32mib"]),
        ("Files", here["files-load-32mib"]),
        ("Files", other["files-load-32mib"]),
    ]
    return bar_chart(
        "Speed as a share of the hardware's limit",
        "percent of the limit (more is better)",
        {"kvtide": "target met", "missed": "target missed", "second": "no target"},
        groups,
        notes=[
            "Limits: large copies of pinned memory, or DMA alone of the same rows (GPU); raw direct I/O of whole "
            "blocks at the same depth (NVMe, files). A share of a disk's limit is the median over the rounds.",
            *(f"{where}: {r.machine}: {r.command}" for where, r in measured),
        ],
        line=(100.0, "the hardware's limit"),
    )


def _cost(found: Found) -> list[str]:
    newer, here = found[_NEWER], found[_HERE]
    batch, decode = newer["vllm-cold-batch"], newer["vllm-cold-decode"]
    fresh, wall = newer["vllm-cold-decode-new-node"], here["vllm-overhead-wall"]
    rows = [
        (batch, "16 new prompts of 4,000 tokens, 64 tokens out"),
        (newer["vllm-cold-batch-bare"], "the same with a connector that does nothing"),
        (decode, "32 new prompts of 200 tokens, 200 tokens out"),
        (newer["vllm-cold-decode-bare"], "the same with a connector that does nothing"),
        (newer["vllm-cold-decode-no-block"], "32 prompts of 16 tokens, which fill no block, 200 tokens out"),
        (fresh, "32 new prompts of 200 tokens while a new node takes its memory from the system"),
    ]
    return [
        "### 4. What it costs when nothing is reused",
        "",
        f"**Where no prompt was seen before, vLLM with kvtide takes {_more(batch.ours)} longer for a batch of new "
        f"prompts and {_more(decode.ours)} longer to decode (the 95 % intervals end at {_more(batch.spread[1])} and "
        f"{_more(decode.spread[1])}; the target is at most {_more(batch.bar or 1)}).**",
        "",
        "| a real vLLM on an NVIDIA H200 | time, without kvtide = 1 | 95 % interval | rounds |",
        "|---|---|---|---|",
        *(f"| {what} | {r.ours:.4f} | {r.spread[0]:.4f} to {r.spread[1]:.4f} | {r.rounds} |" for r, what in rows),
        "",
        f"- Limit: 1, an engine without a connector. Machines: {batch.machine}.",
        f"- While a new node takes its memory, decoding takes {_more(fresh.ours)} longer ({fresh.rounds} rounds of an "
        "older version).",
        f"- `{batch.command}`.",
        f"- On two CPU cores the same is {wall.ours:.4g} of an engine without (upper end of the interval): "
        f"`{wall.command}`.",
        "",
    ]


def _more(ratio: float) -> str:
    return f"{100 * (ratio - 1):.2g} %"
