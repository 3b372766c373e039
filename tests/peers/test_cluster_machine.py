"""Membership, directory and announcers of a small cluster against a model, on a network and a Valkey that fail.

Everything is the real code but for Valkey and the way to it: ``kvtide.testing.simulated_valkey``, whose scripts hold
the same contract as those of a real server (tests/peers/test_directory.py). Threads are replaced by their steps. Each
node has a clock that runs at a speed of its own.

The model knows what Valkey *ran*: who joined and renewed until when. Whatever happened on the network, a lookup must
not name a member

- whose lease has ended, by the last message of it that was run, at Valkey's time: so a dead node is gone within it;
- that was followed by a later one of the same node or at the same address, or that has left.

After a quiet time, in which every message arrives, all nodes find exactly what each of them holds.
"""

from __future__ import annotations

import copy
import secrets
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtide.block import BlockKey
from kvtide.events import BlockRemoved, BlockStored, EventsLost, Feed
from kvtide.index.index import ABSENT, DRAM, PENDING, SEALED, Index
from kvtide.peers.announcer import Announcer
from kvtide.peers.membership import Membership
from kvtide.store.partition import NVME
from kvtide.testing.clock import FakeClock
from kvtide.testing.simulated_valkey import Fate, SimulatedLink, SimulatedValkey
from kvtide.tiers.peers.directory import BlockDirectory
from kvtide.tiers.peers.directory_scripts import BUCKETS, PARTITIONS
from kvtide.tiers.shared.valkey_scripts import ScriptCall

LEASE = 9.0
NODES, BLOCKS, SERVERS = 4, 24, 3
KEYS = [BlockKey(secrets.token_bytes(32) + b"full") for _ in range(BLOCKS)]
TIERS = {"dram": DRAM, "nvme": NVME}


class Node:
    """One incarnation of a node."""

    def __init__(self, where: int, valkey: SimulatedValkey, late: list[ScriptCall], speed: float) -> None:
        self.address = f"host{where}:9411"
        self.name = secrets.token_bytes(16)
        self.speed = speed
        self.clock = FakeClock()
        self.index = Index(2)
        self.feed = Feed()
        self.link = SimulatedLink(valkey, late)
        self.directory = BlockDirectory(self.link, cluster="machine")
        self.membership = Membership(self.directory, self.name, self.address, lease=LEASE, clock=self.clock)
        self.announcer = Announcer(self.index, self.feed, self.directory, self.membership, clock=self.clock, backlog=40)

    def put(self, key: BlockKey, tier: str) -> None:
        """A block is complete in a tier."""
        with self.index.lock:
            row = self.index.row(key) or self.index.add(key, b"\0" * 32, 0)
            self.index.identity[row] = 7
            self.index.state[TIERS[tier]][row] = SEALED
        self.feed.publish([BlockStored(tier, (key,))])

    def take(self, key: BlockKey, tier: str) -> None:
        """A block leaves a tier, if it is there."""
        with self.index.lock:
            row = self.index.row(key)
            if not row or self.index.state[TIERS[tier]][row] != SEALED:
                return
            self.index.state[TIERS[tier]][row] = ABSENT
            self.index.retire(row)
        self.feed.publish([BlockRemoved(tier, (key,), "evicted")])

    @property
    def held(self) -> set[BlockKey]:
        rows = [self.index.row(key) for key in KEYS]
        return {
            key for key, row in zip(KEYS, rows, strict=True) if any(state[row] == SEALED for state in self.index.state)
        }

    def work(self, steps: int = 1) -> None:
        """What its threads do."""
        self.membership.step()
        for _ in range(steps):
            self.announcer.step()


@dataclass
class Truth:
    """What Valkey ran, about members. It forgets what the server of the members forgets, but not ``ends``."""

    latest: dict[bytes, int] = field(default_factory=dict)
    """By name and by address: the last epoch."""
    gone: set[int] = field(default_factory=set)
    """Epochs that have left."""


