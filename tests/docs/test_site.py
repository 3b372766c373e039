"""The documentation as a site: it builds without a warning, fetches nothing, and says what GitHub shows."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.docs.pages import ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None,
    reason="MkDocs Material is not installed: pip install -r requirements/docs.txt",
)
DOCS = ROOT / "docs"


def build(root: Path, to: Path) -> subprocess.CompletedProcess[str]:
    # Without a way out: a page or a plugin that fetches something fails here. (--quiet hides warnings from --strict.)
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"} | dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(to)]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert not done.returncode, done.stderr
    return folder


def test_broken_links_and_anchors_and_pages_outside_the_navigation_are_errors(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("docs/hooks.py", "docs/index.md", "mkdocs.yml", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "docs/lost.md").write_text("# Lost\n\n[a](index.md#no-such-heading) [b](no-such-page.md)\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode
    assert "no-such-heading" in done.stderr
    assert "no-such-page.md" in done.stderr
    assert "  - lost.md\n" in done.stderr


def test_a_page_fetches_nothing(site: Path) -> None:
    for page in site.rglob("*.html"):
        tags = re.findall(r"<(?:link|script|img|iframe|source|object)\b[^>]*>", page.read_text())
        assert tags
        for tag in tags:
            assert "//" not in tag.replace('"http://www.w3.org/2000/svg"', ""), f"{page.name}: {tag}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//|@import", style.read_text()), style.name


_COUNTED = ("h1", "h2", "h3", "li", "pre", "table", "td", "img", "strong")


def counts(html: str) -> dict[str, int]:
    return {tag: len(re.findall(rf"<{tag}[ >]", html)) for tag in _COUNTED}


def test_a_page_has_the_same_parts_as_on_github(site: Path) -> None:
    """The two read lists, tables and code inside of lists differently: what only one of them understands is noticed."""
    github = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    for page in sorted(DOCS.rglob("*.md")):
        html = (site / page.relative_to(DOCS).with_suffix(".html")).read_text()
        article = re.search(r"<article.*?</article>", html, re.DOTALL)
        assert article, page
        assert counts(article[0]) == counts(github.render(page.read_text())), page
        assert not re.search(r"<code>[^<]*\\\|", article[0]), f"{page}: \\| in code: write it without a table"
