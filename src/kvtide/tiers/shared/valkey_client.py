"""A client of Valkey, or any server with the same protocol: one server or a cluster.

Commands are pipelined. In a cluster each goes to the server that has the slot of its key, and all servers work at the
same time. When a slot has moved, or its server is gone, the slot table is fetched once more; after a timeout, with
the next call and from another server. Connections are kept, one
for each thread that needs one at a time. An idle connection may have died with its server, so the command is retried on
a new one: a caller must only send commands that may be executed twice.
"""

from __future__ import annotations

import binascii
import contextlib
import errno
import functools
import itertools
import logging
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from kvtide import forks
from kvtide.block import Span
from kvtide.errors import ConfigError, TierError
from kvtide.security.secret_file import read_secret
from kvtide.tiers.shared.resp import Part, ValkeyConnection, ValkeyRefused, command, tls_reason

__all__ = ["SLOTS", "Login", "UnfitServer", "ValkeyClient", "ValkeyCommand", "checked", "moves", "slot_of"]

log = logging.getLogger("kvtide.valkey")

Address: TypeAlias = tuple[str, int]

SLOTS = 16_384
"""Slots of a cluster."""
_OPENING = 5.0
"""Seconds for the first connection to the server."""
_SCHEMES = {"valkey": False, "redis": False, "valkeys": True, "rediss": True}
"""Whether each scheme means TLS."""
_MOVING = ("MOVED", "ASK", "TRYAGAIN")
_DEMOTED = ("READONLY", "MASTERDOWN")
"""What a replica says: a server that was replaced by another one is one, as a rule, and keeps its connections."""


class ValkeyCommand(NamedTuple):
    """A command about one key; an empty key goes to no server in particular."""

    key: bytes
    parts: Sequence[Part]
    into: Sequence[Span] | None = None
    """Buffers for the value in the reply; None: the reply is small."""
    values: int = 0
    """If not 0, ``parts`` is so many commands about the key, and the reply the list of their values."""
    unit: int = 0
    """If not 0, ``values`` are multiples of so many bytes, as a rule."""


class Login(NamedTuple):
    """How to be let in; the fields are as in the settings that begin with ``prefix``, which errors name."""

    user: str = ""
    password_file: str = ""
    certificate: str = ""
    """The authority to trust for the server; empty: those of the system."""
    identity: str = ""
    """A client certificate and its key."""
    prefix: str = "valkey."
    url: str = "valkey.url"
    """The setting with the address."""
    harm: str = "read and delete whatever that storage has"
    """What who knows the password can do."""
    password: Callable[[], str] | None = None
    """Instead of ``password_file``. May raise ConfigError."""
    origin: str = ""
    """Where that password comes from, for errors."""
    forms: str = ""
    """What the setting with the address may be besides the address of a Valkey, for errors."""


