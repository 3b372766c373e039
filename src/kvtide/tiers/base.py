"""The contract of a tier: a medium that stores blocks.

Threads: every method may be called from any thread at any time. None blocks on I/O: work is queued, and ``done`` is
called once per batch (an empty one too), on any thread, perhaps before the call returns, with one result per item in
the items' order. ``done`` must not raise and must not block.

Ownership: the caller owns the spans and leaves them untouched until ``done``. The tier owns its places and its byte
budget, which is never exceeded. A place is the tier's own identifier of where a block is stored; the caller keeps it
and passes it to reads and drops.

Failures: an item that cannot be read whole and verified has the result False, or a ``Miss``, which is false too; its
span then holds garbage. False means that the record is damaged or gone: the caller drops it. A ``Miss`` means that it
may be intact: the caller keeps it for other requests, or for later. An item that cannot be written has the result
NOWHERE and leaves nothing readable. A tier never raises for a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvtide.block import BlockKey, Geometry, Span

__all__ = [
    "NOWHERE",
    "Cuttable",
    "DropDone",
    "FoundBlock",
    "Held",
    "Identity",
    "Miss",
    "Read",
    "ReadDone",
    "ReadResult",
    "Refetching",
    "Renewal",
    "Renewing",
    "Searched",
    "Sync",
    "Tier",
    "TierStatistics",
    "Wish",
    "Write",
    "WriteDone",
    "fingerprint",
]

NOWHERE = -1
_FAILED = 10
"""This many consecutive errors mean that the tier has failed."""


def fingerprint(namespace: bytes, tenant: bytes, layout: bytes, group: bytes) -> int:
    """A number for the owner and layout that a record names: the same in every process and after a restart, never 0."""
    fields = b"".join(len(part).to_bytes(2, "little") + part for part in (namespace, tenant, layout, group))
    return int.from_bytes(blake3(fields, derive_key_context="kvtide 1 identity").digest(8), "little", signed=True) or 1


@dataclass(frozen=True, slots=True)
class Identity:
    """The properties that blocks of one namespace and group share; checked on every read."""

    namespace: bytes
    tenant: bytes
    layout: bytes
    group: bytes
    block_tokens: int
    geometry: Geometry
    itemsize: int
    domain: int = 0
    """The trust domain whose memory holds the blocks; not stored on disk."""
    fingerprint: int = field(init=False, repr=False, compare=False)
    """See ``fingerprint``: to compare many blocks at once."""

    def __post_init__(self) -> None:
        made = fingerprint(self.namespace, self.tenant, self.layout, self.group)
        object.__setattr__(self, "fingerprint", made)

    def __hash__(self) -> int:
        # Hashing all fields would cost more than the lookup it is for.
        return hash(self.namespace)


class Write(msgspec.Struct, frozen=True, gc=False):
    """A block to be written from ``span``, which is as long as its geometry's footprint."""

    key: BlockKey
    identity: Identity
    span: Span
    parent: bytes
    depth: int
    owner: int
    """The caller's own number for the block, not 0; the tier passes it back when it asks what to evict."""
    expiry: float = float("inf")
    priority: int = 0
    tokens: bytes = b""
    since: int = 0
    """The position in the drop log of shared storage up to which drops were known while the block was still here; see
    drop_log.py."""


class Read(msgspec.Struct, frozen=True, gc=False):
    """A block, or some sections of it, to be read into ``span``."""

    key: BlockKey
    identity: Identity
    place: int
    span: Span
    sections: range | None = None
    """Which sections; the span then begins with the first of them. None: all."""

    @property
    def wanted(self) -> range:
        """The sections to read; empty if the block has no such sections or the span is too short for them."""
        geometry = self.identity.geometry
        wanted = range(geometry.sections) if self.sections is None else self.sections
        there = wanted.step == 1 and 0 <= wanted.start < wanted.stop <= geometry.sections
        return wanted if there and len(wanted) * geometry.stride <= len(self.span) else range(0)


@dataclass(frozen=True, slots=True)
class Held:
    """The blocks that a tier holds, in columns, because there may be millions."""

    keys: list[BlockKey]
    parents: npt.NDArray[np.void]
    places: npt.NDArray[np.int64]
    depths: npt.NDArray[np.int64]
    expiries: npt.NDArray[np.float64]
    priorities: npt.NDArray[np.int8]
    sequences: npt.NDArray[np.int64]
    """Order of writing."""
    identities: npt.NDArray[np.int64]
    """Fingerprints; 0 where the owner of a block is not known."""


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """Counters and current contents of a tier."""

    blocks: int
    bytes_used: int
    bytes_taken: int
    """Memory or disk space allocated from the host now; never above ``budget``."""
    budget: int
    bytes_read: int = 0
    bytes_written: int = 0
    failed_reads: int = 0
    failed_writes: int = 0
    reasons: tuple[tuple[str, int], ...] = ()
    """Why blocks were rejected, with counts."""
    errors_in_a_row: int = 0
    """System errors since the last successful read or write."""
    bytes_huge: int = 0
    """Bytes of the allocated memory that are in huge pages, as far as that is known."""
    away: bool = False
    """Whether another node is not asked now, because it does not answer."""
    carrier: str = ""
    """Of another node: what moves its blocks now (TCP, TLS or NIXL); empty: it is not connected."""
    bytes_compressed: int = 0
    """Bytes that other nodes have sent of blocks that they compressed for that, and"""
    bytes_uncompressed: int = 0
    """those of the same blocks in memory."""
    compressed: bool = False
    """Whether another node is asked for compressed blocks now, because they come quicker."""

    @property
    def failed(self) -> bool:
        """Whether the tier has stopped working."""
        return self.errors_in_a_row >= _FAILED


