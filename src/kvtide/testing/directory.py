"""The contract of a directory of blocks: for a real Valkey, a cluster of them, and the simulated one.

Derive from ``DirectoryContract`` and give ``runner`` and ``pass_time``.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvtide.block import BlockKey
from kvtide.tiers.peers.directory import AddressTaken, BlockDirectory
from kvtide.tiers.peers.directory_scripts import BUCKETS, HOLDERS, PARTITIONS
from kvtide.tiers.peers.measurements import Measurement
from kvtide.tiers.peers.members import Member
from kvtide.tiers.shared.valkey_scripts import ScriptCall, ScriptRunner

__all__ = ["DirectoryContract", "some_keys"]

_LEASE = 60.0
_SHORT = 0.3


def some_keys(count: int, group: bytes = b"full") -> list[BlockKey]:
    """Keys of blocks that nobody else has."""
    return [BlockKey(secrets.token_bytes(32) + group) for _ in range(count)]


class _Recording:
    """Keeps the last calls."""

    def __init__(self, runner: ScriptRunner) -> None:
        self._runner = runner
        self.last: Sequence[ScriptCall] = ()

    def run(self, calls: Sequence[ScriptCall], timeout: float) -> list[Any]:
        self.last = calls
        return self._runner.run(calls, timeout)

    def close(self) -> None:
        self._runner.close()


class DirectoryContract(ABC):
    """What every directory does."""

    @abstractmethod
    def runner(self) -> ScriptRunner:
        """A way to the server: another one at each call, to the same server."""

    @abstractmethod
    def pass_time(self, seconds: float) -> None:
        """Let that much time pass, at the server."""

    @pytest.fixture
    def directories(self) -> Iterator[tuple[BlockDirectory, BlockDirectory]]:
        """Two clients of one directory, which is new."""
        cluster = secrets.token_hex(8)
        both = (
            BlockDirectory(self.runner(), cluster=cluster, timeout=30),
            BlockDirectory(self.runner(), cluster=cluster, timeout=30),
        )
        yield both
        for one in both:
            one.close()

    def test_members_see_each_other(self, directories: tuple[BlockDirectory, BlockDirectory]) -> None:
        a, b = directories
        assert a.members() == {}
        first = a.join(b"a" * 16, "host7:9411", _LEASE)
        second = b.join(b"b" * 16, "host8:9411", _LEASE)
        assert first.number != second.number
        assert second.epoch > first.epoch
        for one in (a, b):
            assert dict(one.members()) == {first.number: first, second.number: second}
        left = a.leases().left
        assert left.keys() == {first, second}
        assert all(0 < seconds <= _LEASE for seconds in left.values())
        a.leave(first)
        assert dict(b.members()) == {second.number: second}
        third = a.join(b"c" * 16, "host9:9411", _LEASE)
        assert third.number == first.number
        assert third.epoch > second.epoch

    def test_what_a_member_has_measured_is_there_until_its_lease_ends(
        self, directories: tuple[BlockDirectory, BlockDirectory]
    ) -> None:
        a, b = directories
        assert a.measurements() == {}
        one, two = a.join(b"a" * 16, "a:1", _LEASE), b.join(b"b" * 16, "b:1", _SHORT)
        rows = {one.epoch: {two.epoch: Measurement(1.5e9, 0.25)}, two.epoch: {one.epoch: Measurement(2.0, 0.0)}}
        assert a.report(one, {two.epoch: Measurement(1.0, 1.0), 7: Measurement(1.0, 1.0)})
        assert a.report(one, rows[one.epoch]), "the earlier row is replaced"
        if b.report(two, rows[two.epoch]) and (found := a.measurements()) and two in a.leases().left:
            assert found == rows  # a real server may have been too slow
        self.pass_time(_SHORT + 0.1)
        assert not b.report(two, rows[two.epoch])
        assert b.measurements() == {one.epoch: rows[one.epoch]}
        a.leave(one)
        assert b.measurements() == {}

    def test_what_is_published_is_found(self, directories: tuple[BlockDirectory, BlockDirectory]) -> None:
        a, b = directories
        keys = some_keys(700)
        one, two = a.join(b"a" * 16, "a:1", _LEASE), b.join(b"b" * 16, "b:1", _LEASE)
        assert a.publish(one, keys[:400], [])
        assert b.publish(two, keys[300:600], [])
        expected = [(one.number,)] * 300 + [(one.number, two.number)] * 100 + [(two.number,)] * 200 + [()] * 100
        for reader in (a, b):
            assert [tuple(sorted(found)) for found in reader.holders(keys)] == expected
        assert a.counts().entries == 600
        assert a.counts().members == 2
        assert a.publish(one, keys[600:], keys[:350])
        gone = [tuple(n for n in found if n != one.number) for found in expected[:350]]
        assert [tuple(sorted(found)) for found in b.holders(keys)] == gone + expected[350:600] + [(one.number,)] * 100

    def test_to_publish_twice_changes_nothing(self, directories: tuple[BlockDirectory, BlockDirectory]) -> None:
        a, _ = directories
        keys = some_keys(50)
        member = a.join(b"a" * 16, "a:1", _LEASE)
        for _ in range(2):
            assert a.publish(member, keys, [])
        assert a.holders(keys) == [(member.number,)] * 50
        for _ in range(2):
            assert a.publish(member, [], keys)
        assert a.holders(keys) == [()] * 50
        assert a.counts().entries == 0

    def test_a_late_message_changes_nothing(self) -> None:
        """The network delivers a publish once more, after the next one."""
        link = _Recording(self.runner())
        directory = BlockDirectory(link, cluster=secrets.token_hex(8), timeout=30)
        keys = some_keys(50)
        member = directory.join(b"a" * 16, "a:1", _LEASE)
        said = []
        for stored, removed in ((keys, []), ([], keys), (keys[:20], [])):
            assert directory.publish(member, stored, removed)
            said.append(link.last)
        for late in (said[0], said[1], said[2], said[0]):
            link.run(late, 30)
            assert directory.holders(keys) == [(member.number,)] * 20 + [()] * 30
            assert directory.renew(member, _LEASE), "nothing was lost"
        directory.close()

    def test_nothing_to_ask_and_nothing_to_say(self, directories: tuple[BlockDirectory, BlockDirectory]) -> None:
        a, _ = directories
        assert a.holders([]) == []
        assert a.publish(a.join(b"a" * 16, "a:1", _LEASE), [], [])

    def test_groups_of_one_digest_are_different_blocks(
        self, directories: tuple[BlockDirectory, BlockDirectory]
    ) -> None:
        a, _ = directories
        full = some_keys(20)
        window = [BlockKey(key[:32] + b"window") for key in full]
        member = a.join(b"a" * 16, "a:1", _LEASE)
        assert a.publish(member, full, [])
        assert a.holders([*window, *full]) == [()] * 20 + [(member.number,)] * 20

    def test_a_lease_that_ends_takes_all_entries_with_it(
        self, directories: tuple[BlockDirectory, BlockDirectory]
    ) -> None:
        a, b = directories
        keys = some_keys(20)
        dying, living = a.join(b"a" * 16, "a:1", _SHORT), b.join(b"b" * 16, "b:1", _LEASE)
        a.publish(dying, keys, [])
        b.publish(living, keys[:10], [])
        self.pass_time(_SHORT + 0.1)
        assert b.holders(keys) == [(living.number,)] * 10 + [()] * 10
        assert dict(b.members()) == {living.number: living}
        assert not a.renew(dying, _LEASE)
        assert not a.publish(dying, keys, [])
        assert not a.renew(dying, _LEASE), "a lease never comes back"
        assert b.holders(keys) == [(living.number,)] * 10 + [()] * 10

    def test_a_renewed_lease_does_not_end(self, directories: tuple[BlockDirectory, BlockDirectory]) -> None:
        a, b = directories
        member = a.join(b"a" * 16, "a:1", _SHORT)
        if a.renew(member, _LEASE):  # a real server may have been too slow
            self.pass_time(_SHORT + 0.1)
            assert dict(b.members()) == {member.number: member}

    def test_an_older_incarnation_is_not_believed(self, directories: tuple[BlockDirectory, BlockDirectory]) -> None:
        a, b = directories
        keys = some_keys(20)
        old = a.join(b"a" * 16, "a:1", _LEASE)
        a.publish(old, keys, [])
        new = b.join(b"b" * 16, "a:1", _LEASE)  # the same address: it was restarted
        assert new.epoch > old.epoch
        assert b.holders(keys) == [()] * 20
        assert not a.publish(old, keys, [])
        assert not a.renew(old, _LEASE)
        a.leave(old)  # too late, and no harm
        assert dict(a.members()) == {new.number: new}
        again = b.join(b"b" * 16, "a:1", _LEASE)  # the same name: it has lost its lease, as far as it knows
        assert again.epoch > new.epoch
        assert dict(a.members()) == {again.number: again}

    def test_who_joins_again_does_not_take_the_place_of_another_node(
        self, directories: tuple[BlockDirectory, BlockDirectory]
    ) -> None:
        """It has lost its lease to a node with the same address, which is alive."""
        a, b = directories
        one = a.join(b"a" * 16, "a:1", _LEASE)
        two = b.join(b"b" * 16, "a:1", _LEASE)
        assert two.number == one.number
        with pytest.raises(AddressTaken) as failure:
            a.join(one.name, one.address, _LEASE, again=True)
        for text in ("a:1", one.name.hex(), two.name.hex()):
            assert text in str(failure.value)
        assert dict(a.members()) == {two.number: two}
        again = b.join(two.name, two.address, _LEASE, again=True)
        assert again.epoch > two.epoch, "it is its own address"
        b.leave(again)
        third = a.join(one.name, one.address, _LEASE, again=True)
        assert dict(b.members()) == {third.number: third}

    def test_scrubbing_frees_what_the_dead_have_left(self, directories: tuple[BlockDirectory, BlockDirectory]) -> None:
        a, b = directories
        keys = some_keys(300)
        dead, alive = a.join(b"a" * 16, "a:1", _LEASE), b.join(b"b" * 16, "b:1", _LEASE)
        a.publish(dead, keys[:200], [])
        b.publish(alive, keys[100:], [])
        a.leave(dead)
        step = 5000
        assert sum(b.scrub(step) for _ in range(-(-PARTITIONS * BUCKETS // step))) == 200
        assert b.counts().entries == 200
        assert b.holders(keys) == [()] * 100 + [(alive.number,)] * 200
        assert b.publish(alive, [], keys)
        assert b.counts().entries == 0

    def test_an_entry_has_few_holders(self, directories: tuple[BlockDirectory, BlockDirectory]) -> None:
        """A block that everybody has must not take the compact encoding from its bucket."""
        a, b = directories
        keys = some_keys(3)
        members: list[Member] = []
        for i in range(HOLDERS + 5):
            members.append(a.join(bytes([i]) * 16, f"host{i}:1", _LEASE))
            assert a.publish(members[-1], keys, [])
        for found in b.holders(keys):
            assert set(found) == {member.number for member in members[5:]}

    def test_the_dead_make_room_for_holders_first(self, directories: tuple[BlockDirectory, BlockDirectory]) -> None:
        """A node that joins again and again does not replace one that is alive."""
        a, b = directories
        keys = some_keys(3)
        alive = a.join(b"a" * 16, "a:1", _LEASE)
        assert a.publish(alive, keys, [])
        for _ in range(HOLDERS - 1):
            assert b.publish(b.join(b"b" * 16, "b:1", _LEASE), keys, [])
        again = b.join(b"b" * 16, "b:1", _LEASE)
        assert b.publish(again, keys, [])
        for found in a.holders(keys):
            assert set(found) == {alive.number, again.number}

    def test_clusters_do_not_see_each_other(self, directories: tuple[BlockDirectory, BlockDirectory]) -> None:
        a, _ = directories
        other = BlockDirectory(self.runner(), cluster=secrets.token_hex(8), timeout=30)
        keys = some_keys(10)
        a.publish(a.join(b"a" * 16, "a:1", _LEASE), keys, [])
        assert other.members() == {}
        assert other.holders(keys) == [()] * 10
        other.close()

    def test_what_may_not_be_joined(self, directories: tuple[BlockDirectory, BlockDirectory]) -> None:
        a, _ = directories
        with pytest.raises(ValueError, match="15 bytes"):
            a.join(b"a" * 15, "a:1", _LEASE)
