"""A half's way to the node: a client, made when it is first needed.

A client looks for its node again by itself. What must be tried again here is to get one at all: where no node answers,
or none can be started. Every request would find that out anew, and some of them start a process for it; so it is tried
now and then, and said once each time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvtide.clock import Clock
from kvtide.errors import KvtideError
from kvtide.node.client.client import Client
from kvtide.node.client.link import NodeUnavailable

__all__ = ["NodeConnector"]

log = logging.getLogger("kvtide.engines")

_AGAIN = 30.0
"""Seconds between attempts."""


class NodeConnector:
    """For the thread that talks to the node."""

    def __init__(self, dial: Callable[[], Client], clock: Clock) -> None:
        self._dial = dial
        self._clock = clock
        self._client: Client | None = None
        self._tried: float | None = None

    def client(self) -> Client:
        """Raises Lost where there is none."""
        if self._client is None:
            now = self._clock.monotonic()
            if self._tried is not None and now < self._tried + _AGAIN:
                raise NodeUnavailable
            self._tried = now
            try:
                self._client = self._dial()
            except (KvtideError, OSError) as e:
                log.warning("kvtide has no node, and is off until it has; it tries again in %g s: %s", _AGAIN, e)
                raise NodeUnavailable from e
        return self._client

    @property
    def dram(self) -> int:
        """Bytes of DRAM that the node's blocks may take; 0 where there was none yet. From any thread."""
        client = self._client
        return client.dram if client is not None else 0

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
