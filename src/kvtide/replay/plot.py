"""The hit rate of a replay over its requests, as a picture that needs no library."""

from __future__ import annotations

from html import escape

from kvtide.replay.run import Report

__all__ = ["svg"]

_WIDTH, _HEIGHT, _LEFT, _TOP = 720, 300, 56, 40
_COLOURS = {"dram": "#0b6e99", "nvme": "#d9a05b"}


def svg(report: Report, title: str) -> str:
    """Areas for the tiers, one on the other, in steps of requests; the optimum over all as a line."""
    steps = report.over_time
    right, bottom = _WIDTH - 20, _HEIGHT - 40
    names = [tier.name for tier in report.tiers]
    highest = max([sum(step) for step in steps] + [report.optimum or 0.0, 0.01])

    def x(at: float) -> float:
        return _LEFT + (right - _LEFT) * at / max(len(steps) - 1, 1)

    def y(rate: float) -> float:
        return bottom - (bottom - _TOP) * rate / highest

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}: share of blocks found, by request</text>',
    ]
    below = [0.0] * len(steps)
    for number, name in enumerate(names):
        above = [low + step[number] for low, step in zip(below, steps, strict=True)]
        edge = [(x(i), y(v)) for i, v in enumerate(above)] + [(x(i), y(v)) for i, v in reversed(list(enumerate(below)))]
        points = " ".join(f"{px:.1f},{py:.1f}" for px, py in edge)
        parts.append(f'<polygon points="{points}" fill="{_COLOURS[name]}" fill-opacity="0.8"/>')
        parts.append(f'<text x="{right - 60 * (len(names) - number)}" y="20" fill="{_COLOURS[name]}">{name}</text>')
        below = above
    for share in (0.0, 0.5, 1.0):
        rate = highest * share
        parts.append(f'<line x1="{_LEFT}" x2="{right}" y1="{y(rate):.1f}" y2="{y(rate):.1f}" stroke="#ccc"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(rate) + 4:.1f}" text-anchor="end">{rate:.0%}</text>')
    if report.optimum is not None:
        at = y(report.optimum)
        parts.append(
            f'<line x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="#444" stroke-dasharray="6 4"/>'
        )
        parts.append(f'<text x="{_LEFT + 6}" y="{at - 4:.1f}" fill="#444">optimum</text>')
    parts.append(f'<text x="{_LEFT}" y="{bottom + 20}">{report.warming:,}</text>')
    parts.append(f'<text x="{right}" y="{bottom + 20}" text-anchor="end">{report.requests:,}</text>')
    return "\n".join([*parts, "</svg>", ""])
