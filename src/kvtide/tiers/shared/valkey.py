"""Blobs in Valkey, or any server with the same protocol: for small blocks that many hosts want often.

A blob is one value. It is always whole, since a command is executed only when all of it has arrived. The server itself
evicts what does not fit into its memory, least recently used first. So the one required setting is its memory limit: a
server without a limit, or one that refuses writes at its limit, is not used.

A blob that is being migrated from one server of a cluster to another is a miss. Commands may be executed twice
(valkey_client.py): all these are idempotent.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext

from kvtide.block import Span
from kvtide.tiers.shared.blobs import Turn
from kvtide.tiers.shared.resp import command
from kvtide.tiers.shared.valkey_client import Login, UnfitServer, ValkeyClient, ValkeyCommand, checked, moves

__all__ = ["Valkey"]


class Valkey:
    """The values of the server or cluster at ``url``: ``valkey://host:6379/0``, or ``valkeys://`` for TLS.

    Their keys begin with ``folder``. ``password_file`` has the password of ``user``. ``certificate`` is a file with the
    authority to trust for the server, ``identity`` one with a client certificate and its key. With ``ttl`` a blob
    expires that many seconds after it was written. Thread-safe.

    Raises TierError if the server was reached and cannot be used. If it was not reached, it is tried again when needed.
    """

    def __init__(
        self,
        url: str,
        *,
        folder: str = "kvtide",
        user: str = "",
        password_file: str = "",
        certificate: str = "",
        identity: str = "",
        ttl: float = 0.0,
    ) -> None:
        self._prefix = f"{folder}:".encode()
        self._ttl = ttl
        self._client = ValkeyClient(
            url,
            Login(user, password_file, certificate, identity),
            lambda about: _check_memory(about, bool(ttl)),
            "all its blocks are misses",
        )

    def __repr__(self) -> str:
        return f"<Valkey {self._client.host[0]}:{self._client.host[1]}>"

    def __str__(self) -> str:
        return f"Valkey at {self._client.host[0]}:{self._client.host[1]}"

    # -- the contract of blobs ----------------------------------------------------------------------------

    def read(self, batch: Sequence[tuple[str, Sequence[Span]]], timeout: float) -> list[int]:
        commands = [
            ValkeyCommand(key, command(b"GET", key), spans) for name, spans in batch for key in [self._key(name)]
        ]
        return [-1 if moves(r) else checked(r) for r in self._client.ask(commands, time.monotonic() + timeout)]

    def read_part(self, name: str, into: Span, offset: int, timeout: float) -> int:
        key = self._key(name)
        part = command(b"GETRANGE", key, b"%d" % offset, b"%d" % (offset + len(into) - 1))
        commands = [ValkeyCommand(key, part, [into]), ValkeyCommand(key, command(b"EXISTS", key))]
        count, there = self._client.ask(commands, time.monotonic() + timeout)
        return -1 if moves(count) or moves(there) or not checked(there) else checked(count)

    def write(
        self, batch: Sequence[tuple[str, Sequence[Span]]], timeout: float, turn: Turn = nullcontext
    ) -> list[bool]:
        with turn():
            self._write(batch, time.monotonic() + timeout)
        return [True] * len(batch)

    def _write(self, batch: Sequence[tuple[str, Sequence[Span]]], end: float) -> None:
        # Existing blobs are not sent again, but count as used.
        there = self._each(b"TOUCH", [name for name, _ in batch], end)
        life = (b"PX", b"%d" % (1000 * self._ttl)) if self._ttl else ()
        commands = [
            ValkeyCommand(key, command(b"SET", key, spans, *life))
            for (name, spans), found in zip(batch, there, strict=True)
            for key in [self._key(name)]
            if not found
        ]
        for reply in self._client.ask(commands, end):
            checked(reply)

    def create(self, name: str, data: bytes, timeout: float) -> bool:
        key = self._key(name)
        commands = [ValkeyCommand(key, command(b"SET", key, data, b"NX"))]
        return checked(self._client.ask(commands, time.monotonic() + timeout)[0]) is not None

    def find(self, names: Sequence[str], timeout: float) -> list[bool]:
        return self._each(b"EXISTS", names, time.monotonic() + timeout)

    def delete(self, names: Sequence[str], timeout: float) -> None:
        self._each(b"UNLINK", names, time.monotonic() + timeout)

    def _key(self, name: str) -> bytes:
        return self._prefix + name.encode()

    def _each(self, verb: bytes, names: Sequence[str], end: float) -> list[bool]:
        """The results of a command that takes a key and counts those that exist."""
        commands = [ValkeyCommand(key, command(verb, key)) for key in map(self._key, names)]
        return [checked(reply) == 1 for reply in self._client.ask(commands, end)]

    def tidy(self, age: float, timeout: float, alive: Callable[[], None]) -> tuple[int, int]:
        """There is nothing unfinished: a blob is one command."""
        return 0, 0

    def close(self) -> None:
        self._client.close()

    def list(self, timeout: float, prefix: str = "") -> Iterator[tuple[str, int, float]]:
        """As in ``Blobs``, but the time when a blob was written is not known: 0."""
        end = time.monotonic() + timeout
        for address in self._client.servers(end):
            cursor = b"0"
            while True:
                scan = command(b"SCAN", cursor, b"MATCH", self._key(prefix) + b"*", b"COUNT", b"1000")
                cursor, keys = checked(self._client.exchange(address, [ValkeyCommand(b"", scan)], end)[0])
                sizes = self._client.exchange(
                    address, [ValkeyCommand(key, command(b"STRLEN", key)) for key in keys], end
                )
                for key, size in zip(keys, sizes, strict=True):
                    if isinstance(size, int):
                        yield key[len(self._prefix) :].decode(), size, 0.0
                if cursor == b"0":
                    break


def _check_memory(about: Mapping[str, str], expires: bool) -> None:
    """Raise unless the server has a memory limit and evicts by recency or frequency of use."""
    policy = about.get("maxmemory_policy", "")
    advice = "set maxmemory-policy to allkeys-lru in its configuration"
    if about.get("maxmemory", "0") == "0":
        raise UnfitServer(
            errno.EINVAL, f"it has no limit of memory: set maxmemory to what it may take, and {advice[4:]}"
        )
    if not policy.endswith(("-lru", "-lfu")):
        raise UnfitServer(errno.EINVAL, f"its maxmemory-policy is {policy}, which does not evict by use: {advice}")
    if policy.startswith("volatile") and not expires:
        raise UnfitServer(
            errno.EINVAL,
            f"its maxmemory-policy is {policy}, which evicts only what expires: set valkey.ttl, or {advice}",
        )
