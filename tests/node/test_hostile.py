"""Clients that lie, flood or babble: their connection is closed with a reason in the log, and nothing else happens."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide.block import BlockKey
from kvtide.events import BlockStored
from kvtide.index.keys import DEFAULT_TENANT
from kvtide.node import protocol as p
from kvtide.node.client.client import Client
from kvtide.testing.interface import MODEL, PLAIN, data, length, prompt
from tests.node.raw import answer, dialled, greet, packed
from tests.node.serving import Thread, eventually


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thread]:
    """One for all tests of this module: what one client does must not matter to the next."""
    path = tmp_path_factory.mktemp("node") / "node.sock"
    thread = Thread(path, dram={"budget": "512MiB", "segment": "8MiB"})
    yield thread
    thread.close()


@pytest.fixture(autouse=True)
def unharmed(node: Thread) -> Iterator[None]:
    """The node serves well before and after."""
    yield
    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(prompt(1), data(PLAIN, prompt(1)))
        assert length(session, prompt(1)) == 16
        assert session.drop(prompt(1)) == 1


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "a frame of"),
        (p.LENGTH.pack(p.LARGEST + 1), "a frame of"),
        (packed("hello"), "not understood"),
        (packed(["hello", 1]), "not understood"),
        (packed(["hello", 1, 1, "", "no such token"]), "token"),
        (packed(["hello", 1, 1, ""]), "no pidfd"),
        (packed([[]] * 3) + bytes([0x91] * 100), "not understood"),
        (p.LENGTH.pack(5000) + b"\x91" * 5000, "not understood"),
    ],
)
def test_who_does_not_say_hello_is_sent_away(
    node: Thread, sent: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvtide.node"), dialled(node.path) as sock:
        sock.sendall(sent)
        assert answer(sock) is None
        assert reason in caplog.text


def test_another_protocol_is_told_so(node: Thread) -> None:
    with dialled(node.path) as sock:
        greet(sock, p.frame(p.Hello(7, 9, "99.0")))
        kind, _, text = answer(sock)
        assert kind == "failure"
        assert "speaks protocol 1.0 to 1.2, the client (kvtide 99.0) 7 to 9" in text
        assert "upgrade the older one" in text
        assert answer(sock) is None


def test_the_pidfd_of_another_process_is_none(node: Thread) -> None:
    with dialled(node.path) as sock:
        pidfd = os.pidfd_open(1)
        socket.send_fds(sock, [p.frame(p.Hello(1, 1, ""))], [pidfd])
        os.close(pidfd)
        assert answer(sock) is None


def test_many_descriptors_are_closed_again(node: Thread) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with dialled(node.path) as sock:
        socket.send_fds(sock, [b"x"], [0] * 50)
        assert answer(sock) is None
    eventually(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before)


def test_who_never_reads_is_sent_away(node: Thread) -> None:
    with dialled(node.path) as sock:
        greet(sock)
        assert answer(sock)[0] == "welcome"
        asked = packed([1, [["statistics"]] * 1000])
        flood = asked * 10_000
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            sock.sendall(flood)


def test_what_was_given_back_before_hanging_up_counts_though_answers_were_never_read(node: Thread) -> None:
    gate = threading.Event()

    def pause() -> None:
        gate.wait(60)

    with Client(node.path) as client, client.session(MODEL) as session:
        session.store(prompt(2), data(PLAIN, prompt(2)))
        with dialled(node.path) as sock:
            greet(sock)
            assert answer(sock)[0] == "welcome"
            opening = p.Open(p.describe(PLAIN), PLAIN.block_tokens, MODEL.namespace(), DEFAULT_TENANT.tag)
            sock.sendall(p.frame(p.Request(1, [opening])))
            (number,) = answer(sock)[1]
            sock.sendall(p.frame(p.Request(2, [p.Match(number, session.chain(prompt(2)).joined, 0)])))
            holding = answer(sock)[1][0][1]
            assert client.statistics().held == 1
            sock.sendall(p.frame(p.Request(3, [p.Statistics()] * 1000)))
            eventually(lambda: any(c.bytes_unsent for c in client.status().node.clients))
            node.node.soon(pause)
            sock.sendall(p.frame(p.Request(4, [p.Release(number, [holding])])))
        gate.set()  # now that both have come
        eventually(lambda: len(client.status().node.clients) == 1)
        assert client.statistics().held == 0
        assert session.drop(prompt(2)) == 1


def test_who_does_not_read_events_loses_some_and_nothing_else(node: Thread) -> None:
    keys = tuple(BlockKey(os.urandom(32) + b"f") for _ in range(1000))
    with dialled(node.path) as sock, dialled(node.path) as notices:
        greet(sock)
        notices.sendall(packed(["hello", 1, 1, "", answer(sock)[3]]))
        assert answer(notices)[0] == "welcome"
        sock.sendall(packed([1, [["follow", True]]]))
        assert answer(sock)[1] == [None]
        for _ in range(500):
            node.store.feed.publish([BlockStored("dram", keys)])
        sock.sendall(packed([2, [["flush"]]]))
        assert answer(sock)[0] == 2, "it is served"
        told = lost = 0
        while told + 1000 * lost < 500_000:
            match answer(notices):
                case ["stored", "dram", some]:
                    told += len(some)
                case ["lost", count]:
                    lost += count
        assert lost
