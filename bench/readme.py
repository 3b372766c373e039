"""The first-token chart and the tables of figures in ``README.md`` and ``docs/comparison.md``, from the records.

``python -m bench.readme`` writes them, and ``tests/test_readme.py`` fails where they differ from the records. Pictures
are in ``docs/images``, each in a light and a dark version: the dark one is the light one in other colours, so only
``architecture-light.svg`` is edited by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import msgspec

from kvtide.benchmarks.record import BenchRecord

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
IMAGES = ROOT / "docs" / "images"

DARK = {
    "#1f2328": "#f0f6fc",  # text
    "#59636e": "#9198a1",  # less important text
    "#afb8c1": "#656c76",  # lines
    "#f6f8fa": "#21262d",  # boxes
    "#ddf0f8": "#12384a",  # boxes that hold blocks
    "#8c959f": "#6e7681",  # bars to compare with
    "#0b6e99": "#4cb5e0",  # ours
}
"""Each colour of a light picture, and that of the dark one."""


class Figures:
    """The records, by name; those of other machines too."""

    def __init__(self, results: Path = RESULTS) -> None:
        found = [msgspec.json.decode(file.read_bytes(), type=BenchRecord) for file in sorted(results.glob("*.json"))]
        for name in ("h200", "h200-first-token"):
            file = results / "elsewhere" / f"{name}.json"
            found += msgspec.json.decode(file.read_bytes(), type=list[BenchRecord])
        self._records = {record.name: record for record in found}

    def __getitem__(self, name: str) -> BenchRecord:
        return self._records[name]

    def __iter__(self) -> Iterator[BenchRecord]:
        return iter(self._records.values())

    def __contains__(self, name: str) -> bool:
        return name in self._records

    def ratio(self, name: str) -> float:
        ratio = self[name].ratio
        assert ratio is not None, f"the record {name} has no ratio"
        return ratio

    def told(self, name: str, pattern: str) -> float:
        """A number that stands in a record's note."""
        found = re.search(pattern, self[name].note)
        assert found, f"the note of the record {name} does not match {pattern}"
        return float(found[1])


def seconds(value: float) -> str:
    return f"{value:.3g} s"


# -- first token ------------------------------------------------------------------------------------------------


def computed(figures: Figures, length: str, engine: str = "gpu") -> float:
    """Seconds in which the H200 computed the prompt that it then loaded from DRAM."""
    name = f"{engine}-first-token-{length}-against-computing"
    return figures[name].ours * figures.ratio(name)


def headline(figures: Figures) -> str:
    """The sentence at the top of the README."""
    loaded = figures["gpu-first-token-128k"].ours
    times = int(figures.ratio("gpu-first-token-128k-against-computing"))
    vllm = figures["vllm-first-token-128k-against-computing"]
    return (
        f"**The first token of a known prompt of 131,072 tokens comes after {loaded:.2g} s from DRAM, instead of "
        f"{seconds(computed(figures, '128k'))} computed: {times} times sooner** (transformers, H200, shape of "
        f"Llama-3-8B; in vLLM {vllm.ours:.2g} instead of {seconds(computed(figures, '128k', 'vllm'))}).\n"
    )


def first_token(figures: Figures) -> str:
    """The table of times to first token."""
    cold = figures.told("vllm-first-token-dram", r"cold ([\d.]+) s")
    found = {name: figures[f"vllm-first-token-{name}"].ours * cold for name in ("dram", "nvme")}
    raw = figures["gpu-first-token-nvme-raw-32k"]
    assert not raw.exercised, "the table says that this prompt was computed"
    rows = [
        (
            "131,072 tokens, transformers, H200",
            f"{seconds(computed(figures, '128k'))} ({seconds(figures['overlap-compute'].ours)} in the run for NVMe)",
            f"{seconds(figures['overlap-default'].ours)}: its front is computed meanwhile "
            f"({seconds(figures['overlap-first'].ours)} in a new store)",
            seconds(figures["gpu-first-token-128k"].ours),
        ),
        (
            "32,768 tokens, transformers, H200",
            seconds(computed(figures, "32k")),
            f"{seconds(raw.ours)}: nothing was loaded, it was computed",
            seconds(figures["gpu-first-token-32k"].ours),
        ),
        (
            "131,072 tokens, vLLM 0.32.0, H200",
            seconds(computed(figures, "128k", "vllm")),
            f"{seconds(figures['vllm-first-token-nvme-128k'].ours)}: vLLM cannot compute the front meanwhile",
            seconds(figures["vllm-first-token-128k-against-computing"].ours),
        ),
        (
            "32,768 tokens, vLLM 0.32.0, H200",
            seconds(computed(figures, "32k", "vllm")),
            "not recorded",
            seconds(figures["vllm-first-token-32k-against-computing"].ours),
        ),
        (
            "4,096 tokens, vLLM 0.32.0, 2 CPU cores",
            seconds(cold),
            f"{seconds(found['nvme'])}, after a restart of engine and node",
            seconds(found["dram"]),
        ),
    ]
    return table(("time to first token", "computed", "from NVMe", "from DRAM"), rows)


