"""What is collected depends on what is installed: tests with a real vLLM run in an environment of their own.

Servers of shared storage are started once, when the first test wants them.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from kvtide.testing.servers import S3Server, ValkeyServer

_VLLM = importlib.util.find_spec("vllm") is not None

collect_ignore_glob = [] if _VLLM else ["engines/vllm/*"]


def pytest_report_header() -> list[str]:
    if _VLLM:
        return []
    return ["tests/engines/vllm: left out, vllm is not installed here; run them with .venv-vllm/bin/pytest (make test)"]


def pytest_configure() -> None:
    # Whoever is started in the background may be told to ignore interrupts, and would tell its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Images of containers often set this. Tests start hundreds of processes, and each would compile all of kvtide: the
    # start of a node then takes twice the CPU time.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # PyTorch computes tiny models here. Its threads wait for each other, by turning, at each operation: where other
    # processes use the cores too, two of them take twice the CPU time of one. (vLLM has threads of its own settings.)
    if not _VLLM:
        os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server, with its credentials in the environment."""
    with S3Server(tmp_path_factory.mktemp("s3")) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path_factory.mktemp("valkey")) as server:
        yield server
