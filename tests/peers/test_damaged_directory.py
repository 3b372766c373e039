"""What another program, or a hostile one, has written into the directory's Valkey."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator

import pytest

from kvtide.block import BlockKey
from kvtide.testing.directory import some_keys
from kvtide.testing.servers import ValkeyServer
from kvtide.tiers.peers.directory import BlockDirectory, marks_of, open_directory
from kvtide.tiers.peers.directory_scripts import BUCKETS, PARTITIONS
from kvtide.tiers.peers.members import Member
from tests.peers.test_directory import TIME, say

KEYS = some_keys(100)


@pytest.fixture
def directory(valkey: ValkeyServer) -> Iterator[BlockDirectory]:
    directory = open_directory(valkey.url, cluster=secrets.token_hex(8), timeout=TIME)
    yield directory
    directory.close()


@pytest.fixture
def member(directory: BlockDirectory) -> Member:
    member = directory.join(b"m" * 16, "host:1", TIME)
    assert directory.publish(member, KEYS, [])
    return member


def place_of(directory: BlockDirectory, key: BlockKey) -> tuple[bytes, bytes]:
    """The bucket of a block, and its field there."""
    mark = int(marks_of([key])[0])
    bucket = (mark >> 46) & (BUCKETS - 1)
    name = directory._partitions[mark >> 60] + bucket.to_bytes(2, "big")
    return name, (mark & ((1 << 40) - 1)).to_bytes(5, "big")


def scrub_all(directory: BlockDirectory) -> None:
    for _ in range(PARTITIONS * BUCKETS // 4096):
        directory.scrub(4096)


@pytest.mark.parametrize("value", [b"abc", b"seven b", b"x" * 61, b"x" * 2000])
def test_a_value_that_is_none_hides_its_block_alone(
    valkey: ValkeyServer, directory: BlockDirectory, member: Member, value: bytes
) -> None:
    bucket, field = place_of(directory, KEYS[0])
    say(valkey, b"HSET", bucket, field, value)
    assert directory.holders(KEYS) == [(), *[(member.number,)] * (len(KEYS) - 1)]
    scrub_all(directory)
    assert say(valkey, b"HGET", bucket, field) is None
    assert directory.publish(member, KEYS, [])
    assert directory.holders(KEYS) == [(member.number,)] * len(KEYS)


def test_a_bucket_that_is_no_hash_is_removed(valkey: ValkeyServer, directory: BlockDirectory, member: Member) -> None:
    bucket, _ = place_of(directory, KEYS[0])
    say(valkey, b"SET", bucket, b"something else")
    for call in (lambda: directory.publish(member, KEYS, []), lambda: directory.holders(KEYS)):
        with pytest.raises(OSError, match="does another program use it"):
            call()
    scrub_all(directory)
    assert directory.publish(member, KEYS, [])
    assert directory.holders(KEYS) == [(member.number,)] * len(KEYS)


def test_a_roster_that_is_no_hash_is_removed(valkey: ValkeyServer, directory: BlockDirectory, member: Member) -> None:
    say(valkey, b"SET", directory._partitions[3] + b":roster", b"something else")
    scrub_all(directory)
    assert not directory.renew(member, TIME), "it must join again, since the partition does not know it"
    again = directory.join(member.name, member.address, TIME)
    assert directory.publish(again, KEYS, [])
    assert directory.holders(KEYS) == [(again.number,)] * len(KEYS)


def test_a_member_whose_address_cannot_be_shown_is_none(directory: BlockDirectory, member: Member) -> None:
    directory.join(b"h" * 16, "host:2\n\x1b[2Jhost", TIME)
    assert [*directory.members().values()] == [*directory.leases().left] == [member]


def members_key(directory: BlockDirectory, part: str) -> bytes:
    return directory._place + b":" + part.encode()


ABOUT = b"\0\7" + b"n" * 16 + b"host:7"


@pytest.mark.parametrize(
    ("epoch", "end", "about"),
    [
        (b"123", b"9e15", b""),
        (b"123", b"9e15", b"short"),
        (b"123", b"9e15", b"\0\7" + b"n" * 16 + b"\xff\xfe"),
        (b"123", b"9e15", ABOUT + b"\n\x1b[2J"),
        (b"no number", b"9e15", ABOUT),
        (b"\xff\0", b"9e15", ABOUT),
        (b"-5", b"9e15", ABOUT),
        (b"%d" % (1 << 40), b"9e15", ABOUT),
        (b"123", b"inf", ABOUT),
        (b"123", b"1e300", ABOUT),
    ],
)
def test_an_entry_of_the_members_that_is_none_is_removed(
    valkey: ValkeyServer,
    directory: BlockDirectory,
    member: Member,
    caplog: pytest.LogCaptureFixture,
    epoch: bytes,
    end: bytes,
    about: bytes,
) -> None:
    """The others are found meanwhile, and more can join."""
    say(valkey, b"ZADD", members_key(directory, "leases"), end, epoch)
    say(valkey, b"HSET", members_key(directory, "members"), epoch, about)
    say(valkey, b"HINCRBY", members_key(directory, "state"), b"version", b"1")
    assert dict(directory.members()) == {member.number: member}
    assert directory.holders(KEYS) == [(member.number,)] * len(KEYS)
    other = directory.join(b"o" * 16, "host:2", TIME)
    caplog.set_level(logging.WARNING, "kvtide.peers")
    for _ in range(3):
        assert {*directory.leases().left} == {member, other}
    assert len([r for r in caplog.records if "no node has written" in r.message]) <= 1
    for kind, part in ((b"ZSCORE", "leases"), (b"HGET", "members")):
        assert say(valkey, kind, members_key(directory, part), epoch) is None


@pytest.mark.parametrize("part", ["leases", "members", "state", "measured"])
def test_keys_of_the_members_that_are_something_else_are_removed(
    valkey: ValkeyServer, directory: BlockDirectory, member: Member, part: str
) -> None:
    say(valkey, b"SET", members_key(directory, part), b"something else")
    directory.leases()
    if not directory.renew(member, TIME):
        member = directory.join(member.name, member.address, TIME, again=True)
        assert directory.publish(member, KEYS, [])
    assert dict(directory.members()) == {member.number: member}
    assert directory.holders(KEYS) == [(member.number,)] * len(KEYS)
    assert directory.scrub(1) == 0
    assert directory.measurements() == {}


@pytest.mark.parametrize("number", [b"nonsense", b"-1", b"nan", b"1e300", b""])
def test_numbers_of_the_state_that_make_no_sense_are_replaced(
    valkey: ValkeyServer, directory: BlockDirectory, member: Member, number: bytes
) -> None:
    for field in (b"version", b"epoch", b"cursor"):
        say(valkey, b"HSET", members_key(directory, "state"), field, number)
    directory.members()
    other = directory.join(b"o" * 16, "host:2", TIME)
    assert other.epoch > member.epoch
    assert {*directory.members().values()} == {member, other}, "the change is noticed"
    assert directory.scrub(1) == 0


def test_numbers_of_a_roster_that_make_no_sense_cost_a_membership(
    valkey: ValkeyServer, directory: BlockDirectory, member: Member
) -> None:
    for roster in (place + b":roster" for place in directory._partitions):
        say(valkey, b"HSET", roster, b"%d" % member.epoch, b"nonsense", b"entries", b"nonsense")
    assert not directory.renew(member, TIME)
    assert not directory.publish(member, KEYS, [])
    again = directory.join(member.name, member.address, TIME, again=True)
    assert directory.publish(again, KEYS, [])
    assert directory.publish(again, [], KEYS[:50])
    assert directory.holders(KEYS) == [()] * 50 + [(again.number,)] * 50
    scrub_all(directory)
    assert directory.counts().members == 1
