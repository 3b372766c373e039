"""The node, as the handlers of its clients see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from kvtide.node.server.ledger import Ledger
from kvtide.node.server.loop import Loop
from kvtide.node.server.refusals import Refusals
from kvtide.node.server.workers import ServerWorkerGroup
from kvtide.store.node_statistics import Status
from kvtide.store.store import Store
from kvtide.transfer.written import Flushed

__all__ = ["NodeContext"]


class NodeContext(Protocol):
    """What a handler needs of the node."""

    store: Store
    loop: Loop
    ledger: Ledger
    numbers: Iterator[int]
    """Of sessions, rights and promises: never given twice in its life."""
    worker_groups: dict[str, ServerWorkerGroup]
    """By the token of the session that they belong to."""
    refusals: Refusals

    def soon(self, call: Callable[[], None]) -> None:
        """Call in the loop, from any thread."""

    def left(self, token: str, domain: int, requests: int, failures: int) -> None:
        """The client with that token has ended, and holds nothing any more. Its trust domain, and how many requests it
        made, and how many of them failed."""

    def flush(self, done: Callable[[Flushed], None]) -> None:
        """Call when colder tiers have what they were given."""

    def status(self, domain: int | None) -> Status:
        """What it and its store have done, as clients of that trust domain may know it; None: all."""

    def forget(self, token: str, process: int) -> None:
        """A process says that it uses nothing of an earlier client of its own any more."""
