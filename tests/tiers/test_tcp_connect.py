"""Connections end at their deadline, whatever the resolver of names does."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvtide.testing.interface import until
from kvtide.tiers import tcp_connect
from kvtide.tiers.peers.tcp import Tcp
from kvtide.tiers.shared.resp import ValkeyConnection

NAME = "node-7.example"
LONG = 60.0
SHORT = 0.05


class Resolver:
    """The system's. While it is held, no name server answers; then ``NAME`` is this host."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.asked = 0
        self._real = socket.getaddrinfo

    def __call__(self, host: str, port: int, **how: Any) -> Any:
        if host != NAME or how.get("flags", 0) & socket.AI_NUMERICHOST:
            return self._real(host, port, **how)
        self.asked += 1
        self.wait()
        return self._real("127.0.0.1", port, **how)

    def wait(self) -> None:
        assert self.answers.wait(LONG)


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    one = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", one)
    yield one
    one.answers.set()
    until(lambda: not tcp_connect._under_way)


@pytest.mark.parametrize(
    "connect",
    [
        lambda port: ValkeyConnection((NAME, port), None, time.monotonic() + SHORT),
        lambda port: Tcp().connect(f"{NAME}:{port}", SHORT),
    ],
)
def test_a_resolver_that_hangs_costs_the_deadline(resolver: Resolver, connect: Callable[[int], object]) -> None:
    """A node that stops would wait for it, instead of writing its blocks."""
    for _ in range(3):
        with pytest.raises(TimeoutError, match=f"no name server has answered for {NAME}"):
            connect(9)
    until(lambda: resolver.asked > 0)
    assert resolver.asked == 1, "all have waited for the same thread"


def test_who_waits_for_a_name_gets_what_another_has_asked_for(resolver: Resolver) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = NAME, listener.getsockname()[1]
        with pytest.raises(TimeoutError):
            tcp_connect.tcp_connect(where, time.monotonic() + SHORT)
        threading.Timer(SHORT, resolver.answers.set).start()
        tcp_connect.tcp_connect(where, time.monotonic() + LONG).close()
        before = resolver.asked
        tcp_connect.tcp_connect(where, time.monotonic() + LONG).close()
        assert resolver.asked == before + 1, "what was found is not kept: a name may be given to another host"


def test_an_address_in_digits_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda _: pytest.fail("a thread"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tcp_connect.tcp_connect(listener.getsockname()[:2], time.monotonic() + LONG).close()


def test_without_threads_a_name_is_not_resolved_and_the_next_call_tries_again(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolver.answers.set()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = NAME, listener.getsockname()[1]
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(OSError, match=NAME) as failure:
                tcp_connect.tcp_connect(where, time.monotonic() + LONG)
        assert failure.value.errno == errno.EAGAIN
        tcp_connect.tcp_connect(where, time.monotonic() + LONG).close()


@pytest.mark.parametrize("name", ["node..7", "n" * 64, "\ud800"])
def test_what_is_no_host_name_is_an_error_of_the_system(name: str) -> None:
    """And not one of text, which no caller expects: the address of a member is what another node says."""
    with pytest.raises(OSError, match="is no host name"):
        ValkeyConnection((name, 6379), None, time.monotonic() + LONG)
    with pytest.raises(OSError, match="is no address"):
        Tcp().connect(f"{name}:9411", LONG)


def test_a_name_that_does_not_exist_is_said(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: Resolver) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    resolver.answers.set()
    with monkeypatch.context() as patch:
        patch.setattr(Resolver, "wait", unknown)
        with pytest.raises(socket.gaierror, match=rf"Name or service not known \({NAME}\)"):
            tcp_connect.tcp_connect((NAME, 9), time.monotonic() + LONG)