class ValkeyClient:
    """The server or cluster at ``url``: ``valkey://host:6379/0``, or ``valkeys://`` for TLS. Thread-safe.

    ``check`` gets what ``INFO`` says of each server, by name, and raises UnfitServer if it cannot be used.

    Raises TierError if the server was reached and cannot be used. If it was not reached, it is tried again when needed.
    """

    def __init__(
        self,
        url: str,
        login: Login = Login(),  # noqa: B008 - a value
        check: Callable[[Mapping[str, str]], None] = lambda about: None,
        lost: str = "nothing is there",
    ) -> None:
        """``lost``: what holds while the server cannot be reached, for the log."""
        self.host, self._database, tls = _parse(url, login)
        self._setting = login.url
        self._tls = _context(login) if tls else None
        self._words = functools.partial(_words, login)
        self._origin = login.origin or f"see {login.prefix}user and {login.prefix}password_file"
        self._words()  # errors are reported now, and not at the first connection
        self._check = check
        self._lock = threading.Lock()
        self._idle: dict[Address, list[ValkeyConnection]] = {}
        forks.tell(self)
        self._slots: list[Address] | None = None
        """The server of each slot; None: not a cluster, or not known yet."""
        self._silent: Address | None = None
        """A server of the cluster that did not answer in time: another may have its slots by now."""
        try:
            self._give(self.host, self._connect(self.host, time.monotonic() + _OPENING))
        except UnfitServer as e:
            raise TierError(f"Valkey at {self.host[0]}:{self.host[1]}: {e.strerror}") from e
        except OSError as e:
            log.warning(
                "Valkey at %s:%d cannot be reached yet: %s; %s until then. Check that it runs, and %s",
                *self.host,
                e.strerror or e,
                lost,
                login.url,
            )

    def __repr__(self) -> str:
        return f"<ValkeyClient {self.host[0]}:{self.host[1]}>"

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

    def ask(self, commands: Sequence[ValkeyCommand], end: float) -> list[Any]:
        """The replies, in the commands' order, from the servers that have their keys."""
        if self._silent is not None:
            self._ask_others(end)
        replies: list[Any] = [None] * len(commands)
        wanted = list(range(len(commands)))
        for last in (False, True):
            servers: dict[Address, list[int]] = {}
            for i in wanted:
                servers.setdefault(self._server(commands[i].key), []).append(i)
            wanted = []
            batches = {address: [commands[i] for i in mine] for address, mine in servers.items()}
            with contextlib.ExitStack() as unread:
                sent = self._send_all(batches, end, unread) if len(batches) > 1 else {}
                for address, mine in servers.items():
                    try:
                        answers = self._finish(address, batches[address], sent.pop(address, None), end)
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

    def _send_all(
        self, batches: Mapping[Address, Sequence[ValkeyCommand]], end: float, unread: contextlib.ExitStack
    ) -> dict[Address, ValkeyConnection]:
        """Send each server its commands, where there is a connection, so that they work at the same time. ``unread``
        closes the connections whose replies nobody has read."""
        sent: dict[Address, ValkeyConnection] = {}
        unread.callback(_close_all, sent)
        for address, batch in batches.items():
            with self._lock:
                idle = self._idle.get(address)
                connection = idle.pop() if idle else None
            if connection is None:
                continue
            sent[address] = connection
            try:
                connection.send([part for c in batch for part in c.parts], end)
            except TimeoutError as e:
                raise self._late(address) from e
            except OSError:
                sent.pop(address).close()  # the batch is sent again, on a new connection
        return sent

    def _finish(
        self, address: Address, batch: Sequence[ValkeyCommand], sent: ValkeyConnection | None, end: float
    ) -> list[Any]:
        """The replies of one server, to what was ``sent`` if it was."""
        if sent is not None:
            try:
                replies = _replies(sent, batch, end)
            except TimeoutError as e:
                sent.close()
                raise self._late(address) from e
            except OSError:
                sent.close()
                self._forget(address)
            except BaseException:
                sent.close()
                raise
            else:
                self._give(address, sent, replies)
                return replies
        return self.exchange(address, batch, end)

    def _server(self, key: bytes) -> Address:
        slots = self._slots
        return self.host if slots is None else slots[slot_of(key)]

    @property
    def in_cluster(self) -> bool:
        """Whether it is known to be a cluster."""
        return self._slots is not None

    def servers(self, end: float) -> list[Address]:
        info = _facts(checked(self.exchange(self.host, [ValkeyCommand(b"", command(b"INFO"))], end)[0]))
        if info.get("cluster_enabled") != "1":
            return [self.host]
        return sorted(set(self._learn(end)))

    def _late(self, address: Address) -> TimeoutError:
        """The error of a server that did not answer in time."""
        if self._slots is not None:
            self._silent = address
        return TimeoutError(errno.ETIMEDOUT, "Valkey did not answer in time")

    def _ask_others(self, end: float) -> None:
        """Fetch the slot table from others than the server that was silent. When a whole host is gone, nothing but
        silence tells so, and the time of the call that noticed is over."""
        silent, self._silent = self._silent, None
        now = time.monotonic()
        with contextlib.suppress(OSError):
            self._learn(now + (end - now) / 2, silent)

    def _learn(self, end: float, silent: Address | None = None) -> list[Address]:
        """Fetch the slot table from the first known server that answers, other than ``silent``."""
        failure = OSError(errno.EHOSTUNREACH, "no other server of the cluster is known")
        known = [self.host, *sorted(set(self._slots or ()) - {self.host})]
        for address in known:
            if address == silent:
                continue
            try:
                reply = self.exchange(address, [ValkeyCommand(b"", command(b"CLUSTER", b"SLOTS"))], end)[0]
                self._slots = slots = _table(checked(reply), self.host, address[0])
            except OSError as e:
                failure = e
            else:
                return slots
        raise failure

    # -- connections --------------------------------------------------------------------------------------

    def exchange(self, address: Address, commands: Sequence[ValkeyCommand], end: float) -> list[Any]:
        """The replies of one server."""
        while True:
            with self._lock:
                idle = self._idle.get(address)
                connection = idle.pop() if idle else None
            fresh = connection is None
            try:
                connection = connection or self._connect(address, end)
                connection.send([part for c in commands for part in c.parts], end)
                replies = _replies(connection, commands, end)
            except BaseException as e:
                if connection is not None:
                    connection.close()
                if isinstance(e, TimeoutError):
                    raise self._late(address) from e
                if fresh or not isinstance(e, OSError):
                    raise
                self._forget(address)
            else:
                self._give(address, connection, replies)
                return replies

    def _give(self, address: Address, connection: ValkeyConnection, replies: Sequence[Any] = ()) -> None:
        """Keep a connection for the next call."""
        if any(isinstance(reply, ValkeyRefused) and reply.startswith(_DEMOTED) for reply in replies):
            connection.close()  # another server may have the address by now
            return
        with self._lock:
            self._idle.setdefault(address, []).append(connection)

    def _forget(self, address: Address) -> None:
        with self._lock:
            idle = self._idle.pop(address, [])
        for connection in idle:
            connection.close()

    def _connect(self, address: Address, end: float) -> ValkeyConnection:
        try:
            words = self._words()  # the password may have been replaced since the last connection
        except ConfigError as e:
            raise OSError(errno.EACCES, str(e)) from e
        connection = ValkeyConnection(address, self._tls, end)
        try:
            if words:
                checked(_call(connection, end, b"AUTH", *words))
            about = _facts(checked(_call(connection, end, b"INFO")))
            self._check(about)
            if about.get("cluster_enabled") == "1":
                if self._database:
                    text = f"a cluster has no database {self._database}: end {self._setting} with /0"
                    raise UnfitServer(errno.EINVAL, text)
            elif self._database:
                checked(_call(connection, end, b"SELECT", b"%d" % self._database))
        except UnfitServer as e:
            connection.close()
            if e.errno == errno.EACCES:
                raise UnfitServer(e.errno, f"{e.strerror}: {self._origin}") from e
            raise
        except BaseException:
            connection.close()
            raise
        return connection


