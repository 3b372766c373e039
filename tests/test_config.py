"""Settings: where they come from, what is refused, and what the refusal says."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide import config
from kvtide.config import Config, Dram, explain
from kvtide.errors import ConfigError
from kvtide.units import format_duration, format_size, parse_duration, parse_size

MiB, GiB = 1 << 20, 1 << 30


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without a kvtide.toml, an environment without settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("KVTIDE_CONFIG", "KVTIDE_DRAM_BUDGET", "KVTIDE_NVME_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def refusal(**arguments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        config.read(**{"env": {}, **arguments})  # type: ignore[arg-type]
    return str(caught.value)


def test_defaults_alone() -> None:
    settings = config.read(env={})
    assert settings == Config()
    assert settings.dram.budget == 4 * GiB
    assert settings.nvme.path == ""
    assert {setting.source for setting in explain(env={})} == {"default"}


def test_arguments_beat_environment_beats_file_beats_defaults(elsewhere: Path) -> None:
    Path("kvtide.toml").write_text('[dram]\nbudget = "1GiB"\nsegment = "2MiB"\nchecksum = true\n[nvme]\nthreads = 8\n')
    env = {"KVTIDE_DRAM_BUDGET": "2GiB", "KVTIDE_DRAM_SEGMENT": "3 MiB", "PATH": "/bin"}
    settings = config.read(env=env, dram={"budget": "3GiB"})
    assert settings.dram == Dram(budget=3 * GiB, segment=3 * MiB, checksum=True)
    sources = {s.name: s.source for s in explain(env=env, dram={"budget": "3GiB"})}
    assert sources["dram.budget"] == "argument"
    assert sources["dram.segment"] == "KVTIDE_DRAM_SEGMENT"
    assert sources["dram.checksum"] == sources["nvme.threads"] == "kvtide.toml"
    assert sources["nvme.direct"] == "default"


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIDE_NVME_PATH", "/x")
    assert config.read().nvme.path == "/x"


def test_named_file_beats_the_variable_beats_the_folder(elsewhere: Path) -> None:
    for name, threads in (("kvtide.toml", 1), ("by-variable.toml", 2), ("by-name.toml", 3)):
        Path(name).write_text(f"nvme.threads = {threads}\n")
    env = {"KVTIDE_CONFIG": "by-variable.toml"}
    assert config.read(env={}).nvme.threads == 1
    assert config.read(env=env).nvme.threads == 2
    assert config.read("by-name.toml", env).nvme.threads == 3


def test_overrides_may_be_dotted_or_sections() -> None:
    dotted = config.read(env={}, overrides={"nvme.threads": 2, "dram.budget": "1GiB"})
    nested = config.read(env={}, nvme={"threads": 2}, dram=Dram(budget=GiB))
    assert dotted == nested


def test_environment_values_are_text() -> None:
    env = {
        "KVTIDE_NVME_THREADS": "16",
        "KVTIDE_NVME_DIRECT": "false",
        "KVTIDE_NVME_TOKEN_IDS": "1",
        "KVTIDE_PLAN_PREFILL_TOKENS_PER_SECOND": "1250.5",
        "KVTIDE_PLAN_DEADLINE_SECONDS": "250ms",
    }
    settings = config.read(env=env)
    assert settings.nvme.threads == 16
    assert settings.nvme.direct is False
    assert settings.nvme.token_ids is True
    assert settings.plan.prefill_tokens_per_second == 1250.5
    assert settings.plan.deadline_seconds == 0.25


def test_paths_expand_home_and_may_be_path_objects(elsewhere: Path) -> None:
    assert config.read(env={}, nvme={"path": "~/kv"}).nvme.path == str(elsewhere / "home/kv")
    assert config.read(env={}, nvme={"path": elsewhere}).nvme.path == str(elsewhere)


def test_unknown_names_give_source_and_nearest() -> None:
    Path("kvtide.toml").write_text("[nvme]\nbudgett = 5\n")
    assert refusal() == "kvtide.toml: [nvme] has no setting 'budgett'; did you mean 'budget'?"
    Path("kvtide.toml").write_text("[nvmee]\nbudget = 5\n")
    assert refusal() == "kvtide.toml: there is no section [nvmee]; did you mean 'nvme'?"
    Path("kvtide.toml").unlink()
    said = refusal(env={"KVTIDE_NVME_THREDS": "4"})
    assert said == "KVTIDE_NVME_THREDS: [nvme] has no setting 'threds'; did you mean 'threads'?"
    said = refusal(dram={"checksums": True})
    assert said == "argument: [dram] has no setting 'checksums'; did you mean 'checksum'?"
    assert "there is budget, segment, huge_pages, prefault, checksum" in refusal(overrides={"dram.zzz": 1})
    assert refusal(env={"KVTIDE_DRAM": "4GiB"}).startswith("KVTIDE_DRAM: [dram] has no setting")


def test_variables_of_no_section_are_not_ours() -> None:
    env = {"KVTIDE_CONFIG": "", "KVTIDE_LOG": "debug", "KVTIDE_DRAMA": "x", "DRAM_BUDGET": "x"}
    assert config.read(env=env) == Config()


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("dram.budget", "12 parsecs", "a size such as 4096, 512MiB or 1.5GB, at least 1 MiB"),
        ("dram.budget", 4096, "a size such as 4096, 512MiB or 1.5GB, at least 1 MiB"),
        ("dram.budget", -1, "at least 1 MiB"),
        ("dram.budget", True, "a size"),
        ("dram.budget", 10**400, "a size"),
        ("dram.segment", MiB + 1, "at least 1 MiB, a multiple of 4 KiB"),
        ("dram.segment", 4096, "at least 1 MiB, a multiple of 4 KiB"),
        ("dram.huge_pages", "1GiB", "one of '2MiB', 'no', 'transparent'"),
        ("dram.checksum", "maybe", "true or false"),
        ("nvme.budget", "1MiB", "at least 16 MiB"),
        ("nvme.threads", 0, "a whole number, at least 1, at most 64"),
        ("nvme.threads", 65, "a whole number, at least 1, at most 64"),
        ("nvme.threads", 2.5, "a whole number"),
        ("nvme.threads", "", "a whole number"),
        ("nvme.queue", 0, "at least 1 B"),
        ("nvme.path", 5, "a path"),
        ("nvme.path", None, "a path"),
        ("nvme.path", "~no-such-user/kv", "a path"),
        ("plan.prefill_tokens_per_second", -1, "a number, at least 0"),
        ("plan.deadline_seconds", "inf", "a time such as 2, 250ms, 2s or 5min, at least 0 s"),
        ("plan.deadline_seconds", float("inf"), "a time"),
        ("plan.deadline_seconds", float("nan"), "a time"),
    ],
)
def test_a_wrong_value_says_what_is_accepted(name: str, value: object, accepted: str) -> None:
    said = refusal(overrides={name: value})
    assert said.startswith(f"argument: {name} is {value!r}; it must be ")
    assert accepted in said


def test_a_wrong_value_in_the_file_is_an_error_even_if_replaced() -> None:
    Path("kvtide.toml").write_text('[dram]\nbudget = "lots"\n')
    assert refusal(dram={"budget": GiB}).startswith("kvtide.toml: dram.budget is 'lots'; it must")


def test_broken_files_are_named() -> None:
    Path("bad.toml").write_text("[dram]\nbudget = = 4\n")
    assert re.match(r"bad\.toml cannot be read as TOML: .*line 2", refusal(file="bad.toml"))
    Path("bad.toml").write_bytes(b"\xff\xfe")
    assert refusal(file="bad.toml").startswith("bad.toml cannot be read as TOML")
    said = refusal(env={"KVTIDE_CONFIG": "none.toml"})
    assert re.match(r"none\.toml cannot be read as TOML: .*No such file", said)
    assert "cannot be read" in refusal(env={"KVTIDE_CONFIG": "~no-such-user/kvtide.toml"})
    Path("bad.toml").write_text("dram = 5\n")
    assert refusal(file="bad.toml") == "bad.toml: [dram] is 5; it must be a table of settings"


def test_structs_made_directly_are_checked_and_frozen() -> None:
    with pytest.raises(ConfigError, match=r"Dram\.budget is 7; it must be a size"):
        Dram(budget=7)
    with pytest.raises(AttributeError):
        Config().dram.budget = GiB  # type: ignore[misc]
    assert hash(Config()) == hash(config.read(env={}))


def test_every_setting_explains_itself() -> None:
    settings = explain(env={})
    names = [
        f"{section.name}.{field.name}"
        for section in msgspec.structs.fields(Config)
        for field in msgspec.structs.fields(section.type)
    ]
    assert [setting.name for setting in settings] == names
    assert all(setting.help.endswith(".") and "\n" not in setting.help for setting in settings)
    assert {s.name: s.text for s in settings}["dram.budget"] == "4 GiB"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("40GiB", 40 * GiB),
        ("512 MiB", 512 * MiB),
        ("1.5GB", 1_500_000_000),
        (" 2 kib ", 2048),
        ("0.1GiB", 107_374_182),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "4G", "-1GiB", "1,5GB", "4 GiB left", "0x10", "٤GiB"])
def test_what_is_not_a_size(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size such as"):
        parse_size(text)


@given(st.integers(0, 1 << 63) | st.integers(0, 1 << 20).map(lambda n: n << 20))
def test_sizes_survive_being_written(size: int) -> None:
    assert parse_size(format_size(size)) == size
    assert parse_size(size) == size


def test_sizes_read_well() -> None:
    said = [format_size(n) for n in (0, 1000, 4096, 1536 * MiB, 1_500_000_000, 123_456_789)]
    assert said == ["0 B", "1 kB", "4 KiB", "1.5 GiB", "1.5 GB", "123456789 B"]


@given(st.floats(1e-9, 1e9) | st.just(0.0) | st.integers(0, 10**6).map(lambda n: n / 1000))
def test_durations_survive_being_written(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == seconds
    assert parse_duration(seconds) == seconds


def test_durations_read_well() -> None:
    assert [parse_duration(text) for text in ("250ms", "2s", "5min", "3")] == [0.25, 2, 300, 3]
    said = [format_duration(seconds) for seconds in (0, 0.25, 2, 90, 300)]
    assert said == ["0 s", "250 ms", "2 s", "1.5 min", "5 min"]
    with pytest.raises(ConfigError, match="is not a time such as"):
        parse_duration("-1s")
