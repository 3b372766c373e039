"""Blobs in Valkey, or any server with the same protocol: for small blocks that many hosts want often.

A blob is one value. It is always whole, since a command is executed only when all of it has arrived. The server itself
evicts what does not fit into its memory, least recently used first. So the one required setting is its memory limit: a
server without a limit, or one that refuses writes at its limit, is not used.

Commands for many blobs are pipelined. In a cluster each goes to the server that has the blob's slot. When a slot has
moved, or its server is gone, the slot table is fetched once more; a blob that is being migrated from one server to
another is a miss. Connections are kept, one for each thread that needs one at a time. An idle connection may have died
with its server, so the command is retried on a new one: all these commands are idempotent.
"""

from __future__ import annotations

import binascii
import errno
import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from kvtide import forks
from kvtide.block import Span
from kvtide.errors import ConfigError, TierError
from kvtide.security.secret_file import read_secret
from kvtide.tiers.shared.blobs import Turn
from kvtide.tiers.shared.resp import Part, ValkeyConnection, ValkeyRefused, command

__all__ = ["Valkey"]

log = logging.getLogger("kvtide.valkey")

Address: TypeAlias = tuple[str, int]

_SLOTS = 16_384
_OPENING = 5.0
"""Seconds for the first connection to the server."""
_SCHEMES = {"valkey": False, "redis": False, "valkeys": True, "rediss": True}
"""Whether each scheme means TLS."""
_MOVING = ("MOVED", "ASK", "TRYAGAIN")


