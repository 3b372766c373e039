"""The directory of a cluster in a real Valkey, in a cluster of three, and in the simulated one."""

from __future__ import annotations

import math
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
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
from kvtide.tiers.peers.directory_scripts import BUCKETS, PARTITIONS
from kvtide.tiers.peers.measurements import LONGEST_ROW, Measurement, pack_measurements, unpack_measurements
from kvtide.tiers.shared import valkey_client
from kvtide.tiers.shared.resp import ValkeyConnection, ValkeyRefused, command
from kvtide.tiers.shared.valkey_client import Login, ValkeyClient, ValkeyCommand, slot_of
from kvtide.tiers.shared.valkey_scripts import HashLookup, Script, ScriptCall, ScriptRunner, ValkeyScripts
from tests.peers.nodes import Proxy

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


@contextmanager
def moving(cluster: Sequence[ValkeyServer], key: bytes, by: int = 1) -> Iterator[None]:
    """The slot of a key is moved to another server of a cluster, so many further, and half of its keys are there."""
    slot = b"%d" % slot_of(key)
    ids = [say(server, b"CLUSTER", b"MYID") for server in cluster]
    owner = next(i for i, server in enumerate(cluster) if not isinstance(say(server, b"EXISTS", key), ValkeyRefused))
    other = (owner + by) % len(cluster)
    here, there = cluster[owner], cluster[other]
    assert say(there, b"CLUSTER", b"SETSLOT", slot, b"IMPORTING", ids[owner]) == b"OK"
    assert say(here, b"CLUSTER", b"SETSLOT", slot, b"MIGRATING", ids[other]) == b"OK"
    names = say(here, b"CLUSTER", b"GETKEYSINSLOT", slot, b"100000")
    half = len(names) // 2
    where = b"127.0.0.1", b"%d" % there.port, b"", b"0", b"30000", b"KEYS"
    assert say(here, b"MIGRATE", *where, *names[:half]) == b"OK"
    yield
    assert say(here, b"MIGRATE", *where, *names[half:]) == b"OK"
    for server in (there, here, *cluster):
        assert say(server, b"CLUSTER", b"SETSLOT", slot, b"NODE", ids[other]) == b"OK"


@pytest.mark.parametrize("part", ["members", "partition"])
def test_a_slot_that_moves_loses_nothing(cluster: list[ValkeyServer], part: str) -> None:
    """While it moves, what needs it is an error, and costs misses; after that all is there, at the other server."""
    with ExitStack() as stack:
        name = secrets.token_hex(8)
        directory, other = (
            stack.enter_context(closing(open_directory(server.url, cluster=name, timeout=TIME)))
            for server in (cluster[0], cluster[1])
        )
        member, keys = directory.join(b"a" * 16, "a:1", TIME * 10), some_keys(300)
        assert directory.publish(member, keys[:200], [])
        key = directory._place if part == "members" else directory._partitions[3]
        with moving(cluster, key):
            with pytest.raises(OSError, match="moves these keys"):
                directory.publish(member, keys, [])
            with pytest.raises(OSError, match="moves these keys"):
                other.join(b"b" * 16, "b:1", TIME)
            if part == "partition":
                assert directory.renew(member, TIME * 10), "the membership does not depend on it"
        assert directory.renew(member, TIME * 10)
        assert directory.publish(member, keys, [])
        assert other.holders(keys) == [(member.number,)] * 300
        with moving(cluster, key, -1):
            pass  # other tests expect it where it was
        assert other.holders(keys) == [(member.number,)] * 300


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


@pytest.mark.parametrize("part", [b"leases", b"members"])
def test_a_member_of_which_half_was_evicted_is_none(valkey: ValkeyServer, part: bytes) -> None:
    """Nobody else would see it; and its number is free."""
    directory = open_directory(valkey.url, cluster="half" + part.decode(), timeout=TIME)
    member = directory.join(b"a" * 16, "a:1", TIME)
    assert say(valkey, b"DEL", b"kvtide:half%b:{members}:%b" % (part, part)) == 1
    assert not directory.publish(member, some_keys(3), [])
    assert not directory.renew(member, TIME)
    other = directory.join(b"b" * 16, "b:1", TIME)
    assert other.number == member.number
    assert list(directory.members().values()) == [other]
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


