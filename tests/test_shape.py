"""The shape of the house: imports that go one way, a base without torch, no setting without a use.

These are the things that rot one commit at a time.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
import pytest

import kvtide
from kvtide.config import Config

SOURCE = Path(kvtide.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

RANKS = [
    ["errors", "canonical", "clock", "histogram", "interrupts", "formatting", "version"],
    ["arguments", "forks", "units"],
    ["binding", "block", "call_guard", "capacity", "config"],
    ["security"],
    ["events", "tiers", "index"],
    ["plan"],
    ["transfer"],
    ["store"],
    ["metrics"],
    ["node"],
    ["__init__"],
    ["engines"],
    ["serve"],
    ["replay", "testing"],
    ["benchmarks"],
    ["doctor"],
    ["cli"],
    ["__main__"],
]
"""Imports go up this list only, within a folder, or nowhere. Two in one row do not know each other."""


def name(file: Path) -> str:
    return file.relative_to(SOURCE).as_posix()


def part(file: Path) -> str:
    """The room that a file is in: its folder, or itself."""
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def at_runtime(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those under ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from at_runtime(node)


def imported(file: Path) -> set[str]:
    """The rooms of ours that a file imports when it runs."""
    found = set()
    for node in at_runtime(ast.parse(file.read_text())):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        for module in modules:
            head, _, rest = module.partition(".")
            if head == "kvtide":
                room = rest.split(".")[0]
                found.add(room if (SOURCE / room).is_dir() or (SOURCE / f"{room}.py").is_file() else "__init__")
    return found - {""}


def test_every_room_has_a_rank() -> None:
    known = {room for row in RANKS for room in row}
    assert {part(f) for f in FILES} == known


@pytest.mark.parametrize("file", FILES, ids=name)
def test_imports_go_one_way(file: Path) -> None:
    rank = {room: i for i, row in enumerate(RANKS) for room in row}
    mine = part(file)
    wrong = [room for room in imported(file) if room != mine and rank[room] >= rank[mine]]
    assert not wrong, f"{name(file)} must not import {', '.join(wrong)}"


@pytest.mark.parametrize("file", [f for f in FILES if part(f) != "cli"], ids=name)
def test_only_the_command_line_prints(file: Path) -> None:
    calls = [
        node.lineno
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not calls, f"{name(file)} prints in line {calls}: log it, or return it"


@pytest.mark.parametrize("file", FILES, ids=name)
def test_every_module_says_why_it_is_there(file: Path) -> None:
    source = file.read_text()
    assert not source.strip() or ast.get_docstring(ast.parse(source)), f"{name(file)} has no docstring"


def test_importing_the_base_brings_no_heavy_package() -> None:
    heavy = ["torch", "triton", "pytest", "hypothesis", "matplotlib", "zstandard", "typer", "rich"]
    heavy += ["transformers", "starlette", "uvicorn", "obstore", "cryptography"]
    script = f"import sys, kvtide; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_importing_kvtide_starts_and_prints_nothing() -> None:
    script = "import threading, kvtide; assert threading.active_count() == 1"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=60, env={**os.environ}
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def settings() -> list[str]:
    return [
        f"{section.name}.{field.name}"
        for section in msgspec.structs.fields(Config)
        for field in msgspec.structs.fields(section.type)
    ]


@cache
def attributes() -> set[str]:
    """That are read anywhere but where settings are defined, tried or measured."""
    return {
        node.attr
        for file in FILES
        if name(file) != "config.py" and part(file) not in ("testing", "benchmarks")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute)
    }


@pytest.mark.parametrize("setting", settings())
def test_every_setting_is_used(setting: str) -> None:
    """As an attribute, somewhere besides its definition: a setting that nobody reads is a lie."""
    assert setting.partition(".")[2] in attributes(), f"nobody reads {setting}"


def test_every_public_name_is_there_and_documented() -> None:
    for public in kvtide.__all__:
        assert getattr(kvtide, public).__doc__, f"kvtide.{public} has no docstring"
