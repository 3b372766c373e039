"""Incremental conversion of tokens to text: only whole characters, and never a part of a stop string.

A token may be a part of a character, so text is held back while its last character is incomplete. The text of a token
may depend on the one before it (a space at the start of a word), so a few tokens are decoded together, and the text
already known is cut off. Text that may be the beginning of a stop string is held back too, until that is decided.

Streamed and complete responses are made of the same pieces, so both have the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["Decoder", "Stops"]

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Decoder:
    """Decodes tokens to whole characters."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._told: list[int] = []
        """The last tokens whose text was returned: the next token's text may depend on them."""
        self._held: list[int] = []
        """Tokens after those, whose text was not returned yet."""

    def put(self, token: int) -> str:
        """The text that is complete now."""
        self._held.append(token)
        text = self._rest()
        if not text or text.endswith(_INCOMPLETE):
            return ""
        self._told, self._held = self._held, []
        return text

    def end(self) -> str:
        """The text held back. A character that stays incomplete becomes a replacement character."""
        return self._rest()

    def _rest(self) -> str:
        return self._decode(self._told + self._held)[len(self._decode(self._told)) :]


class Stops:
    """Passes text through up to the first stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.met = False

    def put(self, text: str) -> str:
        """The text that can be passed on, whatever follows."""
        if self.met:
            return ""
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        self.met = bool(found)
        # The stop string that ends first, so that the result does not depend on how the text was split.
        return self._take(min(found)[1] if found else len(self._held) - self._doubtful())

    def end(self) -> str:
        """The text held back, if there was no stop string."""
        return "" if self.met else self._take(len(self._held))

    def _take(self, length: int) -> str:
        ready, self._held = self._held[:length], self._held[length:]
        return ready

    def _doubtful(self) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        most = max(map(len, self._stops), default=1) - 1
        for length in range(min(most, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