def test_on_a_full_server_leases_go_on(tmp_path: Path) -> None:
    """And it can be emptied: what is withdrawn, and what the dead have left."""
    with ValkeyServer(tmp_path, maxmemory="4mb", maxmemory_policy="noeviction") as server:
        directory = open_directory(server.url, timeout=TIME)
        member, dead = (directory.join(b"%16d" % i, f"host{i}:1", TIME) for i in range(2))
        mine = some_keys(100)
        assert directory.publish(member, mine, [])
        with pytest.raises(OSError, match="full"):
            all(directory.publish(dead, some_keys(500), []) for _ in range(1000))
        assert directory.renew(member, TIME)
        assert len(directory.members()) == 2
        with pytest.raises(OSError, match="full"):
            directory.publish(member, some_keys(500), mine[:50])
        assert directory.holders(mine) == [()] * 50 + [(member.number,)] * 50, "what was removed is withdrawn first"
        third = directory.join(b"c" * 16, "host3:1", TIME)
        assert third in directory.members().values()
        directory.leave(dead)
        for _ in range(64):
            directory.scrub(PARTITIONS * BUCKETS // 64)
        assert directory.counts().entries == 50
        assert directory.publish(member, some_keys(500), [])
        directory.close()


class Patience:
    """Notes how long each script may take."""

    def __init__(self) -> None:
        self._link = SimulatedLink(SimulatedValkey(FakeClock(1_800_000_000.0)), [])
        self.seconds: dict[str, float] = {}

    def run(self, calls: Sequence[ScriptCall], timeout: float) -> list[Any]:
        self.seconds |= {call.script.name: timeout for call in calls}
        return self._link.run(calls, timeout)

    def close(self) -> None: ...


@pytest.mark.parametrize(("lease", "least"), [(1.0, 0.3), (10.0, 0.8)])
def test_a_renewal_that_is_not_answered_leaves_time_for_another(lease: float, least: float) -> None:
    """It begins when a third of the lease has passed."""
    directory = BlockDirectory(runner := Patience(), timeout=0.4)
    member = directory.join(b"a" * 16, "a:1", lease)
    assert directory.renew(member, lease)
    assert least <= runner.seconds["renew"] <= lease / 3
    assert runner.seconds["renew"] + runner.seconds["known"] <= lease * 2 / 3


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
        [[]],
    ],
    ids=repr,
)
def test_nonsense_is_an_error(reply: Any) -> None:
    directory = BlockDirectory(Liar(reply))
    for ask in (directory.members, directory.leases, directory.counts, lambda: directory.holders(some_keys(3))):
        with pytest.raises(OSError, match="not a directory"):
            ask()


@pytest.mark.parametrize("epoch", [None, 3, b"3", b"0", b"%d" % (1 << 40)])
@pytest.mark.parametrize("left", [None, b"x", 10**400])
@pytest.mark.parametrize("about", [None, b"short", b"\0\1" + b"n" * 16 + b"\xff\xfe"])
def test_a_member_that_makes_no_sense_is_none(epoch: Any, left: Any, about: Any) -> None:
    good = [b"7", b"1000", b"\0\2" + b"g" * 16 + b"host:1"]
    directory = BlockDirectory(Liar([b"1", b"9", epoch, left, about, *good]))
    assert [member.name for member in directory.leases().left] == [b"g" * 16]
    assert directory.members().keys() == {2}


@pytest.mark.parametrize(
    "reply",
    [[1, 1 << 40, b""], [1, 0, b""], [1, -1, b""], [-1, 5, b""], [1 << 16, 5, b""], [1, 5], [1, 5, 5]],
    ids=repr,
)
def test_an_epoch_that_cannot_be_is_not_joined_with(reply: Any) -> None:
    class Joining(Liar):
        def run(self, calls: Sequence[ScriptCall], timeout: float) -> list[Any]:
            return [reply if call.script.name == "join" else 1 for call in calls]

    with pytest.raises(OSError, match="not a directory"):
        BlockDirectory(Joining(None)).join(b"a" * 16, "a:1", TIME)


