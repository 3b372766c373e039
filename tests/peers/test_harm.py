"""A network between two nodes that cuts, freezes, flips, reorders, loses and repeats bytes, both ways, at every
border in the structure of the messages: no wrong byte, no hang, and what failed is counted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from random import Random
from typing import NamedTuple

import pytest

from kvtide.testing.interface import until
from kvtide.tiers.peers import protocol as p
from tests.peers.fuzzed import GEOMETRY, NAMES, Reader, World, opened
from tests.peers.nodes import Proxy

COUNT = len(NAMES)
# What the server and the asker say of a lookup and of a read, each on a connection of its own.
SERVER = [
    p.WELCOME.size,
    *(p.REPLY.size, COUNT, 8 * COUNT, 4 * COUNT, 32 * COUNT, COUNT),
    p.WELCOME.size,
    *(p.REPLY.size, *[p.PART.size] * COUNT),
    *[4096, *[GEOMETRY.stride] * GEOMETRY.sections] * COUNT,
]
ASKER = [
    *(p.HELLO.size, p.PROOF, p.REQUEST.size, p.IDENTITY.size, 32 * COUNT),
    *(p.HELLO.size, p.PROOF, p.REQUEST.size, p.IDENTITY.size, p.ITEM.size * COUNT),
]
HARMS = "cut", "freeze", "flip", "reorder", "lose", "repeat"


class Harm(NamedTuple):
    of: str
    place: int
    then: str


def everywhere() -> list[Harm]:
    """At each border, and one byte before and behind it."""
    places = [
        (of, border + by)
        for of, sizes in (("server", SERVER), ("asker", ASKER))
        for border in itertools.accumulate(sizes, initial=0)
        for by in (-1, 0, 1)
        if border + by >= 0
    ]
    return [Harm(*place, then) for place, then in itertools.product(places, HARMS)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with opened(tmp_path_factory.mktemp("harm")) as world:
        yield world


def test_the_borders_are_where_they_are_said_to_be(world: World) -> None:
    with closing(Proxy(world.server.address)) as proxy, closing(Reader(world.trust, proxy.address, 30.0)) as reader:
        assert all(reader.find())
        assert all(reader.start()())
        assert (proxy.passed, proxy.asked) == (sum(SERVER), sum(ASKER))


def harmed(world: World, harm: Harm) -> None:
    with closing(Proxy(world.server.address)) as proxy, closing(Reader(world.trust, proxy.address, 0.4)) as reader:
        proxy.harm(harm.place, harm.then, of=harm.of)
        reader.find()
        if not all(reader.start()()):
            assert reader.tier.statistics().reasons, harm


def harmed_at_all(world: World, harms: Sequence[Harm]) -> None:
    with ThreadPoolExecutor(6) as threads:
        for done in [threads.submit(harmed, world, harm) for harm in harms]:
            done.result()
    world.check()


def test_harm_at_borders(world: World) -> None:
    harmed_at_all(world, Random(25).sample(everywhere(), 100))


@pytest.mark.long
def test_harm_at_all_borders(world: World) -> None:
    harmed_at_all(world, everywhere())


def test_bytes_that_drip_are_late_and_not_waited_for(world: World) -> None:
    """Something arrives all the time, in either direction: the deadline is of the whole request."""
    with closing(Proxy(world.server.address)) as proxy, closing(Reader(world.trust, proxy.address, 0.4)) as reader:
        proxy.slow(7, 0.02)
        assert not any(reader.find())
        assert not any(reader.start()())
    until(lambda: world.server.statistics().connections == world.connections)
    world.check()
