"""For each shared storage, the last page of its drop log that was applied to the blocks in a directory: see
drop_log.py.

A process that was closed for longer than pages are kept reads this when it is opened again, and so detects that it has
missed some drops of other nodes. The file is a hint: without it, or if it is invalid, the position is unknown.
"""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path

from kvtide.tiers.syscalls import read_whole

__all__ = ["DropLogPositions"]

_MOST = 1 << 16
"""Maximum bytes of the file."""


class DropLogPositions:
    """The file ``heard`` in a directory that this process has locked. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "heard"
        self._lock = threading.Lock()
        self._pages: dict[str, int] = {}
        with contextlib.suppress(OSError, ValueError, RecursionError):
            found = json.loads(read_whole(self._path, _MOST))
            if isinstance(found, dict):
                self._pages = {storage: page for storage, page in found.items() if type(page) is int and page >= 0}

    def page(self, storage: str) -> int | None:
        """The last page of a storage that was applied; None: unknown."""
        return self._pages.get(storage)

    def move(self, storage: str, page: int) -> None:
        """All pages up to this one were applied."""
        with self._lock:
            if self._pages.get(storage) == page:
                return
            self._pages[storage] = page
            fresh = self._path.with_name("heard.new")
            # then the position seems older, and at worst everything is dropped: misses
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)  # if it is a link, its target must not be written to
                with fresh.open("x") as file:
                    file.write(json.dumps(self._pages))
                fresh.replace(self._path)