@pytest.mark.parametrize(
    "text",
    [
        b":1\r\n",
        b"$-1\r\n",
        b"*1\r\n" * 3000,
        b"$99999999999999\r\n",
        b"*99999999999\r\n",
        b":" + b"9" * 5000 + b"\r\n",
    ],
    ids=["number", "nothing", "deep", "long", "many", "digits"],
)
def test_what_does_not_speak_the_protocol_is_an_error(text: bytes) -> None:
    """And not the end of the thread that asked."""
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:

        def serve() -> None:
            while True:
                try:
                    caller, _ = server.accept()
                except OSError:
                    return
                with caller:
                    caller.recv(1000)
                    caller.sendall(text)

        thread = threading.Thread(target=serve)
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shutdown, socket.SHUT_RDWR)
        directory = open_directory(f"valkey://127.0.0.1:{server.getsockname()[1]}", timeout=TIME)
        stack.callback(directory.close)
        with pytest.raises(OSError, match=r"does not speak|reset"):
            directory.leases()


@pytest.mark.parametrize(
    "reply",
    [1, None, [1], [[0, 1]], [[0, 1, 2]], [[0, 20_000, [b"h", 1]]], [[b"0", 1, [b"h", 1]]], [[0, 1, [b"\xff", 1]]]],
)
def test_a_slot_table_of_nonsense_is_an_error(
    reply: Any, monkeypatch: pytest.MonkeyPatch, valkey: ValkeyServer
) -> None:
    client = ValkeyClient(valkey.url)
    monkeypatch.setattr(client, "exchange", lambda *_: [reply])
    with pytest.raises(OSError, match="makes no sense"):
        client._learn(time.monotonic() + TIME)
    client.close()


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
        with pytest.raises(TierError, match=r"WRONGPASS\): see valkey.user and valkey.password_file"):
            open_directory(server.url, login=Login(password_file=str(secret)))
        with pytest.raises(TierError, match=r"NOAUTH\): see peers.directory_user and peers.directory_password_file"):
            open_directory(server.url)
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
    assert len(found) == 15
    for script in found:
        assert hasattr(SimulatedValkey, f"_{script.name}"), script.name


MEASURED = b"kvtide:rows:{members}:measured"


def test_rows_that_make_no_sense_are_as_if_nothing_was_measured(valkey: ValkeyServer) -> None:
    """Who can write to the directory can enter anything; an older node enters nothing, and removes no row."""
    directory = open_directory(valkey.url, cluster="rows", timeout=TIME)
    good, bad = directory.join(b"g" * 16, "g:1", TIME), directory.join(b"b" * 16, "b:1", TIME)
    row = {bad.epoch: Measurement(3.0, 0.5)}
    assert directory.report(good, row)
    cell = struct.pack(">Qff", good.epoch, math.inf, math.nan)
    whole = pack_measurements({good.epoch: Measurement(2.0, 0.0)})
    for nonsense in (
        b"",
        b"\1",
        b"\2" + whole[1:],
        b"\1" + cell,
        whole[:-1],
        whole + b"x",
        b"\1" * 100_000,
        b"\xff" * 49,
    ):
        say(valkey, b"HSET", MEASURED, b"%d" % bad.epoch, nonsense)
        assert directory.measurements() == {good.epoch: row}, nonsense
    say(valkey, b"HSET", MEASURED, b"%d" % bad.epoch, b"\1" + struct.pack(">Qff", good.epoch, -1.0, 0.25))
    assert directory.measurements()[bad.epoch] == {good.epoch: Measurement(0.0, 0.25)}
    say(valkey, b"HSET", MEASURED, b"17", whole, b"not a number", whole)
    assert directory.measurements().keys() == {good.epoch, bad.epoch}
    assert directory.report(good, row)
    assert say(valkey, b"HLEN", MEASURED) == 2, "rows of those that are no members are removed"
    say(valkey, b"SET", MEASURED, b"no hash")
    directory.leave(bad)
    assert dict(directory.members()) == {good.number: good}
    assert directory.measurements() == {}
    directory.close()


def test_a_row_is_bounded() -> None:
    many = {epoch: Measurement(epoch, 1e300) for epoch in range(1, 1000)}
    assert len(pack_measurements(many)) == LONGEST_ROW <= 1024
    assert unpack_measurements(pack_measurements(many)) == {n: Measurement(n, 0.0) for n in range(1, 64)}


