"""``docs/benchmarks.md`` and its charts, from the records in ``bench/results``.

The page begins with what a reader wants to know: four claims, and then everything that was missed. All figures follow
as tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path

import msgspec

from bench.claims import Found, charts, claims
from kvtide.benchmarks.record import BenchRecord

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
PLOTS = ROOT / "docs" / "plots"
FORMS = ROOT / "docs" / "compression.md"
MACHINES = {
    "": "2 cores, aarch64",
    "16-cores-x86": "16 cores, x86_64",
    "2-cores-x86": "2 cores, x86_64",
    "h200": "NVIDIA H200",
    "h200-first-token": "NVIDIA H200, vLLM and overlap",
}
"""The headings of the tables: of ``bench/results`` itself, and of the files in ``bench/results/elsewhere``."""

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
    "sealed": "The same, encrypted with a key for the tenant and verified by its tags, beside unencrypted blocks. "
    "Where the cipher is not the limit (16 cores, below) blocks of 32 MiB load nearly as fast as unencrypted ones; "
    "those of 2 MiB have sections of 32 KiB, and each is a call that hands the interpreter from thread to thread.",
    "files": "Blocks through DRAM to a filesystem that others use too, a file for each, and back, every section "
    "verified. The limit is the same by direct I/O at the same depth into files without headers; the peers do not "
    "verify. At 2 MiB the calls for a file (stat, open, close, rename) count, and the interpreter between them. Loads "
    "are at its limit on 2 cores: raw reads take 0.4 ms a block here, and its 64 checksums (their CPU s/GB are told "
    "with NVMe) hold the interpreter for almost half of that. With 16 cores and a slower disk (below) they keep pace.",
    "objects": "Blocks through DRAM to an object store (SeaweedFS on this machine) and back, every section verified, "
    "beside obstore alone with as many requests at a time. The server takes most of the processor's time.",
    "valkey": "Blocks through DRAM to Valkey on this machine and back, every section verified, beside a plain client "
    "that sends its commands in batches. Its copies hold the GIL; ours are made by the kernel, into place. At 256 KiB "
    "the plain client has two speeds from run to run, 1.0 and 1.7 GB/s: ours stores at 0.64 of the faster and loads at "
    "0.79 of it.",
    "mooncake": "Blocks from DRAM to a Mooncake pool over TCP and back by its tier, every section verified, and by the "
    "whole store, beside Mooncake's own client, which verifies nothing, in the same rounds, in a network namespace "
    "that has only loopback.",
    "index": "What a key costs as the number of resident blocks grows. Stored blocks each evict one.",
    "open": "Opening an NVMe tier of a million small blocks, by its journal, and by the headers when that is lost.",
    "node": "The store in a process of its own, through its socket; its memory is mapped by both. A step is a message "
    "with all that an engine asks and gives back at a time.",
    "peers": "Blocks read from another node's memory over loopback, every block verified, and blocks looked up at "
    "three nodes. The bare stream moves the same bytes between as many processes, in one call for each 8 MiB. Mooncake "
    "is measured over TCP in a network namespace that has only loopback, in the same rounds as ours.",
    "directory": "The directory of a cluster in a Valkey on this machine: 512 blocks looked up, its memory, and "
    "how fast one node can publish. Node and server share the cores. With more nodes, a lookup is as many messages.",
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
BESIDE = (
    ("codec-*", "a copy", False),
    ("dram-*", "memcpy on one core", False),
    ("node-step-*", "an asyncio server that echoes", False),
    ("node-*-4-clients", "memcpy by 4 processes", False),
    ("node-*", "memcpy on one core", False),
    ("peers-*-cpu", "what the target allows", False),
    ("peers-match-*", "without other nodes", False),
    ("peers-*", "a bare stream", False),
    ("nvme-*-cpu-*", "raw direct I/O", False),
    ("nvme-*", "raw direct I/O", True),
    ("files-*", "raw direct I/O", True),
    ("objects-*", "obstore alone", False),
    ("valkey-*", "a plain client", False),
    ("mooncake-*", "Mooncake's own client", False),
    ("sealed-*-cpu-*", "raw direct I/O", False),
    ("sealed-*", "raw direct I/O", True),
    ("overlap-*", "the curves meet", False),
    ("gpu-own-copy", "nothing else is copied", False),
    ("gpu-first-token-nvme-*", "raw reads", True),
    ("gpu-first-token-*", "the bus, then one token", False),
    ("vllm-first-token-*-against-computing", "the bus, and a hit of vLLM's cache", False),
    ("gpu-*-tp8", "DMA alone", True),
    ("gpu-*-small", "DMA alone", True),
    ("gpu-*", "large pinned copies", True),
)
"""What a record's ``limit`` is, by the figure's name (the first pattern that fits), and whether no program on that
machine can be better: a copy on one core is a comparison, not a limit of the hardware."""

_ALL_CORES = (
    "The bare stream verifies nothing, and four clients keep most of the cores busy, so a checksum costs speed. Beside "
    "a stream that computes the same checksums on both ends TCP reaches 1.2 to 1.3, and TLS 0.97."
)
_UNVERIFIED = (
    "Mooncake's own client verifies nothing, and moving the bytes alone keeps both cores busy. In the last way beside "
    "ours it computes one checksum of each object: ours reads at 0.98 (2 MiB) and 0.93 (32 MiB) of that speed, and "
    "writes at 0.76 and 0.94. Beside its calls for whole objects, 8 in a call, ours reaches 1.00 to 1.35."
)
_VERIFIED = (
    "The bare stream verifies nothing. Beside one that computes the same checksums on both ends, which the notes of "
    "the table name, TCP reaches 0.99 to 1.06 and TLS 0.87 to 1.02."
)
_ONE_HOST = "All four nodes share two cores; with 16 cores the target is met."
REASONS = {
    ("", "files-load-2mib"): "Each block has 64 checksums, which hold the interpreter for almost half of the time of a "
    "raw read; with 16 cores the target is met.",
    ("", "node-step-p99-8-clients"): "Eight clients and the node share two cores. With 16 cores it was met on "
    "one machine (below), and missed on another (0.37 and 0.40).",
    ("", "pipeline-load-batch"): "Why is not known. It is paid once for a load; each further block costs little "
    "(`pipeline-load-key`).",
    ("16-cores-x86", "pipeline-load-batch"): "As on 2 cores.",
    ("h200", "gpu-out-small"): "Measured when the first copy had 32 blocks; newer code reached more on another "
    "machine, with `--quick`: see the note in its table.",
    ("h200", "gpu-in-small"): "As `gpu-out-small`; there newer code missed the target too.",
    ("2-cores-x86", "mooncake-get-2mib"): _UNVERIFIED,
    ("2-cores-x86", "mooncake-get-32mib"): _UNVERIFIED,
    ("2-cores-x86", "mooncake-put-2mib"): _UNVERIFIED,
    ("2-cores-x86", "mooncake-put-32mib"): _UNVERIFIED,
    ("2-cores-x86", "peers-locate-512"): _ONE_HOST,
    ("2-cores-x86", "peers-locate-512-everywhere"): _ONE_HOST,
    ("2-cores-x86", "peers-read-2mib-1-client"): _VERIFIED,
    ("2-cores-x86", "peers-read-2mib-4-clients"): _VERIFIED,
    ("2-cores-x86", "peers-read-32mib-1-client"): _VERIFIED,
    ("2-cores-x86", "peers-read-32mib-4-clients"): _VERIFIED,
    ("2-cores-x86", "peers-tls-read-2mib-4-clients"): _VERIFIED,
    ("16-cores-x86", "peers-read-2mib-4-clients"): _ALL_CORES,
    ("16-cores-x86", "peers-read-32mib-4-clients"): _ALL_CORES,
    ("16-cores-x86", "peers-tls-read-2mib-4-clients"): _ALL_CORES,
}
"""Why targets are missed, where it is known and the record does not say it: by the machine and the figure's name."""


