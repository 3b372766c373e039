"""A node as a member, and what it announces, with real stores and a real Valkey that is killed, held and emptied."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtide
from kvtide import config as configuration
from kvtide.block import BlockKey
from kvtide.events import BlockRemoved, BlockStored, EventsLost, Feed
from kvtide.index.index import ABSENT, SEALED, Index
from kvtide.index.work_slices import SLICE
from kvtide.peers.announcer import Announcer
from kvtide.peers.membership import Membership
from kvtide.store.store import Store
from kvtide.testing.clock import FakeClock
from kvtide.testing.directory import some_keys
from kvtide.testing.interface import until
from kvtide.testing.servers import ValkeyServer
from kvtide.testing.simulated_valkey import SimulatedLink, SimulatedValkey
from kvtide.tiers.peers.directory import BlockDirectory, open_directory
from kvtide.tiers.peers.directory_scripts import ITEM
from kvtide.tiers.peers.measurements import Measurement
from kvtide.tiers.shared.valkey_scripts import ScriptCall

LAYOUT = kvtide.Layout.attention(layers=1, heads=1, head_dim=8, block_tokens=16)
MODEL = kvtide.Model(LAYOUT, "membership")
LEASE = 1.5


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

    def held(self, keys: list[BlockKey], *nodes: Node) -> Callable[[], bool]:
        """Whether each of these blocks is said to be held by exactly these members, as they are numbered when it is
        called: one that has not joined yet, or has joined again, has another number."""

        def found() -> bool:
            numbers = {node.number for node in nodes}
            try:
                return 0 not in numbers and [set(some) for some in self.directory.holders(keys)] == [numbers] * len(
                    keys
                )
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
    until(b.held(keys, a))
    assert b.put(1) == keys
    until(a.held(keys, a, b))
    with a.store.session(MODEL) as session:
        session.drop(np.arange(4 * 16, dtype=np.uint32) + 100_000)
    until(a.held(keys, b))


def test_who_could_not_leave_knows_that_he_may_be_listed(server: ValkeyServer, nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    a.membership.close()
    assert a.membership.listed == ""
    server.hold()
    b.membership.close()
    assert "did not answer in time" in b.membership.listed
    server.resume()


def test_who_cannot_know_whether_he_has_joined_may_be_listed(server: ValkeyServer) -> None:
    with ExitStack() as stack:
        server.hold()
        stack.callback(server.resume)
        late = Node(stack, server, "host9:9411")
        until(lambda: bool(late.membership.problem))
        late.membership.close()
        assert "did not answer in time" in late.membership.listed


def test_what_was_stored_before_joining_is_announced(server: ValkeyServer, nodes: tuple[Node, Node]) -> None:
    with ExitStack() as stack:
        server.hold()
        late = Node(stack, server, "host9:9411")
        keys = late.put(7, blocks=50)
        server.resume()
        until(lambda: late.number > 0)
        until(nodes[0].held(keys, late))


def test_a_block_is_withdrawn_when_it_is_in_no_tier(server: ValkeyServer, tmp_path: Path) -> None:
    with ExitStack() as stack:
        nvme = {"path": str(tmp_path / "disk"), "budget": "64MiB", "segment": "4MiB"}
        node = Node(stack, server, "host7:9411", nvme=nvme)
        keys = node.put(1, blocks=8)
        assert node.store.flush()
        until(node.held(keys, node))
        for seed in range(2, 120):  # DRAM has 2 MiB: the blocks leave it, and stay on the disk
            node.put(seed, blocks=8)
        rows = node.store.index.rows(keys)
        assert not node.store.index.state[0][rows].any()
        assert node.store.index.state[1][rows].all()
        last = node.put(500)
        until(node.held(last, node))  # all events of before were handled
        until(node.held(keys, node))
        with node.store.session(MODEL) as session:
            session.drop(np.arange(8 * 16, dtype=np.uint32) + 100_000)
        until(node.held(keys))


def test_evicted_blocks_are_withdrawn(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    keys = a.put(1, blocks=8)
    until(b.held(keys, a))
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
        until(node.held(shown, node))
        assert node.directory.holders(hidden) == [()] * len(hidden)


def test_a_node_that_leaves_takes_its_entries_with_it(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    keys = a.put(1)
    until(b.held(keys, a))
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
    until(b.held(keys, a))
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
    until(b.held(keys + more, a))
    assert a.membership.statistics().epoch > epoch
    assert a.announcer.statistics().rebuilds >= 2


def test_lost_events_withdraw_everything_at_once(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    keys = a.put(1)
    until(b.held(keys, a))
    epoch = a.membership.statistics().epoch
    with a.store.index.lock:  # gone, and nobody is told
        rows = a.store.index.rows(keys[2:])
        kept = a.store.index.state[0][rows].copy()
        a.store.index.state[0][rows] = 0
    a.store.feed.publish([EventsLost(1)])
    until(lambda: b.held(keys[:2], a)() and b.held(keys[2:])())
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
    until(b.held(keys, a))
    if not (child := os.fork()):
        try:
            a.announcer.close()
            a.membership.close()
            good = a.membership.own is None and not a.membership.members()
        finally:
            os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert b.held(keys, a)()
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

    def lose_a_server(self, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
        """One that does not have the members answers every call with an error from now on."""
        away = (self.valkey.server_of(b"kvtide:default:{members}") + 1) % 3
        run = self.link.run

        def part(calls: Sequence[ScriptCall], timeout: float) -> list[Any]:
            if any(self.valkey.server_of(call.key) == away for call in calls):
                raise error
            return run(calls, timeout)

        monkeypatch.setattr(self.link, "run", part)


class Announcing(Steps):
    """With an announcer, and an index that the test fills."""

    def __init__(self, lease: float = 9.0) -> None:
        super().__init__(lease)
        self.index, self.feed = Index(2), Feed()
        self.announcer = Announcer(self.index, self.feed, self.membership._directory, self.membership, clock=self.clock)

    def put(self, *keys: BlockKey) -> None:
        for key in keys:
            with self.index.lock:
                row = self.index.row(key) or self.index.add(key, b"\0" * 32, 0)
                self.index.identity[row], self.index.state[0][row] = 7, SEALED
        self.feed.publish([BlockStored("dram", keys)])

    def found(self, keys: Sequence[BlockKey]) -> int:
        """How many of the blocks another node finds."""
        return sum(map(bool, self.other.holders(keys)))


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


def test_what_was_measured_of_members_is_said_with_each_renewal() -> None:
    one, measured = Steps(), dict[str, Measurement]()
    one.membership = Membership(
        BlockDirectory(one.link), b"m" * 16, "host7:9411", lease=9.0, measured=lambda: measured, clock=one.clock
    )
    other = one.other.join(b"o" * 16, "host8:9411", 60.0)
    one.membership.step()
    own = one.membership.own
    assert own is not None
    assert one.other.measurements() == {}
    measured |= {
        "host8:9411": Measurement(3.0, 0.5),
        "gone:9411": Measurement(1.0, 1.0),
        own.address: Measurement(9, 9),
    }
    one.clock.advance(3.0)
    one.membership.step()
    assert one.other.measurements() == {own.epoch: {other.epoch: Measurement(3.0, 0.5)}}
    again = one.other.join(b"o" * 16, "host8:9411", 60.0)  # another epoch, at the same address
    one.clock.advance(3.0)
    one.membership.step()
    assert one.other.measurements() == {own.epoch: {again.epoch: Measurement(3.0, 0.5)}}


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


def test_two_nodes_with_one_address_do_not_replace_each_other_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    one = Steps()
    two = Membership(one.other, b"n" * 16, "host7:9411", lease=9.0, clock=one.clock)
    one.membership.step()
    two.step()
    for _ in range(20):
        one.clock.advance(1.0)
        one.membership.step()
        two.step()
        assert own(two)
    assert not own(one.membership)
    assert two.statistics().joins == one.membership.statistics().joins == 1
    (said,) = [record.message for record in caplog.records if record.levelname == "ERROR"]
    for text in ("host7:9411", (b"m" * 16).hex(), (b"n" * 16).hex()):
        assert text in said
        assert text in one.membership.problem
    two.close()
    one.clock.advance(1.0)
    one.membership.step()
    assert own(one.membership)
    assert one.membership.problem == ""


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


def test_no_error_ends_the_threads(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """They try again, and say it once."""
    one = Announcing()
    (key,) = some_keys(1)
    run = one.link.run

    def fail(*_: Any) -> Any:
        raise OverflowError("mine")

    monkeypatch.setattr(one.link, "run", fail)
    for _ in range(3):
        assert one.membership.step() <= 9.0 / 12
        one.clock.advance(1.0)
    assert one.membership.statistics().failures == 3
    assert caplog.text.count("cannot be used: Valkey: ") == 1, "where it is"
    monkeypatch.setattr(one.link, "run", run)
    one.membership.step()
    assert own(one.membership)
    one.put(key)
    monkeypatch.setattr(one.link, "run", fail)
    for _ in range(3):
        assert one.announcer.step() < 100
    assert one.announcer.statistics().failures == 3
    assert caplog.text.count("cannot be announced in the directory: ") == 1
    monkeypatch.setattr(one.link, "run", run)
    one.announcer.step()
    assert one.found([key]) == 1


def test_events_of_a_time_without_a_lease_are_announced() -> None:
    """The lease is believed to have ended, a block is stored, and then the lease turns out to have been renewed: nobody
    wakes the announcer, because its backlog was never empty and the epoch is the same."""
    one = Announcing()
    keys = some_keys(2)
    one.put(keys[0])
    one.membership.step()
    for _ in range(3):
        one.announcer.step()
    assert one.found(keys) == 1
    lost, one.membership._own = one.membership._own, None
    one.put(keys[1])
    assert one.announcer.step() <= 1.0, "it looks again soon"
    one.membership._own = lost
    one.announcer.step()
    assert one.found(keys) == 2


def test_an_epoch_that_was_given_up_is_not_taken_back() -> None:
    """Not even if it is given up at the moment that its renewal is noted."""
    asked: list[threading.Thread] = []

    class Watched(Membership):
        watching = False
        kept: Any = None

        @property
        def _own(self) -> Any:
            found = self.kept
            if self.watching:
                self.watching = False
                asked.append(threading.Thread(target=self.rejoin, args=(found[0].epoch,)))
                asked[0].start()
                asked[0].join(0.1)  # as long as it waits for the lock
            return found

        @_own.setter
        def _own(self, value: Any) -> None:
            self.kept = value

    one = Steps()
    member = Watched(BlockDirectory(one.link), b"w" * 16, "host9:9411", lease=9.0, clock=one.clock)
    member.step()
    before = member.statistics().epoch
    one.clock.advance(3.0)
    run = one.link.run

    def renewed(calls: Sequence[ScriptCall], timeout: float) -> list[Any]:
        replies = run(calls, timeout)
        member.watching = calls[-1].script.name == "known"
        return replies

    one.link.run = renewed  # type: ignore[method-assign]
    member.step()
    asked[0].join()
    one.link.run = run  # type: ignore[method-assign]
    one.clock.advance(3.0)
    member.step()
    assert member.statistics().epoch > before


def test_only_the_epoch_that_is_meant_is_given_up() -> None:
    one = Steps()
    one.membership.step()
    first = one.membership.statistics().epoch
    one.membership.rejoin(first)
    one.clock.advance(3.0)
    one.membership.step()
    second = one.membership.statistics().epoch
    assert second > first
    one.membership.rejoin(first)
    assert one.membership.statistics().epoch == second


def test_who_has_given_up_an_epoch_leaves_all_the_same() -> None:
    one = Steps()
    one.membership.step()
    one.membership.rejoin(one.membership.statistics().epoch)
    one.membership.close()
    assert not one.other.members()


def test_a_partition_that_is_away_ends_no_membership(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Steps()
    one.membership.step()
    newcomer = Membership(BlockDirectory(one.link), b"n" * 16, "host9:9411", lease=9.0, clock=one.clock)
    one.lose_a_server(monkeypatch, TimeoutError(errno.ETIMEDOUT, "down"))
    epoch = one.membership.statistics().epoch
    for _ in range(10):
        one.clock.advance(3.0)
        one.membership.step()
        newcomer.step()
        assert one.membership.statistics().epoch == epoch
        assert one.membership.own in newcomer.members().values(), "who cannot join knows the others"


def test_who_has_joined_in_part_may_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server with the members takes a newcomer in, another one refuses every connection."""
    one = Steps()
    one.membership.step()

    def newcomer(number: int) -> Membership:
        return Membership(
            BlockDirectory(one.link), b"%d" % number * 16, f"host{number}:9411", lease=9.0, clock=one.clock
        )

    one.lose_a_server(monkeypatch, ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"))
    soon, late = newcomer(5), newcomer(6)
    soon.step()
    late.step()
    one.clock.advance(8.0)
    one.membership.step()
    assert {"host5:9411", "host6:9411"} <= {member.address for member in one.membership.members().values()}
    soon.close()
    assert "Connection refused" in soon.listed
    one.clock.advance(2.0)
    late.close()
    assert late.listed == ""


def test_scrubbing_does_not_outlast_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer takes a while, and there are hundreds of buckets to visit."""
    one = Steps(lease=9.0)
    run = one.link.run

    def slow(calls: Sequence[ScriptCall], timeout: float) -> list[Any]:
        one.clock.advance(0.6)
        return run(calls, timeout)

    monkeypatch.setattr(one.link, "run", slow)
    for _ in range(20):
        one.clock.advance(one.membership.step())
        assert own(one.membership)
    assert one.membership.statistics().joins == 1


class Answers:
    """Stands between a node and its Valkey: answers after a while, or says no."""

    def __init__(self, one: Steps) -> None:
        self.run, self.clock = one.link.run, one.clock
        one.link.run = self  # type: ignore[method-assign]
        self.delay = 0.0
        self.refusal: OSError | None = None
        self.blocks: list[int] = []
        """Blocks in each publish."""

    def __call__(self, calls: Sequence[ScriptCall], timeout: float) -> list[Any]:
        self.clock.advance(self.delay)
        mine = [call for call in calls if call.script.name == "publish"]
        if mine:
            self.blocks.append(sum(len(call.arguments[4]) for call in mine) // ITEM)
            if self.refusal is not None:
                raise self.refusal
        return self.run(calls, timeout)


def test_a_node_leaves_a_busy_server_time() -> None:
    """It pauses for as long as a publish took; after a timeout it sends less, later and later; and sends all."""
    one = Announcing(lease=100_000.0)
    one.membership.step()
    keys = some_keys(2000)
    one.put(*keys)
    server = Answers(one)
    server.delay, server.refusal = 0.5, TimeoutError(errno.ETIMEDOUT, "busy")
    delays = [one.announcer.step() for _ in range(8)]
    assert max(delays[:2]) <= 2.0
    assert 7.0 < min(delays[5:]) <= max(delays) <= 15.0
    assert server.blocks[0] == 2000
    assert server.blocks[-1] <= 64
    server.refusal = None
    while one.found(keys) < 2000:
        assert one.announcer.step() >= 0.5
    assert max(server.blocks[8:]) > 100, "batches grow again"


def test_nodes_do_not_visit_all_rows_at_the_same_moment() -> None:
    dues = set()
    for _ in range(3):
        one = Announcing()
        one.membership.step()
        dues.add(one.announcer.step())
    assert len(dues) == 3
    assert max(dues) <= 3600.0


def test_one_step_visits_some_of_the_rows() -> None:
    one = Announcing()
    one.membership.step()
    one.index._keys = [None] * 100_000
    one.index._grow(100_001)
    assert one.announcer.step() == 0.0
    left = one.announcer.statistics().rows_left
    assert 0 < left <= 100_000 - 64 * SLICE + 2
    assert one.announcer.step() == 0.0
    assert one.announcer.statistics().rows_left == left - 64 * SLICE
    while one.announcer.step() == 0.0:
        pass
    assert one.announcer.statistics().rows_left == 0


def test_on_a_full_server_removals_are_announced() -> None:
    """What there is no room for does not stand in their way."""
    one = Announcing(lease=100_000.0)
    one.membership.step()
    old, new = some_keys(50), some_keys(50)
    one.put(*old)
    while one.found(old) < 50:
        one.announcer.step()
    server = Answers(one)
    server.refusal = OSError(errno.ENOSPC, "full")
    one.put(*new)
    one.announcer.step()
    for key in old:
        with one.index.lock:
            one.index.state[0][one.index.row(key)] = ABSENT
    one.feed.publish([BlockRemoved("dram", tuple(old), "evicted")])
    for _ in range(5):
        one.announcer.step()
    assert one.found(old) == 0
    server.refusal = None
    one.clock.advance(3600.0)
    while one.found(new) < 50:
        assert one.announcer.step() < 3600
