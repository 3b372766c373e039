"""What a serving node holds for askers, and what a drop does to answers that are under way."""

from __future__ import annotations

import itertools
import math
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from kvtide import Layout, Model, Session, Store
from kvtide.block import BlockKey, Group, Kind
from kvtide.index.index import ABSENT, DRAM, SEALED
from kvtide.peers.server import PeerServer
from kvtide.store.outgoing import Contents, OutgoingAnswer, OutgoingBlocks
from kvtide.testing.blocks import aligned, content, identity
from kvtide.testing.caller import CallerAnswer
from kvtide.testing.interface import OTHER_TENANT, SIZE, until
from kvtide.tiers.base import Identity, Read, ReadResult
from kvtide.tiers.peers.greeting import ask_in, received
from kvtide.tiers.peers.protocol import ALL, ITEM, PART, REPLY, REQUEST, Operation, Presence, pack_identity
from kvtide.tiers.peers.tier import PeerTier
from kvtide.tiers.peers.transport import PeerConnection
from kvtide.tiers.peers.trust import PeerTrust
from tests.peers.nodes import Stores

LAYOUT = Layout((Group("full", Kind.FULL, 16, 8, 128, "float32", page=SIZE),), block_tokens=256)
"""Its blocks have 32 MiB: more than the kernel's buffers hold."""
FULL = LAYOUT.geometry["full"]
MODEL = Model(LAYOUT, "given:large")
TOKENS = [7] * 256
WHO = identity(LAYOUT, weights="given:large")
_NVME = 1


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    with Stores(tmp_path, timeout=30.0) as stores:
        yield stores


def serving(stores: Stores, folder: Path) -> tuple[Store, PeerServer]:
    """Its memory is enough for one block; all others are on its disk."""
    disk = {"path": str(folder / "tier"), "budget": "256MiB", "segment": "64MiB", "store": "through"}
    return stores.serving(nvme=disk, dram={"budget": "48MiB", "segment": "16MiB"})


def connected(store: Store, server: PeerServer, stack: ExitStack) -> PeerConnection:
    trust = PeerTrust(store.config.peers, store.config.security)
    connection = trust.transport.connect(server.address, 5)
    stack.callback(connection.close)
    connection.begin()
    ask_in(connection, trust.secret())
    return connection


def ask(connection: PeerConnection, digests: Sequence[bytes], sections: int = ALL, who: Identity = WHO) -> None:
    body = pack_identity(who) + b"".join(ITEM.pack(digest, 0, sections) for digest in digests)
    connection.send([REQUEST.pack(Operation.READ, 0, len(digests), len(body), 1), body])


def answered(connection: PeerConnection) -> list[tuple[int, ...]]:
    """What an answer says of each block; the records are not received."""
    _, _, count, _, _ = REPLY.unpack(received(connection, REPLY.size))
    return list(PART.iter_unpack(received(connection, count * PART.size)))


def place(store: Store, session: Session, where: str, digest: bytes) -> None:
    """Have the block of ``TOKENS`` in memory, or only on disk."""
    session.store(TOKENS, [content(b"x", FULL.nbytes)])
    assert store.flush(30)
    if where == "nvme":
        with store.session(MODEL) as other:
            other.store([8] * 256, [content(b"y", FULL.nbytes)])
            assert store.flush(30)
        index = store.index
        row = next(row for row in range(1, index.size) if index.key(row)[:32] == digest)
        assert (index.state[DRAM][row], index.state[_NVME][row]) == (ABSENT, SEALED)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_readers_that_stop_reading_cost_no_more_memory_for_blocks_on_disk(stores: Stores, tmp_path: Path) -> None:
    store, server = serving(stores, tmp_path)
    with store.session(MODEL) as session, ExitStack() as stack:
        digest = bytes(session.chain(TOKENS).digests[0])
        place(store, session, "nvme", digest)
        before = resident()
        first = connected(store, server, stack)
        ask(first, [digest])
        assert answered(first)[0][0] == Presence.HIT
        assert server.statistics().bytes_held == FULL.footprint, "it is being sent"
        others = [connected(store, server, stack) for _ in range(12)]
        for other in others:
            ask(other, [digest])
        assert [answered(other)[0][0] for other in others] == [Presence.BUSY] * 12
        assert resident() - before < 4 * FULL.footprint
        assert server.statistics().bytes_held == FULL.footprint
    until(lambda: server.statistics().bytes_held == 0)


def test_a_section_each_of_many_large_blocks_is_not_read_at_once(stores: Stores, tmp_path: Path) -> None:
    store, server = serving(stores, tmp_path)
    with store.session(MODEL) as session, ExitStack() as stack:
        digest = bytes(session.chain(TOKENS).digests[0])
        place(store, session, "nvme", digest)
        asker = connected(store, server, stack)
        ask(asker, [digest] * 8, sections=1)
        assert [part[0] for part in answered(asker)] == [Presence.HIT] + [Presence.BUSY] * 7
    until(lambda: server.statistics().bytes_held == 0)


