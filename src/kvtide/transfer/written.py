"""What was written to tiers below DRAM, what was not, and why: the answers of ``flush`` and of a durable store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["Flushed", "Persisted", "Unwritten"]


class Unwritten(Enum):
    """Why a block is not in a tier below DRAM, or not durable there. The values go over the wire."""

    NO_TIER = "no tier below DRAM"
    """The configuration has none."""
    NOT_ADMITTED = "not admitted"
    """No tier's admission (``nvme.store``) wants it there, or not yet; or the tier has evicted it since."""
    QUEUE_FULL = "queue full"
    """More bytes waited to be written to the tier than its ``queue`` may hold."""
    WRITE_BUDGET = "write budget used up"
    """``nvme.write_limit`` or ``nvme.drive_writes_per_day``."""
    QUOTA = "quota used up"
    """The tenant may have no more in that tier."""
    WRITE_FAILED = "write failed"
    """The tier could not take it or could not sync it: a disk's error, no space left, no credit of a shared storage.
    ``statistics().tiers[...].reasons`` has details."""
    TIER_TOO_SMALL = "tier too small"
    """The block is larger than the tier's budget."""
    TIMEOUT = "time ran out"
    """It was still being written when the caller stopped waiting."""
    NOT_STORED = "not stored"
    """It is in no tier: there was no room for it in DRAM, its writer gave up, or the caller may not store."""
    REMOVED = "removed"
    """It was dropped, expired or evicted before it was durable."""
    NOT_DURABLE = "no durable tier"
    """No tier of the configuration survives a restart: Valkey promises nothing, DRAM less."""
    CLIENT_LIMIT = "client limit"
    """A node's client may hold no more of the node's memory (``node.client_share``), or has too much under way."""
    CANCELLED = "cancelled"
    """The caller cancelled it."""
    CLOSED = "closed"
    """The store was closed before it was durable."""
    NODE_GONE = "node gone"
    """The node went away before it said."""
    UNKNOWN = "unknown"
    """The node is of another version, and does not say, or says what this version does not know."""

    @property
    def intended(self) -> bool:
        """Whether the block is not written because the configuration says so, and not because something went wrong."""
        return self in (Unwritten.NO_TIER, Unwritten.NOT_ADMITTED)

    @classmethod
    def of(cls, value: str) -> Unwritten:
        """The reason that goes over the wire by that value."""
        try:
            return cls(value)
        except ValueError:
            return cls.UNKNOWN


@dataclass(frozen=True, slots=True)
class Flushed:
    """What ``flush`` found when it had waited. True if every block is written that should be.

    A block that the admission does not want written, or for which the configuration has no tier, need not be: it is
    counted in ``unwritten`` and changes nothing. Written is not synced: a power loss may take what was written a moment
    ago, unless ``nvme.durable`` is set or the block was stored with ``durable=True``.
    """

    written: int
    """Blocks in DRAM that a tier below has as well."""
    unwritten: Mapping[Unwritten, int] = field(default_factory=dict)
    """Blocks in DRAM that a tier below should have, or could have, and has not; once for each tier that refused."""
    lost: Mapping[Unwritten, int] = field(default_factory=dict)
    """Blocks that have left DRAM since the last flush, and are in no tier though one was to have them."""
    complete: bool = True
    """False: the time ran out while something was being written, or the node went away or cannot say."""

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
    """Blocks of all groups that are."""
    failed: Mapping[str, Mapping[int, Unwritten]]
    """Those that are not, by group and number in the prompt, and why."""

    def __bool__(self) -> bool:
        return not self.failed

    @property
    def reasons(self) -> dict[Unwritten, int]:
        """How many are not durable, by reason."""
        return dict(Counter(reason for blocks in self.failed.values() for reason in blocks.values()))
