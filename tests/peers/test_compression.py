"""Blocks that are compressed for a slow link: the same bytes arrive, nodes that cannot compress are read as ever, and
no lie about a size costs memory or leaves the block's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from xxhash import xxh3_128_digest

from kvtide.block import BlockKey, Layout, Span
from kvtide.index.keys import Model
from kvtide.peers import server as server_module
from kvtide.peers.compressor import BlockCompressor
from kvtide.store.store import Store
from kvtide.testing.blocks import Bytes, aligned, floats, identity
from kvtide.testing.caller import CallerAnswer
from kvtide.testing.clock import FakeClock
from kvtide.testing.interface import held, until
from kvtide.tiers.base import Read, ReadResult, Write
from kvtide.tiers.format import codec
from kvtide.tiers.format.packer import Packer, header_of
from kvtide.tiers.format.record import SECTION, TABLE, Rejected
from kvtide.tiers.peers import greeting
from kvtide.tiers.peers import protocol as p
from kvtide.tiers.peers.compression import CompressionChoice, ReadEnd
from kvtide.tiers.peers.greeting import let_in, received
from kvtide.tiers.peers.link import WantedBlock
from kvtide.tiers.peers.protocol import Operation, Presence, RequestCredit, Violation
from kvtide.tiers.peers.tcp import Tcp
from kvtide.tiers.peers.tier import PeerTier, _decompressed
from kvtide.tiers.peers.trust import PeerTrust
from tests.peers.nodes import Stores
from tests.peers.test_hostile import Asker

LAYOUT = Layout.attention(layers=2, heads=2, head_dim=128, block_tokens=64)
MODEL = Model(LAYOUT, "given:compression")
WHO = identity(LAYOUT, weights="given:compression")
GEOMETRY = LAYOUT.geometry["full"]
COUNT = 12
TOKENS = list(range(64 * COUNT))
BLOCKS = [floats(b"%d" % n, GEOMETRY.nbytes) for n in range(COUNT)]


class Always(CompressionChoice):
    """Asks for compressed blocks."""

    def __init__(self) -> None:
        super().__init__(FakeClock())
        self.ends: list[ReadEnd] = []

    def begin(self) -> bool:
        return True

    def ended(self, nbytes: int, how: ReadEnd, *, able: bool) -> None:
        self.ends.append(how)


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stores]:
    monkeypatch.setattr(server_module, "_LITTLE", -1)  # each block is waited for, on whatever machine
    with Stores(tmp_path, timeout=30.0) as stores:
        yield stores


def tier_for(store: Store, address: str) -> PeerTier:
    tier = PeerTier(address, PeerTrust(store.config.peers, store.config.security), connections=1, timeout=30.0)
    tier.compression = Always()
    return tier


def keys_of(store: Store) -> list[BlockKey]:
    with store.session(MODEL) as session:
        return [BlockKey(bytes(digest) + WHO.group) for digest in session.chain(TOKENS).digests]


def read(tier: PeerTier, keys: list[BlockKey], sections: range | None = None) -> tuple[list[ReadResult], list[Bytes]]:
    """The results, and what is in memory then, of which the caller sees nothing outside its blocks."""
    size = GEOMETRY.footprint if sections is None else len(sections) * GEOMETRY.stride
    memory = aligned(size * (len(keys) + 2))
    np.frombuffer(memory, np.uint8)[:] = 0xA5
    spans = [memory[i * size : (i + 1) * size] for i in range(1, len(keys) + 1)]
    answer: CallerAnswer[ReadResult] = CallerAnswer(len(keys))
    tier.read([Read(key, WHO, 0, span, sections) for key, span in zip(keys, spans, strict=True)], answer)
    results = list(answer.wait())
    whole = np.frombuffer(memory, np.uint8)
    assert (whole[:size] == 0xA5).all()
    assert (whole[-size:] == 0xA5).all()
    return results, [np.frombuffer(span, np.uint8) for span in spans]


def test_the_same_bytes_arrive_and_fewer_are_sent(stores: Stores) -> None:
    store, server = stores.serving(dram={"budget": "64MiB", "segment": "4MiB"})
    with store.session(MODEL) as session, closing(tier_for(store, server.address)) as tier:
        session.store(TOKENS, BLOCKS)
        results, found = read(tier, keys_of(store))
        assert results == [True] * COUNT
        assert all(np.array_equal(one, right) for one, right in zip(found, BLOCKS, strict=True))
        until(lambda: server.statistics().blocks_sent == COUNT)
        sent, came = server.statistics(), tier.statistics()
        assert sent.bytes_sent < 0.85 * COUNT * GEOMETRY.nbytes
        assert sent.bytes_compressed == came.bytes_compressed == came.bytes_read == sent.bytes_sent
        assert sent.bytes_uncompressed == came.bytes_uncompressed == COUNT * GEOMETRY.footprint
        until(lambda: server.statistics().bytes_held == 0)
    assert held(store) == 0


def test_blocks_that_do_not_get_smaller_are_sent_as_they_are(stores: Stores) -> None:
    """A record of all of a block's bytes has one checksum; one that is compressed has one for each section."""
    store, server = stores.serving(dram={"budget": "64MiB", "segment": "4MiB"})
    noise = [np.random.default_rng(n).integers(0, 256, GEOMETRY.nbytes, np.uint8) for n in range(COUNT)]
    with store.session(MODEL) as session, closing(tier_for(store, server.address)) as tier:
        session.store(TOKENS, noise)
        results, found = read(tier, keys_of(store))
        assert results == [True] * COUNT
        assert all(np.array_equal(one, right) for one, right in zip(found, noise, strict=True))
        assert tier.statistics().bytes_compressed == 0


