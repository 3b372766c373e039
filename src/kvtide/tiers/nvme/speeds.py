"""Remembers the speed of a tier's disk, for the next process that opens it.

Stored in the file ``speeds`` in the tier's folder. It is a hint: without it, or if it is invalid, the speed is unknown.
"""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from kvtide.tiers.syscalls import read_whole

__all__ = ["DiskSpeeds", "recall", "remember"]

_NAME = "speeds"
_MOST = 4096
"""Maximum bytes of the file."""
_POSSIBLE = (1e3, 1e12)
"""Values outside this range are ignored."""


class DiskSpeeds(NamedTuple):
    """Bytes per second; None: not known."""

    read: float | None
    write: float | None
    time: float
    """Seconds since 1970 when reading was last measured."""


def recall(folder: Path) -> DiskSpeeds | None:
    """Read the speeds that an earlier process stored."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(read_whole(folder / _NAME, _MOST))
        if isinstance(found, dict) and (time := _number(found.get("time"), 0.0, math.inf)) is not None:
            return DiskSpeeds(_number(found.get("read"), *_POSSIBLE), _number(found.get("write"), *_POSSIBLE), time)
    return None


def _number(value: Any, least: float, most: float) -> float | None:
    number = type(value) in (int, float) and least <= value <= most and value < math.inf
    return float(value) if number else None


def remember(folder: Path, speeds: DiskSpeeds) -> None:
    """Store speeds in a folder that this process has locked."""
    fresh = folder / f"{_NAME}.new"
    with contextlib.suppress(OSError):  # then the next process measures
        fresh.unlink(missing_ok=True)  # if it is a link, its target must not be written to
        with fresh.open("x") as file:
            file.write(json.dumps(speeds._asdict()))
        fresh.replace(folder / _NAME)
