"""Up to which page of each storage's log of drops the blocks in a directory have been heard of: see drop_log.py.

A process that was closed for longer than pages are kept finds this when it is opened again, and so can tell that some
of what others dropped meanwhile was never heard. The file is a hint: without it, or where it says rubbish, nobody
knows.
"""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path

from kvtide.tiers.disk import read_whole

__all__ = ["DropLogPositions"]

_MOST = 1 << 16
"""Bytes of the file, at most."""


class DropLogPositions:
    """The file ``heard`` in a directory that this process has locked. Safe from any thread."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "heard"
        self._lock = threading.Lock()
        self._pages: dict[str, int] = {}
        with contextlib.suppress(OSError, ValueError, RecursionError):
            found = json.loads(read_whole(self._path, _MOST))
            if isinstance(found, dict):
                self._pages = {storage: page for storage, page in found.items() if type(page) is int and page >= 0}

    def page(self, storage: str) -> int | None:
        """The last page of a storage that was heard; None: nobody knows."""
        return self._pages.get(storage)

    def move(self, storage: str, page: int) -> None:
        """All up to a page was heard."""
        with self._lock:
            if self._pages.get(storage) == page:
                return
            self._pages[storage] = page
            fresh = self._path.with_name("heard.new")
            with contextlib.suppress(OSError):  # then it seems longer ago, and at worst all is dropped: a miss
                fresh.unlink(missing_ok=True)  # if it is a link, what it leads to is not ours to write to
                with fresh.open("x") as file:
                    file.write(json.dumps(self._pages))
                fresh.replace(self._path)
