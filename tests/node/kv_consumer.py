"""A consumer of KV events as a router is one: it keeps which blocks there are, and asks for what it missed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

__all__ = ["OPEN", "Consumer", "Mirror"]

OPEN: list[Consumer] = []
"""Consumers to be closed: one that is not would be reported, as a socket that was left open."""
END = b"\xff" * 8


class Mirror:
    """Which blocks there are, by the events of one node. All rules that a consumer relies on are checked."""

    def __init__(self) -> None:
        self.late = False
        """Whether it may be told of changes of what it does not know, until it is told to forget everything."""
        self.blocks: dict[tuple[str, str], dict[int, tuple[int | None, tuple[int, ...]]]] = defaultdict(dict)
        """By medium and locality: by hash, the parent and the tokens."""
        self.clears = self.stored = 0

    def event(self, event: Any) -> None:
        if not isinstance(event, dict):
            names = ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"]
            if event[0] == "BlockRemoved":
                names = ["type", "block_hashes", "medium"]
            event = dict(zip(names, event, strict=False)) | {"locality": ""}
        if event["type"] == "AllBlocksCleared":
            self.clears += 1
            self.blocks.clear()
            self.late = False
            return
        if self.late:
            return
        known = self.blocks[event["medium"], event["locality"]]
        if event["type"] == "BlockRemoved":
            for one in event["block_hashes"]:
                assert one in known, "a block is removed that was not stored"
                del known[one]
            return
        assert event["type"] == "BlockStored"
        parent, size, tokens = event["parent_block_hash"], event["block_size"], event["token_ids"]
        anywhere = {one for place in self.blocks.values() for one in place}
        assert parent is None or parent in anywhere, "a block is stored before its parent"
        assert len(tokens) in (0, size * len(event["block_hashes"]))
        for i, one in enumerate(event["block_hashes"]):
            assert one not in known, "a block is stored twice"
            self.stored += 1
            known[one] = parent, tuple(tokens[i * size : i * size + size])
            parent = one

    def longest(self, tokens: Sequence[int], medium: str = "CPU", locality: str = "LOCAL") -> int:
        """The longest prefix in one place, in tokens, found by its tokens as routers do."""
        known = self.blocks[medium, locality]
        children = {(parent, some): one for one, (parent, some) in known.items()}
        at, parent = 0, None
        while known:
            size = len(next(iter(known.values()))[1])
            found = children.get((parent, tuple(tokens[at : at + size])))
            if found is None:
                break
            at, parent = at + size, found
        return at


class Consumer(Mirror):
    """Follows one node."""

    def __init__(self, publishes: str, replays: str, *, start: int = 0) -> None:
        """``replays``: empty if it never asks for a replay."""
        super().__init__()
        self.late = not replays
        OPEN.append(self)
        self._context = zmq.Context()
        self.sub = self._context.socket(zmq.SUB)
        self.sub.connect(publishes)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._replays = replays
        self.next = start
        """The number of the batch that it expects."""
        self.gaps = self.batches = self.largest = 0
        self.numbers: list[int] = []

    def close(self) -> None:
        self._context.destroy(0)

    def receive(self, timeout: float = 0.1) -> bool:
        """Apply the next batch, after a replay of what is missing before it. Returns whether there was one."""
        if not self.sub.poll(int(timeout * 1000)):
            return False
        _, number, batch = self.sub.recv_multipart()
        at = int.from_bytes(number, "big")
        if at < self.next:  # the replay had it already
            return True
        if at > self.next:
            self.gaps += 1
            if self._replays:
                self.replay()
        if at >= self.next:
            self.apply(at, batch)
        return True

    def until(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        """Receive until a condition holds."""
        for _ in range(int(seconds * 20)):
            if condition():
                return
            self.receive(0.05)
        known = {place: len(blocks) if len(blocks) > 20 else blocks for place, blocks in self.blocks.items()}
        raise AssertionError(f"{known} after {self.batches} batches")

    def replay(self, start: int | None = None) -> list[int]:
        """Ask for all batches from a number on, and apply them. Returns their numbers."""
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.connect(self._replays)
            dealer.send_multipart([b"", (self.next if start is None else start).to_bytes(8, "big")])
            found: list[int] = []
            while True:
                assert dealer.poll(60_000), "a replay does not end"
                empty, *_, number, batch = dealer.recv_multipart()
                assert empty == b""
                if number == END:
                    assert batch == b""
                    return found
                found.append(int.from_bytes(number, "big"))
                self.apply(found[-1], batch)

    def apply(self, number: int, batch: bytes) -> None:
        self.next = number + 1
        self.batches += 1
        self.largest = max(self.largest, len(batch))
        self.numbers.append(number)
        time, events, rank = msgspec.msgpack.decode(batch)
        assert isinstance(time, float)
        assert rank == 0
        for event in events:
            self.event(event)
