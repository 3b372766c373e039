"""Scripts that Valkey runs: many steps at one place, atomically, for one message.

A script is sent by its digest; a server that does not know it, because it was restarted, gets the text once more. Like
every command of the client, a script may be run twice.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kvtide.tiers.shared.resp import ValkeyRefused, command
from kvtide.tiers.shared.valkey_client import ValkeyClient, ValkeyCommand, checked, moves

__all__ = ["Script", "ScriptCall", "ScriptRunner", "ValkeyScripts"]


@dataclass(frozen=True)
class Script:
    """A script in Lua. ``KEYS[1]`` decides which server runs it."""

    name: str
    text: str

    @functools.cached_property
    def digest(self) -> bytes:
        return hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest().encode()


class ScriptCall(NamedTuple):
    """A script to be run about one key."""

    script: Script
    key: bytes
    arguments: tuple[bytes, ...] = ()


class ScriptRunner(Protocol):
    """Runs scripts. Thread-safe."""

    def run(self, calls: Sequence[ScriptCall], timeout: float) -> list[Any]:
        """The replies, in the order of the calls. Calls about one key are run in their order. Raises OSError if any
        was not answered in time, or refused; the others may have been run then."""

    def close(self) -> None: ...


class ValkeyScripts:
    """Runs scripts at a server or cluster."""

    def __init__(self, client: ValkeyClient) -> None:
        self._client = client

    def __repr__(self) -> str:
        return f"<ValkeyScripts {self._client!r}>"

    def run(self, calls: Sequence[ScriptCall], timeout: float) -> list[Any]:
        end = time.monotonic() + timeout
        replies = self._client.ask([_command(b"EVALSHA", c.script.digest, c) for c in calls], end)
        # All that follow the first unknown one of a server are unknown to it too, unless they are of another script:
        # so calls of one script keep their order.
        unknown = [i for i, reply in enumerate(replies) if _is(reply, "NOSCRIPT")]
        if unknown:
            texts = [_command(b"EVAL", calls[i].script.text.encode(), calls[i]) for i in unknown]
            for i, reply in zip(unknown, self._client.ask(texts, end), strict=True):
                replies[i] = reply
        for reply in replies:
            if moves(reply):
                raise OSError(errno.EAGAIN, "Valkey moves these keys from one server to another")
            checked(reply)
        return replies

    def close(self) -> None:
        self._client.close()


def _command(verb: bytes, script: bytes, call: ScriptCall) -> ValkeyCommand:
    parts = command(verb, script, b"1", call.key, *call.arguments)
    return ValkeyCommand(call.key, [b"".join(parts)])  # many small parts would be many system calls


def _is(reply: Any, word: str) -> bool:
    return isinstance(reply, ValkeyRefused) and reply.startswith(word)
