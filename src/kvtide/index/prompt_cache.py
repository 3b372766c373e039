"""Caches recently requested prompts: an engine's scheduler matches a waiting prompt at every step."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtide.index.index import Index, Rows

__all__ = ["CachedPrompt", "PromptCache", "PromptRows"]

_REMEMBERED = 64
"""Maximum number of cached prompts."""
_ONE_USE = 1.0
"""Seconds within which another request for a prompt does not count as another use of its blocks."""


class PromptRows:
    """The rows of a prompt, by group, that a caller needs who has its first blocks already."""

    __slots__ = ("all", "nbytes", "note", "rows")

    def __init__(self, rows: dict[str, Rows], nbytes: int) -> None:
        self.rows = rows
        self.all: Rows = next(iter(rows.values())) if len(rows) == 1 else np.concatenate(list(rows.values()))
        self.nbytes = nbytes
        self.note: Any = None
        """Any derived object that stays valid as long."""


class CachedPrompt:
    """A prompt whose blocks are all in DRAM; valid while ``Index.departures`` is unchanged and none of them has
    expired."""

    __slots__ = ("after", "departures", "expiry", "prompt", "rows")

    def __init__(self, prompt: bytes, rows: dict[str, Rows], departures: int, expiry: float) -> None:
        self.prompt = prompt
        self.rows = rows
        self.after: dict[int, PromptRows] = {}
        """The rows needed, by number of blocks that the caller has."""
        self.departures = departures
        self.expiry = expiry
        """The earliest expiry of its blocks, as known then; the true one is later if it was stored again since."""


class PromptCache:
    """The recent requests of one session. Requires the index lock."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._residents: dict[bytes, CachedPrompt] = {}
        """By the last digest, which identifies all blocks before it; comparing the full digests is faster than hashing
        them."""
        self._noted: set[tuple[bytes, int]] = set()
        """Prompts that were requested since ``_since``, and the number of blocks found."""
        self._since = 0.0

    def find(self, prompt: bytes, now: float) -> CachedPrompt | None:
        """A prompt, by its digests, if it was completely in DRAM recently and still is."""
        found = self._residents.get(prompt[-32:])
        if found is None or found.departures != self._index.departures or found.expiry <= now or found.prompt != prompt:
            return None
        return found

    def note(self, prompt: bytes, rows: dict[str, Rows], now: float) -> CachedPrompt | None:
        """Cache the rows of a prompt, by group; None unless all are in DRAM and none has expired."""
        if not all(self._index.all_sealed(r) for r in rows.values()):
            return None
        expiry = min(self._index.first_expiry(r) for r in rows.values())
        if expiry <= now:
            return None
        if len(self._residents) >= _REMEMBERED:
            self._residents.clear()
        found = self._residents[prompt[-32:]] = CachedPrompt(prompt, rows, self._index.departures, expiry)
        return found

    def is_new(self, last: bytes, blocks: int, now: float) -> bool:
        """Whether a match of ``blocks`` blocks of a prompt, given by its last digest, counts as another use of them."""
        if not 0 <= now - self._since < _ONE_USE:
            self._noted.clear()
            self._since = now
        this = last, blocks
        new = this not in self._noted
        self._noted.add(this)
        return new
