"""The structure of the package: imports go one way, the base needs no torch, every setting is used.

These properties get lost one commit at a time if no test checks them.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import msgspec
import pytest

import kvtide
from kvtide.config import Config

SOURCE = Path(kvtide.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

RANKS = [
    ["errors", "canonical", "clock", "counts", "histogram", "interrupts", "formatting", "serial_executor", "version"],
    ["arguments", "forks", "units"],
    ["block", "call_guard", "capacity", "config", "cpu_binding"],
    ["security"],
    ["events", "tiers", "index"],
    ["plan"],
    ["transfer"],
    ["store"],
    ["metrics"],
    ["peers"],
    ["node"],
    ["__init__"],
    ["engines"],
    ["serve"],
    ["replay", "testing"],
    ["benchmarks"],
    ["doctor"],
    ["sizing"],
    ["cli"],
    ["__main__"],
]
"""Imports go up this list only, within a folder, or nowhere. Two in one row do not know each other."""


def name(file: Path) -> str:
    return file.relative_to(SOURCE).as_posix()


def part(file: Path) -> str:
    """The part of the package that a file belongs to: its folder, or the file itself."""
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def module(file: Path) -> str:
    parts = file.relative_to(SOURCE).with_suffix("").parts
    return ".".join(("kvtide", *(p for p in parts if p != "__init__")))


MODULES = {module(file): file for file in FILES}


@cache
def imported(file: Path) -> set[str]:
    """The modules of ours that a file imports, under ``TYPE_CHECKING`` and inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in MODULES}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module in MODULES:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in MODULES else node.module for name in whole}
    return found - {module(file)}


def ranked(file: Path) -> int:
    return next(i for i, row in enumerate(RANKS) if part(file) in row)


def test_every_part_has_a_rank() -> None:
    known = {name for row in RANKS for name in row}
    assert {part(f) for f in FILES} == known


@pytest.mark.parametrize("file", FILES, ids=name)
def test_imports_go_one_way(file: Path) -> None:
    others = [MODULES[one] for one in imported(file) if part(MODULES[one]) != part(file)]
    wrong = [name(other) for other in others if ranked(other) >= ranked(file)]
    assert not wrong, f"{name(file)} must not import {', '.join(wrong)}"


def test_no_module_imports_itself_by_way_of_others() -> None:
    left = {one: set(imported(file)) for one, file in MODULES.items()}
    while free := [one for one, needs in left.items() if not needs & left.keys()]:
        for one in free:
            del left[one]
    assert not left, "these are in circles, or import some that are"


@pytest.mark.parametrize(
    ("mine", "others"), [("client", ("server", "admin")), ("server", ("client", "admin")), ("admin", ("client",))]
)
def test_the_sides_of_a_node_do_not_know_each_other(mine: str, others: tuple[str, ...]) -> None:
    """Administration over HTTP may ask the server; the server, which is the data path, does not know of it."""
    prefixes = tuple(f"kvtide.node.{other}." for other in others)
    files = [file for one, file in MODULES.items() if one.startswith(f"kvtide.node.{mine}.")]
    assert files
    for file in files:
        assert not [found for found in imported(file) if found.startswith(prefixes)], name(file)


SAME = {"config.py", "node/protocol.py"}
"""Sections of the configuration and messages are named as what they configure and ask for."""


def test_no_public_class_has_the_name_of_another() -> None:
    found: dict[str, str] = {}
    for file in FILES:
        if name(file) not in SAME:
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    assert found.setdefault(node.name, name(file)) == name(file), f"{node.name} in {name(file)} too"


LINES, FUNCTION, ARGUMENTS = 800, 80, 8
"""What is longer is so on purpose, and stands here."""
LONG_FILES = {
    # one section for each part that has settings
    "config.py",
    "transfer/pipeline.py",
    "tiers/nvme/volume.py",
    "testing/interface.py",
    # one handler for each operation of the protocol
    "node/server/client_handler.py",
}
LONG_FUNCTIONS = {
    "benchmarks/overlap.py:measure",
    # most lines of a command are its options
    "cli/demo.py:demo",
    "cli/forget.py:forget",
    "cli/plan.py:plan",
    "cli/replay.py:replay",
    "cli/serve.py:serve",
    "tiers/nvme/volume.py:__init__",
}
MANY_ARGUMENTS = {
    "tiers/nvme/tier.py:Nvme",
    "tiers/shared/tier.py:Shared",
}


@pytest.mark.parametrize("file", FILES, ids=name)
def test_what_is_long_is_long_on_purpose(file: Path) -> None:
    text = file.read_text()
    assert (text.count("\n") > LINES) <= (name(file) in LONG_FILES), f"{name(file)} has over {LINES} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            where = f"{name(file)}:{node.name}"
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= FUNCTION or where in LONG_FUNCTIONS, f"{where} has {length} lines"
        if isinstance(node, ast.ClassDef):
            for made in node.body:
                if isinstance(made, ast.FunctionDef) and made.name == "__init__":
                    given = len(made.args.posonlyargs + made.args.args + made.args.kwonlyargs) - 1
                    where = f"{name(file)}:{node.name}"
                    assert given <= ARGUMENTS or where in MANY_ARGUMENTS, f"{where} takes {given} arguments"


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
    script = f"import sys; from kvtide import *; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_importing_kvtide_imports_next_to_nothing() -> None:
    """Public names are imported when they are first used."""
    script = "import sys, kvtide; print(sorted(m for m in sys.modules if m.startswith(('kvtide', 'numpy', 'msgspec'))))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "['kvtide', 'kvtide.version']"


def test_public_names_are_those_that_type_checkers_see() -> None:
    """They are listed twice: in imports for type checkers, and where they are imported from at run time."""
    (block,) = [node for node in ast.parse((SOURCE / "__init__.py").read_text()).body if isinstance(node, ast.If)][:1]
    seen = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(seen) == sorted(kvtide.__all__) == sorted(kvtide._MODULES)
    assert set(kvtide.__all__) <= set(dir(kvtide))
    for public, (module_name, own) in seen.items():
        assert getattr(kvtide, public) is getattr(import_module(str(module_name)), own)


def test_a_name_that_is_not_there_is_an_error_for_type_checkers_too() -> None:
    with pytest.raises(AttributeError, match="module 'kvtide' has no attribute 'Stoer'"):
        kvtide.Stoer  # type: ignore[attr-defined]  # noqa: B018


def test_modules_are_found_without_being_imported_first() -> None:
    script = "import kvtide; print(kvtide.errors.TierError.__name__, kvtide.config.Config.__name__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "TierError Config\n"


def test_importing_kvtide_starts_and_prints_nothing() -> None:
    script = "import threading; from kvtide import *; assert threading.active_count() == 1"
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
    """As an attribute, somewhere besides its definition: a setting that no code reads has no effect."""
    assert setting.partition(".")[2] in attributes(), f"no code reads {setting}"


def test_every_public_name_is_there_and_documented() -> None:
    for public in kvtide.__all__:
        assert getattr(kvtide, public).__doc__, f"kvtide.{public} has no docstring"
