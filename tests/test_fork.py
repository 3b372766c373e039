"""A process that is forked has nothing of what its parent opened: it is told so at once, and disturbs nobody."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import kvtide
from tests.fork_worker import settings
from tests.node.serving import Process

PATIENCE = 240.0


def run(name: str, *about: object) -> Any:
    command = [sys.executable, "-m", "tests.fork_worker", name, *map(str, about)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def refused(used: Any) -> None:
    assert isinstance(used, dict), used
    for verb, said in used.items():
        assert said.startswith("ForkedError: this "), (verb, said)
        assert "open the store again here" in said, (verb, said)


def test_every_verb_of_an_inherited_store_is_refused_whoever_holds_a_lock(tmp_path: Path) -> None:
    seen = run("embedded", tmp_path)
    refused(seen["used"])
    assert set(seen["ended"]) == {"fine"}, "to let go of things does nothing"
    assert seen["left"] == [], "a child keeps no file of the directory open"
    assert seen["untouched"], "a child has written to its parent's journal"
    assert seen["good"], "the parent goes on"
    assert seen["found"] == [32, 32, 32, 32], "and what it stored is there after it"


def test_every_verb_of_an_inherited_client_is_refused(tmp_path: Path) -> None:
    node = Process(tmp_path)
    try:
        seen = run("through_node", tmp_path, node.path)
    finally:
        node.kill()
    refused(seen["used"] | {"join": seen["worker"]})
    assert set(seen["ended"]) == {"fine"}
    assert seen["good"], "the parent's connection goes on"


def test_a_recording_is_the_parents_alone(tmp_path: Path) -> None:
    seen = run("recorded", tmp_path)
    matched, closed, left = seen["said"]
    assert matched.startswith("ForkedError")
    assert (closed, left) == ("fine", [])
    assert len(seen["lines"]) == 1 + 2, "a header, and what the parent asked for"


def test_a_parent_that_has_closed_leaves_no_lock_to_its_child(tmp_path: Path) -> None:
    assert run("lock_after_close", tmp_path) == "fine"


def test_a_parent_that_was_killed_leaves_no_lock_to_its_child(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fork_worker", "orphan", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        os.kill(child, 0)  # it lives
        kvtide.open(**settings(tmp_path)).close()
        os.kill(child, signal.SIGKILL)


def test_a_child_that_closes_and_exits_leaves_the_lock_to_its_parent(tmp_path: Path) -> None:
    seen = run("owner_stays", tmp_path)
    assert seen["locked"].startswith("TierLockedError"), seen
    assert seen["flushed"]


def test_a_process_of_multiprocessing_is_told(tmp_path: Path) -> None:
    seen = run("processes", tmp_path)
    assert seen["said"].startswith("ForkedError")
    assert seen["code"] == 0


def test_a_fork_may_come_at_any_moment(tmp_path: Path) -> None:
    seen = run("traffic", tmp_path)
    assert seen["errors"] == []
    assert seen["said"] == [["ForkedError", "fine", []]] * 40
    assert seen["again"] == "fine"


def test_a_child_has_what_it_opened_itself(tmp_path: Path) -> None:
    seen = run("grandchild", tmp_path)
    mine, (own, inherited) = seen["said"]
    assert mine == 32
    assert own.startswith("ForkedError")
    assert f"opened in process {seen['pid']}," in inherited
