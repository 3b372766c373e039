"""What is published about described blocks, whatever the order in which things happen to them."""

from __future__ import annotations

import os
import random
import struct
from typing import Any

import msgspec
import pytest

from kvtide.block import BlockKey
from kvtide.index.index import ABSENT, SEALED, Index
from kvtide.index.keys import ROOT
from kvtide.node.events import described, wire
from kvtide.node.events.described import BlockSource, Change, DescribedBlocks
from tests.node.kv_consumer import Mirror

PLACES = ((0, wire.CPU), (1, wire.DISK))
GROUPS, IDENTITY = (b"full", b"more"), 7


class Blocks:
    """Described blocks of an index, in one or two groups, and a consumer."""

    def __init__(self, groups: int = 1) -> None:
        self.index = Index(len(PLACES))
        self.groups = GROUPS[:groups]
        self.source = BlockSource(self.index, tuple((group, IDENTITY) for group in self.groups), 4, 4, "", PLACES)
        self.described = DescribedBlocks()
        self.encoder = wire.BatchEncoder(maps=True)
        self.consumer = Mirror()

    def put(self, digest: bytes, tier: int, state: int) -> None:
        """A block is in a tier, or not any more: not all of its groups are. Nothing is said about it yet."""
        for group in self.groups if state == SEALED else self.groups[-1:]:
            key = BlockKey(digest + group)
            row = self.index.row(key) or self.index.add(key, ROOT, 0)
            self.index.identity[row] = IDENTITY
            self.index.state[tier][row] = state

    def publish(self) -> None:
        """Tell the consumer some of what is to be told. It checks that this can be."""
        self.tell(self.described.changes(0.0), self.consumer)

    def publish_all(self) -> None:
        while self.described.waiting:
            self.publish()

    def begin_anew(self) -> None:
        """The consumer has forgotten everything, and is to be told it again."""
        self.consumer = Mirror()
        self.described.unpublish()
        self.described.look_at_all()

    def tell(self, changes: list[Change], consumer: Mirror) -> None:
        columns, start = self.described.columns, 0
        for end in wire.cuts(columns, changes):
            for event in msgspec.msgpack.decode(self.encoder.payload(0.0, columns, changes[start:end]))[1]:
                consumer.event(event)
            start = end


