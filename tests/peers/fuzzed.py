"""What is beside nodes that lie: a server with blocks of two tenants, and an honest node that is served meanwhile."""

from __future__ import annotations

import gc
import logging
import math
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.block import BlockKey
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.testing.blocks import Bytes, aligned, identity
from kvtide.testing.interface import MODEL, OTHER_TENANT, PLAIN, data, held, prompt, stripped, until
from kvtide.tiers.base import FoundBlock, Read, ReadResult
from kvtide.tiers.peers.greeting import ask_in
from kvtide.tiers.peers.protocol import RequestCredit, Violation
from kvtide.tiers.peers.tcp import Tcp
from kvtide.tiers.peers.tier import PeerTier
from kvtide.tiers.peers.trust import PeerTrust
from tests.node import host
from tests.peers.nodes import Stores

T = TypeVar("T")
TOKENS = prompt(1, 2, 3, 4)
GEOMETRY = PLAIN.geometry["full"]
RIGHT = data(PLAIN, TOKENS)
OTHERS_RIGHT = data(PLAIN, TOKENS, of="another tenant")
WHO = identity(PLAIN, weights="given:contract")
OTHER = identity(PLAIN, weights="given:contract", tenant=OTHER_TENANT)
NAMES = [bytes(digest) for digest in MODEL.namer(DEFAULT_TENANT).chain(TOKENS).digests]
OTHER_NAMES = [bytes(digest) for digest in MODEL.namer(OTHER_TENANT).chain(TOKENS).digests]
STORED: dict[tuple[int, bytes], Bytes] = {
    **{(WHO.fingerprint, name): block for name, block in zip(NAMES, RIGHT, strict=True)},
    **{(OTHER.fingerprint, name): block for name, block in zip(OTHER_NAMES, OTHERS_RIGHT, strict=True)},
}
CREDIT = RequestCredit()


class Faults(logging.Handler):
    """Exceptions that kvtide has logged: each is a fault of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(record)

    def check(self) -> None:
        assert not self.found, self.found[0].getMessage() + str(self.found[0].exc_info)


class _Done(Generic[T]):
    """What a tier calls when it has done a batch."""

    def __init__(self) -> None:
        self._results: list[T] = []
        self._called = threading.Event()

    def __call__(self, result: T) -> None:
        self._results.append(result)
        self._called.set()

    def wait(self) -> T:
        assert self._called.wait(60), "it hangs"
        (result,) = self._results
        return result


class Reader:
    """A tier that reads from an address, in one request, and what it reads into: memory with a known pattern on both
    sides."""

    GUARD = 4096

    def __init__(self, trust: PeerTrust, address: str, timeout: float = 1.0) -> None:
        self.tier = PeerTier(address, trust, connections=1, timeout=timeout)
        self.whole = [aligned(GEOMETRY.footprint + 2 * self.GUARD) for _ in NAMES]
        for span in self.whole:
            np.frombuffer(span, np.uint8)[:] = 0xA5
        self._inside = slice(self.GUARD, self.GUARD + GEOMETRY.footprint)
        self.keys = [BlockKey(name + WHO.group) for name in NAMES]

    def find(self) -> list[FoundBlock | None]:
        done: _Done[Sequence[FoundBlock | None]] = _Done()
        self.tier.find([(key, WHO) for key in self.keys], done)
        found = done.wait()
        assert len(found) == len(self.keys)
        for block in found:
            assert block is None or not math.isnan(block.expiry)
        return list(found)

    def start(self) -> Callable[[], list[ReadResult]]:
        """Start a read of all blocks; the function waits for it and checks it."""
        done: _Done[Sequence[ReadResult]] = _Done()
        spans = [span[self._inside] for span in self.whole]
        self.tier.read([Read(key, WHO, 0, span) for key, span in zip(self.keys, spans, strict=True)], done)

        def end() -> list[ReadResult]:
            result = done.wait()
            for good, span, right in zip(result, spans, RIGHT, strict=True):
                assert not good or np.array_equal(stripped(PLAIN, span), right), "a wrong byte"
            for span in self.whole:
                outside = np.frombuffer(span, np.uint8)
                assert (outside[: self.GUARD] == 0xA5).all(), "written before the span"
                assert (outside[-self.GUARD :] == 0xA5).all(), "written behind the span"
            return list(result)

        return end

    def has_everything(self) -> bool:
        """Whether all is there, now; every byte is checked."""
        return all(self.find()) and all(self.start()())

    def close(self) -> None:
        self.tier.close()


class World:
    """A server with blocks of two tenants, an honest node, and what is counted."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.faults = Faults()
        logging.getLogger("kvtide").addHandler(self.faults)
        stack.callback(logging.getLogger("kvtide").removeHandler, self.faults)
        self.stores = stack.enter_context(Stores(folder, timeout=1.0))
        self.store, self.server = self.stores.serving()
        for tenant, of in ((DEFAULT_TENANT, ""), (OTHER_TENANT, "another tenant")):
            session = stack.enter_context(self.store.session(MODEL, tenant))
            session.store(TOKENS, data(PLAIN, TOKENS, of=of))
        self.trust = PeerTrust(self.store.config.peers, self.store.config.security)
        self._honest = stack.enter_context(closing(Reader(self.trust, self.server.address, 10.0)))
        self.check_honest()
        self.connections = self.server.statistics().connections

    def closed(self) -> Counter[str]:
        return Counter(self.server.statistics().closed)

    def check(self) -> None:
        self.check_honest()
        until(lambda: self.server.statistics().connections == self.connections)
        until(lambda: self.server.statistics().bytes_held == 0)
        self.faults.check()

    def check_honest(self) -> None:
        """A correct node, on connections that it keeps, reads everything. A busy machine may make it late."""
        until(self._honest.has_everything)

    def greeted(self) -> socket.socket:
        """A connection of a node that knows the secret, which may say what it likes."""
        while True:
            late = self.closed()[Violation.SLOW.value]
            connection: Any = Tcp().connect(self.server.address, 30)
            try:
                ask_in(connection, self.trust.secret())
            except OSError:
                connection.close()
                if self.closed()[Violation.SLOW.value] == late:
                    raise
                continue  # a greeting must be over after a second, and the machine was busy
            sock: socket.socket = connection._sock
            sock.settimeout(30)
            return sock


def many(examples: int, strategy: st.SearchStrategy[T], do: Callable[[T], None]) -> None:
    """Do something with thousands of examples, without a leak. Hypothesis keeps what it has drawn until a test ends, so
    they are drawn in batches."""
    batch, after_some = 250, 0
    for start in range(0, examples, batch):

        @settings(max_examples=batch, deadline=None)
        @given(strategy)
        def some(example: T) -> None:
            do(example)

        some()
        del some
        gc.collect()
        if start == 2 * batch:
            after_some = host.resident(os.getpid())
    assert host.resident(os.getpid()) - after_some < 32 << 20


@contextmanager
def opened(folder: Path) -> Iterator[World]:
    with ExitStack() as stack:
        world = World(folder, stack)
        yield world
        world.check()
        assert held(world.store) == 0


def exactly(sock: socket.socket, nbytes: int) -> bytes:
    found = b""
    while len(found) < nbytes:
        if not (some := sock.recv(nbytes - len(found))):
            raise ConnectionResetError("closed")
        found += some
    return found
