"""Blocks of code on pages are valid in their language. What they name is checked by the files beside this one."""

from __future__ import annotations

import ast
import json
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import PAGES, ROOT, fences


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_on_a_page_is_valid(page: Path) -> None:
    for body in fences(page, "python", "py"):
        compile(body, page.name, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for body in fences(page, "json"):
        json.loads(body)
    for body in fences(page, "toml"):
        tomllib.loads(body)
    for body in fences(page, "yaml"):
        yaml.safe_load(body)


def test_a_block_of_code_names_its_language() -> None:
    """Otherwise nothing checks it. `text` is for what is no language."""
    known = {"bash", "ini", "json", "promql", "py", "python", "sh", "text", "toml", "yaml"}
    for page in ROOT.glob("docs/**/*.md"):
        every = sum(line.strip().startswith("```") for line in page.read_text().splitlines()) / 2
        assert every == len(fences(page, *known)), page.name
