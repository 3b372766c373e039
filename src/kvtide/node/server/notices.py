"""Notices to a client, over its second connection: ends of loads, drops and flushes, and events.

Ends are always sent. Events are sent as fast as the client reads them: a client that is too slow misses some events, is
told how many, and misses nothing else.

Events are sent only for blocks of models and tenants that the client has a session for: opening one needs a namespace,
which is derived with the tenant's naming secret. Administrators get events of all blocks in their domain, including
blocks whose identity is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from kvtide.errors import RightError
from kvtide.events import Backlog, BlockRemoved, BlockStored, Event, Feed
from kvtide.node import protocol as p
from kvtide.node.server.access import seen
from kvtide.node.server.connection import Connection
from kvtide.store.backend import PrefixLease
from kvtide.transfer.transfer import Transfer

__all__ = ["NoticeSender"]

_UNDER_WAY = 1000
"""Maximum number of loads, drops and flushes of one client at a time."""


class NoticeSender:
    """Sends one client's notices. Call it in the node's loop; only events arrive from any thread."""

    def __init__(
        self,
        feed: Feed,
        soon: Callable[[Callable[[], None]], None],
        numbers: Iterator[int],
        tag: bytes,
        mine: Collection[int] | None,
    ) -> None:
        """``soon`` makes a call in the loop; ``tag`` is that of the client's trust domain; ``mine`` are the
        fingerprints of the identities for whose blocks the client gets events; None: for all."""
        self._tag = tag
        self._mine = mine
        self._feed = feed
        self._soon = soon
        self._numbers = numbers
        self._under_way: dict[int, Transfer | None] = {}
        self._backlog = Backlog()
        self._unfollow: Callable[[], None] | None = None
        self.connection: Connection | None = None

    def connect(self, connection: Connection) -> None:
        """The client's connection for notices is open."""
        self.connection = connection
        connection.drained = self._tell_events
        self._tell_events()

    def tell(self, notice: p.Notice) -> None:
        if self.connection is not None:
            self.connection.send(notice)

    # -- ends ---------------------------------------------------------------------------------------------

    def completion(self) -> int:
        """A new number for an operation whose end will be reported."""
        if len(self._under_way) >= _UNDER_WAY:
            raise RightError(f"this client has {_UNDER_WAY} loads, drops and flushes under way; wait for some")
        number = next(self._numbers)
        self._under_way[number] = None
        return number

    def follow_load(self, number: int, transfer: Transfer, holding: PrefixLease) -> None:
        """Report the end of a load under ``number``."""
        self._under_way[number] = transfer
        transfer.on_end(lambda: self._soon(lambda: self.end(p.Ended(number, held=holding.held))))

    def follow_persist(self, number: int, transfer: Transfer, ended: Callable[[], p.Ended]) -> None:
        """Report the end of a wait for durable blocks under ``number``."""
        self._under_way[number] = transfer
        transfer.on_end(lambda: self._soon(lambda: self.end(ended())))

    def keep(self, number: int, count: int = 0, failure: str = "") -> None:
        """Report the end of a drop, an expiry or a flush."""
        self.end(p.Ended(number, count, failure))

    def end(self, ended: p.Ended) -> None:
        """Send the report of an operation's end."""
        del self._under_way[ended.number]
        self.tell(ended)

    def cancel(self, number: int) -> None:
        """Cancel a load or a wait for durable blocks."""
        if (transfer := self._under_way.get(number)) is not None:
            transfer.cancel()

    # -- events -------------------------------------------------------------------------------------------

    def follow(self, on: bool) -> None:
        """Start or stop sending events."""
        if on and self._unfollow is None:
            self._unfollow = self._feed.follow(self._happened)
        elif not on and self._unfollow is not None:
            self._unfollow()
            self._unfollow = None

    def _happened(self, event: Event) -> None:
        if isinstance(event, BlockStored | BlockRemoved):
            keys = seen(self._tag, event.keys, event.identities, self._mine)
            event = replace(event, keys=keys, identities=())
            if not event.keys:
                return
        if self._backlog.put(event):
            self._soon(self._tell_events)

    def _tell_events(self) -> None:
        connection = self.connection
        while connection is not None and not connection.behind and (event := self._backlog.take()) is not None:
            self.tell(_notice(event))

    def close(self) -> None:
        self.follow(False)
        for number in list(self._under_way):
            self.cancel(number)
        if self.connection is not None:
            self.connection.close()


def _notice(event: Event) -> p.Notice:
    match event:
        case BlockStored():
            return p.Stored(event.tier, [bytes(k) for k in event.keys])
        case BlockRemoved():
            return p.Removed(event.tier, [bytes(k) for k in event.keys], event.reason)
        case _:
            return p.EventsLost(event.count)
