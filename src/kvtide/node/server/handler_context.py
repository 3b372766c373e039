"""The interface of the node for its client handlers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from kvtide.node.events.described import BlockSource
from kvtide.node.server.loop import Loop
from kvtide.node.server.mapped_memory import MappedMemory
from kvtide.node.server.refusals import Refusals
from kvtide.node.server.workers import ServerWorkerGroup
from kvtide.store.backend import LocalBackend
from kvtide.store.node_statistics import KvEventStatistics, Status
from kvtide.store.store import Store
from kvtide.transfer.write_results import Flushed

__all__ = ["BlockDescriber", "NodeContext"]


class BlockDescriber(Protocol):
    """Takes descriptions of blocks, to publish them."""

    @property
    def wants(self) -> int:
        """See ``Welcome.describe``."""

    def statistics(self) -> KvEventStatistics: ...

    def source(self, backend: LocalBackend) -> BlockSource | None:
        """What the blocks of a session have in common; None if they are not published."""

    def describe(self, source: BlockSource, parent: bytes, digests: bytes, tokens: bytes) -> None:
        """Consecutive blocks, the first of them after ``parent``, with their tokens. Does not wait."""


class NodeContext(Protocol):
    """The parts of a node that a client handler uses."""

    store: Store
    loop: Loop
    mapped_memory: MappedMemory
    numbers: Iterator[int]
    """Numbers of sessions, rights and completions: never reused during the node's run."""
    worker_groups: dict[str, ServerWorkerGroup]
    """By the token of the session that they belong to."""
    refusals: Refusals
    events: BlockDescriber | None
    """None if no KV events are published."""

    def soon(self, call: Callable[[], None]) -> None:
        """Call ``call`` in the loop. Safe from any thread."""

    def left(self, token: str, domain: int, requests: int, failures: int) -> None:
        """The client with that token has ended and has no rights any more; with its trust domain, and how many requests
        it made and how many of its operations failed."""

    def flush(self, done: Callable[[Flushed], None]) -> None:
        """Call ``done`` when the colder tiers have written what they were given."""

    def status(self, domain: int | None) -> Status:
        """Statistics of the node and its store, as clients of that trust domain may see them; None: all of them."""

    def drain(self, resume: bool) -> bool:
        """See ``protocol.Drain``. Begins it, and does not wait."""

    def forget(self, token: str, process: int) -> None:
        """A process reports that it does not use the rights of an earlier client of its own any more."""
