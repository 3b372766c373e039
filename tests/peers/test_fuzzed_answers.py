"""Answers as a correct server would give them, with lies in them: each costs misses, and never a wrong byte."""

from __future__ import annotations

import itertools
import math
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.block import DIGEST
from kvtide.testing.interface import MODEL, PLAIN, data, held, length, prompt, until
from kvtide.tiers.peers import protocol as p
from kvtide.tiers.peers.greeting import let_in, received
from kvtide.tiers.peers.protocol import Operation, Presence
from tests.peers.fake_server import FakeServer
from tests.peers.fuzzed import CREDIT, GEOMETRY, NAMES, OTHER, OTHER_NAMES, WHO, Reader, World, exactly, many, opened


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with opened(tmp_path_factory.mktemp("fuzzed")) as world:
        yield world


class Lie(NamedTuple):
    """What is wrong with the answers to one kind of request, or with the welcome."""

    where: int
    """0: the welcome; otherwise the operation."""
    how: str
    first: int
    second: int
    chunk: int
    """Bytes that are sent at a time."""


WELCOME_LIES = "magic", "version", "features", "node", "credit", "proof", "short", "long"
ANSWER_LIES = (
    "nothing",
    "head",
    "part",
    "flip",
    "flip in a header",
    "truncated",
    "reordered",
    "repeated",
    "left out",
    "twice",
    "junk",
    "the answer before",
    "another block",
    "another tenant",
)
lies = st.builds(
    Lie,
    st.sampled_from([1, 2, 2, 2]),
    st.sampled_from(ANSWER_LIES),
    st.integers(0, 2**32 - 1),
    st.one_of(st.integers(0, 64), st.integers(0, 2**64 - 1)),
    st.sampled_from([1 << 20, 1 << 20, 5000]),
) | st.builds(
    Lie,
    st.just(0),
    st.sampled_from(WELCOME_LIES),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.sampled_from([1 << 20, 7]),
)


def replaced(fields: Sequence[Any], at: int, value: Any) -> tuple[Any, ...]:
    return (*fields[:at], value, *fields[at + 1 :])


