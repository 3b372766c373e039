"""Administration of keys. Each operation is durable when it returns."""

from __future__ import annotations

import secrets

import msgspec

from kvtide.clock import Clock, SystemClock
from kvtide.errors import HeldError
from kvtide.security.key_file import Hold, KeyEntry, KeyFile
from kvtide.security.wrapping import Wrapper

__all__ = ["destroy", "hold", "release", "rotate"]


def destroy(file: KeyFile, tenant: bytes, clock: Clock | None = None, known: bool = True) -> int:
    """Destroy all keys of a tenant; returns how many. Raises HeldError under a legal hold.

    If the tenant has no key, a new entry is written as destroyed, so that every process that has blocks of the tenant
    in memory learns of it. Nothing is written if the tenant is not ``known`` by blocks, and the file never had a key of
    it.
    """
    now = (clock or SystemClock()).time()
    with file.change() as keys:
        if (held := keys.held(tenant)) is not None:
            raise HeldError(
                f"tenant {held.tenant} is under a legal hold ({held.why or 'no reason was given'}): nothing was "
                f"destroyed. End it first: kvtide hold --tenant {held.tenant} --release"
            )
        mine = [i for i, e in enumerate(keys.keys) if e.tenant == tenant.hex() and e.destroyed is None]
        for i in mine:
            keys.keys[i] = msgspec.structs.replace(keys.keys[i], wrapped="", destroyed=now)
        if not mine and (known or keys.names(tenant)):
            keys.keys.append(KeyEntry(secrets.token_hex(16), tenant.hex(), now, "", now))
    return len(mine)


def hold(file: KeyFile, tenant: bytes, why: str = "", clock: Clock | None = None) -> None:
    """Put a tenant under a legal hold: until it ends, its keys cannot be destroyed."""
    with file.change() as keys:
        keys.holds = [h for h in keys.holds if h.tenant != tenant.hex()]
        keys.holds.append(Hold(tenant.hex(), (clock or SystemClock()).time(), why))


def release(file: KeyFile, tenant: bytes) -> bool:
    """End a legal hold. False if there was none."""
    with file.change() as keys:
        held = keys.held(tenant)
        keys.holds = [h for h in keys.holds if h is not held]
    return held is not None


def rotate(file: KeyFile, old: Wrapper, new: Wrapper | None = None) -> int:
    """Rewrap all keys that are not destroyed: with ``new``, or with the newest key of the same wrapper. Returns how
    many.

    The data keys stay the same, and so does what they encrypt. Raises Unavailable, and changes nothing, if one cannot
    be wrapped.
    """
    with file.change() as keys:
        living = [i for i, e in enumerate(keys.keys) if e.destroyed is None]
        for i in living:
            wrapped = bytes.fromhex(keys.keys[i].wrapped)
            fresh = old.rewrap(wrapped) if new is None else new.wrap(old.unwrap(wrapped))
            keys.keys[i] = msgspec.structs.replace(keys.keys[i], wrapped=fresh.hex())
    return len(living)
