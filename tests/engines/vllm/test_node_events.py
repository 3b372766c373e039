"""A node's KV events as vLLM's own classes read them, with the sockets of a subscriber to vLLM, and as a trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
    ZmqEventPublisher,
)

from kvtide.node.client.client import Client
from kvtide.node.events.publisher import NodeEvents
from kvtide.replay.trace import load
from kvtide.testing.interface import MODEL, PLAIN, SIZE, data, prompt
from tests.node.serving import Thread, eventually

pytestmark = pytest.mark.long

TOPIC = "kv-events"
DECODE = msgspec.msgpack.Decoder(KVEventBatch).decode


class Subscriber:
    """A subscriber, with a second socket for replays: REQ, as in vLLM's example, or DEALER."""

    def __init__(self, events: NodeEvents, kind: int) -> None:
        self._context = zmq.Context()
        self._sub, self._replay = self._context.socket(zmq.SUB), self._context.socket(kind)
        self._sub.connect(events.address)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, TOPIC)
        self._replay.connect(events.replay_address)
        self._kind = kind
        self.raw: list[tuple[int, bytes]] = []
        """The number and the bytes of each batch, as they came."""
        self.places: dict[str | None, dict[object, tuple[object, list[int]]]] = {}
        """By medium: by hash, the hash of the block before it, and the tokens."""

    def receive(self) -> bool:
        if not self._sub.poll(50):
            return False
        topic, number, batch = self._sub.recv_multipart()
        assert topic == TOPIC.encode()
        self.raw.append((int.from_bytes(number, "big"), batch))
        self.apply(DECODE(batch))
        return True

    def until(self, tokens: int, medium: str) -> None:
        """Receive until so many tokens are in a medium."""
        eventually(lambda: self.receive() and self.tokens(medium) == tokens)

    def tokens(self, medium: str) -> int:
        return sum(len(tokens) for _, tokens in self.places.get(medium, {}).values())

    def apply(self, batch: KVEventBatch) -> None:
        assert batch.data_parallel_rank == 0
        for event in batch.events:
            match event:
                case AllBlocksCleared():
                    self.places.clear()
                case BlockRemoved():
                    assert event.locality == "LOCAL"
                    for one in event.block_hashes:
                        del self.places[event.medium][one]
                case BlockStored():
                    assert event.locality == "LOCAL"
                    known = self.places.setdefault(event.medium, {})
                    before: object = event.parent_block_hash
                    for i, one in enumerate(event.block_hashes):
                        start = i * event.block_size
                        known[one] = before, event.token_ids[start : start + event.block_size]
                        before = one

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        """What one request answers: all batches, or with REQ, which receives once for each request, the first."""
        frames = [start.to_bytes(8, "big")]
        self._replay.send_multipart(frames if self._kind == zmq.REQ else [b"", *frames])
        found: list[tuple[int, bytes]] = []
        while self._replay.poll(60_000 if not found or self._kind == zmq.DEALER else 200):
            *_, topic, number, batch = self._replay.recv_multipart()
            if not batch:
                assert number == ZmqEventPublisher.END_SEQ
                break
            assert topic == TOPIC.encode()
            found.append((int.from_bytes(number, "big"), batch))
        return found

    def close(self) -> None:
        self._context.destroy(0)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Thread]:
    events = {"endpoint": "tcp://127.0.0.1:*", "replay": "tcp://127.0.0.1:*", "token_ids": True, "topic": TOPIC}
    disk = {"path": str(tmp_path / "nvme"), "budget": "64MiB", "segment": "8MiB", "store": "through"}
    dram = {"budget": "16MiB", "segment": "1MiB"}
    running = Thread(tmp_path / "node.sock", events=events, nvme=disk, dram=dram)
    yield running
    running.close()


@pytest.mark.parametrize("kind", [zmq.REQ, zmq.DEALER])
def test_a_subscriber_to_vllm_and_a_trace_read_the_same_stream(node: Thread, tmp_path: Path, kind: int) -> None:
    published = node.node.events
    assert isinstance(published, NodeEvents)
    seen, late = Subscriber(published, kind), Subscriber(published, kind)
    try:
        eventually(lambda: published.statistics().subscriptions)
        with Client(node.path) as client, client.session(MODEL) as session:
            for path in ([1, 2, 3], [1, 2, 4], [5]):
                session.store(prompt(*path), data(PLAIN, prompt(*path)))
                assert client.flush(60)
            seen.until(5 * SIZE, "STORAGE")
            assert seen.tokens("CPU") == 5 * SIZE
            session.drop(prompt(1, 2, 3), start=2)
            seen.until(4 * SIZE, "STORAGE")
        numbers = [number for number, _ in seen.raw]
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        tree = {tuple(tokens): before for before, tokens in seen.places["CPU"].values()}
        names = {tuple(tokens): one for one, (_, tokens) in seen.places["CPU"].items()}
        one, two, four, five = (tuple(prompt(n)) for n in (1, 2, 4, 5))
        assert tree == {one: None, two: names[one], four: names[two], five: None}

        found = late.replay(numbers[1])
        assert found == (seen.raw[1:] if kind == zmq.DEALER else seen.raw[1:2])
        whole = late.replay(0)  # from before all: a snapshot
        for _, batch in whole:
            late.apply(DECODE(batch))
        assert whole[-1][0] <= numbers[-1]
        assert late.places == seen.places

        file = tmp_path / "events.msgpack"
        file.write_bytes(b"".join(batch for _, batch in seen.raw))
        trace = load(file)
        assert trace.block_tokens == SIZE
        assert sorted(map(len, trace.blocks)) == [1, 3, 3]
        stored = [event for _, batch in seen.raw for event in DECODE(batch).events if isinstance(event, BlockStored)]
        assert trace.unique == len({one for event in stored for one in event.block_hashes if event.medium == "CPU"})
    finally:
        seen.close()
        late.close()


def test_every_event_is_one_that_vllm_itself_would_send(node: Thread) -> None:
    """Encoded by vLLM again, it has the same fields with the same values."""
    published = node.node.events
    assert isinstance(published, NodeEvents)
    seen = Subscriber(published, zmq.DEALER)
    try:
        eventually(lambda: published.statistics().subscriptions)
        with Client(node.path) as client, client.session(MODEL) as session:
            session.store(prompt(1, 2), data(PLAIN, prompt(1, 2)))
            seen.until(2 * SIZE, "CPU")
            session.drop(prompt(1, 2))
            eventually(lambda: seen.receive() and not seen.tokens("CPU"))
        kinds: set[type[KVCacheEvent]] = set()
        for _, batch in seen.raw:
            ours, theirs = msgspec.msgpack.decode(batch), msgspec.msgpack.decode(msgspec.msgpack.encode(DECODE(batch)))
            assert [{k: v for k, v in e.items() if v is not None} for e in ours[1]] == [
                {k: v for k, v in e.items() if v is not None} for e in theirs[1]
            ]
            assert (ours[0], ours[2]) == (theirs[0], theirs[2])
            kinds |= {type(event) for event in DECODE(batch).events}
        assert kinds == {AllBlocksCleared, BlockStored, BlockRemoved}
    finally:
        seen.close()
