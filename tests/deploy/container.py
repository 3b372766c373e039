"""Runs the command of a container on this machine, with its folders elsewhere, and its probes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["FOLDERS", "Container", "container", "tool"]

FOLDERS = ("/run/kvtide", "/var/lib/kvtide", "/etc/kvtide")
"""What images, manifests and units mount."""


def tool(name: str, source: str) -> str:
    """The path of a program, beside this Python or on PATH; without it the test is skipped, and tells its source."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip(f"there is no {name} here: {source}")
    return found


class Container:
    """A node, as a container's command starts it. Words that name one of its folders name one of this machine's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for path in FOLDERS:
            Path(self.here(path)).mkdir(parents=True)
        self.log = ""
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("KVTIDE_")}

    def here(self, text: str) -> str:
        for path in FOLDERS:
            text = re.sub(rf"(?<![\w/.]){re.escape(path)}(?![\w])", f"{self.folder}{path}", text)
        return text

    def settings(self, name: str, text: str) -> None:
        """A file of settings, with as much memory and disk as this machine has."""
        Path(self.here("/etc/kvtide"), name).write_text(self.here(text.replace("GiB", "MiB")))

    def command(self, words: Sequence[str]) -> list[str]:
        assert words[0] in ("kvtide", "/opt/kvtide/bin/kvtide")
        free = [word.replace(":9410", ":0") for word in words[1:]]
        return [sys.executable, "-m", "kvtide", *map(self.here, free)]

    def start(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Returns when the node serves."""
        self._environment |= {name: self.here(value.replace("GiB", "MiB")) for name, value in environment.items()}
        self.process = subprocess.Popen(
            [*self.command(words), "--verbose"], env=self._environment, cwd="/", stderr=subprocess.PIPE, text=True
        )
        self.read_until(r"kvtide \S+ serves at")

    def read_until(self, pattern: str) -> re.Match[str]:
        assert self.process.stderr is not None
        while not (found := re.search(pattern, self.log)):
            line = self.process.stderr.readline()
            assert line, f"the node ended: {self.log}"
            self.log += line
        return found

    @property
    def url(self) -> str:
        """Where it answers HTTP."""
        return f"http://127.0.0.1:{self.read_until(r'serving http://[^ ]+:([0-9]+)/metrics')[1]}"

    @property
    def socket(self) -> Path:
        return Path(self.here("/run/kvtide"), "kvtide.sock")

    def run(self, words: Sequence[str]) -> int:
        """The exit status of a command in the container, a probe for example."""
        command = self.command(words)
        return subprocess.run(command, env=self._environment, cwd="/", capture_output=True, timeout=60).returncode

    def output(self, words: Sequence[str]) -> str:
        """What a command in the container prints; it must succeed."""
        return subprocess.run(
            self.command(words), env=self._environment, cwd="/", capture_output=True, timeout=60, check=True, text=True
        ).stdout

    def stop(self) -> None:
        """As an orchestrator stops it."""
        self.process.send_signal(signal.SIGTERM)
        _, rest = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, self.log + rest

    def close(self) -> None:
        if hasattr(self, "process"):
            self.process.kill()
            self.process.communicate()


@contextmanager
def container() -> Iterator[Container]:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:  # a socket's path has 107 letters at most
        made = Container(Path(folder))
        try:
            yield made
        finally:
            made.close()
