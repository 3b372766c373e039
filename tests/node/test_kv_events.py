"""KV events of a node, as real consumers get them: over ZeroMQ, late, after losses, and across restarts."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvtide import config
from kvtide.errors import ConfigError
from kvtide.events import BlockRemoved
from kvtide.index.keys import Extra
from kvtide.node.client.client import Client
from kvtide.node.events import publisher as publisher_module
from kvtide.node.events.open import publish_events
from kvtide.node.events.publisher import NodeEvents
from kvtide.node.roles import Role
from kvtide.node.server.access import Access
from kvtide.store.store import Store
from kvtide.testing.clock import FakeClock
from kvtide.testing.faults import Fault, FaultyDisk, How
from kvtide.testing.interface import MODEL, OTHER_TENANT, PLAIN, SIZE, data, length, prompt
from tests.node.kv_consumer import OPEN, Consumer
from tests.node.serving import Process, Thread, eventually
from tests.peers.nodes import Stores

Publishing = Callable[..., Thread]
EVENTS = {"endpoint": "tcp://127.0.0.1:*", "replay": "tcp://127.0.0.1:*", "token_ids": True}
DISK = {"budget": "64MiB", "segment": "8MiB", "store": "through"}


def publisher(node: Thread) -> NodeEvents:
    events = node.node.events
    assert isinstance(events, NodeEvents)
    return events


def consumer(node: Thread, **given: Any) -> Consumer:
    """A consumer whose subscription has arrived."""
    made = Consumer(publisher(node).address, publisher(node).replay_address, **given)
    eventually(lambda: publisher(node).statistics().subscriptions == 1)
    return made


@pytest.fixture(autouse=True)
def consumers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close all of them. They ask for replays, so nobody is told everything again for those who come late."""
    monkeypatch.setattr(publisher_module, "_ANEW", 1e9)
    yield
    while OPEN:
        OPEN.pop().close()


@pytest.fixture
def publishing(tmp_path: Path) -> Iterator[Publishing]:
    """Start a node that publishes."""
    nodes: list[Thread] = []

    def start(events: dict[str, Any] | None = None, **settings: Any) -> Thread:
        settings = {"dram": {"budget": "16MiB", "segment": "1MiB"}} | settings
        nodes.append(Thread(tmp_path / f"{len(nodes)}.sock", events=EVENTS | (events or {}), **settings))
        return nodes[-1]

    yield start
    for node in nodes:
        node.close()


def store(node: Thread, *path: int, **given: Any) -> None:
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(prompt(*path), data(PLAIN, prompt(*path)), **given)


def test_what_is_stored_is_published_and_what_is_dropped_withdrawn(publishing: Publishing) -> None:
    node = publishing()
    seen = consumer(node)
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(prompt(1, 2, 3), data(PLAIN, prompt(1, 2, 3)))
        session.store(prompt(1, 2, 4), data(PLAIN, prompt(1, 2, 4)))
        seen.until(lambda: seen.longest(prompt(1, 2, 4)) == 3 * SIZE)
        assert seen.longest(prompt(1, 2, 3)) == 3 * SIZE
        assert seen.longest(prompt(2, 3)) == 0
        session.drop(prompt(1, 2, 3), start=2)
        seen.until(lambda: seen.longest(prompt(1, 2, 3)) == 2 * SIZE)
        assert seen.longest(prompt(1, 2, 4)) == 3 * SIZE


def test_a_block_without_its_parent_is_published_when_the_parent_is_back(publishing: Publishing) -> None:
    """A prefix needs all of its blocks, so a router must not count those behind a gap."""
    node = publishing()
    seen = consumer(node)
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(prompt(1, 2, 3), data(PLAIN, prompt(1, 2, 3)))
        seen.until(lambda: seen.longest(prompt(1, 2, 3)) == 3 * SIZE)
        with node.store.index.lock:
            first = node.store.index.keys(node.store.index.rows([*node.store.index._rows])[:1])
        node.store.main.drop_here(first)
        seen.until(lambda: not any(seen.blocks.values()))
        session.store(prompt(1), data(PLAIN, prompt(1)))
        seen.until(lambda: seen.longest(prompt(1, 2, 3)) == 3 * SIZE)