def chart(figures: Figures) -> str:
    """The bars of the README, as SVG."""
    base = computed(figures, "128k")
    lossy = "gpu-first-token-nvme-r4-128k"
    both = figures["overlap-default"].ours
    dram = figures["gpu-first-token-128k"].ours
    bars = [
        ("computed again", base, 1.0),
        ("from NVMe, its front computed meanwhile", both, figures["overlap-compute"].ours / both),
        ("from NVMe, in a lossy form of 4 bits (r4)", figures[lossy].ours, figures.ratio(f"{lossy}-against-computing")),
        ("from DRAM", dram, figures.ratio("gpu-first-token-128k-against-computing")),
    ]
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480 318" role="img" aria-labelledby="title" '
        "font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif\">",
        f'  <title id="title">Seconds to the first token of 131,072 tokens: '
        f"{'; '.join(f'{name} {value:.3g}' for name, value, _ in bars)}</title>",
        '  <text x="2" y="19" font-size="17" font-weight="600" fill="#1f2328">'
        "Seconds to the first token of 131,072 tokens</text>",
        '  <text x="2" y="41" font-size="14" fill="#59636e">'
        "NVIDIA H200, transformers, shape of Llama-3-8B, bfloat16.</text>",
        '  <text x="2" y="60" font-size="14" fill="#59636e">'
        "Three runs; each factor is to computing in the same run.</text>",
    ]
    y = 92
    for name, value, times in bars:
        colour = "#8c959f" if times == 1 else "#0b6e99"
        width = 404 * value / base
        sooner = "" if times == 1 else f", {int(times) if times >= 10 else f'{times:.1f}'} times sooner"
        shown = f"{value:.2f} s" if value < 1 else f"{value:.1f} s"
        lines += [
            f'  <text x="2" y="{y}" font-size="15" fill="#1f2328">{escape(name + sooner)}</text>',
            f'  <rect x="2" y="{y + 7}" width="{width:.1f}" height="22" rx="2" fill="{colour}"/>',
            f'  <text x="{width + 9:.1f}" y="{y + 24}" font-size="16" font-weight="600" fill="#1f2328">{shown}</text>',
        ]
        y += 58
    return "\n".join([*lines, "</svg>"]) + "\n"


# -- beside peers -----------------------------------------------------------------------------------------------

PEERS = {
    "lmcache mp": "LMCache, storage manager",
    "lmcache fs_native_odirect": "LMCache, `fs_native` with O_DIRECT",
    "lmcache legacy, pinned": "LMCache, its older engine",
    "lmcache server": "LMCache server",
    "lmcache server, shm": "LMCache server, `shm`",
    "lmcache server, handle": "LMCache server, `handle`",
    "vllm fs": "vLLM, `fs` tier",
}
"""What a record calls a peer, and what the page does."""

TASKS = [
    ("look up 131,072 tokens, a list", "match-list", "lmcache mp"),
    ("the same", "match-list", "lmcache legacy, pinned"),
    ("look up 131,072 tokens, through a server", "node-match", "lmcache server"),
    ("DRAM, store 32 MiB", "dram-store-32mib", "lmcache mp"),
    ("DRAM, load 32 MiB", "dram-load-32mib", "lmcache mp"),
    ("DRAM, store 2 MiB", "dram-store-2mib", "lmcache mp"),
    ("DRAM, load 2 MiB", "dram-load-2mib", "lmcache mp"),
    ("DRAM through a server, store 32 MiB", "node-store-32mib", "lmcache server, shm"),
    ("DRAM through a server, load 32 MiB", "node-load-32mib", "lmcache server, shm"),
    ("the same for 4 clients at once", "node-load-32mib-4-clients", "lmcache server, handle"),
    ("NVMe, store 32 MiB", "nvme-store-32mib", "lmcache fs_native_odirect"),
    ("NVMe, load 32 MiB", "nvme-load-32mib", "lmcache fs_native_odirect"),
    ("NVMe, load 32 MiB into a node without huge pages", "nvme-load-32mib-shared", "lmcache fs_native_odirect"),
    ("NVMe, store 2 MiB", "nvme-store-2mib", "lmcache fs_native_odirect"),
    ("NVMe, load 2 MiB", "nvme-load-2mib", "lmcache fs_native_odirect"),
    ("NVMe, CPU time to store 32 MiB", "nvme-store-cpu-32mib", "lmcache fs_native_odirect"),
    ("NVMe, CPU time to load 32 MiB", "nvme-load-cpu-32mib", "lmcache fs_native_odirect"),
    ("NVMe, CPU time to store 2 MiB", "nvme-store-cpu-2mib", "vllm fs"),
    ("NVMe, CPU time to load 2 MiB", "nvme-load-cpu-2mib", "vllm fs"),
    ("a file for each block, store 32 MiB", "files-store-32mib", "vllm fs"),
    ("a file for each block, load 32 MiB", "files-load-32mib", "vllm fs"),
    ("a file for each block, store 2 MiB", "files-store-2mib", "vllm fs"),
    ("a file for each block, load 2 MiB", "files-load-2mib", "vllm fs"),
]
"""Tasks, the record of each, and the peer that stands beside kvtide there."""


