"""What another program, or a hostile one, has written into the directory's Valkey."""

from __future__ import annotations

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
