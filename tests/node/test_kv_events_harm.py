"""KV events when something goes wrong: consumers that ask for nonsense or do not read, clocks that go back, addresses
that are taken, too much at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from kvtide import Layout, Model, config
from kvtide.block import BlockKey
from kvtide.errors import ConfigError
from kvtide.events import BlockRemoved, BlockStored
from kvtide.index.index import DRAM, SEALED
from kvtide.index.keys import DEFAULT_TENANT, ROOT
from kvtide.node.events import publisher as module
from kvtide.node.events.numbers import LARGEST, BatchNumbers
from kvtide.node.events.open import publish_events
from kvtide.node.events.publisher import NodeEvents
from kvtide.store.backend import LocalBackend
from kvtide.store.store import Store
from kvtide.testing.clock import FakeClock
from tests.node.kv_consumer import END, OPEN, Consumer
from tests.node.serving import eventually

TOKENS = 8192
"""Of a block: few blocks are many bytes."""
LAYOUT = Layout.attention(layers=1, heads=1, head_dim=8, block_tokens=TOKENS)
MODEL = Model(LAYOUT, "weights")
EVENTS = {"endpoint": "tcp://127.0.0.1:*", "replay": "tcp://127.0.0.1:*", "token_ids": True, "buffer": "1MiB"}


class Publisher:
    """A store that publishes, and blocks that it says it has: their bytes do not matter here."""

    def __init__(self, numbers: Path | None = None, clock: FakeClock | None = None, **given: Any) -> None:
        memory = {"dram": {"budget": "16MiB", "segment": "1MiB"}, "explain": {"memory": 0}}
        self.store = Store(config.read(None, {}, memory, events=EVENTS | given), clock=clock)
        self.events: NodeEvents = publish_events(self.store, numbers)
        backend = LocalBackend(self.store.main, LAYOUT, MODEL.namespace(), DEFAULT_TENANT.tag)
        source = self.events.source(backend)
        assert source is not None
        self.source = source

    def describe(self, count: int, parent: bytes = ROOT) -> list[BlockKey]:
        """Blocks after the same parent, which are stored though nothing has said so. Returns their keys."""
        ending, identity = self.source.groups[0]
        names = os.urandom(32 * count)
        keys = [BlockKey(names[i : i + 32] + ending) for i in range(0, len(names), 32)]
        index = self.store.index
        with index.lock:
            rows = np.array([index.add(key, ROOT, 0) for key in keys])
            index.identity[rows] = identity
            index.state[DRAM][rows] = SEALED
        for key in keys:
            self.events.describe(self.source, parent, key[:32], os.urandom(4 * TOKENS))
        return keys

    def keep(self, count: int, parent: bytes = ROOT) -> list[BlockKey]:
        """Store blocks."""
        keys = self.describe(count, parent)
        self.store.feed.publish([BlockStored("dram", tuple(keys))])
        return keys

    def drop(self, keys: Sequence[BlockKey]) -> None:
        with self.store.index.lock:
            self.store.index.state[DRAM][self.store.index.rows(keys)] = 0
        self.store.feed.publish([BlockRemoved("dram", tuple(keys), "dropped")])

    def consumer(self, **given: Any) -> Consumer:
        return Consumer(self.events.address, self.events.replay_address, **given)

    def close(self) -> None:
        self.events.close()
        with self.store.index.lock:
            self.store.index.state[DRAM][:] = 0
        self.store.close()


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Publisher]]:
    """Publishers to close, before consumers are. Nobody is told everything again unless a test says so."""
    monkeypatch.setattr(module, "_ANEW", 1e9)
    made: list[Publisher] = []
    yield made
    for one in made:
        one.close()
    while OPEN:
        OPEN.pop().close()


def number_of(consumer: Consumer) -> int:
    return len(consumer.blocks["CPU", "LOCAL"])


def test_a_consumer_that_asks_for_absurd_numbers_changes_nothing_for_others(opened: list[Publisher]) -> None:
    opened.append(node := Publisher())
    node.describe(3)
    seen = node.consumer()
    seen.until(lambda: number_of(seen) == 3)
    gaps = seen.gaps
    for start in (2**64 - 1, 2**64 - 2, 2**63, LARGEST, LARGEST - 1, 2**50, 2**64 - 1):
        asking = node.consumer()
        asking.replay(start)
        assert number_of(asking) == 3
        assert max(asking.numbers) < node.events.statistics().next_number < LARGEST
    node.keep(1)
    seen.until(lambda: number_of(seen) == 4)
    assert seen.gaps == gaps


def test_a_snapshot_is_never_one_huge_message(opened: list[Publisher]) -> None:
    """Also if the consumer knows all but the last batch, so that there are no numbers for more than one."""
    opened.append(node := Publisher())
    node.describe(400)  # 16 MB of events
    other = node.consumer()
    other.until(lambda: number_of(other) == 400)
    ahead = node.consumer(start=node.events.statistics().next_number + 10)
    ahead.replay()
    assert number_of(ahead) == 400
    late = node.consumer(start=node.events.statistics().next_number - 1)
    late.replay()
    assert number_of(late) == 400
    assert late.largest < 7 << 20
    node.keep(1)
    for one in (other, ahead, late):
        one.until(lambda one=one: number_of(one) == 401)  # type: ignore[misc]
        assert one.numbers == sorted(set(one.numbers))


def test_consumers_that_do_not_read_a_replay_do_not_keep_others_from_one(
    opened: list[Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_REPLIES", 2)
    monkeypatch.setattr(module, "_STALLED", 0.2)
    opened.append(node := Publisher())
    node.describe(800)  # 32 MB: more than sockets hold
    with zmq.Context() as context, context.socket(zmq.DEALER) as one, context.socket(zmq.DEALER) as two:
        for stuck in (one, two):
            stuck.setsockopt(zmq.RCVHWM, 1)
            stuck.setsockopt(zmq.LINGER, 0)
            stuck.connect(node.events.replay_address)
            stuck.send_multipart([b"", bytes(8)])
        eventually(lambda: node.events.statistics().replays == 2)
        asking = node.consumer()
        with asking._context.socket(zmq.DEALER) as dealer:
            dealer.connect(node.events.replay_address)

            def answered() -> bool:
                dealer.send_multipart([b"", bytes(8)])
                return bool(dealer.poll(200))

            eventually(answered)
            while dealer.recv_multipart()[-2] != END:
                assert dealer.poll(60_000)


def test_numbers_go_on_though_the_clock_was_set_back(opened: list[Publisher], tmp_path: Path) -> None:
    """Otherwise a consumer would leave out all that follows."""
    where = {"endpoint": f"ipc://{tmp_path}/events", "replay": f"ipc://{tmp_path}/replay"}
    opened.append(node := Publisher(tmp_path / "numbers", FakeClock(1_900_000_000.0), **where))
    seen = node.consumer()
    node.describe(1)
    seen.until(lambda: number_of(seen) == 1)
    opened.pop().close()
    seen.until(lambda: number_of(seen) == 0)
    opened.append(node := Publisher(tmp_path / "numbers", FakeClock(1_800_000_000.0), **where))
    node.describe(2)
    seen.until(lambda: number_of(seen) == 2)


def test_numbers_of_a_process_that_was_killed_are_not_used_again(tmp_path: Path) -> None:
    path, used = tmp_path / "numbers", 0
    for skip in (0, 250_000, 0):
        numbers = BatchNumbers(0.0, path)
        assert numbers.next > used
        numbers.skip_to(numbers.next + skip)
        for _ in range(150_000):
            used = numbers.take()
    numbers.close()
    assert BatchNumbers(0.0, path).next == used + 1
    for damaged in (b"", b"\xff\xfe", b"9" * 40, b"-5"):
        path.write_bytes(damaged)
        assert BatchNumbers(1_800_000_000.0, path).next == 1_800_000_000_000 - 1_767_225_600_000
    path.unlink()
    path.mkdir()  # it can neither be read nor written
    assert BatchNumbers(0.0, path).take() == 1


def test_a_socket_file_is_taken_from_nobody(opened: list[Publisher], tmp_path: Path) -> None:
    """ZeroMQ alone would delete what is there, and the first of two nodes would go on unheard."""
    letter, endpoint = tmp_path / "letter", f"ipc://{tmp_path}/events"
    letter.write_text("dear")
    with pytest.raises(ConfigError, match="no socket"):
        Publisher(endpoint=f"ipc://{letter}")
    assert letter.read_text() == "dear"
    opened.append(node := Publisher(endpoint=endpoint))
    with pytest.raises(ConfigError, match="another process"):
        Publisher(endpoint=endpoint)
    seen = node.consumer()
    node.describe(1)
    seen.until(lambda: number_of(seen) == 1)
    with pytest.raises(ConfigError, match="cannot listen"):
        Publisher(endpoint=node.events.replay_address)


def test_consumers_of_other_topics_cost_nothing(opened: list[Publisher]) -> None:
    opened.append(node := Publisher(topic="kv@here@model"))
    seen = node.consumer()
    for other in range(100):
        seen.sub.setsockopt(zmq.SUBSCRIBE, b"kv@there@%d" % other)
    seen.sub.setsockopt(zmq.SUBSCRIBE, b"kv@here")
    node.describe(1)
    eventually(lambda: node.events.statistics().subscriptions >= 2)
    seen.until(lambda: number_of(seen) == 1)
    assert node.events.statistics().subscriptions == 2  # with that of all topics


def test_events_that_do_not_fit_lose_nothing(opened: list[Publisher], monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is bounded by blocks, however many an event has; then everything is looked at."""
    monkeypatch.setattr(module, "_WAITING", 1000)
    opened.append(node := Publisher())
    seen = node.consumer()
    node.describe(1)
    seen.until(lambda: number_of(seen) == 1)
    index, keys = node.store.index, node.describe(2)
    seen.until(lambda: number_of(seen) == 3)
    with index.lock:
        index.state[DRAM][index.rows(keys)] = 0
    node.store.feed.publish([BlockStored("dram", tuple(BlockKey(bytes(36)) for _ in range(1001)))])
    seen.until(lambda: number_of(seen) == 1)