def test_each_tier_is_published_by_itself(publishing: Publishing, tmp_path: Path) -> None:
    node = publishing(nvme=DISK | {"path": str(tmp_path / "nvme")})
    seen = consumer(node)
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        assert client.flush(60)
        seen.until(lambda: seen.longest(prompt(1, 2), "STORAGE") == 2 * SIZE)
        assert seen.longest(prompt(1, 2)) == 2 * SIZE
        session.drop(prompt(1, 2), start=1)
        seen.until(lambda: seen.longest(prompt(1, 2), "STORAGE") == SIZE)
        seen.until(lambda: seen.longest(prompt(1, 2)) == SIZE)


@pytest.mark.parametrize(("shared", "locality"), [("local", "LOCAL"), ("remote", "REMOTE"), ("no", "")])
def test_shared_storage_is_published_as_the_operator_says(
    publishing: Publishing, tmp_path: Path, shared: str, locality: str
) -> None:
    node = publishing({"shared": shared}, files={"path": str(tmp_path / "shared"), "store": "through"})
    seen = consumer(node)
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(prompt(1), data(PLAIN, prompt(1)))
        assert client.flush(60)
        if locality:
            seen.until(lambda: seen.longest(prompt(1), "STORAGE", locality) == SIZE)
        session.store(prompt(2), data(PLAIN, prompt(2)))
        assert client.flush(60)
        seen.until(lambda: seen.longest(prompt(2)) == SIZE)
    assert set(seen.blocks) <= {("CPU", "LOCAL"), ("STORAGE", locality)}


def test_arrays_leave_out_what_follows_a_remote_block(publishing: Publishing, tmp_path: Path) -> None:
    """An array cannot say that a block is remote. A consumer that is not told of it cannot place those after it."""
    shared = {"path": str(tmp_path / "shared"), "store": "through"}
    node = publishing({"shared": "remote", "form": "array"}, files=shared)
    seen = consumer(node)
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
        assert client.flush(60)
        seen.until(lambda: seen.longest(prompt(1, 2), locality="") == 2 * SIZE)
        assert set(seen.blocks) == {("CPU", "")}
        with node.store.index.lock:
            first = node.store.index.rows([*node.store.index._rows])[:1]
            node.store.index.remove_many(first, 0)
            keys = node.store.index.keys(first)
        node.store.feed.publish([BlockRemoved("dram", keys, "evicted")])
        seen.until(lambda: not any(seen.blocks.values()))


@pytest.mark.parametrize(("shared", "locality"), [("local", "LOCAL"), ("remote", "REMOTE"), ("no", "")])
def test_blocks_of_another_node_are_published_as_the_operator_says(
    publishing: Publishing, tmp_path: Path, shared: str, locality: str
) -> None:
    """Those that this node has found there, until the other node is gone; what it has not asked for is the other's."""
    with Stores(tmp_path) as stores:
        owner, server = stores.serving()
        with owner.session(MODEL) as session:
            for path in ([1, 2], [3]):
                session.store(prompt(*path), data(PLAIN, prompt(*path)))
        node = publishing({"shared": shared}, peers=stores.peers | {"addresses": server.address})
        seen = consumer(node)
        with Client(node.path) as client, client.session(MODEL) as session:
            eventually(lambda: length(session, prompt(1, 2)) == 2 * SIZE)  # a slow host misses its greeting's deadline
            if locality:
                seen.until(lambda: seen.longest(prompt(1, 2), "STORAGE", locality) == 2 * SIZE)
            seen.until(lambda: seen.longest(prompt(1, 2)) == 2 * SIZE)  # it was read into memory
            server.close()
            assert length(session, prompt(3)) == 0  # so it is found to be gone
            session.store(prompt(4), data(PLAIN, prompt(4)))
            seen.until(lambda: seen.longest(prompt(4)) == SIZE)
            seen.until(lambda: not seen.blocks["STORAGE", locality])
        known = {tokens for place in seen.blocks.values() for _, tokens in place.values()}
        assert known == {tuple(prompt(n)) for n in (1, 2, 4)}
    assert set(seen.blocks) <= {("CPU", "LOCAL"), ("STORAGE", locality)}