class Miss(Enum):
    """Why a record was not read though it may be intact."""

    REFUSED = "refused"
    """The reader may not have it: another namespace, tenant or layout, or encrypted with a key that is unavailable now.
    """
    FAILED = "failed"
    """The medium or the system failed this read: an I/O error, no memory."""

    def __bool__(self) -> bool:
        return False


ReadResult = bool | Miss
"""True: whole and verified. False: damaged or gone."""
ReadDone = Callable[[Sequence[ReadResult]], None]
DropDone = Callable[[Sequence[bool]], None]
WriteDone = Callable[[Sequence[int]], None]
Sync = Callable[[Sequence[tuple[BlockKey, int]], DropDone], None]
"""The ``sync`` of a tier that survives a restart: make blocks, by key and place, survive a power loss from now on.

Follows the rules of a tier's other methods. True where the block is stored and on the medium; False where it is not
stored, or the medium refused, now or at an earlier sync of the same bytes.
"""


Renewal = tuple[BlockKey, int, float]
"""A block, its place, and its new expiry."""


@runtime_checkable
class Renewing(Protocol):
    """A tier that can change the expiry of its records."""

    def renew(self, items: Sequence[Renewal], done: DropDone) -> None:
        """Change the expiry of records, durably. False where that cannot be done.

        A place may be NOWHERE: traces of an evicted block are removed.
        """

    def note(self, held: Held) -> None:
        """Blocks expire as these columns say: keep that for the next time the tier is opened, if only as a hint."""


@runtime_checkable
class Refetching(Protocol):
    """A tier whose blocks are others', so that a drop removes nothing there: it only fetches them no more."""

    def stored(self, keys: Sequence[BlockKey]) -> None:
        """These blocks are stored here: an earlier drop or expiry does not concern them any more. Cheap."""


@runtime_checkable
class Cuttable(Protocol):
    """A tier that can end a read before its time."""

    def cut(self, batch: Sequence[Read]) -> None:
        """End the read of this very batch soon, if it is under way: what was not read by then has the result
        ``Miss.FAILED``, and that is no failure of the medium. Its memory is used until ``done``. May be repeated."""


class FoundBlock(NamedTuple):
    """The metadata of a block that others have written."""

    place: int
    parent: bytes
    depth: int
    expiry: float
    priority: int


Wish = tuple[BlockKey, Identity]


@runtime_checkable
class Searched(Protocol):
    """A tier whose blocks others write and remove: they are found by looking them up."""

    def find(self, options: Sequence[Wish], done: Callable[[Sequence[FoundBlock | None]], None]) -> None:
        """Look up blocks; None for those that are absent or invalid. Follows the rules of a tier's other methods."""

    def absent(self, key: BlockKey, who: Identity) -> bool:
        """Whether a lookup would find no such block: a recent one did not, or it would not be answered now."""


class Tier(Protocol):
    """See the module's docstring."""

    def read(self, batch: Sequence[Read], done: ReadDone) -> None:
        """Fill each item's span. True where it is whole and verified; see ``ReadResult``."""

    def write(self, batch: Sequence[Write], done: WriteDone) -> None:
        """Store each item. The result is its place, or NOWHERE."""

    def drop(self, items: Sequence[tuple[BlockKey, int]], done: DropDone) -> None:
        """Remove blocks by key and place, so that they never come back, not even after a power loss.

        A place may be NOWHERE: traces of an evicted block are removed all the same. False where the medium refused; the
        block is not readable then, but may come back when the tier is opened again.
        """

    def evict(self, key: BlockKey, place: int) -> None:
        """Free a place for reuse. Does no I/O: the bytes may stay until they are overwritten."""

    def scan(self) -> Iterator[Held]:
        """Yield the blocks that were stored before the tier was opened. Called once, before anything else."""

    def own(self, places: npt.NDArray[np.int64], owners: npt.NDArray[np.int64]) -> None:
        """Set the owners of blocks that ``scan`` found."""

    def statistics(self) -> TierStatistics: ...

    def close(self) -> None:
        """Finish submitted work, then release all resources."""
