"""``kvtide node`` says what it serves and when it ends; ``kvtide stop`` ends it, and nothing else."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtide import cli
from kvtide.cli import node as node_command
from kvtide.cli import stop
from kvtide.errors import AccessError, ConfigError, TierError
from kvtide.node.client.client import Client
from kvtide.node.server import server
from kvtide.node.server.mapped_memory import beside
from tests.node.serving import Process, eventually


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(cli.app, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def listening(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    sock.listen()
    return sock


def test_a_node_says_what_it_serves_and_is_stopped(tmp_path: Path) -> None:
    process = Process(tmp_path, KVTIDE_NODE_HTTP="127.0.0.1:0")
    try:
        pid = process.process.pid
        started = eventually(lambda: [line for line in process.log.splitlines() if line.startswith("kvtide ")])
        assert len(started) == 1
        expected = (
            rf"kvtide \S+ serves at {process.path}; process {pid}; dram 16 MiB, nvme 64 MiB; http://127.0.0.1:\d+"
        )
        assert re.fullmatch(expected, started[0])
        threading.Thread(target=process.process.wait).start()  # as its parent, so that no zombie is left
        assert run("stop", f"unix:{process.path}") == f"the node at {process.path}, process {pid}, has ended\n"
        assert eventually(lambda: process.process.poll() is not None)
        assert process.process.returncode == 0
        assert not process.path.exists()
    finally:
        process.process.kill()
    with pytest.raises(TierError, match=r"there is no socket .*: nothing was stopped"):
        run("stop", process.path)


def test_a_node_that_was_told_to_stop_before_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its socket is gone as soon as it ends, but it still writes: whoever unmounts the disk then must wait."""
    path = tmp_path / "node.sock"
    # Not by capsys: it loses what another thread writes while it is read.
    with open(beside(path, "alive"), "wb") as ending, contextlib.redirect_stderr(io.StringIO()) as errors:
        fcntl.flock(ending, fcntl.LOCK_EX)
        waiting = threading.Thread(target=stop.stop, args=(str(path),))
        waiting.start()
        eventually(lambda: re.match(rf"a node at {path} is ending \(\d+ s\)\n", errors.getvalue()))
        assert waiting.is_alive()
        fcntl.flock(ending, fcntl.LOCK_UN)
        waiting.join(60)
    assert not waiting.is_alive()
    assert capsys.readouterr().out == f"the node at {path} has ended\n"


def test_a_node_serves_although_nobody_can_read_what_it_says(tmp_path: Path) -> None:
    """Its log is on a full disk: that is no reason not to start."""
    path = tmp_path / "node.sock"
    environment = {**os.environ, "KVTIDE_DRAM_BUDGET": "8MiB"}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "kvtide", "node", "--socket", str(path)]
        process = subprocess.Popen(command, stderr=full, env=environment)

    def serves() -> bool:
        with socket.socket(socket.AF_UNIX) as sock:
            return sock.connect_ex(str(path)) == 0

    try:
        eventually(lambda: serves() or process.poll() is not None)
        with Client(path) as client:
            assert client.connected
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def test_a_node_that_ends_slowly_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "_FIRST", 0.01)
    monkeypatch.setattr(stop, "_NEXT", 0.01)
    errors = io.StringIO()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as ending, contextlib.redirect_stderr(errors):
        waiting = threading.Thread(target=stop._wait, args=(Path("x"), ending.pid, os.pidfd_open(ending.pid)))
        waiting.start()
        eventually(lambda: errors.getvalue().count("\n") >= 2)
        assert ending.stdin is not None
        ending.stdin.close()
        waiting.join(60)
    assert not waiting.is_alive()
    assert re.match(rf"the node at x, process {ending.pid}, is ending \(\d+ s\)\n", errors.getvalue())


