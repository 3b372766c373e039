"""The examples run as they are, and stay short enough to be read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
RESULTS = {
    "async_prefetch": [rf"request {number}: 512 tokens, in DRAM before they were needed: True" for number in range(4)],
    "quickstart": [
        r"stored: Stored\(stored=3, present=0, dropped=0, pending=0\)",
        r"32 of 43 tokens came from the store",
    ],
    "restart": [
        r"first run:  Stored\(stored=8, present=0, dropped=0, pending=0\)",
        r"second run: <Match 512 of 512 tokens.*>",
        r"read from disk: 8 blocks",
        r"dropped permanently: 8 blocks",
    ],
    "follow_events": [r"BlockStored in CPU: 64 tokens, [0-9a-f]{16}"] * 2,
    "three_nodes": [rf"node {number} has read all three prompts" for number in (1, 2, 3)],
    "transformers_generate": [
        r"question 0: 0 of 1530 tokens came from the store",
        r"question 1: 1280 of 1530 tokens came from the store",
        r"question 2: 1280 of 1530 tokens came from the store",
        r"AttachedStatistics\(calls=3, prompt_tokens=4590, cached_tokens=2560, stored_blocks=[5-8], dropped_blocks=0, "
        r".*\)",
    ],
    "turns": [
        r"turn 1: 40 tokens, 0 blocks reused, 2 new",
        r"turn 2: 80 tokens, 2 blocks reused, 3 new",
        r"turn 3: 120 tokens, 5 blocks reused, 2 new",
        r"turn 4: 160 tokens, 7 blocks reused, 3 new",
        r"turn 5: 200 tokens, 10 blocks reused, 2 new",
        r"2 blocks pinned",
    ],
    "two_nodes": [
        r"at the first node:  Stored\(stored=4, present=0, dropped=0, pending=0\)",
        r"at the second node: 256 of 256 tokens, right in every byte: True",
    ],
    "workers": [rf"worker {rank} has its heads of \d+ tokens, right in every byte: True" for rank in range(2)],
    "zero_copy": [
        r"while it is written: <Match 0 of 64 tokens.*>",
        r"sealed:              <Match 64 of 64 tokens.*>",
        *[rf"block {number}: mean {number}\.0, read-only: True" for number in range(4)],
    ],
}
"""What each prints, line by line, in any order; and it must print nothing else."""


def test_the_examples_are_there() -> None:
    assert {e.stem for e in EXAMPLES} == set(RESULTS)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.stem)
def test_an_example_does_what_it_says(example: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVTIDE_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(example)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=here,
        env={**environment, "TMPDIR": str(here), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch")},
    )
    assert done.returncode == 0, done.stderr
    # but for the line of a node that it starts
    assert [line for line in done.stderr.splitlines() if not re.match(r"kvtide \S+ serves at ", line)] == []
    lines = done.stdout.splitlines()
    for wanted in RESULTS[example.stem]:
        found = [line for line in lines if re.fullmatch(wanted, line)]
        assert found, f"{wanted} is not in:\n{done.stdout}"
        lines.remove(found[0])
    assert not lines
    assert list(here.iterdir()) == [], "it cleans up after itself"


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
