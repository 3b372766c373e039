"""Infers the number of tokens per block of a trace from the lengths of its prompts.

A prompt of L tokens has n blocks of B tokens: L / B rounded up if the trace includes a last block that is not full, or
rounded down if it does not. Both together mean L / (n + 1) < B < L / (n - 1). So each request limits B from below and
from above, and all requests together leave very few sizes: long prompts leave one.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtide.errors import TraceError

__all__ = ["BlockTokenSizes", "full_blocks"]

_LARGEST = 1 << 20


def full_blocks(tokens: int, named: int, block_tokens: int) -> int | None:
    """How many of the ``named`` blocks of a prompt are full. None if that number is impossible for this size."""
    full = tokens // block_tokens
    return full if named in (full, -(-tokens // block_tokens)) else None


def _limits(tokens: int, named: int) -> tuple[int, int]:
    """The minimum and maximum tokens of a block of such a prompt."""
    least = tokens // (named + 1) + 1
    if named > 1:
        return least, (tokens - 1) // (named - 1)
    return least, _LARGEST if tokens or not named else 0


@dataclass(slots=True)
class BlockTokenSizes:
    """The sizes that fit all requests seen so far, from ``least`` to ``most``."""

    least: int = 1
    most: int = _LARGEST

    def __str__(self) -> str:
        return _span(self.least, self.most)

    def see(self, where: str, tokens: int, named: int) -> None:
        """Add a request, read at ``where``. Raises ``TraceError`` if no size fits it and the requests before."""
        least, most = _limits(tokens, named)
        if least > most:
            raise TraceError(
                f"{where}: a prompt of input_length {tokens} cannot have {named} hash_ids, whatever the size of a block"
            )
        if max(least, self.least) > min(most, self.most):
            raise TraceError(
                f"{where}: input_length {tokens} with {named} hash_ids means blocks of {_span(least, most)} tokens, "
                f"but the lines before it mean {self}: a trace must have one size of block; replay "
                f"the requests of each size on their own"
            )
        self.least, self.most = max(least, self.least), min(most, self.most)

    def choose(self, where: str, usual: int) -> int:
        """The size: the format's usual one if it fits, else the only one that does, with a preference for powers of
        two."""
        if self.least <= usual <= self.most:
            return usual
        powers = [1 << n for n in range(_LARGEST.bit_length()) if self.least <= 1 << n <= self.most]
        pages = range(-(-self.least // 16) * 16, min(self.most, self.least + 64) + 1, 16)
        every = range(self.least, self.most + 1)
        fitting = next(some for some in (powers, pages, every) if some)
        if len(fitting) == 1:
            return fitting[0]
        raise TraceError(
            f"{where}: the lengths of the prompts allow blocks of {self} tokens; "
            "say how many a block has with --block-tokens"
        )


def _span(least: int, most: int) -> str:
    if most == _LARGEST:
        return f"{least} or more"
    return f"{least}" if least == most else f"{least} to {most}"
