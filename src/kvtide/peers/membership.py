"""Keeps a node a member of its cluster: the interface. The body follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvtide.clock import Clock
from kvtide.tiers.peers.directory import BlockDirectory
from kvtide.tiers.peers.members import Member

__all__ = ["Membership"]


class Membership:
    """Joins, renews the lease, and knows the live members. Thread-safe; reads never block."""

    def __init__(
        self,
        directory: BlockDirectory,
        name: bytes,
        address: str,
        *,
        lease: float = 15.0,
        clock: Clock | None = None,
    ) -> None:
        """``name`` is the store's. An empty ``address``: it serves nobody, only follows the members and never joins."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the thread."""
        raise NotImplementedError

    @property
    def own(self) -> Member | None:
        """This node as a member; None while it has no lease that is known to be good."""
        raise NotImplementedError

    def members(self) -> Mapping[int, Member]:
        """The live members by number, this node included. Empty after ``lease`` seconds without contact."""
        raise NotImplementedError

    def on_change(self, called: Callable[[], None]) -> Callable[[], None]:
        """Call ``called``, on the membership's thread, whenever ``own`` or ``members()`` changed. It must not block.
        Call the returned function to stop."""
        raise NotImplementedError

    def rejoin(self) -> None:
        """Give up this epoch for a new one: what was published under the old one is not believed any more."""
        raise NotImplementedError

    def step(self) -> float:
        """What the thread does: one step. Returns the seconds until the next is due."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave, and end the thread."""
        raise NotImplementedError
