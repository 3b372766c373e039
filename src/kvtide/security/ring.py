"""Data keys in memory: who may use them, and for how long.

A key is here under a *lease*: some seconds after it was last confirmed it is gone, and what it seals is a miss until it
is confirmed anew. Confirming means that the key file still has it and the wrapper still unwraps it. So whoever destroys
a key, in the file or at the key service, knows by when every process has lost it, even those that he cannot reach.
Threads that read and write blocks only look a key up; they fetch one when they first need it. The ring's own thread
confirms all of them at half their lease, and says which tenants' keys are gone: their blocks in memory must go too.

A tenant gets its first key when its first block is sealed, and another if that was destroyed: what it stores after that
is new. Ids are random. A key service that fails is not asked again at once: blocks must not queue up behind it.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtide.clock import Clock, SystemClock
from kvtide.config import Security
from kvtide.errors import ConfigError, KeyFileError
from kvtide.security.audit import Audit, audit_of
from kvtide.security.keyfile import Entry, KeyFile, Keys
from kvtide.security.wrapping import Away, Unavailable, Wrapper, wrapper

__all__ = ["DESTROYED", "OWN", "UNKNOWN", "DataKey", "Ring", "open_ring"]

log = logging.getLogger("kvtide.security")

OWN = bytes(16)
"""The tag under which a store keeps the key of its own papers, such as journals. No tenant has it."""

DESTROYED = "its key was destroyed"
"""Why a key is ``Unavailable`` for good."""

UNKNOWN = "its key is not known here"
"""Why a key is ``Unavailable`` that is not in the key file."""

_ALL = b""
"""For all keys at once."""
_PAUSE = 5.0
"""Seconds after which it is tried again to fetch a key that could not be had."""


@dataclass(frozen=True, slots=True)
class DataKey:
    """A tenant's key. Never shown."""

    id: bytes
    tenant: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"<DataKey {self.id.hex()}>"


