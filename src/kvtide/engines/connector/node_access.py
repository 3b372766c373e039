"""A connector's access to the node: a client, created when it is first needed.

A client reconnects to its node by itself. This module retries getting a client at all, when no node answers or none can
be started. Without it every request would try again, and some attempts start a process. So an attempt is made at most
every 30 seconds, and each failed attempt is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvtide.clock import Clock
from kvtide.errors import KvtideError
from kvtide.node.client.client import Client
from kvtide.node.client.link import NodeUnavailable

__all__ = ["NodeAccess"]

log = logging.getLogger("kvtide.engines")

_AGAIN = 30.0
"""Seconds between attempts."""


class NodeAccess:
    """For use by the node thread."""

    def __init__(self, dial: Callable[[], Client], clock: Clock) -> None:
        self._dial = dial
        self._clock = clock
        self._client: Client | None = None
        self._tried: float | None = None
        self._closed = False

    def client(self) -> Client:
        """Raises NodeUnavailable if there is no client."""
        if self._closed:
            raise NodeUnavailable
        if self._client is None:
            now = self._clock.monotonic()
            if self._tried is not None and now < self._tried + _AGAIN:
                raise NodeUnavailable
            self._tried = now
            try:
                self._client = self._dial()
            except (KvtideError, OSError) as e:
                log.warning("kvtide is off until it reaches a node; it tries again in %g s: %s", _AGAIN, e)
                raise NodeUnavailable from e
        return self._client

    @property
    def dram(self) -> int:
        """DRAM budget in bytes for the node's blocks; 0 until a node was reached. May be called from any thread."""
        client = self._client
        return client.dram if client is not None else 0

    def close(self) -> None:
        self._closed = True
        if self._client is not None:
            self._client.close()
            self._client = None