@pytest.mark.parametrize("fails", ["raises", "late"])
def test_a_disk_that_fails_an_answer_holds_nothing_afterwards(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    stores.peers["timeout"] = 1.0
    store, server = serving(stores, tmp_path)
    with store.session(MODEL) as session, ExitStack() as stack:
        digest = bytes(session.chain(TOKENS).digests[0])
        place(store, session, "nvme", digest)
        nvme = store.main.nvme
        assert nvme is not None
        ended: list[Callable[[], None]] = []

        def read(items: Sequence[object], done: Callable[[Sequence[bool]], None], stale: object) -> None:
            if fails == "raises":
                raise MemoryError
            ended.append(lambda: done([False] * len(items)))

        with monkeypatch.context() as patch:
            patch.setattr(nvme.lane, "read", read)
            asker = connected(store, server, stack)
            ask(asker, [digest])
            if fails == "raises":
                with pytest.raises(OSError, match=r"closed|reset"):
                    answered(asker)
            else:
                assert answered(asker)[0][0] == Presence.BUSY
                assert server.statistics().bytes_held == FULL.footprint, "the disk may still fill it"
                ended[0]()
        until(lambda: server.statistics().bytes_held == 0)


@pytest.mark.parametrize("how", ["drop", "forget"])
@pytest.mark.parametrize("where", ["dram", "nvme"])
def test_dropped_blocks_are_not_sent_on(stores: Stores, tmp_path: Path, where: str, how: str) -> None:
    """An asker that has begun to read a block, and then waits until it is dropped, does not get the rest."""
    store, server = serving(stores, tmp_path)
    who = identity(LAYOUT, weights="given:large", tenant=OTHER_TENANT)
    with ExitStack() as stack:
        session = stack.enter_context(store.session(MODEL, tenant=OTHER_TENANT))
        digest = bytes(session.chain(TOKENS).digests[0])
        place(store, session, where, digest)
        asker = connected(store, server, stack)
        ask(asker, [digest], who=who)
        (part,) = answered(asker)
        assert part[0] == Presence.HIT
        if how == "drop":
            assert session.drop(TOKENS) == 1
        else:
            assert store.forget(OTHER_TENANT.tag).held == 0
        assert server.statistics().bytes_held == 0, "it is not being sent when the drop returns"
        assert store.statistics().held == 0
        with pytest.raises(OSError, match=r"closed|reset"):
            received(asker, part[1] + part[2])
    until(lambda: server.statistics().connections == 0)


def test_what_the_kernel_has_not_sent_is_not_sent_after_a_drop(stores: Stores, tmp_path: Path) -> None:
    store, server = serving(stores, tmp_path)
    with store.session(MODEL) as session, ExitStack() as stack:
        digest = bytes(session.chain(TOKENS).digests[0])
        place(store, session, "dram", digest)
        asker = connected(store, server, stack)
        asker._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # type: ignore[attr-defined]
        ask(asker, [digest])
        assert answered(asker)[0][0] == Presence.HIT
        assert session.drop(TOKENS) == 1
        got = 0
        with suppress(ConnectionError):
            while got < FULL.nbytes:
                received(asker, 4096)
                got += 4096
        assert got < 1 << 19, "the sender's kernel had some MiB more"


def test_a_header_that_is_remembered_is_that_of_the_block(stores: Stores, tmp_path: Path) -> None:
    """Two blocks take turns in one slot, and readers get what is there: a header of the other would be a miss."""
    store, server = serving(stores, tmp_path)
    sources = {tokens: content(bytes([tokens]), FULL.nbytes) for tokens in (1, 2)}
    with store.session(MODEL) as session:
        for _ in range(3):
            for tokens, source in sources.items():
                session.store([tokens] * 256, [source])
                assert store.flush(30)
                for _ in range(2):
                    with stores.store(server.address, dram={"budget": "48MiB", "segment": "16MiB"}) as reader:
                        with reader.session(MODEL) as other, other.match([tokens] * 256, wait=30) as match:
                            assert match.tokens == 256
                            assert other.load(match).wait(30).tokens == 256
                        reasons = reader.statistics().tiers[f"peer {server.address}"].reasons
                        assert not reasons
    assert server.statistics().blocks_sent == 12


def test_headers_are_remembered_until_their_blocks_change_or_are_dropped() -> None:
    outgoing = OutgoingBlocks()
    keys = [BlockKey(bytes([n]) * 32) for n in range(3)]
    answer = OutgoingAnswer(b"t" * 16, keys, lambda: None)
    contents = Contents(7, 1, math.inf, 0)
    assert outgoing.begin(answer)
    for key in keys:
        outgoing.remember(answer, key, contents, b"header of " + key)
    assert bytes(outgoing.header(keys[0], contents) or b"") == b"header of " + keys[0]
    for other in (Contents(8, 1, math.inf, 0), Contents(7, 2, math.inf, 0), Contents(7, 1, 5.0, 0)):
        assert outgoing.header(keys[0], other) is None
    outgoing.interrupt([keys[0]])
    assert [outgoing.header(key, contents) is None for key in keys] == [True, False, False]
    outgoing.remember(answer, keys[0], contents, b"a header of a block that was dropped meanwhile")
    assert outgoing.header(keys[0], contents) is None
    outgoing.end(answer)
    with outgoing.forgetting(b"t" * 16):
        assert outgoing.header(keys[1], contents) is None


def test_headers_that_are_remembered_are_bounded() -> None:
    outgoing = OutgoingBlocks()
    contents = Contents(7, 1, math.inf, 0)
    keys = [BlockKey(n.to_bytes(32, "big")) for n in range(40)]
    answer = OutgoingAnswer(b"t" * 16, keys, lambda: None)
    for key in [*keys, keys[-1]]:
        outgoing.remember(answer, key, contents, bytes(1 << 20))
    assert [outgoing.header(key, contents) is not None for key in keys] == [False] * 24 + [True] * 16


def test_a_tenant_that_is_being_forgotten_has_no_blocks_for_others(stores: Stores, tmp_path: Path) -> None:
    store, server = serving(stores, tmp_path)
    who = identity(LAYOUT, weights="given:large", tenant=OTHER_TENANT)
    with ExitStack() as stack:
        session = stack.enter_context(store.session(MODEL, tenant=OTHER_TENANT))
        session.store(TOKENS, [content(b"x", FULL.nbytes)])
        digest = bytes(session.chain(TOKENS).digests[0])
        with store.main.outgoing.forgetting(OTHER_TENANT.tag):
            asker = connected(store, server, stack)
            ask(asker, [digest], who=who)
            assert answered(asker)[0][0] == Presence.MISS
        asker = connected(store, server, stack)
        ask(asker, [digest], who=who)
        assert answered(asker)[0][0] == Presence.HIT


def test_a_drop_does_not_wait_for_a_disk_that_hangs_under_an_answer(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, server = serving(stores, tmp_path)
    with store.session(MODEL) as session, ExitStack() as stack:
        digest = bytes(session.chain(TOKENS).digests[0])
        place(store, session, "nvme", digest)
        nvme = store.main.nvme
        assert nvme is not None
        began, ended = threading.Event(), list[Callable[[], None]]()

        def read(items: Sequence[object], done: Callable[[Sequence[bool]], None], stale: object) -> None:
            ended.append(lambda: done([False] * len(items)))
            began.set()

        with monkeypatch.context() as patch:
            patch.setattr(nvme.lane, "read", read)
            asker = connected(store, server, stack)
            ask(asker, [digest])
            assert began.wait(10)
            assert session.drop(TOKENS) == 1
        with pytest.raises(OSError, match=r"closed|reset"):
            received(asker, REPLY.size)
        ended[0]()
        until(lambda: server.statistics().bytes_held == 0)


@pytest.mark.parametrize("what", ["memory", "disk"])
def test_a_node_that_is_busy_for_many_requests_is_not_taken_for_one_that_is_away(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """It says that it is busy only after it has waited for memory, or for its disk: a reader does not ask on."""
    stores.peers["timeout"] = 4.0
    disk = {"path": str(tmp_path / "tier"), "budget": "1GiB", "segment": "64MiB", "store": "through"}
    store, server = stores.serving(nvme=disk, dram={"budget": "48MiB", "segment": "16MiB"})
    layout = Layout((Group("full", Kind.FULL, 16, 8, 32, "float32", page=SIZE),), block_tokens=256)
    model, who, size = Model(layout, "given:busy"), identity(layout, weights="given:busy"), 8 << 20
    assert layout.geometry["full"].footprint == size == server._blocks.credit.nbytes, "a request for each"
    index, nvme, ended = store.index, store.main.nvme, list[Callable[[], None]]()
    assert nvme is not None

    def hang(items: Sequence[object], done: Callable[[Sequence[bool]], None], stale: object) -> None:
        ended.append(lambda: done([False] * len(items)))

    with store.session(model) as session, monkeypatch.context() as patch:
        chain = session.chain([7] * 256 * 5)
        keys = [BlockKey(bytes(digest) + who.group) for digest in chain.digests]
        session.store(chain, [content(b"%d" % n, size) for n in range(5)])
        assert store.flush(30)
        others = itertools.count(1000)

        def on_disk_alone() -> bool:
            session.store([next(others)] * 256, [content(b"x", size)])
            assert store.flush(30)
            rows = index.rows(keys)
            assert (index.state[_NVME][rows] == SEALED).all()
            return bool((index.state[DRAM][rows] == ABSENT).all())

        if what == "memory":
            assert server._blocks._budget.take("another host", 1 << 40, 0)
        else:
            until(on_disk_alone)
            patch.setattr(nvme.lane, "read", hang)
        trust = PeerTrust(store.config.peers, store.config.security)
        with closing(PeerTier(server.address, trust, connections=1, timeout=4.0)) as tier:
            answer: CallerAnswer[ReadResult] = CallerAnswer(len(keys))
            tier.read([Read(key, who, 0, aligned(size)) for key in keys], answer)
            assert True not in answer.wait()
            assert dict(tier.statistics().reasons) == {"read: the node is busy": 5}
            assert not tier.away
        for end in ended:
            end()
