"""What one node does not send in time, or fails to send, another one supplies: the right bytes, once, and in time."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtide import Match, Session, Store
from kvtide.counts import Count, TierCount
from kvtide.node.client.client import Client
from kvtide.testing.interface import MODEL, PLAIN, data, held, length, prompt, until
from kvtide.testing.servers import free_ports
from kvtide.transfer.node_search import MemberStatistics
from tests.node.serving import Process
from tests.peers.cluster import Cluster
from tests.peers.nodes import Proxy, Stores, token

LONG = prompt(*range(40))
SOON = 20
"""Less than a node's deadline below: who waits for that has lost."""


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    with Stores(tmp_path, timeout=60.0) as stores:
        yield stores


def keep(store: Store, tokens: list[int] = LONG) -> None:
    with store.session(MODEL) as session:
        session.store(tokens, data(PLAIN, tokens))


def two_holders(stores: Stores, tokens: list[int] = LONG, **reader: Any) -> tuple[Proxy, Proxy, Store]:
    """Two nodes that have the same, and who reads from the first one, as long as neither was measured; all at once."""
    reader.setdefault("dram", {"budget": "16MiB", "segment": "4MiB"})
    proxies = []
    for _ in range(2):
        store, server = stores.serving()
        keep(store, tokens)
        proxies.append(stores.proxy(server))
    return proxies[0], proxies[1], stores.store(*(proxy.address for proxy in proxies), **reader)


def count(store: Store, what: Count) -> int:
    return store.statistics().counts.get(what, 0)


@contextmanager
def matched(session: Session, store: Store, *proxies: Proxy) -> Iterator[Match]:
    """A match of what all of these nodes have said that they have."""
    with session.match(LONG, wait=30) as match:
        names = [TierCount.BLOCKS_FOUND.of(f"peer {proxy.address}") for proxy in proxies]
        until(lambda: all(store.statistics().counts.get(name) == 40 for name in names))
        yield match


def read_from(store: Store, proxy: Proxy) -> int:
    return store.statistics().counts.get(TierCount.BLOCKS_READ.of(f"peer {proxy.address}"), 0)


def test_a_node_that_hangs_is_replaced_by_another_in_time(stores: Stores) -> None:
    one, two, reader = two_holders(stores)
    with reader.session(MODEL) as session:
        with matched(session, reader, one, two) as match:
            one.harm(0, "freeze")
            loaded = session.load(match).wait(SOON)
            assert loaded.tokens == len(LONG)
        assert length(session, LONG) == len(LONG), "every byte is right"
    assert count(reader, Count.READS_HEDGED) == count(reader, Count.HEDGES_WON) >= 1
    assert (read_from(reader, one), read_from(reader, two)) == (0, 40)
    assert held(reader) == 0


def test_late_bytes_of_the_first_node_change_nothing(stores: Stores) -> None:
    """It has sent half a block, and sends the rest when the second one has filled the slot."""
    one, two, reader = two_holders(stores)
    with reader.session(MODEL) as session, matched(session, reader, one, two) as match:
        one.harm(100_000, "hold")
        loaded = session.load(match).wait(SOON)
        assert loaded.tokens == len(LONG)
        one.release()
        assert length(session, LONG) == len(LONG)
        until(lambda: one.passed > 100_000)  # what was late has left
        assert length(session, LONG) == len(LONG)
    assert count(reader, Count.READS_HEDGED) >= 1
    assert held(reader) == 0


def test_nobody_is_cut_when_both_hang(tmp_path: Path) -> None:
    """The second one must say that it has the blocks before the first one is given up: it may be slow, and no more."""
    with Stores(tmp_path, timeout=2.0) as stores:
        one, two, reader = two_holders(stores)
        with reader.session(MODEL) as session:
            with matched(session, reader, one, two) as match:
                one.harm(0, "freeze")
                two.harm(0, "freeze")
                assert session.load(match).wait(60).tokens == 0
            keep(reader, prompt(7))
            assert length(session, prompt(7)) == len(prompt(7)), "the store itself works"
        assert count(reader, Count.READS_HEDGED) == 0
        assert held(reader) == 0


