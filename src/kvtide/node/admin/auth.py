"""Authentication and roles of HTTP callers: by a client's certificate, or by a token.

::

    node.certificate  node.authority  node.tokens
           x                x              -        mutual TLS: roles by the names in clients' certificates, node.names
           x                -              x        tokens over TLS
           -                -              x        tokens without encryption: behind a proxy that terminates TLS
           -                -              -        no authentication: every caller may read pages without names, on
                                                    loopback only, by known host names (host_names.py)

Tokens are stored as hashes and compared with all known ones in constant time. Files that have changed are read again
for the next connection, so that certificates and tokens can be renewed while the node serves; if they cannot be read,
the old ones stay in force and an error is logged.

Every connection presents its certificate anew: TLS sessions are not resumed, because one could outlive its authority.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import ssl
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvtide.config import Node
from kvtide.errors import ConfigError
from kvtide.node.roles import Role
from kvtide.node.tls import unreadable
from kvtide.security.certificates import names_in
from kvtide.security.secret_file import read_secret

__all__ = ["HttpAuth", "HttpCaller"]

log = logging.getLogger("kvtide.http")

_SHORTEST = 16
"""Minimum number of characters of a token."""


class HttpCaller(NamedTuple):
    """An authenticated caller."""

    name: str
    role: Role


class HttpAuth:
    """The authentication of a configuration. Raises ConfigError for settings that would not keep anyone out."""

    def __init__(self, settings: Node, environment: Mapping[str, str] = os.environ) -> None:
        self._settings = settings
        self._environment = environment
        self._stamp = self._stamped()
        self._names = _names(settings.names)
        self._tokens = _tokens(_source(settings.tokens, environment), settings.tokens) if settings.tokens else {}
        if bool(settings.authority) != bool(self._names) or (settings.authority and not settings.certificate):
            raise ConfigError(
                "mutual TLS needs node.certificate (our own), node.authority (of clients' certificates) and node.names "
                "(their roles), all three"
            )
        if settings.authority and settings.tokens:
            raise ConfigError(
                "node.authority and node.tokens are both set: callers authenticate by one of them, not both"
            )
        self.tls = _server(settings) if settings.certificate else None

    @property
    def needed(self) -> bool:
        """Whether authentication is required."""
        return bool(self._names or self._tokens)

    @property
    def hosts(self) -> list[str]:
        """Additional host names that are answered without authentication, besides those that are always known."""
        return self._settings.hosts.replace(",", " ").split()

    def guard(self, address: str, hosts: Iterable[str]) -> None:
        """Raises ConfigError if other hosts can reach one of ``hosts`` and authentication is not required."""
        if all(ipaddress.ip_address(host.partition("%")[0]).is_loopback for host in hosts):
            return
        if not self.needed:
            raise ConfigError(
                f"node.http is {address!r}, which other hosts can reach without authentication: set "
                "node.certificate, node.authority and node.names (mutual TLS), or node.tokens; or give 127.0.0.1"
            )
        if self.tls is None:
            log.warning(
                "tokens are sent unencrypted at %s: set node.certificate, or use a proxy that terminates TLS", address
            )

    def of(self, authorization: str, certificate: Mapping[str, Any] | None) -> HttpCaller | None:
        """The caller with this header and certificate; None if it is unknown."""
        if not self.needed:
            return HttpCaller("an unauthenticated caller", Role.READ)
        if self._names:
            return max(
                (self._names[n] for n in names_in(certificate or {}) if n in self._names), key=_role, default=None
            )
        scheme, _, token = authorization.partition(" ")
        given = _hash(token.strip()) if scheme.lower() == "bearer" else b""
        found = [caller for known, caller in self._tokens.items() if hmac.compare_digest(known, given)]
        return found[0] if found else None

    def renewed(self) -> HttpAuth:
        """Returns itself, or a new instance if one of its files has changed."""
        if (stamp := self._stamped()) == self._stamp:
            return self
        try:
            return HttpAuth(self._settings, self._environment)
        except ConfigError as e:
            log.error("the old certificates and tokens stay in force: %s", e)
            self._stamp = stamp
            return self

    def _stamped(self) -> list[tuple[int, int, int, int]]:
        kind, _, path = self._settings.tokens.partition(":")
        files = [self._settings.certificate, self._settings.authority, path if kind == "file" else ""]
        return [_stamp(Path(file).expanduser()) for file in files if file]


def _server(settings: Node) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    try:
        context.load_cert_chain(settings.certificate)
        if settings.authority:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(settings.authority)
    except OSError as e:
        raise unreadable(settings, e) from e
    return context


def _names(text: str) -> dict[str, HttpCaller]:
    """Parses ``prometheus:read ops.example.com:admin``; a name may contain colons itself."""
    found = {}
    for entry in text.replace(",", " ").split():
        name, _, role = entry.rpartition(":")
        if not name or role.upper() not in Role.__members__:
            raise ConfigError(
                f"node.names has {entry!r}; it must be a name of a client's certificate and a role (read, write or "
                "admin), such as prometheus:read"
            )
        found[name] = HttpCaller(name, Role[role.upper()])
    return found


def _source(source: str, environment: Mapping[str, str]) -> str:
    kind, _, where = source.partition(":")
    if kind == "env" and where in environment:
        return environment[where]
    try:
        if kind == "file":
            return read_secret("node.tokens", where, "ask this node for all that its callers may", "token").decode()
    except UnicodeDecodeError as e:
        raise ConfigError(f"node.tokens: cannot read {where}: {e}") from e
    raise ConfigError(
        f"node.tokens must be file:PATH, or env:NAME of a variable that is set, not {source[:4]!r}...; tokens "
        "themselves do not belong into a configuration"
    )


def _tokens(text: str, source: str) -> dict[bytes, HttpCaller]:
    """Parses lines of ``name role token``; returns callers by the token's hash."""
    found: dict[bytes, HttpCaller] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 3 or words[1].upper() not in Role.__members__ or len(words[2]) < _SHORTEST:
            raise ConfigError(
                f"node.tokens: line {number} of {source} must be a name, a role (read, write or admin) and a token of "
                f"{_SHORTEST} letters at least, as openssl rand -hex 32 makes them"
            )
        found[_hash(words[2])] = HttpCaller(words[0], Role[words[1].upper()])
    if not found:
        raise ConfigError(f"node.tokens: there are none in {source}; no caller could authenticate")
    return found


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _role(caller: HttpCaller) -> Role:
    return caller.role


def _stamp(file: Path) -> tuple[int, int, int, int]:
    try:
        about = file.stat()
    except OSError:
        return 0, 0, 0, 0
    # The mode counts: a file that was refused because of its mode is read again once that is corrected.
    return about.st_mtime_ns, about.st_size, about.st_ino, about.st_mode
