"""How fast a tier's disk was, for the next process that opens it.

The file ``speeds`` in the tier's folder. It is a hint: without it, or where it says rubbish, nobody knows.
"""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from kvtide.tiers.disk import read_whole

__all__ = ["DiskSpeeds", "recall", "remember"]

_NAME = "speeds"
_MOST = 4096
"""Bytes of the file, at most."""
_POSSIBLE = (1e3, 1e12)
"""What else stands there is rubbish."""


class DiskSpeeds(NamedTuple):
    """Bytes a second; None: not known."""

    read: float | None
    write: float | None
    time: float
    """Seconds since 1970 when reading was last measured."""


def recall(folder: Path) -> DiskSpeeds | None:
    """What an earlier process has left there."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(read_whole(folder / _NAME, _MOST))
        if isinstance(found, dict) and (time := _number(found.get("time"), 0.0, math.inf)) is not None:
            return DiskSpeeds(_number(found.get("read"), *_POSSIBLE), _number(found.get("write"), *_POSSIBLE), time)
    return None


def _number(value: Any, least: float, most: float) -> float | None:
    number = type(value) in (int, float) and least <= value <= most and value < math.inf
    return float(value) if number else None


def remember(folder: Path, speeds: DiskSpeeds) -> None:
    """For a folder that this process has locked."""
    fresh = folder / f"{_NAME}.new"
    with contextlib.suppress(OSError):  # then the next one measures
        fresh.unlink(missing_ok=True)  # if it is a link, what it leads to is not ours to write to
        with fresh.open("x") as file:
            file.write(json.dumps(speeds._asdict()))
        fresh.replace(folder / _NAME)
