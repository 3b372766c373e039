"""A picture of a plan: the time to the first token over the length of the prompt, computed and from each tier."""

from __future__ import annotations

from pathlib import Path

from kvtide.errors import ConfigError
from kvtide.sizing.plan import SizingPlan

__all__ = ["draw"]

_COLOURS = {"computed": "#444444", "GPU memory": "#3f8f4f", "dram": "#0b6e99", "nvme": "#d9a05b", "network": "#7a4fa3"}


def draw(found: SizingPlan, path: Path) -> None:
    """Write an SVG of the plan's contexts, which should be many. Raises ConfigError if matplotlib is missing."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError('a plot needs matplotlib: pip install "kvtide[plot]"') from None
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    tokens = [at.tokens for at in found.contexts]
    lines = {
        "computed": [at.first_token_computed for at in found.contexts],
        "GPU memory": [at.first_token_gpu for at in found.contexts],
        **{tier.name: [at.tiers[tier.name].first_token for at in found.contexts] for tier in found.tiers},
    }
    for name, times in lines.items():
        axes.plot(tokens, times, label=name, color=_COLOURS[name])
    for tier in found.tiers:
        if found.assumptions.overlaps:
            both = [at.tiers[tier.name].both for at in found.contexts]
            axes.plot(tokens, both, color=_COLOURS[tier.name], linestyle=":", label=f"{tier.name} and computing")
        if tier.break_even is not None and tokens[0] < tier.break_even < tokens[-1]:
            axes.axvline(tier.break_even, color=_COLOURS[tier.name], linestyle="--", linewidth=1)
            axes.annotate(
                f"{tier.name}: quicker from {tier.break_even:,} tokens",
                (tier.break_even, 0.02),
                xycoords=("data", "axes fraction"),
                rotation=90,
                horizontalalignment="right",
                fontsize=8,
                color=_COLOURS[tier.name],
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            )
    axes.set(xscale="log", yscale="log", xlabel="tokens of the prompt", ylabel="seconds to the first token")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title(f"{found.model} on {found.gpus} x {found.gpu}: estimates")
    axes.grid(True, which="major", color="#dddddd")
    axes.legend(fontsize=8)
    try:
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvtide"}):  # text as text; equal plans, equal files
            figure.savefig(path, format="svg", metadata={"Date": None})
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror}; give another file") from error
