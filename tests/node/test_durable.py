"""Durable stores and flushes through a node: the same answers, whatever becomes of the node or of its disk."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvtide import Flushed, Model, Persisted, Unwritten
from kvtide.node import protocol as p
from kvtide.node.client import completions
from kvtide.node.client.client import Client
from kvtide.testing.faults import Fault, FaultyDisk
from kvtide.testing.interface import HYBRID, MODEL, PLAIN, SIZE, data, everything, length, prompt
from tests.node.serving import Process, Thread, eventually

TOKENS = prompt(1, 2, 3)


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def node(tmp_path: Path, disk: FaultyDisk) -> Iterator[Thread]:
    dram = {"budget": "4MiB", "segment": "1MiB"}
    nvme = {"path": str(tmp_path / "kv"), "budget": "32MiB", "segment": "1MiB", "store": "second-touch"}
    with contextlib.closing(Thread(tmp_path / "node.sock", disk, dram=dram, nvme=nvme)) as started:
        yield started


def test_what_is_durable_survives_the_death_of_the_node(tmp_path: Path) -> None:
    node = Process(tmp_path, KVTIDE_NVME_STORE="second-touch")
    try:
        with Client(node.path) as client, client.session(MODEL) as session:
            persist = session.store(TOKENS, data(PLAIN, TOKENS), durable=True)
            assert (persist.stored, persist.wait(60)) == (3, Persisted(3, {}))
            session.store(prompt(7), data(PLAIN, prompt(7)))
            node.kill()
            node.start()
            eventually(lambda: client.connected)
            assert length(session, TOKENS) == 3 * SIZE
            assert length(session, prompt(7)) == 0, "nobody asked that it be kept"
    finally:
        node.kill()


def test_reasons_come_through(node: Thread, disk: FaultyDisk) -> None:
    with Client(node.path) as client, client.session(MODEL) as session:
        disk.arm(Fault("resize", code=errno.ENOSPC, files="*.segment", times=1 << 30))
        persisted = session.store(TOKENS, data(PLAIN, TOKENS), durable=True).wait(60)
        assert persisted.failed == {"full": dict.fromkeys(range(3), Unwritten.WRITE_FAILED)}
        session.store(prompt(9), data(PLAIN, prompt(9)))
        flushed = client.flush(60)
        assert not flushed
        assert flushed == Flushed(0, {Unwritten.WRITE_FAILED: 3, Unwritten.NOT_ADMITTED: 1})
        disk.disarm()
        assert session.store(TOKENS, data(PLAIN, TOKENS), durable=True).wait(60)
        assert client.flush(60) == Flushed(3, {Unwritten.NOT_ADMITTED: 1})


def test_each_client_is_told_once_what_was_lost(node: Thread, disk: FaultyDisk) -> None:
    disk.arm(Fault("resize", code=errno.ENOSPC, files="*.segment", times=1 << 30))
    with Client(node.path) as one, Client(node.path) as two, one.session(MODEL) as session:
        session.store(prompt(1), data(PLAIN, prompt(1)), durable=True).wait(60)
        for number in range(100, 400):
            session.store(prompt(number), data(PLAIN, prompt(number)))
        assert length(session, prompt(1)) == 0
        assert [dict(client.flush(60).lost) for client in (one, two, one)] == [
            {Unwritten.WRITE_FAILED: 1},
            {Unwritten.WRITE_FAILED: 1},
            {},
        ]


def test_every_group_goes_with_one_message(node: Thread) -> None:
    with Client(node.path) as client, client.session(Model(HYBRID, "given:hybrid")) as session:
        assert session.store(TOKENS, everything(HYBRID, TOKENS), durable=True).wait(60) == Persisted(12, {})


def test_the_caller_may_stop_waiting_and_nothing_stays_held(node: Thread, disk: FaultyDisk) -> None:
    with Client(node.path) as client, client.session(MODEL) as session:
        with disk.gate("write"):
            persist = session.store(TOKENS, data(PLAIN, TOKENS), durable=True)
            assert persist.wait(0.01).reasons == {Unwritten.TIMEOUT: 3}
            persist.cancel()
            assert persist.wait(60).reasons == {Unwritten.CANCELLED: 3}
        eventually(lambda: node.store.statistics().held == 0)
        assert len(node.store.pipeline.persister) == 0


def test_a_client_that_leaves_holds_nothing_back(node: Thread, disk: FaultyDisk) -> None:
    with disk.gate("write"):
        with Client(node.path) as client, client.session(MODEL) as session:
            session.store(TOKENS, data(PLAIN, TOKENS), durable=True)
        eventually(lambda: len(node.store.pipeline.persister) == 0)
    eventually(lambda: node.store.statistics().held == 0)


def test_without_the_node_nothing_is_known(node: Thread, disk: FaultyDisk) -> None:
    with Client(node.path) as client, client.session(MODEL) as session, disk.gate("write"):
        persist = session.store(TOKENS, data(PLAIN, TOKENS), durable=True)
        client.link.close()
        assert persist.wait(60).reasons == {Unwritten.NODE_GONE: 3}


def test_a_client_cannot_hold_more_than_its_share_for_it(tmp_path: Path, disk: FaultyDisk) -> None:
    dram = {"budget": "4MiB", "segment": "1MiB"}
    nvme = {"path": str(tmp_path / "kv"), "budget": "32MiB", "store": "second-touch"}
    most = int(0.1 * (4 << 20)) // PLAIN.geometry["full"].footprint
    with (
        contextlib.closing(
            Thread(tmp_path / "node.sock", disk, dram=dram, nvme=nvme, node={"client_share": 0.1})
        ) as node,
        Client(node.path) as client,
        client.session(MODEL) as session,
    ):
        with disk.gate("write"):
            some = [session.store(prompt(i), data(PLAIN, prompt(i)), durable=True) for i in range(2 * most)]
            held = node.store.statistics().held
            assert 0 < held <= most
        found = [persist.wait(60) for persist in some]
        assert sum(map(bool, found)) == held
        assert {reason for one in found for reason in one.reasons} <= {Unwritten.CLIENT_LIMIT, Unwritten.NOT_STORED}
        assert session.store(prompt(7), data(PLAIN, prompt(7)), durable=True).wait(60), "its room came back"


def test_a_node_that_does_not_say_is_not_believed() -> None:
    old = msgspec.msgpack.decode(msgspec.msgpack.encode(["ended", 7, 0, ""]), type=p.Ended)
    assert (old.written, old.unwritten, old.lost, old.failed) == (-1, {}, {}, [])
    completion = completions.Completion()
    waiting = completions.Completions()
    waiting.add(7, completion)
    waiting.ended(old)
    assert completion.report is old
    assert Unwritten.of("a reason of a later version") is Unwritten.UNKNOWN
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(["flush"]), type=p.Flush).blocks == []


@pytest.mark.parametrize("blocks", [[(5, 0, 1)], [(0, 0, 9)], [(0, -1, 1)], [(0, 2, 1)], [(0, 0, 1), (0, 0, 1)]])
def test_blocks_that_are_not_in_the_prompt_are_refused(node: Thread, blocks: list[tuple[int, int, int]]) -> None:
    with Client(node.path) as client, client.session(MODEL) as session:
        length(session, TOKENS)
        _, number = session.backend._session()  # type: ignore[attr-defined]
        answer = client.link.ask([p.Flush(number, session.chain(TOKENS).joined, blocks)])
        assert isinstance(answer[0], p.Failure)
        assert len(node.store.pipeline.persister) == 0