def test_a_process_that_is_no_node_is_not_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket of another program, named by mistake: one that says something else, one that hangs up, one that is
    silent."""
    sent: list[int] = []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: sent.append(1))
    for number, answer in enumerate([b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x05\0\0\0hello", b"", None]):
        path = tmp_path / f"{number}.sock"
        monkeypatch.setattr(stop, "_PATIENCE", 0.2 if answer is None else 60.0)
        with listening(path) as sock:

            def other(sock: socket.socket = sock, answer: bytes | None = answer) -> None:
                with sock.accept()[0] as connection:
                    connection.recv(4096)
                    if answer is None:
                        connection.recv(4096)  # until the other side gives up
                    else:
                        connection.sendall(answer)

            thread = threading.Thread(target=other)
            thread.start()
            with pytest.raises(TierError, match=f"process {os.getpid()}, .* has not answered as a node of kvtide"):
                run("stop", path)
            thread.join()
    assert not sent


def test_without_a_node_it_says_so(tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    listening(path).close()
    with pytest.raises(TierError, match=r"no process listens at .*: nothing was stopped"):
        run("stop", path)
    with pytest.raises(ConfigError, match="https://host:9410 is no socket"):
        run("stop", "https://host:9410")


def test_only_who_may_signal_the_node_may_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    process = Process(tmp_path)
    try:
        monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
        uid = os.getuid()
        with pytest.raises(AccessError, match=f"is run by user {uid}: only that user and root may stop it"):
            run("stop", process.path)
        with Client(process.path) as client:
            assert client.connected, "it goes on"
    finally:
        process.stop()


def test_a_detached_node_says_what_it_serves_and_that_it_ends_when_idle(tmp_path: Path) -> None:
    """Its socket may be given with ``unix:``, as other commands are given it."""
    path = tmp_path / "node.sock"
    arguments = ["node", "--socket", f"unix:{path}", "--detach", "--idle-seconds", "5min"]
    said = tmp_path / "said"
    with said.open("w") as output:  # a pipe would stay open as long as the node has it
        environment = {**os.environ, "KVTIDE_DRAM_BUDGET": "8MiB"}
        command = [sys.executable, "-m", "kvtide", *arguments]
        subprocess.run(command, stderr=output, check=True, timeout=120, env=environment)
    started = said.read_text()
    try:
        assert re.fullmatch(
            rf"kvtide \S+ serves at {path}; process \d+; dram 8 MiB; ends after 300 s without a client\n", started
        )
    finally:
        run("stop", path)


def test_why_a_detached_node_could_not_start_is_said_once(tmp_path: Path) -> None:
    arguments = ["node", "--socket", str(tmp_path / "missing" / "node.sock"), "--detach"]
    done = subprocess.run(
        [sys.executable, "-m", "kvtide", *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.count("a node cannot be at") == 1
    assert "No such file or directory; give a --socket in a folder" in done.stderr
    assert "Errno" not in done.stderr


def test_a_node_without_idle_time_ends_with_its_last_client(tmp_path: Path) -> None:
    """And not before: a client that asks nothing is a client."""
    path = tmp_path / "node.sock"
    arguments = ["node", "--socket", str(path), "--idle-seconds", "0"]
    environment = {**os.environ, "KVTIDE_DRAM_BUDGET": "8MiB"}
    with subprocess.Popen(
        [sys.executable, "-m", "kvtide", *arguments], env=environment, stderr=subprocess.PIPE
    ) as process:
        try:
            assert process.stderr is not None
            assert b"serves at" in process.stderr.readline()
            with Client(path) as first:
                with Client(path) as second:
                    assert second.connected
                assert first.status().node.seconds
                assert process.poll() is None
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_the_help_names_the_time_that_the_first_client_is_given() -> None:
    assert server._FIRST == node_command.FIRST_CLIENT
    shown = " ".join(CliRunner().invoke(cli.app, ["node", "--help"], env={"COLUMNS": "200"}).output.split())
    assert f"at least {server._FIRST:g} seconds" in shown
