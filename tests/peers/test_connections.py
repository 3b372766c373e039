"""How many connections a node reads over, and with how many requests."""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvtide import config
from kvtide.block import BlockKey
from kvtide.config import Peers
from kvtide.testing.blocks import aligned, content
from kvtide.testing.caller import CallerAnswer
from kvtide.tiers.base import Read, ReadResult
from kvtide.tiers.peers import link
from kvtide.tiers.peers import tier as tier_module
from kvtide.tiers.peers.tier import PeerTier, connections_of
from kvtide.tiers.peers.trust import PeerTrust
from kvtide.transfer import promotion, second_reads
from tests.peers.nodes import Stores
from tests.peers.test_records import GEOMETRY, LAYOUT, MODEL, WHO, read


def processors(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))


def peers(**settings: Any) -> Peers:
    return config.read(None, env={}, peers=settings).peers


@pytest.mark.parametrize(
    ("count", "settings", "expected"),
    [
        (1, {}, 2),
        (3, {}, 2),
        (4, {}, 4),
        (64, {}, 4),
        (64, {"certificate": "host.pem"}, 2),
        (64, {"fabric": "auto"}, 2),
        (2, {"connections": 7}, 7),
        (64, {"connections": 1, "certificate": "host.pem"}, 1),
    ],
)
def test_connections_follow_from_settings_and_processors(
    monkeypatch: pytest.MonkeyPatch, count: int, settings: dict[str, Any], expected: int
) -> None:
    processors(monkeypatch, count)
    assert connections_of(peers(**settings)) == expected


def test_many_small_blocks_take_few_requests(tmp_path: Path) -> None:
    """Each request has 64 of them, as many as a node grants."""
    tokens = list(range(130 * LAYOUT.block_tokens))
    with Stores(tmp_path, timeout=30.0) as stores:
        store, server = stores.serving()
        with store.session(MODEL) as session:
            session.store(tokens, [content(b"%d" % n, GEOMETRY.nbytes) for n in range(130)])
            keys = [BlockKey(bytes(digest) + WHO.group) for digest in session.chain(tokens).digests]
        with closing(server):
            results, *_ = read(store, server.address, keys)
            assert results == [True] * 130
            assert server.statistics().requests == 3


def test_connections_that_share_a_link_have_the_time_of_all_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second for each 16 MiB of a read, not of what one of its four connections brings."""
    for module in (link, tier_module):
        monkeypatch.setattr(module, "SLOWEST", 1 << 20)
    count = (4 << 20) // GEOMETRY.footprint
    tokens = list(range(count * LAYOUT.block_tokens))
    with Stores(tmp_path, timeout=30.0) as stores:
        store, server = stores.serving(dram={"budget": "128MiB", "segment": "1MiB"})
        with store.session(MODEL) as session:
            session.store(tokens, [content(b"%d" % n, GEOMETRY.nbytes) for n in range(count)])
            keys = [BlockKey(bytes(digest) + WHO.group) for digest in session.chain(tokens).digests]
        proxy = stores.proxy(server)
        proxy.slow(32 << 10, 0.08)  # 0.4 MiB/s for each connection
        answer: CallerAnswer[ReadResult] = CallerAnswer(count)
        trust = PeerTrust(store.config.peers, store.config.security)
        began = time.monotonic()
        with closing(PeerTier(proxy.address, trust, connections=4, timeout=1.0)) as tier:
            tier.read([Read(key, WHO, 0, aligned(GEOMETRY.footprint)) for key in keys], answer)
            assert list(answer.wait()) == [True] * count
            assert not tier.away
        assert time.monotonic() - began > 1.0 + 1.0, "else it was no test"


def test_no_block_waits_so_long_for_a_connection_that_it_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of large blocks many batches fit into what is under way, and each must begin before its own deadline."""
    monkeypatch.setattr(promotion, "_CHUNK", 2 * GEOMETRY.footprint)
    for module in (link, tier_module, second_reads):
        monkeypatch.setattr(module, "SLOWEST", 2 * GEOMETRY.footprint)
    count = 40
    tokens = list(range(count * LAYOUT.block_tokens))
    with Stores(tmp_path, timeout=30.0) as stores:
        one, server = stores.serving()
        proxy = stores.proxy(server)
        two = stores.store(proxy.address, peers={"timeout": 1.0, "connections": 4})
        with one.session(MODEL) as first, two.session(MODEL) as second:
            first.store(tokens, [content(b"%d" % n, GEOMETRY.nbytes) for n in range(count)])
            with second.match(tokens, wait=30, prefill=0) as match:
                assert match.blocks == count
                proxy.slow(12 << 10, 0.08)  # 0.4 s for each block
                began = time.monotonic()
                assert second.load(match).wait(60).tokens == len(tokens)
                assert time.monotonic() - began > 1.5 * 1.0 + 1.0, "else it was no test"
