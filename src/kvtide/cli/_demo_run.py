"""Runs the demonstration: a node, three processes one after the other, and their results.

The first process computes the answers without kvtide, then with a node, which keeps the document, and asks again. The
second process shares that node. Then both processes and the node end, and a third one finds the document on disk.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvtide.cli._demo_ask import MODEL, DemoStep, Task, Way, check_installed
from kvtide.cli._demo_text import QUESTIONS
from kvtide.errors import TierError

__all__ = ["WAYS", "Result", "Row", "filesystem", "play", "scratch_folder"]

WAYS: dict[Way, str] = {
    "reference": "without kvtide, for comparison",
    "cold": "computed",
    "dram": "DRAM",
    "process": "DRAM, another process",
    "nvme": "NVMe, after a restart",
}

Progress = Callable[[Way, int], None]
"""Called with a way, and how many questions were answered in it."""


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one way: medians over all questions."""

    way: Way
    computed: int
    cached: int
    seconds: float
    speedup: float

    @property
    def title(self) -> str:
        return WAYS[self.way]

    @property
    def seconds_text(self) -> str:
        return f"{self.seconds:.2f} s"

    @property
    def speedup_text(self) -> str:
        return "" if self.way == "cold" else f"{self.speedup:.1f} x"


@dataclass(frozen=True, slots=True)
class Result:
    """The questions and answers, with their times."""

    steps: list[DemoStep]
    filesystem: str
    seconds: float

    def of(self, way: Way) -> list[DemoStep]:
        return [step for step in self.steps if step.way == way]

    def rows(self) -> list[Row]:
        """A row for each way that the table shows."""
        cold = statistics.median(step.seconds for step in self.of("cold"))
        rows = []
        for way in WAYS:
            if way != "reference":
                steps = self.of(way)
                computed = round(statistics.median(step.prompt - step.cached for step in steps))
                cached = round(statistics.median(step.cached for step in steps))
                seconds = statistics.median(step.seconds for step in steps)
                rows.append(Row(way, computed, cached, seconds, cold / seconds))
        return rows

    @property
    def different(self) -> int:
        """Answers that differ from those of the model with the same tokens cached, without kvtide."""
        right = {step.question: step.answer for step in self.of("reference")}
        return sum(step.answer != right[step.question] for step in self.steps)

    def findings(self) -> list[str]:
        """Findings besides the table."""
        (first, *_) = self.steps
        words = [f"“{QUESTIONS[step.question]}” “{step.text}”" for step in self.of("nvme")]
        where = (
            "a filesystem in memory, so it was no disk: use --path" if self.filesystem == "tmpfs" else self.filesystem
        )
        return [
            f"{MODEL} in fp32, {len(QUESTIONS)} questions about a document of {first.prompt:,} tokens with the "
            f"question; medians, each until the first token. All of it took {self.seconds:.0f} s. NVMe is {where}.",
            f"{len(self.steps) - self.different} of {len(self.steps)} answers are, token for token, those of the same "
            "model with the same tokens cached, without kvtide.",
            *words,
        ]


def play(place: Path, least: int, new_tokens: int, progress: Progress) -> Result:
    """Ask all questions in all ways, with a store in a temporary folder in ``place``."""
    check_installed()
    start = time.perf_counter()
    steps: list[DemoStep] = []
    with tempfile.TemporaryDirectory(prefix="kvtide-demo-", dir=place) as name:
        folder = Path(name)
        settings = folder / "kvtide.toml"
        settings.write_text(
            '[dram]\nbudget = "1GiB"\n'
            f'[nvme]\npath = "{folder / "nvme"}"\nbudget = "2GiB"\nstore = "through"\n'
        )  # fmt: skip

        def ask(*ways: Way) -> None:
            task = Task(list(ways), str(folder / "model"), f"unix:{folder}/node.sock", str(settings), least, new_tokens)
            progress(ways[0], 0)
            for step in _process(task, folder):
                steps.append(step)
                progress(step.way, sum(s.way == step.way for s in steps))

        with _node(folder, settings):
            ask("reference", "cold", "dram")
            ask("process")
        ask("nvme")
        return Result(steps, filesystem(folder), time.perf_counter() - start)


def _environment() -> dict[str, str]:
    """This process's environment, without kvtide settings and without access to the hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVTIDE_")}
    return kept | {"HF_HUB_OFFLINE": "1"}


@contextlib.contextmanager
def _node(folder: Path, settings: Path) -> Iterator[None]:
    """A node, until the end of the ``with``. Then its blocks are on disk."""
    socket = folder / "node.sock"
    command = [sys.executable, "-m", "kvtide", "node", "--socket", str(socket), "--config", str(settings)]
    with (folder / "node.log").open("w+") as log:
        node = subprocess.Popen(command, env=_environment(), cwd=folder, stdout=log, stderr=log)
        try:
            while not socket.exists():
                if node.poll() is not None:
                    raise TierError(f"the node did not start: {_tail(folder / 'node.log')}")
                time.sleep(0.02)
            yield
        finally:
            node.send_signal(signal.SIGTERM)
            node.wait()


def _process(task: Task, folder: Path) -> Iterator[DemoStep]:
    command = [sys.executable, "-m", "kvtide.cli._demo_ask"]
    errors = folder / "process.log"
    with errors.open("w") as log:
        child = subprocess.Popen(
            command, env=_environment(), cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
        with child:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(msgspec.json.encode(task))
            child.stdin.close()
            for line in child.stdout:
                yield msgspec.json.decode(line, type=DemoStep)
    if child.returncode:
        raise TierError(f"a process of the demonstration failed: {_tail(errors)}")


def _tail(file: Path) -> str:
    return "\n".join(file.read_text(errors="replace").splitlines()[-5:])


def filesystem(folder: Path) -> str:
    """The type of the filesystem of ``folder``."""
    found = ("", "unknown")
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mount, kind, *_ = line.split()
            if folder.resolve().is_relative_to(mount) and len(mount) >= len(found[0]):
                found = mount, kind
    return found[1]


def scratch_folder() -> Path:
    """A folder for temporary files that is on a disk, if there is one: on tmpfs "NVMe" would be memory."""
    usual = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()]
    there = [folder for folder in usual if folder.is_dir() and os.access(folder, os.W_OK)]
    return next((folder for folder in there if filesystem(folder) != "tmpfs"), there[0])