class _Command(NamedTuple):
    key: bytes
    parts: Sequence[Part]
    into: Sequence[Span] | None = None
    """Buffers for the value in the reply; None: the reply is small."""


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
        self._session_host, self._database, tls = _parse(url)
        self._prefix = f"{folder}:".encode()
        self._tls = _context(certificate, identity) if tls else None
        self._login = _login(user, password_file)
        self._ttl = ttl
        self._lock = threading.Lock()
        self._idle: dict[Address, list[ValkeyConnection]] = {}
        forks.tell(self)
        self._slots: list[Address] | None = None
        """The server of each slot; None: not a cluster, or not known yet."""
        try:
            self._give(self._session_host, self._connect(self._session_host, time.monotonic() + _OPENING))
        except _Unfit as e:
            raise TierError(f"Valkey at {self._session_host[0]}:{self._session_host[1]}: {e.strerror}") from e
        except OSError as e:
            log.warning(
                "Valkey at %s:%d cannot be reached yet (%s); all its blocks are misses until then",
                *self._session_host,
                e,
            )

    def __repr__(self) -> str:
        return f"<Valkey {self._session_host[0]}:{self._session_host[1]}>"

    # -- the contract of blobs ----------------------------------------------------------------------------

    def read(self, batch: Sequence[tuple[str, Sequence[Span]]], timeout: float) -> list[int]:
        commands = [_Command(key, command(b"GET", key), spans) for name, spans in batch for key in [self._key(name)]]
        return [-1 if _moves(r) else _checked(r) for r in self._ask(commands, time.monotonic() + timeout)]

    def read_part(self, name: str, into: Span, offset: int, timeout: float) -> int:
        key = self._key(name)
        part = command(b"GETRANGE", key, b"%d" % offset, b"%d" % (offset + len(into) - 1))
        commands = [_Command(key, part, [into]), _Command(key, command(b"EXISTS", key))]
        count, there = self._ask(commands, time.monotonic() + timeout)
        return -1 if _moves(count) or _moves(there) or not _checked(there) else _checked(count)

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
            _Command(key, command(b"SET", key, spans, *life))
            for (name, spans), found in zip(batch, there, strict=True)
            for key in [self._key(name)]
            if not found
        ]
        for reply in self._ask(commands, end):
            _checked(reply)

    def create(self, name: str, data: bytes, timeout: float) -> bool:
        key = self._key(name)
        commands = [_Command(key, command(b"SET", key, data, b"NX"))]
        return _checked(self._ask(commands, time.monotonic() + timeout)[0]) is not None

    def find(self, names: Sequence[str], timeout: float) -> list[bool]:
        return self._each(b"EXISTS", names, time.monotonic() + timeout)

    def delete(self, names: Sequence[str], timeout: float) -> None:
        self._each(b"UNLINK", names, time.monotonic() + timeout)

    def _key(self, name: str) -> bytes:
        return self._prefix + name.encode()

    def _each(self, verb: bytes, names: Sequence[str], end: float) -> list[bool]:
        """The results of a command that takes a key and counts those that exist."""
        commands = [_Command(key, command(verb, key)) for key in map(self._key, names)]
        return [_checked(reply) == 1 for reply in self._ask(commands, end)]

    def tidy(self, age: float, timeout: float, alive: Callable[[], None]) -> tuple[int, int]:
        """There is nothing unfinished: a blob is one command."""
        return 0, 0

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, {}
        for connection in (c for several in idle.values() for c in several):
            connection.close()

    def forked(self) -> None:
        idle, self._idle = self._idle, {}
        for connection in (c for several in idle.values() for c in several):
            connection.close()  # this process's copy; nothing is sent

    # -- choosing the server ------------------------------------------------------------------------------

    def _ask(self, commands: Sequence[_Command], end: float) -> list[Any]:
        """The replies, in the commands' order, from the servers that have their keys."""
        replies: list[Any] = [None] * len(commands)
        wanted = list(range(len(commands)))
        for last in (False, True):
            servers: dict[Address, list[int]] = {}
            for i in wanted:
                servers.setdefault(self._server(commands[i].key), []).append(i)
            wanted = []
            for address, mine in servers.items():
                try:
                    answers = self._exchange(address, [commands[i] for i in mine], end)
                except OSError as e:
                    if last or self._slots is None or isinstance(e, TimeoutError):
                        raise
                    wanted += mine  # a server of the cluster is gone: another may have its slots
                    continue
                for i, answer in zip(mine, answers, strict=True):
                    replies[i] = answer
                    if isinstance(answer, ValkeyRefused) and answer.startswith("MOVED"):
                        wanted.append(i)
            if last or not wanted:
                break
            self._learn(end)
        return replies

    def _server(self, key: bytes) -> Address:
        slots = self._slots
        return self._session_host if slots is None else slots[binascii.crc_hqx(key, 0) % _SLOTS]

    def _servers(self, end: float) -> list[Address]:
        info = _facts(_checked(self._exchange(self._session_host, [_Command(b"", command(b"INFO"))], end)[0]))
        if info.get("cluster_enabled") != "1":
            return [self._session_host]
        return sorted(set(self._learn(end)))

    def _learn(self, end: float) -> list[Address]:
        """Fetch the slot table from the first known server that answers."""
        known = [self._session_host, *sorted(set(self._slots or ()) - {self._session_host})]
        for address in known:
            try:
                reply = self._exchange(address, [_Command(b"", command(b"CLUSTER", b"SLOTS"))], end)[0]
            except OSError:
                if address == known[-1]:
                    raise
                continue
            slots = [self._session_host] * _SLOTS
            for first, last, (host, port, *_), *_ in _checked(reply):
                slots[first : last + 1] = [(host.decode() if host else address[0], port)] * (last + 1 - first)
            self._slots = slots
            return slots
        raise AssertionError("home is always known")

    # -- connections --------------------------------------------------------------------------------------

    def _exchange(self, address: Address, commands: Sequence[_Command], end: float) -> list[Any]:
        """The replies of one server."""
        while True:
            with self._lock:
                idle = self._idle.get(address)
                connection = idle.pop() if idle else None
            fresh = connection is None
            try:
                connection = connection or self._connect(address, end)
                connection.send([part for c in commands for part in c.parts], end)
                replies = [connection.reply(end) if c.into is None else connection.fill(c.into, end) for c in commands]
            except BaseException as e:
                if connection is not None:
                    connection.close()
                if isinstance(e, TimeoutError):
                    raise TimeoutError(errno.ETIMEDOUT, "Valkey did not answer in time") from e
                if fresh or not isinstance(e, OSError):
                    raise
                self._forget(address)
            else:
                self._give(address, connection)
                return replies

    def _give(self, address: Address, connection: ValkeyConnection) -> None:
        with self._lock:
            self._idle.setdefault(address, []).append(connection)

    def _forget(self, address: Address) -> None:
        with self._lock:
            idle = self._idle.pop(address, [])
        for connection in idle:
            connection.close()

    def _connect(self, address: Address, end: float) -> ValkeyConnection:
        connection = ValkeyConnection(address, self._tls, end)
        try:
            if self._login:
                _checked(_call(connection, end, b"AUTH", *self._login))
            about = _facts(_checked(_call(connection, end, b"INFO")))
            _check_memory(about, bool(self._ttl))
            if about.get("cluster_enabled") == "1":
                if self._database:
                    raise _Unfit(errno.EINVAL, f"a cluster has no database {self._database}: end valkey.url with /0")
            elif self._database:
                _checked(_call(connection, end, b"SELECT", b"%d" % self._database))
        except BaseException:
            connection.close()
            raise
        return connection

    def list(self, timeout: float, prefix: str = "") -> Iterator[tuple[str, int, float]]:
        """As in ``Blobs``, but the time when a blob was written is not known: 0."""
        end = time.monotonic() + timeout
        for address in self._servers(end):
            cursor = b"0"
            while True:
                scan = command(b"SCAN", cursor, b"MATCH", self._key(prefix) + b"*", b"COUNT", b"1000")
                cursor, keys = _checked(self._exchange(address, [_Command(b"", scan)], end)[0])
                sizes = self._exchange(address, [_Command(key, command(b"STRLEN", key)) for key in keys], end)
                for key, size in zip(keys, sizes, strict=True):
                    if isinstance(size, int):
                        yield key[len(self._prefix) :].decode(), size, 0.0
                if cursor == b"0":
                    break


