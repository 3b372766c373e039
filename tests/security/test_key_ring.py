"""Keys in memory: made once, found by all, confirmed while they live, and gone when they must be."""

from __future__ import annotations

import contextlib
import json
import threading
from http.client import BadStatusLine
from pathlib import Path

import pytest

from kvtide.errors import HeldError, KeyFileError
from kvtide.security.key_admin import destroy, hold, release, rotate
from kvtide.security.key_file import KeyFile
from kvtide.security.key_ring import OWN, KeyRing
from kvtide.security.wrapping import LocalWrapper, Unavailable, VaultWrapper
from kvtide.testing.clock import FakeClock
from kvtide.testing.keys import WRAPPING, ring_in
from tests.security.vault import TOKEN, serving

GOLDEN = Path(__file__).with_name("golden_keys_v1.json")
ONE, OTHER = b"1" * 16, b"2" * 16


def file_in(folder: Path) -> KeyFile:
    return KeyFile(folder / "keys.json")


def test_a_tenant_has_one_key_for_all_who_ask(tmp_path: Path) -> None:
    rings = [ring_in(tmp_path) for _ in range(4)]
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda r=r: found.append(r.of(ONE).secret)) for r in rings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(file_in(tmp_path).read().keys) == 1
    assert rings[0].of(OTHER).secret not in found
    key = rings[0].of(ONE)
    assert ring_in(tmp_path).find(key.id) == key
    assert key.secret.hex() not in (tmp_path / "keys.json").read_text()
    assert key.secret.hex() not in repr(key)


def test_a_key_is_confirmed_while_it_lives(tmp_path: Path) -> None:
    clock = FakeClock()
    key_ring = ring_in(tmp_path, 60.0, clock)
    key, gone = key_ring.of(ONE), list[bytes]()
    key_ring.on_gone(gone.append)
    for _ in range(20):
        clock.advance(31)
        key_ring.tend()
        assert key_ring.find(key.id) is key
    assert gone == []


def test_a_destroyed_key_is_gone_when_it_is_next_looked_for_and_its_tenant_is_told_of(tmp_path: Path) -> None:
    clock = FakeClock()
    key_ring, gone = ring_in(tmp_path, 60.0, clock), list[bytes]()
    key_ring.on_gone(gone.append)
    one, other = key_ring.of(ONE), key_ring.of(OTHER)
    assert destroy(file_in(tmp_path), ONE, clock) == 1
    assert key_ring.find(one.id) is one  # under its lease
    clock.advance(31)
    key_ring.tend()
    assert gone == [ONE]
    with pytest.raises(Unavailable, match="its key was destroyed"):
        key_ring.find(one.id)
    assert key_ring.find(other.id) is other
    assert key_ring.of(ONE).id != one.id
    assert one.id.hex() in (tmp_path / "keys.json").read_text()
    assert destroy(file_in(tmp_path), ONE) == 1


def test_a_lapsed_lease_ends_a_key_even_if_nobody_tends_it(tmp_path: Path) -> None:
    clock = FakeClock()
    key_ring = ring_in(tmp_path, 60.0, clock)
    key = key_ring.of(ONE)
    destroy(file_in(tmp_path), ONE, clock)
    clock.advance(60)
    with pytest.raises(Unavailable, match="destroyed"):
        key_ring.find(key.id)


def test_revoked_keys_are_gone_at_once(tmp_path: Path) -> None:
    key_ring, gone = ring_in(tmp_path), list[bytes]()
    key_ring.on_gone(gone.append)
    key = key_ring.of(ONE)
    destroy(file_in(tmp_path), ONE)
    key_ring.revoke(ONE)
    with pytest.raises(Unavailable, match="destroyed"):
        key_ring.find(key.id)
    with pytest.raises(Unavailable, match="destroyed"):
        key_ring.of(ONE)
    key_ring.forgotten(ONE, file_in(tmp_path).read())
    key_ring.tend()
    assert gone == []  # the process that revokes the key knows
    assert key_ring.of(ONE).id != key.id


