"""Runs vLLM's own tests of its secondary tiers with ours in their place: ``python -m tests.engines.vllm.upstream``.

The tests are in vLLM's source package, which is fetched (or found in the folder given as the argument) and not changed.
This file is also the plugin of pytest that makes the exchange, before they are imported:

- ``FileSystemTierManager`` becomes our tier, on a node whose disk tier is in ``root_dir``. Where a test asks whether a
  chunk's file exists, our store is asked whether it has the chunk; where it cuts the file short, the chunk is dropped.
- ``ExampleSecondaryTierManager``, which keeps chunks in host memory and has done all when a call returns, becomes our
  tier under that medium, with every call waited for.

What cannot hold for us is in ``APART``, with the reason. It is run all the same, and must fail.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.node.serving import Thread

VERSION = "0.32.0"
SUITES = ["test_fs_tier.py", "test_tiering_offloading.py", "test_factory.py"]

_FILES = "looks into the file tier's own parts"
_EVENTS = "our tier publishes no KV events: a bounded store removes chunks too, and kvtide's own feed tells both"
APART = {
    "test_invalid_path_raises_at_construction": "where chunks lie is the node's business: it would not start",
    "test_shutdown_discards_pending_tasks": _FILES,
    "test_store_load_roundtrip_without_o_direct": _FILES,
    "test_batched_load_first_block_fails_marks_whole_batch*": "ours goes on after a failure, and loads the rest",
    "test_transient_load_failure_leaves_file*": _FILES,
    "test_fs_tier_cross_tp_round_trip": _FILES,
    "test_successful_store_emits_stored_event": _EVENTS,
    "test_store_event_uses_configured_locality*": _EVENTS,
    "test_mixed_job_results_emit_event_only_for_successful_job": _EVENTS,
    "test_partially_failed_store_emits_no_event": _EVENTS,
    "test_events_*": _EVENTS,
    "test_cascade_store_emits_fs_event_through_tiering_manager": _EVENTS,
    "test_basic_store_and_lookup": "puts chunks behind a tier's back, where a request has missed them before",
}
"""Tests that cannot hold for us, by their names, and why."""

_made: set[str] = set()
"""Tests that made a tier of ours."""


# -- the plugin -------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    import vllm.v1.kv_offload.tiering.example.manager as example
    import vllm.v1.kv_offload.tiering.fs.manager as fs
    from vllm.v1.kv_offload.base import LookupResult, Medium

    from kvtide.engines.vllm.tier import KvtideTier
    from tests.engines.vllm.scheduler import configured

    scratch = tempfile.TemporaryDirectory()
    nodes: dict[Path, Thread] = {}
    tiers: list[KvtideTier] = []

    def node(disk: Path) -> str:
        """The address of a node with a disk tier in a folder."""
        if disk not in nodes:
            settings: dict[str, Any] = {
                "dram": {"budget": "64MiB", "segment": "8MiB"},
                "nvme": {"path": str(disk / "kv"), "budget": "256MiB", "segment": "32MiB"},
            }
            nodes[disk] = Thread(Path(scratch.name, f"{len(nodes)}.sock"), **settings)
        return f"unix:{nodes[disk].path}"

    def made(tier: KvtideTier) -> None:
        tiers.append(tier)
        _made.add(os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0])

    @config.add_cleanup
    def close() -> None:
        for tier in tiers:
            tier.shutdown()
        for node in nodes.values():
            node.close()
        scratch.cleanup()

    class AsFiles(KvtideTier):
        def __init__(
            self,
            offloading_spec: Any,
            primary_kv_view: memoryview,
            tier_type: str,
            root_dir: str,
            n_read_threads: int = 0,
            n_write_threads: int = 0,
            enable_kv_events: bool = False,
            **settings: Any,
        ) -> None:
            engine = {"address": node(Path(root_dir)), "weights_id": "w"}
            super().__init__(offloading_spec, primary_kv_view, tier_type, **settings, engine=engine)
            self.file_mapper = SimpleNamespace(get_file_name=lambda key: _File.of(self._store.chunks, key))
            made(self)

    class AsExample(KvtideTier):
        medium = Medium.CPU

        def __init__(
            self,
            offloading_spec: Any,
            primary_kv_view: Any,
            tier_type: str,
            custom_param: int = 0,
            backpressure_detector: Any = None,
        ) -> None:
            if not isinstance(primary_kv_view, memoryview):  # but a mock
                primary_kv_view = memoryview(bytearray(64)).cast("B", (4, 16))
            spec = SimpleNamespace(config=configured({}))
            engine = {"address": node(Path(scratch.name)), "weights_id": f"{len(tiers)}"}
            super().__init__(spec, primary_kv_view, tier_type, backpressure_detector, engine=engine)
            self.chunks = _Chunks(self._store.chunks, self._rows[0])
            self._finished: Any = _Jobs()
            self.completed_jobs = self._finished
            made(self)

        def lookup(self, key: Any, req_context: Any) -> Any:
            while (found := super().lookup(key, req_context)) is LookupResult.RETRY:
                self._lookup_manager.flush()
            return found

        def submit_store(self, job_metadata: Any) -> None:
            super().submit_store(job_metadata)
            KvtideTier.drain_jobs(self)
            self.chunks.offered.update(job_metadata.keys)

        def submit_load(self, job_metadata: Any) -> None:
            super().submit_load(job_metadata)
            KvtideTier.drain_jobs(self)

        def get_num_chunks(self) -> int:
            return len(self.chunks)

    fs.FileSystemTierManager = AsFiles
    example.ExampleSecondaryTierManager = AsExample


class _File(str):
    """Stands for the file of a chunk."""

    chunks: Any
    key: bytes

    @classmethod
    def of(cls, chunks: Any, key: bytes) -> _File:
        made = cls(key.hex())
        made.chunks, made.key = chunks, key
        return made

    def exists(self) -> bool:
        return any(self.chunks.find([self.key]))

    def cut(self) -> None:
        self.chunks._session.drop(self.chunks.prompt([self.key]))


class _Cut(io.BytesIO):
    """A chunk's file, opened to write less into it than was there."""

    def __init__(self, file: _File) -> None:
        super().__init__()
        self._file = file

    def close(self) -> None:
        if not self.closed:
            self._file.cut()
        super().close()


