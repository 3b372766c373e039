"""What the site needs beside the pages of ``docs/``: the files of the repository that they link to.

On GitHub a page may link to ``../CONTRIBUTING.md`` or ``../examples/workers.py``. A site has the folder ``docs/`` only,
so every such file becomes a page of the site, and the links are changed to it. A link to a file that does not exist
stays as it is, and MkDocs reports it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(\]\(|^\[[^\]]+\]: )([^)#\s]+)((?:#[^)\s]*)?(?:\)|$))", re.MULTILINE)
FENCED = re.compile(r"^( *)(```+).*?^\1\2 *$", re.DOTALL | re.MULTILINE)
SITE = "repository/"  # the folder of the site that has them


def target(page: str, link: str) -> str:
    """Where a link of a page leads. Both are paths in the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def links(page: str, text: str) -> set[str]:
    """The files and folders outside ``docs/`` that a page links to."""
    found = {target(page, link) for _, link, _ in LINK.findall(FENCED.sub("", text)) if ":" not in link}
    return {path for path in found if not path.startswith(("docs/", "..")) and (ROOT / path).exists()}


def site_page(path: str) -> str:
    """The page of the site that shows a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path == "README.md":
        return "index.md"
    return SITE + (path if path.endswith(".md") else f"{path}.md")


def shown(path: str) -> str:
    """A file or a folder as a page."""
    file = ROOT / path
    if path.endswith(".md"):
        return file.read_text()
    if file.is_dir():
        names = sorted(name.name + "/" * name.is_dir() for name in file.iterdir() if name.name[0] not in "._")
        return f"# {path}/\n\n" + "".join(f"- [{name}]({posixpath.basename(path)}/{name})\n" for name in names)
    return f"# {path}\n\n````{file.suffix[1:]}\n{file.read_text().rstrip()}\n````\n"


def on_files(files: Files, config: Any) -> Files:
    waiting = set()
    for file in files.documentation_pages():
        waiting |= links(f"docs/{file.src_uri}", file.content_string)
    waiting |= {"CONTRIBUTING.md"}
    done = {"README.md"}  # the site's first page stands for it
    while waiting - done:
        path = (waiting - done).pop()
        done.add(path)
        text = shown(path)
        waiting |= links(path, text)
        files.append(File.generated(config, site_page(path), content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    uri = page.file.src_uri
    path = f"docs/{uri}"
    if uri.startswith(SITE):
        path = uri.removeprefix(SITE)
        path = path if (ROOT / path).is_file() else path.removesuffix(".md")

    def changed(match: re.Match[str]) -> str:
        before, link, after = match.groups()
        to = target(path, link)
        inside = path.startswith("docs/") and to.startswith("docs/")
        if ":" in link or inside or to.startswith("..") or not (ROOT / to).exists():
            return match[0]
        return f"{before}{posixpath.relpath(site_page(to), posixpath.dirname(uri) or '.')}{after}"

    parts, at = [], 0
    for fence in FENCED.finditer(markdown):
        parts += [LINK.sub(changed, markdown[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, LINK.sub(changed, markdown[at:])])