def test_a_second_node_that_dies_is_a_miss(stores: Stores) -> None:
    """It has said what it has, and sent a part of it."""
    one, two, reader = two_holders(stores)
    with reader.session(MODEL) as session:
        with matched(session, reader, one, two) as match:
            one.harm(0, "freeze")
            two.harm(200_000, "cut")
            loaded = session.load(match).wait(SOON)
            assert loaded.tokens < len(LONG)
        for proxy in (one, two):
            proxy.release()
            proxy.cut()
        length(session, LONG)  # whatever is there is right
    assert count(reader, Count.READS_HEDGED) >= 1
    assert held(reader) == 0


def test_what_nobody_waits_for_any_more_is_not_read_again(stores: Stores) -> None:
    one, two, reader = two_holders(stores)
    with reader.session(MODEL) as session:
        with matched(session, reader, one, two) as match:
            one.harm(0, "freeze")
            load = session.load(match)
            load.cancel()
            assert load.wait(SOON).tokens == 0
        one.release()
        one.cut()
        until(lambda: reader.statistics().pipeline.pending == 0)
        assert held(reader) == 0
        assert length(session, LONG) == len(LONG)
    assert count(reader, Count.READS_HEDGED) == count(reader, Count.READS_MOVED) == 0


def test_what_a_node_fails_to_send_another_one_supplies(stores: Stores) -> None:
    one, two, reader = two_holders(stores)
    with reader.session(MODEL) as session:
        with matched(session, reader, one, two) as match:
            one.harm(100_000, "cut")
            assert session.load(match).wait(SOON).tokens == len(LONG)
        assert length(session, LONG) == len(LONG)
    assert count(reader, Count.READS_MOVED) == count(reader, Count.READS_MOVED_WON) >= 1
    assert count(reader, Count.READS_HEDGED) == 0
    assert held(reader) == 0


def test_what_a_node_has_lost_another_one_supplies(stores: Stores) -> None:
    first, server = stores.serving()
    keep(first)
    one = stores.proxy(server)
    other, server = stores.serving()
    keep(other)
    two = stores.proxy(server)
    reader = stores.store(one.address, two.address)
    with reader.session(MODEL) as session, first.session(MODEL) as owner:
        with matched(session, reader, one, two) as match:
            owner.drop(LONG)
            assert session.load(match).wait(SOON).tokens == len(LONG)
        assert length(session, LONG) == len(LONG)
    assert read_from(reader, two) == 40
    assert held(reader) == 0


@pytest.mark.parametrize("why", ["setting", "used up"])
def test_only_a_part_of_the_reads_is_hedged(tmp_path: Path, why: str) -> None:
    with Stores(tmp_path, timeout=1.0, hedge=0.0 if why == "setting" else 0.05) as stores:
        one, two, reader = two_holders(stores)
        second = reader.main.pipeline._promotion._second
        assert second is not None
        with reader.session(MODEL) as session:
            with matched(session, reader, one, two) as match:
                if why == "used up":
                    second._credit = 0.0
                one.harm(0, "freeze")
                session.load(match).wait(SOON)
            length(session, LONG)  # every byte is right
        assert count(reader, Count.READS_HEDGED) == 0
        assert held(reader) == 0


