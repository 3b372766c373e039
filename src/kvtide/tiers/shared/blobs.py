"""The contract of shared storage: named, immutable byte strings that other hosts see too.

A shared filesystem, an object store and Valkey differ in how they are spoken to, not in what a tier wants of them.
Each is a ``Blobs``, and ``tiers/shared/tier.py`` is the one tier over all of them: records, names, checks, threads and
statistics are there, once.

Threads: every call blocks and is made on a tier's I/O threads, several at a time. Each gets the seconds that it may
take and raises TimeoutError when they are over, and OSError when the storage refuses. That one blob is missing is an
answer, not an error. When a call has ended, however it ended, nobody touches its spans any more; so an implementation
whose calls cannot be interrupted, a filesystem, ends late rather than early, and the tier does not wait for it.

A storage whose reads take as much memory again as the bytes that they bring says so (``copies = True``).

A name is a short ASCII string of letters, digits, ``.``, ``_`` and ``-``; what a blob holds never changes under its
name, so that whoever finds one has found it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

from kvtide.block import Span

__all__ = ["ROOT", "Blobs", "LastingBlobs", "Turn"]

ROOT = "kvtide-1"
"""The folder of all that is ours in storage that others may use for other things, by the version of its names."""


Turn = Callable[[], AbstractContextManager[object]]
"""What is held while the bytes of blobs are sent. It may wait on entry, and raise: then they must not be sent."""


class Blobs(Protocol):
    """See the module's text."""

    def read(self, batch: Sequence[tuple[str, Sequence[Span]]], timeout: float) -> list[int]:
        """Fill each blob's spans from its start; how many bytes came, -1 where there is no such blob."""

    def read_part(self, name: str, into: Span, offset: int, timeout: float) -> int:
        """Fill ``into`` from ``offset``; how many bytes came, -1 where there is no such blob."""

    def write(
        self, batch: Sequence[tuple[str, Sequence[Span]]], timeout: float, turn: Turn = nullcontext
    ) -> list[bool]:
        """Keep each blob, whole or not at all, visible only when whole.

        True too where it was there already (no second upload). The bytes of each blob are sent within a ``turn``, one
        for each or one for all. Waiting for it is not time taken.
        """

    def create(self, name: str, data: bytes, timeout: float) -> bool:
        """Keep a small blob if there is none of that name; whether this call did. Of many callers one gets True.

        Raises OSError (ENOTSUP) where the storage cannot promise that.
        """

    def find(self, names: Sequence[str], timeout: float) -> list[bool]:
        """Which of them are there."""

    def delete(self, names: Sequence[str], timeout: float) -> None:
        """Remove them, so that nobody finds them any more. One that is not there is no error."""

    def list(self, timeout: float, prefix: str = "") -> Iterator[tuple[str, int, float]]:
        """Every blob whose name begins so: name, bytes, when it was written (seconds since 1970).

        What was there before the call and is there after it, is in it. Slow without a prefix, and never for a request.
        """

    def tidy(self, age: float, timeout: float, alive: Callable[[], None]) -> tuple[int, int]:
        """Remove what dead writers left unfinished ``age`` seconds ago or more.

        Answers how many that were, and the bytes of what is unfinished still. It may take long: ``alive`` is called
        again and again meanwhile.
        """

    def close(self) -> None:
        """Let go of everything. Calls in flight end soon, or fail."""


@runtime_checkable
class LastingBlobs(Blobs, Protocol):
    """Storage that can promise that a blob survives a restart and a power loss of whoever keeps it."""

    def sync(self, names: Sequence[str], timeout: float) -> list[bool]:
        """Let blobs outlast a power loss from now on; False for one that is not there or that the storage refused."""
