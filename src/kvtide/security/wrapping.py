"""The key that wraps data keys: from a file, from the environment, or kept by a key service that never reveals it.

A data key is never stored in the clear. A *wrapper* turns it into bytes that only the same wrapper can turn back. What
is wrapped is the key together with its tenant and its id, so that an entry that was moved to another place in the key
file is detected, with any wrapper.

``security.key_source`` names the wrapper::

    file:/etc/kvtide/key            32 bytes, or 64 hexadecimal digits; readable by its owner and group alone
    env:KVTIDE_KEY                  64 hexadecimal digits
    vault:https://vault:8200/transit/kvtide    Vault's transit engine, mounted at "transit", with its key "kvtide"
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Mapping
from enum import StrEnum
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from kvtide.errors import ConfigError
from kvtide.security.secret_file import read_secret

__all__ = ["Away", "KeyState", "LocalWrapper", "Unavailable", "VaultWrapper", "Wrapper", "aead", "wrapper"]

_PATIENCE = 2.0
"""Seconds that a key service may take for a whole request: a thread that moves blocks waits for it."""
_LARGEST = 1 << 16
"""Maximum bytes of a key service's answer."""


class KeyState(StrEnum):
    """Why a key is unavailable, where that is a property of the key."""

    DESTROYED = "its key was destroyed"
    UNKNOWN = "its key is not known here"


class Unavailable(Exception):  # noqa: N818 - a reason, not an error
    """A key is unavailable. Never leaves the store: there, what it encrypts is a miss with this reason."""

    def __init__(self, text: str, state: KeyState | None = None) -> None:
        """``state`` is set if the reason is a property of the key."""
        super().__init__(text)
        self.state = state


class Away(Unavailable):
    """The key service does not answer: no other key is available either."""


def aead(key: bytes) -> Any:
    """AES-256-GCM with that key. Raises ConfigError if the package for it is not installed."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as e:
        raise ConfigError("encryption needs the package cryptography: pip install kvtide[encrypted]") from e
    return AESGCM(key)


class Wrapper(Protocol):
    """Wraps at most some hundred bytes. Raises Unavailable. Thread-safe."""

    def wrap(self, secret: bytes) -> bytes: ...

    def unwrap(self, wrapped: bytes) -> bytes: ...

    def rewrap(self, wrapped: bytes) -> bytes:
        """The same secret under the wrapper's newest key."""


class LocalWrapper:
    """Wraps with a key of 32 bytes that this process has."""

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


class _Exchange:
    """One request to a key service, which is answered within ``_PATIENCE`` seconds, or fails.

    It has its own thread, because socket timeouts apply to each step: resolving a name has none, there may be several
    addresses to connect to, and an answer of a thousand bytes may be a thousand steps. Neither a proxy from the
    environment nor a redirect is followed: tokens and keys are for the key service alone.
    """

    def __init__(self, base: urllib.parse.SplitResult) -> None:
        self._base = base
        self._ended: SimpleQueue[tuple[int, bytes] | Exception] = SimpleQueue()
        self._over = threading.Event()
        self._line: socket.socket | None = None
        """A second descriptor of the connection, to shut it down whatever the thread does with the first."""
        self._lock = threading.Lock()
        """Held while that descriptor is closed or shut down: its number may be reused at once."""

    def post(self, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """The status and at most ``_LARGEST`` + 1 bytes. Raises the request's error, or TimeoutError."""
        threading.Thread(target=self._run, args=(path, body, headers), name="kvtide-key-service", daemon=True).start()
        try:
            found = self._ended.get(timeout=_PATIENCE)
        except Empty:
            raise TimeoutError(f"it took longer than {_PATIENCE:g} seconds") from None
        finally:
            self._over.set()
            with self._lock, contextlib.suppress(OSError):
                if self._line is not None:
                    self._line.shutdown(socket.SHUT_RDWR)
        if isinstance(found, Exception):
            raise found
        return found

    def _run(self, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        try:
            self._ended.put(self._asked(path, body, headers))
        except Exception as e:  # noqa: BLE001 - raised in the waiting thread
            self._ended.put(e)

    def _asked(self, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        host, tls = self._base.hostname or "", self._base.scheme == "https"
        port = self._base.port or (443 if tls else 80)
        with contextlib.ExitStack() as opened:
            sock = opened.enter_context(socket.create_connection((host, port), timeout=_PATIENCE))
            self._line = sock.dup()
            opened.callback(self._let_go, self._line)
            if tls:
                sock = opened.enter_context(ssl.create_default_context().wrap_socket(sock, server_hostname=host))
            if self._over.is_set():
                raise TimeoutError
            connection = HTTPConnection(host, port)
            connection.sock = sock
            connection.request("POST", path, body, dict(headers))
            with connection.getresponse() as answer:
                return answer.status, answer.read(_LARGEST + 1)

    def _let_go(self, line: socket.socket) -> None:
        with self._lock:
            self._line = None
            line.close()


class VaultWrapper:
    """Wraps with a key of HashiCorp Vault's transit engine, which never leaves Vault.

    The token is that of ``VAULT_TOKEN``, or of the file that ``VAULT_TOKEN_FILE`` names, read at every call, because
    agents renew it there. Certificates are checked against the system's, or those of ``SSL_CERT_FILE``. The token is
    sent to the address of ``security.key_source`` and nowhere else: a redirect is an error.
    """

    def __init__(self, address: str, environment: Mapping[str, str] = os.environ) -> None:
        parts = urllib.parse.urlsplit(address)
        mount, _, name = parts.path.strip("/").rpartition("/")
        local = parts.hostname in ("localhost", "127.0.0.1", "::1")
        try:
            wrong = parts.port == 0
        except ValueError:
            wrong = True
        if not (parts.scheme == "https" or (parts.scheme == "http" and local)):
            wrong = True
        if wrong or not parts.hostname or not mount:
            raise ConfigError(
                f"security.key_source is 'vault:{address}'; it must be like vault:https://host:8200/transit/name "
                "(http only to this host)"
            )
        self._base = parts
        self._mount, self._name = mount, name
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
        path = f"/v1/{self._mount}/{verb}/{urllib.parse.quote(self._name)}"
        body = json.dumps({field: value}).encode()
        try:
            headers = {"X-Vault-Token": self._token(), "Content-Type": "application/json"}
            status, said = _Exchange(self._base).post(path, body, headers)
            if 300 <= status < 400:
                raise Away(
                    f"the key service redirects ({status}), and the token is for {self._base.hostname} alone: name in "
                    "security.key_source the address that answers itself"
                )
            if status != 200:
                raise Unavailable(f"the key service refused to {verb}: {status}")
            if len(said) > _LARGEST:
                raise Away(f"the key service does not answer in good order: with more than {_LARGEST} bytes")
            found = json.loads(said)["data"][wanted]
        except TimeoutError as e:
            raise Away(f"the key service does not answer within {_PATIENCE:g} seconds") from e
        except (OSError, HTTPException, ValueError, KeyError, TypeError, RecursionError) as e:
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
        data = read_secret("security.key_source", rest, "decrypt whatever its key encrypts", "key")
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
