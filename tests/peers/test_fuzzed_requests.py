"""Requests as a correct node would build them, with lies in them: each is answered, or ends its own connection.

The strategies know the structure of the messages: most fields are true, and now and then one is not, so that lies are
met deep inside, not at the door. What a server must do with a request is computed here a second time, from the tables
of docs/design/0004-peers.md. An honest node is served beside each conversation."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.testing.interface import until
from kvtide.tiers.peers import protocol as p
from kvtide.tiers.peers.protocol import Operation, Presence, Violation
from kvtide.tiers.peers.tcp import split
from tests.peers.fuzzed import CREDIT, GEOMETRY, NAMES, OTHER, OTHER_NAMES, STORED, WHO, World, exactly, many, opened


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with opened(tmp_path_factory.mktemp("fuzzed")) as world:
        yield world


class Ask(NamedTuple):
    """A request; ``None`` in the head: what is true."""

    operation: int
    zero: int
    number_of_items: int | None
    size: int | None
    step: int
    """By how much its number is greater than the last one."""
    who: tuple[Any, ...]
    """The fields of its identity."""
    items: tuple[tuple[bytes, int, int], ...]
    """Digest, first section, number of sections."""
    more: bytes
    """What follows, and does not belong to it."""
    less: int
    """How many of its last bytes are missing, in the size that it says too."""

    def body(self) -> bytes:
        pack = [digest if self.operation == Operation.LOCATE else p.ITEM.pack(digest, *s) for digest, *s in self.items]
        whole = p.IDENTITY.pack(*self.who) + b"".join(pack)
        return whole[: len(whole) - self.less] + self.more

    def packed(self, last: int) -> tuple[int, bytes]:
        """Its number, and the message."""
        body = self.body()
        number = (last + self.step) % 2**64
        count = len(self.items) if self.number_of_items is None else self.number_of_items
        size = len(body) if self.size is None else self.size
        return number, p.REQUEST.pack(self.operation, self.zero, count, size, number) + body


def verdict(message: bytes, last: int) -> set[Violation]:
    """Why a server must close the connection after a message; any of these may be counted. Empty: it is answered."""
    operation, zero, count, size, number = p.REQUEST.unpack(message[: p.REQUEST.size])
    wrong: set[Violation] = set()
    if zero or not count or operation not in (1, 2, 3):
        wrong.add(Violation.GARBAGE)
    if number <= last:
        wrong.add(Violation.REPLAYED)
    if count > (CREDIT.keys if operation == 1 else CREDIT.blocks) or size > p.LARGEST_BODY:
        wrong.add(Violation.OVER_CREDIT)
    if size != 96 + count * (32 if operation == 1 else 40):
        wrong.add(Violation.GARBAGE)
    if wrong:
        return wrong
    body = message[p.REQUEST.size :][:size]
    *_, tokens, sections, section, itemsize = p.IDENTITY.unpack(body[:96])
    if not tokens or not 0 < sections <= 65536 or not section or not 0 < itemsize <= 16:
        wrong.add(Violation.GARBAGE)
    elif operation != 1 and count > 1:
        asked = [p.ITEM.unpack(body[at : at + 40])[2] for at in range(96, len(body), 40)]
        total = sum(sections if n == p.ALL else n for n in asked)
        if total * (-(-section // 4096) * 4096) > CREDIT.nbytes:
            wrong.add(Violation.OVER_CREDIT)
    return wrong


def check_answer(sock: socket.socket, number: int, ask: Ask) -> None:
    """Receive the answer to a request that is one, and check all of it."""
    operation, zero, count, size, told = p.REPLY.unpack(exactly(sock, p.REPLY.size))
    assert (operation, zero, count, told) == (ask.operation, 0, len(ask.items), number)
    follows = exactly(sock, size)
    who = p.parse_identity(p.IDENTITY.pack(*ask.who))
    if operation == Operation.LOCATE:
        there = [(who.fingerprint, digest) in STORED and who.group == WHO.group for digest, *_ in ask.items]
        assert p.parse_located(follows, count).presence.tolist() == there
        return
    before_all = operation == Operation.READ
    assert size == (count * p.PART.size if before_all else 0)
    told_before = list(p.PART.iter_unpack(follows))
    for n, (digest, first, sections) in enumerate(ask.items):
        part = told_before[n] if before_all else p.PART.unpack(exactly(sock, p.PART.size))
        presence, header, payload = part
        exactly(sock, header)
        sent = exactly(sock, payload)
        if presence != Presence.HIT:
            assert (header, payload) == (0, 0)
            continue
        right = STORED[who.fingerprint, digest]
        assert who.geometry == GEOMETRY
        wanted = range(GEOMETRY.sections) if sections == p.ALL else range(first, first + sections)
        expected = right.reshape(GEOMETRY.sections, GEOMETRY.section)[wanted.start : wanted.stop]
        assert np.array_equal(
            np.frombuffer(sent, np.uint8).reshape(len(wanted), GEOMETRY.stride)[:, : GEOMETRY.section], expected
        )


TRUTH = p.IDENTITY.unpack(p.pack_identity(WHO))
OTHER_TRUTH = p.IDENTITY.unpack(p.pack_identity(OTHER))
u8, u16, u32, u64 = (st.one_of(st.integers(0, 3), st.integers(0, 2**bits - 1)) for bits in (8, 16, 32, 64))
digests = st.one_of(
    st.sampled_from(NAMES), st.sampled_from(NAMES), st.sampled_from(OTHER_NAMES), st.binary(min_size=32, max_size=32)
)
parts = st.one_of(
    st.just((0, p.ALL)),
    st.just((0, p.ALL)),
    st.sampled_from([(0, 4), (1, 2), (3, 1), (0, 5), (4, 1), (1, p.ALL), (0, 0), (p.ALL, 1), (3, p.ALL - 1)]),
    st.tuples(u32, u32),
)
identities = st.one_of(
    st.just(TRUTH),
    st.just(TRUTH),
    st.just(OTHER_TRUTH),
    st.builds(lambda at: (*TRUTH[:at], OTHER_TRUTH[at], *TRUTH[at + 1 :]), st.integers(0, 7)),
    st.builds(
        lambda at, lie: (*TRUTH[:at], lie, *TRUTH[at + 1 :]), st.integers(4, 7), st.one_of(u32, st.sampled_from([4096]))
    ),
    st.builds(lambda at, lie: (*TRUTH[:at], lie, *TRUTH[at + 1 :]), st.integers(0, 3), st.binary(max_size=16)),
    st.builds(lambda lie: (*TRUTH[:5], *lie), st.tuples(u16, u32, u8)),
)


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    """Mostly a request that is one, of anybody's blocks."""
    operation = draw(st.sampled_from([1, 2, 2, 3]))
    count = draw(st.sampled_from([1, 1, 2, 3, 5, 40, 64]))
    some = draw(st.lists(st.tuples(digests, parts), min_size=1, max_size=4))
    items = tuple((digest, *part) for digest, part in (some * count)[:count])
    ask = Ask(operation, 0, None, None, draw(st.sampled_from([1, 1, 1, 7, 2**40])), draw(identities), items, b"", 0)
    lie = draw(st.integers(0, 24))
    if lie == 0:
        return ask._replace(operation=draw(u8))
    if lie == 1:
        return ask._replace(zero=draw(u8))
    if lie == 2:
        return ask._replace(number_of_items=draw(u16))
    if lie == 3:
        return ask._replace(size=draw(u32))
    if lie == 4:
        return ask._replace(step=draw(st.sampled_from([0, -1, -(2**40), 2**63])))
    if lie == 5:
        return ask._replace(more=draw(st.binary(min_size=1, max_size=80)))
    if lie == 6:
        return ask._replace(less=draw(st.integers(1, 40)))
    if lie == 7:
        return ask._replace(items=ask.items[:1] * draw(st.sampled_from([65, 1024, 1025])))
    return ask


