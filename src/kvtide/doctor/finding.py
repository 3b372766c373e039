"""Findings of the doctor: one line each, with what to do about it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Finding", "Level", "error", "ok", "warning"]


class Level(enum.Enum):
    OK = "ok"
    WARNING = "warning"
    """It works but could be better, or it could not be checked."""
    ERROR = "error"
    """kvtide does nothing for this deployment, or not what it was asked for."""


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    about: str
    """What was checked, in a word or two."""
    found: str
    do: str = ""
    """What to change."""


def ok(about: str, found: str, do: str = "") -> Finding:
    return Finding(Level.OK, about, found, do)


def warning(about: str, found: str, do: str) -> Finding:
    return Finding(Level.WARNING, about, found, do)


def error(about: str, found: str, do: str) -> Finding:
    return Finding(Level.ERROR, about, found, do)
