"""What ``kvtide cluster`` shows: the matrix at 80 columns, and errors that say what to do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvtide.cli import app
from kvtide.cli._cluster_matrix import MatrixCell, matrix_lines
from kvtide.errors import ConfigError, KvtideError, TierError
from kvtide.node.client.client import Client
from kvtide.testing.interface import MODEL, PLAIN, data, length, prompt, until
from kvtide.testing.servers import ValkeyServer, free_ports
from tests.node.serving import Process
from tests.peers.nodes import token

GIB = float(1 << 30)


def cell(reader: int, source: int) -> MatrixCell:
    return MatrixCell(reader, source, (reader + source) * GIB / 7, (reader + source) / 3000)


def test_a_small_matrix() -> None:
    cells = [MatrixCell(1, 2, 1.25 * GIB, 0.00034), MatrixCell(2, 1, 850 * 1024**2, 0.0), MatrixCell(2, 3, 0.0, 0.25)]
    assert matrix_lines([1, 2, 3], cells, 80) == [
        "bytes/s: each row is a reader, each column whom it reads from",
        "        1    2    3",
        "   1    . 1.2G    -",
        "   2 850M    .    -",
        "   3    -    -    .",
        "",
        "ms of a round trip: each row is a reader, each column whom it reads from",
        "        1    2    3",
        "   1    . 0.34    -",
        "   2    -    .  250",
        "   3    -    -    .",
        "",
        "nothing is known from 3: nothing measured yet, or an older version",
    ]


@pytest.mark.parametrize("count", [2, 15, 16, 64])
def test_every_value_is_shown_once_within_80_columns(count: int) -> None:
    numbers = [*range(1, count), 65535]
    cells = [cell(a, b) for a in numbers for b in numbers if a != b]
    lines = matrix_lines(numbers, cells, 80)
    assert max(map(len, lines)) <= 80
    values = [word for line in lines for word in line.split()[1:] if word[-1] in "MGT" and word[0].isdigit()]
    assert len(values) == len(cells)
    assert len(lines) < 2 * (count + 3) * (1 + count // 10)


def test_values_that_nobody_has_measured_take_no_more_space() -> None:
    rates = [1e-9, 5.0, 999.6, 1e4, 1023.9 * 1024, 999.9 * GIB, 1e30]
    lines = matrix_lines([1, 2], [MatrixCell(1, 2, rate, rate) for rate in rates[:1]], 80)
    assert lines[2].split() == ["1", ".", "0B"]
    shown = [matrix_lines([1, 2], [MatrixCell(1, 2, rate, rate)], 80) for rate in rates]
    assert all(len(lines[2]) == len(lines[1]) and len(lines[7]) == len(lines[6]) for lines in shown)


def test_the_node_that_is_asked_has_a_row_if_it_is_no_member() -> None:
    lines = matrix_lines([3, 4], [MatrixCell(0, 4, GIB, 0.001)], 80)
    assert lines[2] == "here    - 1.0G"
    assert lines[-1].startswith("nothing is known from 3 to 4:")


# -- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return monkeypatch


def cluster(*words: str) -> Result:
    return CliRunner().invoke(app, ["cluster", *words])


def refused(kind: type[KvtideError], *words: str) -> str:
    """The message of the error with which the command ends."""
    done = cluster(*words)
    assert isinstance(done.exception, kind), done.output
    return str(done.exception)


def test_a_list_of_addresses_shows_what_this_node_has_measured(clean: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (port, nobody) = free_ports(2)
    secret = token(tmp_path)
    one = Process(tmp_path, KVTIDE_PEERS_LISTEN=f"127.0.0.1:{port}", KVTIDE_PEERS_TOKEN_FILE=secret)
    (tmp_path / "two").mkdir()
    addresses = f"127.0.0.1:{port} 127.0.0.1:{nobody}"
    two = Process(tmp_path / "two", KVTIDE_PEERS_ADDRESSES=addresses, KVTIDE_PEERS_TOKEN_FILE=secret)
    try:
        with Client(one.path) as client, client.session(MODEL) as session:
            session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        with Client(two.path) as client, client.session(MODEL) as session:
            assert length(session, prompt(1, 2)) == len(prompt(1, 2))

        def found() -> list[dict[str, Any]]:
            nodes: list[dict[str, Any]] = json.loads(cluster(str(two.path), "--json").output)["nodes"]
            return nodes

        expected = [(f"127.0.0.1:{port}", False, True), (f"127.0.0.1:{nobody}", True, False)]
        until(lambda: [(n["address"], n["away"], n["bytes_per_second"] > 0) for n in found()] == expected)
        shown = cluster(str(two.path)).output
        assert f"127.0.0.1:{nobody} away" in shown
        assert max(map(len, shown.splitlines())) <= 80
        assert "--tokens needs a directory" in refused(ConfigError, str(two.path), "--tokens", "x")
        text = refused(ConfigError, str(one.path))
        assert "neither peers.directory nor peers.addresses is set" in text
    finally:
        one.kill()
        two.kill()


def test_errors_name_the_setting(clean: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "no node answers at" in refused(KvtideError, str(tmp_path / "nothing.sock"))
    (port,) = free_ports(1)
    node = Process(tmp_path)
    try:
        clean.setenv("KVTIDE_PEERS_DIRECTORY", f"valkey://127.0.0.1:{port}/0")
        text = refused(TierError, str(node.path))
        assert f"the directory at valkey://127.0.0.1:{port}/0 (peers.directory) does not answer" in text
        assert "go on without it" in text
    finally:
        node.kill()


def test_who_watches_sees_when_the_directory_is_away_and_when_it_is_back(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    node = Process(tmp_path / "node")
    with ValkeyServer(tmp_path / "valkey") as valkey:
        command = [sys.executable, "-m", "kvtide", "cluster", str(node.path), "--watch", "--every", "100ms"]
        environment = {**os.environ, "KVTIDE_PEERS_DIRECTORY": valkey.url, "KVTIDE_PEERS_TOKEN_FILE": token(tmp_path)}
        environment |= {"COLUMNS": "80", "PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None

                def shown(text: str) -> None:
                    assert process.stdout is not None
                    assert any(text in line for line in process.stdout), f"it ended without {text!r}"

                shown("0 members; directory")
                valkey.kill()
                shown("does not answer")
                valkey.start()
                shown("0 members; directory")
                process.send_signal(signal.SIGINT)
                process.stdout.read()
                assert process.wait() == 0
            finally:
                process.kill()
                node.kill()
