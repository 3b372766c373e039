"""``docs/benchmarks.md`` and its plots, from the records in ``bench/results``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import msgspec

from kvtide.benchmarks.record import BenchRecord

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
PLOTS = ROOT / "docs" / "plots"
FORMS = ROOT / "docs" / "compression.md"

PARTS = {
    "match": "A prompt of 131,072 tokens whose 512 blocks are all in DRAM: name, find and lease them.",
    "dram": "Blocks copied from callers' buffers into the arena and back, and handed out as views.",
    "nvme": "Blocks through DRAM to the disk, and back after a restart, every section verified. The limit is raw "
    "direct I/O of whole blocks at the same depth into a file whose extents were written before. The peers do not "
    "verify. "
    "A virtual machine's first direct read into memory that its host has not written for some seconds runs "
    "slower, so each contestant accesses all its memory once right before the measurement that counts. The arena "
    "of an embedded store is in huge pages where the system gives them; a node's is shared memory, which the "
    'kernel is asked to collapse into huge pages: the figures named "shared" say how much remains. At 2 MiB our '
    "own Python "
    "counts: 64 calls for checksums, a header and two journal records a block.",
    "sealed": "The same, encrypted with a key for the tenant and verified by its tags, beside blocks in the open. "
    "Where the cipher is not the limit (16 cores, below) blocks of 32 MiB load nearly as fast as in the open; those "
    "of 2 MiB have sections of 32 KiB, and each is a call that hands the interpreter from thread to thread.",
    "files": "Blocks through DRAM to a filesystem that others use too, a file for each, and back, every section "
    "verified. The limit is the same by direct I/O at the same depth into files without headers; the peers do not "
    "verify. At 2 MiB the calls for a file (stat, open, close, rename) count, and the interpreter between them. Loads "
    "are at its limit on 2 cores: raw reads take 0.4 ms a block here, and its 64 checksums (their CPU s/GB are told "
    "with NVMe) hold the interpreter for almost half of that. With 16 cores and a slower disk (below) they keep pace.",
    "objects": "Blocks through DRAM to an object store (SeaweedFS on this machine) and back, every section verified, "
    "beside obstore alone with as many requests at a time. The server takes most of the processor's time.",
    "valkey": "Blocks through DRAM to Valkey on this machine and back, every section verified, beside a plain client "
    "with its commands in rows. Its copies hold the GIL; ours are the kernel's, into place. At 256 KiB the plain "
    "client has two speeds from run to run, 1.0 and 1.7 GB/s: against the faster, ours stores at 0.64 of it and loads "
    "at 0.79.",
    "index": "What a key costs as the number of resident blocks grows. Stored blocks each evict one.",
    "open": "Opening an NVMe tier of a million small blocks, by its journal, and by the headers when that is lost.",
    "node": "The store in a process of its own, through its socket; its memory is mapped by both. A step is a message "
    "with all that an engine asks and gives back at a time.",
    "probe": "Can a tenant tell by the time of a match, or to the first token, that another has cached a prompt? "
    "One tenant asks for three kinds of prompts: those that another tenant has cached, those that nobody has cached, "
    "and those that it has cached itself. There are as many of each kind; each prompt is asked for once, in random "
    "order. The times of the first and of the third kind are compared with those of the second. `p` is the probability "
    "that chance alone makes times differ as much: twice the smaller result of the Mann-Whitney and the "
    "Kolmogorov-Smirnov test (the column of lowest and highest has the results of the two tests). A `p` above 0.01 "
    "means that no difference was found. The tenant's own prompts have a far smaller `p`, which shows that the "
    "tests do find a "
    "difference where there is one. With `files`, prompts have to be looked for in a folder that other hosts write to "
    "as well. `vllm` is the time to the first token of a real engine, whose tenants differ in their cache salts: "
    "`.venv-vllm/bin/python -m bench.vllm probe`.",
    "codec": "The KV of a real model (SmolLM2-135M-Instruct, 4,096 tokens of each of three texts) in every lossy form "
    "and through the lossless codec. Divergence is that of what the model expects next, over KV that went through the "
    "form, from what it expects over KV as computed, at each of the 512 tokens that follow; agreement is how often its "
    "first choice is the same. See [compression](compression.md).",
    "scheduler": "The half of an engine's connector that decides, in the thread of the engine's scheduler.",
    "vllm": "A real vLLM 0.32.0 on this machine's processor, SmolLM2-135M-Instruct in float32, threads bound to one "
    "core, beside the same engine without kvtide. `.venv-vllm/bin/python -m bench.vllm`.",
    "pipeline": "Index, pipeline and lane alone, over a tier that answers at once.",
}


def read_records() -> list[BenchRecord]:
    return [msgspec.json.decode(p.read_bytes(), type=BenchRecord) for p in sorted(RESULTS.glob("*.json"))]


def _row(r: BenchRecord) -> str:
    bar = ""
    if r.bar is not None:
        sign = ">=" if r.ratio is not None or r.better == "higher" else "<="
        bar = f"{sign} {r.bar:g}: **{'met' if r.met else 'missed'}**"
    elif r.met is False:
        bar = "**missed**"
    peers = "<br>".join(f"{name} {value:g}" for name, value in r.peers.items())
    limit = "" if r.limit is None else f"{r.limit:g}"
    ratio = "" if r.ratio is None else f"{r.ratio:.2f} x {r.against}"
    spread = f"{r.spread[0]:g} to {r.spread[1]:g} ({r.rounds})"
    return f"| {r.name} | {r.unit} | {r.ours:g} | {spread} | {limit} | {peers} | {ratio} | {bar} | {r.note} |"


def _plotted(record: BenchRecord) -> bool:
    return bool(record.peers) or record.limit is not None


def _plot(part: str, shown: Sequence[BenchRecord]) -> None:
    """Bars of ours, limit and peers."""
    if not shown:
        return
    by_unit: dict[str, list[BenchRecord]] = {}
    for r in shown:
        by_unit.setdefault(r.unit, []).append(r)
    heights = [sum(2 + len(r.peers) for r in rs) for rs in by_unit.values()]
    size = (9, 1 + 0.22 * sum(heights))
    figure, axes = plt.subplots(len(by_unit), 1, figsize=size, squeeze=False, height_ratios=heights)
    for axis, (unit, rs) in zip(axes[:, 0], by_unit.items(), strict=True):
        labels, values, colours = [], [], []
        for r in rs:
            bars = [("kvtide", r.ours, "#0b6e99")]
            bars += [("limit", r.limit, "#999999")] if r.limit is not None else []
            bars += [(name, value, "#d9a05b") for name, value in r.peers.items()]
            for name, value, colour in bars:
                labels.append(f"{r.name}: {name}" if name == "kvtide" else name)
                values.append(value)
                colours.append(colour)
        places = range(len(labels))
        axis.barh(list(places), values, color=colours)
        axis.set_yticks(list(places), labels, fontsize=7)
        axis.invert_yaxis()
        axis.set_xlabel(f"{unit} ({rs[0].better} is better)", fontsize=8)
    figure.tight_layout()
    PLOTS.mkdir(parents=True, exist_ok=True)
    matplotlib.rcParams["svg.hashsalt"] = "kvtide"
    figure.savefig(PLOTS / f"{part}.svg", metadata={"Date": None})
    plt.close(figure)


def page(records: Sequence[BenchRecord]) -> str:
    """The text of ``docs/benchmarks.md``."""
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench` from the records in `bench/results`; do not edit. A *contestant* is a system that",
        "does the task of a figure: kvtide, a peer, or a plain program that shows the limit of the hardware. All",
        "contestants of a figure are measured in one run: in every round each of them does the task once, one after",
        "the other, so that a change in the machine's load affects all of them. A *target* is a value that",
        "kvtide should reach; the records call it `bar`. The columns:",
        "",
        "| column | meaning |",
        "|---|---|",
        "| figure, unit | the name of the measurement, and the unit of all values in its row except the ratio |",
        "| ours | kvtide's value, the median of all rounds |",
        "| lowest to highest (rounds) | kvtide's lowest and highest value in a round, and the number of rounds |",
        "| limit | the value of the plain program, such as a memcpy or raw direct I/O, in the same run |",
        "| peers | the values of other systems in the same run |",
        "| ratio | kvtide compared with the named reference, usually the limit or a peer: the median of the rounds' "
        "ratios. More than 1 means that kvtide is better, whether the unit is a speed or a cost |",
        "| target | the target, and whether it was met. It applies to the ratio, or to kvtide's value if there is "
        "no ratio |",
        "| note | what was measured, where the name does not say it |",
        "",
        "The peers are LMCache 0.5.6 in process (`mp` is its StorageManager, `legacy` its older backends), LMCache's",
        "server, and vLLM 0.32.0's `fs` tier, each in an environment of its own. To measure your machine, without",
        "peers: `kvtide bench store --quick`. A record keeps the command with which it was measured; `scale`,",
        "`opening`, `pipeline` and `scheduler` are measured by `python -m bench NAME`, and the connector on a GPU by",
        "`python -m bench.connector`.",
        "",
    ]
    if records:
        lines += [f"Machine: {records[0].machine}.", ""]
    missed = [r.name for r in records if r.met is False]
    lines += [f"Targets missed: {', '.join(missed) if missed else 'none'}.", ""]
    for part, text in PARTS.items():
        mine = [r for r in records if r.name.split("-")[0] == part]
        if not mine:
            continue
        lines += [f"## {part}", "", text, ""]
        if any(_plotted(r) for r in mine):
            lines += [f"![{part}](plots/{part}.svg)", ""]
        lines += [
            "| figure | unit | ours | lowest to highest (rounds) | limit | peers | ratio | target | note |",
            "|---|---|---|---|---|---|---|---|---|",
            *(_row(r) for r in mine),
            "",
        ]
    return "\n".join(lines + _elsewhere())


def _elsewhere() -> list[str]:
    """Figures of other machines, without peers: whole runs of ``kvtide bench ... --json FILE``."""
    lines: list[str] = []
    for name, records in _others():
        runs = dict.fromkeys((r.machine, r.command) for r in records)
        lines += [
            f"## elsewhere: {name}",
            "",
            "; ".join(f"{machine}: `{command}`" for machine, command in runs) + ". No peers.",
            "",
            f"![{name}](plots/{name}.svg)",
            "",
            "| figure | unit | ours | lowest to highest (rounds) | limit | peers | ratio | target | note |",
            "|---|---|---|---|---|---|---|---|---|",
            *(_row(r) for r in records),
            "",
        ]
    return lines


def _others() -> list[tuple[str, list[BenchRecord]]]:
    files = sorted((RESULTS / "elsewhere").glob("*.json"))
    return [(f.stem, msgspec.json.decode(f.read_bytes(), type=list[BenchRecord])) for f in files]


def forms(records: Sequence[BenchRecord]) -> str:
    """The text of ``docs/compression.md`` with its table as the records have it."""
    found = {r.name.removeprefix("codec-"): r for r in records if r.name.startswith("codec-")}
    lines = [
        "| form | bytes a token | smaller | encode, GB/s | decode, GB/s | divergence, nats | worst | agreement, % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in ("bf16", "fp8", "k8v4", "r4", "zstd-bfloat16", "zstd-float32"):
        cells = [f"{found[key].ours:g}" if (key := f"{name}-{task}") in found else "" for task in ("encode", "decode")]
        size, lost, same = (found.get(f"{name}-{task}") for task in ("bytes", "divergence", "agreement"))
        cells = [f"{size.ours:g}" if size else "", f"{size.ratio:.2f} x" if size and size.ratio else "", *cells]
        cells += [f"{lost.ours:.2g}", f"{lost.spread[1]:.2g}"] if lost else ["none", "none"]
        cells.append(f"{same.ours:.4g}" if same else "100")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    before, mark, rest = FORMS.read_text().partition("<!-- forms -->\n")
    return before + mark + "\n".join(lines) + "\n" + rest[rest.index("<!-- /forms -->") :]


def write_report() -> None:
    """Write the page and its plots, and the table of forms."""
    records = read_records()
    PAGE.write_text(page(records))
    FORMS.write_text(forms(records))
    for part in PARTS:
        _plot(part, [r for r in records if r.name.split("-")[0] == part and _plotted(r)])
    for name, others in _others():
        _plot(name, [r for r in others if _plotted(r)])