def test_a_block_that_fails_its_check_is_withdrawn(publishing: Publishing, tmp_path: Path) -> None:
    disk = FaultyDisk()
    node = publishing(
        nvme=DISK | {"path": str(tmp_path / "nvme"), "direct": False},
        dram={"budget": "2MiB", "segment": "1MiB"},
        disk=disk,
    )
    seen = consumer(node)
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(prompt(1), data(PLAIN, prompt(1)))
        assert client.flush(60)
        seen.until(lambda: seen.longest(prompt(1), "STORAGE") == SIZE)
        with node.store.index.lock:
            rows = node.store.index.rows([*node.store.index._rows])
        evicted = 0
        for number in range(2, 400):  # until the block is on the disk alone
            session.store(prompt(number), data(PLAIN, prompt(number)))
            with node.store.index.lock:
                evicted = int((node.store.index.state[0][rows] == 0).sum())
            if evicted:
                break
        assert evicted
        seen.until(lambda: seen.longest(prompt(1)) == 0)
        disk.arm(Fault("read", How.FLIP, times=100))
        assert length(session, prompt(1)) == 0
        seen.until(lambda: seen.longest(prompt(1), "STORAGE") == 0)


def test_blocks_that_expire_are_withdrawn(publishing: Publishing) -> None:
    node = publishing()
    seen = consumer(node)
    store(node, 1, ttl=0.5)
    store(node, 2)
    seen.until(lambda: seen.longest(prompt(2)) == SIZE)
    seen.until(lambda: seen.longest(prompt(1)) == 0)
    assert seen.longest(prompt(2)) == SIZE


def test_who_comes_late_gets_everything(publishing: Publishing) -> None:
    node = publishing()
    store(node, 1, 2, 3)
    seen = consumer(node)
    seen.until(lambda: seen.longest(prompt(1, 2, 3)) == 3 * SIZE)
    late = Consumer(publisher(node).address, publisher(node).replay_address)
    store(node, 1, 2, 4)
    late.until(lambda: late.longest(prompt(1, 2, 4)) == 3 * SIZE)
    assert late.longest(prompt(1, 2, 3)) == 3 * SIZE


def test_a_node_without_a_consumer_follows_nothing(publishing: Publishing) -> None:
    node = publishing()
    assert node.store.statistics().feed.followers == 0
    store(node, 1)
    assert node.store.statistics().feed.followers == 0
    assert publisher(node).statistics().batches == 0
    seen = consumer(node)
    seen.until(lambda: seen.longest(prompt(1)) == SIZE)


def test_a_replay_from_any_number_leads_to_the_same_state(publishing: Publishing) -> None:
    """From each number there is, from before all and from after the last, with a consumer that has what came before."""
    node = publishing({"buffer": "1MiB"})
    seen = consumer(node)
    first = publisher(node).statistics().next_number
    states: dict[int, dict[Any, Any]] = {}
    for number in range(12):
        store(node, 1, number + 10)
        seen.until(lambda number=number: seen.longest(prompt(1, number + 10)) == 2 * SIZE)  # type: ignore[misc]
        states[seen.next] = {place: dict(blocks) for place, blocks in seen.blocks.items()}
    for start in [0, 1, first - 5000, first - 1, *states, seen.next + 1_000_000]:
        other = Consumer(publisher(node).address, publisher(node).replay_address, start=start)
        other.blocks.update({place: dict(blocks) for place, blocks in states.get(start, {}).items()})
        numbers = other.replay()
        assert other.blocks == seen.blocks, f"from {start}"
        assert numbers == list(range(numbers[0], numbers[-1] + 1)) if numbers else start == seen.next
        assert not numbers or numbers[0] >= start
    assert publisher(node).statistics().snapshots >= 3


def test_a_consumer_of_a_number_that_is_ahead_is_caught_up_with(publishing: Publishing) -> None:
    """As after a restart with a clock that was set back: otherwise it would ignore all that follows."""
    node = publishing()
    store(node, 1)
    ahead = publisher(node).statistics().next_number + 1_000_000
    seen = consumer(node, start=ahead)
    seen.replay()
    assert seen.longest(prompt(1)) == SIZE
    store(node, 2)
    seen.until(lambda: seen.longest(prompt(2)) == SIZE)
    assert min(seen.numbers) >= ahead


