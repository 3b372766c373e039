"""What the steward has removed, told to all who use the storage: a log, in the storage itself.

A page of it is a blob that holds the names of blocks::

    evicted.TERM.N

*Told first, removed then.* A steward that dies in between has told of blocks that are still there: whoever forgot them
finds them again by asking. The other way round nobody would ever hear of it.

*Cheap to follow.* A page is for hundreds of blocks, and its name begins like that of a beat: the listing that shows a
node who is steward shows it new pages too. Which are new is known by their names, not by their order: a steward that
was stopped, and wakes up when another was elected long ago, is heard too.

*Bounded.* Only the last pages are kept. A node that was away for longer cannot know what it has missed; it is told to
forget all that it knows of this storage, which is always right, since what is there is found again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtide.tiers.format.scratch import Scratch
from kvtide.tiers.shared.blobs import Blobs

__all__ = ["PAGE", "PAGES", "PAGE_BYTES", "EvictionLogReader", "names_in", "packed", "tell"]

PAGE = 256
"""Blocks of one page, and so of one removal."""
_DIGEST = 32
"""Bytes of a block's name."""
PAGE_BYTES = PAGE * _DIGEST
_KEPT = 64
"""Pages that are kept: a second's work of a busy steward is one or two."""
PAGES = "evicted."
_MOST = 4 << 20
"""Bytes of names that are read of one blob: none that we write is half as long, but others may write here too."""


def packed(names: Iterable[str]) -> bytes:
    """The names of blocks, as a blob holds them."""
    return b"".join(map(bytes.fromhex, names))


def names_in(blobs: Blobs, name: str, nbytes: int, timeout: float) -> list[str] | None:
    """The names of blocks in the first ``nbytes`` of a blob, or in as much of it as we write; None if it is gone."""
    data = Scratch().get(min(nbytes, _MOST))
    got = blobs.read_part(name, data, 0, timeout) if nbytes else 0
    return None if got < 0 else [data[i : i + _DIGEST].hex() for i in range(0, got - _DIGEST + 1, _DIGEST)]


def tell(blobs: Blobs, term: int, number: int, names: Sequence[str], timeout: float) -> int:
    """Write a page, and remove the oldest; answers the bytes of the new one."""
    page = packed(names)
    blobs.create(f"{PAGES}{term:010d}.{number:010d}", page, timeout)
    pages = sorted(name for name, _, _ in blobs.list(timeout, PAGES))
    if len(pages) > _KEPT:
        blobs.delete(pages[:-_KEPT], timeout)
    return len(page)


class EvictionLogReader:
    """What one node has heard of the log."""

    def __init__(self, blobs: Blobs, timeout: float) -> None:
        self._blobs = blobs
        self._timeout = timeout
        self._heard: set[str] | None = None
        """Pages; None before the first look, when nothing is known that could be forgotten."""

    def hear(self, pages: Sequence[str]) -> list[str] | None:
        """The blocks of pages that are new among ``pages``, all that there are; None: some were missed."""
        heard, self._heard = self._heard, set(pages)
        if heard is None:
            return []
        if len(pages) >= _KEPT and heard.isdisjoint(pages):
            return None
        removed: list[str] = []
        for page in self._heard - heard:
            try:
                names = names_in(self._blobs, page, PAGE_BYTES, self._timeout)
            except OSError:
                self._heard.discard(page)  # next time, perhaps
                continue
            if names is None:  # it left before it was read
                return None
            removed += names
        return removed
