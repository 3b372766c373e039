"""``Match.held_tokens`` through a node: what the node said last, without asking it again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvtide.index.keys import DEFAULT_TENANT
from kvtide.node import protocol as p
from kvtide.node.client.backend import RemoteBackend, RemotePrefixLease
from kvtide.node.client.client import Client
from kvtide.node.client.link import NodeLink
from kvtide.testing.faults import FaultyDisk
from kvtide.testing.interface import MODEL, PLAIN, SIZE, data, prompt
from tests.node.serving import Thread, eventually

TOKENS = prompt(1, 2, 3)


@pytest.fixture
def chilled(tmp_path: Path) -> Iterator[tuple[Thread, FaultyDisk]]:
    """A node that has a prompt on its disk and nothing in memory."""
    dram = {"budget": "4MiB", "segment": "1MiB"}
    nvme = {"path": str(tmp_path / "kv"), "budget": "32MiB", "store": "through"}
    disk = FaultyDisk()
    with contextlib.closing(Thread(tmp_path / "node.sock", dram=dram, nvme=nvme)) as node, Client(node.path) as client:
        client.session(MODEL).store(TOKENS, data(PLAIN, TOKENS))
    with contextlib.closing(Thread(tmp_path / "node.sock", disk, dram=dram, nvme=nvme)) as node:
        yield node, disk


def test_the_end_of_a_load_says_what_is_held(
    chilled: tuple[Thread, FaultyDisk], monkeypatch: pytest.MonkeyPatch
) -> None:
    node, disk = chilled
    with Client(node.path) as client, client.session(MODEL) as session, session.match(TOKENS) as match:
        assert (match.tokens, match.held_tokens, match.ready) == (3 * SIZE, 0, False)
        with disk.gate("read"):
            load = session.load(match)
            assert match.held_tokens == 0
        assert load.transfer.wait(60)
        with monkeypatch.context() as patch:
            patch.setattr(NodeLink, "ask_one", None)
            assert (match.held_tokens, match.ready) == (3 * SIZE, True)
        assert load.wait().tokens == 3 * SIZE


def test_a_part_is_held(chilled: tuple[Thread, FaultyDisk]) -> None:
    node, disk = chilled
    with Client(node.path) as client, client.session(MODEL) as session:
        with session.match(TOKENS[:SIZE]) as first:
            session.load(first).wait(60)
        with session.match(TOKENS) as match, disk.gate("read"):
            assert (match.tokens, match.held_tokens, match.ready) == (3 * SIZE, SIZE, False)
            assert session.load(match, deadline=0.01).wait().tokens == match.held_tokens == SIZE
        with session.match(TOKENS, have=2 * SIZE) as match:
            assert match.held_tokens >= 2 * SIZE


def test_without_the_node_only_what_the_caller_has_is_left_of_a_part(chilled: tuple[Thread, FaultyDisk]) -> None:
    node, _ = chilled
    with Client(node.path) as client, client.session(MODEL) as session:
        with session.match(TOKENS[: 2 * SIZE]) as first:
            session.load(first).wait(60)
        with session.match(TOKENS, have=SIZE) as part, session.match(TOKENS[: 2 * SIZE]) as whole:
            assert (part.held_tokens, whole.held_tokens) == (2 * SIZE, 2 * SIZE)
            client.link.close()
            eventually(lambda: not client.connected)
            assert part.held_tokens == SIZE
            assert whole.held_tokens == 2 * SIZE, "its memory is mapped"


@pytest.mark.parametrize(("ready", "held"), [(True, 3), (False, 1)])
def test_a_node_that_does_not_say_holds_all_or_what_the_caller_has(ready: bool, held: int) -> None:
    told = msgspec.msgpack.encode(["matched", 7, 3, 0.0, None, [3], ready, False, None])
    matched = msgspec.msgpack.decode(told, type=p.Matched)
    backend = RemoteBackend(None, MODEL, DEFAULT_TENANT)  # type: ignore[arg-type]  # it asks nobody
    assert RemotePrefixLease(backend, None, 1, matched).held == held
    ended = msgspec.msgpack.decode(msgspec.msgpack.encode(["ended", 7, 0, ""]), type=p.Ended)
    assert ended.held == -1