class _Unfit(OSError):  # noqa: N818 - a verdict
    """The server was reached, and cannot be used before an operator fixes it."""


def _call(connection: ValkeyConnection, end: float, *words: bytes) -> Any:
    connection.send(command(*words), end)
    return connection.reply(end)


def _moves(reply: Any) -> bool:
    return isinstance(reply, ValkeyRefused) and reply.startswith(_MOVING)


def _checked(reply: Any) -> Any:
    """The reply of a command that succeeded. Raises with one of few messages, since they are counted by message."""
    if not isinstance(reply, ValkeyRefused):
        return reply
    word = reply.split(" ", 1)[0]
    if word in ("NOAUTH", "WRONGPASS", "NOPERM"):
        raise _Unfit(errno.EACCES, f"it does not accept this user and password for that ({word})")
    if word == "OOM":
        raise OSError(errno.ENOSPC, "Valkey is full, and finds nothing to evict")
    raise OSError(errno.EIO, f"Valkey refused ({word})")


def _facts(info: bytes) -> dict[str, str]:
    lines = info.decode("utf-8", "replace").splitlines()
    return {name: value for name, mark, value in (line.partition(":") for line in lines) if mark}


def _check_memory(about: dict[str, str], expires: bool) -> None:
    """Raise unless the server has a memory limit and evicts by recency or frequency of use."""
    policy = about.get("maxmemory_policy", "")
    advice = "set maxmemory-policy to allkeys-lru in its configuration"
    if about.get("maxmemory", "0") == "0":
        raise _Unfit(errno.EINVAL, f"it has no limit of memory: set maxmemory to what it may take, and {advice[4:]}")
    if not policy.endswith(("-lru", "-lfu")):
        raise _Unfit(errno.EINVAL, f"its maxmemory-policy is {policy}, which does not evict by use: {advice}")
    if policy.startswith("volatile") and not expires:
        raise _Unfit(
            errno.EINVAL,
            f"its maxmemory-policy is {policy}, which evicts only what expires: set valkey.ttl, or {advice}",
        )


def _parse(url: str) -> tuple[Address, int, bool]:
    try:
        parts = urlsplit(url)
        database = int(parts.path.strip("/") or 0)
        tls = _SCHEMES[parts.scheme]
        if not parts.hostname or parts.query or parts.fragment:
            raise ValueError
        port = parts.port or 6379
    except (KeyError, ValueError):
        raise ConfigError(
            f"valkey.url is {url!r}; it must be valkey://HOST:PORT/DATABASE, or valkeys:// for TLS"
        ) from None
    if parts.username or parts.password:
        raise ConfigError(
            "valkey.url has a user or password in it, which would be shown: use valkey.user and valkey.password_file"
        )
    return (parts.hostname, port), database, tls


def _login(user: str, password_file: str) -> list[bytes]:
    if not password_file:
        if user:
            raise ConfigError(f"valkey.user is {user!r}, and valkey.password_file is not set: both are needed")
        return []
    harm = "read and delete whatever that storage has"
    password = read_secret("valkey.password_file", password_file, harm, "password").strip()
    return [user.encode(), password] if user else [password]


def _context(certificate: str, identity: str) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=certificate or None)
        if identity:
            context.load_cert_chain(identity)
    except (OSError, ssl.SSLError) as e:
        raise ConfigError(f"valkey.certificate or valkey.identity cannot be used: {e}") from e
    return context