class Conversation(NamedTuple):
    asks: list[Ask]
    pipelined: bool
    """Whether all requests are sent before the first answer is read."""
    cut: int
    """How much of another message is sent after the last one; then the connection ends."""
    chunk: int
    """Bytes that are sent at a time."""


conversations = st.builds(
    Conversation,
    st.lists(asks(), min_size=1, max_size=6),
    st.booleans(),
    st.integers(0, 130),
    st.sampled_from([1 << 16, 1 << 16, 1000, 17]),
)


def said(sock: socket.socket, message: bytes, chunk: int) -> None:
    for at in range(0, len(message), chunk):
        sock.sendall(message[at : at + chunk])


def talk(world: World, conversation: Conversation) -> None:
    """Have a conversation, and check the answers, how it ends and what is counted of it."""
    messages: list[tuple[int, bytes, Ask]] = []
    wrong: set[Violation] = set()
    last = 0
    for ask in conversation.asks:
        number, message = ask.packed(last)
        messages.append((number, message, ask))
        if wrong := verdict(message, last):
            break
        last = number
    with closing(world.greeted()) as sock:
        before = world.closed()
        try:
            if conversation.pipelined:
                for _, message, _ in messages:
                    said(sock, message, conversation.chunk)
            for at, (number, message, ask) in enumerate(messages):
                if not conversation.pipelined:
                    said(sock, message, conversation.chunk)
                if not wrong or at < len(messages) - 1:
                    check_answer(sock, number, ask)
            if wrong:
                assert not sock.recv(1), "nothing is said to it"
            else:
                step = int(last < 2**64 - 1)  # after the largest number there is none
                _, message = conversation.asks[-1]._replace(step=step).packed(last)
                message = message if step else b"\1"
                sock.sendall(message[: conversation.cut % len(message)])
                sock.shutdown(socket.SHUT_WR)
                assert not sock.recv(1)
        except (ConnectionError, BrokenPipeError):
            if (world.closed() - before)[Violation.SLOW.value]:
                return  # the machine was busy for a second in the middle of a message
            assert wrong, "it was closed without a reason"
    if wrong:
        until(lambda: world.closed() != before)
        assert list(world.closed() - before) in [[one.value] for one in wrong]
    until(lambda: world.server.statistics().connections == world.connections)
    assert (world.closed() - before).total() == bool(wrong)
    world.check_honest()
    world.faults.check()


