"""Bar charts as SVG text, drawn so that they are read on a light page, on a dark one and on a phone.

The same values give the same text, byte for byte, so that a test can compare a committed chart with its records. A
chart brings its own light background, for pages that are dark. It is narrow with large letters: a phone shows the whole
of it in the width of its screen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

__all__ = ["Bar", "Group", "bar_chart"]

WIDTH, MARGIN = 600, 18
_BAR, _ROW, _HEAD = 20, 27, 30
_FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
_INK, _FAINT = "#1f2328", "#57606a"
_STYLES = {
    "computed": "fill='#8c959f'",
    "kvtide": "fill='#0b6e99'",
    "second": "fill='#7fbcd6'",
    "missed": "fill='#d9772b'",
    "limit": "fill='url(#stripes)' stroke='#1f2328' stroke-width='1'",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """A value; ``kind`` is a key of the chart's legend, ``text`` stands at the bar's end, ``label`` left of it."""

    value: float
    text: str
    kind: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    title: str
    bars: Sequence[Bar]


def bar_chart(
    title: str,
    axis: str,
    legend: Mapping[str, str],
    groups: Sequence[Group],
    *,
    notes: Sequence[str] = (),
    line: tuple[float, str] | None = None,
) -> str:
    """The text of an SVG file. ``line`` is a value with a line across all bars, and what it is."""
    bars = [bar for group in groups for bar in group.bars]
    left = MARGIN + max(_width(bar.label, 14) for bar in bars) + (8 if any(bar.label for bar in bars) else 0)
    most = max([bar.value for bar in bars] + ([line[0]] if line else []))
    if line:  # the values stand in a column right of it
        scale = (WIDTH - MARGIN - left - max(_width(bar.text, 14) for bar in bars) - 10) / most
    else:  # the largest scale at which every value still ends inside the picture
        scale = min((WIDTH - MARGIN - left - _width(bar.text, 14) - 8) / bar.value for bar in bars if bar.value)
        scale = min(scale, (WIDTH - MARGIN - left - 8) / most)
    out: list[str] = []
    y = 34
    for row in _wrapped(title, 18, bold=True):
        out.append(_text(MARGIN, y, row, 18, weight="bold"))
        y += 24
    x, y = float(MARGIN), y + 2
    for kind, meaning in legend.items():
        wide = 26 + _width(meaning, 14) + 18
        if x > MARGIN and x + wide - 18 > WIDTH - MARGIN:
            x, y = float(MARGIN), y + 24
        out.append(f"<rect x='{x:.1f}' y='{y - 12}' width='18' height='14' {_STYLES[kind]}/>")
        out.append(_text(x + 26, y, meaning, 14))
        x += wide
    y += 16
    if line:
        out.append(_text(left + line[0] * scale, y + 10, line[1], 13, anchor="end", fill=_FAINT))
        y += 14
    rows, spans = list[str](), list[tuple[int, int]]()
    for group in groups:
        y += _HEAD
        rows.append(_text(MARGIN, y - 8, group.title, 15, weight="bold"))
        spans.append((y - 3, y + _ROW * len(group.bars) - _ROW + _BAR + 3))
        for bar in group.bars:
            if bar.label:
                rows.append(_text(left - 8, y + 15, bar.label, 14, anchor="end"))
            long = max(bar.value * scale, 1)
            rows.append(f"<rect x='{left:.1f}' y='{y}' width='{long:.1f}' height='{_BAR}' {_STYLES[bar.kind]}/>")
            # A halo in the background's colour, because a line of the grid may pass behind the letters.
            rows.append(_text(left + (most * scale + 10 if line else long + 6), y + 15, bar.text, 14, halo=True))
            y += _ROW
    y += 6
    for tick in _ticks(line[0] if line else most):
        at = left + tick * scale
        out.append(f"<path d='{_down(at, spans)}' stroke='#d0d7de'/>")
        out.append(_text(at, y + 17, f"{tick:g}", 13, anchor="middle", fill=_FAINT))
    out += rows
    out.append(f"<path d='{_down(left, spans)}' stroke='{_INK}'/>")
    if line:
        at = left + line[0] * scale
        out.append(f"<path d='{_down(at, spans)}' stroke='{_INK}' stroke-width='2' stroke-dasharray='5 3'/>")
    y += 38
    out.append(_text(WIDTH / 2, y, axis, 14, anchor="middle"))
    y += 6
    for note in notes:
        for row in _wrapped(note, 13):
            y += 18
            out.append(_text(MARGIN, y, row, 13, fill=_FAINT))
        y += 4
    height = y + MARGIN
    told = "; ".join(f"{g.title}: " + ", ".join(f"{b.label} {b.text}".strip() for b in g.bars) for g in groups)
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}' "
            f"role='img' font-family=\"{_FONT}\">",
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(told)}</desc>",
            "<defs><pattern id='stripes' width='6' height='6' patternUnits='userSpaceOnUse' "
            "patternTransform='rotate(45)'><rect width='6' height='6' fill='#ffffff'/>"
            "<rect width='2' height='6' fill='#57606a'/></pattern></defs>",
            f"<rect x='0.5' y='0.5' width='{WIDTH - 1}' height='{height - 1}' rx='8' fill='#ffffff' stroke='#d0d7de'/>",
            *out,
            "</svg>",
            "",
        ]
    )


def _text(
    x: float,
    y: float,
    text: str,
    size: int,
    *,
    anchor: str = "start",
    weight: str = "normal",
    fill: str = _INK,
    halo: bool = False,
) -> str:
    around = " stroke='#ffffff' stroke-width='4' paint-order='stroke'" if halo else ""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' text-anchor='{anchor}' font-weight='{weight}' "
        f"fill='{fill}'{around}>{escape(text)}</text>"
    )


def _down(x: float, spans: Sequence[tuple[int, int]]) -> str:
    """The path of a vertical line beside the bars of each group, not through their titles."""
    return "".join(f"M{x:.1f} {start}V{stop}" for start, stop in spans)


def _width(text: str, size: int, bold: bool = False) -> float:
    """About how wide a text is, in the widest of the usual fonts."""
    return (0.66 if bold else 0.59) * size * len(text)


def _wrapped(text: str, size: int, bold: bool = False) -> list[str]:
    rows = [""]
    for word in text.split():
        longer = f"{rows[-1]} {word}".strip()
        if rows[-1] and _width(longer, size, bold) > WIDTH - 2 * MARGIN:
            rows.append(word)
        else:
            rows[-1] = longer
    return rows


def _ticks(most: float) -> list[float]:
    """Round values from 0 to ``most``, at most eight."""
    rough = most / 7
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough)
    return [round(i * step, 10) for i in range(int(most / step + 1e-9) + 1)]
