"""The two rights: a Lease to read, a Reservation to write.

Both belong to a session and end with it. They stand in place of reference counts and begin/complete pairs: what
must be undone is in one object, and ``with`` undoes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Self

import numpy as np

from kvtide.block import BlockKey, Span
from kvtide.errors import RightError
from kvtide.index.index import Rows

__all__ = ["Lease", "Reservation"]

_NONE: Rows = np.empty(0, np.int64)


class Lease:
    """The right to read blocks: while it lasts they are evicted from no tier. Release from any thread, once or more."""

    __slots__ = ("_release", "_rows")

    def __init__(self, release: Callable[[Rows], None], rows: Rows) -> None:
        self._release = release
        self._rows = rows

    def __repr__(self) -> str:
        return f"<Lease {len(self._rows)} blocks>"

    @property
    def rows(self) -> Rows:
        return self._rows

    def release(self) -> None:
        """Give the right back. Views made under it must not be used any more."""
        rows, self._rows = self._rows, _NONE
        if len(rows):
            self._release(rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class Reservation:
    """The right to write blocks: a slot each, filled through ``views`` and then sealed, or aborted.

    Until ``seal`` nobody can read the blocks; they are PENDING. Leaving the ``with`` block without sealing
    aborts. ``keys`` are those that were granted: blocks that are here already, or for which there was no room,
    are not among them.
    """

    __slots__ = (
        "_finish",
        "depths",
        "door",
        "followed",
        "generations",
        "kept",
        "keys",
        "on_end",
        "refused",
        "rows",
        "sealed",
        "views",
    )

    def __init__(
        self,
        keys: Sequence[BlockKey],
        rows: Rows,
        views: Sequence[Span],
        depths: Sequence[int],
        generations: Sequence[int],
        finish: Callable[[Reservation, bool], None],
    ) -> None:
        self.keys = keys
        self.rows = rows
        self.views = views
        self.depths = depths
        """The number, in its prompt, of each block that was granted."""
        self.generations = generations
        self._finish: Callable[[Reservation, bool], None] | None = finish
        self.sealed = False
        self.followed = False
        """Whether another one goes on with the same prompt."""
        self.kept: list[tuple[Rows, int]] = []
        """Earlier blocks that stay as long, with the bytes of each."""
        self.refused = 0
        """Blocks that are not here, and for which there was no room."""
        self.on_end: list[Callable[[Reservation], None]] = []
        self.door: AbstractContextManager[object] = nullcontext()
        """What must be open while slots change hands."""

    def __repr__(self) -> str:
        return f"<Reservation {len(self.keys)} blocks{'' if self.open else ', ended'}>"

    @property
    def open(self) -> bool:
        return self._finish is not None

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
        self.sealed = sealed
        with self.door:
            finish(self, sealed)
        self.views = ()
        for told in self.on_end:
            told(self)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()