_WORDS = {"the same blocks in the open": "the same blocks unencrypted"}
"""What older records call the thing they compare with, and what is clearer."""


def read_records() -> list[BenchRecord]:
    return [msgspec.json.decode(p.read_bytes(), type=BenchRecord) for p in sorted(RESULTS.glob("*.json"))]


def read_all() -> Found:
    """The records of all machines."""
    files = sorted((RESULTS / "elsewhere").glob("*.json"))
    others = {f.stem: msgspec.json.decode(f.read_bytes(), type=list[BenchRecord]) for f in files}
    return {machine: {r.name: r for r in records} for machine, records in {"": read_records(), **others}.items()}


def target(r: BenchRecord) -> str:
    """The cell that says whether a target was met."""
    if not r.exercised:
        return f"**missed: {r.reason.partition(':')[0]}**"
    if r.bar is None:
        return "**missed**" if r.met is False else ""
    sign = ">=" if r.ratio is not None or r.better == "higher" else "<="
    return f"{sign} {r.bar:.3g}: {'met' if r.met else '**missed**'}"


def _ratio(r: BenchRecord) -> str:
    if r.ratio is None:
        return ""
    reference = _WORDS.get(r.against, r.against)
    return f"{r.ratio:.2f} x {f'({reference})' if reference[:1].isdigit() else reference}"


