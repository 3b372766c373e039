"""By how much one policy is ahead of another, and whether that could be chance.

Two policies that serve the same requests differ in a few of them. The blocks of a prompt hit or miss together, so a
request, not a block, is one observation: the difference in its hits. The sum of the differences is the lead; the root
of the sum of their squares is its standard deviation if neither policy is better. Both are kept over several spans:
a short one notices soon that traffic has changed, and a long one sees a small lead that is lost in the noise of a
short one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["Lead"]

_DOUBT = 100.0
"""Added to the sum of squares: a few requests prove nothing, however equal they are."""


class Lead:
    """Hits of one policy beside those of another, request by request, over spans of memory. One thread."""

    __slots__ = ("_squares", "_sums")

    def __init__(self, spans: int) -> None:
        self._sums = [0.0] * spans
        self._squares = [0.0] * spans

    def add(self, difference: int, fades: Sequence[float]) -> None:
        """One request more; what was seen before counts less, in each span by its factor."""
        square = difference * difference
        for span, fade in enumerate(fades):
            self._sums[span] = self._sums[span] * fade + difference
            self._squares[span] = self._squares[span] * fade + square

    def hits(self, span: int) -> float:
        """How many hits it is ahead."""
        return self._sums[span]

    def deviations(self, span: int) -> float:
        """The same in standard deviations."""
        return self._sums[span] / math.sqrt(self._squares[span] + _DOUBT)