class UnfitServer(OSError):  # noqa: N818 - a verdict
    """The server was reached, and cannot be used before an operator fixes it."""


def _call(connection: ValkeyConnection, end: float, *words: bytes) -> Any:
    connection.send(command(*words), end)
    return connection.reply(end)


def _close_all(connections: Mapping[Address, ValkeyConnection]) -> None:
    for connection in connections.values():
        connection.close()


def _replies(connection: ValkeyConnection, commands: Sequence[ValkeyCommand], end: float) -> list[Any]:
    replies: list[Any] = []
    for (several, unit), group in itertools.groupby(commands, lambda c: (c.values > 0, c.unit)):
        if several:
            replies += _values(connection, [c.values for c in group], unit, end)
        else:
            replies += [connection.reply(end) if c.into is None else connection.fill(c.into, end) for c in group]
    return replies


def _values(connection: ValkeyConnection, counts: Sequence[int], unit: int, end: float) -> list[Any]:
    """The replies to commands that follow each other, each of so many values: read at once, which is quicker."""
    found = connection.values(sum(counts), end, unit)
    if isinstance(found, ValkeyRefused):
        return [found] * len(counts)
    stops = list(itertools.accumulate(counts))
    return [found[stop - count : stop] for stop, count in zip(stops, counts, strict=True)]


