"""From tokens to text as they come: whole characters, and never a part of a stop string.

A token may be a part of a character, so text is held back while its last character is incomplete. The text of a token
may depend on the one before it (a space at the start of a word), so a few tokens are decoded together, and what was
known before is cut off. Text that may be the beginning of a stop string is held back too, until it is or is not.

Streamed or not, an answer is made of the same pieces, so both are the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["Decoder", "Stops"]

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Decoder:
    """Tokens in, whole characters out."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._told: list[int] = []
        """The tokens whose text was told last: the next token's text may depend on them."""
        self._held: list[int] = []
        """Tokens after those, whose text is not told yet."""

    def put(self, token: int) -> str:
        """The text that is known now."""
        self._held.append(token)
        text = self._rest()
        if not text or text.endswith(_INCOMPLETE):
            return ""
        self._told, self._held = self._held, []
        return text

    def end(self) -> str:
        """What was held back. A character that stays incomplete is told as a replacement character."""
        return self._rest()

    def _rest(self) -> str:
        return self._decode(self._told + self._held)[len(self._decode(self._told)) :]


class Stops:
    """Text in; out comes what stands before the first stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.met = False

    def put(self, text: str) -> str:
        """What can be told now, whatever follows."""
        if self.met:
            return ""
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        self.met = bool(found)
        # The one that is complete first, so that it does not matter in which pieces the text came.
        return self._take(min(found)[1] if found else len(self._held) - self._doubtful())

    def end(self) -> str:
        """What was held back, if no stop string came."""
        return "" if self.met else self._take(len(self._held))

    def _take(self, length: int) -> str:
        told, self._held = self._held[:length], self._held[length:]
        return told

    def _doubtful(self) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        most = max(map(len, self._stops), default=1) - 1
        for length in range(min(most, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