def beside(r: BenchRecord) -> tuple[str, bool]:
    """What the record's ``limit`` is, and whether it is one of the hardware."""
    return next((name, hard) for pattern, name, hard in BESIDE if fnmatch(r.name, pattern))


def _row(r: BenchRecord, notes: list[str]) -> str:
    others = [f"{name} {value:g}" for name, value in r.peers.items()]
    if r.limit is not None:
        name, hard = beside(r)
        others.insert(0, f"{name} {r.limit:g}{' (limit)' if hard else ''}")
    if r.note and r.note not in notes:
        notes.append(r.note)
    number = f" <sup>{notes.index(r.note) + 1}</sup>" if r.note else ""
    spread = f"{r.spread[0]:g} to {r.spread[1]:g} ({r.rounds})"
    cells = [f"{r.name}{number}", f"{r.ours:g} {r.unit}", spread, "<br>".join(others), _ratio(r), target(r)]
    return f"| {' | '.join(cells)} |"


def _table(records: Iterable[BenchRecord]) -> list[str]:
    """A table, and its notes below it."""
    notes: list[str] = []
    rows = [_row(r, notes) for r in records]
    head = ["| figure | kvtide | range (rounds) | beside it | ratio | target |", "|---|---|---|---|---|---|"]
    told = [f"{i}. {note}" for i, note in enumerate(notes, 1)]
    return [*head, *rows, "", *(["Notes:", "", *told, ""] if told else [])]


def page(found: Found) -> str:
    """The text of ``docs/benchmarks.md``."""
    records = [r for mine in found.values() for r in mine.values()]
    missed = sum(r.met is False for r in records)
    idle = sum(not r.exercised for r in records)
    aimed = sum(r.met is not None for r in records)
    lines = [
        "# Benchmarks",
        "",
        "<!-- Generated from the records in bench/results: regenerate it with `python -m bench --report` -->",
        "",
        "How fast kvtide is, and where it is slower than it should be. First come four claims with their commands,",
        f"then [what misses its target](#what-we-miss), then all {len(records)} figures. {aimed} of them have a",
        f"target, and {missed} miss it, {idle} of these because their run did not do what it was to measure.",
        "",
        "A figure and what it is compared with, a plain program that shows what the hardware does or another system,",
        "are measured in the same run. [How to read the tables](#how-to-read-the-tables) explains the columns. To",
        "measure your own machine: `kvtide bench store --quick`, and with a GPU `kvtide bench gpu --quick`.",
        "",
        "## Four claims",
        "",
        *claims(found),
        *_misses(found),
        *_reading(),
        "## All figures",
        "",
    ]
    for machine, mine in found.items():
        lines += [f"### {MACHINES.get(machine, machine)}", ""]
        lines += _here(mine.values()) if machine == "" else _elsewhere(mine.values())
    return "\n".join(lines).rstrip("\n") + "\n"


def missed(found: Found) -> list[tuple[str, BenchRecord]]:
    """All figures that miss their target, with their machine."""
    return [(machine, r) for machine, mine in found.items() for r in mine.values() if r.met is False]


def _misses(found: Found) -> list[str]:
    real = [(machine, r) for machine, r in missed(found) if r.exercised]
    lines = ["## What we miss", "", f"{len(real)} figures were measured and miss their target:", ""]
    by_why: dict[tuple[str, str], list[str]] = {}
    for machine, r in real:
        value = f"{r.ours:g} {r.unit}" + (f", {_ratio(r)}" if r.ratio is not None else "")
        why = r.reason or REASONS.get((machine, r.name), "Why is not known.")
        by_why.setdefault((machine, why), []).append(f"`{r.name}`: {value}; target {target(r)}.")
    for (machine, why), rows in by_why.items():
        where = MACHINES.get(machine, machine)
        if len(rows) == 1:
            lines.append(f"- {where}, {rows[0]} {why}")
        else:
            lines += [f"- {where}, {len(rows)} figures. {why}", *(f"    - {row}" for row in rows)]
    by_reason: dict[str, list[str]] = {}
    for machine, r in missed(found):
        if not r.exercised:
            by_reason.setdefault(r.reason, []).append(f"- `{r.name}`, {MACHINES.get(machine, machine)}: {target(r)}")
    for reason, rows in by_reason.items():
        lines += [
            "",
            f"{len(rows)} figures miss it because the run did not do what it was to measure ({reason}):",
            "",
            *rows,
        ]
    if by_reason:
        lines += [
            "",
            "At 131,072 tokens the question of those in which nothing was loaded was measured again, with loads: "
            "[claim 2](#2-from-nvme-load-and-compute-at-once). At 32,768 tokens it was not.",
        ]
    lines += [
        "",
        "These have no target, and are more than 5 % worse than what they are compared with:",
        "",
        "| figure | measured on | kvtide | compared with |",
        "|---|---|---|---|",
    ]
    for machine, mine in found.items():
        for r in mine.values():
            if r.met is None and (worse := _worse(r)):
                lines.append(f"| {r.name} | {MACHINES.get(machine, machine)} | {r.ours:g} {r.unit} | {worse} |")
    return [*lines, ""]


