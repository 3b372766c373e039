"""The key file: every tenant's wrapped data keys, and the tenants under a legal hold.

::

    {"check": "9f3c...",
     "body": {"format": "kvtide keys", "version": 1,
              "keys": [{"id": "...", "tenant": "...", "created": 0.0, "wrapped": "...", "destroyed": null}],
              "holds": [{"tenant": "...", "since": 0.0, "why": ""}]}}

Tenants are named by their tags, 16 bytes that reveal nothing by themselves. A destroyed key keeps its entry, with
nothing wrapped in it, so that it can be told from a key that never existed. The file is replaced as a whole, by an
atomic rename that survives a power loss, under a lock file beside it; readers need no lock. ``check`` is the BLAKE3 of
the body as written, against accidents. It is no protection against an attacker: anyone who may write the file can make
keys unavailable anyway, but cannot learn any.

Keys are destroyed only here. Copies of a destroyed key in backups and in the medium's spare blocks are out of reach,
and useless without the key that wraps.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from kvtide.errors import KeyFileError
from kvtide.forks import LockFile

__all__ = ["Hold", "KeyEntry", "KeyFile", "Keys"]

_FORMAT, _VERSION = "kvtide keys", 1


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One data key, wrapped. Ids, tags and wrapped keys are hexadecimal, as in the file."""

    id: str
    tenant: str
    created: float
    wrapped: str
    destroyed: float | None = None
    """When it was destroyed; None: it was not."""


class Hold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tenant whose blocks must not be forgotten."""

    tenant: str
    since: float
    why: str = ""


class Keys(msgspec.Struct, forbid_unknown_fields=True):
    """The content of the file."""

    format: str = _FORMAT
    version: int = _VERSION
    keys: list[KeyEntry] = []
    holds: list[Hold] = []

    def of(self, tenant: bytes) -> KeyEntry | None:
        """The key with which this tenant's blocks are encrypted now."""
        mine = [e for e in self.keys if e.tenant == tenant.hex() and e.destroyed is None]
        return mine[-1] if mine else None

    def names(self, tenant: bytes) -> bool:
        """Whether it has, or had, a key of this tenant."""
        return any(e.tenant == tenant.hex() for e in self.keys)

    def held(self, tenant: bytes) -> Hold | None:
        return next((h for h in self.holds if h.tenant == tenant.hex()), None)


class KeyFile:
    """A key file at ``path``, which need not exist yet. Safe from any thread and process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Keys:
        """The current content; empty if there is no file. Raises KeyFileError."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return Keys()
        except OSError as e:
            raise KeyFileError(f"cannot read the key file {self.path}: {e.strerror}") from e
        return self._parse(data)

    def _parse(self, data: bytes) -> Keys:
        try:
            outer: dict[str, Any] = json.loads(data)
            body = outer["body"]
            sound = outer["check"] == _check(body) and body["format"] == _FORMAT
            version = body["version"]
        except (ValueError, KeyError, TypeError):
            sound, version, body = False, 0, None
        if sound and version != _VERSION:
            raise KeyFileError(
                f"the key file {self.path} has version {version}, this kvtide knows {_VERSION}; nothing was touched. "
                "Upgrade kvtide"
            )
        try:
            if sound:
                return msgspec.convert(body, Keys)
        except msgspec.ValidationError:
            pass
        raise KeyFileError(
            f"the key file {self.path} is damaged: put back a copy of it. Without its keys, what they encrypted is lost"
        )

    @contextlib.contextmanager
    def change(self) -> Iterator[Keys]:
        """Yields the content to be changed; it is written durably when the block ends without an exception."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = LockFile(self.path.with_name(self.path.name + ".lock"))
        except OSError as e:
            raise KeyFileError(f"cannot lock the key file {self.path}: {e.strerror}") from e
        with lock:
            lock.take(wait=True)
            keys = self.read()
            yield keys
            self._write(keys)

    def _write(self, keys: Keys) -> None:
        body = msgspec.to_builtins(keys)
        fresh = self.path.with_name(self.path.name + ".new")
        try:
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w") as f:
                json.dump({"check": _check(body), "body": body}, f, indent=1)
                f.write("\n")
                f.flush()
                os.fsync(f.fileno())
            fresh.replace(self.path)
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as e:
            raise KeyFileError(f"cannot write the key file {self.path}: {e.strerror}") from e


def _check(body: Any) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return blake3(text.encode(), derive_key_context="kvtide 1 key file").hexdigest()