@pytest.mark.parametrize("renewed", [False, True], ids=["nobody has a new key", "another process has made a new key"])
@pytest.mark.parametrize("had", [False, True], ids=["blocks in memory alone", "sealed before"])
def test_what_is_in_memory_is_not_sealed_after_its_key_was_destroyed(tmp_path: Path, renewed: bool, had: bool) -> None:
    """Neither with the old key once its lease is over, nor with a new one: until those who have blocks were told."""
    clock = FakeClock()
    key_ring, dropped = ring_in(tmp_path, 60.0, clock), list[bytes]()
    before = key_ring.of(ONE).id if had else b""
    destroy(file_in(tmp_path), ONE, clock)
    if renewed:
        ring_in(tmp_path, 60.0, clock).of(ONE)
    clock.advance(61)

    def drop(tenant: bytes) -> None:
        with pytest.raises(Unavailable, match="destroyed"):
            key_ring.of(tenant)
        dropped.append(tenant)

    with pytest.raises(Unavailable, match="destroyed"):
        key_ring.of(ONE)
    key_ring.of(OTHER)  # nobody else waits
    key_ring.on_gone(drop)
    key_ring.tend()
    assert dropped == [ONE]
    assert key_ring.of(ONE).id != before
    living = [e for e in file_in(tmp_path).read().keys if e.tenant == ONE.hex() and e.destroyed is None]
    assert [e.id for e in living] == [key_ring.of(ONE).id.hex()]


def test_a_key_service_that_goes_away_is_forgiven_within_the_lease_and_not_beyond(tmp_path: Path) -> None:
    clock = FakeClock()
    with serving() as vault:
        key_ring = KeyRing(file_in(tmp_path), VaultWrapper(vault.address, {"VAULT_TOKEN": TOKEN}), 60.0, clock)
        gone: list[bytes] = []
        key_ring.on_gone(gone.append)
        key = key_ring.of(ONE)
        vault.sealed = True
        clock.advance(31)
        key_ring.tend()
        assert key_ring.find(key.id) is key
        clock.advance(30)
        key_ring.tend()
        assert gone == [ONE]
        with pytest.raises(Unavailable, match="503"):
            key_ring.find(key.id)
        asked = len(vault.asked)
        with pytest.raises(Unavailable, match="503"):
            key_ring.find(key.id)  # not asked again at once
        assert len(vault.asked) == asked
        vault.sealed = False
        clock.advance(6)
        assert key_ring.find(key.id) == key


def test_whatever_a_key_service_does_a_lease_ends(tmp_path: Path) -> None:
    class Mad(LocalWrapper):
        error: Exception | None = None

        def unwrap(self, wrapped: bytes) -> bytes:
            if self.error is not None:
                raise self.error
            return super().unwrap(wrapped)

    clock, wrapper = FakeClock(), Mad(bytes(32))
    key_ring = KeyRing(file_in(tmp_path), wrapper, 60.0, clock)
    gone: list[bytes] = []
    key_ring.on_gone(gone.append)
    keys = [key_ring.of(tenant) for tenant in (ONE, OTHER)]
    wrapper.error = BadStatusLine("SSH-2.0")
    for _ in range(5):
        clock.advance(15)
        key_ring.tend()
    assert sorted(gone) == sorted([ONE, OTHER])
    with pytest.raises(Unavailable):
        key_ring.find(keys[0].id)


def test_a_dead_key_service_is_waited_for_once_and_not_for_every_key(tmp_path: Path) -> None:
    clock = FakeClock()
    with serving() as vault:
        made = VaultWrapper(vault.address, {"VAULT_TOKEN": TOKEN})
        ids = [KeyRing(file_in(tmp_path), made, 60.0, clock).of(tenant).id for tenant in (ONE, OTHER)]
    asked: list[bytes] = []
    key_ring = KeyRing(file_in(tmp_path), made, 60.0, clock)
    made.unwrap = lambda wrapped: asked.append(wrapped) or VaultWrapper.unwrap(made, wrapped)  # type: ignore[method-assign,func-returns-value]
    for number in ids:
        with pytest.raises(Unavailable, match="does not answer"):
            key_ring.find(number)
    assert len(asked) == 1


