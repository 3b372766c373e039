"""A server without a key, with few connections and short times: clients that are slow, mute or deaf are left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from kvtide.serve.connections import Limits, _network
from tests.node.serving import eventually
from tests.serve.hostile import POST, Raw, works
from tests.serve.serving import FOREVER, Served

QUICK = Limits(connections=24, per_address=16, head_seconds=1, body_seconds=1, read_seconds=1, discard_seconds=1)


@pytest.fixture(scope="module")
def quick() -> Iterator[Served]:
    with Served(limits=QUICK) as served:
        yield served


def test_bodies_that_never_end_keep_nobody_out(quick: Served) -> None:
    """Those who may ask can do no more harm than those who may not."""
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(Raw(quick, POST + "Content-Length: 9\r\n\r\n{"))
        works(quick)


def test_who_is_being_answered_is_not_cut_off(quick: Served) -> None:
    with quick.complete([5, 6], **FOREVER) as running, ExitStack() as stack:
        said = iter(running)
        next(said)
        for _ in range(100):
            stack.enter_context(Raw(quick))
        assert [next(said) for _ in range(5)]


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_who_has_one_ipv6_address_has_many(host: str, network: str) -> None:
    assert _network(host) == network


def test_who_says_nothing_is_left(quick: Served) -> None:
    with Raw(quick) as silent:
        assert silent.rest() == b""


@pytest.mark.parametrize("before", ["", "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_a_head_that_does_not_end_is_given_up(quick: Served, before: str) -> None:
    """The first of a connection, or a later one."""
    with Raw(quick, before) as slow:
        if before:
            assert slow.answer()[0] == 200
        slow.send("GET /health HTTP/1.1\r\n")
        status, content = slow.answer()
        assert (status, content["error"]["message"]) == (408, "the head of the request did not come within 1 seconds")
        assert slow.rest() == b""


def test_bytes_that_trickle_in_do_not_extend_the_time(quick: Served) -> None:
    with Raw(quick, "GET /health HTTP/1.1\r\n") as slow:
        slow.socket.settimeout(0.05)
        said = b""
        while not said:
            slow.send("X: y\r\n")
            try:
                said = slow.socket.recv(1 << 16)
            except TimeoutError:
                continue
        assert said.startswith(b"HTTP/1.1 408 ")


def test_a_body_that_does_not_end_is_given_up(quick: Served) -> None:
    with Raw(quick, POST + "Content-Length: 100\r\n\r\n{") as slow:
        status, content = slow.answer()
        assert (status, content["error"]["message"]) == (408, "the body of the request did not come within 1 seconds")
        slow.rest()
    works(quick)


def test_who_does_not_read_his_answers_is_left(quick: Served) -> None:
    with Raw(quick, "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1) as deaf:
        assert deaf.socket.recv(1)
        deaf.socket.settimeout(1)
        try:
            while True:
                deaf.send("GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
        except (TimeoutError, ConnectionError):
            pass  # the server does not read any more
        eventually(lambda: quick.connections == 0)
    works(quick)


def test_who_hangs_up_in_a_body_is_no_error_of_the_server(quick: Served, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(50):
        with Raw(quick, POST + "Content-Length: 100\r\n\r\n{"):
            pass
    eventually(lambda: quick.connections == 0)
    works(quick)
    assert caplog.text == ""


def test_what_is_not_http_is_refused_and_fills_no_log(quick: Served, caplog: pytest.LogCaptureFixture) -> None:
    for sent in ("\x16\x03\x01\r\n\r\n", f"GET / HTTP/1.1\r\nX: {'y' * 100_000}\r\n\r\n", "no\r\n\r\n"):
        with Raw(quick, sent) as odd:
            status, content = odd.answer()
            assert (status, content["error"]["type"]) == (400, "invalid_request_error")
    works(quick)
    assert caplog.text == ""


def test_a_body_that_is_too_large_is_not_waited_for(quick: Served) -> None:
    with Raw(quick, POST + f"Content-Length: {10**12}\r\n\r\n") as large:
        status, content = large.answer()
        assert (status, content["error"]["message"]) == (413, "the request is larger than 8388608 bytes")
    works(quick)


def test_a_body_in_tiny_chunks_is_refused(quick: Served) -> None:
    with Raw(quick, POST + "Transfer-Encoding: chunked\r\n\r\n") as tiny:
        with suppress(ConnectionError):
            tiny.send("1\r\n \r\n" * 400_000)
        eventually(lambda: quick.connections == 0)
    works(quick)
