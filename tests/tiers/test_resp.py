"""Values of many lookups are read at once; whatever they contain, and however they arrive, they are those that were
sent."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.tiers.shared import resp
from kvtide.tiers.shared.resp import ValkeyConnection, ValkeyRefused

_UNIT = 5
_PIECES = st.sampled_from(
    [b"$5\r\n", b"$-1\r\n", b"\r\n", b"$10\r\n", b"abcde", b"$", b"-ERR\r\n", b"\n\n\n", b"", b"0"]
)
_VALUE = st.one_of(
    st.none(),
    st.integers(1, 12).flatmap(lambda n: st.lists(_PIECES, max_size=16).map(lambda p: b"".join(p)[: n * _UNIT])),
    st.integers(1, 12).flatmap(lambda n: st.binary(min_size=n * _UNIT, max_size=n * _UNIT)),
)


@pytest.fixture(scope="module")
def listener() -> Iterator[socket.socket]:
    with closing(socket.create_server(("127.0.0.1", 0))) as sock:
        yield sock


def _received(listener: socket.socket, parts: Sequence[bytes], count: int) -> list[bytes] | ValkeyRefused:
    """What a connection makes of so many values, which are sent in these parts, followed by a reply."""
    end = time.monotonic() + 60
    with closing(ValkeyConnection(listener.getsockname()[:2], None, end)) as connection:
        server, _ = listener.accept()

        def send() -> None:
            with server:
                server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for part in parts:
                    server.sendall(part)
                server.sendall(b":7\r\n")

        thread = threading.Thread(target=send)
        thread.start()
        try:
            found = connection.values(count, end, _UNIT)
            assert connection.reply(end) == 7, "nothing of what follows was consumed"
        finally:
            thread.join()
    return found


@settings(max_examples=150, deadline=None)
@given(st.lists(_VALUE, min_size=1, max_size=40), st.lists(st.integers(0, 2000), max_size=6))
def test_values_are_those_that_were_sent(listener: socket.socket, values: list[bytes | None], cuts: list[int]) -> None:
    data = b"".join([b"$-1\r\n" if v is None else b"$%d\r\n%b\r\n" % (len(v), v) for v in values])
    edges = [0, *sorted(cuts), len(data)]
    parts = [data[start:stop] for start, stop in itertools.pairwise(edges)]
    assert _received(listener, parts, len(values)) == [v or b"" for v in values]


def test_more_values_than_the_buffer_holds(listener: socket.socket) -> None:
    values = [bytes([n % 256]) * (5 * (n % 12 + 1)) for n in range(3000)]
    data = b"".join([b"$%d\r\n%b\r\n" % (len(v), v) for v in values])
    assert _received(listener, [data], len(values)) == values


def test_an_error_among_the_values(listener: socket.socket) -> None:
    data = b"$5\r\nabcde\r\n-MOVED 1 host:1\r\n$5\r\nfghij\r\n"
    found = _received(listener, [data], 3)
    assert isinstance(found, ValkeyRefused)
    assert found == "MOVED 1 host:1"


def test_what_is_no_value_is_refused(listener: socket.socket) -> None:
    with pytest.raises(OSError, match="protocol of Valkey"):
        _received(listener, [b"$5\r\nabcde\r\n:5\r\n$5\r\nfghij\r\n"], 3)


@pytest.mark.parametrize(
    ("item", "following"), [(b":1\r\n", b"*%d\r\n"), (b"$1048574\r\n" + bytes(1048574) + b"\r\n", b"$%d\r\n")]
)
def test_all_of_a_reply_together_is_bounded(listener: socket.socket, item: bytes, following: bytes) -> None:
    """Lists in a list have no limits of their own: whoever answers would decide about this process's memory."""
    count = resp._MOST // 2 if following.startswith(b"*") else resp._LONGEST // (1 << 20)
    end = time.monotonic() + 60
    with closing(ValkeyConnection(listener.getsockname()[:2], None, end)) as connection:
        server, _ = listener.accept()

        def send() -> None:
            with server:
                server.sendall(b"*2\r\n*%d\r\n" % count + item * count + following % (resp._MOST // 2))

        thread = threading.Thread(target=send)
        thread.start()
        try:
            with pytest.raises(OSError, match="does not speak the protocol"):
                connection.reply(end)
        finally:
            thread.join()
