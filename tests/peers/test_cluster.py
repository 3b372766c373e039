"""Nodes that find each other and their blocks through a directory: what dies, restarts or lies is misses only."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvtide import Session, Store, Tenant
from kvtide.block import BlockKey
from kvtide.errors import ConfigError
from kvtide.index.index import ABSENT, DRAM, SEALED
from kvtide.peers.announcer import Announcer
from kvtide.store.node_statistics import DrainStatistics
from kvtide.testing.interface import MODEL, OTHER_TENANT, PLAIN, SIZE, data, held, length, prompt, until
from kvtide.testing.servers import ValkeyServer
from kvtide.tiers.peers.directory import open_directory
from kvtide.transfer.node_search import ClusterStatistics
from tests.peers.cluster import Cluster, Part


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as cluster:
        yield cluster


def keep(part: Part, *tokens: list[int], tenant: Tenant | None = None) -> None:
    """Store prompts at a node, and wait until the directory has them."""
    with part.store.session(MODEL, tenant) if tenant is not None else part.store.session(MODEL) as session:
        for one in tokens:
            session.store(one, data(PLAIN, one))
    part.announced()


def seen(store: Store) -> ClusterStatistics:
    found = store.statistics().cluster
    assert found is not None
    return found


def found(session: Session, tokens: list[int]) -> bool:
    return length(session, tokens) == len(tokens)


@pytest.mark.parametrize("count", [2, 7])
def test_what_one_computed_is_a_hit_on_the_others(cluster: Cluster, count: int) -> None:
    """Few members are all asked; many are asked if the directory names them, also more than there are positions."""
    parts = [cluster.part() for _ in range(count)]
    for n, part in enumerate(parts):
        keep(part, prompt(n, 100, 200))
    reader = cluster.reader(peers={"most": 5})
    with reader.session(MODEL) as session:
        until(lambda: len(seen(reader).members) == count if found(session, prompt(0, 100, 200)) else False)
        for n in range(count):
            until(lambda n=n: found(session, prompt(n, 100, 200)))  # type: ignore[misc]
    assert held(reader) == 0
    assert bool(seen(reader).lookups) == (count > 4)


def test_members_read_from_each_other_and_not_from_themselves(cluster: Cluster) -> None:
    one, two = cluster.part(), cluster.part()
    keep(one, prompt(1, 2))
    keep(two, prompt(3, 4))
    with one.store.session(MODEL) as first, two.store.session(MODEL) as second:
        until(lambda: found(first, prompt(3, 4)))
        until(lambda: found(second, prompt(1, 2)))
    assert [member.number for member in seen(one.store).members] == [two.node.statistics().number]


def test_a_node_that_joins_later_is_found(cluster: Cluster) -> None:
    reader = cluster.reader()
    with reader.session(MODEL) as session:
        assert length(session, prompt(1)) == 0
        one = cluster.part()
        keep(one, prompt(1))
        until(lambda: found(session, prompt(1)))
        two = cluster.part()
        keep(two, prompt(2))
        until(lambda: found(session, prompt(2)))


@pytest.mark.parametrize("count", [3, 6])
def test_a_dead_node_costs_its_own_blocks_only(cluster: Cluster, count: int) -> None:
    parts = [cluster.part() for _ in range(count)]
    for n, part in enumerate(parts):
        keep(part, prompt(n), prompt(10 + n))
    reader = cluster.reader()
    with reader.session(MODEL) as session:
        for n in range(count):
            until(lambda n=n: found(session, prompt(n)))  # type: ignore[misc]
        parts[0].die()
        assert length(session, prompt(10)) == 0
        assert found(session, prompt(0)), "what was read is here"
        for n in range(1, count):
            until(lambda n=n: found(session, prompt(10 + n)))  # type: ignore[misc]
        dead = parts[0].node.address

        def gone() -> bool:
            length(session, prompt(99))
            return dead not in [member.address for member in seen(reader).members]

        until(gone)
        assert len(seen(reader).members) == count - 1
    assert held(reader) == 0


def test_a_member_that_does_not_answer_is_shown_as_away(cluster: Cluster) -> None:
    one = cluster.part(lease=60.0)  # it is a member for longer than this test
    keep(one, prompt(1))
    reader, numbers = cluster.reader(), itertools.count(1000)
    with reader.session(MODEL) as session:
        until(lambda: found(session, prompt(1)))
        assert not reader.statistics().tiers["peer 1"].away
        one.die()
        until(lambda: not found(session, prompt(next(numbers))) and reader.statistics().tiers["peer 1"].away)


def test_another_incarnation_at_the_same_address_is_not_believed(cluster: Cluster) -> None:
    """The old member's lease is still good when another store serves at its address."""
    one = cluster.part(lease=60.0)
    keep(one, prompt(1), prompt(2))
    address = one.node.address
    reader = cluster.reader()
    with reader.session(MODEL) as session:
        until(lambda: found(session, prompt(1)))
        one.die()
        again, server = cluster.stores.serving(peers={"listen": address, "directory": ""})
        with again.session(MODEL) as other:
            other.store(prompt(2), data(PLAIN, prompt(2)))
        assert length(session, prompt(2)) == 0

        def refused() -> bool:
            length(session, prompt(int(time.monotonic() * 1000) % 100_000 + 1000))
            return seen(reader).refused == 1

        until(refused)
        assert server.statistics().blocks_sent == 0
        assert length(session, prompt(2)) == 0


