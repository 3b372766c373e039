"""The two rights: a Lease to read, a Reservation to write.

Both belong to a session and end with it. They stand in place of reference counts and begin/complete pairs: what
must be undone is in one object, and ``with`` undoes it.
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
from kvtide.interrupts import to_the_end

__all__ = ["Lease", "Reservation", "Watch"]

_NONE: Rows = np.empty(0, np.int64)


class Watch(weakref.ref["Lease | Reservation"]):
    """Is put into ``abandoned`` when a right is forgotten that was not given back, because the thread that was about to
    get it was interrupted. Whoever next takes the index's lock ends what has that number.

    A ``__del__`` of the right could be interrupted itself, before its first line, and nobody would know. The callback
    of a weak reference that is not written in Python cannot. Keep the watch as long as the right has not ended.
    """

    number = 0

    @classmethod
    def over(cls, right: Lease | Reservation, number: int, abandoned: deque[Watch]) -> Watch:
        watch = cls(right, abandoned.append)  # it is called with the watch itself
        watch.number = number
        return watch


class Lease:
    """The right to read blocks: while it lasts they are evicted from no tier. Release from any thread, once or more."""

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
        """Give the right back. Views made under it must not be used any more."""
        if self._number:
            self._release(self._number)
            # Not before: a release that is interrupted can be repeated.
            self._number, self._rows = 0, _NONE

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class Reservation:
    """The right to write blocks: a slot each, filled through ``views`` and then sealed, or aborted.

    Until ``seal`` nobody can read the blocks; they are PENDING. Leaving the ``with`` block without sealing
    aborts. ``keys`` are those that were granted: blocks that are here already, for which there was no room, or that
    two others are writing are not among them. Of two writers of a block the first who seals wins.
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
        """``finish`` may be called again if it was interrupted. ``serial`` is what its store knows it by."""
        self.serial = serial
        self.keys = keys
        self.rows = rows
        self._views = views
        self.on_views: Callable[[Reservation], None] | None = None
        """Told when somebody gets the views: then he may write into them though he forgets the reservation."""
        self.depths = depths
        """The number, in its prompt, of each block that was granted."""
        self.generations = generations
        self._finish: Callable[[Reservation, bool], None] | None = finish
        self.origin = forks.here
        self.sealed = False
        self.followed = False
        """Whether another one goes on with the same prompt."""
        self.kept: list[tuple[Rows, int]] = []
        """Earlier blocks that stay as long, with the bytes of each."""
        self.refused = 0
        """Blocks that are not here, and for which there was no room."""
        self.later = 0
        """Of those refused: blocks for which memory is just being taken. Ask again."""
        self.pending = 0
        """Blocks that are not here yet: two others write them already, and may be slow, or never end."""
        self.on_end: list[Callable[[Reservation], None]] = []
        self.guard: CallGuard | None = None
        """What must be open while slots change hands."""

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
        """Everything is written: let others read it."""
        if not self._end(sealed=True):
            raise RightError("this reservation was sealed or aborted before; reserve again")

    def abort(self) -> None:
        """Give the slots back unused. Does nothing to a reservation that has ended."""
        self._end(sealed=False)

    def _end(self, sealed: bool) -> bool:
        finish, self._finish = self._finish, None
        if finish is None:
            return False
        if self.origin is not forks.here:  # the slots are our parent's, and it still fills them
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
            self.sealed, self._finish = False, finish  # so that whoever was interrupted here can abort it
            raise
        self._views = ()
        to_the_end(self._tell)
        return True

    def _tell(self) -> None:
        """Call those who wait for the end, and each once more if it was interrupted."""
        for told in self.on_end:
            told(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()