@pytest.mark.parametrize("form", ["map", "array"])
def test_a_consumer_that_loses_batches_finds_them_again(publishing: Publishing, form: str) -> None:
    node = publishing({"form": form, "buffer": "1MiB"})
    locality = "LOCAL" if form == "map" else ""
    seen = consumer(node)
    chance = random.Random(7)
    with Client(node.path) as client, client.session(MODEL) as session:
        for number in range(60):
            path = prompt(number % 7, number % 11, number)
            session.store(path, data(PLAIN, path))
            if number % 9 == 8:
                session.drop(path, start=2)
            if chance.random() < 0.3 and seen.sub.poll(1000):
                seen.sub.recv_multipart()  # lost
            seen.receive(0.01)
        expected = {n: int(session.find(prompt(n % 7, n % 11, n))[-1]) for n in range(60)}
        store(node, 1000)
        seen.until(lambda: seen.longest(prompt(1000), locality=locality) == SIZE)
    assert seen.gaps
    for n, there in expected.items():
        tokens = prompt(n % 7, n % 11, n)
        assert seen.longest(tokens, locality=locality) == (2 + there) * SIZE, n


def test_pages_of_a_router_are_parts_of_a_block(publishing: Publishing) -> None:
    node = publishing({"block_tokens": 4})
    seen = consumer(node)
    store(node, 1, 2)
    seen.until(lambda: seen.longest(prompt(1, 2)) == 2 * SIZE)
    assert len(seen.blocks["CPU", "LOCAL"]) == 2 * SIZE // 4
    assert seen.longest([*prompt(1), 2, 2, 2, 2, 3]) == SIZE + 4


def test_names_are_the_same_on_every_node(publishing: Publishing) -> None:
    """Routers know the blocks of all nodes by one name."""
    found = []
    for _ in range(2):
        node = publishing()
        seen = consumer(node)
        store(node, 1, 2)
        seen.until(lambda: seen.longest(prompt(1, 2)) == 2 * SIZE)  # noqa: B023
        found.append(seen.blocks)
    assert found[0] == found[1]


