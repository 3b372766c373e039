"""What the tests of pages share: the pages, and their code."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["MADE", "PAGES", "ROOT", "fences", "inline", "prose"]

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
MADE = {"benchmarks.md", "configuration.md"}  # written by programs
_FENCED = re.compile(r"^( *)(`{3,})(\w*)\n(.*?)^\1\2 *$", re.DOTALL | re.MULTILINE)


def fences(page: Path, *languages: str) -> list[str]:
    """The blocks of code in one of these languages."""
    return [body for _, _, language, body in _FENCED.findall(page.read_text()) if language in languages]


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return _FENCED.sub("", page.read_text())


def inline(page: Path) -> list[str]:
    """The code within lines."""
    return [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(page))]
