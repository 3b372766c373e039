"""Prompts that were asked for lately: an engine asks at every step for one that waits."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtide.index.index import Index, Rows

__all__ = ["CachedPrompt", "PromptCache", "PromptRows"]

_REMEMBERED = 64
"""Prompts."""
_ONE_USE = 1.0
"""Seconds within which asking again for a prompt is no other use of its blocks."""


class PromptRows:
    """What is needed of a prompt, by group, by a caller who has its first blocks already."""

    __slots__ = ("all", "nbytes", "note", "rows")

    def __init__(self, rows: dict[str, Rows], nbytes: int) -> None:
        self.rows = rows
        self.all: Rows = next(iter(rows.values())) if len(rows) == 1 else np.concatenate(list(rows.values()))
        self.nbytes = nbytes
        self.note: Any = None
        """Whatever was made of it that holds as long."""


class CachedPrompt:
    """A prompt whose blocks are all in DRAM, as long as the index has no departures and none of them has expired."""

    __slots__ = ("after", "departures", "expiry", "prompt", "rows")

    def __init__(self, prompt: bytes, rows: dict[str, Rows], departures: int, expiry: float) -> None:
        self.prompt = prompt
        self.rows = rows
        self.after: dict[int, PromptRows] = {}
        """What is needed of it after so many blocks."""
        self.departures = departures
        self.expiry = expiry
        """When the first of its blocks expired, as it was known then: later, if it was stored again since."""


class PromptCache:
    """What one session asked for lately. Under the index's lock."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._residents: dict[bytes, CachedPrompt] = {}
        """By the last digest: it names all blocks before, and to compare them is quicker than to hash them."""
        self._noted: set[tuple[bytes, int]] = set()
        """Prompts that were asked for since ``_since``, and how many blocks were found."""
        self._since = 0.0

    def find(self, prompt: bytes, now: float) -> CachedPrompt | None:
        """A prompt, by its digests, if it was all in DRAM lately and still is."""
        found = self._residents.get(prompt[-32:])
        if found is None or found.departures != self._index.departures or found.expiry <= now or found.prompt != prompt:
            return None
        return found

    def note(self, prompt: bytes, rows: dict[str, Rows], now: float) -> CachedPrompt | None:
        """The rows of a prompt, by group: None unless all are in DRAM and none has expired."""
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
        """Whether it is another use of a prompt's blocks that ``blocks`` of it were found, by its last digest."""
        if not 0 <= now - self._since < _ONE_USE:
            self._noted.clear()
            self._since = now
        this = last, blocks
        new = this not in self._noted
        self._noted.add(this)
        return new
