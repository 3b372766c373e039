"""Tells the directory which blocks this node has: the interface. The body follows."""

from __future__ import annotations

from dataclasses import dataclass

from kvtide.clock import Clock
from kvtide.events import Feed
from kvtide.index.index import Index
from kvtide.peers.membership import Membership
from kvtide.store.store import Store
from kvtide.tiers.peers.directory import BlockDirectory

__all__ = ["Announcer", "AnnouncerStatistics"]


@dataclass(frozen=True, slots=True)
class AnnouncerStatistics:
    """What an announcer did."""

    stored: int
    """Blocks published."""
    removed: int
    """Blocks withdrawn."""
    waiting: int
    """Blocks with news that were not published yet."""
    rebuilds: int
    """How often everything was published again."""
    failures: int
    """Calls that failed, or were refused."""


class Announcer:
    """Follows a store's feed. The follower never blocks; a thread publishes."""

    def __init__(
        self,
        index: Index,
        feed: Feed,
        directory: BlockDirectory,
        membership: Membership,
        clock: Clock | None = None,
    ) -> None:
        raise NotImplementedError

    @classmethod
    def of(cls, store: Store, directory: BlockDirectory, membership: Membership) -> Announcer:
        """One for the blocks of ``store`` that are not in reserved shares."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the thread."""
        raise NotImplementedError

    def statistics(self) -> AnnouncerStatistics:
        raise NotImplementedError

    def step(self) -> float:
        """What the thread does: one step. Returns the seconds until the next is due."""
        raise NotImplementedError

    def close(self) -> None:
        """End the thread, and stop following. What was published stays until the member leaves: close this first, then
        the membership."""
        raise NotImplementedError
