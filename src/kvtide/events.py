"""What happened to blocks, for whoever follows: routers, control planes, tests."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvtide.block import BlockKey

__all__ = ["BlockRemoved", "BlockStored", "Event", "Feed"]

log = logging.getLogger("kvtide.events")


@dataclass(frozen=True, slots=True)
class BlockStored:
    """These blocks can now be read from ``tier``."""

    tier: str
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """These blocks can no longer be read from ``tier``. ``reason``: evicted, dropped, expired or unreadable."""

    tier: str
    keys: tuple[BlockKey, ...]
    reason: str


Event = BlockStored | BlockRemoved


class Feed:
    """Passes events on. Followers are called on the thread that caused the event, in no lock; they must be quick."""

    def __init__(self) -> None:
        self._followers: tuple[Callable[[Event], None], ...] = ()
        self._lock = threading.Lock()

    @property
    def followed(self) -> bool:
        """Whether anybody would see an event; if not, it need not be made."""
        return bool(self._followers)

    def follow(self, follower: Callable[[Event], None]) -> Callable[[], None]:
        """Call ``follower`` with every event from now on. The answer, called, ends that."""

        def called(event: Event) -> None:  # one of its own: somebody may follow twice
            follower(event)

        with self._lock:
            self._followers = (*self._followers, called)

        def unfollow() -> None:
            with self._lock:
                self._followers = tuple(f for f in self._followers if f is not called)

        return unfollow

    def publish(self, events: list[Event]) -> None:
        for follower in self._followers:
            for event in events:
                try:
                    follower(event)
                except Exception:
                    log.exception("a follower of events failed on %r", event)
