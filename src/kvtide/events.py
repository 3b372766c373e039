"""Events about blocks, for followers: routers, control planes, tests."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvtide import arguments
from kvtide.block import BlockKey

__all__ = ["Backlog", "BlockRemoved", "BlockStored", "Event", "EventsLost", "Feed", "FeedStatistics"]

log = logging.getLogger("kvtide.events")

_TOGETHER = 1000
"""The most keys that an event has after it waited in a backlog."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """These blocks can now be read from ``tier``."""

    tier: str
    keys: tuple[BlockKey, ...]
    identities: tuple[int, ...] = field(default=(), repr=False, compare=False)
    """The owner of each block, as the fingerprint of its identity; 0 if unknown. A node uses it to choose which clients
    get the event. It is not sent to clients."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """These blocks can no longer be read from ``tier``. ``reason``: evicted, dropped, expired, unreadable or forgotten
    (the block may still be there, and a request for it finds it)."""

    tier: str
    keys: tuple[BlockKey, ...]
    reason: str
    identities: tuple[int, ...] = field(default=(), repr=False, compare=False)
    """As in ``BlockStored``."""


@dataclass(frozen=True, slots=True)
class EventsLost:
    """``count`` events could not be delivered; 0: an unknown number. What was learned from events may be outdated.

    A node's client gets this when it was too slow, or after its node was unavailable; a store in this process never
    sends it.
    """

    count: int


Event = BlockStored | BlockRemoved | EventsLost


@dataclass(frozen=True, slots=True)
class FeedStatistics:
    followers: int = 0
    events: int = 0
    """Events delivered to at least one follower."""


class Feed:
    """Delivers events. Followers are called on the thread that caused the event, without a lock; they must be quick."""

    def __init__(self) -> None:
        self._followers: tuple[Callable[[Event], None], ...] = ()
        self._lock = threading.Lock()
        self._events = 0

    def statistics(self) -> FeedStatistics:
        return FeedStatistics(len(self._followers), self._events)

    @property
    def followed(self) -> bool:
        """Whether there are followers; if not, events need not be created."""
        return bool(self._followers)

    def follow(self, follower: Callable[[Event], None]) -> Callable[[], None]:
        """Call ``follower`` with every event from now on. Call the returned function to stop."""
        arguments.callback(follower, "follower")

        def called(event: Event) -> None:  # a new object, because a follower may be added twice
            follower(event)

        with self._lock:
            self._followers = (*self._followers, called)

        def unfollow() -> None:
            with self._lock:
                self._followers = tuple(f for f in self._followers if f is not called)

        return unfollow

    def publish(self, events: list[Event]) -> None:
        followers = self._followers
        if followers and events:
            with self._lock:
                self._events += len(events)
        for follower in followers:
            for event in events:
                try:
                    follower(event)
                except Exception:
                    log.exception("a follower of events failed on %r", event)


class Backlog:
    """Events that wait for a slow receiver. When many wait, similar ones are merged; when too many wait, they are
    dropped and counted."""

    def __init__(self, most: int = 100_000) -> None:
        self._most = most
        """Maximum number of waiting keys."""
        self._keys = 0
        self._events: deque[Event] = deque()
        self._lock = threading.Lock()

    def put(self, event: Event) -> bool:
        """Add an event. Returns True if the backlog was empty: then the receiver must be notified to ``take``."""
        with self._lock:
            first = not self._events
            if isinstance(event, EventsLost):
                self._lose(event.count)
            elif self._keys + len(event.keys) > self._most:
                self._lose(1)
            else:
                self._keys += len(event.keys)
                for start in range(0, len(event.keys), _TOGETHER):
                    self._join(replace(event, keys=event.keys[start : start + _TOGETHER]))
        return first

    def _lose(self, count: int) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, EventsLost):
            self._events[-1] = EventsLost(last.count + count)
        else:
            self._events.append(EventsLost(count))

    def _join(self, event: BlockStored | BlockRemoved) -> None:
        last = self._events[-1] if self._events else None
        few = len(self._events) < self._most // _TOGETHER
        if few or last is None or isinstance(last, EventsLost) or len(last.keys) + len(event.keys) > _TOGETHER:
            self._events.append(event)
        elif replace(event, keys=()) == replace(last, keys=()):
            self._events[-1] = replace(last, keys=last.keys + event.keys)
        else:
            self._events.append(event)

    def take(self) -> Event | None:
        """The next event, or None."""
        with self._lock:
            event = self._events.popleft() if self._events else None
            if isinstance(event, BlockStored | BlockRemoved):
                self._keys -= len(event.keys)
            return event
