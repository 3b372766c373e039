"""Runs vLLM's own tests of connectors with ours in their place: ``python -m tests.engines.vllm.upstream_connector``.

The tests are in vLLM's source package, which is fetched (or found in the folder given as the argument) and not changed.
This file is also the plugin of pytest that makes the exchange, before they are imported:

- Tests of vLLM's scheduler with loads that fail use a mock, of which they script how much there is to load. It becomes
  one with our connector behind it: whatever is not scripted is ours.
- ``ExampleConnector``, whose calls tests record alone and as a child of vLLM's ``MultiConnector``, becomes ours.

Nothing unexpected may be logged by ours meanwhile. What cannot hold for us is in ``APART``, with the reason. It is run
all the same, and must fail.
"""

from __future__ import annotations

import copy
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import tests
from tests.engines.vllm.checkpoints import random_llama
from tests.engines.vllm.upstream import VERSION, fetch, set_apart, tell
from tests.node.serving import Thread

PACKAGES = ["tests/__init__.py", "tests/v1/__init__.py", "tests/v1/kv_connector/__init__.py"]
UNIT = "tests/v1/kv_connector/unit"
SUITES = [
    "test_kv_connector_lifecycle.py",
    "test_kv_load_failure_recovery.py",
    "test_invalid_blocks_correctness.py",
    "test_error_propagation.py",
    "test_cache_pollution_prevention.py",
    "test_multi_connector.py",
]

APART = {
    "test_multi_example_connector_consistency": "needs a GPU, and compares the files of two example connectors",
}
"""Tests that cannot hold for us, by their names, and why."""

_made: set[str] = set()
"""Tests that made a connector of ours."""

if folder := os.environ.get("VLLM_SOURCE"):
    tests.__path__.append(str(Path(folder, "tests")))  # theirs are called so too, by each other


# -- the plugin -------------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from kvtide.engines.vllm import KvtideConnector

    utils: Any = __import__(UNIT.replace("/", ".") + ".utils", fromlist=["*"])
    scratch = tempfile.TemporaryDirectory()
    node = Thread(Path(scratch.name, "node.sock"), dram={"budget": "16MiB", "segment": "2MiB"})
    settings = {"engine": {"address": f"unix:{node.path}", "weights_id": "w"}}
    ours: list[KvtideConnector] = []

    @config.add_cleanup
    def close() -> None:
        for connector in ours:
            connector.shutdown()
        node.close()
        scratch.cleanup()

    class AsExample(KvtideConnector):
        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            changed = copy.copy(vllm_config)
            changed.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
            changed.kv_transfer_config.kv_connector_extra_config = settings
            super().__init__(changed, role, kv_cache_config)
            ours.append(self)
            _made.add(os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0])

    def behind_a_mock() -> Mock:
        vllm_config = utils.create_vllm_config(kv_role="kv_both")
        spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float16)
        caches = KVCacheConfig(num_blocks=100, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["0"], spec)])
        connector = AsExample(vllm_config, KVConnectorRole.SCHEDULER, caches)
        assert connector._scheduler is not None, "it is off, and its log says why"
        mock = Mock(wraps=connector)
        mock.get_external_cache_hit_sources.side_effect = plain().get_external_cache_hit_sources.side_effect
        return mock

    plain = utils.create_mock_connector
    utils.create_mock_connector = behind_a_mock
    utils.ExampleConnector = AsExample
    defaults = utils.create_vllm_config.__defaults__
    utils.create_vllm_config.__defaults__ = (str(random_llama()), *defaults[1:])  # theirs is not on this machine


class _Said(logging.Handler):
    """What kvtide logs. vLLM keeps its log, and with it ours, from pytest."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture(autouse=True)
def _nothing_unexpected() -> Iterator[None]:
    said = _Said()
    logging.getLogger("kvtide").addHandler(said)
    yield
    logging.getLogger("kvtide").removeHandler(said)
    wrong = [line for line in said.lines if "unexpected" in line or "vLLM goes on without it" in line]
    assert not wrong, "\n".join(wrong)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        set_apart(item, APART)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    tell(terminalreporter, SUITES, _made)


# -- the command ------------------------------------------------------------------------------------------


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as made:
        root = Path(made, f"vllm-{VERSION}")
        if arguments:  # without its vllm, which would be imported instead of the one that is installed
            for part in [*PACKAGES, UNIT]:
                _copy(Path(arguments[0], root.name, part), root / part)
        else:
            fetch(Path(made), [f"/{part}" for part in [*PACKAGES, UNIT]])
        command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(root), "-p", "no:cacheprovider"]
        command += ["--confcutdir", str(root / "tests/v1/kv_connector"), "-p", __spec__.name]
        command += ["-q", "-rxfE", "-W", "ignore", "--timeout=120", *(str(root / UNIT / suite) for suite in SUITES)]
        environment = os.environ | {"VLLM_SOURCE": str(root), "HF_HUB_OFFLINE": "1"}
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
