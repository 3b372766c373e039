"""``make release``: build what would be published, an sdist and a wheel, and check both. Nothing is uploaded.

``python -m tests.release [TAG]`` is what it runs, with a Python that has build and twine. Files that pass are put into
``dist/``. TAG is the tag that the files will be published under. With it everything is checked that may still be open
without: the tag is the version's, the changelog has the day of the release, and the package names its addresses.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
BESIDE = "kvtide-{version}.dist-info/"


class ReleaseError(Exception):
    """A check failed: the message says which, and what to do."""


def run(*words: str | Path, cwd: Path, **environment: str) -> str:
    """What the command printed; refused, with all of it, if the command failed."""
    done = subprocess.run(words, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"{' '.join(map(str, words))}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def released(root: Path, tag: str = "") -> str:
    """The version of this tree; refused if it is not what a commit, the changelog and the tag say."""
    changed = run("git", "status", "--porcelain", cwd=root)
    if changed:
        raise ReleaseError(f"the tree has changes that are in no commit; commit or remove them:\n{changed}")
    version: str = re.findall(r'^__version__ = "(.+)"$', (root / "src/kvtide/version.py").read_text(), re.MULTILINE)[0]
    days = re.findall(rf"^## \[{re.escape(version)}\] - (.+)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    if len(days) != 1:
        raise ReleaseError(f"CHANGELOG.md must have one heading for the version {version}: ## [{version}] - YYYY-MM-DD")
    if tag:
        if tag != f"v{version}":
            raise ReleaseError(f"the tag is {tag}, and that of the version {version} is v{version}")
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", days[0]):
            raise ReleaseError(f"CHANGELOG.md says {days[0]!r} where the day of the release of {version} must be")
        if "urls" not in tomllib.loads((root / "pyproject.toml").read_text())["project"]:
            raise ReleaseError("pyproject.toml has no [project.urls]: a published package must say where its source is")
    return version


def check_wheel(wheel: Path, version: str, package: Sequence[str]) -> None:
    """``package``: the files that must be in it, such as ``kvtide/py.typed``, beside its metadata, and no others."""
    if wheel.name != f"kvtide-{version}-py3-none-any.whl":
        raise ReleaseError(
            f"{wheel.name} is not a wheel of {version} for every Python 3 on every machine (py3-none-any)"
        )
    beside = BESIDE.format(version=version)
    with zipfile.ZipFile(wheel) as files:
        names = {name for name in files.namelist() if not name.startswith(beside)}
        about = files.read(f"{beside}WHEEL").decode().splitlines()
    for line in ("Root-Is-Purelib: true", "Tag: py3-none-any"):
        if line not in about:
            raise ReleaseError(f"{wheel.name}: its WHEEL file does not say {line!r}")
    compare(wheel, names, set(package))


def check_sdist(sdist: Path, version: str, tracked: Sequence[str]) -> None:
    """``tracked``: the files of the repository; it has them all, its own metadata, and no others."""
    if sdist.name != f"kvtide-{version}.tar.gz":
        raise ReleaseError(f"{sdist.name} is not the sdist of {version}")
    with tarfile.open(sdist) as files:
        names = {file.name.partition("/")[2] for file in files if not file.isdir()}
    compare(sdist, names, {*tracked, "PKG-INFO"})


def compare(file: Path, there: set[str], wanted: set[str]) -> None:
    for names, what in ((wanted - there, "does not have"), (there - wanted, "must not have")):
        if names:
            raise ReleaseError(f"{file.name} {what} {', '.join(sorted(names)[:10])}{' ...' if len(names) > 10 else ''}")


def check_installed(file: Path, version: str, folder: Path) -> None:
    """Installs the file alone, with the newest dependencies that it allows, and uses it."""
    folder.mkdir()
    run(sys.executable, "-m", "venv", "env", cwd=folder)
    scripts = folder / "env/bin"
    run(scripts / "pip", "install", "--quiet", file, cwd=folder)
    run(scripts / "pip", "check", cwd=folder)
    where = run(scripts / "python", "-I", "-c", "import kvtide; print(kvtide.__file__)", cwd=folder).strip()
    if not Path(where).resolve().is_relative_to(folder.resolve()):
        raise ReleaseError(f"{file.name} was installed in {folder}, but kvtide is imported from {where}")
    said = run(scripts / "kvtide", "--version", cwd=folder).strip()
    if said != f"kvtide {version}":
        raise ReleaseError(f"{file.name}: kvtide --version says {said!r}, and the version is {version}")
    for command in ([scripts / "kvtide"], [scripts / "python", "-m", "kvtide"]):
        if "doctor" not in run(*command, "--help", cwd=folder):
            raise ReleaseError(f"{file.name}: kvtide --help does not list the commands")


def release(root: Path, tag: str = "") -> list[Path]:
    version = released(root, tag)
    tracked = run("git", "ls-files", cwd=root).splitlines()
    package = [name.removeprefix("src/") for name in tracked if name.startswith("src/kvtide/")]
    with tempfile.TemporaryDirectory(prefix="kvtide-release-") as name:
        folder = Path(name)
        built = folder / "dist"
        say(f"building kvtide {version}")
        # The wheel is built from the sdist, so that the sdist is known to be enough.
        pins = str(root / "requirements/release.txt")
        run(sys.executable, "-m", "build", "--outdir", built, root, cwd=folder, PIP_CONSTRAINT=pins)
        (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
        check_wheel(wheel, version, package)
        check_sdist(sdist, version, tracked)
        run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, cwd=folder)
        for file in (wheel, sdist):
            say(f"installing {file.name} in a clean environment")
            check_installed(file, version, folder / file.suffix[1:])
        shutil.rmtree(root / "dist", ignore_errors=True)
        shutil.copytree(built, root / "dist", ignore=shutil.ignore_patterns(".*"))
    return sorted((root / "dist").iterdir())


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    try:
        for file in release(ROOT, *sys.argv[1:]):
            content = file.read_bytes()
            print(f"{hashlib.sha256(content).hexdigest()}  dist/{file.name}  {len(content)} bytes")
    except ReleaseError as wrong:
        say(f"error: {wrong}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
