"""The command line: what ``kvtide config`` prints, and how errors look."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtide import __version__, cli, config
from kvtide.errors import ConfigError


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVTIDE_CONFIG", raising=False)


def run(*arguments: str, env: dict[str, str] | None = None) -> str:
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "160", **(env or {})})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_version() -> None:
    assert run("--version") == f"kvtide {__version__}\n"


def test_help_lists_every_command() -> None:
    """Those that have commands below them too."""
    modules = {module.stem for module in Path(cli.__file__).parent.glob("[!_]*.py")}
    listed = re.findall(r"^  (\w+) +\w", run("--help").partition("Commands:")[2], re.MULTILINE)
    assert sorted(listed) == sorted(modules)
    for name in modules:
        assert re.search(rf"Usage: \S+ {name}\b", run(name, "--help"))


def test_help_teaches_by_example() -> None:
    assert "kvtide config > kvtide.toml" in run("config", "--help")


def test_help_needs_no_engine_and_no_plots() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from kvtide.cli import app;"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0;"
        "print([name for name in ('torch', 'matplotlib', 'kvtide.benchmarks') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_explain_shows_values_sources_and_help() -> None:
    Path("kvtide.toml").write_text('[nvme]\npath = "/mnt/[red]x"\n')
    shown = run("config", "--explain", env={"KVTIDE_DRAM_BUDGET": "8GiB"})
    lines = shown.splitlines()
    help_of = {setting.name: setting.help for setting in config.explain(env={})}
    assert "[dram]" in lines
    at = lines.index("budget = 8 GiB  (KVTIDE_DRAM_BUDGET)")
    assert lines[at + 1].startswith(f"    {help_of['dram.budget']} Allowed: a size such as ")
    at = lines.index("path = /mnt/[red]x  (kvtide.toml)")
    assert lines[at + 1] == f"    {help_of['nvme.path']}"


@pytest.mark.parametrize("columns", ["80", "60"])
def test_explain_fits_into_its_columns(columns: str) -> None:
    assert max(map(len, run("config", "--explain", env={"COLUMNS": columns}).splitlines())) <= int(columns)


def test_allowed_values_are_explained() -> None:
    """Of every setting that does not take any text."""
    explained = " ".join(run("config", "--explain").split())
    printed = " ".join(line.removeprefix("# ") for line in run("config").splitlines())
    for setting in config.explain(env={}):
        assert (f"Allowed: {setting.accepts}." in explained) or setting.accepts in ("text", "a path")
        assert (f"Allowed: {setting.accepts}." in printed) or setting.accepts in ("text", "a path")
    assert "Allowed: one of 'auto', 'lru', 'reuse'." in printed


def test_the_printed_toml_fits_into_80_columns() -> None:
    assert max(map(len, run("config").splitlines())) < 80


def test_the_minimal_file_has_what_everyone_decides_and_what_is_not_a_default() -> None:
    def names(text: str) -> list[str]:
        return [f"{section}.{name}" for section, part in tomllib.loads(text).items() for name in part]

    assert names(run("config", "--minimal")) == ["dram.budget", "nvme.path", "nvme.budget"]
    env = {"KVTIDE_NODE_HTTP": "127.0.0.1:9410", "KVTIDE_NVME_PATH": "/mnt/kv", "KVTIDE_DRAM_BUDGET": "9GiB"}
    shown = run("config", "--minimal", env=env)
    assert names(shown) == ["dram.budget", "nvme.path", "nvme.budget", "node.http"]
    Path("minimal.toml").write_text(shown)
    assert config.read("minimal.toml", env={}) == config.read(env=env)


def test_explain_as_json() -> None:
    shown = json.loads(run("config", "--explain", "--json", env={"KVTIDE_NVME_THREADS": "7"}))
    threads = next(setting for setting in shown if setting["name"] == "nvme.threads")
    assert (threads["value"], threads["source"]) == (7, "KVTIDE_NVME_THREADS")


def test_plain_json_is_the_tree_of_values() -> None:
    Path("other.toml").write_text("nvme.threads = 9\n")
    assert json.loads(run("config", "--json", "--config", "other.toml"))["nvme"]["threads"] == 9


def test_the_printed_toml_reads_back_to_the_same_settings() -> None:
    env = {
        "KVTIDE_NVME_PATH": '/mnt/a "quoted" \\ é \x7f 🌊',
        "KVTIDE_DRAM_BUDGET": "123456789",
        "KVTIDE_PLAN_DEADLINE_SECONDS": "0.1",
        "KVTIDE_PLAN_PREFILL_TOKENS_PER_SECOND": "1e-5",
        "KVTIDE_NVME_DIRECT": "false",
    }
    Path("printed.toml").write_text(run("config", env=env), "utf-8")
    assert config.read("printed.toml", env={}) == config.read(env=env)
    every = {setting.source for setting in config.explain("printed.toml", env={})}
    assert every == {"printed.toml"}


def test_errors_are_one_message_on_stderr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["kvtide", "config"])
    monkeypatch.setenv("KVTIDE_NVME_PTH", "/" + "long/" * 60)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    with pytest.raises(ConfigError) as error:
        config.read()
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", f"kvtide: {error.value}\n")
