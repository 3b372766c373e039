"""What a reader checks of the records that another node sends: every byte, and that they are what it asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from kvtide import Store
from kvtide.block import BlockKey, Layout
from kvtide.index.keys import Model
from kvtide.peers.server import PeerServer
from kvtide.testing.blocks import Bytes, aligned, content, identity
from kvtide.testing.caller import CallerAnswer
from kvtide.tiers.base import Read, ReadResult
from kvtide.tiers.peers import link
from kvtide.tiers.peers import protocol as p
from kvtide.tiers.peers.greeting import received
from kvtide.tiers.peers.protocol import Operation, Presence
from kvtide.tiers.peers.tier import PeerTier
from kvtide.tiers.peers.trust import PeerTrust
from tests.peers.nodes import Stores
from tests.peers.test_hostile import Asker, Liar

LAYOUT = Layout.attention(layers=2, heads=1, head_dim=80, block_tokens=64)
MODEL = Model(LAYOUT, "given:records")
WHO = identity(LAYOUT, weights="given:records")
GEOMETRY = LAYOUT.geometry["full"]
assert GEOMETRY.section < GEOMETRY.stride, "there is padding"
TOKENS = list(range(3 * 64))
RIGHT = [content(b"%d" % n, GEOMETRY.nbytes) for n in range(3)]
HEADER = 4096
Change = Callable[[bytearray], None]


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    with Stores(tmp_path, timeout=30.0) as stores:
        yield stores


@pytest.fixture
def served(stores: Stores) -> Iterator[tuple[Store, PeerServer, list[BlockKey]]]:
    store, server = stores.serving()
    with store.session(MODEL) as session:
        session.store(TOKENS, RIGHT)
        yield store, server, [BlockKey(bytes(digest) + WHO.group) for digest in session.chain(TOKENS).digests]


class Relay(Liar):
    """Passes each request on to a node, and its answer back; ``ask`` changes the items of a read, ``answer`` its
    records."""

    def __init__(
        self, stores: Stores, store: Store, server: PeerServer, ask: Change | None, answer: Change | None
    ) -> None:
        def passed_on(head: tuple[int, ...], body: bytes) -> bytes:
            with closing(Asker(server, store)) as asker:
                request = bytearray(body)
                if ask is not None:
                    ask(request)
                asker.say(p.REQUEST.pack(*head), bytes(request))
                reply = received(asker.connection, p.REPLY.size)
                follows = received(asker.connection, p.REPLY.unpack(reply)[3])
                assert head[0] == Operation.READ
                size = sum(header + payload for _, header, payload in p.PART.iter_unpack(follows))
                records = received(asker.connection, size)
                if answer is not None:
                    answer(records)
                return bytes(reply + follows + records)

        super().__init__(stores, passed_on)


def read(
    store: Store, address: str, keys: list[BlockKey], sections: range | None = None
) -> tuple[list[ReadResult], list[Bytes], dict[str, int]]:
    """The results, what is in memory then, and the reasons of misses."""
    size = GEOMETRY.footprint if sections is None else len(sections) * GEOMETRY.stride
    spans = [aligned(size) for _ in keys]
    answer: CallerAnswer[ReadResult] = CallerAnswer(len(keys))
    trust = PeerTrust(store.config.peers, store.config.security)
    with closing(PeerTier(address, trust, connections=1, timeout=30.0)) as tier:
        tier.read([Read(key, WHO, 0, span, sections) for key, span in zip(keys, spans, strict=True)], answer)
        results = list(answer.wait())
        return results, [np.frombuffer(span, np.uint8) for span in spans], dict(tier.statistics().reasons)


def flip(at: int) -> Change:
    def change(records: bytearray) -> None:
        records[at] ^= 1

    return change


RECORD = HEADER + GEOMETRY.footprint
FLIPPED = {
    "the header": 200,
    "the header behind the table": HEADER - 1,
    "the first byte": HEADER,
    "the padding of a section": HEADER + GEOMETRY.section,
    "the last byte": RECORD - 1,
}


@pytest.mark.parametrize("pieces", ["whole", "in pieces"])
@pytest.mark.parametrize("where", FLIPPED)
def test_a_byte_that_was_changed_on_the_way_is_a_miss(
    stores: Stores,
    served: tuple[Store, PeerServer, list[BlockKey]],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    pieces: str,
) -> None:
    """Of the second of three blocks; the others are read."""
    if pieces == "in pieces":
        for size in ("_SMALL_PIECE", "_LARGE_PIECE"):
            monkeypatch.setattr(link, size, 3 * 4096)
    store, server, keys = served
    with closing(Relay(stores, store, server, None, flip(RECORD + FLIPPED[where]))) as relay:
        results, found, reasons = read(store, relay.address, keys)
    assert [result is True for result in results] == [True, False, True]
    for n in (0, 2):
        assert np.array_equal(found[n].reshape(-1, GEOMETRY.stride)[:, : GEOMETRY.section].ravel(), RIGHT[n])
    assert sum(reasons.values()) == 1


def test_parts_of_blocks_are_read_and_checked(stores: Stores, served: tuple[Store, PeerServer, list[BlockKey]]) -> None:
    store, server, keys = served
    part = range(1, 3)
    inside = slice(part.start * GEOMETRY.stride, part.stop * GEOMETRY.stride)
    results, whole, _ = read(store, server.address, keys)
    assert results == [True] * 3
    with ExitStack() as stack:
        results, found, _ = read(store, server.address, keys, part)
        assert results == [True] * 3
        assert all(np.array_equal(one, block[inside]) for one, block in zip(found, whole, strict=True))
        bad = flip(HEADER + GEOMETRY.stride)
        relay = stack.enter_context(closing(Relay(stores, store, server, None, bad)))
        assert [result is True for result in read(store, relay.address, keys, part)[0]] == [False, True, True]
    assert read(store, server.address, keys)[0] == [True] * 3, "the headers of parts are not those of blocks"


def test_other_sections_than_were_asked_for_are_a_miss(
    stores: Stores, served: tuple[Store, PeerServer, list[BlockKey]]
) -> None:
    """They are of the right block, and whole."""
    store, server, keys = served

    def another(request: bytearray) -> None:
        for at in range(p.IDENTITY.size, len(request), p.ITEM.size):
            digest, first, count = p.ITEM.unpack_from(request, at)
            p.ITEM.pack_into(request, at, digest, first - 1, count)

    with closing(Relay(stores, store, server, another, None)) as relay:
        results, _, reasons = read(store, relay.address, keys, range(1, 3))
    assert results == [False] * 3
    assert reasons == {"another block": 3}


def test_no_sections_at_all_are_a_miss(served: tuple[Store, PeerServer, list[BlockKey]]) -> None:
    store, server, keys = served
    with closing(Asker(server, store)) as asker:
        assert asker.read(WHO, keys[0][:32], 1, 0) == (Presence.MISS, 0, 0)
