"""NIXL for tests, over UCX without RDMA."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

from kvtide.tiers.peers.nixl import Nixl
from kvtide.tiers.peers.nixl_process import NixlProcess
from kvtide.tiers.peers.protocol import NIXL
from kvtide.tiers.peers.tcp import Tcp
from kvtide.tiers.peers.transport import PeerConnection, PeerListener

NEEDS_NIXL = pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu12") is None, reason="nixl-cu12 is not installed (pip install --no-deps nixl-cu12)"
)
SHARED, TCP = "tcp,self,sm", "tcp,self"
"""For UCX_TLS: through shared memory and TCP, and through TCP alone."""


class TwoAgents:
    """A transport whose two ends have an agent each, and agree on NIXL without a greeting."""

    def __init__(self, transports: str) -> None:
        self.processes = [NixlProcess({"UCX_TLS": transports}) for _ in range(2)]
        for process in self.processes:
            process.start()
        self.asks, self.serves = (Nixl(Tcp(), process) for process in self.processes)

    def connect(self, address: str, timeout: float) -> PeerConnection:
        return _agreeing(self.asks.connect(address, timeout))

    def listen(self, address: str) -> PeerListener:
        listener = self.serves.listen(address)
        accept: Callable[[], PeerConnection] = listener.accept
        listener.accept = lambda: _agreeing(accept())  # type: ignore[method-assign]
        return listener

    def close(self) -> None:
        for process in self.processes:
            process.close()


def _agreeing(connection: PeerConnection) -> PeerConnection:
    connection.begin = lambda: connection.agreed(NIXL)  # type: ignore[method-assign]
    return connection
