"""Whether another node is asked now: one that does not answer is left alone.

After a request has failed the node is *away*. No prompt finds out whether it is back: that is tried with a greeting
that nobody waits for, after 1 s, 2 s, 4 s and so on, up to a minute. After a greeting the node is asked again; the
pauses begin anew only when it has answered a request, so a node that greets and then answers nothing delays ever fewer
prompts. A node that is this process itself is greeted each minute: the address may be given to another.
"""

from __future__ import annotations

import logging
import math
import threading

from kvtide.clock import Clock
from kvtide.tiers.peers.protocol import PeerViolation

__all__ = ["Availability", "OtherNode", "OwnAddress"]

log = logging.getLogger("kvtide.peers")

_SHORTEST, _LONGEST = 1.0, 60.0
"""Seconds between two trials."""


class OwnAddress(OSError):  # noqa: N818 - a finding
    """The address is the asker's own."""


class OtherNode(OSError):  # noqa: N818 - a finding
    """At the address is another node than the one that was meant, or the same one after a restart."""


class Availability:
    """Of the node at ``address``, or of another ``what``. Thread-safe."""

    def __init__(self, address: str, clock: Clock, what: str = "node") -> None:
        self._address = address
        self._what = what
        self._clock = clock
        self._lock = threading.Lock()
        self.away = False
        """Whether the node must not be asked now."""
        self.own = False
        """Whether the address was found to be the asker's own."""
        self._pause = 0.0
        """Seconds between the last failure and the trial after it; 0: the last request was answered."""
        self._trial_at = math.inf
        self._said = ""
        """The last failure that was logged: each is logged once in a row."""

    def __repr__(self) -> str:
        return f"<Availability of {self._address}: {'away' if self.away else 'asked'}>"

    def try_again(self) -> bool:
        """Whether to greet the node now. True for one caller, who then calls ``greeted`` or ``failed``."""
        if not self.away or self._clock.monotonic() < self._trial_at:
            return False
        with self._lock:
            due = self.away and self._clock.monotonic() >= self._trial_at
            if due:
                self._trial_at = math.inf
            return due

    def greeted(self) -> None:
        """The trial succeeded."""
        with self._lock:
            self.away = False

    def answered(self) -> None:
        """The node has answered a request."""
        if not self._pause:
            return
        with self._lock:
            if self.away:
                return  # another request failed after this one
            self._pause = 0.0
            said, self._said = self._said, ""
        if said:
            log.info("the %s at %s answers again", self._what, self._address)

    def failed(self, e: OSError, *, trial: bool = False) -> bool:
        """A request failed, or the ``trial``. Returns whether the node was asked until now."""
        reason = e.strerror or str(e) or type(e).__name__
        with self._lock:
            if self.away and not trial:
                return False  # several requests failed together
            own = self.own = isinstance(e, OwnAddress)  # before ``away``: others read both without the lock
            first, self.away = not self.away, True
            self._pause = _LONGEST if own else min(_LONGEST, max(_SHORTEST, 2 * self._pause))
            self._trial_at = self._clock.monotonic() + self._pause
            new, self._said = reason != self._said, reason
        if new and own:
            log.info("%s is this node's own address; it is not asked", self._address)
        elif new:
            warn = log.error if isinstance(e, PeerViolation) else log.warning
            text = "the %s at %s is not asked until it answers a greeting again: %s"
            warn(text, self._what, self._address, reason)
        return first