def test_an_interrupted_caller_leaves_no_read_behind(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted between saying that a read begins and beginning it."""
    one, two, reader = two_holders(stores)
    second = reader.main.pipeline._promotion._second
    assert second is not None
    real = second.began

    def began(*given: Any) -> None:
        real(*given)
        raise KeyboardInterrupt

    with reader.session(MODEL) as session:
        with matched(session, reader, one, two) as match:
            monkeypatch.setattr(second, "began", began)
            with pytest.raises(KeyboardInterrupt):
                session.load(match)
            monkeypatch.undo()
        until(lambda: not second._reads)
        assert length(session, LONG) == len(LONG)
    assert held(reader) == 0


def test_without_a_thread_for_it_reads_go_on_without_second_ones(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, reader = two_holders(stores)
    start = threading.Thread.start

    def exhausted(thread: threading.Thread) -> None:
        if thread.name == "kvtide-second-reads":
            raise RuntimeError("can't start new thread")
        start(thread)

    with reader.session(MODEL) as session, matched(session, reader, one, two) as match:
        monkeypatch.setattr(threading.Thread, "start", exhausted)
        assert session.load(match).wait(SOON).tokens == len(LONG)
    assert held(reader) == 0


def test_a_member_that_hangs_is_replaced_by_another_that_the_directory_names(tmp_path: Path) -> None:
    """With many members only one of the holders was asked: the other one is bound and asked when it is needed."""
    with Cluster(tmp_path, timeout=60.0) as cluster:
        for n in range(4):
            keep(cluster.part().store, prompt(100 + n))
        proxies, holders = [], []
        for port in free_ports(2):
            proxies.append(cluster.proxy(f"127.0.0.1:{port}"))
            holders.append(cluster.part(f"127.0.0.1:{port}", announce=proxies[-1].address))
            keep(holders[-1].store)
            holders[-1].announced()
        reader = cluster.reader()
        with reader.session(MODEL) as session:
            until(lambda: length(session, prompt(100)) > 0 and len(members(reader)) == 6)
            with session.match(LONG, wait=30) as match:
                assert match.tokens == len(LONG)
                bound = [m.address for m in members(reader) if m.tier]
                (first,) = [proxy for proxy in proxies if proxy.address in bound]
                first.harm(0, "freeze")
                assert session.load(match).wait(SOON).tokens == len(LONG)
            assert length(session, LONG) == len(LONG)
        assert count(reader, Count.READS_HEDGED) == count(reader, Count.HEDGES_WON) >= 1
        assert held(reader) == 0


def members(store: Store) -> Sequence[MemberStatistics]:
    cluster = store.statistics().cluster
    assert cluster is not None
    return cluster.members


def test_a_node_that_is_stopped_is_replaced_by_another(tmp_path: Path) -> None:
    """Three processes; the first one that is read from stops while it is read from, and goes on later."""
    with ExitStack() as stack:
        ports = free_ports(2)
        addresses = [f"127.0.0.1:{port}" for port in ports]
        shared = {"KVTIDE_PEERS_TOKEN_FILE": token(tmp_path), "KVTIDE_PEERS_TIMEOUT": "60s"}

        def node(name: str, **settings: str) -> Process:
            (tmp_path / name).mkdir()
            process = Process(tmp_path / name, **shared, **settings)
            stack.callback(process.kill)
            return process

        nodes = [node(str(port), KVTIDE_PEERS_LISTEN=address) for port, address in zip(ports, addresses, strict=True)]
        for process in nodes:
            with Client(process.path) as client, client.session(MODEL) as session:
                session.store(LONG, data(PLAIN, LONG))
        reader = node("reader", KVTIDE_PEERS_ADDRESSES=" ".join(addresses))
        with Client(reader.path) as client, client.session(MODEL) as session:
            with session.match(LONG, wait=30) as match:
                names = [TierCount.BLOCKS_FOUND.of(f"peer {address}") for address in addresses]
                until(lambda: all(client.status().store.counts.get(name) == 40 for name in names))
                nodes[0].process.send_signal(signal.SIGSTOP)
                assert session.load(match).wait(SOON).tokens == len(LONG)
            assert length(session, LONG) == len(LONG)
            nodes[0].process.send_signal(signal.SIGCONT)
            assert length(session, LONG) == len(LONG)
            counts = client.status().store.counts
        assert counts[Count.READS_HEDGED] == counts[Count.HEDGES_WON] >= 1
