"""The directory that a node starts itself: who has the port, and what is sent there."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from kvtide import config as configuration
from kvtide.config import Peers
from kvtide.errors import ConfigError, TierError
from kvtide.peers import embedded_directory
from kvtide.peers.embedded_directory import EmbeddedDirectory
from kvtide.testing.interface import until
from kvtide.tiers.peers.cluster import check_cluster, directory_of, directory_password
from kvtide.tiers.peers.directory import BlockDirectory
from kvtide.tiers.shared.valkey_client import UnfitServer
from tests.peers.nodes import token
from tests.peers.test_cluster_nodes import pair_of_ports


def settings_of(folder: Path, **peers: Any) -> Peers:
    known = {"listen": f"127.0.0.1:{pair_of_ports()}", "directory": "embedded", "token_file": token(folder)}
    return configuration.read(None, env={}, peers={**known, **peers}).peers


def asked(settings: Peers, command: str) -> str:
    """What the server at the port of the directory says; empty if there is none."""
    try:
        with socket.create_connection(("127.0.0.1", int(settings.listen.rpartition(":")[2]) + 1), 5) as sock:
            sock.sendall(f"AUTH {directory_password(settings)}\r\n{command}\r\nQUIT\r\n".encode())
            return b"".join(iter(lambda: sock.recv(1 << 16), b"")).decode()
    except OSError:
        return ""


def process_of(settings: Peers) -> str:
    """The server's process id."""
    said = asked(settings, "INFO server")
    return said.partition("process_id:")[2].split("\r\n")[0]


def test_a_directory_that_was_found_is_replaced_when_it_ends(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    with closing(EmbeddedDirectory(settings)) as first:
        own = process_of(settings)
        with closing(EmbeddedDirectory(settings)):
            assert process_of(settings) == own, "the one that is there is used"
            first.close()
            until(lambda: process_of(settings) not in ("", own))
    assert not process_of(settings)


def test_nodes_log_in_with_the_secret_that_they_have_now(tmp_path: Path) -> None:
    """It was replaced on all hosts, and then the node with the directory was restarted."""
    settings = settings_of(tmp_path)
    with closing(EmbeddedDirectory(settings)) as first:
        reading = structs.replace(settings, directory=f"embedded://{first.host}:{first.port}", listen="")
        with closing(directory_of(reading)) as directory:
            assert not directory.members()
            assert "one port above peers.listen" in directory.where, "so the port of peers.listen is the usual mistake"
            token(tmp_path, text="a secret that all the nodes have from now on: 0123456789")
            first.close()
            with closing(EmbeddedDirectory(settings)):
                until(lambda: answers(directory))
            Path(settings.token_file).chmod(0o644)
            with pytest.raises(OSError, match="chmod 600"):
                directory.members()
            Path(settings.token_file).chmod(0o600)


def answers(directory: BlockDirectory) -> bool:
    try:
        return not directory.members()
    except UnfitServer:
        raise
    except OSError:
        return False


def test_a_node_with_another_secret_is_told_which(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    with closing(EmbeddedDirectory(settings)) as one:
        other = token(tmp_path, "other", "a secret that no other node has: 0123456789abcdef")
        joining = structs.replace(settings, directory=f"embedded://{one.host}:{one.port}", token_file=other)
        with pytest.raises(TierError, match=r"derived from peers\.token_file, which must have the same secret"):
            directory_of(joining)


def refusal(settings: Peers) -> str:
    with pytest.raises(ConfigError) as failure:
        EmbeddedDirectory(settings)
    return str(failure.value)


@pytest.mark.parametrize(
    ("listen", "text"),
    [("", "another program listens there"), ("203.0.113.7:9411", "Cannot assign requested address")],
)
def test_why_the_directory_cannot_be_started_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listen: str, text: str
) -> None:
    monkeypatch.setattr(embedded_directory, "_STARTING", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        settings = settings_of(tmp_path, listen=listen or f"127.0.0.1:{other.getsockname()[1] - 1}")
        until(lambda: text in refusal(settings))  # a slow host may not have tried in that time


def test_a_directory_that_ends_and_cannot_be_started_again_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_of(tmp_path)
    with closing(EmbeddedDirectory(settings)) as directory:
        directory._binary = str(tmp_path / "uninstalled")
        os.kill(int(process_of(settings)), signal.SIGKILL)
        until(lambda: "uninstalled: No such file" in caplog.text)
        directory._failed(directory._problem)
        assert caplog.text.count("cannot be started") == 1


def test_a_node_that_starts_the_directory_sends_the_password_to_nobody(tmp_path: Path) -> None:
    """Who might listen at the port before our server does would get it."""
    settings = settings_of(tmp_path)
    with closing(EmbeddedDirectory(settings)):
        assert "total_connections_received:1\r\n" in asked(settings, "INFO stats"), "this question alone"


@pytest.mark.parametrize(
    "command",
    [
        "CONFIG SET maxmemory 100gb",
        "CONFIG SET appendonly yes",
        "CONFIG GET requirepass",
        "SAVE",
        "REPLICAOF 127.0.0.1 1",
        "MONITOR",
        "SHUTDOWN",
        "SET other 1",
    ],
)
def test_with_the_password_nobody_gets_more_than_the_directory(tmp_path: Path, command: str) -> None:
    """It is sent unencrypted, and must not be worth the host's memory and files."""
    settings = settings_of(tmp_path)
    with closing(EmbeddedDirectory(settings)):
        assert "-NOPERM" in asked(settings, command)
        assert "kvtide:x" in asked(settings, "SET kvtide:x 1\r\nSCAN 0")


@pytest.mark.parametrize(
    "peers",
    [
        {"listen": "10.0.0.7:9411"},
        {"listen": "0.0.0.0:9411"},
        {"listen": "node-7:9411"},
        {"listen": "127.0.0.1:9411", "directory": "embedded://10.0.0.7:9412"},
    ],
)
def test_nodes_with_tls_have_no_unencrypted_directory_between_hosts(tmp_path: Path, peers: dict[str, str]) -> None:
    check_cluster(settings_of(tmp_path, **peers))
    with pytest.raises(ConfigError, match="valkeys://"):
        check_cluster(settings_of(tmp_path, certificate="here", **peers))


@pytest.mark.parametrize("directory", ["embedded", "embedded://localhost:9412", "valkeys://10.0.0.5:6379/0"])
def test_nodes_with_tls_may_have_one_on_their_own_host(tmp_path: Path, directory: str) -> None:

    check_cluster(settings_of(tmp_path, certificate="here", directory=directory))