def test_blocks_that_are_not_there_and_parts_of_blocks(stores: Stores) -> None:
    store, server = stores.serving(dram={"budget": "64MiB", "segment": "4MiB"})
    with store.session(MODEL) as session, closing(tier_for(store, server.address)) as tier:
        session.store(TOKENS, BLOCKS)
        keys = keys_of(store)
        some = [keys[0], BlockKey(bytes(32) + WHO.group), keys[2]]
        results, found = read(tier, some)
        assert [result is True for result in results] == [True, False, True]
        assert np.array_equal(found[2], BLOCKS[2])
        results, found = read(tier, keys[:3], range(1, 3))
        assert results == [True] * 3
        part = slice(GEOMETRY.stride, 3 * GEOMETRY.stride)
        assert all(np.array_equal(one, right[part]) for one, right in zip(found, BLOCKS, strict=False))


def test_all_sections_asked_for_by_their_numbers_are_sent_as_they_are(stores: Stores) -> None:
    """Who asks like that expects the bytes of sections, not a record."""
    store, server = stores.serving(dram={"budget": "64MiB", "segment": "4MiB"})
    with store.session(MODEL) as session, closing(tier_for(store, server.address)) as tier:
        session.store(TOKENS, BLOCKS)
        results, found = read(tier, keys_of(store), range(GEOMETRY.sections))
        assert results == [True] * COUNT
        assert np.array_equal(found[3], BLOCKS[3])
        assert tier.statistics().bytes_compressed == 0


