"""Real nodes in a cluster, each a process; the directory is started by the first of them, or is a server of its own."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvtide.node.client.client import Client
from kvtide.store.node_statistics import ClusterServing
from kvtide.testing.interface import MODEL, PLAIN, data, length, prompt, until
from kvtide.testing.servers import ValkeyServer, free_ports
from tests.node.serving import Process
from tests.peers.nodes import token


def pair_of_ports() -> int:
    """A free port, of which the next one is free too: the directory's."""
    while True:
        (port,) = free_ports(1)
        try:
            with socket.create_server(("127.0.0.1", port + 1)):
                return port
        except OSError:
            continue


class Nodes:
    """Starts nodes; the first one starts the directory."""

    def __init__(self, folder: Path, stack: ExitStack, **settings: str) -> None:
        self._folder = folder
        self._stack = stack
        self._settings = {"KVTIDE_PEERS_TOKEN_FILE": token(folder), "KVTIDE_PEERS_LEASE": "2s", **settings}
        self.port = pair_of_ports()
        self.directory = f"embedded://127.0.0.1:{self.port + 1}"

    def node(self, name: str, **settings: str) -> Process:
        folder = self._folder / name
        folder.mkdir()
        port = self.port if name == "one" else free_ports(1)[0]
        peers = {
            "KVTIDE_PEERS_LISTEN": f"127.0.0.1:{port}",
            "KVTIDE_PEERS_DIRECTORY": "embedded" if name == "one" else self.directory,
        }
        node = Process(folder, **self._settings, **peers, **settings)
        self._stack.callback(node.kill)
        return node

    def command(self, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
        """Run kvtide with the settings of a node that reads."""
        peers = {**self._settings, "KVTIDE_PEERS_DIRECTORY": self.directory, **settings}
        return subprocess.run(
            [sys.executable, "-m", "kvtide", *words],
            capture_output=True,
            text=True,
            timeout=120,
            env={**peers, "PATH": "/usr/bin:/bin", "COLUMNS": "120", "PYTHONPATH": ":".join(sys.path)},
            cwd=self._folder,
        )


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(tmp_path, stack)


def serving(node: Process) -> ClusterServing:
    with Client(node.path) as client:
        found = client.status().node.cluster
        assert found is not None
        return found


def keep(node: Process, tokens: list[int]) -> None:
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(tokens, data(PLAIN, tokens))


def found(node: Process, tokens: list[int]) -> bool:
    with Client(node.path) as client, client.session(MODEL) as session:
        return length(session, tokens) == len(tokens)


def test_one_command_starts_a_cluster_and_others_join(nodes: Nodes) -> None:
    one, two, three = nodes.node("one"), nodes.node("two"), nodes.node("three")
    keep(one, prompt(1, 2))
    keep(two, prompt(3, 4))
    for node in (one, two, three):
        until(lambda node=node: found(node, prompt(1, 2)) and found(node, prompt(3, 4)))  # type: ignore[misc]
    two.kill()
    until(lambda: found(three, prompt(3, 4)))
    until(lambda: len(members(nodes, three)) == 2)
    two.start()
    keep(two, prompt(5))
    until(lambda: found(three, prompt(5)))
    for node in (three, two, one):
        node.stop()


def members(nodes: Nodes, node: Process) -> list[dict[str, object]]:
    done = nodes.command("cluster", str(node.path), "--json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert isinstance(shown["members"], list)
    return shown["members"]


def test_the_directory_ends_with_its_node_and_comes_back_with_it(nodes: Nodes) -> None:
    one, two = nodes.node("one"), nodes.node("two")
    keep(two, prompt(1))
    until(lambda: found(one, prompt(1)))
    one.kill()
    assert not found(two, prompt(9))
    one.start()
    until(lambda: found(one, prompt(1)))
    until(lambda: serving(two).epoch > 0)


def test_a_node_alone_in_its_cluster_says_how_others_join(nodes: Nodes) -> None:
    """As on each of several hosts, if all have the settings of the one that starts the directory."""
    one = nodes.node("one")
    until(lambda: len(members(nodes, one)) == 1)
    joining = f'peers.directory = "embedded://127.0.0.1:{nodes.port + 1}"'
    assert joining in nodes.command("cluster", str(one.path)).stdout
    two = nodes.node("two")
    until(lambda: len(members(nodes, two)) == 2)
    assert "peers.directory" not in nodes.command("cluster", str(two.path)).stdout


def test_a_password_is_needed(nodes: Nodes) -> None:
    nodes.node("one")
    with socket.create_connection(("127.0.0.1", nodes.port + 1), 5) as sock:
        sock.sendall(b"KEYS *\r\n")
        assert sock.recv(100).startswith(b"-NOAUTH")


def test_kvtide_cluster_shows_members_and_who_has_a_prompt(nodes: Nodes, tmp_path: Path) -> None:
    one, two = nodes.node("one"), nodes.node("two")
    keep(one, prompt(1, 2, 3))
    until(lambda: found(two, prompt(1, 2, 3)))
    file = tmp_path / "tokens"
    file.write_text(json.dumps(prompt(1, 2, 3, 4)))
    shown = nodes.command("cluster", str(two.path), "--tokens", str(file))
    assert shown.returncode == 0, shown.stderr
    assert "2 members; directory:" in shown.stdout
    assert "this node" in shown.stdout
    assert f"127.0.0.1:{nodes.port}" in shown.stdout
    assert "peer 1" in shown.stdout
    numbers = sorted([serving(one).number, serving(two).number])

    def all_known() -> bool:
        said = json.loads(nodes.command("cluster", str(two.path), "--tokens", str(file), "--json").stdout)
        (holders,) = said["prompt"].values()
        return [sorted(who) for who in holders] == [numbers] * 3 + [[]]

    until(all_known)
    done = nodes.command("status", str(two.path), "--once")
    assert "2 members" in done.stdout, done.stdout


def test_kvtide_cluster_shows_what_all_members_have_measured(nodes: Nodes, tmp_path: Path) -> None:
    """Each node is told what the other one has measured."""
    one, two = nodes.node("one"), nodes.node("two")
    keep(one, prompt(1, 2))
    keep(two, prompt(3, 4))
    until(lambda: found(two, prompt(1, 2)) and found(one, prompt(3, 4)))
    numbers = serving(one).number, serving(two).number

    def measured(node: Process) -> set[tuple[int, int]]:
        cells = json.loads(nodes.command("cluster", str(node.path), "--json").stdout)["matrix"]
        return {(c["reader"], c["source"]) for c in cells if c["bytes_per_second"] > 0 and c["round_trip"] > 0}

    for node in (one, two):
        until(lambda node=node: measured(node) == {numbers, numbers[::-1]})  # type: ignore[misc]
    shown = nodes.command("cluster", str(two.path)).stdout
    assert "bytes/s: each row is a reader" in shown
    assert "nothing is known" not in shown
    (tmp_path / "other").mkdir()
    wrong = {"KVTIDE_PEERS_TOKEN_FILE": token(tmp_path / "other", text="x" * 40)}
    refused = nodes.command("cluster", str(two.path), **wrong)
    assert refused.returncode == 2
    assert "which must have the same secret on all nodes" in refused.stderr


def test_a_drained_node_is_not_found_and_has_written_its_blocks(tmp_path: Path) -> None:
    with ExitStack() as stack:
        files = {"KVTIDE_FILES_PATH": str(tmp_path / "shared"), "KVTIDE_FILES_STORE": "second-touch"}
        nodes = Nodes(tmp_path, stack, **files)
        one, two = nodes.node("one"), nodes.node("two")
        keep(two, prompt(*range(20)))
        with Client(two.path) as client:
            assert client.statistics().counts.get("blocks written to files", 0) == 0
        done = nodes.command("drain", str(two.path))
        assert done.returncode == 0, done.stderr + done.stdout
        assert done.stdout.splitlines()[-2:] == ["20 of 20 blocks are in files", "drained: the node may be stopped"]
        assert found(two, prompt(*range(20))), "it goes on serving its clients"
        assert [member["address"] for member in members(nodes, one)] == [f"127.0.0.1:{nodes.port}"]
        two.kill()
        assert found(one, prompt(*range(20))), "from shared storage"


def test_a_drain_can_be_repeated(tmp_path: Path) -> None:
    """The node goes on serving, so it may have been given more."""
    with ExitStack() as stack:
        files = {"KVTIDE_FILES_PATH": str(tmp_path / "shared"), "KVTIDE_FILES_STORE": "second-touch"}
        nodes = Nodes(tmp_path, stack, **files)
        one, two = nodes.node("one"), nodes.node("two")
        keep(two, prompt(*range(20)))
        assert nodes.command("drain", str(two.path)).returncode == 0
        keep(two, prompt(*range(50, 80)))
        done = nodes.command("drain", str(two.path))
        assert done.returncode == 0, done.stderr + done.stdout
        assert done.stdout.splitlines()[-2:] == ["30 of 30 blocks are in files", "drained: the node may be stopped"]
        two.kill()
        assert found(one, prompt(*range(50, 80))), "from shared storage"


def test_a_drain_says_whether_the_directory_may_still_list_the_node(tmp_path: Path) -> None:
    with ExitStack() as stack:
        valkey = stack.enter_context(ValkeyServer(tmp_path / "valkey", maxmemory_policy="noeviction"))
        nodes = Nodes(tmp_path, stack, KVTIDE_PEERS_LEASE="60s")
        nodes.directory = valkey.url
        two = nodes.node("two")
        until(lambda: serving(two).epoch > 0)
        keep(two, prompt(1, 2))
        valkey.hold()
        stack.callback(valkey.resume)
        done = nodes.command("drain", str(two.path))
        assert done.returncode == 0, done.stderr + done.stdout
        *_, listed, kept = done.stdout.splitlines()
        assert listed.startswith("the node could not be withdrawn from the directory (")
        assert f"{valkey.port}: Valkey did not answer in time): others may ask it until its lease ends, in " in listed
        assert kept == "it writes to no shared storage, so 2 blocks in its memory end with it"
        valkey.resume()
        assert nodes.command("drain", str(two.path), "--resume").returncode == 0
        until(lambda: serving(two).epoch > 0)
        done = nodes.command("drain", str(two.path))
        assert done.stdout.splitlines()[-1].startswith("the directory does not list the node any more; it writes to no")
        assert "could not" not in done.stdout


def test_a_drain_that_failed_can_be_undone(tmp_path: Path) -> None:
    with ExitStack() as stack:
        small = {"KVTIDE_FILES_STORE": "second-touch", "KVTIDE_FILES_BUDGET": "1MiB"}
        nodes = Nodes(tmp_path, stack, KVTIDE_FILES_PATH=str(tmp_path / "shared"), **small)
        nodes.node("one")
        two = nodes.node("two")
        for n in range(6):
            keep(two, prompt(*range(100 * n, 100 * n + 40)))
        done = nodes.command("drain", str(two.path))
        assert done.returncode == 1
        assert "blocks could not be written" in done.stdout
        assert "kvtide drain --resume" in done.stdout
        assert not serving(two).epoch
        done = nodes.command("drain", str(two.path), "--resume")
        assert done.returncode == 0, done.stderr
        until(lambda: serving(two).epoch > 0)
        assert serving(two).draining is None


@contextmanager
def hanging_storage(tmp_path: Path) -> Iterator[tuple[Process, Callable[[], subprocess.Popen[str]]]]:
    """A node with blocks for a storage that hangs, and how to start ``kvtide drain`` for it. The storage answers again
    before the node ends."""
    with ExitStack() as stack:
        valkey = stack.enter_context(ValkeyServer(tmp_path / "valkey"))
        valkey_settings = {"KVTIDE_VALKEY_URL": valkey.url, "KVTIDE_VALKEY_STORE": "second-touch"}
        nodes = Nodes(tmp_path, stack, **valkey_settings, KVTIDE_VALKEY_TIMEOUT="60s")
        nodes.node("one")
        two = nodes.node("two")
        until(lambda: serving(two).epoch > 0)
        keep(two, prompt(*range(20)))
        valkey.hold()
        stack.callback(valkey.resume)

        def drain() -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "kvtide", "drain", str(two.path)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1, env=OUTPUT)
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield two, drain


OUTPUT = {"PATH": "/usr/bin:/bin", "COLUMNS": "120", "PYTHONPATH": ":".join(sys.path), "PYTHONUNBUFFERED": "1"}


def unfinished(node: Process) -> bool:
    draining = serving(node).draining
    return draining is not None and draining.blocks > 0 and not draining.done and not serving(node).epoch


def test_ctrl_c_makes_the_node_a_member_again(tmp_path: Path) -> None:
    with hanging_storage(tmp_path) as (two, drain):
        process = drain()
        until(lambda: unfinished(two))
        assert process.stdout is not None
        while "0 of 20 blocks" not in (line := process.stdout.readline()):
            assert line, "it ended"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 1
        assert "interrupted: the node is a member" in process.stdout.read()
        until(lambda: serving(two).epoch > 0)
        assert serving(two).draining is None
        assert found(two, prompt(*range(20)))


def test_what_was_asked_for_last_is_what_remains(tmp_path: Path) -> None:
    with hanging_storage(tmp_path) as (two, _), Client(two.path) as client:
        for _ in range(5):
            client.drain()
            client.drain(resume=True)
        client.drain()
        until(lambda: unfinished(two))
        client.drain()
        assert unfinished(two), "the one that has not ended"
        for _ in range(5):
            client.drain()
            client.drain(resume=True)
        until(lambda: serving(two).epoch > 0)
        assert serving(two).draining is None


def test_who_watches_a_drain_learns_that_another_has_undone_it(tmp_path: Path) -> None:
    with hanging_storage(tmp_path) as (two, drain), Client(two.path) as client:
        process = drain()
        until(lambda: unfinished(two))
        client.drain(resume=True)
        assert process.wait(60) not in (0, None)


def test_a_node_without_a_cluster_is_not_drained(tmp_path: Path) -> None:
    with ExitStack() as stack:
        (tmp_path / "alone").mkdir()
        node = Process(tmp_path / "alone")
        stack.callback(node.kill)
        done = Nodes(tmp_path, stack).command("drain", str(node.path))
        assert done.returncode != 0
        assert "is in no cluster" in done.stderr
        assert "older" in done.stderr
        assert found(node, prompt(1)) is False