def number(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")


def tokens_of(digest: bytes) -> bytes:
    return digest[8:24]


@pytest.mark.parametrize("seed", range(25))
def test_a_consumer_knows_in_the_end_what_is_where(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks come, move and go in any order, are described in any order, and again, and are forgotten: only those with
    all blocks before them count, and a consumer is never told of a block before its parent."""
    chance = random.Random(seed)
    monkeypatch.setattr(described, "_LEAST", 20)
    blocks = Blocks(groups=1 + seed % 2)
    parents: dict[bytes, bytes] = {}
    for _ in range(60 if seed % 5 else 900):
        last = [*parents][-3:] or [ROOT]
        parents[chance.randbytes(32)] = chance.choice([ROOT, *parents] if chance.random() < 0.2 else last)
    names = [*parents]
    where: dict[tuple[bytes, int], int] = {}

    def describe(digest: bytes, now: float) -> None:
        path = [digest]
        while parents[path[0]] != ROOT and chance.random() < 0.7:
            path.insert(0, parents[path[0]])
        tokens = b"".join(tokens_of(one) for one in path)
        blocks.described.describe(blocks.source, parents[path[0]], path, tokens, now)

    for turn in range(60):
        changed = [(chance.choice(names), chance.randrange(2)) for _ in range(chance.randrange(30))]
        for digest, tier in changed:
            where[digest, tier] = chance.choice([SEALED, SEALED, ABSENT])
            blocks.put(digest, tier, where[digest, tier])
            describe(digest, 1000.0 * turn)
        blocks.described.look_at([BlockKey(digest + chance.choice(blocks.groups)) for digest, _ in changed])
        if chance.random() < 0.7:
            blocks.publish()
        if chance.random() < 0.1:
            blocks.begin_anew()
        if chance.random() < 0.3:
            blocks.described.clean(0.0, 1000.0 * turn)
    blocks.publish_all()
    whole: set[bytes] = {ROOT}
    for digest in names:  # parents first
        if parents[digest] in whole and any(where.get((digest, tier)) == SEALED for tier in (0, 1)):
            whole.add(digest)
    late = Mirror()
    blocks.tell([(one, 0, places) for one, places in zip(*blocks.described.published(), strict=True)], late)
    for consumer in (blocks.consumer, late):
        for tier, medium in enumerate(("CPU", "STORAGE")):
            expected = {
                number(d): (None if parents[d] == ROOT else number(parents[d]), struct.unpack("<4I", tokens_of(d)))
                for d in whole
                if d != ROOT and where.get((d, tier)) == SEALED
            }
            assert consumer.blocks[medium, "LOCAL"] == expected


def test_who_is_told_everything_again_is_told_what_is_there_now_in_portions() -> None:
    """Nothing was followed while nobody listened. And all descendants of one block are not told in one go: the node's
    loop would wait for it."""
    blocks, chain = Blocks(), [os.urandom(32) for _ in range(2000)]
    for one in chain:
        blocks.put(one, 0, SEALED)
    blocks.described.describe(blocks.source, ROOT, chain, bytes(16 * len(chain)))
    blocks.publish_all()
    blocks.begin_anew()
    for one in chain[1000:]:
        blocks.put(one, 0, ABSENT)
    told: list[int] = []
    while blocks.described.waiting:
        before = blocks.consumer.stored
        blocks.publish()
        told.append(blocks.consumer.stored - before)
    assert sum(told) == 1000
    assert max(told) <= 256


def test_descendants_of_a_block_come_and_go_in_portions() -> None:
    """With what all prompts begin with, a million blocks may go."""
    blocks, chain = Blocks(), [os.urandom(32) for _ in range(2000)]
    for one in chain:
        blocks.put(one, 0, SEALED)
    blocks.described.describe(blocks.source, ROOT, chain, bytes(16 * len(chain)))
    blocks.publish_all()
    for state, left in ((ABSENT, 0), (SEALED, 2000)):
        blocks.put(chain[0], 0, state)
        blocks.described.look_at([BlockKey(chain[0] + GROUPS[0])])
        while blocks.described.waiting:
            before = len(blocks.consumer.blocks["CPU", "LOCAL"])
            blocks.publish()
            assert abs(len(blocks.consumer.blocks["CPU", "LOCAL"]) - before) <= 256
        assert len(blocks.consumer.blocks["CPU", "LOCAL"]) == left


@pytest.mark.parametrize("pace", [3.0, 0.0])
def test_descriptions_of_blocks_that_are_never_stored_are_forgotten(
    pace: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that make no sense: a client may say that a block is its own parent, or a parent's parent; and if they
    come so fast that all are new."""
    monkeypatch.setattr(described, "_ABSENT", 1000 if not pace else 1 << 16)
    blocks = Blocks()
    kept = os.urandom(32)
    blocks.put(kept, 0, SEALED)
    blocks.described.describe(blocks.source, ROOT, [kept], bytes(16))
    for turn in range(150):
        now = pace * turn
        names: list[Any] = [os.urandom(32) for _ in range(500)]
        blocks.described.describe(blocks.source, names[0], [names[0]], bytes(16), now)
        blocks.described.describe(blocks.source, names[1], names[2:4], bytes(32), now)
        blocks.described.describe(blocks.source, names[3], names[1:2], bytes(16), now)
        blocks.described.describe(blocks.source, kept, names[4:], bytes(16 * 496), now)
        blocks.publish_all()
        blocks.described.clean(0.0, now)
    assert len(blocks.described) < 40_000
    assert set(blocks.consumer.blocks["CPU", "LOCAL"]) == {number(kept)}


def test_the_description_of_a_block_outlives_it_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that has described it does not do so again at once, though the block was evicted and is stored anew."""
    monkeypatch.setattr(described, "_LEAST", 10)
    blocks, one = Blocks(), os.urandom(32)
    blocks.described.describe(blocks.source, ROOT, [one], bytes(16), 1000.0)
    for now, stays in ((1001.0, True), (1060.0, True), (1200.0, False)):
        for _ in range(20):
            blocks.described.describe(blocks.source, ROOT, [os.urandom(32)], bytes(16), now)
            blocks.described.clean(0.0, now)
        blocks.put(one, 0, SEALED)
        blocks.described.look_at([BlockKey(one + GROUPS[0])])
        blocks.publish_all()
        assert (number(one) in blocks.consumer.blocks["CPU", "LOCAL"]) == stays
        blocks.put(one, 0, ABSENT)
        blocks.described.look_at([BlockKey(one + GROUPS[0])])
        blocks.publish_all()
