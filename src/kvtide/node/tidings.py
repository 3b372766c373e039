"""What a client is told in its own time, over its connection for notices: ends of loads, drops and flushes, and events.

Ends are always told. Events are told as fast as the client reads them: one that is too slow loses some, is told how
many, and loses nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtide.events import Backlog, BlockRemoved, BlockStored, Event, Feed
from kvtide.node import protocol as p
from kvtide.node.connection import Connection

__all__ = ["Tidings"]


class Tidings:
    """What one client is told. All in the node's loop, but for events, which come on any thread."""

    def __init__(self, feed: Feed, soon: Callable[[Callable[[], None]], None]) -> None:
        """``soon`` makes a call in the loop."""
        self._feed = feed
        self._soon = soon
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

    def follow(self, on: bool) -> None:
        """Tell events, or no longer."""
        if on and self._unfollow is None:
            self._unfollow = self._feed.follow(self._happened)
        elif not on and self._unfollow is not None:
            self._unfollow()
            self._unfollow = None

    def _happened(self, event: Event) -> None:
        if self._backlog.put(event):
            self._soon(self._tell_events)

    def _tell_events(self) -> None:
        connection = self.connection
        while connection is not None and not connection.behind and (event := self._backlog.take()) is not None:
            self.tell(_notice(event))

    def close(self) -> None:
        self.follow(False)
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
