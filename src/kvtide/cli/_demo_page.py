"""What ``kvtide demo`` leaves behind: a plot, and a page that needs nothing else."""

from __future__ import annotations

import base64
import html
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtide.cli._demo_session import Measure, Result
from kvtide.cli._show import share, size

__all__ = ["Way", "ways", "write_page", "write_plot"]


@dataclass(frozen=True, slots=True)
class Way:
    """A row of the table: bytes that went one way."""

    name: str
    measure: Measure
    limit: Measure | None = None
    copied: bool = True
    """False for a view, which has no speed: nothing moves."""

    @property
    def is_limit(self) -> bool:
        return self.limit is None and self.copied

    @property
    def nbytes(self) -> int:
        return self.measure.nbytes

    @property
    def seconds_text(self) -> str:
        seconds = self.measure.seconds
        return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.2g} ms"

    @property
    def speed_text(self) -> str:
        return f"{self.measure.speed:.2f}" if self.copied else "no copy"

    @property
    def share_text(self) -> str:
        return share(self.measure.speed, self.limit.speed) if self.limit else ""


def ways(result: Result) -> list[Way]:
    return [
        Way("limit: memcpy on one core", result.memcpy),
        Way("stored into DRAM", result.stored, result.memcpy),
        Way("loaded from DRAM, copied", result.copies, result.memcpy),
        Way("loaded from DRAM, views", result.views, copied=False),
        Way("limit: raw O_DIRECT reads", result.raw_read),
        Way("loaded from NVMe, verified", result.nvme, result.raw_read),
    ]


def write_plot(result: Result, path: Path) -> Path | None:
    """Draw where bytes came from and how fast; None where there is no matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return None
    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4), width_ratios=(3, 2), layout="constrained")
    shown: Any = [way for way in ways(result) if way.copied][::-1]
    colours = ["#9aa7b5" if way.is_limit else "#1f77b4" for way in shown]
    bars = left.barh([way.name for way in shown], [way.measure.speed for way in shown], color=colours)
    left.bar_label(bars, fmt="%.1f", padding=3)
    left.set_xlabel("GB/s")
    left.set_title("How fast (grey: what the machine does without us)")
    left.margins(x=0.12)
    phases: dict[str, dict[str, float]] = {
        "before the restart": {"DRAM": result.views.nbytes + result.copies.nbytes},
        "after it": {"DRAM": result.from_dram, "NVMe": result.from_nvme},
    }
    for name, colour in {"DRAM": "#1f77b4", "NVMe": "#ff7f0e"}.items():
        base = [part.get("DRAM", 0) / 2**30 if name == "NVMe" else 0 for part in phases.values()]
        right.bar(
            list(phases), [p.get(name, 0) / 2**30 for p in phases.values()], bottom=base, color=colour, label=name
        )
    right.set_ylabel("GiB reloaded and verified")
    right.set_title("Where the bytes came from")
    right.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c2733 }
table { border-collapse: collapse; width: 100% } td, th { padding: .3rem .6rem; text-align: right }
td:first-child, th:first-child { text-align: left } tr.limit { color: #6b7885 }
td.bar { width: 30%; text-align: left } td.bar div { background: #1f77b4; height: .8rem }
tr.limit div { background: #9aa7b5 }
img { width: 100% }
"""


def write_page(result: Result, findings: list[str], plot: Path | None, path: Path) -> Path:
    """The table, the findings and the plot in one file."""
    fastest = max(way.measure.speed for way in ways(result) if way.copied) or 1.0
    rows = []
    for way in ways(result):
        width = 100 * way.measure.speed / fastest if way.copied else 0
        texts = (way.name, size(way.nbytes), way.seconds_text, way.speed_text, way.share_text)
        cells = "".join(f"<td>{html.escape(text)}</td>" for text in texts)
        kind = "limit" if way.is_limit else "ours"
        bar = f'<td class="bar"><div style="width: {width:.0f}%"></div></td>'
        rows.append(f'<tr class="{kind}">{cells}{bar}</tr>')
    head = "".join(f"<th>{name}</th>" for name in ("Way", "Bytes", "Time", "GB/s", "of the limit", ""))
    image = ""
    if plot is not None:
        image = f'<img alt="plot" src="data:image/png;base64,{base64.b64encode(plot.read_bytes()).decode()}">'
    said = "".join(f"<p>{html.escape(line)}</p>" for line in findings)
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>kvtide demo</title><style>{_STYLE}</style>'
        f"<h1>kvtide demo</h1>{said}<table><tr>{head}</tr>{''.join(rows)}</table>{image}</html>\n",
        "utf-8",
    )
    return path
