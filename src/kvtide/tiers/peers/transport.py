"""The contract of a transport: ordered bytes between two nodes.

TCP, TLS and NIXL (RDMA) differ in how they move bytes, not in what is said over them (protocol.py). A
transport is a few methods, and ``kvtide.testing.transport`` has its conformance suite.

Threads: a connection is used by one thread, which calls everything but ``interrupt``. ``send`` and ``receive`` block,
and release the GIL meanwhile. They have no timeout of their own: a caller sets ``due``, and a ``Watchdog`` interrupts
the connection when that time has passed. So one deadline covers many calls, and the other end cannot extend it by
sending one byte at a time.

Ownership: when ``send`` or ``receive`` has returned or raised, for whatever reason, the spans are no longer used. A
caller may reuse them at once: the bytes were copied by the kernel.

Failures: everything that can go wrong raises OSError; after that the connection can only be closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtide.block import Span

__all__ = ["PeerConnection", "PeerListener", "PeerTransport"]


class PeerConnection(Protocol):
    """See the module's docstring."""

    peer: str
    """The address of the other end, for messages."""
    encrypted: bool
    """Whether nobody between the two ends can read or change what is sent."""
    due: float
    """When it is to be interrupted, on the monotonic clock; infinity: never. Only its user changes it."""

    features: int
    """Bits of protocol.py: what this end can do on this connection, if the other end can too."""

    @property
    def carrier(self) -> str:
        """What moves the bytes, for people."""

    def begin(self) -> None:
        """Complete the connection, before anything else: for TLS, shake hands."""

    def agreed(self, features: int) -> None:
        """Both ends have authenticated each other, and have these features. Called once, after the greeting."""

    def send(self, parts: Sequence[Span | bytes]) -> None:
        """Send all parts, one after the other."""

    def receive(self, parts: Sequence[Span]) -> None:
        """Fill all parts, one after the other. Raises ConnectionError if the other end closes before."""

    def ended(self) -> bool:
        """Whether the other end has closed it, or has said something that nobody has received, as far as this end knows
        now. Does not wait."""

    def unsent(self) -> int:
        """Bytes that ``send`` was given and the other end has not acknowledged; 0 also if nobody knows."""

    def interrupt(self) -> None:
        """Make current and later calls of ``send`` and ``receive`` fail soon. Any thread may call it, at any time."""

    def close(self) -> None:
        """Release all resources. May be repeated."""

    def abort(self) -> None:
        """``close``, and discard what was sent and has not left this host, as far as the system can."""

    def forked(self) -> None:
        """In a forked child: close its copy, without a message to the other end."""


class PeerListener(Protocol):
    """Accepts connections at an address."""

    address: str
    """Host and port, as others can connect to it."""

    def accept(self) -> PeerConnection:
        """Wait for a connection. Raises OSError; when the listener is closed, always."""

    def close(self) -> None:
        """Accept no more; a waiting ``accept`` ends. May be repeated, on any thread."""

    def forked(self) -> None:
        """In a forked child: close its copy."""


class PeerTransport(Protocol):
    """Makes connections."""

    def connect(self, address: str, timeout: float) -> PeerConnection:
        """Connect to a listener, in at most ``timeout`` seconds; ``begin`` completes it. Raises OSError."""

    def listen(self, address: str) -> PeerListener:
        """Accept connections at an address; port 0 stands for any free port. Raises OSError."""