def test_later_subscribers_are_told_everything_without_a_replay(
    opened: list[Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nothing happens in the node. Who was there before is told anew, so that nobody is told of a block twice:
    some routers count how often they were."""
    monkeypatch.setattr(module, "_ANEW", 0.0)
    opened.append(node := Publisher(buffer="64MiB"))
    node.describe(300)
    seen = node.consumer()
    seen.until(lambda: number_of(seen) == 300)
    for before in range(1, 3):  # the second one subscribes to what two have subscribed to
        late = Consumer(node.events.address, "")
        late.until(lambda late=late: number_of(late) == 300)  # type: ignore[misc]
        seen.until(lambda before=before: seen.clears > before and number_of(seen) == 300)  # type: ignore[misc]


def test_a_subscriber_who_comes_back_forgets_what_is_gone(
    opened: list[Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if there is another one, and though it asks for no replay. It was away, or its node was killed."""
    monkeypatch.setattr(module, "_ANEW", 0.0)
    opened.append(node := Publisher())
    keys = node.describe(2)
    there = node.consumer()
    back = Consumer(node.events.address, "")
    back.until(lambda: number_of(back) == 2)
    back.sub.disconnect(node.events.address)
    node.drop(keys[:1])
    there.until(lambda: number_of(there) == 1)
    back.sub.connect(node.events.address)
    back.until(lambda: number_of(back) == 1)


def test_who_subscribes_again_and_again_costs_others_nothing(
    opened: list[Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often they subscribe, nobody is told everything again before a time that grows with what there is."""
    monkeypatch.setattr(module, "_ANEW", 1e9)
    opened.append(node := Publisher())
    node.describe(2)
    seen = node.consumer()
    seen.until(lambda: number_of(seen) == 2)
    late = Consumer(node.events.address, "")
    for _ in range(100):
        late.sub.setsockopt(zmq.SUBSCRIBE, b"")
    eventually(lambda: node.events._newcomer)
    node.keep(1)
    seen.until(lambda: number_of(seen) == 3)
    assert seen.clears == 1


def test_who_comes_and_goes_is_not_told_everything_each_time(
    opened: list[Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if nobody else is there, as when a router is restarted again and again."""
    opened.append(node := Publisher())
    node.describe(2)
    for _ in range(20):
        with zmq.Context() as context, context.socket(zmq.SUB) as fickle:
            fickle.connect(node.events.address)
            fickle.subscribe(b"")
            eventually(lambda: node.events.statistics().subscriptions)
        eventually(lambda: not node.events.statistics().subscriptions)
    assert node.events.statistics().stored == 2
    monkeypatch.setattr(node.events, "_patience", 0.0)
    back = Consumer(node.events.address, "")
    back.until(lambda: number_of(back) == 2)


def test_descriptions_with_tokens_that_nobody_wants_take_no_room(
    opened: list[Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may send them nevertheless."""
    monkeypatch.setattr(module, "_DESCRIPTIONS", 8 * TOKENS)
    opened.append(node := Publisher(token_ids=False))
    seen = node.consumer()
    for count in range(1, 20):
        node.keep(1)
        seen.until(lambda count=count: number_of(seen) == count)  # type: ignore[misc]
    assert not node.events.statistics().undescribed


def test_a_failure_of_the_publisher_is_not_its_end(
    opened: list[Publisher], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it knew may be damaged, so it begins anew, and so do consumers."""
    opened.append(node := Publisher())
    seen = node.consumer()
    node.describe(1)
    seen.until(lambda: number_of(seen) == 1)
    with monkeypatch.context() as patch:
        patch.setattr(node.events._blocks, "changes", lambda now: 1 / 0)
        node.keep(1)
        eventually(lambda: "could not be published" in caplog.text)
    node.keep(2)
    seen.until(lambda: seen.clears == 2 and number_of(seen) == 2)
