"""Keys for tests: a key file, and what wraps it, in a folder."""

from __future__ import annotations

from pathlib import Path

from kvtide.clock import Clock
from kvtide.security.key_file import KeyFile
from kvtide.security.key_ring import KeyRing
from kvtide.security.wrapping import LocalWrapper

__all__ = ["WRAPPING", "ring_in"]

WRAPPING = bytes(range(32))
"""The key that wraps."""


def ring_in(folder: Path, lease: float = 60.0, clock: Clock | None = None) -> KeyRing:
    """A ring whose keys are in ``folder``; all rings of one folder have the same ones."""
    return KeyRing(KeyFile(folder / "keys.json"), LocalWrapper(WRAPPING), lease, clock)
