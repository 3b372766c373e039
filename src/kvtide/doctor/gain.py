"""Estimates what loading saves: the time to load a prefix compared with the time to compute it."""

from __future__ import annotations

from collections.abc import Iterator

from kvtide.block import Layout
from kvtide.config import Config
from kvtide.doctor.finding import Finding, ok, warning
from kvtide.doctor.model import nbytes
from kvtide.formatting import size

__all__ = ["check", "storing"]

_TOKENS = 4096
_WORTH = 1.5
"""How many times as fast loading should be, to justify a disk."""


def check(layout: Layout, disk: float, prefill: float | None) -> Iterator[Finding]:
    """``disk``: bytes read per second; ``prefill``: tokens that the engine computes per second."""
    load = nbytes(layout, _TOKENS) / disk
    text = f"{_TOKENS:,} tokens are {size(nbytes(layout, _TOKENS))}: {_seconds(load)} from this disk"
    even = f"{_TOKENS / load:,.0f} tokens a second"
    if prefill is None:
        yield warning(
            "gain",
            f"{text}; that is faster than an engine that computes fewer than {even}",
            "give --prefill-tokens-per-second, or --url of an engine that has computed some prompts",
        )
        return
    compute = _TOKENS / prefill
    text += f" against {_seconds(compute)} computing ({prefill:,.0f} tokens a second; even at {even})"
    if compute < load:
        yield warning(
            "gain",
            f"{text}: kvtide will compute instead",
            "use a faster disk or several, or DRAM alone (nvme.path empty)",
        )
    elif compute < _WORTH * load:
        yield warning("gain", f"{text}: little is gained", "use a faster disk, or more DRAM (dram.budget)")
    else:
        yield ok("gain", f"{text}: {compute / load:.1f} times as fast")


def storing(config: Config, layout: Layout, pool: int, dram: int) -> Finding:
    """What the connector stores, for an engine with a KV cache of ``pool`` tokens and a node with ``dram`` bytes."""
    own = nbytes(layout, pool)
    if config.engine.store != "auto":
        return ok("store", f"{config.engine.store}, as set")
    if dram > own:
        return ok("store", f"every block as it is computed: dram.budget is more than the engine's own {size(own)}")
    return warning(
        "store",
        f"only what is used again: dram.budget is {size(dram)}, the engine's own pool {size(own)}",
        'raise dram.budget above that, or set engine.store = "through"',
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