def _open(file: str, mode: str = "r") -> Any:
    return _Cut(file) if isinstance(file, _File) else open(file, mode)


class _Chunks:
    """What a tier has, for a test that puts chunks there by hand."""

    def __init__(self, chunks: Any, row: Any) -> None:
        self._chunks = chunks
        self._row = row
        self.offered: set[bytes] = set()

    def __setitem__(self, key: bytes, _: bool) -> None:
        assert self._chunks.store([key], [self._row]) == [True]

    def __len__(self) -> int:
        return sum(self._chunks.find(list(self.offered)))


class _Jobs(list[Any]):
    """A queue of results that tests can look into."""

    put = list.append

    def get(self) -> Any:
        return self.pop(0)

    def empty(self) -> bool:
        return not self


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        assert isinstance(item, pytest.Function)
        if item.path.name == "test_fs_tier.py":
            item.module.os = SimpleNamespace(path=SimpleNamespace(exists=_File.exists))
            item.module.open = _open
        set_apart(item, APART)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    tell(terminalreporter, SUITES, _made)


def set_apart(item: pytest.Item, apart: Mapping[str, str]) -> None:
    """Expect a test to fail whose name is among those set apart, by pattern and with the reason."""
    for pattern, why in apart.items():
        if fnmatch.fnmatchcase(item.name, pattern):
            item.add_marker(pytest.mark.xfail(reason=why, strict=True))


def tell(terminalreporter: Any, suites: Iterable[str], made: Collection[str]) -> None:
    """A row for each suite: how many passed, in how many of them ours was ``made``, and how many are set apart."""
    for suite in suites:
        passed, apart = (
            {report.nodeid for report in terminalreporter.stats.get(outcome, ()) if suite in report.nodeid}
            for outcome in ("passed", "xfailed")
        )
        terminalreporter.write_line(f"| `{suite}` | {len(passed)} | {len(passed & set(made))} | {len(apart)} |")


# -- the command ------------------------------------------------------------------------------------------


def fetch(folder: Path, parts: Sequence[str]) -> None:
    """Get vLLM's source package from the index, and unpack files that have one of these in their paths."""
    with urllib.request.urlopen("https://pypi.org/simple/vllm/") as answer:
        page = answer.read().decode()
    found = re.search(rf'href="([^"]*/vllm-{re.escape(VERSION)}\.tar\.gz)#sha256=([0-9a-f]{{64}})"', page)
    assert found, f"the index has no source package of vLLM {VERSION}"
    with urllib.request.urlopen(found[1]) as answer:
        package = answer.read()
    assert hashlib.sha256(package).hexdigest() == found[2], "the package came damaged"
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        wanted = [m for m in archive.getmembers() if any(part in m.name for part in parts)]
        archive.extractall(folder, wanted, filter="data")


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(arguments[0] if arguments else made)
        if not arguments:
            fetch(folder, ["/tests/v1/kv_offload/tiering/test_"])
        suites = [str(folder / f"vllm-{VERSION}/tests/v1/kv_offload/tiering" / name) for name in SUITES]
        command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--noconftest", "-p", "no:cacheprovider"]
        options = ["-p", __spec__.name, "--import-mode=importlib", "-q", "-rxfE", "--timeout=120", *suites]
        return subprocess.run([*command, *options], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
