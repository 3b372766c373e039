"""Numbers of batches. They never go back, whatever happens to the node or to the clock: a consumer leaves out what has
a lower number than it expects, so it would miss everything.

The first number of a process is the milliseconds since 2026, which are more than the batches that earlier processes can
have sent, unless the clock was set back. Therefore a file says which numbers may have been used: some are reserved
there before they are, so that it is rarely written, and a process that is killed has no more to write.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

__all__ = ["LARGEST", "BatchNumbers"]

log = logging.getLogger("kvtide.events")

LARGEST = 1 << 62
"""A number that no batch can have, whatever a file says."""
_BEGAN = 1_767_225_600_000
"""The beginning of 2026, in milliseconds."""
_RESERVED = 100_000
"""Numbers that are reserved at a time. At 1,000 batches per second that is one write in 100 seconds."""


class BatchNumbers:
    """For one thread."""

    def __init__(self, time: float, path: Path | None) -> None:
        """``path``: the file; None: only the clock decides."""
        self._path = path
        self.next = max(1, int(time * 1000) - _BEGAN, self._read())
        """The number of the next batch."""
        self._reserved = 0
        """Numbers below this need not be written down any more."""

    def take(self) -> int:
        """The next number, which is used with this."""
        number = self.next
        if number >= self._reserved:
            self._reserve(number + _RESERVED)
        self.next = number + 1
        return number

    def skip_to(self, number: int) -> None:
        """Use none below ``number``: they are used with this."""
        self.next = number
        self._reserve(number + _RESERVED)

    def close(self) -> None:
        """Give back numbers that were reserved and not used."""
        if self._reserved:
            self._reserve(self.next)

    def _read(self) -> int:
        if self._path is None:
            return 0
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                found = int(os.read(file, 32))
            finally:
                os.close(file)
            return found if found < LARGEST else 0
        except FileNotFoundError:
            return 0
        except (OSError, ValueError) as e:
            log.warning("%s is unreadable (%s): the numbers of KV events begin with the time", self._path, e)
            return 0

    def _reserve(self, number: int) -> None:
        self._reserved = number
        if self._path is None:
            return
        fresh = self._path.with_name(f"{self._path.name}-new")
        try:
            fresh.unlink(missing_ok=True)
            with fresh.open("x") as file:
                file.write(str(number))
            fresh.replace(self._path)
        except OSError as e:
            log.warning(
                "cannot write %s (%s): should the clock be set back, the numbers of KV events go back after a restart",
                self._path,
                e,
            )