def _worse(r: BenchRecord) -> str:
    """What a figure is clearly worse than; empty: it is not."""
    if r.ratio is not None:
        return _ratio(r) if r.ratio < 0.95 else ""
    if r.unit == "x" and r.better == "lower":
        return "1" if r.ours > 1.05 else ""
    if r.limit and beside(r)[1]:
        share = r.ours / r.limit if r.better == "higher" else r.limit / r.ours
        return f"{share:.2f} x {beside(r)[0]}" if share < 0.95 else ""
    return ""


def _reading() -> list[str]:
    return [
        "## How to read the tables",
        "",
        "A *contestant* is a system that does the task of a figure: kvtide, a peer, or a plain program that shows what",
        "the hardware does. All contestants of a figure are measured in one run: in every round each of them does the",
        "task once, one after the other, so that a change in the machine's load affects all of them. A *target* is a",
        "value that kvtide should reach; the records call it `bar`. A figure whose run did not do what it measures,",
        "for example loaded nothing, misses its target whatever its value.",
        "",
        "| column | meaning |",
        "|---|---|",
        "| figure | the name of the measurement; a small number points to the notes below the table |",
        "| kvtide | kvtide's value, the median of all rounds. Speeds are better if higher, times and costs if lower |",
        "| range (rounds) | kvtide's lowest and highest value in a round, and the number of rounds |",
        "| beside it | the plain program and the peers in the same run. (limit): the hardware can do no more |",
        "| ratio | kvtide compared with the named reference: the median of the rounds' ratios. More than 1 means that "
        "kvtide is better, whether the unit is a speed or a cost |",
        "| target | the target, and whether it was met. It applies to the ratio, or to kvtide's value if there is "
        "no ratio |",
        "",
        "The peers are LMCache 0.5.6 in process (`mp` is its StorageManager, `legacy` its older backends), LMCache's",
        "server, and vLLM 0.32.0's `fs` tier, each in an environment of its own. `make bench` measures what needs",
        "neither a GPU nor a vLLM, with the peers. A record keeps the command with which it was measured; `scale`,",
        "`opening`, `pipeline`, `scheduler` and `peers` are measured by `python -m bench NAME`, and the connector on a",
        "GPU by `python -m bench.connector`.",
        "",
    ]


def _here(records: Iterable[BenchRecord]) -> list[str]:
    """This machine's tables, one for each part, with peers."""
    records = list(records)
    lines = [f"{machine}." for machine in dict.fromkeys(r.machine for r in records)]
    lines = [*(f"- {line}" for line in lines), ""]
    for part, text in PARTS.items():
        if mine := [r for r in records if r.name.split("-")[0] == part]:
            lines += [f"#### {part}", "", text, "", *_table(mine)]
    return lines


def _elsewhere(records: Iterable[BenchRecord]) -> list[str]:
    """Tables of another machine, one for each run, without peers: ``kvtide bench ... --json FILE``."""
    runs: dict[tuple[str, str], list[BenchRecord]] = {}
    for r in records:
        runs.setdefault((r.command, r.machine), []).append(r)
    lines: list[str] = []
    for (command, machine), mine in runs.items():
        lines += [f"#### `{command}`", "", f"{machine}. No peers.", "", *_table(mine)]
    return lines


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
    """Write the page and its charts, and the table of forms."""
    found = read_all()
    PAGE.write_text(page(found))
    FORMS.write_text(forms(list(found[""].values())))
    PLOTS.mkdir(parents=True, exist_ok=True)
    for name, text in charts(found).items():
        (PLOTS / f"{name}.svg").write_text(text)
