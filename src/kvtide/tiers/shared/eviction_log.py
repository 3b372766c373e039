"""The eviction log: tells all nodes that use a storage which blocks the budget coordinator removed. It is kept in the
storage itself.

A page of it is a blob that holds the names of blocks::

    evicted.TERM.N

*Logged first, then removed.* If a coordinator dies in between, the log names blocks that still exist: nodes that forgot
them find them again by lookup. In the other order no node would ever learn of the removal.

*Cheap to follow.* A page is for hundreds of blocks, and its name begins like that of a beat: the listing that shows a
node the coordinator shows it new pages too. New pages are recognised by their names, not by their order: so pages are
also read from a coordinator that was stopped and resumes long after another was elected.

*Bounded.* Only the last pages are kept. A node that was away for longer cannot know what it has missed; it is told to
forget all it knows of this storage, which is always safe, since existing blocks are found again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtide.tiers.format.scratch import Scratch
from kvtide.tiers.shared.blobs import Blobs

__all__ = ["PAGE", "PAGES", "PAGE_BYTES", "EvictionLogReader", "names_in", "packed", "publish"]

PAGE = 256
"""Blocks of one page, and so of one removal."""
_DIGEST = 32
"""Bytes of a block's name."""
PAGE_BYTES = PAGE * _DIGEST
_KEPT = 64
"""Pages that are kept: a busy coordinator writes one or two per second."""
PAGES = "evicted."
_MOST = 4 << 20
"""Maximum bytes of names that are read from one blob: kvtide writes none half as long, but others may write here
too."""


def packed(names: Iterable[str]) -> bytes:
    """The names of blocks, encoded as the content of a blob."""
    return b"".join(map(bytes.fromhex, names))


def names_in(blobs: Blobs, name: str, nbytes: int, timeout: float) -> list[str] | None:
    """The names of blocks in the first ``nbytes`` of a blob, up to the largest size kvtide writes; None if it is
    gone."""
    data = Scratch().get(min(nbytes, _MOST))
    got = blobs.read_part(name, data, 0, timeout) if nbytes else 0
    return None if got < 0 else [data[i : i + _DIGEST].hex() for i in range(0, got - _DIGEST + 1, _DIGEST)]


def publish(blobs: Blobs, term: int, number: int, names: Sequence[str], timeout: float) -> int:
    """Write a page, and remove the oldest; returns the bytes of the new one."""
    page = packed(names)
    blobs.create(f"{PAGES}{term:010d}.{number:010d}", page, timeout)
    pages = sorted(name for name, _, _ in blobs.list(timeout, PAGES))
    if len(pages) > _KEPT:
        blobs.delete(pages[:-_KEPT], timeout)
    return len(page)


class EvictionLogReader:
    """One node's position in the log."""

    def __init__(self, blobs: Blobs, timeout: float) -> None:
        self._blobs = blobs
        self._timeout = timeout
        self._seen: set[str] | None = None
        """Pages that were read; None before the first call, when nothing is known that could be forgotten."""

    def read_new(self, pages: Sequence[str]) -> list[str] | None:
        """The blocks of the new pages among ``pages``, which are all existing ones; None: some were missed."""
        seen, self._seen = self._seen, set(pages)
        if seen is None:
            return []
        if len(pages) >= _KEPT and seen.isdisjoint(pages):
            return None
        removed: list[str] = []
        for page in self._seen - seen:
            try:
                names = names_in(self._blobs, page, PAGE_BYTES, self._timeout)
            except OSError:
                self._seen.discard(page)  # retried next time
                continue
            if names is None:  # it was removed before it was read
                return None
            removed += names
        return removed