def test_without_a_thread_for_it_blocks_are_sent_as_they_are(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    store, server = stores.serving(dram={"budget": "64MiB", "segment": "4MiB"})
    monkeypatch.setattr(server_module, "_LITTLE", 1 << 30)
    with store.session(MODEL) as session, closing(tier_for(store, server.address)) as tier:
        session.store(TOKENS, BLOCKS)
        with monkeypatch.context() as patch:
            patch.setattr(server._compressor._pool, "submit", exhausted)
            assert read(tier, keys_of(store))[0] == [True] * COUNT
        assert tier.statistics().bytes_compressed == 0
        monkeypatch.setattr(server_module, "_LITTLE", -1)
        assert read(tier, keys_of(store))[0] == [True] * COUNT
        assert tier.statistics().bytes_compressed > 0, "there are threads again"


def test_without_memory_for_it_blocks_are_sent_as_they_are(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockCompressor, "needed", lambda *_: 1 << 40)
    store, server = stores.serving(dram={"budget": "64MiB", "segment": "4MiB"})
    with store.session(MODEL) as session, closing(tier_for(store, server.address)) as tier:
        session.store(TOKENS, BLOCKS)
        assert read(tier, keys_of(store))[0] == [True] * COUNT
        until(lambda: server.statistics().bytes_sent == COUNT * GEOMETRY.nbytes)


def test_a_node_that_cannot_compress_is_read_as_ever(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "FEATURES", 0)
    store, server = stores.serving(dram={"budget": "64MiB", "segment": "4MiB"})
    with store.session(MODEL) as session, closing(tier_for(store, server.address)) as tier:
        session.store(TOKENS, BLOCKS)
        results, found = read(tier, keys_of(store))
        assert results == [True] * COUNT
        assert np.array_equal(found[3], BLOCKS[3])
        with closing(Asker(server, store)) as asker:  # which has not said that it knows the request either
            body = p.pack_identity(WHO) + p.ITEM.pack(keys_of(store)[0][:32], 0, p.ALL)
            asker.say(p.REQUEST.pack(Operation.READ_COMPRESSED, 0, 1, len(body), 1), body)
            assert asker.closed()
    until(lambda: server.statistics().closed == {Violation.GARBAGE.value: 1})


def test_a_drop_waits_for_a_block_that_is_being_compressed(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go = threading.Event(), threading.Event()
    encode = codec.encode

    def slow(*arguments: object, **named: object) -> object:
        entered.set()
        assert go.wait(60)
        return encode(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(codec, "encode", slow)
    store, server = stores.serving(dram={"budget": "64MiB", "segment": "4MiB"})
    with store.session(MODEL) as session, closing(tier_for(store, server.address)) as tier:
        session.store(TOKENS, BLOCKS)
        keys, results = keys_of(store), list[list[ReadResult]]()
        reader = threading.Thread(target=lambda: results.append(read(tier, keys)[0]))
        reader.start()
        assert entered.wait(60)
        dropped = threading.Event()

        def drop() -> None:
            session.drop(TOKENS)
            dropped.set()

        dropper = threading.Thread(target=drop)
        dropper.start()
        assert not dropped.wait(0.2), "its memory is still read"
        go.set()
        dropper.join()
        reader.join()
        assert dropped.is_set()
        assert True not in results[0]
        until(lambda: server.statistics().bytes_held == 0)


def test_a_drop_does_not_wait_until_a_whole_block_is_compressed(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host may have no time for it."""
    entered, go, sections = threading.Event(), threading.Event(), list[int]()
    compress = codec.Zstd.compress

    def slow(self: codec.Zstd, section: Span, itemsize: int) -> bytes:
        entered.set()
        assert go.wait(60)
        sections.append(len(section))
        return compress(self, section, itemsize)

    monkeypatch.setattr(codec.Zstd, "compress", slow)
    store, server = stores.serving(dram={"budget": "64MiB", "segment": "4MiB"})
    with store.session(MODEL) as session, closing(tier_for(store, server.address)) as tier:
        session.store(TOKENS, BLOCKS)
        keys, outgoing = keys_of(store), store.main.outgoing
        reader = threading.Thread(target=lambda: read(tier, keys))
        reader.start()
        assert entered.wait(60)
        dropper = threading.Thread(target=lambda: session.drop(TOKENS))
        dropper.start()
        until(lambda: any(answer.withdrawn for answer in outgoing._answers))
        go.set()
        dropper.join()
        reader.join()
        until(lambda: server.statistics().bytes_held == 0)
    assert len(sections) == 1, "the one that was being compressed"


# -- lies ---------------------------------------------------------------------------------------------------------


def record() -> tuple[bytearray, bytearray]:
    """Header and payload of a compressed record, as a node would send it."""
    span = aligned(GEOMETRY.footprint)
    np.frombuffer(span, np.uint8)[:] = BLOCKS[0]
    item = Write(BlockKey(bytes(range(32)) + WHO.group), WHO, span, bytes(32), 0, 0)
    packed = Packer("zstd").pack(item)
    header = bytearray(header_of(item))
    packed.name(memoryview(header), 0, 0.0)
    return header, bytearray(packed.payload)


def unpacked(header: bytearray, payload: bytearray) -> Span:
    """What the reader makes of it. Raises Rejected."""
    span = aligned(GEOMETRY.footprint)
    span[: len(payload)] = payload
    key = BlockKey(bytes(range(32)) + WHO.group)
    block = WantedBlock(key, None, memoryview(bytes(header)), span)
    assert _decompressed(Read(key, WHO, 0, span), block, Packer("raw"), len(payload)) == len(payload)
    return span


def told(header: bytearray, section: int, payload: bytearray, **fields: int) -> None:
    """Change an entry of the section table, and make all checksums right."""
    table = np.frombuffer(header, SECTION, GEOMETRY.sections, TABLE)
    for name, value in fields.items():
        table[name][section] = value
    first = len(header)
    start, stop = (
        int(table["offset"][section]) - first,
        int(table["offset"][section] + table["stored"][section]) - first,
    )
    table["check"][section] = np.void(xxh3_128_digest(bytes(payload[max(0, start) : max(0, stop)])))
    del table
    header[16:32] = bytes(16)
    header[16:32] = xxh3_128_digest(bytes(header))


def huge_frame(header: bytearray, payload: bytearray) -> None:
    """The frame says that it is a terabyte long."""
    frame = GEOMETRY.section // 2
    assert payload[frame : frame + 4] == b"\x28\xb5\x2f\xfd"
    payload[frame : frame + 13] = b"\x28\xb5\x2f\xfd" + b"\xe0" + (1 << 40).to_bytes(8, "little")
    told(header, 0, payload)


def header_byte(at: int, value: int) -> Callable[[bytearray, bytearray], None]:
    def lie(header: bytearray, payload: bytearray) -> None:
        header[at] = value
        told(header, 0, payload)

    return lie


LIES: dict[str, Callable[[bytearray, bytearray], None]] = {
    "a frame of a terabyte": huge_frame,
    "a flipped bit": lambda h, d: d.__setitem__(100, d[100] ^ 1),
    "another raw size": lambda h, d: told(h, 0, d, raw=1 << 30),
    "more stored than raw": lambda h, d: told(h, 0, d, stored=GEOMETRY.section + 1),
    "more stored than was sent": lambda h, d: told(h, GEOMETRY.sections - 1, d, stored=GEOMETRY.section),
    "a section before the payload": lambda h, d: told(h, 0, d, offset=0),
    "a section behind the payload": lambda h, d: told(h, 3, d, offset=1 << 40),
    "a codec that nobody knows": header_byte(144, 77),
    "an unchanged block of fewer bytes": header_byte(144, 0),
    "an encrypted record": header_byte(12, 1),
    "a longer header": header_byte(10, 200),
    "another block": header_byte(160, 0xFF),
    "half of it": lambda h, d: d.__delitem__(slice(len(d) // 2 // 4096 * 4096, None)),
}


def test_a_longer_header_takes_no_memory() -> None:
    header, payload = record()
    header_byte(10, 9)(header, payload)
    span, packer, key = aligned(GEOMETRY.footprint), Packer("raw"), BlockKey(bytes(range(32)) + WHO.group)
    block = WantedBlock(key, None, memoryview(bytes(header)), span)
    with pytest.raises(Rejected):
        _decompressed(Read(key, WHO, 0, span), block, packer, len(span) - 4096)
    assert len(packer._longer) == 0


def test_a_record_that_is_right() -> None:
    assert np.array_equal(np.frombuffer(unpacked(*record()), np.uint8), BLOCKS[0])


@pytest.mark.parametrize("lie", LIES)
def test_a_record_with_a_lie_is_refused(lie: str) -> None:
    header, payload = record()
    LIES[lie](header, payload)
    with pytest.raises(Rejected):
        unpacked(header, payload)


@pytest.mark.parametrize(
    "part",
    [
        (Presence.HIT, 0, GEOMETRY.footprint + 4096),
        (Presence.HIT, 0, 0),
        (Presence.HIT, 8192, GEOMETRY.footprint),
        (Presence.MISS, 0, 4096),
        (7, 0, 0),
    ],
)
def test_sizes_that_do_not_fit_end_the_connection(stores: Stores, part: tuple[int, int, int]) -> None:
    store = stores.store()
    listener = Tcp().listen("127.0.0.1:0")
    presence, header, nbytes = part
    header += 4096 if presence == Presence.HIT else 0

    def serve() -> None:
        with suppress(OSError), closing(listener.accept()) as connection:
            secret = PeerTrust(store.config.peers, store.config.security).secret()
            let_in(connection, secret, RequestCredit(), bytes(16))
            head = p.REQUEST.unpack(received(connection, p.REQUEST.size))
            received(connection, head[3])
            connection.send([p.REPLY.pack(head[0], 0, head[2], 0, head[4]), p.PART.pack(presence, header, nbytes)])
            with suppress(OSError):
                connection.send([bytes(1 << 20)])
            received(connection, 1)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with closing(tier_for(store, listener.address)) as tier:
            results, found = read(tier, [BlockKey(bytes(range(32)) + WHO.group)])
            assert results != [True]
            assert (found[0] == 0xA5).all(), "nothing was received"
            assert tier.compression.ends == [ReadEnd.BROKEN]  # type: ignore[attr-defined]
    finally:
        listener.close()
        thread.join()


# -- the choice ---------------------------------------------------------------------------------------------------


def reads(choice: CompressionChoice, clock: FakeClock, count: int, *, plain: float, compressed: float) -> int:
    """Read so often, at these megabytes per second; how many asked for compressed blocks."""
    asked = 0
    for _ in range(count):
        kind = choice.begin()
        asked += kind
        clock.advance(32 / (compressed if kind else plain))
        choice.ended(32_000_000, ReadEnd.WHOLE, able=True)
    return asked


def test_compressed_is_asked_for_if_that_is_quicker() -> None:
    choice = CompressionChoice(clock := FakeClock())
    assert reads(choice, clock, 3, plain=50, compressed=70) == 0, "first it is measured without"
    assert reads(choice, clock, 1000, plain=50, compressed=70) > 950
    assert reads(choice, clock, 1000, plain=100, compressed=70) < 150, "the link has become faster"


def test_compressed_is_seldom_tried_if_it_is_slower() -> None:
    choice = CompressionChoice(clock := FakeClock())
    assert 3 <= reads(choice, clock, 1000, plain=100, compressed=90) < 60


def test_it_is_said_that_a_node_sends_compressed_blocks(stores: Stores) -> None:
    store, server = stores.serving(dram={"budget": "64MiB", "segment": "4MiB"})
    choice = CompressionChoice(clock := FakeClock())
    with store.session(MODEL) as session, closing(tier_for(store, server.address)) as tier:
        session.store(TOKENS, BLOCKS)
        assert read(tier, keys_of(store))[0] == [True] * COUNT
        tier.compression = choice
        assert not tier.statistics().compressed
        reads(choice, clock, 20, plain=50, compressed=70)
        assert tier.statistics().compressed


def test_a_fast_node_is_never_asked() -> None:
    choice = CompressionChoice(clock := FakeClock())
    assert reads(choice, clock, 1000, plain=1000, compressed=5000) == 0


def test_one_that_sends_nonsense_is_not_asked_again_soon() -> None:
    choice = CompressionChoice(clock := FakeClock())
    reads(choice, clock, 3, plain=50, compressed=70)
    assert choice.begin()
    clock.advance(1)
    choice.ended(32_000_000, ReadEnd.BROKEN, able=True)
    assert reads(choice, clock, 100, plain=50, compressed=70) == 0
    clock.advance(200)
    assert reads(choice, clock, 10, plain=50, compressed=70) == 10


def test_reads_at_the_same_time_are_timed_together() -> None:
    """Each has half of the link, and is not taken for a slow one."""
    choice = CompressionChoice(clock := FakeClock())
    for _ in range(10):
        assert not choice.begin()
        assert not choice.begin()
        clock.advance(0.2)
        for _ in range(2):
            choice.ended(40_000_000, ReadEnd.WHOLE, able=True)
    assert not choice.begin(), "400 MB/s"


@pytest.mark.parametrize(("plain", "compressed", "chosen"), [(25, 33, True), (50, 66, True), (100, 70, False)])
def test_reads_that_never_pause_are_compared_all_the_same(plain: float, compressed: float, chosen: bool) -> None:
    """Two connections have half of the link each, and a read of one kind is under way when one of the other begins."""
    choice = CompressionChoice(clock := FakeClock())

    def seconds(kind: bool) -> float:
        return 64 / ((compressed if kind else plain) / 2)

    ends = [seconds(choice.begin()) / (n + 1) for n in range(2)]
    asked, now = list[bool](), 0.0
    for _ in range(400):
        connection, end = ends.index(min(ends)), min(ends)
        clock.advance(end - now)
        now = end
        asked.append(choice.begin())
        choice.ended(64_000_000, ReadEnd.WHOLE, able=True)
        ends[connection] = now + seconds(asked[-1])
    assert (sum(asked[100:]) > 200) is chosen


def test_reads_of_little_and_misses_say_nothing() -> None:
    choice = CompressionChoice(clock := FakeClock())
    for nbytes, how in ((1000, ReadEnd.WHOLE), (32_000_000, ReadEnd.PART)):
        for _ in range(20):
            assert not choice.begin()
            clock.advance(5)
            choice.ended(nbytes, how, able=True)


def test_the_compressor_leaves_blocks_alone_that_are_not_to_be_compressed() -> None:
    compressor = BlockCompressor(FakeClock(), threads=1)
    one = SimpleNamespace(whole=None, size=4, known=memoryview(b"head"), payload=memoryview(b"data"))
    with closing(compressor.records([one], lambda: True)) as records:  # type: ignore[list-item]
        assert [tuple(map(bytes, made)) for made in records] == [(b"head", b"data")]
    compressor.close()
