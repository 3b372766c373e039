"""The directory of a cluster in a real Valkey, in a cluster of three, and in the simulated one."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvtide.errors import ConfigError, TierError
from kvtide.testing.clock import FakeClock
from kvtide.testing.directory import DirectoryContract, some_keys
from kvtide.testing.servers import ValkeyServer
from kvtide.testing.simulated_valkey import SimulatedLink, SimulatedValkey
from kvtide.tiers.peers import directory_scripts
from kvtide.tiers.peers.directory import BlockDirectory, marks_of, open_directory
from kvtide.tiers.peers.directory_scripts import PARTITIONS
from kvtide.tiers.shared.resp import ValkeyConnection, command
from kvtide.tiers.shared.valkey_client import Login, ValkeyClient, slot_of
from kvtide.tiers.shared.valkey_scripts import HashLookup, Script, ScriptCall, ScriptRunner, ValkeyScripts

TIME = 30.0


def say(server: ValkeyServer, *words: bytes) -> Any:
    """A command to one server, and its reply."""
    end = time.monotonic() + TIME
    connection = ValkeyConnection(("127.0.0.1", server.port), None, end)
    try:
        connection.send(command(*words), end)
        return connection.reply(end)
    finally:
        connection.close()


def let_time_pass(url: str, seconds: float) -> None:
    """Wait until a lease of that length has ended, at the server."""
    witness = open_directory(url, cluster=secrets.token_hex(8), timeout=TIME)
    witness.join(b"w" * 16, "witness:1", seconds)
    while witness.members():
        threading.Event().wait(0.02)
    witness.close()


class TestSimulated(DirectoryContract):
    @pytest.fixture(autouse=True)
    def simulated(self) -> None:
        self.clock = FakeClock(1_800_000_000.0)  # later than the time from which epochs count
        self.valkey = SimulatedValkey(self.clock)

    def runner(self) -> ScriptRunner:
        return SimulatedLink(self.valkey, [])

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)


class TestOneServer(DirectoryContract):
    @pytest.fixture(autouse=True)
    def server(self, valkey: ValkeyServer) -> None:
        self.url = valkey.url

    def runner(self) -> ScriptRunner:
        return ValkeyScripts(ValkeyClient(self.url))

    def pass_time(self, seconds: float) -> None:
        let_time_pass(self.url, seconds)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ValkeyServer]]:
    """Three servers with a third of the slots each."""
    folder: Path = tmp_path_factory.mktemp("cluster")
    with ExitStack() as stack:
        servers = [stack.enter_context(ValkeyServer(folder / str(i), cluster_enabled="yes")) for i in range(3)]
        for i, server in enumerate(servers):
            first, last = i * 16384 // 3, (i + 1) * 16384 // 3 - 1
            assert say(server, b"CLUSTER", b"ADDSLOTSRANGE", b"%d" % first, b"%d" % last) == b"OK"
            say(server, b"CLUSTER", b"MEET", b"127.0.0.1", b"%d" % servers[0].port)
        end = time.monotonic() + 60
        while not all(b"cluster_state:ok" in say(s, b"CLUSTER", b"INFO") for s in servers):
            assert time.monotonic() < end, "the cluster never came together"
            time.sleep(0.05)
        yield servers


class TestCluster(DirectoryContract):
    @pytest.fixture(autouse=True)
    def server(self, cluster: list[ValkeyServer]) -> None:
        self.url = cluster[1].url

    def runner(self) -> ScriptRunner:
        return ValkeyScripts(ValkeyClient(self.url))

    def pass_time(self, seconds: float) -> None:
        let_time_pass(self.url, seconds)

    def test_every_server_has_its_share(self, cluster: list[ValkeyServer]) -> None:
        directory = open_directory(self.url, cluster=secrets.token_hex(8), timeout=TIME)
        for server in cluster:
            say(server, b"FLUSHALL")
        member = directory.join(b"a" * 16, "a:1", TIME)
        assert directory.publish(member, some_keys(3000), [])
        counts = [say(server, b"DBSIZE") for server in cluster]
        assert min(counts) > 0.7 * max(counts)
        directory.close()


def test_a_server_that_lost_everything_is_noticed(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path) as server:
        directory = open_directory(server.url, timeout=TIME)
        keys = some_keys(20)
        member = directory.join(b"a" * 16, "a:1", TIME)
        assert directory.publish(member, keys, [])
        server.kill()
        with pytest.raises(ConnectionError):
            directory.holders(keys)
        server.start()
        assert directory.holders(keys) == [()] * 20
        assert not directory.publish(member, keys, [])
        assert not directory.renew(member, TIME)
        again = directory.join(b"a" * 16, "a:1", TIME)
        assert again.epoch > member.epoch
        assert directory.publish(again, keys, [])
        assert directory.holders(keys) == [(again.number,)] * 20
        directory.close()


def test_one_server_of_a_cluster_that_lost_everything_is_noticed(cluster: list[ValkeyServer]) -> None:
    """Its member is still a member, because another server knows that."""
    for lost in cluster:
        directory = open_directory(cluster[0].url, cluster=secrets.token_hex(8), timeout=TIME)
        member = directory.join(b"a" * 16, "a:1", TIME)
        assert directory.publish(member, some_keys(500), [])
        assert directory.renew(member, TIME)
        say(lost, b"FLUSHALL")
        assert not directory.renew(member, TIME)
        assert not directory.publish(member, some_keys(500), [])
        directory.close()


def test_a_server_that_lost_the_last_publish_is_noticed(valkey: ValkeyServer) -> None:
    """As after a failover to a replica that was behind."""
    directory = open_directory(valkey.url, cluster="behind", timeout=TIME)
    member = directory.join(b"a" * 16, "a:1", TIME)
    assert directory.publish(member, some_keys(200), [])
    rosters = say(valkey, b"KEYS", b"kvtide:behind:*:roster")
    assert len(rosters) == PARTITIONS
    old = say(valkey, b"HGET", rosters[3], b"%d" % member.epoch)
    assert directory.publish(member, some_keys(200), [])
    say(valkey, b"HSET", rosters[3], b"%d" % member.epoch, old)
    assert not directory.renew(member, TIME)
    assert not directory.publish(member, some_keys(200), []), "before a renewal it is noticed too"
    directory.close()


def test_a_server_that_forgot_the_scripts_is_taught_again(valkey: ValkeyServer) -> None:
    directory = open_directory(valkey.url, cluster="scripts", timeout=TIME)
    keys = some_keys(20)
    member = directory.join(b"a" * 16, "a:1", TIME)
    assert directory.publish(member, keys, [])
    say(valkey, b"SCRIPT", b"FLUSH")
    assert directory.holders(keys) == [(member.number,)] * 20
    say(valkey, b"SCRIPT", b"FLUSH")
    assert directory.publish(member, [], keys)
    assert directory.holders(keys) == [()] * 20
    directory.close()


def test_an_epoch_is_never_given_again(valkey: ValkeyServer) -> None:
    """Not even by a server that has forgotten which it gave, since others may still have entries with it."""
    directory = open_directory(valkey.url, cluster="epochs", timeout=TIME)
    before = [directory.join(b"%16d" % i, f"host{i}:1", TIME).epoch for i in range(3)]
    for key in say(valkey, b"KEYS", b"kvtide:epochs:*"):
        say(valkey, b"DEL", key)
    assert directory.join(b"b" * 16, "b:1", TIME).epoch > max(before)
    directory.close()


def test_an_epoch_that_a_partition_knows_is_not_taken(valkey: ValkeyServer) -> None:
    """The clock of a server that lost its data was set back: the epochs that it gave come again."""
    directory = open_directory(valkey.url, cluster="clock", timeout=TIME)
    before = directory.join(b"a" * 16, "a:1", TIME)
    keys = some_keys(20)
    assert directory.publish(before, keys, [])
    say(valkey, b"DEL", *[b"kvtide:clock:{members}:%b" % part for part in (b"leases", b"members", b"state")])
    ahead = before.epoch + 1_000_000_000
    say(valkey, b"HSET", b"kvtide:clock:{members}:state", b"epoch", b"%d" % (ahead - 1))
    rosters = say(valkey, b"KEYS", b"kvtide:clock:*:roster")
    say(valkey, b"HSET", rosters[5], b"%d" % ahead, b"7")
    after = directory.join(b"b" * 16, "b:1", TIME)
    assert after.epoch > ahead
    assert directory.holders(keys) == [()] * 20
    directory.close()


def test_a_directory_whose_server_hangs(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path) as server:
        directory = open_directory(server.url, timeout=0.2)
        server.hold()
        with pytest.raises(TimeoutError):
            directory.holders(some_keys(10))
        with pytest.raises(TimeoutError):
            directory.join(b"a" * 16, "a:1", TIME)
        server.resume()
        patient = open_directory(server.url, timeout=TIME)
        assert patient.holders(some_keys(10)) == [()] * 10
        patient.close()
        directory.close()


def test_bytes_are_estimated(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path) as server:
        directory = open_directory(server.url, timeout=TIME)
        member, keys = directory.join(b"a" * 16, "a:1", TIME), some_keys(60_000)
        before = int(say(server, b"INFO", b"memory").split(b"used_memory:")[1].split()[0])
        for start in range(0, len(keys), 4096):
            assert directory.publish(member, keys[start : start + 4096], [])
        used = int(say(server, b"INFO", b"memory").split(b"used_memory:")[1].split()[0]) - before
        assert 0.5 < directory.counts().nbytes / used < 2
        directory.close()


def test_a_full_server_refuses(tmp_path: Path) -> None:
    with ValkeyServer(tmp_path, maxmemory="3mb", maxmemory_policy="noeviction") as server:
        directory = open_directory(server.url, timeout=TIME)
        member = directory.join(b"a" * 16, "a:1", TIME)
        with pytest.raises(OSError, match="full"):
            all(directory.publish(member, some_keys(2000), []) for _ in range(100))
        directory.holders(some_keys(10))
        directory.close()


class Liar:
    """A server that answers anything."""

    def __init__(self, reply: Any) -> None:
        self.reply = reply

    def run(self, calls: Sequence[ScriptCall], timeout: float) -> list[Any]:
        return [self.reply for _ in calls]

    def close(self) -> None: ...


@pytest.mark.parametrize(
    "reply",
    [
        None,
        b"",
        b"nonsense",
        -1.5,
        [],
        [None, None],
        [b"1", b"x"],
        [b"1", b"2", b"3"],
        [b"1", b"2", b"3", b"4", b"short"],
        [b"1", b"2", b"3", b"4", b"\0\1" + b"n" * 16 + b"\xff\xfe"],
        [b"1", b"2", None, b"4", b"\0\1" + b"n" * 16],
        [[]],
    ],
    ids=repr,
)
def test_nonsense_is_an_error(reply: Any) -> None:
    directory = BlockDirectory(Liar(reply))
    for ask in (directory.members, directory.leases, directory.counts, lambda: directory.holders(some_keys(3))):
        with pytest.raises(OSError, match="not a directory"):
            ask()


def test_answers_of_a_wrong_length_are_errors() -> None:
    class Half(Liar):
        def run(self, calls: Sequence[ScriptCall], timeout: float) -> list[Any]:
            return [[b"1", b"2"], *(self.reply for _ in calls[1:])]

    (key,) = some_keys(1)
    assert BlockDirectory(Half(b"\0")).holders([key]) == [()]
    for reply in (b"", b"\1", b"\0\0", b"\1abcd", b"\1abcdef", 7, None):
        with pytest.raises(OSError, match="not a directory"):
            BlockDirectory(Half(reply)).holders([key])


@pytest.mark.parametrize("name", ["", "a b", "a{b}", "a:b", "x" * 65, "ü"])
def test_names_of_clusters(name: str) -> None:
    with pytest.raises(ConfigError, match="cluster's name"):
        BlockDirectory(Liar(None), cluster=name)


def test_a_directory_may_be_opened_before_its_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    directory = open_directory(f"valkey://127.0.0.1:{port}", timeout=0.5)
    with pytest.raises(ConnectionRefusedError):
        directory.members()
    directory.close()


def test_a_wrong_password_is_said(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("wrong")
    secret.chmod(0o600)
    with ValkeyServer(tmp_path / "valkey", requirepass="right") as server:
        with pytest.raises(TierError, match="WRONGPASS"):
            open_directory(server.url, login=Login(password_file=str(secret)))
        secret.write_text("right")
        directory = open_directory(server.url, login=Login(password_file=str(secret)), timeout=TIME)
        assert directory.members() == {}
        directory.close()


def test_the_directory_has_nothing_of_a_key_but_its_bits(valkey: ValkeyServer) -> None:
    """Nothing readable leaves the node: not the group, and not the whole digest."""
    directory = open_directory(valkey.url, cluster="private", timeout=TIME)
    keys = some_keys(50, b"telltale")
    assert directory.publish(directory.join(b"a" * 16, "a:1", TIME), keys, [])
    for name in say(valkey, b"KEYS", b"kvtide:private:*"):
        said = name + (repr(say(valkey, b"HGETALL", name)).encode() if not name.endswith(b":leases") else b"")
        assert b"telltale" not in said
        assert not any(key[:8] in said for key in keys)
    directory.close()


def test_marks_are_of_digest_and_group() -> None:
    full = some_keys(100)
    other = [type(key)(key[:32] + b"window") for key in full]
    assert len(set(marks_of(full).tolist()) | set(marks_of(other).tolist())) == 200
    mixed = [key for pair in zip(full, other, strict=True) for key in pair]
    assert marks_of(mixed)[::2].tolist() == marks_of(full).tolist()
    assert marks_of(mixed)[1::2].tolist() == marks_of(other).tolist()


def test_slots_are_those_of_valkey(cluster: list[ValkeyServer]) -> None:
    for key in (b"", b"a", b"{a}b", b"a{}b", b"a{b", b"a{b}{c}", b"{}{a}", os.urandom(20)):
        assert slot_of(key) == say(cluster[0], b"CLUSTER", b"KEYSLOT", key)


def test_all_scripts_are_simulated() -> None:
    found = [one for one in vars(directory_scripts).values() if isinstance(one, Script | HashLookup)]
    assert len(found) == 12
    for script in found:
        assert hasattr(SimulatedValkey, f"_{script.name}"), script.name
