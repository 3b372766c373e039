"""The examples run as they are, and stay short enough to be read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
NAMES = {"async_prefetch", "quickstart", "restart", "transformers_generate", "turns", "workers", "zero_copy"}


def test_the_examples_are_there() -> None:
    assert {e.stem for e in EXAMPLES} >= NAMES


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.stem)
def test_an_example_runs_and_tells_what_it_does(example: Path, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVTIDE_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(example)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**environment, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) >= 2
    assert list(tmp_path.iterdir()) == [], "it cleans up after itself"


def test_the_workers_of_an_engine_move_all_of_a_prompt(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVTIDE_")}
    (example,) = (e for e in EXAMPLES if e.stem == "workers")
    done = subprocess.run(
        [sys.executable, str(example)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**environment, "TMPDIR": str(tmp_path)},
        check=True,
    )
    told = [f"worker {rank} has its heads of 256 tokens, right in every byte: True" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == told


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.stem)
def test_an_example_is_at_most_40_lines(example: Path) -> None:
    assert len(example.read_text().splitlines()) <= 40
