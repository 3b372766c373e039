"""The process with NIXL, with a library in its place that does what a test needs."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from kvtide.testing.interface import until
from kvtide.tiers.peers import nixl_process
from kvtide.tiers.peers.nixl_process import NixlOffer, NixlProcess

_LIBRARY = """
import ctypes, os, time
def nixl_agent_config(**_): pass
class nixl_agent:
    backends = ["UCX"]
    def __init__(self, *_):
        while os.path.exists({hold!r}):
            time.sleep(0.01)
    def register_memory(self, *_): pass
    def get_agent_metadata(self): return b"of this one"
    def add_remote_agent(self, metadata): ctypes.PyDLL(None).sleep(1000)  # holds the GIL
"""


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """While there is this file, the library does not start."""
    return tmp_path / "hold"


@pytest.fixture
def process(tmp_path: Path, hold: Path) -> NixlProcess:
    package = tmp_path / "nixl_cu12"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_api.py").write_text(_LIBRARY.format(hold=str(hold)))
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    return NixlProcess({"PYTHONPATH": path})


def test_it_gets_no_secrets(process: NixlProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret")
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    with closing(process):
        process.start()
        found = Path(f"/proc/{process.pid}/environ").read_bytes()
    assert b"UCX_NET_DEVICES=mlx5_0:1" in found
    assert b"a secret" not in found


def test_it_starts_in_a_node_with_many_descriptors(process: NixlProcess) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = 1100
    if limits[1] < 2 * many:
        pytest.skip("a process may not have so many descriptors here")
    with closing(process), ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2 * many), limits[1]))
        for _ in range(many):
            stack.callback(os.close, os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
        process.start()
        assert process.offer() is not None


def test_it_is_not_awaited_by_a_close_that_comes_just_before_it(
    process: NixlProcess, hold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold.touch()  # it would not start
    closer = threading.Thread(target=process.close)
    popen = subprocess.Popen

    def late(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        closer.start()
        until(lambda: process._closed)
        return popen(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", late)
    monkeypatch.setattr(nixl_process, "_SOON", 90.0)
    starting = ThreadPoolExecutor(1).submit(process.start)
    with pytest.raises(OSError, match="the node ends"):
        starting.result(60)
    closer.join()


def test_a_system_without_threads_costs_nixl_alone(process: NixlProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node goes on accepting others, and starts it later."""

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with closing(process), monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        process.start_soon()
        assert process.offer() is None


@pytest.mark.long
def test_it_ends_when_a_call_of_the_library_does_not_return(process: NixlProcess) -> None:
    with closing(process):
        process.start()
        with process.channel(NixlOffer(0, 4096, b"of another")):
            until(lambda: process.offer() is None)


def test_a_child_that_is_forked_while_it_starts_ends(process: NixlProcess, hold: Path) -> None:
    hold.touch()
    with closing(process):
        starting = threading.Thread(target=process.start)
        starting.start()
        until(lambda: process.pid > 0)
        child = os.fork()
        if not child:
            process.close()
            os._exit(7)
        status: list[int] = []
        try:
            until(lambda: _ended(child, status))
        finally:
            if not status:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            hold.unlink()
            starting.join()
        assert status == [7]
        assert process.offer() is not None, "it is its parent's"


def _ended(child: int, status: list[int]) -> bool:
    pid, how = os.waitpid(child, os.WNOHANG)
    if pid:
        status.append(os.waitstatus_to_exitcode(how))
    return bool(pid)
