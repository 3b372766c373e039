"""The node, as its clients' guests see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from kvtide.node.server.ledger import Ledger
from kvtide.node.server.loop import Loop
from kvtide.node.server.refusals import Refusals
from kvtide.node.server.workers import ServerWorkerGroup
from kvtide.store.node_statistics import Status
from kvtide.store.store import Store
from kvtide.transfer.written import Flushed

if TYPE_CHECKING:
    from kvtide.node.server.handler import ClientHandler

__all__ = ["NodeContext"]


class NodeContext(Protocol):
    """What a guest needs of the node."""

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

    def left(self, handler: ClientHandler) -> None:
        """A client has ended, and holds nothing any more."""

    def flush(self, done: Callable[[Flushed], None]) -> None:
        """Call when colder tiers have what they were given."""

    def status(self, domain: int | None) -> Status:
        """What it and its store have done, as clients of that trust domain may know it; None: all."""

    def forget(self, token: str, process: int) -> None:
        """A process says that it uses nothing of an earlier client of its own any more."""