def test_a_restarted_node_is_found_again_under_its_new_name(cluster: Cluster) -> None:
    one = cluster.part()
    keep(one, prompt(1))
    address = one.node.address
    reader = cluster.reader()
    with reader.session(MODEL) as session:
        until(lambda: found(session, prompt(1)))
        one.die()
        one.store.close()
        again = cluster.part(listen=address)
        keep(again, prompt(2))
        until(lambda: found(session, prompt(2)))
        assert found(session, prompt(1)), "it was read before"


@pytest.mark.parametrize("count", [2, 6])
def test_the_directory_dies_and_comes_back_empty(cluster: Cluster, count: int) -> None:
    parts = [cluster.part() for _ in range(count)]
    for n, part in enumerate(parts):
        keep(part, prompt(n), prompt(10 + n), prompt(20 + n))
    reader = cluster.reader()
    with reader.session(MODEL) as session:
        for n in range(count):
            until(lambda n=n: found(session, prompt(n)))  # type: ignore[misc]
        cluster.valkey.kill()
        assert found(session, prompt(0))
        for n in range(count):  # known nodes are asked without it
            until(lambda n=n: found(session, prompt(10 + n)))  # type: ignore[misc]
        cluster.valkey.start()
        for n in range(count):
            until(lambda n=n: found(session, prompt(20 + n)))  # type: ignore[misc]
        until(lambda: all(part.node.statistics().epoch for part in parts))
        late = cluster.part()
        keep(late, prompt(77))
        until(lambda: found(session, prompt(77)))


def test_a_directory_that_hangs_costs_one_deadline(cluster: Cluster) -> None:
    parts = [cluster.part() for _ in range(5)]
    for n, part in enumerate(parts):
        keep(part, prompt(n), prompt(10 + n))
    reader = cluster.reader()
    with reader.session(MODEL) as session:
        until(lambda: found(session, prompt(0)))
        cluster.valkey.hold()
        for n in range(30):
            length(session, prompt(1000 + n))
        assert seen(reader).away
        assert seen(reader).failures < 10, "not a deadline for each of thirty prompts"
        until(lambda: found(session, prompt(10)))
        cluster.valkey.resume()
        until(lambda: found(session, prompt(14)))


def test_without_a_directory_there_is_nothing_to_wait_for(cluster: Cluster) -> None:
    cluster.valkey.kill()
    reader = cluster.reader()
    with reader.session(MODEL) as session:
        for n in range(30):
            assert length(session, prompt(n)) == 0
        assert seen(reader).away
        cluster.valkey.start()
        part = cluster.part()
        keep(part, prompt(1))
        until(lambda: found(session, prompt(1)))


def test_a_directory_full_of_lies(cluster: Cluster) -> None:
    """Every member is said to have blocks that none has."""
    parts = [cluster.part() for _ in range(6)]
    keep(parts[5], prompt(1, 2, 3))
    with parts[5].store.session(MODEL) as session:
        session.store(prompt(9), data(PLAIN, prompt(9)))
    keys = [parts[5].store.index.key(row) for row in range(1, parts[5].store.index.size)]
    for part in parts[:5]:
        own = part.node._membership.own
        assert own is not None
        part.node._directory.publish(own, keys, [])
    parts[5].announced()
    reader = cluster.reader()
    with reader.session(MODEL) as session:
        until(lambda: found(session, prompt(1, 2, 3)))
        parts[5].node.close()
        parts[5].server.close()
        assert length(session, prompt(9)) == 0
        until(lambda: seen(reader).stale > 0)
    assert held(reader) == 0


