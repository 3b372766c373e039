"""Client for administrators of a node on another host: over HTTPS, for status and administration, not for blocks.

The caller authenticates by the certificate of ``node.certificate``, or by a token in ``KVTIDE_TOKEN``. A token is sent
only to a server that has proven its identity by a certificate, or that is on this host.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Self, TypeVar
from urllib.parse import urlsplit

import msgspec

from kvtide.config import Node
from kvtide.errors import AccessError, ConfigError, KvtideError, TierError, UnknownTenantError
from kvtide.node.tls import client_tls
from kvtide.store.forget import Forgotten
from kvtide.store.node_statistics import Status

__all__ = ["HttpAdminClient"]

T = TypeVar("T")

_PATIENCE = 10.0
"""Seconds to connect, and to answer requests that need no work."""
_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""An administrative operation may take long; TCP keepalive distinguishes a host that works from one that is gone."""

_ERRORS: dict[int, type[KvtideError]] = {401: AccessError, 403: AccessError, 422: UnknownTenantError}


class HttpAdminClient:
    """The node at ``https://host:port``. Has the methods of ``Client`` that administrators need."""

    def __init__(self, address: str, settings: Node, environment: Mapping[str, str] = os.environ) -> None:
        wrong = f"a node's address is {address!r}; it must be like https://host:9410 (http only to this host)"
        try:
            parts = urlsplit(address)
            port = parts.port
        except ValueError as e:
            raise ConfigError(wrong) from e
        local = parts.hostname in ("localhost", "127.0.0.1", "::1")
        if not (parts.scheme == "https" or (parts.scheme == "http" and local)) or not parts.hostname or not port:
            raise ConfigError(wrong)
        self._address = address
        self._host, self._port = parts.hostname, port
        self._tls = client_tls(settings) if parts.scheme == "https" else None
        token = environment.get("KVTIDE_TOKEN", "").strip()
        if not token.isascii() or not token.isprintable():
            raise ConfigError(
                "the token in KVTIDE_TOKEN has characters that cannot be sent; it must be one line of printable ASCII"
            )
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def status(self) -> Status:
        """Statistics of the node and its store."""
        return self._ask("GET", "/status", Status, _PATIENCE)

    def forget(self, tenant: bytes) -> Forgotten:
        """Let the node destroy the keys and blocks of the tenant with that tag; returns how many blocks there were."""
        return self._ask("POST", f"/forget?tenant={tenant.hex()}", Forgotten, None)

    def _ask(self, method: str, path: str, kind: type[T], patience: float | None) -> T:
        connection = (
            HTTPConnection(self._host, self._port, timeout=_PATIENCE)
            if self._tls is None
            else HTTPSConnection(self._host, self._port, timeout=_PATIENCE, context=self._tls)
        )
        try:
            connection.connect()
            connection.sock.settimeout(patience)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _ALIVE:
                connection.sock.setsockopt(socket.IPPROTO_TCP, option, value)
            connection.request(method, path, headers=self._headers)
            answer = connection.getresponse()
            said = answer.read()
            if answer.status == 200:
                return msgspec.json.decode(said, type=kind)
        except (OSError, HTTPException, msgspec.MsgspecError) as e:
            reason = (isinstance(e, OSError) and e.strerror) or e
            raise TierError(
                f"no node answers at {self._address} ({reason}); see node.http there, and node.authority"
            ) from e
        finally:
            connection.close()
        text = f"the node at {self._address} refused: {said.decode(errors='replace')}"
        raise _ERRORS.get(answer.status, TierError)(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close: each request has a connection of its own."""
