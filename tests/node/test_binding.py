"""Where a node works: an engine that is bound to one core does not bind the node that it starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtide import config as configuration
from kvtide.errors import ConfigError, TierError
from kvtide.node.client.client import connect
from kvtide.node.client.launch import open_node, place
from tests.node.serving import eventually

ALL = sorted(os.sched_getaffinity(0))
"""This process is bound to nothing: CPUs of its control group."""
several = pytest.mark.skipif(len(ALL) < 2, reason="this machine has one CPU")

ENGINE = """
import ctypes, os, platform, sys
from kvtide import config
from kvtide.node.client.launch import open_node
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
mask = ctypes.c_ulong(1)  # set_mempolicy(MPOL_BIND) to node 0
number = {"x86_64": 238, "aarch64": 237}[platform.machine()]
bound = ctypes.CDLL(None).syscall(number, 2, ctypes.byref(mask), ctypes.c_ulong(64))
settings = config.read(None, {}, dram={"budget": "16MiB", "segment": "2MiB"}, node={"cpus": sys.argv[2]})
with open_node(settings, idle=float(sys.argv[3])) as client:
    print(client.status().node.pid, bound, flush=True)
    sys.stdin.read()
"""
"""An engine that binds itself, and then starts a node."""


class Engine:
    def __init__(self, folder: Path, cpu: int, cpus: str = "") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(cpu), cpus, "0.1"],
            env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        told = self._process.stdout.readline().split()
        assert len(told) == 2, "it did not start a node"
        self.node, self.memory_bound = int(told[0]), told[1] == "0"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate("")
        eventually(lambda: not Path(f"/proc/{self.node}").exists())

    def each_thread(self, look: Callable[[int], object]) -> set[object]:
        return {look(int(task.name)) for task in Path(f"/proc/{self.node}/task").iterdir()}


def cpus(thread: int) -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(thread)))


@several
def test_a_node_uses_all_cpus_though_its_engine_is_bound_to_one(tmp_path: Path) -> None:
    with Engine(tmp_path, ALL[-1]) as engine:
        assert engine.each_thread(cpus) == {tuple(ALL)}
        assert engine.each_thread(os.sched_getscheduler) == {os.SCHED_OTHER}


@several
def test_with_inherit_a_node_stays_where_its_engine_is(tmp_path: Path) -> None:
    with Engine(tmp_path, ALL[-1], "inherit") as engine:
        assert engine.each_thread(cpus) == {(ALL[-1],)}
        assert engine.each_thread(os.sched_getscheduler) == {os.SCHED_BATCH}


@several
def test_a_node_uses_the_cpus_that_are_named(tmp_path: Path) -> None:
    with Engine(tmp_path, ALL[-1], f"{ALL[0]}-{ALL[0]}") as engine:
        assert engine.each_thread(cpus) == {(ALL[0],)}
        assert engine.each_thread(os.sched_getscheduler) == {os.SCHED_OTHER}


def test_a_node_does_not_inherit_the_memory_policy_of_its_engine(tmp_path: Path) -> None:
    with Engine(tmp_path, ALL[0]) as engine, Engine(tmp_path, ALL[0], "inherit") as other:
        if not engine.memory_bound:
            pytest.skip("the kernel has no NUMA, or does not allow memory to be bound")
        assert "bind" in Path(f"/proc/{other.node}/numa_maps").read_text(), "the test would see nothing"
        assert "bind" not in Path(f"/proc/{engine.node}/numa_maps").read_text()


def started_by_hand(folder: Path, cpu: int, value: str) -> str:
    """What ``kvtide node`` says when it is started from one CPU; its socket is where it can be found."""
    command = [sys.executable, "-m", "kvtide", "node", "--detach", "--idle-seconds", "5", "--socket", "node.sock"]
    bound = f"import os, sys; os.sched_setaffinity(0, {{{cpu}}}); os.execv(sys.executable, sys.argv[1:])"
    with (folder / "said").open("wb") as said:  # a pipe would be open for as long as the node lives
        subprocess.run(
            [sys.executable, "-c", bound, *command],
            cwd=folder,
            env={**os.environ, "KVTIDE_NODE_CPUS": value, "KVTIDE_DRAM_BUDGET": "16MiB"},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            check=False,
        )
    return " ".join((folder / "said").read_text().split())


@several
@pytest.mark.parametrize(("value", "wanted"), [("", ALL[-1:]), (str(ALL[0]), ALL[:1])])
def test_who_starts_a_node_by_hand_binds_it(tmp_path: Path, value: str, wanted: list[int]) -> None:
    assert re.fullmatch(r"kvtide \S+ serves at [^;]+; [^:]*", started_by_hand(tmp_path, ALL[-1], value)), "no warning"
    with connect(f"unix:{tmp_path}/node.sock") as client:
        assert cpus(client.status().node.pid) == tuple(wanted)


@pytest.mark.parametrize("wrong", ["0-", "3-1", "all", "-1", "0,x", "9000", "0;1", "10000"])
def test_a_list_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"node.cpus is '{wrong}'"):
        configuration.read(None, {}, node={"cpus": wrong})


def test_a_list_of_cpus_that_are_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = started_by_hand(tmp_path, ALL[0], f"{ALL[0]},8190-8191")
    assert f"node.cpus is '{ALL[0]},8190-8191', but this process cannot use CPU 8190, 8191" in said
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    config = configuration.read(None, {}, dram={"budget": "16MiB"}, node={"cpus": "8191"})
    with pytest.raises(TierError, match="says why"):
        open_node(config)
    assert "node.cpus is '8191'" in place(config).with_suffix(".log").read_text()
