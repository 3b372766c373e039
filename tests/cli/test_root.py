"""``kvtide`` itself: its list of commands, what it imports, suggestions for what was mistyped, and completion."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvtide import cli
from kvtide.units import parse_duration

HEAVY = ["numpy", "msgspec", "rich", "asyncio", "torch", "matplotlib", "transformers"]


def kvtide(*arguments: str, **env: str) -> str:
    """What the command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "kvtide", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "COLUMNS": "80", **env},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["stauts"], ["--hlep"]])
def test_what_needs_no_command_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import json, sys\nfrom kvtide import cli\n"
        f"sys.argv[1:] = {arguments!r}\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        "print(json.dumps(sorted(sys.modules)), file=open(3, 'w'))"
    )
    reader, writer = os.pipe()
    with os.fdopen(reader) as found:
        script = f"import os; os.dup2({writer}, 3)\n{code}"
        subprocess.run([sys.executable, "-c", script], pass_fds=[writer], capture_output=True, check=True, timeout=60)
        os.close(writer)
        modules = set(json.loads(found.read()))
    assert not modules & set(HEAVY)
    assert {m for m in modules if m.startswith("kvtide.")} == {"kvtide.cli", "kvtide.errors", "kvtide.version"}


def test_listing_options_of_every_command_imports_nothing_heavy() -> None:
    """A shell's completion does that."""
    code = (
        "import sys\nfrom importlib import import_module\nfrom kvtide import cli\n"
        "for name in cli.COMMANDS: import_module(f'kvtide.cli.{name}')\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_the_list_of_commands_says_what_each_says_of_itself() -> None:
    modules = {module.stem for module in Path(cli.__file__).parent.glob("[!_]*.py")}
    assert set(cli.COMMANDS) == modules
    for name, said in cli.COMMANDS.items():
        command = typer.main.get_command(import_module(f"kvtide.cli.{name}").app)
        first = " ".join((command.help or "").replace("[bold]", "").replace("[/bold]", "").split("\n\n")[0].split())
        assert first.startswith(said.removesuffix(".")), name


def test_the_list_of_commands_fits_into_80_columns() -> None:
    shown = kvtide("--help")
    assert max(map(len, shown.splitlines())) <= 80
    for name in cli.COMMANDS:
        assert f"\n  {name} " in shown


def test_only_the_width_of_the_terminal_breaks_the_lines_of_a_help() -> None:
    shown = [" ".join(line.split()) for line in kvtide("doctor", "node", "--help").splitlines()]
    start = shown.index("The recording is replayed with the settings in force and with changed ones:")
    assert shown[start + 1].startswith("larger tiers, a first disk, other policies, no limits.")
    assert "kvtide doctor node /run/kvtide/kvtide.sock" in shown


def commands() -> dict[tuple[str, ...], str]:
    """Every command and subcommand, with what its source says of it."""
    found: dict[tuple[str, ...], str] = {}
    for name in cli.COMMANDS:
        command = typer.main.get_command(import_module(f"kvtide.cli.{name}").app)
        found[(name,)] = inspect.cleandoc(command.help or "")
        for word, below in getattr(command, "commands", {}).items():
            found[(name, word)] = inspect.cleandoc(below.help or "")
    return found


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_help_can_be_read_and_copied_from_80_columns(words: tuple[str, ...]) -> None:
    """Examples are indented, and no line of them is broken. No Python type is shown, and for an option without a value
    none at all."""
    shown = kvtide(*words, "--help")
    lines = [line.rstrip() for line in shown.splitlines()]
    for line in commands()[words].splitlines():
        if line.startswith("    "):
            plain = line.replace("[bold]", "").replace("[/bold]", "").replace("\\[", "[")
            assert f" {plain}" in lines
    assert not re.search(r"<bool>|<str>|<path>|list\[", shown.partition("─ Options ")[2])


@pytest.mark.parametrize(("command", "wrong"), [("node", "--idle-seconds"), ("serve missing", "--port")])
def test_the_time_of_a_stop_is_given_alike_to_all_who_serve(command: str, wrong: str) -> None:
    """It is understood, and so the error is about the option after it."""
    words = [*command.split(), "--stop-seconds", "1min", wrong, "nonsense"]
    result = CliRunner().invoke(cli.app, words, env={"COLUMNS": "120"})
    assert result.exit_code == 2
    assert f"Invalid value for '{wrong}'" in result.output


def test_a_default_that_is_shown_in_words_is_the_default() -> None:
    shown = {}
    for name in cli.COMMANDS:
        command = typer.main.get_command(import_module(f"kvtide.cli.{name}").app)
        for one in (command, *getattr(command, "commands", {}).values()):
            for option in one.params:
                if isinstance(getattr(option, "show_default", None), str):
                    shown[f"{name} {one.name} {option.name}"] = (parse_duration(option.show_default), option.default)
    assert len(shown) >= 3
    assert {where: said for where, (said, true) in shown.items() if said != true} == {}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("stauts", "there is no command 'stauts'; did you mean 'status'?"),
        ("xyzzy", "there is no command 'xyzzy'; kvtide --help lists all commands"),
        ("--hlep", "there is no option --hlep; did you mean --help?"),
        ("config --explian", "there is no option --explian; did you mean --explain?"),
        ("bench store --quik", "there is no option --quik; did you mean --quick?"),
        ("config --xyzzy", "there is no option --xyzzy\n"),
        ("bench stroe", "Did you mean 'store'?"),
    ],
)
def test_what_was_mistyped_is_answered_with_what_may_be_meant(typed: str, meant: str) -> None:
    result = CliRunner().invoke(cli.app, typed.split(), env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert meant in result.output


def test_a_shell_can_complete_commands_and_options() -> None:
    shown = kvtide("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "complete -o default -F _kvtide_completion kvtide" in shown
    assert "_KVTIDE_COMPLETE=complete_bash" in shown
    complete = {"_KVTIDE_COMPLETE": "complete_bash"}
    assert kvtide(COMP_WORDS="kvtide st", COMP_CWORD="1", **complete).split() == ["stop", "status"]
    options = kvtide(COMP_WORDS="kvtide config --", COMP_CWORD="2", **complete).split()
    assert {"--explain", "--minimal", "--config", "--json"} <= set(options)


def test_the_configuration_file_has_one_name_in_all_commands() -> None:
    read = {"node", "status", "config", "serve", "replay", "inspect", "evict", "hold", "forget"}
    for name in read:
        command = typer.main.get_command(import_module(f"kvtide.cli.{name}").app)
        options = {option for parameter in command.params for option in parameter.opts}
        assert "--config" in options, name
        assert "--file" not in options, name
    for group, below in {"keys": ("list", "rotate"), "audit": ("verify",)}.items():
        for name in below:
            assert "--config" in CliRunner().invoke(cli.app, [group, name, "--help"], env={"COLUMNS": "120"}).output


def test_an_error_of_the_system_is_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no command expected it."""

    def fail(file: object) -> None:
        Path("/proc/self/none").read_bytes()

    monkeypatch.setattr("kvtide.config.explain", fail)
    monkeypatch.setattr(sys, "argv", ["kvtide", "config"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code, capsys.readouterr().err) == (2, "kvtide: /proc/self/none: No such file or directory\n")


def test_threads_may_use_kvtide_for_the_first_time_at_once() -> None:
    """Circular imports, such as NumPy's, fail if two threads begin them in different places."""
    lines = """
        import threading, kvtide
        names = ["connect", "Model", "Session", "Store", "Match", "Reservation"]
        together, failed = threading.Barrier(len(names)), []

        def use(name):
            together.wait()
            try:
                getattr(kvtide, name)
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=use, args=[name]) for name in names]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert not failed, failed
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(lines)], check=True, timeout=300)