def test_a_member_at_an_address_that_cannot_be_is_away(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """Its operator mistyped peers.announce: no other node must log a traceback for each prompt."""
    part = cluster.part()
    part.node._directory.join(b"z" * 16, "node..7:9411", 600.0)
    keep(part, prompt(1))
    reader = cluster.reader()
    with reader.session(MODEL) as session:
        until(lambda: found(session, prompt(1)))
        until(lambda: any(member.away for member in seen(reader).members))
    assert not [record for record in caplog.records if record.exc_info]


def test_another_tenant_s_blocks_are_not_found(cluster: Cluster) -> None:
    parts = [cluster.part() for _ in range(6)]
    keep(parts[0], prompt(1), tenant=OTHER_TENANT)
    keep(parts[1], prompt(2))
    reader = cluster.reader()
    with reader.session(MODEL) as session, reader.session(MODEL, OTHER_TENANT) as other:
        until(lambda: found(session, prompt(2)))
        assert length(session, prompt(1)) == 0
        until(lambda: found(other, prompt(1)))


def test_a_block_that_was_dropped_here_is_fetched_from_no_member(cluster: Cluster) -> None:
    parts = [cluster.part() for _ in range(3)]
    for part in parts:
        keep(part, prompt(1))
    reader = cluster.reader()
    with reader.session(MODEL) as session:
        until(lambda: found(session, prompt(1)))
        assert session.drop(prompt(1)) == 1
        assert length(session, prompt(1)) == 0
        late = cluster.part()
        keep(late, prompt(1), prompt(2))
        until(lambda: found(session, prompt(2)))
        assert length(session, prompt(1)) == 0


def test_positions_go_from_one_member_to_another(cluster: Cluster) -> None:
    """With two positions for six members all blocks are reached, and what is measured of a member is remembered."""
    parts = [cluster.part() for _ in range(6)]
    for n, part in enumerate(parts):
        keep(part, *[prompt(n, k) for k in range(4)])
    reader = cluster.reader(peers={"most": 2})
    with reader.session(MODEL) as session:
        for k in range(4):
            for n in range(6):
                until(lambda n=n, k=k: found(session, prompt(n, k)))  # type: ignore[misc]
        about = seen(reader)
        assert about.bound > 2
        assert len([member for member in about.members if member.tier]) == 2
        assert all(member.bytes_per_second > 0 and member.round_trip > 0 for member in about.members)
    assert {name for name in reader.statistics().tiers if name.startswith("peer")} == {"peer 1", "peer 2"}
    assert held(reader) == 0


@pytest.mark.parametrize("fast", [0, 1])
def test_of_two_members_with_a_block_the_faster_one_is_read_from(cluster: Cluster, fast: int) -> None:
    for part in (cluster.part(), cluster.part()):
        keep(part, prompt(1), prompt(2))
    reader = cluster.reader()
    with reader.session(MODEL) as session:
        until(lambda: found(session, prompt(1)) and len([m for m in seen(reader).members if m.tier]) == 2)
        lanes = [cold.lane for cold in reader.main.colds if cold.name in ("peer 1", "peer 2")]
        for number, lane in enumerate(lanes):
            for _ in range(50):
                lane.read_speed.measured(1 << 30 if number == fast else 1 << 10, 1.0)
        index, numbers = reader.index, [cold.number for cold in reader.main.colds if cold.name in ("peer 1", "peer 2")]

        def both_answered() -> bool:
            session.find(prompt(2))
            with index.lock:
                there = [index.state[number][: index.size] == SEALED for number in numbers]
                return bool((there[0] & there[1] & (index.state[DRAM][: index.size] == ABSENT)).any())

        until(both_answered)
        before = dict(reader.statistics().counts)
        assert found(session, prompt(2))
        after = reader.statistics().counts
        read = [
            after.get(f"blocks read from peer {n}", 0) - before.get(f"blocks read from peer {n}", 0) for n in (1, 2)
        ]
        assert read == ([1, 0] if fast == 0 else [0, 1])


def test_what_a_member_holds_is_written_to_the_own_disk_when_it_is_asked_for_twice(
    cluster: Cluster, tmp_path: Path
) -> None:
    part = cluster.part()
    keep(part, prompt(*range(8)))
    disk = {"path": str(tmp_path / "tier"), "budget": "64MiB", "segment": "8MiB", "store": "through"}
    reader = cluster.reader(nvme=disk)

    def written() -> int:
        assert reader.flush(30).complete
        return reader.statistics().tiers["nvme"].blocks

    with reader.session(MODEL) as session:
        until(lambda: found(session, prompt(*range(8))))
        assert written() == 0
        session.store(prompt(*range(9)), data(PLAIN, prompt(*range(9))))
        assert written() == 1, "what was computed here"
        assert length(session, prompt(*range(8), 70)) == 8 * SIZE, "another request with the same beginning"
        until(lambda: written() == 9)


def test_a_store_without_other_members_has_no_line_and_no_threads_for_them(cluster: Cluster) -> None:
    before = threading.active_count()
    reader = cluster.reader(peers={"most": 32})
    assert threading.active_count() - before < 12
    assert not [name for name in reader.statistics().tiers if name.startswith("peer")]


@pytest.mark.parametrize(
    ("peers", "text"),
    [
        ({"addresses": "127.0.0.1:9"}, "peers.addresses and peers.directory are both set"),
        ({"announce": "10.0.0.1:1"}, "peers.announce is set, and peers.listen is not"),
        ({"cluster": "a b"}, "peers.cluster is 'a b'"),
        ({"directory": "embedded"}, "peers.listen is not set"),
        ({"directory": "embedded://x"}, "it must be embedded://HOST:PORT"),
        ({"directory": "http://x"}, "peers.directory is 'http://x'"),
        ({"directory": "embedded", "listen": "127.0.0.1:9411"}, "only a node"),
        ({"directory": "", "announce": "10.0.0.1:1"}, "there is nobody to tell it to"),
        ({"directory_user": "x"}, "peers.directory_user is 'x', and peers.directory_password_file is not set"),
        ({"directory": "embeded"}, "or embedded, to start one here; or embedded://HOST:PORT"),
        ({"directory": "valkey://node..7:6379/0"}, "it must be valkey://HOST:PORT"),
    ],
)
def test_settings_that_contradict_each_other(cluster: Cluster, peers: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        cluster.reader(peers=peers)


@pytest.mark.parametrize("rest", ["10.0.0.5:6379/0", "10.0.0.5:6379/x", "10.0.0.5:x", "10.0.0.5", ""])
@pytest.mark.parametrize("scheme", ["valkey", "valkeys", "http", "embedded"])
def test_a_password_in_an_address_is_not_shown(cluster: Cluster, scheme: str, rest: str) -> None:
    for peers in ({}, {"token_file": ""}, {"certificate": "here"}):
        with pytest.raises(ConfigError, match=r"peers\.directory has a user or password in it") as failure:
            cluster.reader(peers={"directory": f"{scheme}://me:hunter2@{rest}", **peers})
        assert "hunter2" not in str(failure.value)


@pytest.mark.parametrize(
    ("listen", "announce"), [("0.0.0.0:0", ""), ("127.0.0.1:0", "node..7:9411"), ("127.0.0.1:0", "node7")]
)
def test_an_address_that_others_cannot_use_is_not_announced(cluster: Cluster, listen: str, announce: str) -> None:
    with pytest.raises(ConfigError, match=r"peers\.announce"):
        cluster.part(listen=listen, announce=announce)


def test_a_drain_goes_on_with_what_came_meanwhile(cluster: Cluster, tmp_path: Path, monkeypatch: Any) -> None:
    """The node is stored to while it drains; other nodes are no storage."""
    other = cluster.part()
    keep(other, prompt(5))
    part = cluster.part(files={"path": str(tmp_path / "shared"), "store": "second-touch"})
    keep(part, prompt(1, 2, 3))
    with part.store.session(MODEL) as session:
        until(lambda: found(session, prompt(5)))
        begun = part.store.main.pipeline.write_to_shared

        def busy(tried: set[BlockKey]) -> Iterator[int]:
            for n, written in enumerate(begun(tried)):
                if not n and len(tried) == 4:
                    session.store(prompt(7, 8), data(PLAIN, prompt(7, 8)))
                yield written

        monkeypatch.setattr(part.store.main.pipeline, "write_to_shared", busy)
        part.node.drain()

        def drained() -> DrainStatistics | None:
            draining = part.node.statistics().draining
            return draining if draining is not None and draining.done else None

        until(lambda: drained() is not None)
        done = drained()
        assert done == DrainStatistics(6, 6, True, ["files"])
        counts = part.store.statistics().counts
        assert counts["blocks written to files"] == 6


def test_a_drain_that_fails_says_so(cluster: Cluster, tmp_path: Path, monkeypatch: Any) -> None:
    part = cluster.part(files={"path": str(tmp_path / "shared"), "store": "second-touch"})
    keep(part, prompt(1))

    def broken() -> int:
        raise OSError("no way")

    with monkeypatch.context() as patch:
        patch.setattr(part.store.main.pipeline, "count_unshared", broken)
        part.node.drain()
        until(lambda: (draining := part.node.statistics().draining) is not None and draining.done)
    draining = part.node.statistics().draining
    assert draining is not None
    assert draining.failed == "no way"
    part.node.drain()
    until(lambda: (draining := part.node.statistics().draining) is not None and draining.done)
    assert part.node.statistics().draining == DrainStatistics(1, 1, True, ["files"])


@pytest.mark.parametrize("resumed", [True, False])
def test_a_drain_to_a_storage_that_hangs_does_not_delay_the_end(
    cluster: Cluster, tmp_path: Path, resumed: bool
) -> None:
    """What the node still has to write to its own disk would lose that time."""
    with ValkeyServer(tmp_path / "hanging") as storage:
        hanging = {"url": storage.url, "store": "second-touch", "timeout": 600.0}
        part = cluster.part(valkey=hanging)
        keep(part, prompt(1))
        storage.hold()
        try:
            part.node.drain()
            until(lambda: writing(part))
            if resumed:
                part.node.resume()
            closing_node = threading.Thread(target=part.node.close, daemon=True)
            closing_node.start()
            until(lambda: not closing_node.is_alive())
        finally:
            storage.resume()


def writing(part: Part) -> bool:
    """Whether its storage has been given something to write that it has not written."""
    return part.store.statistics().lanes["valkey"].blocks_under_way > 0


def test_without_threads_for_all_of_it_a_node_does_not_join_by_half(cluster: Cluster, monkeypatch: Any) -> None:
    """A membership that is left behind would renew its lease, and end that of the next one, again and again."""
    part = cluster.part()
    part.node.drain()
    until(lambda: (draining := part.node.statistics().draining) is not None and draining.done)

    def refused(self: Announcer) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(Announcer, "start", refused)
        part.node.resume()
        until(lambda: part.node._thread is None)
        with pytest.raises(RuntimeError):
            cluster.part()
    assert not [thread for thread in threading.enumerate() if thread.name == "kvtide-membership"]
    with closing(open_directory(cluster.valkey.url, cluster="kvtide", timeout=10.0)) as directory:
        assert not directory.members()
    part.node.resume()
    until(lambda: part.node.statistics().epoch > 0)


@pytest.mark.parametrize("when", ["through", "ghost"])
def test_with_a_list_of_addresses_what_a_node_holds_is_written_as_ever(
    cluster: Cluster, tmp_path: Path, when: str
) -> None:
    one, server = cluster.stores.serving(peers={"directory": ""})
    with one.session(MODEL) as session:
        session.store(prompt(*range(8)), data(PLAIN, prompt(*range(8))))
    disk = {"path": str(tmp_path / "tier"), "budget": "64MiB", "segment": "8MiB", "store": when}
    reader = cluster.stores.store(server.address, nvme=disk, peers={"directory": ""})
    with reader.session(MODEL) as session:
        assert found(session, prompt(*range(8)))
        session.store(prompt(*range(9)), data(PLAIN, prompt(*range(9))))
        assert reader.flush(30).complete
        stored = reader.statistics().tiers["nvme"].blocks
        session.match(prompt(*range(8), 70)).release()
        assert reader.flush(30).complete
        # through: what was computed here, and nothing for a second request; ghost: the prompt, when it was stored
        assert (stored, reader.statistics().tiers["nvme"].blocks) == ((1, 1) if when == "through" else (9, 9))