class Cluster(RuleBasedStateMachine):
    @initialize(speeds=st.lists(st.sampled_from([0.9, 0.99, 1.0, 1.01, 1.1]), min_size=NODES, max_size=NODES))
    def begin(self, speeds: list[float]) -> None:
        self.clock = FakeClock(1_800_000_000.0)  # later than the time from which epochs count
        self.valkey = SimulatedValkey(self.clock, SERVERS, self.ran)
        self.late: list[ScriptCall] = []
        self.truth, self.saved = Truth(), Truth()
        self.ends: dict[int, float] = {}
        """Until when each epoch may be believed, at Valkey's time."""
        self.speeds = speeds
        self.nodes: list[Node | None] = [Node(i, self.valkey, self.late, speeds[i]) for i in range(NODES)]
        self.members = self.valkey.server_of(b"kvtide:machine:{members}")
        self.observer = BlockDirectory(SimulatedLink(self.valkey, []), cluster="machine")
        for i, node in enumerate(self.running):
            for key in KEYS[i::2]:
                node.put(key, "nvme" if i % 2 else "dram")
        self.work_all(3)

    def ran(self, call: ScriptCall, reply: Any) -> None:
        now, name = self.clock.time(), call.script.name
        if name == "join" and reply[0]:
            self.truth.latest[call.arguments[0]] = self.truth.latest[call.arguments[1]] = reply[1]
            assert reply[1] not in self.ends, "an epoch was given twice"
            self.ends[reply[1]] = now + int(call.arguments[2]) / 1000
        elif name == "renew" and reply:
            epoch = int(call.arguments[0])
            assert now < self.ends[epoch], "a lease that had ended was renewed"
            self.ends[epoch] = now + int(call.arguments[1]) / 1000
        elif name == "leave":
            self.truth.gone.add(int(call.arguments[0]))

    @property
    def running(self) -> list[Node]:
        return [node for node in self.nodes if node is not None]

    def one(self, where: int) -> Node:
        return self.running[where % len(self.running)]

    # -- blocks -------------------------------------------------------------------------------------------

    @rule(where=st.integers(0, NODES - 1), block=st.integers(0, BLOCKS - 1), tier=st.sampled_from(["dram", "nvme"]))
    def store(self, where: int, block: int, tier: str) -> None:
        self.one(where).put(KEYS[block], tier)

    @rule(where=st.integers(0, NODES - 1), tier=st.sampled_from(["dram", "nvme"]))
    def store_all(self, where: int, tier: str) -> None:
        for key in KEYS:
            self.one(where).put(key, tier)

    @rule(where=st.integers(0, NODES - 1), block=st.integers(0, BLOCKS - 1), tier=st.sampled_from(["dram", "nvme"]))
    def remove(self, where: int, block: int, tier: str) -> None:
        self.one(where).take(KEYS[block], tier)

    @rule(where=st.integers(0, NODES - 1), quiet=st.booleans())
    def lose_events(self, where: int, quiet: bool) -> None:
        """A burst of removals, which nobody is told of."""
        node = self.one(where)
        node.work(3)
        feed, node.feed = node.feed, Feed()
        for key in KEYS[::2]:
            for tier in TIERS:
                node.take(key, tier)
        node.feed = feed
        feed.publish([EventsLost(1)])
        if quiet:
            self.be_quiet()

    @rule(where=st.integers(0, NODES - 1), block=st.integers(0, BLOCKS - 1))
    def begin_to_write(self, where: int, block: int) -> None:
        """A block that is not complete is not published."""
        node = self.one(where)
        with node.index.lock:
            if not node.index.row(KEYS[block]):
                row = node.index.add(KEYS[block], b"\0" * 32, 0)
                node.index.identity[row] = 7
                node.index.state[DRAM][row] = PENDING

    # -- time and the network -----------------------------------------------------------------------------

    @rule(where=st.integers(0, NODES - 1), steps=st.integers(1, 4))
    def work(self, where: int, steps: int) -> None:
        self.one(where).work(steps)

    @rule(steps=st.integers(1, 3))
    def work_all(self, steps: int) -> None:
        for node in self.running:
            node.work(steps)

    @rule(where=st.integers(0, NODES - 1), block=st.integers(0, BLOCKS - 1), stored=st.booleans(), quiet=st.booleans())
    def publish_late(self, where: int, block: int, stored: bool, quiet: bool) -> None:
        """News of a block arrive after later news of the same block."""
        node, key = self.one(where), KEYS[block]
        node.work(3)
        for there, fates in ((stored, [Fate.LATE] * 3), (not stored, [])):
            if there:
                node.put(key, "dram")
            else:
                for tier in TIERS:
                    node.take(key, tier)
            node.link.fates = fates
            node.announcer.step()
        self.deliver_all()
        if quiet:
            self.be_quiet()

    @rule(seconds=st.sampled_from([0.01, 0.5, 1.0, 3.0, 3.5, LEASE + 0.5]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for node in self.running:
            node.clock.advance(seconds * node.speed)

    @rule(where=st.integers(0, NODES - 1), fates=st.lists(st.sampled_from(list(Fate)), min_size=1, max_size=8))
    def fail_messages(self, where: int, fates: list[Fate]) -> None:
        self.one(where).link.fates = list(fates)

    @rule(where=st.integers(0, NODES - 1))
    def cut(self, where: int) -> None:
        link = self.one(where).link
        link.cut = not link.cut

    @precondition(lambda self: self.late)
    @rule(which=st.integers(0, 1 << 16))
    def deliver(self, which: int) -> None:
        """A late message arrives, in any order; perhaps long after its sender has died."""
        self.valkey.run(self.late.pop(which % len(self.late)))

    @rule()
    def deliver_all(self) -> None:
        while self.late:
            self.valkey.run(self.late.pop())

    @precondition(lambda self: self.late)
    @rule()
    def lose_late(self) -> None:
        self.late.clear()

    # -- restarts -----------------------------------------------------------------------------------------

    @rule(where=st.integers(0, NODES - 1), keep=st.booleans())
    def restart(self, where: int, keep: bool) -> None:
        """A node dies, and a new incarnation starts, with what was on its disk."""
        old = self.nodes[where]
        self.nodes[where] = node = Node(where, self.valkey, self.late, self.speeds[where])
        if old is not None and keep:
            for key in KEYS:
                if old.index.state[NVME][old.index.row(key)] == SEALED:
                    node.put(key, "nvme")

    @precondition(lambda self: len(self.running) > 1)
    @rule(where=st.integers(0, NODES - 1))
    def die(self, where: int) -> None:
        node = self.one(where)
        self.nodes[self.nodes.index(node)] = None

    @precondition(lambda self: len(self.running) > 1)
    @rule(where=st.integers(0, NODES - 1))
    def stop(self, where: int) -> None:
        node = self.one(where)
        node.announcer.close()
        node.membership.close()
        self.nodes[self.nodes.index(node)] = None

    @rule(server=st.integers(0, SERVERS - 1))
    def lose_server(self, server: int) -> None:
        self.advance(1.0)  # a restart takes time
        self.valkey.lose(server)
        if server == self.members:
            self.truth = Truth()

    @rule()
    def save(self) -> None:
        self.valkey.save()
        self.saved = copy.deepcopy(self.truth)

    @rule(server=st.integers(0, SERVERS - 1))
    def fail_over(self, server: int) -> None:
        self.advance(1.0)
        self.valkey.roll_back(server)
        if server == self.members:
            self.truth = copy.deepcopy(self.saved)

    @rule(
        server=st.integers(0, SERVERS - 1),
        where=st.integers(0, NODES - 1),
        block=st.integers(0, BLOCKS - 1),
        quiet=st.booleans(),
    )
    def fail_over_between_publishes(self, server: int, where: int, block: int, quiet: bool) -> None:
        """A replica has not heard of a publish that was acknowledged, but hears of the next."""
        node = self.one(where)
        node.work(3)
        self.save()
        for key in KEYS[block:]:
            node.put(key, "dram")
        node.announcer.step()
        self.fail_over(server)
        for key in KEYS[:block]:
            node.put(key, "nvme")
        node.announcer.step()
        if quiet:
            self.be_quiet()

    @rule(where=st.integers(0, NODES - 1), buckets=st.sampled_from([1, 1000, PARTITIONS * BUCKETS]))
    def scrub(self, where: int, buckets: int) -> None:
        try:
            self.one(where).directory.scrub(buckets)
        except OSError:
            return

    # -- what must hold -----------------------------------------------------------------------------------

    @rule(where=st.integers(0, NODES - 1))
    def look_up(self, where: int) -> None:
        try:
            self.check(self.one(where).directory)
        except OSError:
            return

    @invariant()
    def nobody_is_believed_wrongly(self) -> None:
        if hasattr(self, "observer"):
            self.check(self.observer)

    def check(self, directory: BlockDirectory) -> None:
        found = directory.holders(KEYS)
        known = directory.members()
        now = self.clock.time()
        for member in known.values():
            assert now < self.ends[member.epoch], "a lease has ended"
            assert member.epoch not in self.truth.gone, "it has left"
            for identity in (member.name, member.address.encode()):
                assert self.truth.latest.get(identity, 0) <= member.epoch, "an older incarnation is believed"
        assert {number for numbers in found for number in numbers} <= known.keys()

    @invariant()
    def no_snapshot_is_older_than_its_leases(self) -> None:
        """A node without contact believes nobody for longer than a lease, by its own clock."""
        for node in self.running if hasattr(self, "nodes") else []:
            slowest = min(1.0, node.speed)
            for member in node.membership.members().values():
                assert self.clock.time() <= self.ends[member.epoch] + LEASE * (1 / slowest - 1) + 0.001

    @rule()
    def be_quiet(self) -> None:
        """All messages arrive for two leases: then everything is found, and nothing else."""
        self.deliver_all()
        for node in self.running:
            node.link.cut, node.link.fates = False, []
        for _ in range(20):
            self.clock.advance(LEASE / 9)
            for node in self.running:
                node.clock.advance(LEASE / 9 * node.speed)
                node.work(6)
        numbers = {}
        for node in self.running:
            assert node.membership.own is not None
            numbers[node.membership.own.number] = node
        assert len(numbers) == len(self.running)
        held = {number: node.held for number, node in numbers.items()}
        for node in self.running:
            known = node.membership.members()
            assert {number: member.name for number, member in known.items()} == {
                number: other.name for number, other in numbers.items()
            }
            for key, found in zip(KEYS, node.directory.holders(KEYS), strict=True):
                assert set(found) == {number for number, blocks in held.items() if key in blocks}
        self.running[0].directory.scrub(PARTITIONS * BUCKETS)
        assert self.valkey.epochs <= {node.membership.own.epoch for node in self.running if node.membership.own}

    def teardown(self) -> None:
        if hasattr(self, "nodes"):
            self.be_quiet()


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Cluster,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
            print_blob=True,
        ),
    )


def test_a_cluster_that_fails_in_every_way() -> None:
    run(20, 30)


@pytest.mark.long
def test_a_cluster_that_fails_in_every_way_for_long() -> None:
    run(300, 100)
