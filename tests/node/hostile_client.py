"""A client that misbehaves, in one way after the other."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvtide.node import protocol as p
from kvtide.testing.interface import PLAIN

__all__ = ["TRICKS", "HostileClient"]

GROUPS = [list(msgspec.structs.astuple(g)) for g in p.describe(PLAIN)]
OPEN = ["open", GROUPS, PLAIN.block_tokens, bytes(32), b"hostile client".ljust(16)]


def packed(value: Any) -> bytes:
    body = msgspec.msgpack.encode(value)
    return p.LENGTH.pack(len(body)) + body


class HostileClient:
    """Each trick raises unless the node answers it in its way: by hanging up, or by saying no."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next = itertools.cycle(TRICKS)

    def turn(self) -> None:
        next(self._next)(self)

    @contextlib.contextmanager
    def _link(self) -> Iterator[socket.socket]:
        with self._dial() as sock:
            pidfd = os.pidfd_open(os.getpid())
            socket.send_fds(sock, [p.frame(p.Hello(1, 1, "hostile client", "", os.urandom(8).hex()))], [pidfd])
            os.close(pidfd)
            assert self._answer(sock)[0] == "welcome"
            yield sock

    def _dial(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(60)
        sock.connect(str(self._path))
        return sock

    @staticmethod
    def _answer(sock: socket.socket) -> Any:
        """The next frame, or None if the node has hung up."""
        received = bytearray()
        try:
            while not (end := p.whole(received)):
                wanted = 4 if len(received) < 4 else 4 + p.LENGTH.unpack_from(received)[0]
                if not (more := sock.recv(wanted - len(received))):
                    return None
                received += more
        except ConnectionResetError:
            return None
        return msgspec.msgpack.decode(received[4:end])

    @staticmethod
    def _hung_up(sock: socket.socket, sent: bytes) -> None:
        try:
            sock.sendall(sent)
            while sock.recv(1 << 16):
                pass
        except (BrokenPipeError, ConnectionResetError):
            return

    # -- tricks -------------------------------------------------------------------------------------------

    def never_read(self) -> None:
        with self._link() as sock:
            asked = packed([1, [["statistics"]] * 100])
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                while True:
                    sock.sendall(asked * 10)

    def flood(self) -> None:
        """More requests than anybody needs, all of them in order."""
        with self._link() as sock:
            for _ in range(20):
                sock.sendall(packed([1, [["statistics"]]]) * 100)
                for _ in range(100):
                    assert self._answer(sock)[0] == 1

    def ask_for_much_at_once(self) -> None:
        with self._link() as sock:
            self._hung_up(sock, packed([2, [["statistics"]] * 1_000_000]))
        with self._link() as sock:
            sock.sendall(packed([1, [OPEN]]))
            (session,) = self._answer(sock)[1]
            sock.sendall(packed([2, [["match", session, os.urandom(4 << 20), 0]]]))
            assert self._answer(sock)[1][0][:1] in (["matched"], ["failure"])

    def lie_about_lengths(self) -> None:
        for sent in (b"GET / HTTP/1.1\r\n\r\n", p.LENGTH.pack(p.LARGEST + 1), p.LENGTH.pack(3) + b"\xc1\xc1\xc1"):
            with self._link() as sock:
                self._hung_up(sock, sent)

    def lie_about_numbers(self) -> None:
        group = GROUPS[0]
        huge = [[*group[:2], 2**40, 2**20, 2**20, *group[5:]]]
        digests = os.urandom(64)
        with self._link() as sock:
            sock.sendall(packed([1, [OPEN]]))
            (session,) = self._answer(sock)[1]
            lies: list[list[Any]] = [
                ["open", huge, 2**40, bytes(32), bytes(range(16))],
                ["open", GROUPS, -1, bytes(32), bytes(range(16))],
                ["open", GROUPS, 16, bytes(3), bytes(range(16))],
                ["open", GROUPS, 16, bytes(32), bytes(16)],
                ["match", session, digests[:33], 0],
                ["match", session, digests, -1],
                ["match", session + 1, digests, 0],
                ["reserve", session, [0], digests, 0, 3, None, 0],
                ["reserve", session, [1], digests, 0, 2, None, 0],
                ["reserve", session, [0], digests, 0, 2, -1.0, 0],
                ["reserve", session, [0], digests, 0, 2, None, 1000],
                ["reserve", session, [0], digests, 0, 2, None, 0, b"", 77],
                ["finish", session, 77, True],
                ["collect", session, 77],
                ["load", session, 77, None],
            ]
            for number, lie in enumerate(lies, 2):
                sock.sendall(packed([number, [lie]]))
                answer = self._answer(sock)
                assert answer[0] == number
                assert msgspec.msgpack.encode(answer[1][0]).startswith(b"\x93\xa7failure"), (
                    f"{lie} was believed: {answer}"
                )

    def hoard(self) -> None:
        """All the room that there is, for nothing."""
        with self._link() as sock:
            sock.sendall(packed([1, [OPEN]]))
            (session,) = self._answer(sock)[1]
            for number in range(2, 20):
                sock.sendall(packed([number, [["reserve", session, [0], os.urandom(64 * 32), 0, 64, None, 100]]]))
                assert self._answer(sock)[1][0][0] == "reserved"
            sock.sendall(packed([20, [["close", session]]]))
            assert self._answer(sock) is not None

    def say_nothing(self) -> None:
        """A hundred connections without a word, one with half of one: nobody waits for them for ever."""
        with self._link() as waiting, contextlib.ExitStack() as stack:
            silent = [stack.enter_context(self._dial()) for _ in range(100)]
            silent[-1].sendall(p.frame(p.Hello(1, 1, "hostile client"))[:10])
            waiting.sendall(packed([1, [["statistics"]]])[:5])
            for sock in silent:
                self._hung_up(sock, b"")


TRICKS: list[Callable[[HostileClient], None]] = [
    HostileClient.never_read,
    HostileClient.flood,
    HostileClient.ask_for_much_at_once,
    HostileClient.lie_about_lengths,
    HostileClient.lie_about_numbers,
    HostileClient.hoard,
    HostileClient.say_nothing,
]
