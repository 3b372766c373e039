"""What a client is told in its own time, over its connection for notices: ends of loads, drops and flushes, and events.

Ends are always told. Events are told as fast as the client reads them: one that is too slow loses some, is told how
many, and loses nothing else. They are told of blocks of those models and tenants alone that the client has a session
for: to open one it needs a namespace, which is made with the tenant's naming secret. Administrators are told of all
blocks in their domain, those too of which nobody knows whose they are.
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
"""Loads, drops and flushes of one client at a time."""


class NoticeSender:
    """What one client is told. All in the node's loop, but for events, which come on any thread."""

    def __init__(
        self,
        feed: Feed,
        soon: Callable[[Callable[[], None]], None],
        numbers: Iterator[int],
        tag: bytes,
        mine: Collection[int] | None,
    ) -> None:
        """``soon`` makes a call in the loop; ``tag`` is that of the client's trust domain; ``mine`` are the identities
        of whose blocks it may be told, by their fingerprints; None: of all."""
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
        """The client hears us from now on."""
        self.connection = connection
        connection.drained = self._tell_events
        self._tell_events()

    def tell(self, notice: p.Notice) -> None:
        if self.connection is not None:
            self.connection.send(notice)

    # -- ends ---------------------------------------------------------------------------------------------

    def completion(self) -> int:
        """A number for something whose end will be told."""
        if len(self._under_way) >= _UNDER_WAY:
            raise RightError(f"this client has {_UNDER_WAY} loads, drops and flushes under way; wait for some")
        number = next(self._numbers)
        self._under_way[number] = None
        return number

    def follow_load(self, number: int, transfer: Transfer, holding: PrefixLease) -> None:
        """What was promised is the end of a load."""
        self._under_way[number] = transfer
        transfer.on_end(lambda: self._soon(lambda: self.end(p.Ended(number, held=holding.held))))

    def follow_persist(self, number: int, transfer: Transfer, ended: Callable[[], p.Ended]) -> None:
        """What was promised is that blocks are durable."""
        self._under_way[number] = transfer
        transfer.on_end(lambda: self._soon(lambda: self.end(ended())))

    def keep(self, number: int, count: int = 0, failure: str = "") -> None:
        """It has ended."""
        self.end(p.Ended(number, count, failure))

    def end(self, ended: p.Ended) -> None:
        """It has ended, and this is what there is to say of it."""
        del self._under_way[ended.number]
        self.tell(ended)

    def cancel(self, number: int) -> None:
        """Nobody waits for a load any more."""
        if (transfer := self._under_way.get(number)) is not None:
            transfer.cancel()

    # -- events -------------------------------------------------------------------------------------------

    def follow(self, on: bool) -> None:
        """Tell events, or no longer."""
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
