"""The key that wraps keys: from a file, from the environment, or kept by a key service that never shows it.

A data key is never written down as it is. A *wrapper* turns it into bytes that only the same wrapper can turn back.
What is wrapped is the key together with its tenant and its id, so that an entry that was moved to another place in
the key file is found out, whoever wraps.

``security.key_source`` names the wrapper::

    file:/etc/kvtide/key            32 bytes, or 64 hexadecimal digits
    env:KVTIDE_KEY                  64 hexadecimal digits
    vault:https://vault:8200/transit/kvtide    Vault's transit engine, mounted at "transit", with its key "kvtide"
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any, Protocol

from kvtide.errors import ConfigError

__all__ = ["Away", "LocalWrapper", "Unavailable", "VaultWrapper", "Wrapper", "aead", "wrapper"]

_PATIENCE = 2.0
"""Seconds that a key service may take: a thread that moves blocks waits for it."""
_LARGEST = 1 << 16
"""Bytes of a key service's answer."""


class Unavailable(Exception):  # noqa: N818 - a reason, not an error
    """A key cannot be had. Never leaves the store: there, what it seals is a miss with this reason."""


class Away(Unavailable):
    """Nothing answers where keys are unwrapped: no other key can be had either."""


def aead(key: bytes) -> Any:
    """AES-256-GCM with that key. Raises ConfigError where the package for it is not installed."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as e:
        raise ConfigError("encryption needs the package cryptography: pip install kvtide[encrypted]") from e
    return AESGCM(key)


class Wrapper(Protocol):
    """Wraps what is at most some hundred bytes. Raises Unavailable; safe from any thread."""

    def wrap(self, secret: bytes) -> bytes: ...

    def unwrap(self, wrapped: bytes) -> bytes: ...

    def rewrap(self, wrapped: bytes) -> bytes:
        """The same secret under the wrapper's newest key."""


class LocalWrapper:
    """With a key of 32 bytes that this process knows."""

    def __init__(self, key: bytes) -> None:
        self._aead = aead(key)

    def wrap(self, secret: bytes) -> bytes:
        nonce = secrets.token_bytes(12)
        return nonce + bytes(self._aead.encrypt(nonce, secret, b"kvtide 1 wrap"))

    def unwrap(self, wrapped: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        try:
            return bytes(self._aead.decrypt(wrapped[:12], wrapped[12:], b"kvtide 1 wrap"))
        except (InvalidTag, ValueError) as e:
            raise Unavailable("its key was wrapped with another key, or is damaged") from e

    def rewrap(self, wrapped: bytes) -> bytes:
        return self.wrap(self.unwrap(wrapped))


_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Tokens and keys are for the key service alone, whatever proxies the environment names."""


class VaultWrapper:
    """With a key of HashiCorp Vault's transit engine, which never leaves it.

    The token is that of ``VAULT_TOKEN``, or of the file that ``VAULT_TOKEN_FILE`` names, read at every call, because
    agents renew it there. Certificates are checked against the system's, or those of ``SSL_CERT_FILE``.
    """

    def __init__(self, address: str, environment: Mapping[str, str] = os.environ) -> None:
        parts = urllib.parse.urlsplit(address)
        mount, _, name = parts.path.strip("/").rpartition("/")
        local = parts.hostname in ("localhost", "127.0.0.1", "::1")
        if not (parts.scheme == "https" or (parts.scheme == "http" and local)) or not parts.hostname or not mount:
            raise ConfigError(
                f"security.key_source is 'vault:{address}'; it must be like vault:https://host:8200/transit/name "
                "(http only to this host)"
            )
        self._base = f"{parts.scheme}://{parts.netloc}/v1/{mount}"
        self._name = name
        self._environment = environment

    def wrap(self, secret: bytes) -> bytes:
        return self._ask("encrypt", "plaintext", base64.b64encode(secret).decode(), "ciphertext").encode()

    def unwrap(self, wrapped: bytes) -> bytes:
        text = self._ask("decrypt", "ciphertext", wrapped.decode("ascii", "replace"), "plaintext")
        try:
            return base64.b64decode(text, validate=True)
        except ValueError as e:
            raise Away("the key service does not answer in good order") from e

    def rewrap(self, wrapped: bytes) -> bytes:
        return self._ask("rewrap", "ciphertext", wrapped.decode("ascii", "replace"), "ciphertext").encode()

    def _ask(self, verb: str, field: str, value: str, wanted: str) -> str:
        try:
            request = urllib.request.Request(
                f"{self._base}/{verb}/{urllib.parse.quote(self._name)}",
                json.dumps({field: value}).encode(),
                {"X-Vault-Token": self._token(), "Content-Type": "application/json"},
            )
            with _DIRECT.open(request, timeout=_PATIENCE) as answer:
                found = json.loads(answer.read(_LARGEST))["data"][wanted]
        except urllib.error.HTTPError as e:
            e.close()
            raise Unavailable(f"the key service refused to {verb}: {e.code}") from e
        except (OSError, HTTPException, ValueError, KeyError, TypeError) as e:
            raise Away("the key service does not answer") from e
        if not isinstance(found, str):
            raise Away("the key service does not answer")
        return found

    def _token(self) -> str:
        if path := self._environment.get("VAULT_TOKEN_FILE"):
            return Path(path).read_text().strip()
        return self._environment.get("VAULT_TOKEN", "")


def wrapper(source: str, environment: Mapping[str, str] = os.environ) -> Wrapper:
    """The wrapper that ``security.key_source`` names. Raises ConfigError."""
    kind, _, rest = source.partition(":")
    if kind == "vault":
        return VaultWrapper(rest, environment)
    if kind == "file":
        try:
            data = Path(rest).expanduser().read_bytes()
        except OSError as e:
            raise ConfigError(f"security.key_source: cannot read {rest}: {e.strerror}") from e
    elif kind == "env":
        data = environment.get(rest, "").encode()
    else:
        raise ConfigError(
            f"security.key_source is {source!r}; it must be file:PATH, env:NAME or vault:https://HOST/MOUNT/NAME"
        )
    return LocalWrapper(_key(data, source))


def _key(data: bytes, source: str) -> bytes:
    if len(data) == 32:
        return data
    try:
        key = bytes.fromhex(data.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != 32:
        raise ConfigError(
            f"security.key_source: {source} holds no key; it must be 32 random bytes, as 64 hexadecimal digits say. "
            "Make one with: kvtide keys make"
        )
    return key
