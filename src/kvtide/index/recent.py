"""Prompts that were asked for lately: an engine asks at every step for one that waits."""

from __future__ import annotations

from typing import Any

from kvtide.index.index import Index, Rows

__all__ = ["Recent", "Resident"]

_REMEMBERED = 64
"""Prompts."""
_ONE_USE = 1.0
"""Seconds within which asking again for a prompt is no other use of its blocks."""


class Resident:
    """A prompt whose blocks are all in DRAM, as long as the index has no departures."""

    __slots__ = ("after", "departures", "note", "rows")

    def __init__(self, rows: dict[str, Rows], departures: int) -> None:
        self.rows = rows
        self.after: dict[int, dict[str, Rows]] = {}
        """Of these, those that are needed after so many blocks."""
        self.departures = departures
        self.note: Any = None
        """Whatever was made of it that holds as long."""


class Recent:
    """What one session asked for lately. Under the index's lock."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._residents: dict[bytes, Resident] = {}
        self._noted: set[tuple[bytes, int]] = set()
        """Prompts that were asked for since ``_since``, and how many blocks were found."""
        self._since = 0.0

    def find(self, prompt: bytes) -> Resident | None:
        """A prompt, by its digests, if it was all in DRAM lately and still is."""
        found = self._residents.get(prompt)
        return found if found is not None and found.departures == self._index.departures else None

    def note(self, prompt: bytes, rows: dict[str, Rows]) -> Resident | None:
        """The rows of a prompt, by group: None unless all are in DRAM."""
        if not all(self._index.all_sealed(r) for r in rows.values()):
            return None
        if len(self._residents) >= _REMEMBERED:
            self._residents.clear()
        found = self._residents[prompt] = Resident(rows, self._index.departures)
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
