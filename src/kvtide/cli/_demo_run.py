"""Runs the demonstration with transformers: a node, three processes one after the other, and their results.

The first process computes the answers without kvtide, then with a node, which keeps the document, and asks again. The
second process shares that node. Then both processes and the node end, and a third one finds the document on disk.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvtide.cli._demo_ask import MODEL, DemoStep, Doing, Report, Task, Way, check_installed
from kvtide.cli._demo_length import Choice
from kvtide.cli._demo_processes import (
    DemoProcesses,
    SignalGuard,
    check_room,
    clean_environment,
    failure,
    filesystem,
    start_node,
    working_folder,
    write_settings,
)
from kvtide.cli._demo_progress import DemoProgress
from kvtide.cli._demo_result import Result
from kvtide.cli._demo_text import QUESTIONS

__all__ = ["TITLES", "Wish", "play"]

TITLES: dict[Way, str] = {
    "cold": "computed",
    "dram": "DRAM",
    "process": "DRAM, another process",
    "nvme": "NVMe, after a restart",
}
_DISK = 3 << 29
"""Bytes on disk: the model in fp32 takes 0.5 GiB, the longest document 0.3 GiB, in segments of the store."""
_MEMORY = 5 << 29
"""Bytes of memory: the model and its tensors while it computes, or while it is unpacked, and the node's DRAM."""


class Wish(msgspec.Struct, frozen=True):
    """What the user asked for."""

    place: Path
    """A folder on the disk to use."""
    seconds: float
    """How long all of it may take, about."""
    least: int = 0
    """Minimum tokens of the document; 0: chosen by the speed that is measured."""
    new_tokens: int = 16


_WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
"""The threads of torch sleep while they wait for each other. By default they spin, which takes much longer where other
programs keep the cores busy."""


def model_folder(folder: Path) -> Path:
    """Where the model is unpacked."""
    return folder / "model"


def play(wish: Wish, progress: DemoProgress, guard: SignalGuard) -> Result:
    """Ask all questions in all ways, with a store in a temporary folder."""
    check_installed()
    check_room(wish.place, _DISK, _MEMORY)
    steps: list[DemoStep] = []
    least, questions = wish.least, len(QUESTIONS)
    with working_folder(wish.place, guard, progress.step) as folder, DemoProcesses(guard) as processes:
        settings = write_settings(folder)

        def ask(*ways: Way) -> None:
            nonlocal least, questions
            now = time.monotonic()
            task = Task(
                list(ways),
                str(model_folder(folder)),
                f"unix:{folder}/node.sock",
                str(settings),
                now,
                progress.started + wish.seconds,
                least,
                questions,
                wish.new_tokens,
            )
            for one in _process(task, processes, folder):
                if isinstance(one, Doing):
                    progress.step(one.text)
                elif isinstance(one, Choice):
                    least, questions = one.tokens, one.questions
                    progress.note(one.reason)
                else:
                    steps.append(one)

        progress.step("starting a node, which keeps the KV")
        node = start_node(processes, folder, settings)
        ask("reference", "cold", "dram")
        ask("process")
        progress.step("stopping the node: its DRAM is gone then")
        processes.stop(node, seconds=60)
        ask("nvme")
        took = time.monotonic() - progress.started
        return Result(f"{MODEL} in fp32", TITLES, steps, filesystem(folder), took)


def _process(task: Task, processes: DemoProcesses, folder: Path) -> Iterator[Report]:
    log = folder / "process.log"
    command = [sys.executable, "-m", "kvtide.cli._demo_ask"]
    child = processes.start(
        command, folder, log, clean_environment(**_WAITING), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(msgspec.json.encode(task))
    child.stdin.close()
    for line in child.stdout:
        yield msgspec.json.decode(line, type=Report)
    code = child.wait()
    processes.stop(child)
    if code:
        raise failure("a process of the demonstration", code, log)
