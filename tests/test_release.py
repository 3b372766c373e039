"""What ``make release`` refuses, and the workflows: they parse, and call only what is there."""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.release import ReleaseError, check_sdist, check_wheel, released

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PACKAGE = ["kvtide/__init__.py", "kvtide/py.typed"]
URLS = '[project.urls]\nSource = "https://example.com/kvtide"\n'


def commit(root: Path) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false"]
    for words in (["init", "--quiet"], ["add", "--all"], [*identity, "commit", "--quiet", "--message", "all"]):
        subprocess.run(["git", *words], cwd=root, check=True)


def tree(root: Path, version: str = "1.2.3", heading: str = "## [1.2.3] - 2026-05-01", project: str = URLS) -> Path:
    (root / "src/kvtide").mkdir(parents=True)
    (root / "src/kvtide/version.py").write_text(f'__version__ = "{version}"\n')
    (root / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n")
    (root / "pyproject.toml").write_text(f'[project]\nname = "kvtide"\n{project}')
    commit(root)
    return root


def test_a_tree_whose_version_is_in_the_changelog_is_released(tmp_path: Path) -> None:
    assert released(tree(tmp_path)) == "1.2.3"
    assert released(tmp_path, "v1.2.3") == "1.2.3"


def test_a_day_and_addresses_may_be_open_until_there_is_a_tag(tmp_path: Path) -> None:
    root = tree(tmp_path, heading="## [1.2.3] - unreleased", project="")
    assert released(root) == "1.2.3"
    with pytest.raises(ReleaseError, match="'unreleased' where the day"):
        released(root, "v1.2.3")
    (root / "CHANGELOG.md").write_text("## [1.2.3] - 2026-05-01\n")
    commit(root)
    with pytest.raises(ReleaseError, match=r"no \[project.urls\]"):
        released(root, "v1.2.3")


@pytest.mark.parametrize("name", ["CHANGELOG.md", "src/kvtide/new.py"])
def test_changes_that_are_in_no_commit_are_refused(tmp_path: Path, name: str) -> None:
    root = tree(tmp_path)
    (root / name).write_text("changed\n")
    with pytest.raises(ReleaseError, match=rf"in no commit(.|\n)*{name}"):
        released(root)


def test_a_version_that_the_changelog_does_not_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match=r"CHANGELOG.md must have one heading for the version 1.2.4"):
        released(tree(tmp_path, version="1.2.4"))


def test_a_tag_of_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match=r"the tag is v1.2.4, and that of the version 1.2.3 is v1.2.3"):
        released(tree(tmp_path), "v1.2.4")


def wheel(folder: Path, names: list[str], tag: str = "py3-none-any", pure: str = "true") -> Path:
    file = folder / f"kvtide-1.2.3-{tag}.whl"
    with zipfile.ZipFile(file, "w") as files:
        for name in names:
            files.writestr(name, "")
        files.writestr("kvtide-1.2.3.dist-info/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: {pure}\nTag: {tag}\n")
    return file


def test_a_wheel_with_the_package_alone_passes(tmp_path: Path) -> None:
    check_wheel(wheel(tmp_path, PACKAGE), "1.2.3", PACKAGE)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: wheel(folder, PACKAGE[:1]), "does not have kvtide/py.typed"),
        (lambda folder: wheel(folder, [*PACKAGE, "tests/test_a.py"]), "must not have tests/test_a.py"),
        (lambda folder: wheel(folder, PACKAGE, tag="cp311-cp311-linux_x86_64"), "not a wheel of 1.2.3 for every"),
        (lambda folder: wheel(folder, PACKAGE, pure="false"), "does not say 'Root-Is-Purelib: true'"),
    ],
)
def test_another_wheel_is_refused(tmp_path: Path, make: Callable[[Path], Path], says: str) -> None:
    with pytest.raises(ReleaseError, match=re.escape(says)):
        check_wheel(make(tmp_path), "1.2.3", PACKAGE)


def sdist(folder: Path, names: list[str]) -> Path:
    file = folder / "kvtide-1.2.3.tar.gz"
    with tarfile.open(file, "w:gz") as files:
        for name in names:
            files.addfile(tarfile.TarInfo(f"kvtide-1.2.3/{name}"), io.BytesIO())
    return file


def test_an_sdist_has_the_repository_and_nothing_else(tmp_path: Path) -> None:
    tracked = ["pyproject.toml", "src/kvtide/py.typed"]
    check_sdist(sdist(tmp_path, [*tracked, "PKG-INFO"]), "1.2.3", tracked)
    with pytest.raises(ReleaseError, match=re.escape("does not have src/kvtide/py.typed")):
        check_sdist(sdist(tmp_path, ["pyproject.toml", "PKG-INFO"]), "1.2.3", tracked)
    with pytest.raises(ReleaseError, match=re.escape("must not have kvtide.toml")):
        check_sdist(sdist(tmp_path, [*tracked, "PKG-INFO", "kvtide.toml"]), "1.2.3", tracked)


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def test_there_is_a_workflow_for_changes_and_one_for_releases() -> None:
    assert [file.name for file in WORKFLOWS] == ["ci.yml", "release.yml"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_that_never_ran_says_so(workflow: Path) -> None:
    assert workflow.read_text().startswith("# NEVER RUN: ")


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_uses_only_what_cannot_change(workflow: Path) -> None:
    """An action's tag can be moved to another commit by whoever takes over its repository."""
    for step in steps(workflow):
        if "uses" in step:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", step["uses"]), step["uses"]
            assert re.search(rf"{step['uses']} # v\d+\.\d+\.\d+$", workflow.read_text(), re.MULTILINE), step["uses"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.name)
def test_the_commands_of_a_workflow_are_there(workflow: Path) -> None:
    targets = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
    commands = [line.split() for step in steps(workflow) for line in step.get("run", "").splitlines()]
    assert commands
    for command in commands:
        match command:
            case ["make", target, *_]:
                assert target in targets
            case ["bash", script, *_]:
                assert (ROOT / script).is_file()
            case _:
                pytest.fail(f"{' '.join(command)}: this test knows make and bash; teach it the command")


def test_changes_are_tested_with_every_python_on_both_processors() -> None:
    matrix = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    project = (ROOT / "pyproject.toml").read_text()
    assert matrix["python"] == re.findall(r'Python :: (3\.\d+)"', project)
    assert [name.endswith("-arm") for name in matrix["runner"]] == [False, True]


def test_only_the_job_that_publishes_may_publish_and_it_runs_nothing_of_ours() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["environment"] == "pypi"
    assert jobs["publish"]["needs"] == "build"
    assert all("run" not in step for step in jobs["publish"]["steps"])
