"""A secret that every user of the host may read or write is not used, and an error says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvtide
from kvtide.config import Node
from kvtide.errors import ConfigError
from kvtide.node.admin.auth import HttpAuth
from kvtide.node.roles import Role
from kvtide.security.wrapping import LocalWrapper, wrapper
from kvtide.tiers.shared.valkey import Valkey

KEY = bytes(range(32))
TOKEN = "t" * 32
NOBODY = "valkey://127.0.0.1:1"
"""Where nothing listens: a password is read before anybody is asked."""


def wrapping_key(file: str) -> None:
    made = wrapper(f"file:{file}")
    assert made.unwrap(LocalWrapper(KEY).wrap(b"secret")) == b"secret"


def tokens(file: str) -> None:
    caller = HttpAuth(Node(tokens=f"file:{file}")).of(f"Bearer {TOKEN}", None)
    assert caller is not None
    assert (caller.name, caller.role) == ("ops", Role.ADMIN)


def password(file: str) -> None:
    made = Valkey(NOBODY, user="me", password_file=file)
    assert made._client._words() == [b"me", b"sesame"]
    made.close()


SECRETS: dict[str, tuple[str, Callable[[str], None]]] = {
    "security.key_source": (KEY.hex(), wrapping_key),
    "node.tokens": (f"ops admin {TOKEN}", tokens),
    "valkey.password_file": ("sesame\n", password),
}


@pytest.mark.parametrize("linked", [False, True], ids=["file", "link"])
@pytest.mark.parametrize("setting", SECRETS)
def test_a_secret_that_everybody_may_read_or_write_is_refused(tmp_path: Path, setting: str, linked: bool) -> None:
    secret, use = SECRETS[setting]
    file = name = tmp_path / "secret"
    file.write_text(secret)
    if linked:
        name = tmp_path / "link"
        name.symlink_to(file)
    used = []
    for mode in (0o400, 0o600, 0o440, 0o640, 0o660, 0o604, 0o644, 0o602, 0o606, 0o666, 0o777):
        file.chmod(mode)
        if mode & 0o006 == 0:
            use(str(name))
            used.append(mode)
        else:
            said = rf"^{setting}: .*write {name} \(mode {mode:04o}\).*chmod 600 {name} "
            with pytest.raises(ConfigError, match=said) as caught:
                use(str(name))
            assert secret.split()[-1] not in str(caught.value)
    assert used == [0o400, 0o600, 0o440, 0o640, 0o660]


@pytest.mark.parametrize("setting", SECRETS)
def test_what_is_no_file_with_a_secret_is_an_error_and_not_read_to_its_end(tmp_path: Path, setting: str) -> None:
    _, use = SECRETS[setting]
    (tmp_path / "giant").touch(0o600)
    with (tmp_path / "giant").open("r+b") as f:
        f.truncate(1 << 40)
    for name, said in (("giant", "more than 1048576 bytes"), ("none", "No such file"), (".", "Is a directory")):
        with pytest.raises(ConfigError, match=rf"^{setting}: .*{said}"):
            use(str(tmp_path / name))


def test_a_store_does_not_open_with_such_a_password(tmp_path: Path) -> None:
    """A storage that is away is a warning at opening; this is an error, so that it is not overlooked."""
    file = tmp_path / "password"
    file.write_text("sesame\n")
    how: dict[str, Any] = {
        "dram": {"budget": "16MiB", "segment": "2MiB"},
        "valkey": {"url": NOBODY, "password_file": str(file)},
    }
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"valkey\.password_file: .*mode 0644"):
        kvtide.open(**how)
    file.chmod(0o600)
    kvtide.open(**how).close()
