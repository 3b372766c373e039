"""Dynamo's own indexer follows a node, and finds the same prefixes as the node's index: through losses, a late start
and restarts."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.peers.environments import interpreter
from kvtide.index.index import DRAM, SEALED
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.node.client.client import Client
from kvtide.node.events.publisher import NodeEvents
from kvtide.store.partition import NVME
from kvtide.testing.interface import MODEL, PLAIN, SIZE, data, prompt
from tests.node.serving import Thread, eventually

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not interpreter("dynamo").exists(), reason="Dynamo is not here: python bench/peers/environments.py dynamo"
    ),
]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Indexer:
    """A process of Dynamo's indexer."""

    def __init__(self, log: Path) -> None:
        self.port = free_port()
        command = [str(interpreter("dynamo")), "-m", "dynamo.indexer", "--port", str(self.port)]
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file)
        eventually(self._ready)

    def _ready(self) -> bool:
        try:
            self.ask("/workers")
        except (OSError, urllib.error.URLError):
            return False
        return True

    def ask(self, path: str, body: Any = None) -> Any:
        given = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", given, headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read() or b"null")

    def follow(self, number: int, events: dict[str, Any]) -> None:
        where = {"endpoint": events["endpoint"], "replay_endpoint": events["replay"]}
        self.ask("/register", {"instance_id": number, "model_name": "model", "block_size": SIZE, **where})

    def longest(self, number: int, tokens: list[int]) -> tuple[int, int]:
        """Tokens found in memory, and in memory or on the disk."""
        found = self.ask("/query", {"token_ids": tokens, "model_name": "model"})["instances"].get(str(number), {})
        return found.get("cpu", 0), found.get("longest_matched", 0)


class Lossy:
    """A socket that loses some of what it sends."""

    def __init__(self, inner: Any, chance: random.Random) -> None:
        self._inner, self._chance = inner, chance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send_multipart(self, frames: list[bytes], flags: int = 0) -> None:
        if self._chance.random() > 0.3:
            self._inner.send_multipart(frames, flags)


@pytest.fixture
def indexer(tmp_path: Path) -> Iterator[Indexer]:
    made = Indexer(tmp_path / "indexer.log")
    yield made
    made.process.kill()
    made.process.wait()


def ours(node: Thread, tokens: list[int]) -> tuple[int, int]:
    """The same from the node's index."""
    keys = MODEL.namer(DEFAULT_TENANT).chain(tokens).keys(PLAIN.groups[0].suffix)
    index = node.store.index
    with index.lock:
        rows = index.rows(keys)
        memory, disk = ((index.state[tier][rows] == SEALED).tolist() for tier in (DRAM, NVME))
    ends = []
    for start in (prefix(memory, 0), 0):
        ends.append(prefix(disk, start))
    return prefix(memory, 0) * SIZE, max(ends) * SIZE


def prefix(there: list[bool], start: int) -> int:
    while start < len(there) and there[start]:
        start += 1
    return start


@pytest.mark.parametrize("form", ["map", "array"])
def test_dynamo_finds_what_the_index_finds(tmp_path: Path, indexer: Indexer, form: str) -> None:
    chance = random.Random(11)
    events = {
        "endpoint": f"tcp://127.0.0.1:{free_port()}",
        "replay": f"tcp://127.0.0.1:{free_port()}",
        "token_ids": True,
        "form": form,
        "buffer": "1MiB",
    }
    settings: dict[str, Any] = {
        "events": events,
        "dram": {"budget": "2MiB", "segment": "1MiB"},
        "nvme": {"path": str(tmp_path / "nvme"), "budget": "16MiB", "segment": "1MiB", "store": "through"},
    }
    paths = [[chance.randrange(4), 10 + chance.randrange(6), 20 + chance.randrange(9), n] for n in range(30, 110)]

    def play(node: Thread, some: list[list[int]]) -> None:
        with Client(node.path) as client, client.session(MODEL) as session:
            for path in some:
                with session.match(prompt(*path)):
                    session.store(prompt(*path), data(PLAIN, prompt(*path)))
                if chance.random() < 0.2:
                    session.drop(prompt(*path), start=chance.randrange(1, 4))
            assert client.flush(60)

    def agree(node: Thread, *numbers: int) -> None:
        with Client(node.path) as client, client.session(MODEL) as session:

            def different() -> list[Any]:
                last = prompt(1000 + chance.randrange(10**6))  # an event after all that may have been lost
                session.store(last, data(PLAIN, last))
                assert client.flush(60)
                asked = [*[prompt(*path) for path in paths], last]
                found = [(n, ours(node, t), indexer.longest(n, t)) for t in asked for n in numbers]
                return [one for one in found if one[1] != one[2]]

            eventually(lambda: not different())

    node = Thread(tmp_path / "node.sock", **settings)
    indexer.follow(1, events)
    published = node.node.events
    assert isinstance(published, NodeEvents)
    eventually(lambda: published.statistics().subscriptions)
    try:
        play(node, paths[:30])
        agree(node, 1)
        published._publish_socket = Lossy(published._publish_socket, chance)  # type: ignore[assignment]
        play(node, paths[30:60])
        indexer.follow(2, events)
        agree(node, 1, 2)
    finally:
        node.close()
    assert indexer.longest(1, prompt(*paths[0])) in ((0, 0), indexer.longest(2, prompt(*paths[0])))
    node = Thread(tmp_path / "node.sock", **settings)
    try:
        play(node, paths)  # an engine asks for them again
        agree(node, 1, 2)
        assert any(ours(node, prompt(*path))[1] for path in paths)
    finally:
        node.close()
