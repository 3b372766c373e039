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

import numpy as np
import numpy.typing as npt

from kvtide.tiers.shared.resp import ValkeyRefused, command
from kvtide.tiers.shared.valkey_client import ValkeyClient, ValkeyCommand, checked, moves

__all__ = ["HashLookup", "Script", "ScriptCall", "ScriptRunner", "ValkeyScripts"]


@dataclass(frozen=True)
class Script:
    """A script in Lua. ``KEYS[1]`` decides which server runs it."""

    name: str
    text: str

    @functools.cached_property
    def digest(self) -> bytes:
        return hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest().encode()


@dataclass(frozen=True)
class HashLookup:
    """Reads fields of many hashes. It is called like a script and is none: a server runs so many HGET in about half the
    time, because each call from Lua to the server takes longer than what it does.

    The argument is items: the end of a hash's key, of ``suffix`` bytes, then a field, of ``field`` bytes. The reply has
    a byte for each, the length of its value in units of ``unit`` bytes, 0 if there is none; then all values.
    """

    name: str
    suffix: int
    field: int
    unit: int

    def command(self, key: bytes, items: bytes) -> ValkeyCommand:
        rows = np.frombuffer(items, np.uint8).reshape(-1, self.suffix + self.field)
        form, suffix, field = self._form(key)
        words = np.empty((len(rows), len(form)), np.uint8)
        words[:] = form
        words[:, suffix : suffix + self.suffix] = rows[:, : self.suffix]
        words[:, field : field + self.field] = rows[:, self.suffix :]
        return ValkeyCommand(key, [words.tobytes()], values=len(rows), unit=self.unit)

    @functools.lru_cache(maxsize=256)  # noqa: B019 - there are few lookups, and each is for ever
    def _form(self, key: bytes) -> tuple[npt.NDArray[np.uint8], int, int]:
        """A command with zeros in place of suffix and field, and where these begin."""
        before = b"*3\r\n$4\r\nHGET\r\n$%d\r\n%b" % (len(key) + self.suffix, key)
        between = b"\r\n$%d\r\n" % self.field
        form = before + bytes(self.suffix) + between + bytes(self.field) + b"\r\n"
        return np.frombuffer(form, np.uint8), len(before), len(before) + self.suffix + len(between)

    def packed(self, values: Any) -> Any:
        """The reply from the values."""
        if isinstance(values, ValkeyRefused):
            return values
        lengths = [size // self.unit for size in map(len, values)]
        if max(lengths) > 255 or sum(lengths) * self.unit != sum(map(len, values)):
            # Somebody else wrote one: it counts as none, and must not spoil the others.
            return self.packed([v if not len(v) % self.unit and len(v) <= 255 * self.unit else b"" for v in values])
        return bytes(lengths) + b"".join(values)


class ScriptCall(NamedTuple):
    """A script to be run about one key."""

    script: Script | HashLookup
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
        replies = self._client.ask([_command(c) for c in calls], end)
        for i, call in enumerate(calls):
            if isinstance(call.script, HashLookup):
                replies[i] = call.script.packed(replies[i])
        # All that follow the first unknown one of a server are unknown to it too, unless they are of another script:
        # so calls of one script keep their order.
        unknown = [i for i, reply in enumerate(replies) if _is(reply, "NOSCRIPT")]
        if unknown:
            for i, reply in zip(
                unknown, self._client.ask([_command(calls[i], b"EVAL") for i in unknown], end), strict=True
            ):
                replies[i] = reply
        for reply in replies:
            if moves(reply):
                raise OSError(errno.EAGAIN, "Valkey moves these keys from one server to another")
            checked(reply)
        return replies

    def close(self) -> None:
        self._client.close()


def _command(call: ScriptCall, verb: bytes = b"EVALSHA") -> ValkeyCommand:
    script = call.script
    if isinstance(script, HashLookup):
        return script.command(call.key, *call.arguments)
    known = script.digest if verb == b"EVALSHA" else script.text.encode()
    parts = command(verb, known, b"1", call.key, *call.arguments)
    return ValkeyCommand(call.key, [b"".join(parts)])  # many small parts would be many system calls


def _is(reply: Any, word: str) -> bool:
    return isinstance(reply, ValkeyRefused) and reply.startswith(word)
