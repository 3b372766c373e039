"""Formats numbers for people, in every command."""

from __future__ import annotations

from datetime import datetime

__all__ = ["gib", "moment", "share", "size"]


def size(nbytes: float) -> str:
    """Bytes in a suitable unit: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def gib(nbytes: float) -> str:
    """Bytes as a number of GiB, for a column or an axis."""
    number = nbytes / (1 << 30)
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def share(part: float, whole: float) -> str:
    """``part`` as percent of ``whole``."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def moment(seconds: float | None) -> str:
    """A time since 1970 as local time; a value outside the calendar's range is shown in seconds."""
    if seconds is None:
        return "never"
    try:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return f"{seconds:g} s"
