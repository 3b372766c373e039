"""What one session has pinned, and what it is charged for that.

A pin ends when its session unpins the block, when the session ends, or when the block is removed (dropped, expired,
forgotten, or lost with its tier), whichever comes first. The charge is kept here, with the pin, so that the two cannot
end apart: the index ends a removed row's pins itself, and a later ``unpin`` finds nothing.
"""

from __future__ import annotations

from itertools import islice

__all__ = ["PinCharge", "Pins"]


class PinCharge:
    """Bytes that are pinned, by all sessions that share this charge. Changed under the lock of one index."""

    __slots__ = ("nbytes",)

    def __init__(self) -> None:
        self.nbytes = 0


class Pins:
    """The pins of one session. Everything is called by the index, under its lock."""

    __slots__ = ("_counts", "_sizes", "charge", "nbytes")

    def __init__(self, charge: PinCharge | None = None) -> None:
        """``charge``: what several sessions pin together is counted there too."""
        self._counts: dict[int, int] = {}
        """By row: how often it is pinned."""
        self._sizes: dict[int, int] = {}
        """By row: the bytes that it is charged for; once, however often it is pinned."""
        self.nbytes = 0
        """Bytes of all rows that are pinned."""
        self.charge = charge or PinCharge()

    def __repr__(self) -> str:
        return f"<Pins of {len(self._counts)} blocks, {self.nbytes} bytes>"

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, row: int) -> bool:
        return row in self._counts

    def count(self, row: int) -> int:
        """How often a row is pinned."""
        return self._counts.get(row, 0)

    def some(self, most: int) -> list[int]:
        """Some of the rows that are pinned, ``most`` at most."""
        return list(islice(self._counts, most))

    def add(self, row: int, nbytes: int) -> bool:
        """One pin more; answers whether it is the row's first."""
        count = self._counts.get(row, 0)
        self._counts[row] = count + 1
        if count:
            return False
        self._sizes[row] = nbytes
        self._charge(nbytes)
        return True

    def take(self, row: int) -> bool:
        """One pin less; answers whether it was the row's last."""
        self._counts[row] -= 1
        if self._counts[row]:
            return False
        self.end(row)
        return True

    def end(self, row: int) -> None:
        """End all pins of a row, if there are any left: whoever was interrupted here comes again."""
        self._counts.pop(row, None)
        self._charge(-self._sizes.pop(row, 0))

    def move(self, row: int, to: int) -> None:
        """What was pinned in one row is in another now."""
        if row in self._counts:
            self._counts[to], self._sizes[to] = self._counts.pop(row), self._sizes.pop(row)

    def repair(self) -> list[int]:
        """After a change was left half done: make the sums anew. Answers the rows that are pinned."""
        for row in [row for row, count in self._counts.items() if count < 1 or row not in self._sizes]:
            del self._counts[row]
        self._sizes = {row: size for row, size in self._sizes.items() if row in self._counts}
        self._charge(sum(self._sizes.values()) - self.nbytes)
        return list(self._counts)

    def _charge(self, nbytes: int) -> None:
        # Both at once, without a call in between: nobody can be interrupted after the first.
        self.nbytes, self.charge.nbytes = self.nbytes + nbytes, self.charge.nbytes + nbytes