class LyingServer(FakeServer):
    """Knows the secret, and answers what the true server answers, with a lie in it."""

    def __init__(self, world: World, lie: Lie, *, hang: bool = False) -> None:
        """``hang``: say nothing more after the lie, and keep the connection; otherwise it ends."""
        self._world = world
        self._lie = lie
        self._hang = hang
        self._over = threading.Event()
        super().__init__()

    def _serve(self, connection: Any) -> None:
        with suppress(OSError), closing(self._world.greeted()) as true:
            if self._lie.where == 0:
                greeted: Any = _Lying(connection, self._welcome)
            else:
                greeted = connection
            let_in(greeted, self._world.trust.secret(), CREDIT, os.urandom(16))
            last: list[bytes] = []
            while True:
                head = bytes(received(connection, p.REQUEST.size))
                body = bytes(received(connection, p.REQUEST.unpack(head)[3]))
                pieces = self._true(true, head, body)
                lie = self._lie.where == head[0]
                told = self._told(pieces, last, head, body, true) if lie else pieces
                whole = b"".join(told)
                for at in range(0, len(whole), self._lie.chunk):
                    connection.send([whole[at : at + self._lie.chunk]])
                last = pieces
                if lie and told != pieces:
                    break
        if self._hang:
            self._over.wait(60)
        connection.interrupt()

    def _true(self, true: socket.socket, head: bytes, body: bytes) -> list[bytes]:
        """The true answer, in its parts."""
        true.sendall(head + body)
        reply = exactly(true, p.REPLY.size)
        operation, _, count, size, _ = p.REPLY.unpack(reply)
        follows = exactly(true, size)
        if operation == Operation.LOCATE:
            hits = follows[:count].count(Presence.HIT)
            edges = [0, count, *(count + hits * n for n in (8, 12, 12 + DIGEST, 13 + DIGEST))]
            return [reply, *(follows[a:b] for a, b in itertools.pairwise(edges))]
        parts = [follows[at : at + p.PART.size] for at in range(0, size, p.PART.size)]
        pieces = [reply, *parts]
        for _, header, payload in p.PART.iter_unpack(follows):
            pieces.append(exactly(true, header))
            pieces += [exactly(true, GEOMETRY.stride) for _ in range(payload // GEOMETRY.stride)]
        return pieces

    def _told(
        self, pieces: list[bytes], last: list[bytes], head: bytes, body: bytes, true: socket.socket
    ) -> list[bytes]:
        _, how, first, second, _ = self._lie
        at, other = first % len(pieces), second % len(pieces)
        some = list(pieces)
        count = p.REQUEST.unpack(head)[2]
        if how == "head":
            fields = p.REPLY.unpack(some[0])
            field = first % 5
            some[0] = p.REPLY.pack(*replaced(fields, field, second % 2 ** (8, 8, 16, 32, 64)[field]))
        elif how == "part" and head[0] == Operation.READ:
            at = 1 + first % count
            field = first % 3
            part = replaced(p.PART.unpack(some[at]), field, second % 2 ** (8, 32, 64)[field])
            some[at] = p.PART.pack(*part)
        elif how in ("flip", "part"):
            flipped = bytearray(b"".join(some))
            flipped[first % len(flipped)] ^= 1 << second % 8
            some = [bytes(flipped)]
        elif how == "flip in a header" and len(some) > 1 + count and some[1 + count]:
            flipped = bytearray(some[1 + count])
            flipped[first % min(256, len(flipped))] ^= 1 << second % 8
            some[1 + count] = bytes(flipped)
        elif how == "truncated":
            some = some[:at]
        elif how == "reordered":
            some[at], some[other] = some[other], some[at]
        elif how == "repeated":
            some.insert(other, some[at])
        elif how == "left out":
            del some[at]
        elif how == "twice":
            some += some
        elif how == "junk":
            some.append(Random(second).randbytes(first % 10_000))
        elif how == "the answer before":
            some = last
        elif how in ("another block", "another tenant") and head[0] == Operation.READ:
            known = NAMES if how == "another block" else OTHER_NAMES
            digest = body[96 : 96 + DIGEST]
            if digest in NAMES:
                owner = p.pack_identity(WHO if how == "another block" else OTHER)
                wrong = known[(NAMES.index(digest) + (how == "another block")) % len(known)]
                number = p.REQUEST.unpack(head)[4]
                ask = owner + wrong + body[96 + DIGEST :]
                with closing(self._world.greeted()) as another:
                    some = self._true(another, p.REQUEST.pack(*head[:2], count, len(ask), number), ask)
        return some

    def _welcome(self, whole: bytes) -> bytes:
        _, how, first, second, _ = self._lie
        magic, version, zero, features, nonce, node, keys, blocks, nbytes, proof = p.WELCOME.unpack(whole)
        if how == "short":
            return whole[: first % len(whole)]
        if how == "long":
            return whole + bytes(first % 1000)
        flipped = bytes(a ^ (first >> 8 & 255 or 1) for a in (magic, node, proof)[first % 3][:1])
        if how == "magic":
            magic = flipped + magic[1:]
        elif how == "version":
            version = first % 2**16
        elif how == "features":
            features = first
        elif how == "node":
            node = flipped + node[1:]
        elif how == "proof":
            proof = proof[:-1] + bytes([proof[-1] ^ (first % 256 or 1)])
        else:
            keys, blocks, nbytes = first, second % 2**32, second
        return p.WELCOME.pack(magic, version, zero, features, nonce, node, keys, blocks, nbytes, proof)

    def close(self) -> None:
        self._over.set()
        super().close()


class _Lying:
    """A connection whose first message is changed."""

    def __init__(self, connection: Any, change: Callable[[bytes], bytes]) -> None:
        self._connection = connection
        self._change = change
        self.receive = connection.receive
        self.features = connection.features
        self.agreed = connection.agreed

    def send(self, parts: Sequence[bytes]) -> None:
        self._connection.send([self._change(b"".join(parts))])


def lied_to(world: World, lie: Lie) -> None:
    with closing(LyingServer(world, lie)) as server, closing(Reader(world.trust, server.address)) as reader:
        found = reader.find()
        results = reader.start()()
        counted = reader.tier.statistics()
        if not all(results):
            assert counted.failed_reads or counted.reasons
            assert counted.reasons
        if lie.how == "nothing":
            assert all(found)
            assert all(results)
    world.faults.check()


@given(lies)
@settings(max_examples=150, deadline=None)
def test_answers_with_lies_cost_misses_alone(world: World, lie: Lie) -> None:
    lied_to(world, lie)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_thousands_of_answers_with_lies(world: World) -> None:
    threads = threading.active_count()

    many(4000, lies, lambda lie: lied_to(world, lie))
    until(lambda: threading.active_count() <= threads)


def test_an_answer_that_stops_anywhere_costs_one_deadline(world: World) -> None:
    """At each border between two of its parts; all at once."""
    borders = 1 + len(NAMES) * (1 + 1 + GEOMETRY.sections)
    with ExitStack() as stack:
        ends = []
        for at in range(borders):
            lie = Lie(Operation.READ, "truncated", at, 0, 1 << 20)
            server = stack.enter_context(closing(LyingServer(world, lie, hang=True)))
            ends.append(stack.enter_context(closing(Reader(world.trust, server.address, timeout=0.5))).start())
        for end in ends:
            assert not any(end())
    world.faults.check()


# -- lies about blocks, told to a whole store ---------------------------------------------------------------------


def test_lies_about_blocks_do_no_harm_to_the_index(world: World) -> None:
    """Everything that a server says of a block besides its bytes may be a lie: its depth, parent, priority, expiry."""
    for seed in range(25):
        index_lied_to(world, seed)


@pytest.mark.long
def test_many_lies_about_blocks(world: World) -> None:
    for seed in range(1000, 1600):
        index_lied_to(world, seed)


class _Columns(LyingServer):
    """Answers reads truly, and of blocks that are looked up it says that they are there, and lies about the rest."""

    def __init__(self, world: World, random: Random) -> None:
        super().__init__(world, Lie(Operation.LOCATE, "columns", 0, 0, 1 << 20))
        self._random = random

    def _told(
        self, pieces: list[bytes], last: list[bytes], head: bytes, body: bytes, true: socket.socket
    ) -> list[bytes]:
        random, (operation, _, count, _, number) = self._random, p.REQUEST.unpack(head)
        expiries = [random.choice([math.inf, 1e300, 0.0, -math.inf, 4e9]) for _ in range(count)]
        depths = [random.choice([0, 1, 2, 2**31, 2**32 - 1]) for _ in range(count)]
        parents = [random.choice([*NAMES, bytes(32), random.randbytes(32)]) for _ in range(count)]
        priorities = [random.randrange(-128, 128) for _ in range(count)]
        follows = bytes([Presence.HIT]) * count + struct.pack(f"<{count}d", *expiries)
        follows += struct.pack(f"<{count}I", *depths) + b"".join(parents) + struct.pack(f"<{count}b", *priorities)
        pieces[:] = [p.REPLY.pack(operation, 0, count, len(follows), number), follows]  # the connection goes on
        return pieces


def index_lied_to(world: World, seed: int) -> None:
    random = Random(seed)
    small = {"budget": "1MiB", "segment": "1MiB"}  # 32 blocks
    with closing(_Columns(world, random)) as server:
        store = world.stores.store(server.address, dram=small)
        with store.session(MODEL) as session:
            for step in range(8):
                path = (1, 2, 3, 4) if random.random() < 0.7 else (random.randrange(5), step, *range(10))
                tokens = prompt(*path[: random.randrange(1, len(path) + 1)])
                what = random.choice(["load", "load", "store", "drop", "find"])
                if what == "load":
                    length(session, tokens)
                elif what == "store":
                    session.store(tokens, data(PLAIN, tokens))
                    length(session, tokens)
                elif what == "drop":
                    session.drop(tokens)
                    assert length(session, tokens) == 0
                else:
                    session.match(tokens, wait=1).release()
            store.statistics()
        assert held(store) == 0
        store.close()
    world.faults.check()
