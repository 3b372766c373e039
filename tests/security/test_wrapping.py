"""Whatever wraps a key unwraps it again, nobody else does, and what cannot work says so."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.errors import ConfigError
from kvtide.security.wrapping import LocalWrapper, Unavailable, VaultWrapper, wrapper
from tests.security.vault import TOKEN, serving

KEY = bytes(range(32))
SECRET = b"64 bytes of secret".ljust(64, b".")


@given(st.binary(max_size=200))
def test_what_is_wrapped_is_unwrapped_and_never_looks_the_same(secret: bytes) -> None:
    made = LocalWrapper(KEY)
    first, second = made.wrap(secret), made.wrap(secret)
    assert first != second
    assert made.unwrap(first) == made.unwrap(second) == made.unwrap(made.rewrap(first)) == secret
    assert secret == b"" or len(secret) < 4 or secret not in first


def test_no_byte_of_a_wrapped_key_may_change() -> None:
    made = LocalWrapper(KEY)
    wrapped = made.wrap(SECRET)
    for i in range(len(wrapped)):
        changed = bytearray(wrapped)
        changed[i] ^= 1
        with pytest.raises(Unavailable, match="damaged"):
            made.unwrap(bytes(changed))
    for cut in range(len(wrapped)):
        with pytest.raises(Unavailable):
            made.unwrap(wrapped[:cut])
    with pytest.raises(Unavailable):
        LocalWrapper(bytes(32)).unwrap(wrapped)


def test_a_key_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    for name, data in (("raw", KEY), ("hex", KEY.hex().encode() + b"\n")):
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_bytes(data)
    wrapped = LocalWrapper(KEY).wrap(SECRET)
    for source in (f"file:{tmp_path / 'raw'}", f"file:{tmp_path / 'hex'}", "env:MINE"):
        assert wrapper(source, {"MINE": KEY.hex()}).unwrap(wrapped) == SECRET


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("file:/nowhere/at/all", "cannot read /nowhere/at/all"),
        ("env:NOT_THERE", "holds no key"),
        ("env:SHORT", "holds no key"),
        ("", "must be file:PATH"),
        ("aws:arn", "must be file:PATH"),
        ("vault:http://vault:8200/transit/kvtide", "http only to this host"),
        ("vault:https://vault:8200/kvtide", "must be like vault:https"),
        ("vault:nonsense", "must be like vault:https"),
    ],
)
def test_a_source_that_cannot_work_says_what_would(source: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        wrapper(source, {"SHORT": "abcd"})


def test_a_key_service_wraps_and_rotates_without_showing_its_key() -> None:
    with serving() as vault:
        made = VaultWrapper(vault.address, {"VAULT_TOKEN": TOKEN})
        old = made.wrap(SECRET)
        assert made.unwrap(old) == SECRET
        vault.rotate()
        new = made.rewrap(old)
        assert (old[:9], new[:9]) == (b"vault:v1:", b"vault:v2:")
        vault.versions[0] = None
        assert made.unwrap(new) == SECRET
        with pytest.raises(Unavailable, match="refused to decrypt: 400"):
            made.unwrap(old)


def test_the_token_may_be_in_a_file_that_is_renewed(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("stale")
    with serving() as vault:
        made = VaultWrapper(vault.address, {"VAULT_TOKEN_FILE": str(tmp_path / "token")})
        with pytest.raises(Unavailable, match="refused to encrypt: 403"):
            made.wrap(SECRET)
        (tmp_path / "token").write_text(TOKEN + "\n")
        assert made.unwrap(made.wrap(SECRET)) == SECRET


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n{",
        b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"data": {"plaintext": "abcde"}}',
        b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"data": {"plaintext": 5}}',
        b"",
    ],
)
def test_whatever_answers_in_its_place_is_a_reason_and_no_error(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as line:
                line.recv(1 << 16)
                line.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        made = VaultWrapper(f"http://127.0.0.1:{server.getsockname()[1]}/transit/kvtide", {"VAULT_TOKEN": TOKEN})
        with pytest.raises(Unavailable, match="does not answer"):
            made.unwrap(b"vault:v1:abcd")
        thread.join()


def test_a_key_service_that_is_away_is_a_reason_and_no_error() -> None:
    with serving() as vault:
        made = VaultWrapper(vault.address, {"VAULT_TOKEN": TOKEN})
        vault.sealed = True
        with pytest.raises(Unavailable, match="refused to encrypt: 503"):
            made.wrap(SECRET)
    with pytest.raises(Unavailable, match="does not answer"):
        made.wrap(SECRET)
