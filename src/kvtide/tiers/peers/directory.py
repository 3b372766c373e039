"""Which node has which block: the interface. The body follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtide.block import BlockKey
from kvtide.tiers.peers.members import Member

__all__ = ["BlockDirectory", "Directory", "DirectoryStatistics", "open_directory"]


@dataclass(frozen=True, slots=True)
class DirectoryStatistics:
    """What a directory has."""

    entries: int
    """Blocks that some node was said to hold, dead nodes that were not removed yet included. About."""
    nbytes: int
    """Bytes of the server's memory for them, from a sample."""
    members: int


class BlockDirectory:
    """Thread-safe. Every call takes ``timeout`` seconds at most, and raises OSError if Valkey does not answer or
    refuses."""

    def join(self, name: bytes, address: str, lease: float) -> Member:
        """Become a member for ``lease`` seconds. A member of the same name is one no more."""
        raise NotImplementedError

    def renew(self, member: Member, lease: float) -> bool:
        """Extend the lease to ``lease`` seconds from now. False if it has ended, or if some of what the member
        published is lost: then it must join again, and publish everything again."""
        raise NotImplementedError

    def leave(self, member: Member) -> None:
        """End the lease now."""
        raise NotImplementedError

    def members(self) -> Mapping[int, Member]:
        """The live members, by number."""
        raise NotImplementedError

    def holders(self, keys: Sequence[BlockKey]) -> list[tuple[int, ...]]:
        """For each block the numbers of the live members that are said to hold it."""
        raise NotImplementedError

    def publish(self, member: Member, stored: Sequence[BlockKey], removed: Sequence[BlockKey]) -> bool:
        """Say that a member holds the blocks ``stored``, and not those ``removed``. False as with ``renew``."""
        raise NotImplementedError

    def scrub(self, buckets: int) -> int:
        """Remove what dead members published from the next ``buckets`` buckets; returns the number of entries."""
        raise NotImplementedError

    def counts(self) -> DirectoryStatistics:
        raise NotImplementedError

    def close(self) -> None:
        """Close its connections."""
        raise NotImplementedError


Directory = BlockDirectory


def open_directory(
    url: str,
    *,
    cluster: str = "default",
    timeout: float = 1.0,
    user: str = "",
    password_file: str = "",
    password: str = "",
    certificate: str = "",
    identity: str = "",
) -> BlockDirectory:
    """The directory of a cluster in the Valkey at ``url`` (``valkey://host:6379/0``, ``valkeys://`` for TLS), which may
    be a cluster itself. Raises ConfigError; does not need the server to be there yet."""
    raise NotImplementedError
