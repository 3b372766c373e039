"""The node's loop: clients in the order in which they called, and nobody left out."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from kvtide.node.server.loop import Loop, run_in_loop


class Caller:
    """A client that the loop attends to; ``served`` is called with it for each byte that it sent."""

    def __init__(self, loop: Loop, served: Callable[[Caller], None]) -> None:
        self._loop = loop
        self._served = served
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        loop.attend(self.fd, self._readable)

    @property
    def fd(self) -> int:
        return self._ours.fileno()

    def call(self) -> None:
        self._theirs.send(b"x")

    def _readable(self) -> None:
        self._ours.recv(1)
        self._served(self)

    def close(self) -> None:
        self._loop.attend(self.fd)
        self._ours.close()
        self._theirs.close()


def in_loop(main: Callable[[Loop], Coroutine[Any, Any, None]]) -> None:
    async def start() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Loop)
        await asyncio.wait_for(main(loop), 60)

    run_in_loop(start())


@contextmanager
def callers(loop: Loop, count: int, served: Callable[[Caller], None]) -> Iterator[list[Caller]]:
    with ExitStack() as stack:
        found = [Caller(loop, served) for _ in range(count)]
        for caller in found:
            stack.callback(caller.close)
        yield found


@pytest.mark.parametrize("count", [3, 8, 20])
def test_who_called_first_is_served_first(count: int) -> None:
    async def main(loop: Loop) -> None:
        order: list[Caller] = []
        done = asyncio.Event()

        def served(caller: Caller) -> None:
            order.append(caller)
            if len(order) == 2 * count:
                done.set()

        with callers(loop, count, served) as them:
            wanted = them[::2] + them[1::2]
            for caller in wanted * 2:
                caller.call()
            await done.wait()
            assert order[:count] == wanted

    in_loop(main)


def test_who_calls_while_others_are_served_does_not_wait_for_all_of_them_to_call_again() -> None:
    async def main(loop: Loop) -> None:
        order: list[Caller] = []
        done = asyncio.Event()

        def served(caller: Caller) -> None:
            order.append(caller)
            if len(order) == 1:
                late.call()
            if caller is late:
                done.set()
            else:
                caller.call()

        with callers(loop, 7, served) as (*busy, late):
            for caller in busy:
                caller.call()
            await done.wait()
            assert order[:6] == busy
            assert len(order) <= 8, "one of those who call again is before it, not six"

    in_loop(main)


@pytest.mark.parametrize("busy", [0, 5, 20])
def test_who_waits_for_the_others_waits_for_all_of_them(busy: int) -> None:
    async def main(loop: Loop) -> None:
        order: list[Caller | None] = []
        done = asyncio.Event()

        def served(caller: Caller) -> None:
            order.append(caller)
            caller.call()

        def go_on() -> None:
            order.append(None)
            if order.count(None) < 10:
                loop.after_others(go_on)
            else:
                done.set()

        with callers(loop, busy, served) as them:
            for caller in them:
                caller.call()
            loop.after_others(go_on)
            await done.wait()
            turns = [i for i, one in enumerate(order) if one is None]
            for last, turn in itertools.pairwise(turns):
                assert set(order[last + 1 : turn]) == set(them)

    in_loop(main)


def test_what_was_said_before_hanging_up_is_heard_before_anything_is_said() -> None:
    async def main(loop: Loop) -> None:
        done = asyncio.Event()
        told: list[str] = []
        ours, theirs = socket.socketpair()
        with ours:

            def readable() -> None:
                told.append(ours.recv(100).decode())

            def writable() -> None:
                told.append("writable")
                loop.attend(ours.fileno())
                done.set()

            theirs.send(b"goodbye")
            theirs.close()
            loop.attend(ours.fileno(), readable, writable)
            await done.wait()
            assert told == ["goodbye", "writable"]

    in_loop(main)


def test_clients_that_never_rest_leave_the_loop_its_turn() -> None:
    async def main(loop: Loop) -> None:
        with callers(loop, 10, Caller.call) as them:
            for caller in them:
                caller.call()
            await asyncio.sleep(0.01)
            from_elsewhere = asyncio.Event()
            thread = threading.Thread(target=lambda: loop.call_soon_threadsafe(from_elsewhere.set))
            thread.start()
            await from_elsewhere.wait()
            thread.join()
            reader, writer = await asyncio.open_connection(sock=_pair(b"hello\n"))
            assert await reader.readline() == b"hello\n"
            writer.close()

    in_loop(main)


def _pair(said: bytes) -> socket.socket:
    ours, theirs = socket.socketpair()
    theirs.send(said)
    theirs.close()
    return ours


def test_one_whose_service_fails_costs_nobody_else_anything(caplog: pytest.LogCaptureFixture) -> None:
    async def main(loop: Loop) -> None:
        done = asyncio.Event()

        def served(caller: Caller) -> None:
            if caller is them[0]:
                raise ValueError("broken")
            done.set()

        with callers(loop, 2, served) as them:
            for caller in them:
                caller.call()
            await done.wait()

    in_loop(main)
    assert "a client could not be served" in caplog.text
    assert "broken" in caplog.text


def test_one_that_is_let_go_in_the_service_of_another_is_not_served() -> None:
    async def main(loop: Loop) -> None:
        order: list[Caller] = []

        def served(caller: Caller) -> None:
            order.append(caller)
            loop.attend(them[1].fd)

        with callers(loop, 3, served) as them:
            for caller in them:
                caller.call()
            while len(order) < 2:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert order == [them[0], them[2]]

    in_loop(main)


def test_a_socket_with_room_is_told_of_it_while_it_is_asked_for() -> None:
    async def main(loop: Loop) -> None:
        told: list[str] = []
        with callers(loop, 1, lambda _: told.append("readable")) as (caller,):

            def writable() -> None:
                told.append("writable")
                loop.attend(caller.fd)

            loop.attend(caller.fd, writable=writable)
            while not told:
                await asyncio.sleep(0)
            for _ in range(3):
                await asyncio.sleep(0)
            assert told == ["writable"]

    in_loop(main)
