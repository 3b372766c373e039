"""Budgets that a host cannot have are refused, or told of, when a store is opened."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvtide
from kvtide.capacity import check_disk, check_memory, memory_limits
from kvtide.errors import ConfigError
from kvtide.testing.interface import MODEL, PLAIN, data, prompt

GIB = 1 << 30


def host(root: Path, groups: str, **limits: str) -> Path:
    """A host of 8 GiB, with limits by path below /sys/fs/cgroup (where __ stands for /)."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal:       {8 * GIB // 1024} kB\nMemFree:   5 kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for path, text in limits.items():
        file = root / "sys/fs/cgroup" / path.replace("__", "/").replace("_DOT_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


def test_version_2_and_the_groups_above_ours(tmp_path: Path) -> None:
    root = host(
        tmp_path,
        "0::/system.slice/kvtide.service\n",
        **{
            "system.slice__kvtide.service__memory.max": "max",
            "system.slice__memory.max": str(3 * GIB),
            "memory.max": str(5 * GIB),
        },
    )
    assert memory_limits(root) == (8 * GIB, 3 * GIB)


def test_version_1(tmp_path: Path) -> None:
    groups = "5:devices:/a\n4:cpu,memory:/docker/ab\n0::/\n"
    root = host(
        tmp_path,
        groups,
        **{
            "memory__docker__ab__memory.limit_in_bytes": str(2 * GIB),
            "memory__memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert memory_limits(root) == (8 * GIB, 2 * GIB)


def test_in_a_container_whose_path_is_the_hosts_its_own_root_counts(tmp_path: Path) -> None:
    root = host(tmp_path, "0::/kubepods/pod1/c2\n", **{"memory.max": str(GIB)})
    assert memory_limits(root) == (8 * GIB, GIB)


def test_without_limits_and_without_facts(tmp_path: Path) -> None:
    assert memory_limits(host(tmp_path / "a", "0::/\n", **{"memory.max": "max"})) == (8 * GIB, None)
    assert memory_limits(tmp_path / "b") == (None, None)
    check_memory(1 << 60, node=True, root=tmp_path / "b")


def test_a_budget_beyond_the_host_is_refused_by_all(tmp_path: Path) -> None:
    root = host(tmp_path, "")
    check_memory(8 * GIB, node=True, root=root)
    for node in (True, False):
        with pytest.raises(ConfigError, match=r"dram.budget is 9 GiB, and this host has 8 GiB of memory; set"):
            check_memory(9 * GIB, node=node, root=root)


def test_one_beyond_the_control_group_is_refused_by_a_node_and_told_by_a_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = host(tmp_path, "0::/\n", **{"memory.max": str(4 * GIB)})
    check_memory(4 * GIB, node=True, root=root)
    with pytest.raises(ConfigError, match=r"dram.budget is 5 GiB, and the control group .* 4 GiB .*lower dram.budget"):
        check_memory(5 * GIB, node=True, root=root)
    assert not caplog.messages
    check_memory(5 * GIB, node=False, root=root)
    assert len(caplog.messages) == 1


def test_a_store_and_a_node_check_it_when_they_open(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this host has"):
        kvtide.open(dram={"budget": 1 << 50})
    done = subprocess.run(
        [sys.executable, "-m", "kvtide", "node", "--socket", str(tmp_path / "node.sock")],
        env={**os.environ, "KVTIDE_DRAM_BUDGET": str(1 << 50)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "dram.budget is 1024 TiB, and this host has" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_disk_that_cannot_hold_its_budget_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, folder = os.statvfs(tmp_path), tmp_path / "not" / "there"
    fields = list(real)
    fields[4] = (24 << 20) // real.f_frsize
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(fields))
    check_disk(folder, 24 << 20)
    assert not caplog.messages
    settings = {"path": str(folder), "budget": "32MiB", "segment": "16MiB"}
    with caplog.at_level(logging.WARNING, "kvtide.store"):
        with kvtide.open(dram={"budget": "8MiB", "segment": "1MiB"}, nvme=settings) as store:
            (told,) = caplog.messages
            assert "nvme.budget is 32 MiB" in told
            assert "24 MiB" in told
            store.session(MODEL).store(prompt(1), data(PLAIN, prompt(1)))
            assert store.flush(30)
        assert len(caplog.messages) == 1
        caplog.clear()
        with kvtide.open(dram={"budget": "8MiB", "segment": "1MiB"}, nvme=settings):
            assert not caplog.messages, "what the tier has there already counts"