def test_a_moved_entry_is_found_out(tmp_path: Path) -> None:
    """Somebody who may write the key file gives one tenant the key of another."""
    key_ring = ring_in(tmp_path)
    one, other = key_ring.of(ONE), key_ring.of(OTHER)
    with file_in(tmp_path).change() as keys:
        wrapped = {e.id: e.wrapped for e in keys.keys}
        keys.keys = [type(e)(e.id, e.tenant, e.created, wrapped[other.id.hex()]) for e in keys.keys]
    with pytest.raises(Unavailable, match="another tenant"):
        ring_in(tmp_path).find(one.id)


def test_rotation_keeps_the_keys_and_leaves_nothing_to_the_old_wrapper(tmp_path: Path) -> None:
    key_ring = ring_in(tmp_path)
    key, own = key_ring.of(ONE), key_ring.of(OWN)
    fresh = LocalWrapper(bytes(32))
    assert rotate(file_in(tmp_path), LocalWrapper(WRAPPING), fresh) == 2
    assert [KeyRing(file_in(tmp_path), fresh).find(k.id) for k in (key, own)] == [key, own]
    with pytest.raises(Unavailable, match="wrapped with another key"):
        ring_in(tmp_path).find(key.id)


def test_a_rotation_that_cannot_be_whole_changes_nothing(tmp_path: Path) -> None:
    key_ring = ring_in(tmp_path)
    key_ring.of(ONE)
    before = (tmp_path / "keys.json").read_bytes()
    with pytest.raises(Unavailable):
        rotate(file_in(tmp_path), LocalWrapper(bytes(32)), LocalWrapper(WRAPPING))
    assert (tmp_path / "keys.json").read_bytes() == before


def test_a_legal_hold_refuses_until_it_ends(tmp_path: Path) -> None:
    key_ring, file = ring_in(tmp_path), file_in(tmp_path)
    key = key_ring.of(ONE)
    hold(file, ONE, "case 17")
    with pytest.raises(HeldError, match="case 17"):
        destroy(file, ONE)
    assert ring_in(tmp_path).find(key.id) == key
    assert release(file, ONE)
    assert not release(file, ONE)
    assert destroy(file, ONE) == 1


# -- the file -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [1, 4, 128])
def test_a_damaged_key_file_is_never_misread(tmp_path: Path, change: int) -> None:
    """Whichever byte it is; and what is cut off."""
    file, good = file_in(tmp_path), GOLDEN.read_bytes()
    said = KeyFile(GOLDEN).read()
    damaged = [good[:i] + bytes([good[i] ^ change]) + good[i + 1 :] for i in range(len(good))]
    misread = 0
    for data in damaged + [good[:i] for i in range(len(good) - 2)]:
        file.path.write_bytes(data)
        with contextlib.suppress(KeyFileError):
            misread += file.read() != said  # white space may change
    assert misread == 0


def test_a_newer_key_file_is_refused_and_not_touched(tmp_path: Path) -> None:
    from kvtide.security.key_file import _check

    ring_in(tmp_path).of(ONE)
    path = tmp_path / "keys.json"
    body = json.loads(path.read_text())["body"] | {"version": 2}
    path.write_text(json.dumps({"check": _check(body), "body": body}))
    before = path.read_bytes()
    with pytest.raises(KeyFileError, match="version 2"):
        ring_in(tmp_path)
    with pytest.raises(KeyFileError, match="version 2"):
        hold(file_in(tmp_path), ONE)
    assert path.read_bytes() == before


def test_a_change_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    ring_in(tmp_path).of(ONE)
    before = (tmp_path / "keys.json").read_bytes()
    with contextlib.suppress(ZeroDivisionError), file_in(tmp_path).change() as keys:
        keys.keys.clear()
        raise ZeroDivisionError
    assert (tmp_path / "keys.json").read_bytes() == before
    assert (tmp_path / "keys.json").stat().st_mode & 0o777 == 0o600


def test_an_old_key_file_is_read_forever(tmp_path: Path) -> None:
    """Version 1, as it was first written."""
    (tmp_path / "keys.json").write_bytes(GOLDEN.read_bytes())
    keys = file_in(tmp_path).read()
    assert [bool(e.destroyed) for e in keys.keys] == [False, True]
    assert keys.held(OTHER) is not None
    assert ring_in(tmp_path).of(ONE).secret == bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff" * 2)