def test_a_description_that_was_lost_is_made_again(publishing: Publishing, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node has room for so many only. A block that is in use is described again after a minute."""
    node = publishing()
    seen = consumer(node)
    with Client(node.path) as client, client.session(MODEL) as session:
        clock = client.clock = FakeClock()
        monkeypatch.setattr(publisher_module, "_DESCRIPTIONS", 0)
        session.store(prompt(1), data(PLAIN, prompt(1)))
        eventually(lambda: publisher(node).statistics().undescribed == 1)
        monkeypatch.setattr(publisher_module, "_DESCRIPTIONS", 1 << 20)
        clock.advance(61)
        assert length(session, prompt(1)) == SIZE
        session.store(prompt(2), data(PLAIN, prompt(2)))
        seen.until(lambda: seen.longest(prompt(1)) == SIZE)


def test_a_client_that_may_only_read_does_not_describe_in_vain(
    publishing: Publishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each description would be refused, and counted as a failure."""
    node = publishing()
    store(node, 1)
    monkeypatch.setattr(node.node._access_list, "of", lambda *_: Access(Role.READ))
    with Client(node.path) as client, client.session(MODEL) as session:
        assert length(session, prompt(1)) == SIZE
        assert length(session, prompt(1)) == SIZE  # what was deferred has been sent
        found = client.status().node
    assert found is not None
    assert found.failures == 0


def test_without_leave_no_token_leaves_the_node(publishing: Publishing) -> None:
    node = publishing({"token_ids": False})
    seen = consumer(node)
    store(node, 1, 2)
    seen.until(lambda: len(seen.blocks["CPU", "LOCAL"]) == 2)
    assert all(tokens == () for _, tokens in seen.blocks["CPU", "LOCAL"].values())


def test_a_tenant_is_published_only_if_the_operator_names_it(publishing: Publishing) -> None:
    for tenants, expected in (("", 0), (OTHER_TENANT.tag.hex(), 1)):
        node = publishing({"tenants": tenants})
        seen = consumer(node)
        with Client(node.path) as client, client.session(MODEL, tenant=OTHER_TENANT) as session:
            session.store(prompt(1), data(PLAIN, prompt(1)))
            eventually(lambda: publisher(node).statistics().described + publisher(node).statistics().ignored)  # noqa: B023
        store(node, 2)
        seen.until(lambda: seen.longest(prompt(2)) == SIZE)  # noqa: B023
        seen.until(lambda: len(seen.blocks["CPU", "LOCAL"]) == expected + 1)  # noqa: B023


def test_blocks_that_depend_on_more_than_tokens_are_not_published(publishing: Publishing) -> None:
    """A router that knows only the tokens would take them for blocks without the image."""
    node = publishing()
    seen = consumer(node)
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(prompt(1), data(PLAIN, prompt(1)), [Extra("image", b"cat", 2, 4)])
        session.store(prompt(2), data(PLAIN, prompt(2)))
    seen.until(lambda: seen.longest(prompt(2)) == SIZE)
    assert seen.longest(prompt(1)) == 0


def test_blocks_that_an_earlier_node_has_stored_are_published_when_they_are_used(tmp_path: Path) -> None:
    """And the numbers go on, and the consumer forgets what the earlier process had in memory."""
    ports = {"KVTIDE_EVENTS_ENDPOINT": f"ipc://{tmp_path}/events", "KVTIDE_EVENTS_REPLAY": f"ipc://{tmp_path}/replay"}
    settings = {"KVTIDE_EVENTS_TOKEN_IDS": "true", "KVTIDE_NVME_STORE": "through"}
    node = Process(tmp_path, **ports, **settings)
    seen = Consumer(*ports.values())
    try:
        with Client(node.path) as client, client.session(MODEL) as session:
            session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
            assert client.flush(60)
            seen.until(lambda: seen.longest(prompt(1, 2), "STORAGE") == 2 * SIZE)
        node.kill()
        node.start()
        with Client(node.path) as client, client.session(MODEL) as session:
            assert length(session, prompt(1, 2)) == 2 * SIZE
            session.store(prompt(1, 2, 3), data(PLAIN, prompt(1, 2, 3)))
            seen.until(lambda: seen.longest(prompt(1, 2, 3)) == 3 * SIZE)
            seen.until(lambda: seen.longest(prompt(1, 2), "STORAGE") == 2 * SIZE)
        assert seen.clears >= 2
        assert seen.numbers == sorted(set(seen.numbers))
        node.stop()
        seen.until(lambda: not any(seen.blocks.values()))
    finally:
        node.kill()


def test_a_consumer_that_does_not_read_costs_a_bounded_buffer(publishing: Publishing) -> None:
    node = publishing({"buffer": "1MiB"}, dram={"budget": "64MiB", "segment": "1MiB"})
    stuck = consumer(node)
    with Client(node.path) as client, client.session(MODEL) as session:
        for number in range(300):
            path = prompt(*range(number * 10, number * 10 + 10))
            session.store(path, data(PLAIN, path))
            session.drop(path)
        last = prompt(10**6)
        session.store(last, data(PLAIN, last))
    found = publisher(node).statistics()
    assert found.buffered_bytes <= 1 << 20
    stuck.until(lambda: stuck.longest(prompt(10**6)) == SIZE)


def test_addresses_that_cannot_be_used_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for given in ({"endpoint": "5557"}, {"endpoint": "tcp://127.0.0.1:*", "replay": "tcp://no.such.host.invalid:1"}):
        with Store(config.read(None, events=given)) as opened, pytest.raises(ConfigError, match="events"):
            publish_events(opened)
    given = {"endpoint": "tcp://127.0.0.1:*", "tenants": "me"}
    with Store(config.read(None, events=given)) as opened, pytest.raises(ConfigError, match="tenants"):
        publish_events(opened)
    with Store(config.read(None, events={"endpoint": "tcp://0.0.0.0:*"})) as opened:
        publish_events(opened).close()
    assert "whoever connects" in caplog.text


def test_requests_for_replays_that_make_no_sense_harm_nobody(publishing: Publishing) -> None:
    node = publishing()
    store(node, 1)
    seen = consumer(node)
    with seen._context.socket(zmq.DEALER) as dealer:
        dealer.connect(publisher(node).replay_address)
        for frames in ([b""], [b"", b"123"], [b"", b"", b"", b"12345678"], [b"x" * 2000]):
            dealer.send_multipart(frames)
    seen.replay()
    assert seen.longest(prompt(1)) == SIZE
