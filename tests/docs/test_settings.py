"""The settings, environment variables, metrics and messages that pages name exist in the code."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtide import config
from kvtide.metrics import METRICS
from tests.docs.pages import MADE, PAGES, ROOT, fences, inline

SETTINGS = {setting.name for setting in config.explain(env={})}
SECTIONS = {name.partition(".")[0] for name in SETTINGS}
_NAMED = re.compile(rf"(?<![\w./-])({'|'.join(sorted(SECTIONS))})\.([a-z_]+)(?![\w/(.]|\.\w)")
_FILES = {"py", "md", "toml", "json", "yaml", "sock", "pem", "svg", "jsonl"}
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


VALUES = yaml.safe_load((ROOT / "deploy/kubernetes/chart/values.yaml").read_text())
"""Of the Helm chart, whose sections have names of ours."""


@each_page
def test_settings_exist(page: Path) -> None:
    for code in inline(page):
        for section, name in _NAMED.findall(code):
            known = f"{section}.{name}" in SETTINGS or name in _FILES or name in VALUES.get(section, ())
            assert known, f"{page.name}: `{code}`"


def tree(given: Mapping[str, Any], what: str) -> None:
    for section, values in given.items():
        assert section in SECTIONS, f"{what}: there is no section {section!r}"
        for name in values:
            assert f"{section}.{name}" in SETTINGS, f"{what}: {section}.{name}"


@each_page
def test_files_of_settings_are_understood(page: Path, tmp_path: Path) -> None:
    for body in fences(page, "toml"):
        given = tomllib.loads(body)
        if not SECTIONS & given.keys():
            continue  # the settings of something else
        tree(given, page.name)
        file = tmp_path / "kvtide.toml"
        file.write_text(body)
        config.read(file)
    for body in fences(page, "json"):
        given = json.loads(body)
        tree(given.get("kv_connector_extra_config", {}), page.name)


@cache
def variables() -> set[str]:
    """What the program reads from its environment."""
    names = {f"KVTIDE_{name.replace('.', '_').upper()}" for name in SETTINGS}
    text = "".join(file.read_text() for file in (ROOT / "src").rglob("*.py"))
    return names | set(re.findall(r"KVTIDE_[A-Z_]+", text))


@each_page
def test_environment_variables_exist(page: Path) -> None:
    text = page.read_text()
    own = set(re.findall(r"(?:name: |env:)(KVTIDE_[A-Z_]+)", text))  # to be named by node.tokens, for example
    for name in re.findall(r"\bKVTIDE_[A-Z_]+\b(?!\.\.\.)", text):
        assert name in variables() | own or name.endswith("_"), f"{page.name}: {name}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in MADE], ids=lambda page: page.name)
def test_metrics_exist(page: Path) -> None:
    known = {metric.name for metric in METRICS}
    known |= {f"{metric.name}_{part}" for metric in METRICS for part in ("bucket", "count", "sum")}
    text = "\n".join([*inline(page), *fences(page, "promql", "yaml")])
    for name in re.findall(r"(?<![\w:./-])kvtide_[a-z_]+\b(?!\()", text):
        assert name in known or name in ("kvtide_trace",), f"{page.name}: {name}"


def _texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
            yield "".join(str(part) for part in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[sdgr]|%\.0f", "\0", node.value)


@cache
def messages() -> list[str]:
    found = []
    for file in sorted((ROOT / "src/kvtide").rglob("*.py")):
        found += [" ".join(text.split()) for text in _texts(ast.parse(file.read_text()))]
    return found


def _said(message: str) -> bool:
    parts = [" ".join(part.split()) for part in message.split("...")]
    return any(all(part in text for part in parts) for text in messages())


def test_the_messages_that_troubleshooting_quotes_are_in_the_code() -> None:
    """In the first column, in code, with three dots where a name or a number is."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    quoted = [code for cell in cells for code in re.findall(r"`([^`]+)`", cell) if " " in code]
    assert len(quoted) >= 15
    for message in quoted:
        assert message.startswith(("kvtide ", "curl ")) or _said(message), message
    assert not _said("blocks are not ... forgotten at all")
