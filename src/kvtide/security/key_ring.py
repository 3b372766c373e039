"""Data keys in memory: their use and their leases.

A key is held under a *lease*: some seconds after it was last confirmed it is dropped, and what it encrypts is a miss
until it is confirmed again. Confirming means that the key file still has it and the wrapper still unwraps it. So an
operator who destroys a key, in the file or at the key service, knows by when every process has lost it, even processes
that cannot be reached. Threads that read and write blocks only look a key up; they fetch one when they first need it.
The ring's own thread confirms all keys at half their lease, and reports which tenants' keys are gone: their blocks in
memory must be removed too.

A tenant gets its first key when its first block is encrypted, and another if that was destroyed: what it stores after
that is new. Blocks stored before are still in the memory of processes that do not know of the destruction yet. They
must not be encrypted with the new key, nor written in the clear where nothing is encrypted. So a ring allows no writes
for a tenant from when the file says that one of its keys was destroyed until this process has dropped the tenant's
blocks.

Ids are random. A key service that fails is not asked again at once: blocks must not queue up behind it.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtide.clock import Clock, SystemClock
from kvtide.config import Security
from kvtide.errors import ConfigError, KeyFileError
from kvtide.security.audit import Audit, audit_of
from kvtide.security.key_file import KeyEntry, KeyFile, Keys
from kvtide.security.wrapping import Away, KeyState, Unavailable, Wrapper, wrapper

__all__ = ["OWN", "DataKey", "KeyRing", "open_ring"]

log = logging.getLogger("kvtide.security")

OWN = bytes(16)
"""The tag under which a store keeps the key of its own files, such as journals. No tenant has it."""


_ALL = b""
"""Stands for all keys at once."""
_PAUSE = 5.0
"""Seconds until fetching an unavailable key is tried again."""


@dataclass(frozen=True, slots=True)
class DataKey:
    """A tenant's key. Never shown."""

    id: bytes
    tenant: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"<DataKey {self.id.hex()}>"


