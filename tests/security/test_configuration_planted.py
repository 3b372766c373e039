"""A kvtide.toml that somebody else put into the working directory decides nothing, stops nobody, leads to no secret."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

import kvtide
from kvtide import config
from kvtide.errors import ConfigError

PLANTED = '[dram]\nbudget = "1GiB"\n[objects]\nurl = "s3://theirs/blocks"\n'
STRANGER = 65533

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("KVTIDE_")]:
        monkeypatch.delenv(name)
    config._warned.clear()
    return tmp_path


def planted(text: str = PLANTED, mode: int = 0o644, owner: int | None = None, name: str = "kvtide.toml") -> Path:
    file = Path(name)
    file.write_text(text)
    file.chmod(mode)
    if owner is not None:
        os.chown(file, owner, owner)
    return file


@needs_root
@pytest.mark.parametrize("mode", [0o600, 0o644, 0o666])
def test_what_belongs_to_another_user_is_ignored_with_one_warning(mode: int, caplog: pytest.LogCaptureFixture) -> None:
    planted(owner=STRANGER, mode=mode)
    for _ in range(3):
        found = config.read()
        assert (found.dram.budget, found.objects.url) == (4 << 30, "")
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 1
    for part in (str(Path("kvtide.toml").absolute()), f"user {STRANGER}", f"mode {mode:04o}", "--config"):
        assert part in said[0]


@needs_root
def test_a_store_opens_where_somebody_else_put_nonsense() -> None:
    planted("not = [toml", owner=STRANGER)
    with kvtide.open(dram={"budget": "8MiB", "segment": "1MiB"}) as store:
        assert store.statistics().tiers["dram"].budget == 8 << 20


@needs_root
def test_neither_a_strangers_link_nor_his_pipe_is_followed(folder: Path) -> None:
    own = planted(name="elsewhere.toml")
    Path("kvtide.toml").symlink_to(own)
    assert config.read().dram.budget == 1 << 30, "an own link is as good as a file"
    os.lchown("kvtide.toml", STRANGER, STRANGER)
    assert config.read().dram.budget == 4 << 30
    Path("kvtide.toml").unlink()
    os.mkfifo("kvtide.toml")
    assert config.read().dram.budget == 4 << 30
    os.chown("kvtide.toml", STRANGER, STRANGER)
    assert config.read().dram.budget == 4 << 30


def test_an_own_file_that_others_may_write_is_an_error_that_says_what_to_do() -> None:
    refused = []
    for mode in (0o400, 0o600, 0o640, 0o644, 0o602, 0o646, 0o666):
        planted(mode=mode)
        if mode & 0o002:
            refused.append(mode)
            with pytest.raises(
                ConfigError, match=rf"others may write to it \(mode {mode:04o}\): chmod go-w kvtide\.toml"
            ):
                config.read()
        else:
            assert config.read().dram.budget == 1 << 30
        Path("kvtide.toml").unlink()
    assert len(refused) == 3


@needs_root
def test_a_group_of_others_counts_and_a_private_one_does_not() -> None:
    planted(mode=0o664)
    assert config.read().dram.budget == 1 << 30, "root's own group"
    os.chown("kvtide.toml", 0, STRANGER)
    with pytest.raises(ConfigError, match="mode 0664"):
        config.read()


@pytest.mark.parametrize("secret", sorted(config.SECRETS))
def test_no_secret_is_named_by_a_file_that_nobody_named(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository that was cloned belongs to the user who cloned it."""
    section, _, name = secret.partition(".")
    value = "env:NOT_THERE" if name in ("tokens", "key_source") else "/home/somebody/secret"
    file = planted(f'[{section}]\n{name} = "{value}"\n')
    with pytest.raises(ConfigError, match=rf"{section}\.{name} leads to a secret.*--config kvtide\.toml"):
        config.read()
    with pytest.raises(ConfigError, match="leads to a secret"):
        kvtide.open()
    assert getattr(getattr(config.read(file), section), name) == value
    monkeypatch.setenv("KVTIDE_CONFIG", str(file))
    assert getattr(getattr(config.read(), section), name) == value


def test_a_complete_file_of_defaults_is_no_secret() -> None:
    lines = []
    for section in config._sections():
        lines += [f"[{section}]"]
        lines += [
            f'{s.name.partition(".")[2]} = ""'
            for s in config.explain()
            if s.name in config.SECRETS and s.name.startswith(section + ".")
        ]
    planted("\n".join(lines))
    assert config.read() == config.Config()


@needs_root
def test_a_named_file_may_be_anybodys() -> None:
    file = planted(owner=STRANGER, mode=0o666)
    assert config.read(file).dram.budget == config.read(env={"KVTIDE_CONFIG": str(file)}).dram.budget == 1 << 30
