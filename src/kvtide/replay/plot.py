"""Plots of a replay's hit rate over its requests, and of hit rates over sizes, as SVG without a library."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

from kvtide.formatting import gib, size
from kvtide.replay.run import ReplayReport
from kvtide.replay.sweep import Sweep

__all__ = ["svg", "sweep_svg"]

_WIDTH, _HEIGHT, _LEFT, _TOP = 720, 330, 56, 50
_RIGHT = _WIDTH - 20
_COLOURS = {"dram": "#0b6e99", "nvme": "#d9a05b"}
_POLICIES = ("#8a8a8a", "#0b6e99", "#d9a05b", "#7a4fa3", "#3f8f4f")
"""In the order in which policies appear."""


def _text(x: float, y: float, words: str, anchor: str = "start", colour: str = "#222", points: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{points}">'
        f"{escape(words)}</text>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" {style}/>'


def _picture(title: str, parts: list[str]) -> str:
    frame = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(_LEFT, 20, title, points=14),
    ]
    return "\n".join([*frame, *parts, "</svg>", ""])


def _grid(highest: float, y: Callable[[float], float]) -> list[str]:
    """Lines at round percentages."""
    step = next(s for s in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2) if highest / s <= 6 or s == 0.2)
    parts = []
    for number in range(int(highest / step + 1e-9) + 1):
        rate = number * step
        parts.append(_line(_LEFT, y(rate), _RIGHT, y(rate), 'stroke="#ddd"'))
        parts.append(_text(_LEFT - 6, y(rate) + 4, f"{100 * rate:.3g} %", "end"))
    return parts


def svg(report: ReplayReport, title: str) -> str:
    """Stacked areas for the tiers' hit rates over the requests, and a line for the optimum; below, the policy in charge
    of DRAM, if that can change."""
    steps = report.over_time
    bottom = _HEIGHT - 70
    names = [tier.name for tier in report.tiers]
    highest = max([sum(step) for step in steps] + [report.optimum or 0.0, 0.01])

    def x(at: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * at / max(len(steps) - 1, 1)

    def y(rate: float) -> float:
        return bottom - (bottom - _TOP) * rate / highest

    parts = []
    below = [0.0] * len(steps)
    for number, name in enumerate(names):
        above = [low + step[number] for low, step in zip(below, steps, strict=True)]
        edge = [(x(i), y(v)) for i, v in enumerate(above)] + [(x(i), y(v)) for i, v in reversed(list(enumerate(below)))]
        points = " ".join(f"{px:.1f},{py:.1f}" for px, py in edge)
        parts.append(f'<polygon points="{points}" fill="{_COLOURS[name]}" fill-opacity="0.8"/>')
        parts.append(_text(_RIGHT - 60 * (len(names) - 1 - number), 40, name, "end", _COLOURS[name]))
        below = above
    parts += _grid(highest, y)
    if report.optimum is not None:
        at = y(report.optimum)
        parts.append(_line(_LEFT, at, _RIGHT, at, 'stroke="#444" stroke-dasharray="6 4"'))
        parts.append(_text(_LEFT + 6, at - 4, "optimum"))
    parts.append(_text(_LEFT, bottom + 18, f"request {report.warming:,}"))
    parts.append(_text(_RIGHT, bottom + 18, f"{report.requests:,}", "end"))
    if any(name != report.tiers[0].policy for _, name in report.in_charge):
        parts += _band(report, bottom + 30)
    return _picture(f"{title}: share of blocks found, by request", parts)


def _band(report: ReplayReport, top: float) -> list[str]:
    """The policy in charge, from left to right like the requests above."""
    names = list(dict.fromkeys(name for _, name in report.in_charge))
    colours = {name: _POLICIES[number % len(_POLICIES)] for number, name in enumerate(names)}
    counted = report.requests - report.warming

    def x(number: int) -> float:
        return _LEFT + (_RIGHT - _LEFT) * max(0, number - report.warming) / counted

    ends = [number for number, _ in report.in_charge[1:]] + [report.requests]
    parts = [
        f'<rect class="led" x="{x(start):.1f}" y="{top}" width="{x(end) - x(start):.1f}" height="10" '
        f'fill="{colours[name]}"/>'
        for (start, name), end in zip(report.in_charge, ends, strict=True)
        if x(end) > x(start)
    ]
    parts.append(_text(_LEFT, top + 26, "in charge of DRAM:"))
    for number, name in enumerate(names):
        parts.append(_text(_LEFT + 120 + 80 * number, top + 26, name, colour=colours[name]))
    return parts


def sweep_svg(found: Sweep, title: str) -> str:
    """Hit rates over bytes of DRAM, on a logarithmic axis."""
    bottom = _HEIGHT - 50
    rows = found.rows
    lines = {name: [row.hit_rates[name] for row in rows] for name in rows[0].hit_rates}
    colours = dict(zip(lines, _POLICIES[2 - min(2, len(lines)) :], strict=False))
    best = [row.optimum for row in rows if row.optimum is not None]
    if best:
        lines["optimum"] = best
        colours["optimum"] = "#222"
    highest = max(0.01, found.unlimited, *(rate for rates in lines.values() for rate in rates))
    # Begin and end at powers of two, so that a single size has an axis too.
    first, last = math.floor(math.log2(rows[0].bytes)), math.floor(math.log2(rows[-1].bytes)) + 1

    def x(nbytes: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * (math.log2(nbytes) - first) / (last - first)

    def y(rate: float) -> float:
        return bottom - (bottom - _TOP) * rate / highest

    parts = _grid(highest, y)
    every = max(1, math.ceil((last - first) / 8))
    for power in range(first, last + 1, every):
        parts.append(_line(x(2.0**power), bottom, x(2.0**power), bottom + 4, 'stroke="#444"'))
        parts.append(_text(x(2.0**power), bottom + 18, gib(2.0**power), "middle" if power < last else "end"))
    parts.append(
        _text((_LEFT + _RIGHT) / 2, bottom + 38, f"GiB of DRAM, in blocks of {size(found.block_bytes)}", "middle")
    )
    at = y(found.unlimited)
    parts.append(_line(_LEFT, at, _RIGHT, at, 'stroke="#444" stroke-dasharray="2 4"'))
    parts.append(_text(_LEFT + 6, at - 4, "a cache that nothing leaves"))
    for number, (name, rates) in enumerate(lines.items()):
        points = [(x(row.bytes), y(rate)) for row, rate in zip(rows, rates, strict=True)]
        dashes = ' stroke-dasharray="6 4"' if name == "optimum" else ""
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colours[name]}" stroke-width="2"{dashes}/>')
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colours[name]}"/>' for px, py in points]
        parts.append(_text(_RIGHT - 80 * (len(lines) - 1 - number), 40, name, "end", colours[name]))
    return _picture(f"{title}: share of blocks found, by size", parts)