class KeyRing:
    """The keys of a key file, unwrapped as they are needed. Thread-safe."""

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
        """By id, with the time when its lease ends."""
        self._current: dict[bytes, bytes] = {}
        """The id of the key that encrypts a tenant's blocks now."""
        self._missing: dict[bytes, tuple[str, KeyState | None, float]] = {}
        """By key id or tenant: why a key is unavailable, and until when it is not requested again."""
        self._destroyed = {e.id for e in file.read().keys if e.destroyed is not None}
        """Keys that were destroyed before there was any block here, or whose tenant's blocks have left memory since."""
        self._seen: tuple[tuple[int, int, int], Keys] = (0, 0, 0), Keys()
        """The version of the file last read, and its content."""
        self._gone: list[Callable[[bytes], None]] = []
        self._telling = threading.Lock()
        """Held while the callbacks of ``on_gone`` are called."""
        self._forgetting: Counter[bytes] = Counter()
        """Tenants whose blocks are being removed by the caller that destroys their keys, and how many callers do so."""
        self._stop = threading.Event()
        self._soon = threading.Event()
        """Set when ``tend`` is to run now."""
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<KeyRing of {len(self._keys)} keys>"

    # -- using keys ---------------------------------------------------------------------------------------

    def of(self, tenant: bytes) -> DataKey:
        """The key that encrypts what a tenant stores now; made, if there is none. Raises Unavailable."""
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
                text, state, until = self._missing.get(missing, ("", None, 0.0))
                if self._clock.monotonic() < until:
                    raise Unavailable(text, state)
            since = self._clock.monotonic()
            try:
                key = fetch()
            except Exception as e:
                # Not the exception itself: its traceback would keep the caller's memory, and perhaps a secret.
                text, state = "the key file, audit log or service cannot be used", None
                if isinstance(e, Unavailable):
                    text, state = str(e), e.state
                self._missing[_ALL if isinstance(e, Away) else what] = text, state, self._clock.monotonic() + _PAUSE
                raise Unavailable(text, state) from e
            self._missing.pop(what, None)
            self._keys[key.id] = key, since + self.lease
            return key

    def _latest(self, tenant: bytes) -> DataKey:
        keys = self._file.read()
        self._check_heard(keys, tenant)
        entry = keys.of(tenant)
        if entry is None:
            made = DataKey(secrets.token_bytes(16), tenant, secrets.token_bytes(32))
            wrapped = self._wrapper.wrap(made.secret + tenant + made.id)
            with self._file.change() as keys:
                self._check_heard(keys, tenant)
                entry = keys.of(tenant)  # another process may have been faster
                if entry is None:
                    entry = KeyEntry(made.id.hex(), tenant.hex(), self._clock.time(), wrapped.hex())
                    keys.keys.append(entry)
                    if self._audit is not None:
                        self._audit.record("make key", "done", tenant=entry.tenant, key=entry.id)
        key = self._unwrap(entry)
        self._current[tenant] = key.id
        return key

    def _check_heard(self, keys: Keys, tenant: bytes) -> None:
        """Raises Unavailable while blocks may be here that were stored before a key of this tenant was destroyed."""
        if any(e.tenant == tenant.hex() and e.destroyed is not None and e.id not in self._destroyed for e in keys.keys):
            self._soon.set()
            raise _unavailable(KeyState.DESTROYED)

    def check_heard(self, tenant: bytes) -> None:
        """For writes in the clear. Raises Unavailable while blocks may be here that were stored before a key of this
        tenant was destroyed. Costs one stat of the file, unless it has changed."""
        try:
            about = self._file.path.stat()
            version = about.st_mtime_ns, about.st_size, about.st_ino
        except FileNotFoundError:
            return
        except OSError as e:
            raise Unavailable("the key file cannot be read") from e
        if version != self._seen[0]:
            try:
                self._seen = version, self._file.read()
            except KeyFileError as e:
                raise Unavailable("the key file cannot be read") from e
        self._check_heard(self._seen[1], tenant)

    def _entry(self, number: bytes) -> KeyEntry:
        return _entry(self._file.read(), number)

    def _unwrap(self, entry: KeyEntry) -> DataKey:
        if entry.destroyed is not None:
            raise _unavailable(KeyState.DESTROYED)
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
        while not self._stop.is_set():
            if self._soon.wait(self.lease / 4):
                self._soon.clear()
            if self._stop.is_set():
                return
            try:
                self.tend()
            except Exception:
                log.exception("could not confirm keys")

    def on_gone(self, call: Callable[[bytes], None]) -> None:
        """Register a callback for the tag of every tenant that loses a key: destroyed, or not confirmed in time."""
        self._gone.append(call)

    def tend(self) -> None:
        """Confirm keys that have had half their lease, and drop those that cannot be confirmed in time.

        A tenant whose key was destroyed by another process is reported even if its key is not here: its blocks may be.
        """
        now = self._clock.monotonic()
        lost: list[DataKey] = []
        with self._lock:
            due = [key for key, until in self._keys.values() if until - now <= self.lease / 2]
        keys: Keys | None = None
        # First the destroyed ones: confirming the others may take long.
        with self._telling:
            destroyed: list[KeyEntry] = []
            with contextlib.suppress(KeyFileError):
                keys = self._file.read()
                destroyed = [e for e in keys.keys if e.destroyed is not None and e.id not in self._destroyed]
                destroyed = [e for e in destroyed if bytes.fromhex(e.tenant) not in self._forgetting]
            for e in destroyed:
                here = self._keys.get(bytes.fromhex(e.id))
                lost.append(here[0] if here else DataKey(b"", bytes.fromhex(e.tenant), b""))
            with self._lock:
                self._drop(lost)
            self._tell(lost)
            self._heard(destroyed)  # not before the blocks are removed
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
                away = e if isinstance(e, Away) else away  # the service is not asked for every key
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

    @contextlib.contextmanager
    def forgetting(self, tenant: bytes) -> Iterator[None]:
        """Held while the caller destroys a tenant's keys and removes its blocks itself: no callback is called for it.

        The caller calls ``revoke`` when the keys are destroyed, and ``forgotten`` when the blocks are removed. If it
        does not get that far, the callbacks are called afterwards, as if another process had destroyed the keys.
        """
        with self._telling:
            self._forgetting[tenant] += 1
        try:
            yield
        finally:
            with self._telling:
                self._forgetting[tenant] -= 1
                if not self._forgetting[tenant]:
                    del self._forgetting[tenant]

    def revoke(self, tenant: bytes) -> None:
        """Drop a tenant's keys now. Until its blocks are ``forgotten``, nothing is encrypted for it."""
        with self._lock:
            self._missing.clear()
            self._drop([key for key, _ in self._keys.values() if key.tenant == tenant])

    def forgotten(self, tenant: bytes, keys: Keys) -> None:
        """Confirms that no block is here that was stored before this tenant's keys, destroyed according to ``keys``,
        were."""
        self._heard([e for e in keys.keys if e.tenant == tenant.hex() and e.destroyed is not None])

    def _heard(self, destroyed: Iterable[KeyEntry]) -> None:
        with self._lock:
            for e in destroyed:
                self._destroyed.add(e.id)
                self._missing.pop(bytes.fromhex(e.tenant), None)

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
        self._soon.set()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
        self._keys.clear()


def open_ring(settings: Security, clock: Clock | None = None) -> KeyRing | None:
    """The ring of a configuration; None if it has no keys. Raises ConfigError or KeyFileError."""
    if not settings.key_source:
        if settings.encrypt:
            raise ConfigError("security.encrypt needs security.key_source: file:PATH, env:NAME or vault:URL")
        return None
    if not settings.key_file:
        raise ConfigError("security.key_source needs security.key_file: where the wrapped keys are to be kept")
    file = KeyFile(Path(settings.key_file).expanduser())
    return KeyRing(file, wrapper(settings.key_source), settings.lease, clock, audit_of(settings, clock))


def _entry(keys: Keys, number: bytes) -> KeyEntry:
    found = next((e for e in keys.keys if e.id == number.hex()), None)
    if found is None:
        raise _unavailable(KeyState.UNKNOWN)
    return found


def _unavailable(state: KeyState) -> Unavailable:
    return Unavailable(state.value, state)
