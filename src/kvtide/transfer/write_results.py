"""Results of ``flush`` and of a durable store: what was written to tiers below DRAM, what was not, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["BY_CODE", "Flushed", "Persisted", "Unwritten", "by_value"]


class Unwritten(Enum):
    """Why a block is not in a tier below DRAM, or not durable there. The values are part of the protocol."""

    NO_TIER = "no tier below DRAM"
    """The configuration has no tier below DRAM."""
    NOT_ADMITTED = "not admitted"
    """No tier's admission (``nvme.store``) accepts it, or not yet; or the tier has evicted it since."""
    QUEUE_FULL = "queue full"
    """More bytes waited to be written to the tier than its ``queue`` allows."""
    WRITE_BUDGET = "write budget used up"
    """``nvme.write_limit`` or ``nvme.drive_writes_per_day`` is exhausted."""
    QUOTA = "quota used up"
    """The tenant may use no more of that tier."""
    WRITE_FAILED = "write failed"
    """The tier could not write or sync it: a disk error, no space left, no write credit in shared storage.
    ``statistics().tiers[...].reasons`` has details."""
    TIER_TOO_SMALL = "tier too small"
    """The block is larger than the tier's budget."""
    TIMEOUT = "time ran out"
    """It was still being written when the caller stopped waiting."""
    NOT_STORED = "not stored"
    """It is in no tier: there was no space for it in DRAM, its writer aborted, or the caller may not store."""
    REMOVED = "removed"
    """It was dropped, expired or evicted before it was durable."""
    NOT_DURABLE = "no durable tier"
    """No configured tier survives a restart: Valkey gives no guarantee, and DRAM loses everything."""
    CLIENT_LIMIT = "client limit"
    """A node's client may hold no more of the node's memory (``node.client_share``), or has too much under way."""
    CANCELLED = "cancelled"
    """The caller cancelled it."""
    CLOSED = "closed"
    """The store was closed before it was durable."""
    NODE_GONE = "node gone"
    """The node became unavailable before it reported the result."""
    UNKNOWN = "unknown"
    """The node has another version, and reports nothing, or a reason that this version does not know."""

    @property
    def code(self) -> int:
        """A number below 32 for it, in records of this process; never 0."""
        return _CODES[self]

    @property
    def intended(self) -> bool:
        """Whether the block is unwritten because the configuration says so, and not because of a failure."""
        return self in (Unwritten.NO_TIER, Unwritten.NOT_ADMITTED)

    @classmethod
    def _missing_(cls, value: object) -> Unwritten:
        return cls.UNKNOWN  # of a newer node

    @classmethod
    def of(cls, value: str) -> Unwritten:
        """The reason with this protocol value; UNKNOWN if there is none."""
        return cls(value)


def by_value(reasons: Mapping[Unwritten, int]) -> dict[str, int]:
    """The counts with the reasons' protocol values."""
    return {reason.value: count for reason, count in reasons.items()}


_CODES = {reason: number for number, reason in enumerate(Unwritten, 1)}
BY_CODE = {number: reason for reason, number in _CODES.items()}
"""Reasons by ``Unwritten.code``."""


@dataclass(frozen=True, slots=True)
class Flushed:
    """The result of ``flush``. True if every block is written that should be.

    A block that no admission accepts, or for which the configuration has no tier, need not be: it is counted in
    ``unwritten`` but does not make the result False. Written is not synced: a power loss may lose what was written a
    moment ago, unless ``nvme.durable`` is set or the block was stored with ``durable=True``.
    """

    written: int
    """Blocks in DRAM that a lower tier has too."""
    unwritten: Mapping[Unwritten, int] = field(default_factory=dict)
    """Blocks in DRAM that a lower tier should have, or could have, but lacks; counted once for each tier that
    refused."""
    lost: Mapping[Unwritten, int] = field(default_factory=dict)
    """Blocks that left DRAM since the last flush and are in no tier though one should have had them."""
    complete: bool = True
    """False if time ran out during writes, or the node became unavailable or cannot say."""

    def __bool__(self) -> bool:
        return self.complete and not self.lost and all(reason.intended for reason in self.unwritten)

    def __add__(self, other: Flushed) -> Flushed:
        return Flushed(
            self.written + other.written,
            dict(Counter(self.unwritten) + Counter(other.unwritten)),
            dict(Counter(self.lost) + Counter(other.lost)),
            self.complete and other.complete,
        )


@dataclass(frozen=True, slots=True)
class Persisted:
    """Which blocks of a prompt are durable: written and synced in a tier that survives a restart. True if all are."""

    durable: int
    """Number of durable blocks, all groups together."""
    failed: Mapping[str, Mapping[int, Unwritten]]
    """The blocks that are not durable, by group and number in the prompt, with the reason."""

    def __bool__(self) -> bool:
        return not self.failed

    @property
    def reasons(self) -> dict[Unwritten, int]:
        """Number of blocks that are not durable, by reason."""
        return dict(Counter(reason for blocks in self.failed.values() for reason in blocks.values()))
