"""Keys for tests: a key file in a folder, and the key that wraps it."""

from __future__ import annotations

from pathlib import Path

from kvtide.clock import Clock
from kvtide.security.key_file import KeyFile
from kvtide.security.key_ring import KeyRing
from kvtide.security.wrapping import LocalWrapper

__all__ = ["WRAPPING", "ring_in"]

WRAPPING = bytes(range(32))
"""The wrapping key."""


def ring_in(folder: Path, lease: float = 60.0, clock: Clock | None = None) -> KeyRing:
    """A key ring whose keys are in ``folder``; all rings of one folder have the same keys."""
    return KeyRing(KeyFile(folder / "keys.json"), LocalWrapper(WRAPPING), lease, clock)
