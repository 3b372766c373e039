"""The blocks that one session has pinned, and the bytes charged for them.

A pin ends when its session unpins the block, when the session ends, or when the block is removed (dropped, expired,
forgotten, or lost with its tier), whichever comes first. The charge is kept here, with the pin, so that both end
together: the index ends a removed row's pins itself, and a later ``unpin`` finds nothing.
"""

from __future__ import annotations

from itertools import islice

__all__ = ["PinCharge", "Pins"]


class PinCharge:
    """Bytes pinned by all sessions that share this charge. Changed with the lock of one index held."""

    __slots__ = ("nbytes",)

    def __init__(self) -> None:
        self.nbytes = 0


class Pins:
    """The pins of one session. All methods are called by the index, with its lock held."""

    __slots__ = ("_counts", "_sizes", "charge", "nbytes")

    def __init__(self, charge: PinCharge | None = None) -> None:
        """``charge`` also counts the bytes that several sessions pin together."""
        self._counts: dict[int, int] = {}
        """Number of pins, by row."""
        self._sizes: dict[int, int] = {}
        """Bytes charged, by row; once, however often it is pinned."""
        self.nbytes = 0
        """Bytes of all pinned rows."""
        self.charge = charge or PinCharge()

    def __repr__(self) -> str:
        return f"<Pins of {len(self._counts)} blocks, {self.nbytes} bytes>"

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, row: int) -> bool:
        return row in self._counts

    def count(self, row: int) -> int:
        """Number of pins of a row."""
        return self._counts.get(row, 0)

    def some(self, most: int) -> list[int]:
        """Some of the pinned rows, ``most`` at most."""
        return list(islice(self._counts, most))

    def add(self, row: int, nbytes: int) -> bool:
        """Add a pin; returns whether it is the row's first."""
        count = self._counts.get(row, 0)
        self._counts[row] = count + 1
        if count:
            return False
        self._sizes[row] = nbytes
        self._charge(nbytes)
        return True

    def take(self, row: int) -> bool:
        """Remove a pin; returns whether it was the row's last."""
        self._counts[row] -= 1
        if self._counts[row]:
            return False
        self.end(row)
        return True

    def end(self, row: int) -> None:
        """End all pins of a row, if any are left. An interrupted caller can repeat it."""
        self._counts.pop(row, None)
        self._charge(-self._sizes.pop(row, 0))

    def move(self, row: int, to: int) -> None:
        """Transfer the pins of one row to another."""
        if row in self._counts:
            self._counts[to], self._sizes[to] = self._counts.pop(row), self._sizes.pop(row)

    def repair(self) -> list[int]:
        """Recompute the sums after a change was left half done. Returns the pinned rows."""
        for row in [row for row, count in self._counts.items() if count < 1 or row not in self._sizes]:
            del self._counts[row]
        self._sizes = {row: size for row, size in self._sizes.items() if row in self._counts}
        self._charge(sum(self._sizes.values()) - self.nbytes)
        return list(self._counts)

    def _charge(self, nbytes: int) -> None:
        # Both in one statement without a call, so that no interrupt can come in between.
        self.nbytes, self.charge.nbytes = self.nbytes + nbytes, self.charge.nbytes + nbytes
