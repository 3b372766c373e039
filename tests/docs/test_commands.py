"""The shell commands of all pages exist: each command of kvtide with its flags, each target of make, each module."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from kvtide.cli import app
from tests.docs.pages import PAGES, ROOT, fences, inline

_LANGUAGES = ("sh", "bash", "console", "text", "ini")
_PROSE = [["1"], ["is"], ["could"], ["neither"], ["pins"], ["COMMAND"]]
"""What follows the name in lines of logs, in names of derivations ("kvtide 1 ..."), and where any command may stand."""
_ENDS = {"|", "||", "&&", ";", "&", ">", ">>", "<", "2>", ")", "("}


def commands(page: Path) -> list[list[str]]:
    """Each ``kvtide ...`` in the page's blocks of shell code, as words."""
    found = []
    for body in fences(page, *_LANGUAGES):
        for line in body.replace("\\\n", " ").splitlines():
            if re.search(r"(^|[ /=(])kvtide( |$)", line):
                found += _commands(line)
    return found


def _commands(line: str) -> list[list[str]]:
    lexer = shlex.shlex(line.removeprefix("ExecStart="), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found: list[list[str]] = []
    first = True  # the next word is a command, and not an argument of one
    taking = False
    for word in lexer:
        if word in _ENDS:
            first, taking = True, False
        elif first and (word == "kvtide" or word.endswith("/bin/kvtide")):
            found.append([])
            first, taking = False, True
        elif taking:
            found[-1].append(word)
        else:
            first = first and (word in ("sudo", "nice", "exec", "$") or "=" in word)
    return [words for words in found if words[:1] not in _PROSE]


def check(words: list[str], whole: bool = True) -> None:
    """Raise what the command line itself would report. ``whole=False``: values and arguments may be left out."""
    command: Any = typer.main.get_command(app)
    name = "kvtide"
    while hasattr(command, "list_commands") and words and not words[0].startswith("-"):
        context = command.context_class(command)
        assert words[0] in command.list_commands(context), f"there is no command {words[0]!r}"
        name, words = words[0], words[1:]
        command = command.get_command(context, name)
    if whole and not {"--help", "--version"} & {*words}:
        command.make_context(name, words)
        return
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"--help"}
    unknown = {word.partition("=")[0] for word in words if word.startswith("--")} - known
    assert not unknown, f"there is no {unknown}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_exist(page: Path) -> None:
    for words in commands(page):
        try:
            check(words)
        except Exception as error:
            raise AssertionError(f"{page.name}: kvtide {' '.join(words)}: {error}") from error
    for code in inline(page):
        if code.startswith("kvtide "):
            try:
                for words in _commands(code):
                    check(words, whole=False)
            except Exception as error:
                raise AssertionError(f"{page.name}: `{code}`: {error}") from error


def test_there_are_commands() -> None:
    """So that the test above cannot pass by finding nothing."""
    assert sum(len(commands(page)) for page in PAGES) >= 30


@pytest.mark.parametrize(
    "line",
    ["kvtide nod", "kvtide node --sokcet x", "kvtide inspect", "kvtide status a b", "sudo kvtide bench stor | tee log"],
)
def test_a_wrong_command_is_noticed(line: str) -> None:
    (words,) = _commands(line)
    with pytest.raises(Exception, match=r"."):
        check(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_targets_and_modules_that_a_page_runs_exist(page: Path) -> None:
    targets = set(re.findall(r"^(\S+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [line for body in fences(page, *_LANGUAGES) for line in body.splitlines()] + inline(page)
    for line in lines:
        for target in re.findall(r"(?:^|[;&] )make ([a-z-]+)", line):
            assert target in targets, f"{page.name}: make {target}"
        for module in re.findall(r"python[\d.]* -m ((?:kvtide|bench|tests)[\w.]*)", line):
            assert importlib.util.find_spec(module) is not None, f"{page.name}: python -m {module}"