class Ring:
    """The keys of a key file, unwrapped as they are needed. Safe from any thread."""

    def __init__(
        self,
        file: KeyFile,
        wrapper: Wrapper,
        lease: float = 60.0,
        clock: Clock | None = None,
        audit: Audit | None = None,
    ) -> None:
        self._file = file
        self._wrapper = wrapper
        self.lease = lease
        self._clock = clock or SystemClock()
        self._audit = audit
        self._lock = threading.RLock()
        self._keys: dict[bytes, tuple[DataKey, float]] = {}
        """By id, with the time at which it is gone."""
        self._current: dict[bytes, bytes] = {}
        """The id of the key that seals a tenant's blocks now."""
        self._missing: dict[bytes, tuple[str, float]] = {}
        """Why a key, by id or tenant, cannot be had, and until when it is not asked again."""
        self._destroyed = {e.id for e in file.read().keys if e.destroyed is not None}
        """Keys of which it is known to all here that they were destroyed."""
        self._gone: list[Callable[[bytes], None]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<Ring of {len(self._keys)} keys>"

    # -- using keys ---------------------------------------------------------------------------------------

    def of(self, tenant: bytes) -> DataKey:
        """The key that seals what a tenant stores now; made, if there is none. Raises Unavailable."""
        current = self._current.get(tenant)
        if current is not None and (found := self._here(current)) is not None:
            return found
        return self._fetch(tenant, lambda: self._latest(tenant))

    def find(self, number: bytes) -> DataKey:
        """The key with that id. Raises Unavailable."""
        return self._here(number) or self._fetch(number, lambda: self._unwrap(self._entry(number)))

    def _here(self, number: bytes) -> DataKey | None:
        key, until = self._keys.get(number, (None, 0.0))
        return key if self._clock.monotonic() < until else None

    def _fetch(self, what: bytes, fetch: Callable[[], DataKey]) -> DataKey:
        with self._lock:
            for missing in (what, _ALL):
                why, until = self._missing.get(missing, ("", 0.0))
                if self._clock.monotonic() < until:
                    raise Unavailable(why)
            since = self._clock.monotonic()
            try:
                key = fetch()
            except Exception as e:
                why = str(e) if isinstance(e, Unavailable) else "the key file, audit log or service cannot be used"
                self._missing[_ALL if isinstance(e, Away) else what] = why, self._clock.monotonic() + _PAUSE
                raise Unavailable(why) from e
            self._missing.pop(what, None)
            self._keys[key.id] = key, since + self.lease
            return key

    def _latest(self, tenant: bytes) -> DataKey:
        entry = self._file.read().of(tenant)
        if entry is None:
            made = DataKey(secrets.token_bytes(16), tenant, secrets.token_bytes(32))
            wrapped = self._wrapper.wrap(made.secret + tenant + made.id)
            with self._file.change() as keys:
                entry = keys.of(tenant)  # another process may have been quicker
                if entry is None:
                    entry = Entry(made.id.hex(), tenant.hex(), self._clock.time(), wrapped.hex())
                    keys.keys.append(entry)
                    if self._audit is not None:
                        self._audit.record("make key", "done", tenant=entry.tenant, key=entry.id)
        key = self._unwrap(entry)
        self._current[tenant] = key.id
        return key

    def _entry(self, number: bytes) -> Entry:
        return _entry(self._file.read(), number)

    def _unwrap(self, entry: Entry) -> DataKey:
        if entry.destroyed is not None:
            raise Unavailable(DESTROYED)
        number, tenant = bytes.fromhex(entry.id), bytes.fromhex(entry.tenant)
        secret = self._wrapper.unwrap(bytes.fromhex(entry.wrapped))
        if len(secret) != 64 or secret[32:] != tenant + number:
            raise Unavailable("its key was wrapped for another tenant")
        return DataKey(number, tenant, secret[:32])

    # -- leases -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Confirm keys in the background from now on."""
        self._thread = threading.Thread(target=self._run, name="kvtide-keys", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self.lease / 4):
            try:
                self.tend()
            except Exception:
                log.exception("could not confirm keys")

    def on_gone(self, call: Callable[[bytes], None]) -> None:
        """Call with the tag of every tenant that loses a key: destroyed, or not confirmed in time."""
        self._gone.append(call)

    def tend(self) -> None:
        """Confirm keys that have had half their lease, and drop those that cannot be confirmed in time.

        A tenant whose key was destroyed by another process is told of even if its key is not here: its blocks may be.
        """
        now = self._clock.monotonic()
        lost: list[DataKey] = []
        with self._lock:
            due = [key for key, until in self._keys.values() if until - now <= self.lease / 2]
        keys: Keys | None = None
        with contextlib.suppress(KeyFileError):
            keys = self._file.read()
            destroyed = {e.id: e for e in keys.keys if e.destroyed is not None}
            for number in set(destroyed) - self._destroyed:
                here = self._keys.get(bytes.fromhex(number))
                lost.append(here[0] if here else DataKey(b"", bytes.fromhex(destroyed[number].tenant), b""))
            self._destroyed |= set(destroyed)
        # First those that are gone for good: to confirm the others may take long.
        with self._lock:
            self._drop(lost)
        self._tell(lost)
        destroyed_ids, lost, away = {key.id for key in lost}, [], None
        for key in due:
            if key.id in destroyed_ids:
                continue
            try:
                if keys is None:
                    raise Unavailable("the key file cannot be read")
                if away is not None:
                    raise away
                if self._stop.is_set():
                    return
                self._unwrap(_entry(keys, key.id))
            except Exception as e:  # noqa: BLE001 - whatever a key service does, a lease ends
                away = e if isinstance(e, Away) else away  # it is not asked for every key
                if self._here(key.id) is None:
                    log.warning("key %s is dropped: %s", key.id.hex(), e)
                    lost.append(key)
                continue
            with self._lock:
                if key.id in self._keys:  # else it was revoked meanwhile
                    self._keys[key.id] = key, now + self.lease
        with self._lock:
            self._drop(lost)
        self._tell(lost)

    def revoke(self, tenant: bytes) -> None:
        """Drop a tenant's keys now, because the caller has destroyed them; he sees to the blocks himself."""
        with self._lock:
            lost = [key for key, _ in self._keys.values() if key.tenant == tenant]
            self._missing.clear()
            with contextlib.suppress(KeyFileError):
                mine = [e for e in self._file.read().keys if e.tenant == tenant.hex()]
                self._destroyed |= {e.id for e in mine if e.destroyed is not None}
            self._drop(lost)

    def _drop(self, lost: list[DataKey]) -> None:
        for key in lost:
            self._keys.pop(key.id, None)
            if self._current.get(key.tenant) == key.id:
                del self._current[key.tenant]

    def _tell(self, lost: list[DataKey]) -> None:
        for tenant in {key.tenant for key in lost} - {OWN}:
            for call in self._gone:
                call(tenant)

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
        self._keys.clear()


def open_ring(settings: Security, clock: Clock | None = None) -> Ring | None:
    """The ring of a configuration; None where it has no keys. Raises ConfigError or KeyFileError."""
    if not settings.key_source:
        if settings.encrypt:
            raise ConfigError("security.encrypt needs security.key_source: file:PATH, env:NAME or vault:URL")
        return None
    if not settings.key_file:
        raise ConfigError("security.key_source needs security.key_file: where the wrapped keys are to be kept")
    file = KeyFile(Path(settings.key_file).expanduser())
    return Ring(file, wrapper(settings.key_source), settings.lease, clock, audit_of(settings, clock))


def _entry(keys: Keys, number: bytes) -> Entry:
    found = next((e for e in keys.keys if e.id == number.hex()), None)
    if found is None:
        raise Unavailable(UNKNOWN)
    return found