def test_threads_that_learn_the_members_at_once() -> None:
    """A reply is compared with the version that was sent, and an older list does not replace a newer one."""
    valkey = SimulatedValkey(FakeClock(1_800_000_000.0))
    meanwhile: list[Callable[[], None]] = []

    class Interrupted(SimulatedLink):
        def run(self, calls: Sequence[ScriptCall], timeout: float) -> list[Any]:
            replies = super().run(calls, timeout)
            if meanwhile:
                meanwhile.pop()()
            return replies

    other = BlockDirectory(SimulatedLink(valkey, []))
    directory = BlockDirectory(Interrupted(valkey, []))
    keys = some_keys(3)
    first = other.join(b"a" * 16, "a:1", TIME)
    assert other.publish(first, keys, [])
    assert dict(directory.members()) == {1: first}

    def joined() -> None:
        other.join(b"b" * 16, "b:1", TIME)
        directory.members()

    def left() -> None:
        other.leave(first)
        directory.members()

    meanwhile.append(joined)
    assert directory.holders(keys) == [(1,)] * 3
    assert directory._known.members.keys() == {1, 2}, "what the other thread has learnt"
    other.join(b"c" * 16, "c:1", TIME)
    meanwhile.append(left)
    assert directory.holders(keys) == [(1,)] * 3, "true when it was asked"
    assert directory._known.members.keys() == {2, 3}
    assert directory.holders(keys) == [()] * 3


def test_a_silent_server_is_replaced(tmp_path: Path) -> None:
    """Its host is gone, so nothing is refused; and another server has its slots."""
    with ExitStack() as stack:
        servers = [stack.enter_context(ValkeyServer(tmp_path / str(i), cluster_enabled="yes")) for i in range(2)]
        for server in servers:  # each takes itself for the whole cluster
            assert say(server, b"CLUSTER", b"ADDSLOTSRANGE", b"0", b"16383") == b"OK"
        end = time.monotonic() + 60
        while not all(b"cluster_state:ok" in say(s, b"CLUSTER", b"INFO") for s in servers):
            assert time.monotonic() < end, "the servers never began"
            time.sleep(0.05)
        client = ValkeyClient(servers[0].url)
        stack.callback(client.close)
        gone, other = (("127.0.0.1", server.port) for server in servers)
        client._slots = [gone] * 8192 + [other] * 8192
        key = b"{1}" if slot_of(b"1") < 8192 else b"{2}"
        assert slot_of(key) < 8192
        servers[0].hold()
        stack.callback(servers[0].resume)
        asked = [ValkeyCommand(key, command(b"GET", key))]
        with pytest.raises(TimeoutError):
            client.ask(asked, time.monotonic() + 0.3)
        assert client.ask(asked, time.monotonic() + TIME) == [None]


def test_an_old_server_is_refused(valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = valkey_client._facts
    monkeypatch.setattr(valkey_client, "_facts", lambda info: {**facts(info), "redis_version": "6.2.14"})
    with pytest.raises(TierError, match=r"its version is 6\.2\.14"):
        open_directory(valkey.url)


def test_a_server_that_was_replaced_is_left(tmp_path: Path) -> None:
    """It is a replica now, which refuses to write, and another server has its address."""
    with ExitStack() as stack:
        old, new = (stack.enter_context(ValkeyServer(tmp_path / name)) for name in ("old", "new"))
        proxy = stack.enter_context(closing(Proxy(f"127.0.0.1:{old.port}")))
        directory = stack.enter_context(closing(open_directory(f"valkey://{proxy.address}/0", timeout=TIME)))
        member = directory.join(b"a" * 16, "a:1", TIME)
        assert say(old, b"REPLICAOF", b"127.0.0.1", b"%d" % new.port) == b"OK"
        proxy.redirect(f"127.0.0.1:{new.port}")
        with pytest.raises(OSError, match=r"READONLY|MASTERDOWN"):
            all(directory.renew(member, TIME) for _ in range(1000))
        assert not directory.renew(member, TIME)
        again = directory.join(b"a" * 16, "a:1", TIME)
        assert directory.publish(again, some_keys(3), [])