@given(conversations)
@settings(max_examples=120, deadline=None)
def test_requests_with_lies_end_their_connection_alone(world: World, conversation: Conversation) -> None:
    talk(world, conversation)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_thousands_of_requests_with_lies(world: World) -> None:
    many(6000, conversations, lambda conversation: talk(world, conversation))


def test_a_message_that_stops_anywhere_costs_one_deadline(world: World) -> None:
    """Of a greeting, a proof and both requests, at each border between two fields; all at once."""
    before = world.closed()
    hello = p.Hello(1, 1, 0, bytes(32)).pack()
    both = 1, 2, 4, 8, 16, 48, 64, 80, 96, 100, 104, 108, 112, 144
    two = (NAMES[0], 0, p.ALL), (NAMES[1], 0, p.ALL)
    count = 0
    with ExitStack() as stack:
        for operation, more in ((1, (175,)), (2, (148, 152, 191))):
            _, message = Ask(operation, 0, None, None, 1, TRUTH, two, b"", 0).packed(0)
            for end in (*both, *more):
                stack.enter_context(closing(world.greeted())).sendall(message[:end])
                count += 1
        for greeting in (b"", hello[:1], hello[:8], hello[:12], hello[:16], hello[:47], hello + bytes(31)):
            sock = stack.enter_context(socket.create_connection(split(world.server.address), 30))
            sock.sendall(greeting)
            count += 1
        until(lambda: (world.closed() - before).total() >= count)
        assert world.closed() - before == Counter({Violation.SLOW.value: count})
        world.check_honest()


def test_who_never_reads_its_answers_holds_a_bounded_part(world: World) -> None:
    before = world.closed()
    ask = Ask(2, 0, None, None, 1, TRUTH, tuple((name, 0, p.ALL) for name in NAMES * 16), b"", 0)
    with ExitStack() as stack:
        greedy = [stack.enter_context(closing(world.greeted())) for _ in range(4)]
        for sock in greedy:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
            last = 0
            with suppress(OSError):
                for _ in range(8):
                    last, message = ask.packed(last)
                    sock.sendall(message)
        most = 0

        def over() -> bool:
            nonlocal most
            found = world.server.statistics()
            most = max(most, found.bytes_held)
            return world.closed() != before and not found.bytes_held

        until(over)
        assert 0 < most <= CREDIT.nbytes
    assert set(world.closed() - before) == {Violation.SLOW.value}, "those that were told that it is busy stay"
    world.check()
