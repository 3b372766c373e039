"""A node that starts by itself, serves everybody who has the same configuration, and goes when nobody is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvtide import config as configuration
from kvtide.config import Config
from kvtide.errors import ConfigError, TierError
from kvtide.node import protocol
from kvtide.node.client.client import Client
from kvtide.node.client.launch import open_node, place
from kvtide.node.server.mapped_memory import beside
from kvtide.testing.interface import MODEL, PLAIN, data, length, prompt
from tests.node.serving import eventually


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    nvme = {"path": str(tmp_path / "kv"), "budget": "64MiB", "segment": "8MiB"}
    return configuration.read(None, {}, dram={"budget": "16MiB", "segment": "2MiB"}, nvme=nvme)


def test_all_find_the_same_node_and_it_goes_when_they_have_gone(config: Config) -> None:
    clients: list[Client] = []
    openers = [threading.Thread(target=lambda: clients.append(open_node(config, idle=0.2))) for _ in range(4)]
    for opener in openers:
        opener.start()
    for opener in openers:
        opener.join()
    assert len(clients) == 4
    with clients[0].session(MODEL) as one, clients[3].session(MODEL) as other:
        one.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        assert length(other, prompt(1, 2)) == 32
    for client in clients:
        client.close()
    eventually(lambda: not place(config).exists())
    with open_node(config, idle=0.2) as client, client.session(MODEL) as session:
        assert length(session, prompt(1, 2)) == 32, "it wrote down what it had"
    eventually(lambda: not place(config).exists())


def test_it_is_nobodys_child(config: Config) -> None:
    with open_node(config, idle=0.2):
        nodes = [p for p in Path("/proc").glob("[0-9]*") if str(place(config)) in _command(p)]
        (node,) = nodes
        parent = int((node / "stat").read_text().rpartition(")")[2].split()[1])
        assert parent != os.getpid()
        assert os.getsid(int(node.name)) != os.getsid(0)
    eventually(lambda: not place(config).exists())


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_text()
    except OSError:
        return ""


def test_other_settings_have_another_node(config: Config) -> None:
    assert place(config) == place(config)
    assert place(configuration.read(None, {}, dram={"budget": "1GiB"})) != place(config)


def test_a_node_that_cannot_start_says_why(config: Config, tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file where a directory should be")
    with pytest.raises(TierError, match="says why"):
        open_node(config)
    assert str(tmp_path / "kv") in place(config).with_suffix(".log").read_text()


def test_a_folder_that_others_may_write_is_refused(config: Config, tmp_path: Path) -> None:
    folder = tmp_path / f"kvtide-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="not ours alone"):
        open_node(config)


def nodes(config: Config) -> list[int]:
    """The processes of the node with that configuration."""
    return [int(p.name) for p in Path("/proc").glob("[0-9]*") if str(place(config)) in _command(p)]


def test_a_node_that_was_killed_is_started_again(config: Config) -> None:
    with open_node(config, idle=0.2) as client, open_node(config, idle=0.2), client.session(MODEL) as session:
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        assert client.flush(30)
        (old,) = nodes(config)
        os.kill(old, signal.SIGKILL)
        eventually(lambda: not client.connected)
        eventually(lambda: client.connected)
        (new,) = nodes(config)
        assert new != old
        assert length(session, prompt(1, 2)) == 32, "from its disk"
    eventually(lambda: not place(config).exists())


def test_whoever_comes_while_a_node_goes_has_one(config: Config) -> None:
    for _ in range(2):
        for pause in (0.0, 0.001, 0.01):
            open_node(config, idle=pause).close()
            time.sleep(pause)
            with open_node(config, idle=0.0) as client:
                eventually(lambda: client.connected)
    eventually(lambda: not place(config).exists())


def test_a_node_that_refuses_is_not_started_again(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is refused hears why."""
    with open_node(config) as first:
        assert first.status().node.pid
        monkeypatch.setattr(protocol, "PROTOCOL", 99)
        with pytest.raises(TierError, match=r"refused us: this node .* speaks protocol"):
            open_node(config)


def test_nodes_whose_sockets_differ_after_a_dot_have_files_of_their_own(tmp_path: Path) -> None:
    kinds = {beside(tmp_path / name, "alive").name for name in ("kv.0", "kv.1", "10.0.0.1", "kv", "node.sock")}
    assert kinds == {"kv.0.alive", "kv.1.alive", "10.0.0.1.alive", "kv.alive", "node.alive"}


def test_a_socket_in_no_folder_is_said(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvtide", "node", "--socket", str(tmp_path / "none" / "node.sock")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "in a folder that it may write to" in " ".join(done.stderr.split())
