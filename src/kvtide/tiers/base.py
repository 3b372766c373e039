"""The contract of a tier: a place where blocks rest.

Threads: every method may be called from any thread at any time. None blocks on I/O: work is queued and ``done`` is
called once per batch (an empty one too), on any thread, perhaps before the call returns, with one answer per item in
the items' order. ``done`` must not raise and must not block.

Who owns what: the caller owns the spans and keeps them untouched until ``done``. The tier owns its places and
its byte budget, which holds at every instant. A place is the tier's own word for where a block lies; the caller
keeps it and gives it back with reads and drops.

Failing: an item that cannot be read whole and verified answers False, or a ``Miss``, which is false too; its span then
holds rubbish. False says that the record is damaged or gone: the caller drops it. A ``Miss`` says that it may be sound:
the caller keeps it for others, or for later. An item that cannot be written answers NOWHERE and leaves nothing
readable. A tier never raises for a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvtide.block import BlockKey, Geometry, Span

__all__ = [
    "NOWHERE",
    "DropDone",
    "Held",
    "Identity",
    "Miss",
    "Read",
    "ReadDone",
    "ReadResult",
    "Renewal",
    "Renewing",
    "Sync",
    "Tier",
    "TierStatistics",
    "Write",
    "WriteDone",
    "fingerprint",
]

NOWHERE = -1
_FAILED = 10
"""So many errors in a row are no accident."""


def fingerprint(namespace: bytes, tenant: bytes, layout: bytes, group: bytes) -> int:
    """A number for what a record says of whose it is: the same in every process and after a restart, and never 0."""
    told = b"".join(len(part).to_bytes(2, "little") + part for part in (namespace, tenant, layout, group))
    return int.from_bytes(blake3(told, derive_key_context="kvtide 1 identity").digest(8), "little", signed=True) or 1


@dataclass(frozen=True, slots=True)
class Identity:
    """What blocks of one namespace and group have in common; checked on every read."""

    namespace: bytes
    tenant: bytes
    layout: bytes
    group: bytes
    block_tokens: int
    geometry: Geometry
    itemsize: int
    domain: int = 0
    """The trust domain in whose memory they lie; nothing on disk."""
    fingerprint: int = field(init=False, repr=False, compare=False)
    """See ``fingerprint``: to compare many blocks at once."""

    def __post_init__(self) -> None:
        made = fingerprint(self.namespace, self.tenant, self.layout, self.group)
        object.__setattr__(self, "fingerprint", made)

    def __hash__(self) -> int:
        # Of all fields it would cost more than what is looked up by it.
        return hash(self.namespace)


class Write(msgspec.Struct, frozen=True, gc=False):
    """A block to be written from ``span``, which is as long as its geometry's footprint."""

    key: BlockKey
    identity: Identity
    span: Span
    parent: bytes
    depth: int
    owner: int
    """The caller's own number for the block, not 0; the tier gives it back when it asks what to evict."""
    expiry: float = float("inf")
    priority: int = 0
    tokens: bytes = b""
    since: int = 0
    """What was known to be dropped from storage that others use too, when the block was still here; see drop_log.py."""


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
        """The sections to read; empty where the block has no such sections or the span no room for them."""
        geometry = self.identity.geometry
        wanted = range(geometry.sections) if self.sections is None else self.sections
        there = wanted.step == 1 and 0 <= wanted.start < wanted.stop <= geometry.sections
        return wanted if there and len(wanted) * geometry.stride <= len(self.span) else range(0)


@dataclass(frozen=True, slots=True)
class Held:
    """What a tier holds, in columns, because there may be millions."""

    keys: list[BlockKey]
    parents: npt.NDArray[np.void]
    places: npt.NDArray[np.int64]
    depths: npt.NDArray[np.int64]
    expiries: npt.NDArray[np.float64]
    priorities: npt.NDArray[np.int8]
    sequences: npt.NDArray[np.int64]
    """Order of writing."""
    identities: npt.NDArray[np.int64]
    """Fingerprints; 0 where it is not known whose a block is."""


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """What a tier has done and holds."""

    blocks: int
    bytes_used: int
    bytes_taken: int
    """Memory or disk that is taken from the host now; never above ``budget``."""
    budget: int
    bytes_read: int = 0
    bytes_written: int = 0
    failed_reads: int = 0
    failed_writes: int = 0
    reasons: tuple[tuple[str, int], ...] = ()
    """Why blocks were refused, with counts."""
    errors_in_a_row: int = 0
    """Errors of the system since something was last read or written well."""
    bytes_huge: int = 0
    """Of memory that is taken: bytes in huge pages, as far as that is known."""

    @property
    def failed(self) -> bool:
        """Whether nothing goes any more."""
        return self.errors_in_a_row >= _FAILED


class Miss(Enum):
    """Why a record was not read though it may be sound."""

    REFUSED = "refused"
    """It is not for this asker: of another namespace, tenant or layout, or sealed with a key that cannot be had now."""
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
"""The ``sync`` of a tier that survives a restart: make blocks, by key and place, outlast a power loss from now on.

Under the rules of a tier's other methods. True where the block is there and the medium has it; False where it is not
there, or the medium refused, now or at an earlier sync of the same bytes.
"""


Renewal = tuple[BlockKey, int, float]
"""A block, its place, and when it expires now."""


@runtime_checkable
class Renewing(Protocol):
    """A tier that can change what its records say of their expiry."""

    def renew(self, items: Sequence[Renewal], done: DropDone) -> None:
        """Let records say when their blocks expire now, after a power loss too. False where that cannot be done.

        A place may be NOWHERE: traces of an evicted block are removed.
        """

    def note(self, held: Held) -> None:
        """Blocks expire as these columns say: keep that for the next opening, if only as a hint."""


class Tier(Protocol):
    """See the module's text."""

    def read(self, batch: Sequence[Read], done: ReadDone) -> None:
        """Fill each item's span. True where it is whole and verified; see ``ReadResult``."""

    def write(self, batch: Sequence[Write], done: WriteDone) -> None:
        """Keep each item. Its place, or NOWHERE."""

    def drop(self, items: Sequence[tuple[BlockKey, int]], done: DropDone) -> None:
        """Remove blocks by key and place, so that they never come back, after a power loss either.

        A place may be NOWHERE: traces of an evicted block are removed all the same. False where the medium
        refused; the block is not readable then, but may come back when the tier is opened again.
        """

    def evict(self, key: BlockKey, place: int) -> None:
        """Give a place back for reuse. Takes no I/O: the bytes may stay until they are overwritten."""

    def scan(self) -> Iterator[Held]:
        """What it holds from before it was opened. To be called once, before anything else."""

    def own(self, places: npt.NDArray[np.int64], owners: npt.NDArray[np.int64]) -> None:
        """Tell the owners of blocks that ``scan`` found."""

    def statistics(self) -> TierStatistics: ...

    def close(self) -> None:
        """Finish what was submitted, then let go of everything."""