def slot_of(key: bytes) -> int:
    """The slot of a key in a cluster: that of the part in braces, if there is one."""
    start = key.find(b"{")
    stop = key.find(b"}", start + 1)
    if start >= 0 and stop > start + 1:
        key = key[start + 1 : stop]
    return binascii.crc_hqx(key, 0) % SLOTS


def moves(reply: Any) -> bool:
    return isinstance(reply, ValkeyRefused) and reply.startswith(_MOVING)


def checked(reply: Any) -> Any:
    """The reply of a command that succeeded. Raises with one of few messages, since they are counted by message."""
    if not isinstance(reply, ValkeyRefused):
        return reply
    word = reply.split(" ", 1)[0]
    if word in ("NOAUTH", "WRONGPASS", "NOPERM"):
        raise UnfitServer(errno.EACCES, f"it does not accept this user and password for that ({word})")
    if word == "OOM":
        raise OSError(errno.ENOSPC, "Valkey is full, and finds nothing to evict")
    if word == "WRONGTYPE":
        text = "Valkey has something else under the name of a key of kvtide (WRONGTYPE): does another program use it?"
        raise OSError(errno.EPROTO, text)
    raise OSError(errno.EIO, f"Valkey refused ({word})")


def _table(reply: Any, home: Address, here: str) -> list[Address]:
    """The server of each slot, from what the server at ``here`` says."""
    slots = [home] * SLOTS
    try:
        for first, last, (host, port, *_), *_ in reply:
            if not 0 <= first <= last < SLOTS or not 0 < port < 65536:
                raise ValueError
            slots[first : last + 1] = [(host.decode() if host else here, port)] * (last + 1 - first)
    except (TypeError, ValueError, AttributeError):
        raise OSError(errno.EPROTO, "what Valkey says of its cluster makes no sense") from None
    return slots


def _facts(info: Any) -> dict[str, str]:
    if not isinstance(info, bytes):
        raise OSError(errno.EPROTO, "what answers there does not speak the protocol of Valkey")
    lines = info.decode("utf-8", "replace").splitlines()
    return {name: value for name, mark, value in (line.partition(":") for line in lines) if mark}


def _parse(url: str, login: Login) -> tuple[Address, int, bool]:
    if "@" in url:  # before any error that shows the address
        raise ConfigError(
            f"{login.url} has a user or password in it, which would be shown: use {login.prefix}user and "
            f"{login.prefix}password_file"
        )
    try:
        parts = urlsplit(url)
        database = int(parts.path.strip("/") or 0)
        tls = _SCHEMES[parts.scheme]
        if not parts.hostname or parts.query or parts.fragment:
            raise ValueError
        parts.hostname.encode("idna")  # as the resolver of names will; UnicodeError is a ValueError
        port = parts.port or 6379
    except (KeyError, ValueError):
        raise ConfigError(
            f"{login.url} is {url!r}; it must be valkey://HOST:PORT/DATABASE, or valkeys:// for TLS{login.forms}"
        ) from None
    return (parts.hostname, port), database, tls


def _words(login: Login) -> list[bytes]:
    """What is said with AUTH."""
    if login.password is not None:
        return [login.password().encode()]
    prefix = login.prefix
    if not login.password_file:
        if login.user:
            raise ConfigError(f"{prefix}user is {login.user!r}, and {prefix}password_file is not set: both are needed")
        return []
    password = read_secret(f"{prefix}password_file", login.password_file, login.harm, "password").strip()
    return [login.user.encode(), password] if login.user else [password]


def _context(login: Login) -> ssl.SSLContext:
    setting, path, what = "certificate", login.certificate, "the certificate of an authority"
    try:
        context = ssl.create_default_context(cafile=login.certificate or None)
        if login.identity:
            setting, path, what = "identity", login.identity, "a certificate and its key"
            context.load_cert_chain(login.identity)
    except OSError as e:
        reason = (tls_reason(e) or "it has no such thing") if isinstance(e, ssl.SSLError) else e.strerror or e
        raise ConfigError(
            f"{login.prefix}{setting} is {path!r}, which cannot be used: {reason}. Give a file with {what}, as PEM"
        ) from e
    return context