def beside_peers(figures: Figures) -> str:
    """What was measured of kvtide and a peer in one run, without tasks that were last measured without the peer."""
    rows = []
    for task, name, peer in TASKS:
        record = figures[name]
        theirs = figures[name.removesuffix("-shared")].peers.get(peer)
        if theirs is None:
            continue
        row = (task, f"{record.ours:.3g} {record.unit}", f"{theirs:.3g}: {PEERS[peer]}")
        rows.append((*row, verdict(ratio(figures, record, peer, theirs))))
    return table(("task", "kvtide", "peer", "kvtide is"), rows)


def without(figures: Figures) -> str:
    """What vLLM with kvtide takes, relative to the same vLLM without it."""
    tasks = [
        (
            "time to first token, mean of 10 conversations that take turns where two have room; 2 CPU cores",
            "vllm-turns",
        ),
        ("CPU time of new prompts with nothing to reuse; 2 CPU cores", "vllm-overhead-cpu"),
        ("16 new prompts of 4,000 tokens, 64 out; H200", "vllm-cold-batch"),
        ("32 new prompts of 200 tokens, 200 out; H200", "vllm-cold-decode"),
        ("the same while a new node takes its memory; H200", "vllm-cold-decode-new-node"),
    ]
    rows = []
    for task, name in tasks:
        record = figures[name]
        kind = f"95 % interval {record.spread[0]:.4g} to {record.spread[1]:.4g}"
        if "upper end of the 95 % interval" in record.note:
            kind = "the upper end of its 95 % interval"
        elif record.rounds == 1:
            kind = "one run"
        rows.append((task, f"{record.ours:.4g}", kind))
    return table(("task", "with kvtide : without", ""), rows)


def ratio(figures: Figures, record: BenchRecord, peer: str, theirs: float) -> float:
    """How much better kvtide is: the median of the rounds' ratios where a record has it, else the ratio of medians."""
    for other in (record.name, f"{record.name}-against-peer", f"{record.name}-against-vllm"):
        if other in figures and figures[other].against == peer:
            return figures.ratio(other)
    return record.ours / theirs if record.better == "higher" else theirs / record.ours


def verdict(times: float) -> str:
    if 1 / 1.05 < times < 1.05:
        return "equal, within 5 %"
    return f"{times:.1f} times better" if times > 1 else f"**{1 / times:.1f} times worse**"


# -- writing ----------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---" for _ in head], *rows]
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


def filled(text: str, mark: str, content: str) -> str:
    """The text with that content between its marks."""
    before, opening, rest = text.partition(f"<!-- {mark} -->\n")
    assert opening, f"there is no mark {mark!r}"
    return before + opening + content + rest[rest.index(f"<!-- /{mark} -->") :]


def dark(picture: str) -> str:
    """The same picture for a dark background."""
    return re.sub("|".join(DARK), lambda found: DARK[found[0]], picture)


def files() -> dict[Path, str]:
    """Every file that is written, and what belongs into it."""
    figures = Figures()
    found: dict[Path, str] = {}
    for page, parts in {
        ROOT / "README.md": {"headline": headline(figures), "first token": first_token(figures)},
        ROOT / "docs/comparison.md": {"beside peers": beside_peers(figures), "without kvtide": without(figures)},
    }.items():
        text = page.read_text()
        for mark, content in parts.items():
            text = filled(text, mark, content)
        found[page] = text
    pictures = {
        "architecture": (IMAGES / "architecture-light.svg").read_text(),
        "first-token": chart(figures),
    }
    for name, picture in pictures.items():
        found[IMAGES / f"{name}-light.svg"] = picture
        found[IMAGES / f"{name}-dark.svg"] = dark(picture)
    return found


def main() -> None:
    for file, content in files().items():
        file.write_text(content)


if __name__ == "__main__":
    main()
