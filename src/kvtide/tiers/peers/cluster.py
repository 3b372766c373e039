"""The settings of a cluster: checks that they fit together, and opens the directory that they name.

A directory that a node starts itself (``peers.directory = "embedded"``) is at the host of its ``peers.listen``, at the
next port, and has a password that is derived from the nodes' secret. Others name it as ``embedded://HOST:PORT``.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from urllib.parse import urlsplit

from blake3 import blake3
from msgspec import structs

from kvtide.config import Config, Peers, Security
from kvtide.errors import ConfigError
from kvtide.tiers.peers.directory import BlockDirectory, open_directory
from kvtide.tiers.peers.tcp import split
from kvtide.tiers.peers.trust import PeerTrust
from kvtide.tiers.shared.valkey_client import Login

__all__ = [
    "EMBEDDED",
    "announced_address",
    "check_cluster",
    "directory_of",
    "directory_password",
    "embedded_at",
    "embedded_reached_at",
    "positions_of",
    "with_directory",
]

EMBEDDED = "embedded"
_THERE = f"{EMBEDDED}://"
_TIMEOUT = 0.4
"""Seconds that a question to the directory may take: a prompt waits for it."""
_ANYWHERE = ("", "0.0.0.0", "::", "[::]")


def check_cluster(settings: Peers) -> None:
    """Raise ConfigError if settings contradict each other."""
    if not settings.directory:
        for name in ("directory_user", "directory_password_file", "directory_certificate", "directory_identity"):
            if getattr(settings, name):
                raise ConfigError(f"peers.{name} is set, and peers.directory is not: there is no server to use it for")
        if settings.announce:
            raise ConfigError("peers.announce is set, and peers.directory is not: there is nobody to tell it to")
        return
    if settings.addresses:
        raise ConfigError(
            "peers.addresses and peers.directory are both set: the directory lists the nodes, so leave out "
            "peers.addresses"
        )
    if settings.announce and not settings.listen:
        raise ConfigError("peers.announce is set, and peers.listen is not: this node serves no other")
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", settings.cluster):
        raise ConfigError(f"peers.cluster is {settings.cluster!r}; use up to 64 letters, digits, dots, _ and -")
    if settings.directory == EMBEDDED or settings.directory.startswith(_THERE):
        if "@" in settings.directory:  # before any error that shows it
            raise ConfigError(
                "peers.directory has a user or password in it, which would be shown: leave it out, since the password "
                "of a directory that a node starts itself is derived from peers.token_file"
            )
        if settings.directory_password_file or settings.directory_user:
            raise ConfigError(
                "a directory that a node starts itself has a password of its own: leave out peers.directory_user and "
                "peers.directory_password_file"
            )
        if not settings.token_file:
            raise ConfigError(
                f"peers.directory is {settings.directory!r}, and its password is derived from peers.token_file, which "
                "is not set: set it (openssl rand -hex 32), or use a Valkey server of your own"
            )
    if settings.directory == EMBEDDED and not settings.listen:
        raise ConfigError(
            "peers.directory is 'embedded', and peers.listen is not set: the directory is served at the host of "
            "peers.listen, at the next port"
        )
    if settings.certificate and not _is_loopback(settings):
        raise ConfigError(
            f"peers.directory is {settings.directory!r}, which is not encrypted, and peers.certificate asks for TLS "
            "between the nodes: use a Valkey server of your own, as valkeys://HOST:6379/0"
        )


def _is_loopback(settings: Peers) -> bool:
    """Whether a directory that a node starts is reached from that host alone; so of any other directory."""
    if settings.directory == EMBEDDED:
        host = embedded_at(settings)[0]
    elif settings.directory.startswith(_THERE):
        host = _named_at(settings.directory)[0]
    else:
        return True
    try:
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _named_at(url: str) -> tuple[str, str]:
    """Host, and host with port, of ``embedded://HOST:PORT``. Raises ConfigError."""
    parts = urlsplit(url)
    try:
        if not parts.hostname or not parts.port or parts.path.strip("/"):
            raise ValueError
    except ValueError:
        raise ConfigError(f"peers.directory is {url!r}; it must be {_THERE}HOST:PORT") from None
    return parts.hostname, parts.netloc


def positions_of(settings: Peers) -> int:
    """How many nodes of a directory are read from at a time; 0: there is no directory. Raises ConfigError."""
    check_cluster(settings)
    return settings.most if settings.directory else 0


def announced_address(settings: Peers, listening: str) -> str:
    """The address that other nodes are told, if this one is ``listening`` there. Raises ConfigError."""
    address = settings.announce or listening
    try:
        host, port = split(address)
    except ValueError as e:
        raise ConfigError(f"peers.announce: {e}") from e
    if host in _ANYWHERE or not port:
        raise ConfigError(
            f"peers.listen is {settings.listen!r}, which other nodes cannot connect to: set peers.announce to this "
            "host's address, such as 10.0.0.7:9411"
        )
    return address


def embedded_at(settings: Peers) -> tuple[str, int]:
    """Host and port of the directory that this node starts. Raises ConfigError."""
    try:
        host, port = split(settings.listen)
    except ValueError as e:
        raise ConfigError(f"peers.listen: {e}") from e
    if not 0 < port < 65535:
        raise ConfigError(f"peers.listen is {settings.listen!r}; for an embedded directory it must name a port")
    return host, port + 1


def embedded_reached_at(settings: Peers) -> tuple[str, int]:
    """Host and port by which others, and this node, reach the directory that it starts. Raises ConfigError."""
    host, port = embedded_at(settings)
    if host in _ANYWHERE:
        host = settings.announce.rpartition(":")[0].strip("[]") or "127.0.0.1"
    return host, port


def directory_password(settings: Peers) -> str:
    """The password of a directory that a node starts. Raises ConfigError."""
    secret = PeerTrust(settings, Security()).secret() or b""
    return blake3(secret, derive_key_context="kvtide 1 directory password").hexdigest()


def directory_of(settings: Peers) -> BlockDirectory:
    """The directory of a configuration. Raises ConfigError."""
    check_cluster(settings)
    url, password, origin, where = settings.directory, None, "", settings.directory
    if url == EMBEDDED:
        raise ConfigError(
            "peers.directory is 'embedded': only a node (kvtide node) starts one. To read from its cluster, name it: "
            "embedded://HOST:PORT"
        )
    if url.startswith(_THERE):
        url, password = f"valkey://{_named_at(url)[1]}/0", functools.partial(directory_password, settings)
        where += " (one port above peers.listen of the node that starts it)"
        origin = "the password is derived from peers.token_file, which must have the same secret on all nodes"
    login = Login(
        settings.directory_user,
        settings.directory_password_file,
        settings.directory_certificate,
        settings.directory_identity,
        prefix="peers.directory_",
        url="peers.directory",
        password=password,
        origin=origin,
        forms=f"; or {EMBEDDED}, to start one here; or {_THERE}HOST:PORT, for one that another node has started",
    )
    return open_directory(url, cluster=settings.cluster, timeout=_TIMEOUT, where=where, login=login)


def with_directory(config: Config, host: str, port: int) -> Config:
    """The configuration of a node that has started a directory there."""
    where = f"{_THERE}{f'[{host}]' if ':' in host else host}:{port}"
    return structs.replace(config, peers=structs.replace(config.peers, directory=where))
