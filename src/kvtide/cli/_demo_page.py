"""Output files of ``kvtide demo``: a plot, and a self-contained HTML page."""

from __future__ import annotations

import base64
import html
from pathlib import Path

from kvtide.cli._demo_ask import Way
from kvtide.cli._demo_result import Result

__all__ = ["write_page", "write_plot"]

_COLOURS: dict[Way, str] = {
    "cold": "#9aa7b5",
    "reference": "#9467bd",
    "dram": "#1f77b4",
    "process": "#17a2a2",
    "nvme": "#ff7f0e",
}


def write_plot(result: Result, path: Path) -> Path | None:
    """Plot the time to the first token for each way; None without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return None
    mpl.use("agg")
    import matplotlib.pyplot as plt

    rows = result.rows()[::-1]
    figure, axes = plt.subplots(figsize=(10, 3), layout="constrained")
    bars = axes.barh([r.title for r in rows], [r.seconds for r in rows], color=[_COLOURS[r.way] for r in rows])
    axes.bar_label(bars, [f"{r.seconds_text}  {r.speedup_text}" for r in rows], padding=4)
    for row in rows:
        each = [step.seconds for step in result.of(row.way)]
        axes.plot(each, [row.title] * len(each), "|", color="#1c2733", markersize=12)
    axes.set_xlabel("seconds to the first token (bars: medians; marks: each question)")
    axes.set_title(f"Questions about a document of {result.steps[0].prompt:,} tokens")
    axes.margins(x=0.15)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c2733 }
table { border-collapse: collapse; width: 100% } td, th { padding: .3rem .6rem; text-align: right }
td:first-child, th:first-child { text-align: left } td.bar { width: 30%; text-align: left }
td.bar div { height: .8rem }
img { width: 100% }
"""


def write_page(result: Result, plot: Path | None, path: Path) -> Path:
    """The table, the findings and the plot in one file."""
    rows = result.rows()
    slowest = max(row.seconds for row in rows)
    lines = []
    for row in rows:
        texts = (row.title, f"{row.computed:,}", f"{row.cached:,}", row.seconds_text, row.speedup_text)
        cells = "".join(f"<td>{html.escape(text)}</td>" for text in texts)
        style = f"width: {100 * row.seconds / slowest:.1f}%; background: {_COLOURS[row.way]}"
        lines.append(f'<tr>{cells}<td class="bar"><div style="{style}"></div></td></tr>')
    names = ("", "Computed", "From the cache", "First token after", "Speed-up", "")
    head = "".join(f"<th>{name}</th>" for name in names)
    image = ""
    if plot is not None:
        image = f'<img alt="plot" src="data:image/png;base64,{base64.b64encode(plot.read_bytes()).decode()}">'
    said = "".join(f"<p>{html.escape(line)}</p>" for line in result.findings())
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>kvtide demo</title><style>{_STYLE}</style>'
        f"<h1>kvtide demo</h1><table><tr>{head}</tr>{''.join(lines)}</table>{image}{said}</html>\n",
        "utf-8",
    )
    return path
