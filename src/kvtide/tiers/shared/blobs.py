"""The contract of shared storage: named, immutable byte strings that other hosts see too.

A shared filesystem, an object store and Valkey differ in their interfaces, not in what a tier needs from them. Each is
a ``Blobs``, and ``tiers/shared/tier.py`` is the one tier over all of them: it implements records, names, checks,
threads and statistics once.

Threads: every call blocks and is made on a tier's I/O threads, several at a time. Each gets a timeout in seconds,
raises TimeoutError when it is over, and OSError when the storage fails. A missing blob is a result, not an error. When
a call has ended, for whatever reason, its spans are no longer used; so an implementation whose calls cannot be
interrupted, such as a filesystem, ends late rather than early, and the tier does not wait for it.

A storage whose reads need additional memory of the same size as the data says so (``copies = True``).

``str`` of a storage names it for operators, in log lines. Its ``repr`` is its name in a file of a node's directory
(drop_positions.py), and never changes.

A name is a short ASCII string of letters, digits, ``.``, ``_`` and ``-``. The content of a blob never changes under its
name, and a blob that is found is always whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

from kvtide.block import Span

__all__ = ["ROOT", "Blobs", "LastingBlobs", "Turn", "reason_of"]

ROOT = "kvtide-1"
"""The folder of kvtide in storage that may be used for other things too; it has the version of the names."""


Turn = Callable[[], AbstractContextManager[object]]
"""A context that is held while the bytes of blobs are sent. It may wait on entry, and raise: then they must not be
sent."""


def reason_of(e: Exception) -> str:
    """What an error says, for an operator: without the number of an OSError, or its class."""
    return str(getattr(e, "strerror", None) or e) or type(e).__name__


class Blobs(Protocol):
    """See the module's docstring."""

    def read(self, batch: Sequence[tuple[str, Sequence[Span]]], timeout: float) -> list[int]:
        """Fill each blob's spans from its start; returns the bytes read, or -1 if there is no such blob."""

    def read_part(self, name: str, into: Span, offset: int, timeout: float) -> int:
        """Fill ``into`` from ``offset``; returns the bytes read, or -1 if there is no such blob."""

    def write(
        self, batch: Sequence[tuple[str, Sequence[Span]]], timeout: float, turn: Turn = nullcontext
    ) -> list[bool]:
        """Store each blob, whole or not at all, visible only when whole.

        Also True if it already existed (no second upload). The bytes of each blob are sent within a ``turn``, one for
        each or one for all. Waiting for a turn does not count towards the timeout.
        """

    def create(self, name: str, data: bytes, timeout: float) -> bool:
        """Store a small blob unless the name exists; returns whether this call did. Of many callers one gets True.

        Raises OSError (ENOTSUP) if the storage cannot guarantee that.
        """

    def find(self, names: Sequence[str], timeout: float) -> list[bool]:
        """Which of the names exist."""

    def delete(self, names: Sequence[str], timeout: float) -> None:
        """Remove blobs, so that they are not found any more. A missing one is no error."""

    def list(self, timeout: float, prefix: str = "") -> Iterator[tuple[str, int, float]]:
        """Every blob with that name prefix: name, bytes, when it was written (seconds since 1970).

        Includes every blob that exists both before and after the call. Slow without a prefix, and never used for a
        request.
        """

    def tidy(self, age: float, timeout: float, alive: Callable[[], None]) -> tuple[int, int]:
        """Remove what dead writers left unfinished ``age`` seconds ago or more.

        Returns how many were removed, and the bytes of the remaining unfinished ones. It may take long: ``alive`` is
        called repeatedly meanwhile.
        """

    def close(self) -> None:
        """Release all resources. Running calls end soon, or fail."""


@runtime_checkable
class LastingBlobs(Blobs, Protocol):
    """Storage that can guarantee that a blob survives a restart and a power loss of the storage."""

    def sync(self, names: Sequence[str], timeout: float) -> list[bool]:
        """Make blobs survive a power loss from now on; False for one that is missing or that the storage refused."""
