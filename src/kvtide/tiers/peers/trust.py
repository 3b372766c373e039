"""How nodes authenticate each other: by a shared secret, by certificates, or by both.

::

    peers.token_file  peers.certificate
           x                 -            each side proves that it knows the secret; blocks travel unencrypted
           -                 x            mutual TLS 1.3: a certificate of peers.authority with one of peers.names
           x                 x            both
           -                 -            refused: a port on loopback too is open to all users of the host

The secret is never sent. Each side sends a nonce, and a proof that is keyed with the secret and covers both nonces and
everything else that was said, so a proof is worth nothing on another connection or from the other side. The server
proves itself first: an asker tells nothing, not even a digest, to a server that does not know the secret.

Without TLS, whoever can change packets between two authenticated nodes could send damaged blocks, which checksums find,
or forged ones, which they do not. With ``security.encrypt``, and with ``security.key_source``, which opens records that
were encrypted before, blocks therefore travel over TLS only.

Files are read anew for every connection, so certificates and the secret can be replaced while the nodes run.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl

from kvtide.config import Peers, Security
from kvtide.errors import ConfigError
from kvtide.security.secret_file import read_secret
from kvtide.tiers.peers.nixl import Nixl
from kvtide.tiers.peers.nixl_process import nixl_for
from kvtide.tiers.peers.tcp import Tcp, TlsContexts, split
from kvtide.tiers.peers.transport import PeerTransport

__all__ = ["PeerTrust", "addresses_of", "proof"]

_SHORTEST = 32
"""Minimum number of bytes of the secret: an answer to an asker that knows nothing lets it try secrets."""
_MOST = 16
"""Addresses of other nodes: every prompt that is new asks all of them, and each takes threads and connections."""
_BOTH = (
    "set peers.token_file (a file with a secret that all nodes have: openssl rand -hex 32), or peers.certificate, "
    "peers.authority and peers.names (mutual TLS)"
)


def addresses_of(settings: Peers) -> list[str]:
    """The addresses of other nodes, each once. Raises ConfigError."""
    found = list(dict.fromkeys(settings.addresses.replace(",", " ").split()))
    for address in found:
        try:
            split(address)
        except ValueError as e:
            raise ConfigError(f"peers.addresses: {e}") from e
    if len(found) > _MOST:
        raise ConfigError(
            f"peers.addresses names {len(found)} nodes, and a node asks at most {_MOST}: every prompt that is new asks "
            "all of them. Name fewer, or let the nodes use storage that all of them share (files, objects, valkey)"
        )
    return found


class PeerTrust:
    """The authentication of a configuration. Raises ConfigError for settings that would not keep anyone out."""

    def __init__(self, settings: Peers, security: Security) -> None:
        self._settings = settings
        others = "peers.addresses" if settings.addresses else "peers.directory"
        what = f"peers.listen is {settings.listen!r}" if settings.listen else f"{others} is set"
        parts = settings.certificate, settings.authority, settings.names
        if any(parts) and not all(parts):
            raise ConfigError(
                "mutual TLS among nodes needs peers.certificate (our own), peers.authority (of all certificates) "
                "and peers.names (the names in them), all three"
            )
        if not settings.certificate and not settings.token_file:
            raise ConfigError(f"{what}, and nodes could not authenticate each other: {_BOTH}")
        if (security.encrypt or security.key_source) and not settings.certificate:
            setting = "security.encrypt" if security.encrypt else "security.key_source, which opens encrypted records"
            raise ConfigError(
                f"{what} with {setting}, but blocks would travel unencrypted: set peers.certificate, "
                "peers.authority and peers.names"
            )
        names = frozenset(settings.names.replace(",", " ").split())
        self.transport: PeerTransport = Tcp(
            TlsContexts(self._client, self._server, names) if settings.certificate else None
        )
        if settings.certificate and settings.fabric == "nixl":
            raise ConfigError(
                'peers.fabric is "nixl" with peers.certificate, and what NIXL moves is not encrypted: set one of them'
            )
        if not settings.certificate and (process := nixl_for(settings.fabric)) is not None:
            self.transport = Nixl(self.transport, process, forced=settings.fabric == "nixl")
        # Errors are reported now, and not at the first connection.
        self.secret()
        if settings.certificate:
            self._client()
            self._server()

    def secret(self) -> bytes | None:
        """The shared secret; None if nodes authenticate by certificates only. Raises ConfigError."""
        path = self._settings.token_file
        if not path:
            return None
        secret = read_secret("peers.token_file", path, "read this node's blocks", "secret").strip()
        if len(secret) < _SHORTEST:
            raise ConfigError(
                f"peers.token_file: the secret in {path} has {len(secret)} bytes and could be guessed; make one of "
                f"{_SHORTEST} or more: openssl rand -hex 32"
            )
        return secret

    def _client(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _server(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def _context(self, side: int) -> ssl.SSLContext:
        settings, context = self._settings, ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # an address need not be in a certificate: peers.names decides
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            if side == ssl.PROTOCOL_TLS_SERVER:
                context.num_tickets = 0  # a resumed session could outlive its authority
            context.load_cert_chain(settings.certificate)
            context.load_verify_locations(settings.authority)
        except OSError as e:
            raise ConfigError(
                f"peers.certificate {settings.certificate!r} and peers.authority {settings.authority!r} cannot be "
                f"used: {e.strerror or e}. The first must be a file with a certificate and its key, the second one "
                "with the certificate of an authority, both as PEM"
            ) from e
        return context


def proof(secret: bytes | None, side: bytes, said: bytes) -> bytes:
    """What a ``side`` ("asker", "server") must send to prove that it knows the secret, after both have ``said`` that;
    zeros if there is no secret."""
    if secret is None:
        return bytes(32)
    return hmac.new(secret, b"kvtide 1 peer " + side + b"\0" + said, hashlib.sha256).digest()
