"""The contract of a transport between nodes (``kvtide.tiers.peers.transport``) as tests. Needs pytest.

Derive from ``TransportContract`` and implement ``make``. All bytes that are received are compared with those that were
sent; nothing may hang.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from kvtide.block import Span
from kvtide.testing.blocks import aligned, content
from kvtide.tiers.peers.transport import PeerConnection, PeerListener, PeerTransport
from kvtide.tiers.peers.watchdog import Watchdog

__all__ = ["TransportContract"]

_PATIENCE = 60.0


class TransportContract(ABC):
    """See the module's docstring."""

    encrypted = False
    """Whether nobody in between can read or change what is sent."""
    address = "127.0.0.1:0"
    """Where to listen: any free port."""

    @abstractmethod
    def make(self, folder: Path) -> PeerTransport:
        """A transport, whose two ends trust each other."""

    @pytest.fixture
    def transport(self, tmp_path: Path) -> PeerTransport:
        return self.make(tmp_path)

    @pytest.fixture
    def listener(self, transport: PeerTransport) -> Iterator[PeerListener]:
        listener = transport.listen(self.address)
        yield listener
        listener.close()

    @contextmanager
    def pair(self, transport: PeerTransport, listener: PeerListener) -> Iterator[tuple[PeerConnection, PeerConnection]]:
        """Both ends of a connection: of the one that connected, and of the one that accepted."""
        with ThreadPoolExecutor(1) as pool:
            accepted: Future[PeerConnection] = pool.submit(_accepted, listener)
            mine = transport.connect(listener.address, _PATIENCE)
            try:
                mine.begin()
                theirs = accepted.result(_PATIENCE)
                try:
                    yield mine, theirs
                finally:
                    theirs.close()
            finally:
                mine.close()

    def test_bytes_arrive_in_order_whatever_the_parts(self, transport: PeerTransport, listener: PeerListener) -> None:
        sizes_of = [[1], [3 << 20], [16, 0, 4096, 1 << 20, 5], [7] * 300, [0], [65536] * 40, [1 << 20, 1, 1 << 20]]
        with self.pair(transport, listener) as (mine, theirs), ThreadPoolExecutor(1) as pool:
            assert mine.encrypted == theirs.encrypted == self.encrypted
            for number, sizes in enumerate(sizes_of):
                data = content(bytes([number]), sum(sizes)).tobytes()
                for source, target in ((mine, theirs), (theirs, mine)):
                    got = aligned(len(data))
                    filled = pool.submit(target.receive, _cut(got, sizes[::-1]))
                    source.send(_cut(memoryview(data), sizes))
                    filled.result(_PATIENCE)
                    assert bytes(got) == data

    def test_sent_memory_may_be_reused_at_once(self, transport: PeerTransport, listener: PeerListener) -> None:
        size = 1 << 20
        with self.pair(transport, listener) as (mine, theirs), ThreadPoolExecutor(1) as pool:
            got = [aligned(size) for _ in range(16)]
            filled = pool.submit(theirs.receive, got)
            span = aligned(size)
            for number in range(16):
                np.frombuffer(span, np.uint8)[:] = number
                mine.send([span])
            filled.result(_PATIENCE)
            assert [set(bytes(part)) for part in got] == [{number} for number in range(16)]

    def test_the_end_of_the_other_side_is_an_error(self, transport: PeerTransport, listener: PeerListener) -> None:
        with self.pair(transport, listener) as (mine, theirs):
            theirs.send([b"half"])
            theirs.close()
            assert _fails(lambda: mine.receive([aligned(8)]))
            # What the kernel takes before it learns of the end is no error.
            assert any(_fails(lambda: mine.send([aligned(1 << 20)])) for _ in range(100))

    def test_an_end_is_known_before_anything_is_said(self, transport: PeerTransport, listener: PeerListener) -> None:
        with self.pair(transport, listener) as (mine, theirs):
            theirs.send([b"hello"])
            mine.receive([aligned(5)])
            assert not mine.ended()
            assert not theirs.ended()
            theirs.close()
            _until(mine.ended)
        with self.pair(transport, listener) as (mine, theirs):
            theirs.send([b"what nobody has asked for"])
            _until(mine.ended)
            got = aligned(25)
            mine.receive([got])
            assert bytes(got) == b"what nobody has asked for", "asking does not take it away"

    def test_what_was_not_taken_is_unsent(self, transport: PeerTransport, listener: PeerListener) -> None:
        with self.pair(transport, listener) as (mine, theirs), ThreadPoolExecutor(1) as pool:
            size = 64 << 20  # more than any buffer between the two has
            sending = pool.submit(mine.send, [aligned(size)])
            _until(lambda: mine.unsent() > 0)
            theirs.receive([aligned(size)])
            sending.result(_PATIENCE)
            _until(lambda: not mine.unsent())
            mine.close()
            assert not mine.unsent()

    def test_an_aborted_connection_is_closed(self, transport: PeerTransport, listener: PeerListener) -> None:
        with self.pair(transport, listener) as (mine, theirs), ThreadPoolExecutor(1) as pool:
            hangs = pool.submit(theirs.send, [aligned(64 << 20)])  # more than any buffer between the two has
            with pytest.raises(TimeoutError):
                hangs.result(0.05)
            theirs.interrupt()
            assert _fails(lambda: hangs.result(_PATIENCE))
            theirs.abort()
            theirs.abort()
            assert _fails(lambda: mine.receive([aligned(64 << 20)]))
            assert _fails(lambda: theirs.send([b"more"]))
            mine.close()
            mine.abort()

    @pytest.mark.parametrize("end", ["mine", "theirs"])
    @pytest.mark.parametrize("call", ["send", "receive"])
    def test_an_interrupt_ends_what_is_under_way(
        self, transport: PeerTransport, listener: PeerListener, end: str, call: str
    ) -> None:
        with self.pair(transport, listener) as (mine, theirs), ThreadPoolExecutor(1) as pool:
            one = mine if end == "mine" else theirs
            hangs = pool.submit(getattr(one, call), [aligned(64 << 20)])  # more than any buffer between the two has
            with pytest.raises(TimeoutError):
                hangs.result(0.05)
            one.interrupt()
            assert _fails(lambda: hangs.result(_PATIENCE))
            assert _fails(lambda: getattr(one, call)([aligned(1)]))
            one.interrupt()
            one.close()
            one.interrupt()
            one.close()

    def test_a_deadline_holds_however_slowly_bytes_come(self, transport: PeerTransport, listener: PeerListener) -> None:
        watchdog = Watchdog(0.2)
        with self.pair(transport, listener) as (mine, theirs), ThreadPoolExecutor(1) as pool:
            stop = threading.Event()

            def trickle() -> None:
                with suppress(OSError):
                    while not stop.wait(0.01):
                        theirs.send([b"x"])

            slow = pool.submit(trickle)
            watchdog.add(mine)
            watchdog.limit(mine, 0.2)
            assert _fails(lambda: mine.receive([aligned(1 << 20)]))
            stop.set()
            slow.result(_PATIENCE)
            watchdog.remove(mine)
        watchdog.close()

    def test_a_deadline_holds_after_a_quiet_time(self, transport: PeerTransport, listener: PeerListener) -> None:
        watchdog = Watchdog(0.01)
        with self.pair(transport, listener) as (mine, _):
            watchdog.add(mine)
            end = time.monotonic() + _PATIENCE
            while not watchdog.sleeps:
                assert time.monotonic() < end
                time.sleep(0.005)
            watchdog.limit(mine, 0.01)
            assert _fails(lambda: mine.receive([aligned(1)]))
            watchdog.remove(mine)
        watchdog.close()

    def test_a_closed_listener_accepts_no_more(self, transport: PeerTransport, listener: PeerListener) -> None:
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(listener.accept)
            with pytest.raises(TimeoutError):
                waits.result(0.05)
            listener.close()
            assert _fails(lambda: waits.result(_PATIENCE))
            assert _fails(lambda: listener.accept())
        assert _fails(lambda: transport.connect(listener.address, 1.0).begin())

    @pytest.mark.parametrize("address", ["", "nowhere", "127.0.0.1:", ":9", "127.0.0.1:70000", "127.0.0.1:x"])
    def test_addresses_that_are_none(self, transport: PeerTransport, address: str) -> None:
        assert _fails(lambda: transport.connect(address, 1.0))
        assert _fails(lambda: transport.listen(address))

    def test_nothing_stays_open(self, transport: PeerTransport, listener: PeerListener) -> None:
        before = _open()
        for _ in range(5):
            with self.pair(transport, listener) as (mine, theirs):
                theirs.close()
                assert _fails(lambda: mine.receive([aligned(1)]))
        assert _open() == before


def _fails(call: Callable[[], object]) -> bool:
    """Whether a call raises OSError."""
    try:
        call()
    except OSError:
        return True
    return False


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def _open() -> int:
    """Descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def _accepted(listener: PeerListener) -> PeerConnection:
    connection = listener.accept()
    connection.begin()
    return connection


def _cut(span: Span, sizes: Sequence[int]) -> list[Span]:
    parts, start = [], 0
    for size in sizes:
        parts.append(span[start : start + size])
        start += size
    return parts
