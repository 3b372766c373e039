"""A node as a member, and what it announces, with real stores and a real Valkey that is killed, held and emptied."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtide
from kvtide import config as configuration
from kvtide.block import BlockKey
from kvtide.events import EventsLost
from kvtide.peers.announcer import Announcer
from kvtide.peers.membership import Membership
from kvtide.store.store import Store
from kvtide.testing.clock import FakeClock
from kvtide.testing.directory import some_keys
from kvtide.testing.interface import until
from kvtide.testing.servers import ValkeyServer
from kvtide.testing.simulated_valkey import SimulatedLink, SimulatedValkey
from kvtide.tiers.peers.directory import BlockDirectory, open_directory

LAYOUT = kvtide.Layout.attention(layers=1, heads=1, head_dim=8, block_tokens=16)
MODEL = kvtide.Model(LAYOUT, "membership")
LEASE = 0.6


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ValkeyServer]:
    with ValkeyServer(tmp_path / "valkey") as one:
        yield one


class Node:
    """A store, a member, that announces its blocks."""

    def __init__(self, stack: ExitStack, server: ValkeyServer, address: str, **settings: Any) -> None:
        sizes: dict[str, Any] = {"dram": {"budget": "2MiB", "segment": "1MiB"}}
        self.store = stack.enter_context(closing(Store(configuration.read(None, env={}, **{**sizes, **settings}))))
        self.directory = stack.enter_context(closing(open_directory(server.url, timeout=1.0)))
        self.membership = Membership(self.directory, self.store.name, address, lease=LEASE)
        self.membership.start()
        stack.callback(self.membership.close)
        self.announcer = Announcer.of(self.store, self.directory, self.membership)
        self.announcer.start()
        stack.callback(self.announcer.close)

    def put(self, seed: int, blocks: int = 4, tenant: kvtide.Tenant | None = None) -> list[BlockKey]:
        """Store a prompt; returns the keys of its blocks."""
        tokens = np.arange(blocks * 16, dtype=np.uint32) + 100_000 * seed
        data = [np.full(LAYOUT.geometry["full"].nbytes, seed % 251, np.uint8)] * blocks
        with self.store.session(MODEL, tenant=tenant) if tenant else self.store.session(MODEL) as session:
            assert session.store(tokens, data)
            return list(session.chain(tokens).keys(b"full"))

    @property
    def number(self) -> int:
        own = self.membership.own
        return 0 if own is None else own.number

    def held(self, keys: list[BlockKey], *numbers: int) -> Callable[[], bool]:
        """Whether each of these blocks is said to be held by exactly these members."""

        def found() -> bool:
            try:
                return [set(some) for some in self.directory.holders(keys)] == [set(numbers)] * len(keys)
            except OSError:
                return False

        return found


@pytest.fixture
def nodes(server: ValkeyServer) -> Iterator[tuple[Node, Node]]:
    with ExitStack() as stack:
        one, two = (Node(stack, server, f"host{i}:9411") for i in range(2))
        until(lambda: all(len(node.membership.members()) == 2 for node in (one, two)))
        yield one, two


def test_stored_blocks_are_found_by_others(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    keys = a.put(1)
    until(b.held(keys, a.number))
    assert b.put(1) == keys
    until(a.held(keys, a.number, b.number))
    with a.store.session(MODEL) as session:
        session.drop(np.arange(4 * 16, dtype=np.uint32) + 100_000)
    until(a.held(keys, b.number))


def test_what_was_stored_before_joining_is_announced(server: ValkeyServer, nodes: tuple[Node, Node]) -> None:
    with ExitStack() as stack:
        server.hold()
        late = Node(stack, server, "host9:9411")
        keys = late.put(7, blocks=50)
        server.resume()
        until(lambda: late.number > 0)
        until(nodes[0].held(keys, late.number))


def test_a_block_is_withdrawn_when_it_is_in_no_tier(server: ValkeyServer, tmp_path: Path) -> None:
    with ExitStack() as stack:
        nvme = {"path": str(tmp_path / "disk"), "budget": "64MiB", "segment": "4MiB"}
        node = Node(stack, server, "host7:9411", nvme=nvme)
        keys = node.put(1, blocks=8)
        assert node.store.flush()
        until(node.held(keys, node.number))
        for seed in range(2, 120):  # DRAM has 2 MiB: the blocks leave it, and stay on the disk
            node.put(seed, blocks=8)
        rows = node.store.index.rows(keys)
        assert not node.store.index.state[0][rows].any()
        assert node.store.index.state[1][rows].all()
        last = node.put(500)
        until(node.held(last, node.number))  # all events of before were handled
        assert node.held(keys, node.number)()
        with node.store.session(MODEL) as session:
            session.drop(np.arange(8 * 16, dtype=np.uint32) + 100_000)
        until(node.held(keys))


def test_evicted_blocks_are_withdrawn(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    keys = a.put(1, blocks=8)
    until(b.held(keys, a.number))
    for seed in range(2, 150):
        a.put(seed, blocks=8)
    assert not a.store.index.rows(keys).any()
    until(b.held(keys))


def test_reserved_shares_are_not_announced(server: ValkeyServer) -> None:
    tenant = kvtide.Tenant("shared-out", b"s" * 32)
    with ExitStack() as stack:
        memory = {"budget": "4MiB", "segment": "1MiB", "reserved": f"{tenant.tag.hex()}:1MiB"}
        node = Node(stack, server, "host7:9411", dram=memory)
        hidden, shown = node.put(1, tenant=tenant), node.put(2)
        assert node.store.partition_of(tenant.tag).index.rows(hidden).all()
        until(node.held(shown, node.number))
        assert node.directory.holders(hidden) == [()] * len(hidden)


def test_a_node_that_leaves_takes_its_entries_with_it(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    keys = a.put(1)
    until(b.held(keys, a.number))
    gone = a.number
    a.announcer.close()
    a.membership.close()
    assert b.held(keys)()
    assert gone not in b.directory.members()
    assert a.membership.own is None
    assert not a.membership.members()
    until(lambda: gone not in b.membership.members())


@pytest.mark.parametrize("keep", [False, True], ids=["empty", "late"])
def test_everything_is_published_again_after_valkey_was_away(
    server: ValkeyServer, nodes: tuple[Node, Node], keep: bool
) -> None:
    """``empty``: it comes back without its data; ``late``: with its data, when all leases have ended."""
    a, b = nodes
    keys = a.put(1)
    until(b.held(keys, a.number))
    epoch = a.membership.statistics().epoch
    if keep:
        server.hold()
    else:
        server.kill()
    until(lambda: a.membership.own is None and not a.membership.members())
    more = a.put(2)  # nobody waits for Valkey
    if keep:
        server.resume()
    else:
        server.start()
    until(lambda: a.number > 0 and b.held(keys + more, a.number)())
    assert a.membership.statistics().epoch > epoch
    assert a.announcer.statistics().rebuilds >= 2


def test_lost_events_withdraw_everything_at_once(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    keys = a.put(1)
    until(b.held(keys, a.number))
    epoch = a.membership.statistics().epoch
    with a.store.index.lock:  # gone, and nobody is told
        rows = a.store.index.rows(keys[2:])
        kept = a.store.index.state[0][rows].copy()
        a.store.index.state[0][rows] = 0
    a.store.feed.publish([EventsLost(1)])
    until(lambda: a.number > 0 and b.held(keys[:2], a.number)() and b.held(keys[2:])())
    assert a.membership.statistics().epoch > epoch
    a.store.index.state[0][rows] = kept


def test_who_serves_nobody_follows(server: ValkeyServer, nodes: tuple[Node, Node]) -> None:
    with closing(open_directory(server.url, timeout=1.0)) as directory:
        follower = Membership(directory, b"f" * 16, "", lease=LEASE)
        changes: list[int] = []
        stop = follower.on_change(lambda: changes.append(len(follower.members())))
        follower.start()
        until(lambda: len(follower.members()) == 2)
        assert follower.own is None
        assert len(nodes[0].membership.members()) == 2
        nodes[1].membership.close()
        until(lambda: len(follower.members()) == 1)
        assert changes[-1] == 1
        stop()
        follower.close()


def test_a_forked_child_does_not_leave(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    keys = a.put(1)
    until(b.held(keys, a.number))
    if not (child := os.fork()):
        try:
            a.announcer.close()
            a.membership.close()
            good = a.membership.own is None and not a.membership.members()
        finally:
            os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert b.held(keys, a.number)()
    assert a.membership.own in b.directory.members().values()


# -- step by step, with a clock that the test moves ---------------------------------------------------------------


class Steps:
    """A membership whose clock, network and Valkey the test moves."""

    def __init__(self, lease: float = 9.0) -> None:
        self.clock = FakeClock(1_800_000_000.0)
        self.valkey = SimulatedValkey(self.clock)
        self.link = SimulatedLink(self.valkey, [])
        self.membership = Membership(BlockDirectory(self.link), b"m" * 16, "host7:9411", lease=lease, clock=self.clock)
        self.other = BlockDirectory(SimulatedLink(self.valkey, []))


def own(membership: Membership) -> bool:
    """Whether it is a member now."""
    return membership.own is not None


def test_a_lease_is_renewed_three_times_before_it_ends() -> None:
    one = Steps()
    assert one.membership.own is None
    assert one.membership.step() == pytest.approx(3.0)
    member = one.membership.own
    for _ in range(20):
        one.clock.advance(3.0)
        one.membership.step()
        assert one.membership.own == member
        assert list(one.other.members().values()) == [member]
    one.clock.advance(1.0)
    messages = one.link.messages
    assert one.membership.step() == pytest.approx(2.0)
    assert one.link.messages == messages, "nothing was due"


def test_without_contact_everybody_is_forgotten_within_a_lease() -> None:
    one = Steps()
    one.membership.step()
    one.other.join(b"o" * 16, "host8:9411", 5.0)
    one.clock.advance(3.0)
    one.membership.step()
    assert len(one.membership.members()) == 2
    one.link.cut = True
    one.clock.advance(2.5)
    assert one.membership.step() <= 9.0 / 12
    assert len(one.membership.members()) == 1, "its lease was shorter"
    one.clock.advance(6.0)
    assert own(one.membership)
    one.clock.advance(0.6)
    assert not own(one.membership)
    assert one.membership.members() == {}
    one.link.cut = False
    one.membership.step()
    assert own(one.membership)
    assert one.membership.statistics().joins == 2


def test_changes_are_told_once() -> None:
    one = Steps()
    told: list[int] = []
    one.membership.on_change(lambda: told.append(len(one.membership.members())))
    for _ in range(3):
        one.membership.step()
        one.clock.advance(3.0)
    other = one.other.join(b"o" * 16, "host8:9411", 60.0)
    one.membership.step()
    one.clock.advance(3.0)
    one.membership.step()
    one.other.leave(other)
    one.clock.advance(3.0)
    one.membership.step()
    assert told == [1, 2, 1]


def test_the_dead_are_scrubbed_by_the_living() -> None:
    one = Steps(lease=600.0)
    dead = one.other.join(b"o" * 16, "host8:9411", 60.0)
    assert one.other.publish(dead, some_keys(500), [])
    one.membership.step()
    one.other.leave(dead)
    for _ in range(12):  # half an hour and some
        one.clock.advance(200.0)
        one.membership.step()
    assert not one.valkey.epochs
    assert one.membership.statistics().scrubbed == 500


def test_a_failing_follower_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    one = Steps()

    def fail() -> None:
        raise RuntimeError("mine")

    told: list[bool] = []
    one.membership.on_change(fail)
    one.membership.on_change(lambda: told.append(True))
    one.membership.step()
    assert told == [True]
    assert "mine" in caplog.text
