"""A Lease is the right to read blocks, a Reservation the right to write them.

Both belong to a session and end with it. They replace reference counts and begin/complete pairs: everything that must
be undone is in one object, and ``with`` undoes it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import numpy as np

from kvtide import forks
from kvtide.block import BlockKey, Span
from kvtide.call_guard import CallGuard
from kvtide.errors import RightError
from kvtide.index.index import Rows
from kvtide.interrupts import again_if_interrupted

__all__ = ["Lease", "Reservation", "Watch"]

_NONE: Rows = np.empty(0, np.int64)


class Watch(weakref.ref["Lease | Reservation"]):
    """Is appended to ``abandoned`` when a lease or reservation is garbage collected without having ended, because the
    thread that was about to get it was interrupted. The next thread that takes the index lock ends the one with that
    number.

    A ``__del__`` method could be interrupted itself, before its first line, and nothing would notice. The callback of a
    weak reference that is not written in Python cannot. Keep the watch as long as the lease or reservation has not
    ended.
    """

    number = 0

    @classmethod
    def over(cls, right: Lease | Reservation, number: int, abandoned: deque[Watch]) -> Watch:
        watch = cls(right, abandoned.append)  # it is called with the watch itself
        watch.number = number
        return watch


class Lease:
    """The right to read blocks: while it is open, they are not evicted from any tier. Release it from any thread, once
    or more."""

    __slots__ = ("__weakref__", "_number", "_release", "_rows")

    def __init__(self, release: Callable[[int], None], number: int, rows: Rows) -> None:
        """``release`` ends the lease of that number, and may be called again; ``number`` 0: there is nothing to end."""
        self._release = release
        self._number = number
        self._rows = rows

    def __repr__(self) -> str:
        return f"<Lease {len(self._rows)} blocks>"

    @property
    def rows(self) -> Rows:
        return self._rows

    def release(self) -> None:
        """End the lease. Views made under it must not be used any more."""
        if self._number:
            self._release(self._number)
            # Only now, so that an interrupted release can be repeated.
            self._number, self._rows = 0, _NONE

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class Reservation:
    """The right to write blocks: a slot each, filled through ``views`` and then sealed, or aborted.

    Until ``seal`` the blocks are PENDING and cannot be read. Leaving the ``with`` block without sealing aborts.
    ``keys`` are those that were granted: not blocks that are present already, for which there was no space, or that two
    others are writing. Of two writers of a block, the first to seal wins.
    """

    __slots__ = (
        "__weakref__",
        "_finish",
        "_views",
        "depths",
        "followed",
        "generations",
        "guard",
        "kept",
        "keys",
        "later",
        "on_end",
        "on_views",
        "origin",
        "pending",
        "refused",
        "rows",
        "sealed",
        "serial",
    )

    def __init__(
        self,
        keys: Sequence[BlockKey],
        rows: Rows,
        views: Sequence[Span],
        depths: Sequence[int],
        generations: Sequence[int],
        finish: Callable[[Reservation, bool], None],
        serial: int = 0,
    ) -> None:
        """``finish`` may be called again if it was interrupted. ``serial`` identifies it in its store."""
        self.serial = serial
        self.keys = keys
        self.rows = rows
        self._views = views
        self.on_views: Callable[[Reservation], None] | None = None
        """Called when a caller gets the views: it may then write into them though it drops the reservation."""
        self.depths = depths
        """The number, in its prompt, of each block that was granted."""
        self.generations = generations
        self._finish: Callable[[Reservation, bool], None] | None = finish
        self.origin = forks.here
        self.sealed = False
        self.followed = False
        """Whether another reservation continues the same prompt."""
        self.kept: list[tuple[Rows, int]] = []
        """Earlier blocks that are held as long, with the bytes of each."""
        self.refused = 0
        """Blocks that are not present, and for which there was no space."""
        self.later = 0
        """Of those refused: blocks whose memory is still being taken from the system. Try again."""
        self.pending = 0
        """Blocks that are not present yet: two other writers are writing them, and may be slow or never finish."""
        self.on_end: list[Callable[[Reservation], None]] = []
        self.guard: CallGuard | None = None
        """The guard that must be open while slots are reassigned."""

    def __repr__(self) -> str:
        return f"<Reservation {len(self.keys)} blocks{'' if self.open else ', ended'}>"

    @property
    def open(self) -> bool:
        return self._finish is not None

    @property
    def views(self) -> Sequence[Span]:
        """The slots' memory, one for each key; empty when it has ended."""
        if self.on_views is not None:
            self.on_views(self)
        return self._views

    def seal(self) -> None:
        """Make the completely written blocks readable."""
        if not self._end(sealed=True):
            raise RightError("this reservation was sealed or aborted before; reserve again")

    def abort(self) -> None:
        """Release the slots unused. Does nothing if the reservation has ended."""
        self._end(sealed=False)

    def _end(self, sealed: bool) -> bool:
        finish, self._finish = self._finish, None
        if finish is None:
            return False
        if self.origin is not forks.here:  # the slots belong to the parent process, which still fills them
            self._views = ()
            if sealed:
                forks.check(self.origin, "reservation")
            return True
        try:
            self.sealed = sealed
            if self.guard is None:
                finish(self, sealed)
            else:
                with self.guard.lock():
                    self.guard.check()
                    finish(self, sealed)
        except BaseException:
            self.sealed, self._finish = False, finish  # so that an interrupted caller can abort it
            raise
        self._views = ()
        again_if_interrupted(self._tell)
        return True

    def _tell(self) -> None:
        """Call the end callbacks; each again if it was interrupted."""
        for told in self.on_end:
            told(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()
